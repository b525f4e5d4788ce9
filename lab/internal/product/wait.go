package product

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/lab/internal/cluster"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
)

// Names of the chart's workloads.
const (
	nodeDaemonSet      = "divvy-node"
	extenderDeployment = "divvy-extender"
	// schedulerDeployment has the extender where it has a scheduler of its own.
	schedulerDeployment = "divvy-scheduler"
	schedconfDaemonSet  = "divvy-schedconf"
)

// waitRollout waits until the newest version of every pod is ready and no
// older one is left. helm's own --wait is content with as many missing pods as
// an update may take down at once: on one node, all.
func waitRollout(ctx context.Context, timeout time.Duration) error {
	client, err := cluster.Client()
	if err != nil {
		return err
	}
	err = poll.Until(ctx, timeout, "the rollout", func(ctx context.Context) error { return workloadsReady(ctx, client, layout.NodeName) })
	if err != nil {
		return fmt.Errorf("%w\n%s", err, describePods(ctx))
	}
	return nil
}

// workloadsReady looks at all that the chart may have made. What it made depends
// on the values.
func workloadsReady(ctx context.Context, client kubernetes.Interface, nodeName string) error {
	node, err := client.CoreV1().Nodes().Get(ctx, nodeName, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("look at the node: %w", err)
	}
	var errs []error
	found := 0
	for _, name := range []string{nodeDaemonSet, PoolDaemon, schedconfDaemonSet} {
		daemons, err := client.AppsV1().DaemonSets(Namespace).Get(ctx, name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
		case err != nil:
			return fmt.Errorf("look at %s: %w", name, err)
		default:
			found++
			errs = append(errs, daemonSetReady(daemons, node))
		}
	}
	for _, place := range []types.NamespacedName{
		{Namespace: Namespace, Name: extenderDeployment}, {Namespace: Namespace, Name: schedulerDeployment},
		{Namespace: PoolNamespace, Name: PoolWebhook},
	} {
		deployment, err := client.AppsV1().Deployments(place.Namespace).Get(ctx, place.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
		case err != nil:
			return fmt.Errorf("look at %s: %w", place.Name, err)
		default:
			found++
			errs = append(errs, deploymentReady(deployment))
		}
	}
	if found == 0 {
		return errors.New("the chart made no workload")
	}
	return errors.Join(errs...)
}

// unlabel takes the label off the node until the daemon has gone. One that still
// runs may put it back, since it tells of the cards.
func unlabel(ctx context.Context, label string, timeout time.Duration) error {
	client, err := cluster.Client()
	if err != nil {
		return err
	}
	return poll.Until(ctx, timeout, "the node without the label", func(ctx context.Context) error {
		return unlabelled(ctx, client, layout.NodeName, label)
	})
}

// unlabelled returns nil when the node has neither label nor daemon. It takes
// the label off.
func unlabelled(ctx context.Context, client kubernetes.Interface, name, label string) error {
	node, err := client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("look at the node: %w", err)
	}
	if _, labelled := node.Labels[label]; labelled {
		remove, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": map[string]any{label: nil}}})
		if err == nil {
			_, err = client.CoreV1().Nodes().Patch(ctx, name, types.MergePatchType, remove, metav1.PatchOptions{})
		}
		if err != nil {
			return fmt.Errorf("unlabel the node: %w", err)
		}
		return fmt.Errorf("the node had the label %s", label)
	}
	pods, err := client.CoreV1().Pods(Namespace).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=" + nodeDaemonSet})
	if err != nil {
		return fmt.Errorf("look at the pods of %s: %w", nodeDaemonSet, err)
	}
	if len(pods.Items) > 0 {
		return fmt.Errorf("%s still runs", pods.Items[0].Name)
	}
	return nil
}

// Selects returns nil when the node has the labels of the nodes that a DaemonSet runs
// on, otherwise a poll.ErrHopeless that names them.
func Selects(d *appsv1.DaemonSet, node *corev1.Node) error {
	pod := &d.Spec.Template.Spec
	if fits, err := nodeaffinity.NewRequiredNodeAffinity(pod.NodeSelector, pod.Affinity).Match(node); err != nil || !fits {
		return errors.Join(fmt.Errorf("%w: DaemonSet %s does not run on node %s, which has none of the labels that it selects: %v",
			poll.ErrHopeless, d.Name, node.Name, wantedLabels(pod)), err)
	}
	return nil
}

