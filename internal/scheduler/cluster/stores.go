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

var (
	_ cache.TransformingStore = podStore{}
	_ cache.TransformingStore = nodeStore{}
)

// slimPod is a pod reduced to what a State needs. A reflector that streams
// the first list keeps all of it until the end, in this form.
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

// podStore is a State as a reflector of pods writes into it.
type podStore struct{ state *State }

func (s podStore) slim(obj any) (*slimPod, error) {
	switch pod := obj.(type) {
	case *slimPod:
		return pod, nil
	case *v1.Pod:
		c := &s.state.config
		p := &slimPod{Pod: podOf(pod, c.Resources, c.Capacity != nil), grant: pod.Annotations[wire.GrantAnnotation], runs: kube.MayRun(pod),
			grace: graceOf(pod), comesWithNode: comesWithNode(pod), failed: pod.Status.Phase == v1.PodFailed}
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

// Transformer reduces pods before they are kept.
func (s podStore) Transformer() cache.TransformFunc {
	return func(obj any) (any, error) { return s.slim(obj) }
}

// Add takes in a new pod.
func (s podStore) Add(obj any) error { return s.Update(obj) }

// Update takes in a changed pod.
func (s podStore) Update(obj any) error {
	pod, err := s.slim(obj)
	if err != nil {
		return err
	}
	s.state.mu.Lock()
	defer s.state.mu.Unlock()
	s.state.setPod(pod)
	return nil
}

// Delete takes out a pod that is gone or has ended.
func (s podStore) Delete(obj any) error {
	pod, err := s.slim(obj)
	if err != nil {
		return err
	}
	s.state.mu.Lock()
	defer s.state.mu.Unlock()
	s.state.deletePod(pod, true)
	return nil
}

// Replace takes in a whole list; whatever is not in it is gone. While it runs
// nothing else sees the state.
func (s podStore) Replace(list []any, _ string) error {
	pods := make([]*slimPod, 0, len(list))
	listed := make(map[accel.PodRef]bool, len(list))
	others := map[string]struct{}{}
	for _, obj := range list {
		pod, err := s.slim(obj)
		if err != nil {
			return err
		}
		switch {
		case len(pod.Requests) > 0:
			pods = append(pods, pod)
			listed[pod.Ref] = true
		case s.state.config.Capacity != nil:
			pods = append(pods, pod)
			others[pod.Ref.UID] = struct{}{}
		}
	}
	s.state.mu.Lock()
	defer s.state.mu.Unlock()
	for key, record := range s.state.pods {
		if !listed[record.pod.Ref] {
			s.state.forgetPod(key, record, unseenGrace)
		}
	}
	for uid := range s.state.others {
		if _, still := others[uid]; !still {
			s.state.discharge(uid)
		}
	}
	for _, pod := range pods {
		if pod.Ended && !s.state.podsSynced {
			s.state.learn(pod) // it was placed, too
		}
		s.state.setPod(pod)
	}
	s.state.podsSynced = true
	s.state.learnRead()
	return nil
}

// Resync has nothing to do: the state never lags behind what was written.
func (podStore) Resync() error { return nil }

// slimNode is a node reduced to what a State needs.
type slimNode struct {
	name, inventory, ending string
	labels                  map[string]string
	// cpu and memory are what the node has for pods, in millicores and MiB,
	// where they are counted.
	cpu, memory int64
}

// GetObjectMeta lets the reflector's first store find the node's name.
func (n *slimNode) GetObjectMeta() metav1.Object { return &metav1.ObjectMeta{Name: n.name} }

// nodeStore is a State as a reflector of nodes, or of their metadata, writes into it.
type nodeStore struct{ state *State }

func nodeOf(obj any) (*slimNode, error) {
	switch node := obj.(type) {
	case *slimNode:
		return node, nil
	case *metav1.PartialObjectMetadata:
		return &slimNode{name: node.Name, inventory: node.Annotations[wire.InventoryAnnotation],
			ending: node.Annotations[wire.EndingAnnotation], labels: node.Labels}, nil
	case *v1.Node:
		return &slimNode{
			name: node.Name, inventory: node.Annotations[wire.InventoryAnnotation], ending: node.Annotations[wire.EndingAnnotation],
			labels: node.Labels,
			cpu:    max(node.Status.Allocatable.Cpu().MilliValue(), 0), memory: max(node.Status.Allocatable.Memory().Value(), 0) >> 20,
		}, nil
	}
	return nil, fmt.Errorf("the watch of nodes delivered a %T", obj)
}

// Transformer reduces nodes before they are kept.
func (nodeStore) Transformer() cache.TransformFunc {
	return func(obj any) (any, error) { return nodeOf(obj) }
}

// Add takes in a new node.
func (s nodeStore) Add(obj any) error { return s.Update(obj) }

// Update takes in a changed node.
func (s nodeStore) Update(obj any) error {
	node, err := nodeOf(obj)
	if err != nil {
		return err
	}
	s.state.mu.Lock()
	defer s.state.mu.Unlock()
	s.state.setNode(node)
	return nil
}

// Delete takes out a node that left the cluster.
func (s nodeStore) Delete(obj any) error {
	node, err := nodeOf(obj)
	if err != nil {
		return err
	}
	s.state.mu.Lock()
	defer s.state.mu.Unlock()
	s.state.deleteNode(node.name)
	return nil
}

// Replace takes in a whole list; whatever is not in it is gone.
func (s nodeStore) Replace(list []any, _ string) error {
	listed := make(map[string]bool, len(list))
	nodes := make([]*slimNode, 0, len(list))
	for _, obj := range list {
		node, err := nodeOf(obj)
		if err != nil {
			return err
		}
		nodes = append(nodes, node)
		listed[node.name] = true
	}
	s.state.mu.Lock()
	defer s.state.mu.Unlock()
	for name := range s.state.nodes {
		if !listed[name] {
			s.state.deleteNode(name)
		}
	}
	for _, node := range nodes {
		s.state.setNode(node)
	}
	s.state.nodesSynced = true
	s.state.learnRead()
	return nil
}

// Resync has nothing to do: the state never lags behind what was written.
func (nodeStore) Resync() error { return nil }
