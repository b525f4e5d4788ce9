package cluster

import (
	"fmt"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// store is a State as a reflector writes into it. T is an object reduced to what the
// State needs; a reflector that streams the first list keeps all of it until the end, in
// this form. What is set while Replace runs is seen by no one else.
type store[T any] struct {
	state *State
	slim  func(obj any) (*T, error)
	// All are called with state.mu held.
	set, remove func(*T)
	replace     func(all []*T)
}

// Transformer reduces objects before they are kept.
func (s store[T]) Transformer() cache.TransformFunc {
	return func(obj any) (any, error) { return s.slim(obj) }
}

// Add takes in a new object.
func (s store[T]) Add(obj any) error { return s.Update(obj) }

// Update takes in a changed object.
func (s store[T]) Update(obj any) error { return s.with(obj, s.set) }

// Delete takes out an object.
func (s store[T]) Delete(obj any) error { return s.with(obj, s.remove) }

func (s store[T]) with(obj any, do func(*T)) error {
	one, err := s.slim(obj)
	if err != nil {
		return err
	}
	s.state.mu.Lock()
	defer s.state.mu.Unlock()
	do(one)
	return nil
}

// Replace takes in a whole list; whatever is not in it is gone.
func (s store[T]) Replace(list []any, _ string) error {
	all := make([]*T, len(list))
	for i, obj := range list {
		var err error
		if all[i], err = s.slim(obj); err != nil {
			return err
		}
	}
	s.state.mu.Lock()
	defer s.state.mu.Unlock()
	s.replace(all)
	s.state.learnRead()
	return nil
}

// Resync has nothing to do: the state never lags behind what was written.
func (store[T]) Resync() error { return nil }

// slimPod is a pod reduced to what a State needs.
type slimPod struct {
	Pod
	// grant is the grant annotation as it is on the pod.
	grant string
	// attempt is how the attempts to place a pod without a node went.
	attempt ledger.Attempt
	// cpu and memory are those of a pod without a shared resource, in
	// millicores and MiB; 0 where they are not counted. Other pods have theirs in
	// Requests.
	cpu, memory int64
	// runs is what MayRun says, and comesWithNode what the function of that name
	// does.
	runs, comesWithNode bool
	// failed is true for a pod that ended so, and owner is the UID of its controller, ""
	// for none.
	failed bool
	owner  types.UID
	// grace is how long the containers may take to end, in seconds.
	grace int32
}

// GetObjectMeta lets the reflector's first store find the pod's name.
func (p *slimPod) GetObjectMeta() metav1.Object {
	return &metav1.ObjectMeta{Namespace: p.Ref.Namespace, Name: p.Ref.Name}
}

func slimPodOf(c *Config) func(any) (*slimPod, error) {
	return func(obj any) (*slimPod, error) {
		switch pod := obj.(type) {
		case *slimPod:
			return pod, nil
		case *v1.Pod:
			p := &slimPod{Pod: podOf(pod, c.Resources, c.Capacity != nil), grant: pod.Annotations[wire.GrantAnnotation],
				runs: kube.MayRun(pod), grace: graceOf(pod), comesWithNode: ComesWithNode(pod), failed: pod.Status.Phase == v1.PodFailed}
			if owner := metav1.GetControllerOfNoCopy(pod); owner != nil {
				p.owner = owner.UID
			}
			if p.Node == "" {
				p.attempt = AttemptOf(pod)
			}
			if len(p.Requests) == 0 {
				p.grant = ""
				if c.Capacity != nil && p.Node != "" {
					p.cpu, p.memory = kube.PeakOf(pod)
				}
			}
			return p, nil
		}
		return nil, fmt.Errorf("the watch of pods delivered a %T", obj)
	}
}

// Pods returns the store that a reflector of pods writes into.
func (s *State) Pods() cache.TransformingStore {
	return store[slimPod]{s, slimPodOf(&s.config), s.setPod, func(p *slimPod) { s.deletePod(p, true) }, func(all []*slimPod) {
		listed := make(map[accel.PodRef]bool, len(all))
		others := map[string]struct{}{}
		for _, pod := range all {
			if len(pod.Requests) > 0 {
				listed[pod.Ref] = true
			} else if s.config.Capacity != nil {
				others[pod.Ref.UID] = struct{}{}
			}
		}
		for key, record := range s.pods {
			if !listed[record.pod.Ref] {
				s.forgetPod(key, record, unseenGrace)
			}
		}
		for uid := range s.others {
			if _, still := others[uid]; !still {
				s.discharge(uid)
			}
		}
		for _, pod := range all {
			if len(pod.Requests) == 0 && s.config.Capacity == nil {
				continue
			}
			if pod.Ended && !s.podsSynced {
				s.learn(pod) // it was placed, too
			}
			s.setPod(pod)
		}
		s.podsSynced = true
	}}
}

// slimNode is a node reduced to what a State needs.
type slimNode struct {
	name, inventory, ending, overuse string
	labels                           map[string]string
	// decoded is inventory where it was decoded before, for a View.
	decoded []accel.Inventory
	// cpu and memory are what the node has for pods, in millicores and MiB,
	// where they are counted.
	cpu, memory int64
}

// GetObjectMeta lets the reflector's first store find the node's name.
func (n *slimNode) GetObjectMeta() metav1.Object { return &metav1.ObjectMeta{Name: n.name} }

func nodeOf(obj any) (*slimNode, error) {
	switch node := obj.(type) {
	case *slimNode:
		return node, nil
	case *metav1.PartialObjectMetadata:
		return &slimNode{name: node.Name, inventory: node.Annotations[wire.InventoryAnnotation],
			ending: node.Annotations[wire.EndingAnnotation], overuse: node.Annotations[wire.OveruseAnnotation], labels: node.Labels}, nil
	case *v1.Node:
		return &slimNode{
			name: node.Name, inventory: node.Annotations[wire.InventoryAnnotation], ending: node.Annotations[wire.EndingAnnotation],
			overuse: node.Annotations[wire.OveruseAnnotation], labels: node.Labels,
			cpu: max(node.Status.Allocatable.Cpu().MilliValue(), 0), memory: max(node.Status.Allocatable.Memory().Value(), 0) >> 20,
		}, nil
	}
	return nil, fmt.Errorf("the watch of nodes delivered a %T", obj)
}

// Nodes returns the store that a reflector of nodes, or of their metadata, writes into.
func (s *State) Nodes() cache.TransformingStore {
	return store[slimNode]{s, nodeOf, s.setNode, func(n *slimNode) { s.deleteNode(n.name) }, func(all []*slimNode) {
		listed := make(map[string]bool, len(all))
		for _, node := range all {
			listed[node.name] = true
		}
		for name := range s.nodes {
			if !listed[name] {
				s.deleteNode(name)
			}
		}
		for _, node := range all {
			s.setNode(node)
		}
		s.nodesSynced = true
	}}
}
