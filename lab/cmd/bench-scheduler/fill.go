package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
)

const (
	// filled is the namespace of fillers, which stay from phase to phase.
	filled = "filled"
	// settle is how long pods that fit nowhere may take to be rejected.
	settle = 5 * time.Minute
)

// classes makes the PriorityClasses of pods.
func (b *bench) classes(ctx context.Context) error {
	for name, value := range map[string]int32{lowClass: -10, highClass: 1000} {
		class := &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Value: value}
		if _, err := b.client.SchedulingV1().PriorityClasses().Create(ctx, class, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("make PriorityClass %s: %w", name, err)
		}
	}
	return nil
}

func (b *bench) key() ([]byte, error) {
	path, err := b.plane.GrantKey()
	if err != nil {
		return nil, err
	}
	key, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the key of grants: %w", err)
	}
	return key, nil
}

// fill binds a filler to each node that has none, with the grant that Divvy would have written.
func (b *bench) fill(ctx context.Context) error {
	key, err := b.key()
	if err != nil {
		return err
	}
	signer, err := wire.NewSigner(key)
	if err != nil {
		return fmt.Errorf("the key of grants: %w", err)
	}
	pods := b.client.CoreV1().Pods(filled)
	list, err := pods.List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list pods: %w", err)
	}
	has := map[string]bool{}
	for i := range list.Items {
		has[list.Items[i].Spec.NodeName] = true
	}
	making, ctx := errgroup.WithContext(ctx)
	making.SetLimit(creators)
	for number := range b.nodes.Count {
		node := b.nodes.NodeName(number)
		if has[node] {
			continue
		}
		making.Go(func() error {
			pod, err := pods.Create(ctx, filler.pod(&b.nodes, filled, "on-"+node), metav1.CreateOptions{})
			if err != nil {
				return fmt.Errorf("fill %s: %w", node, err)
			}
			grant := accel.Grant{
				Resource: resource, Node: node, Device: b.nodes.DeviceID(number, 0), DeviceUnits: cardUnits, Units: filler.units,
				At: time.Now(),
			}
			for card := 1; card < cardsPerNode; card++ {
				device := b.nodes.DeviceID(number, card)
				grant.More = append(grant.More, accel.GrantedDevice{Device: device, Index: card, DeviceUnits: cardUnits})
			}
			text, err := signer.EncodeGrant(string(pod.UID), grant)
			if err != nil {
				return fmt.Errorf("fill %s: %w", node, err)
			}
			if err := pods.Bind(ctx, &corev1.Binding{
				ObjectMeta: metav1.ObjectMeta{Name: pod.Name, Annotations: map[string]string{wire.GrantAnnotation: text}},
				Target:     corev1.ObjectReference{Kind: "Node", Name: node},
			}, metav1.CreateOptions{}); err != nil {
				return fmt.Errorf("fill %s: %w", node, err)
			}
			return nil
		})
	}
	return making.Wait()
}

// wait makes pods that fit nowhere, and returns when the scheduler has rejected each.
func (b *bench) wait(ctx context.Context, scheduler string, count int) error {
	making, creating := errgroup.WithContext(ctx)
	making.SetLimit(creators)
	for i := range count {
		making.Go(func() error {
			pod := filler.pod(&b.nodes, namespace, fmt.Sprintf("wait-%06d", i))
			pod.Spec.SchedulerName = scheduler
			if _, err := b.client.CoreV1().Pods(namespace).Create(creating, pod, metav1.CreateOptions{}); err != nil {
				return fmt.Errorf("make a pod that waits: %w", err)
			}
			return nil
		})
	}
	if err := making.Wait(); err != nil {
		return err
	}
	return poll.Until(ctx, settle, "pods that fit nowhere to be rejected", func(ctx context.Context) error {
		list, err := b.client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName="})
		if err != nil {
			return fmt.Errorf("list pods: %w", err)
		}
		rejected := 0
		for i := range list.Items {
			for _, c := range list.Items[i].Status.Conditions {
				if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
					rejected++
				}
			}
		}
		if rejected < count {
			return fmt.Errorf("%d of %d are", rejected, count)
		}
		return nil
	})
}

// empty deletes all pods of a namespace at once, as no kubelet runs them, and their claims.
func (b *bench) empty(ctx context.Context, namespace string) error {
	pods := b.client.CoreV1().Pods(namespace)
	if err := pods.DeleteCollection(ctx, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}, metav1.ListOptions{}); err != nil {
		return fmt.Errorf("delete pods: %w", err)
	}
	left, err := pods.List(ctx, metav1.ListOptions{Limit: 1})
	if err == nil && len(left.Items) > 0 {
		err = errors.New("some are left")
	}
	if err != nil {
		return fmt.Errorf("delete pods: %w", err)
	}
	if b.options.claims() {
		return b.free(ctx, namespace)
	}
	return nil
}
