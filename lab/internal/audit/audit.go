package audit

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// unitsFile is where the daemon keeps which units belong to which card.
const unitsFile = "/var/lib/divvy/units-enflame.com_gcu-memory.json"

// Auditor reads the books of the lab's node.
type Auditor struct{ lab *testenv.Env }

// New returns an auditor of the lab's node.
func New(s *testenv.Env) *Auditor { return &Auditor{s} }

// Books are what all sources say at about one time.
type Books struct {
	// Cards are the cards that the node publishes.
	Cards []Card
	Pods  []Pod
	// Given is kubelet's word.
	Given []Given
	Units Units
	// Inspect is the extender's word.
	Inspect Node
}

// Card is one card as the node publishes it.
type Card struct {
	Index int    `json:"index"`
	UUID  string `json:"id"`
	Units int64  `json:"units"`
}

// Pod is one pod that uses the resource and has not ended.
type Pod struct {
	Namespace, Name, UID string
	// Units is what it counts for, from its specification.
	Units       int64
	Annotations map[string]string
	Containers  []Container
}

// Container is one container of a Pod that asks for units.
type Container struct {
	Name  string
	Units int64
	// Listed is true for those that kubelet lists: all but plain init
	// containers.
	Listed bool
	// Started is false while the container has not run.
	Started bool
	Sight   Sight
}

// Read reads all sources.
func (a *Auditor) Read(ctx context.Context) (Books, error) {
	var b Books
	node, err := a.lab.Node.Get(ctx)
	if err != nil {
		return b, err
	}
	if b.Cards, err = cardsOf(node.Annotations["divvy.dev/inventory"]); err != nil {
		return b, err
	}
	if b.Units, err = readUnits(unitsFile); err != nil {
		return b, err
	}
	onNode := metav1.ListOptions{FieldSelector: "spec.nodeName=" + layout.NodeName}
	pods, err := a.lab.Client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, onNode)
	if err != nil {
		return b, fmt.Errorf("list the node's pods: %w", err)
	}
	for i := range pods.Items {
		pod := &pods.Items[i]
		if testenv.Ended(pod) || testenv.Units(pod) == 0 {
			continue
		}
		one, err := a.readPod(ctx, pod)
		if err != nil {
			return b, err
		}
		b.Pods = append(b.Pods, one)
	}
	asking, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if b.Given, err = askKubelet(asking); err != nil {
		return b, err
	}
	if b.Inspect, err = a.Inspect(ctx); err != nil {
		return b, err
	}
	return b, nil
}

func (a *Auditor) readPod(ctx context.Context, pod *corev1.Pod) (Pod, error) {
	one := Pod{
		Namespace: pod.Namespace, Name: pod.Name, UID: string(pod.UID),
		Units: testenv.Units(pod), Annotations: pod.Annotations,
	}
	statuses := map[string]corev1.ContainerStatus{}
	for _, status := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		statuses[status.Name] = status
	}
	add := func(c *corev1.Container, listed bool) error {
		quantity := c.Resources.Limits[product.Resource]
		if quantity.IsZero() {
			return nil
		}
		container := Container{Name: c.Name, Units: quantity.Value(), Listed: listed}
		status := statuses[c.Name]
		if container.Started = status.State.Running != nil || status.State.Terminated != nil; container.Started {
			sight, err := a.see(ctx, status)
			if err != nil {
				return fmt.Errorf("container %s of pod %s/%s: %w", c.Name, pod.Namespace, pod.Name, err)
			}
			container.Sight = sight
		}
		one.Containers = append(one.Containers, container)
		return nil
	}
	for i := range pod.Spec.InitContainers {
		c := &pod.Spec.InitContainers[i]
		sidecar := c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
		if err := add(c, sidecar); err != nil {
			return Pod{}, err
		}
	}
	for i := range pod.Spec.Containers {
		if err := add(&pod.Spec.Containers[i], true); err != nil {
			return Pod{}, err
		}
	}
	return one, nil
}

func cardsOf(annotation string) ([]Card, error) {
	var inventory struct {
		Resources []struct {
			Resource string `json:"resource"`
			Devices  []Card `json:"devices"`
		} `json:"resources"`
	}
	if err := json.Unmarshal([]byte(annotation), &inventory); err != nil {
		return nil, fmt.Errorf("the cards that the node publishes, %q: %w", annotation, err)
	}
	for _, r := range inventory.Resources {
		if r.Resource == string(product.Resource) {
			return r.Devices, nil
		}
	}
	return nil, fmt.Errorf("the node publishes no %s", product.Resource)
}

// Check reads the books and returns an error that lists where they differ, a
// line each, or nil. It is for times at which no pod is being started or
// ended.
func (a *Auditor) Check(ctx context.Context, injection Injection) (Books, error) {
	books, err := a.Read(ctx)
	if err != nil {
		return books, err
	}
	return books, differences(Compare(books, injection))
}