func daemonSetReady(d *appsv1.DaemonSet, node *corev1.Node) error {
	if err := Selects(d, node); err != nil {
		return err
	}
	if s := d.Status; s.ObservedGeneration < d.Generation || s.DesiredNumberScheduled == 0 ||
		s.UpdatedNumberScheduled < s.DesiredNumberScheduled || s.NumberReady < s.DesiredNumberScheduled {
		return fmt.Errorf("%s: of %d pods %d are up to date and %d ready", d.Name, s.DesiredNumberScheduled, s.UpdatedNumberScheduled,
			s.NumberReady)
	}
	return nil
}

// wantedLabels returns the node labels that a pod asks for, for people.
func wantedLabels(pod *corev1.PodSpec) []string {
	var labels []string
	for _, key := range slices.Sorted(maps.Keys(pod.NodeSelector)) {
		labels = append(labels, key+"="+pod.NodeSelector[key])
	}
	if pod.Affinity == nil || pod.Affinity.NodeAffinity == nil ||
		pod.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return labels
	}
	for _, term := range pod.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		for _, e := range term.MatchExpressions {
			if e.Operator == corev1.NodeSelectorOpIn {
				labels = append(labels, e.Key+"="+strings.Join(e.Values, "|"))
			}
		}
	}
	return labels
}

func deploymentReady(d *appsv1.Deployment) error {
	wanted := int32(1)
	if d.Spec.Replicas != nil {
		wanted = *d.Spec.Replicas
	}
	s := d.Status
	if s.ObservedGeneration < d.Generation || s.UpdatedReplicas < wanted || s.ReadyReplicas < wanted || s.Replicas > s.UpdatedReplicas {
		return fmt.Errorf("%s: of %d pods %d are up to date and %d ready", d.Name, wanted, s.UpdatedReplicas, s.ReadyReplicas)
	}
	return nil
}

// Offer is a resource that the node offers.
type Offer struct {
	Resource corev1.ResourceName
	Units    int64
}

// WaitForResources waits until kubelet offers as much of each resource as
// divvy-node has published, and returns what that is.
func WaitForResources(ctx context.Context, timeout time.Duration) ([]Offer, error) {
	client, err := cluster.Client()
	if err != nil {
		return nil, err
	}
	var offers []Offer
	err = poll.Until(ctx, timeout, "the resources of the node", func(ctx context.Context) error {
		offers, err = offered(ctx, client, layout.NodeName)
		return err
	})
	return offers, err
}

func offered(ctx context.Context, client kubernetes.Interface, name string) ([]Offer, error) {
	node, err := client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("look at the node: %w", err)
	}
	published, err := publishedUnits(node)
	if err != nil {
		return nil, err
	}
	if len(published) == 0 {
		return nil, fmt.Errorf("node %s has published no healthy cards", name)
	}
	for _, p := range published {
		if quantity := node.Status.Allocatable[p.Resource]; quantity.Value() != p.Units {
			return nil, fmt.Errorf("of %d published units of %s kubelet offers %d", p.Units, p.Resource, quantity.Value())
		}
	}
	return published, nil
}

func publishedUnits(node *corev1.Node) ([]Offer, error) {
	text, ok := node.Annotations[wire.InventoryAnnotation]
	if !ok {
		return nil, fmt.Errorf("node %s has published no cards", node.Name)
	}
	inventory, err := wire.DecodeInventory(text)
	if err != nil {
		return nil, fmt.Errorf("inventory of node %s: %w", node.Name, err)
	}
	var offers []Offer
	for _, resource := range inventory {
		offer := Offer{Resource: corev1.ResourceName(resource.Resource)}
		for _, share := range resource.Shares {
			if !share.Health.Unhealthy {
				offer.Units += int64(share.Units)
			}
		}
		if offer.Units > 0 {
			offers = append(offers, offer)
		}
	}
	return offers, nil
}
