//go:build e2e

package scheduling

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	quantity "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/lab/internal/simnodes"
)

// Pods of 12 units are expected. So what is smaller goes where that leaves room for
// one, although it would fit elsewhere with less left, and although kube-scheduler
// itself prefers the node with more CPU. A pod may ask for another policy, of those
// that there are.
func TestPlacementByDemand(t *testing.T) {
	w := newWorld(t, simnodes.Group{Count: 2, Cards: 1, Units: 16})
	if err := w.nodes.Create(t.Context(), w.client); err != nil {
		t.Fatal(err)
	}
	// kube-scheduler weighs, as the extender's weight lets it.
	e := w.extender("--policy=fragmentation", `--demand=[{"units":12,"cpu":"100m","memory":"128Mi","share":1}]`, "--choose-node=false")
	e.Entry.Weight = 200
	w.scheduler("default-scheduler", e)
	first, second := w.nodes.NodeName(0), w.nodes.NodeName(1)
	create := func(pod *corev1.Pod) {
		t.Helper()
		if _, err := w.client.CoreV1().Pods(pod.Namespace).Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	// goes waits until the pod is bound, and checks where.
	goes := func(pod *corev1.Pod, want string) {
		t.Helper()
		create(pod)
		var node string
		w.eventually("pod "+pod.Name+" is bound", func(ctx context.Context) error {
			now, err := w.client.CoreV1().Pods(pod.Namespace).Get(ctx, pod.Name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			if node = now.Spec.NodeName; node == "" {
				return fmt.Errorf("its conditions are %+v", now.Status.Conditions)
			}
			return nil
		})
		if node != want {
			t.Errorf("pod %s is on %s, want %s", pod.Name, node, want)
		}
	}
	asking := func(name string, units accel.Units, policy string) *corev1.Pod {
		pod := w.nodes.Pod(namespace, name, units)
		if policy != "" {
			pod.Annotations = map[string]string{wire.PolicyAnnotation: policy}
		}
		return pod
	}
	on := func(pod *corev1.Pod, node string) *corev1.Pod {
		pod.Spec.NodeSelector = map[string]string{corev1.LabelHostname: node}
		return pod
	}

	beside := on(w.nodes.Pod(metav1.NamespaceDefault, "beside", 1), second)
	amounts := corev1.ResourceList{corev1.ResourceCPU: quantity.MustParse("100"), corev1.ResourceMemory: quantity.MustParse("800Gi")}
	beside.Spec.Containers[0].Resources = corev1.ResourceRequirements{Requests: amounts, Limits: amounts}
	goes(beside, second)
	goes(on(asking("holds", 2, ""), first), first)

	goes(asking("demand", 4, ""), second)         // 14 and 16 are free: 10 would be room for none
	goes(asking("again", 1, ""), first)           // 14 and 12
	goes(asking("fullest", 1, "binpack"), second) // 13 and 12
	create(asking("wrong", 1, "tetris"))
	const sentence = `annotation divvy.dev/placement-policy: "tetris" is not a placement policy; use one of binpack, spread, fragmentation`
	w.eventually("the pod with an unknown policy is refused with a sentence", func(ctx context.Context) error {
		pod, err := w.client.CoreV1().Pods(namespace).Get(ctx, "wrong", metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range pod.Status.Conditions {
			if c.Type == corev1.PodScheduled && strings.Contains(c.Message, sentence) {
				return nil
			}
		}
		return fmt.Errorf("its conditions are %+v", pod.Status.Conditions)
	})

	// Each pod counts once, the one on no device as well, whatever was asked about it.
	seen, err := counter(t.Context(), e.Metrics, `divvy_extender_demand_seen_pods_total{resource="`+resource+`"}`)
	if err != nil || seen != 5 {
		t.Errorf("%d pods were learned from, %v; want 5", seen, err)
	}
	w.right()
}
