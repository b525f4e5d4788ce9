package cluster

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/pager"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// View is what nodes publish and pods carry, of all resources, read once for a
// report. What pods hold of a resource that is counted in memory is in the
// ledger that LoadView was given; what they hold of the others is here, since a
// pod may hold several whole devices or slices.
type View struct {
	// Inventories are what each node publishes, by node; a node that publishes
	// nothing is not in it.
	Inventories map[string][]accel.Inventory
	// Broken says, by node, why what it publishes cannot be read.
	Broken map[string]error
	// Holders are pods on nodes, in the order of the API server.
	Holders []Holder
}

// Holder is a pod on a node that asks for whole devices or time slices.
type Holder struct {
	Pod     accel.PodRef
	Created time.Time
	Node    string
	// Requests are what it asks of the resources that its node publishes as
	// whole devices or time slices.
	Requests []accel.Request
	// Held are the ids that it holds, by resource, as the node has noted on the
	// pod; empty until it has.
	Held map[accel.Resource][]string
}

// LoadView reads all nodes and the pods that have not ended.
func LoadView(ctx context.Context, clients kube.Clients, ledger Ledger, grants Grants) (View, error) {
	l := newViewLoader()
	err := eachItem(ctx, "nodes", func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
		return clients.Metadata.Resource(nodesResource).List(ctx, o)
	}, l.node)
	if err != nil {
		return View{}, err
	}
	l.nodesRead(ledger, grants)
	err = eachItem(ctx, "pods", func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
		o.FieldSelector = running
		return clients.Kubernetes.CoreV1().Pods(metav1.NamespaceAll).List(ctx, o)
	}, l.pod)
	if err != nil {
		return View{}, err
	}
	return l.finish()
}

// ViewOf is LoadView of one node and its pods, which were read before.
func ViewOf(node *v1.Node, pods []*v1.Pod, ledger Ledger, grants Grants) (View, error) {
	l := newViewLoader()
	if err := l.node(node); err != nil {
		return View{}, err
	}
	l.nodesRead(ledger, grants)
	for _, pod := range pods {
		if err := l.pod(pod); err != nil {
			return View{}, err
		}
	}
	return l.finish()
}

// viewLoader takes in all nodes, then all pods.
type viewLoader struct {
	view        View
	memory      map[accel.Resource]bool // whether it counts memory
	nodes, pods []any
	state       *State
	slim        func(any) (*slimPod, error)
}

func newViewLoader() *viewLoader {
	return &viewLoader{
		view:   View{Inventories: map[string][]accel.Inventory{}, Broken: map[string]error{}},
		memory: map[accel.Resource]bool{},
	}
}

func (l *viewLoader) node(obj runtime.Object) error {
	node, err := nodeOf(obj)
	if err != nil || node.inventory == "" {
		return err
	}
	all, broken := wire.DecodeInventory(node.inventory)
	if broken != nil {
		l.view.Broken[node.name] = broken // the others can be shown
	} else {
		node.decoded = all
		l.nodes = append(l.nodes, node)
		l.view.Inventories[node.name] = all
	}
	for _, inv := range all {
		l.memory[inv.Resource] = l.memory[inv.Resource] || inv.Unit != ""
	}
	return nil
}

// nodesRead says that there are no more nodes.
func (l *viewLoader) nodesRead(ledger Ledger, grants Grants) {
	maps.DeleteFunc(l.memory, func(_ accel.Resource, counted bool) bool { return !counted })
	l.state = NewState(Config{Ledger: ledger, Grants: grants, Resources: slices.Sorted(maps.Keys(l.memory))})
	l.slim = slimPodOf(&l.state.config)
}

func (l *viewLoader) pod(obj runtime.Object) error {
	item, err := l.slim(obj)
	if err != nil {
		return err
	}
	l.pods = append(l.pods, item)
	if pod, ok := obj.(*v1.Pod); ok {
		if h, ok := l.view.holder(pod); ok {
			l.view.Holders = append(l.view.Holders, h)
		}
	}
	return nil
}

func (l *viewLoader) finish() (View, error) {
	if err := l.state.Nodes().Replace(l.nodes, ""); err != nil {
		return View{}, err
	}
	return l.view, l.state.Pods().Replace(l.pods, "")
}

func (v *View) holder(pod *v1.Pod) (Holder, bool) {
	var whole []accel.Resource
	for _, inv := range v.Inventories[pod.Spec.NodeName] {
		if inv.Unit == "" {
			whole = append(whole, inv.Resource)
		}
	}
	h := podOf(pod, whole, false)
	if h.Ended || len(h.Requests) == 0 {
		return Holder{}, false
	}
	// What cannot be read is as good as not written yet: whoever may write the
	// pod may have written it.
	held, err := wire.DecodeDevices(wire.HeldOf(pod.Annotations))
	if err != nil {
		held = nil
	}
	return Holder{Pod: h.Ref, Created: h.Created, Node: h.Node, Requests: h.Requests, Held: held}, true
}

// eachItem lists page by page; pages are thrown away as they come.
func eachItem(ctx context.Context, what string, list pager.ListPageFunc, do func(runtime.Object) error) error {
	if err := pager.New(list).EachListItem(ctx, metav1.ListOptions{}, do); err != nil {
		return fmt.Errorf("list the %s: %w", what, err)
	}
	return nil
}
