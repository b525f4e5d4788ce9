package why

import (
	"maps"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	resourcehelper "k8s.io/component-helpers/resource"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
)

// amounts are amounts of resources: millicores of CPU, units or bytes of others.
type amounts map[v1.ResourceName]int64

func amountsOf(list v1.ResourceList) amounts {
	out := make(amounts, len(list))
	for name, q := range list {
		if name == v1.ResourceCPU {
			out[name] = q.MilliValue()
		} else {
			out[name] = q.Value()
		}
	}
	return out
}

// requestsOf is what kube-scheduler counts a pod with, the pod itself included.
func requestsOf(p *v1.Pod) amounts {
	a := amountsOf(resourcehelper.PodRequests(p, resourcehelper.PodResourcesOptions{UseStatusResources: true}))
	a[v1.ResourcePods] = 1
	return a
}

func (a amounts) add(b amounts, sign int64) {
	for name, n := range b {
		a[name] += sign * n
	}
}

// placedPod is a pod on a node.
type placedPod struct {
	*v1.Pod
	requests amounts
}

// nodeView is a node with the pods on it.
type nodeView struct {
	*v1.Node
	allocatable, used amounts
	pods              []placedPod
	// nominated are pods that wait for others to leave the node for them.
	nominated   []placedPod
	inventories []accel.Inventory
	// broken is why what the node publishes cannot be read.
	broken error
}

// inventory returns what the node publishes of a resource that is counted in memory.
func (n *nodeView) inventory(r accel.Resource) *accel.Inventory {
	for i := range n.inventories {
		if in := &n.inventories[i]; in.Resource == r && in.Unit != "" {
			return in
		}
	}
	return nil
}

// free is what kube-scheduler counts as free of a resource.
func (n *nodeView) free(r v1.ResourceName) int64 { return n.allocatable[r] - n.used[r] }

// without returns the node without some of its pods.
func (n *nodeView) without(gone map[types.UID]bool) *nodeView {
	c := *n
	c.used, c.pods = maps.Clone(n.used), nil
	for _, p := range n.pods {
		if gone[p.UID] {
			c.used.add(p.requests, -1)
		} else {
			c.pods = append(c.pods, p)
		}
	}
	return &c
}

// world is a snapshot as kube-scheduler and the extender see it.
type world struct {
	snapshot *Snapshot
	nodes    []*nodeView // by name
	// pods are those that have not ended.
	pods map[types.UID]*v1.Pod
	// memory are the resources that the extender decides about.
	memory []accel.Resource
	record *record
	ledger *ledger.Ledger
	// repelling are the selectors of required anti-affinity of pods on nodes.
	repelling []*metav1.LabelSelector
}

func newWorld(s *Snapshot) *world {
	w := &world{snapshot: s, pods: make(map[types.UID]*v1.Pod, len(s.Pods)), record: &record{
		inventories: map[string][]accel.Inventory{}, held: map[string][]ledger.Holding{}, nominated: map[string][]nomination{},
	}}
	shared := map[accel.Resource]bool{}
	for i := range accel.Vendors {
		shared[accel.Vendors[i].Memory] = true
	}
	byName := make(map[string]*nodeView, len(s.Nodes))
	w.nodes = make([]*nodeView, len(s.Nodes))
	requests, grants := make([]amounts, len(s.Pods)), make([]accel.Grant, len(s.Pods))
	inParallel(len(s.Nodes), func(i int) {
		n := &nodeView{Node: &s.Nodes[i], allocatable: amountsOf(s.Nodes[i].Status.Allocatable), used: amounts{}}
		if text := n.Annotations[wire.InventoryAnnotation]; text != "" {
			n.inventories, n.broken = wire.DecodeInventory(text)
		}
		w.nodes[i] = n
	})
	inParallel(len(s.Pods), func(i int) {
		p := &s.Pods[i]
		requests[i] = requestsOf(p)
		if text := p.Annotations[wire.GrantAnnotation]; text != "" && p.Spec.NodeName != "" {
			grants[i], _ = wire.DecodeGrantUnverified(text) // a pod with a broken one is on no device
		}
	})
	var listing []any // nodes that list pods which are ending
	for _, n := range w.nodes {
		for _, in := range n.inventories {
			shared[in.Resource] = shared[in.Resource] || in.Unit != ""
		}
		if text := n.Annotations[wire.EndingAnnotation]; text != "" {
			if _, broken := wire.DecodeEnding(text); broken == nil { // others would be logged
				listing = append(listing, &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
					Name: n.Name, Annotations: map[string]string{wire.EndingAnnotation: text}}})
			}
		}
		byName[n.Name] = n
	}
	slices.SortFunc(w.nodes, func(a, b *nodeView) int { return strings.Compare(a.Name, b.Name) })
	for r, is := range shared {
		if is {
			w.memory = append(w.memory, r)
		}
	}
	slices.Sort(w.memory)
	var live []any
	granted := unverified{}
	for i := range s.Pods {
		p := &s.Pods[i]
		if ended(p) {
			continue
		}
		live, w.pods[p.UID] = append(live, p), p
		w.repelling = appendRepelling(w.repelling, p)
		if n := byName[p.Spec.NodeName]; n != nil {
			on := placedPod{p, requests[i]}
			granted[p.Annotations[wire.GrantAnnotation]] = grants[i]
			n.pods = append(n.pods, on)
			n.used.add(on.requests, 1)
		}
		if n := byName[p.Status.NominatedNodeName]; n != nil && p.Spec.NodeName == "" {
			n.nominated = append(n.nominated, placedPod{p, requests[i]})
		}
	}
	state := cluster.NewState(cluster.Config{Ledger: w.record, Grants: granted, Resources: w.memory, Now: w.now})
	// Neither fails for nodes and pods.
	_ = state.Nodes().Replace(listing, "")
	_ = state.Pods().Replace(live, "")
	for _, n := range w.nodes { // decoded once, here
		var counted []accel.Inventory
		for _, in := range n.inventories {
			if slices.Contains(w.memory, in.Resource) {
				counted = append(counted, in)
			}
		}
		if counted != nil {
			w.record.SetNode(n.Name, counted)
		}
	}
	w.ledger = w.copyOf(slices.Collect(maps.Keys(w.record.inventories)), nil, true)
	return w
}

// node is the node of a name, nil for an unknown one.
func (w *world) node(name string) *nodeView {
	i, found := slices.BinarySearchFunc(w.nodes, name, func(n *nodeView, name string) int { return strings.Compare(n.Name, name) })
	if !found {
		return nil
	}
	return w.nodes[i]
}

// pod is the pod of a UID, nil for an unknown one.
func (w *world) pod(uid string) *v1.Pod { return w.pods[types.UID(uid)] }

func (w *world) now() time.Time { return w.snapshot.Taken }

// unverified has the planned allocations by their text, without a look at their signatures.
type unverified map[string]accel.Grant

func (u unverified) DecodeGrant(_, value string) (accel.Grant, error) { return u[value], nil }

// inParallel calls f with 0 to n-1, on all processors.
func inParallel(n int, f func(i int)) {
	workers := runtime.GOMAXPROCS(0)
	var group sync.WaitGroup
	for k := range workers {
		group.Go(func() {
			for i := k; i < n; i += workers {
				f(i)
			}
		})
	}
	group.Wait()
}

// nomination is a pod for which capacity is reserved on a node.
type nomination struct {
	pod     string
	request accel.Request
}

// record keeps what cluster.State writes into a ledger, by node, so that a copy of a few
// nodes costs no more than those.
type record struct {
	inventories map[string][]accel.Inventory
	held        map[string][]ledger.Holding
	nominated   map[string][]nomination
}

func (r *record) SetNode(node string, inventory []accel.Inventory) { r.inventories[node] = inventory }

func (r *record) DeleteNode(node string) { delete(r.inventories, node) }

func (r *record) Observe(h ledger.Holding) { r.held[h.Node] = append(r.held[h.Node], h) }

func (r *record) Nominate(pod, node string, request accel.Request) {
	if node != "" {
		r.nominated[node] = append(r.nominated[node], nomination{pod, request})
	}
}

func (r *record) Unbound(string, string, ledger.Attempt) {}

func (r *record) Forget(string) {}

// copyOf returns a ledger of these nodes alone, without the pods that are gone.
func (w *world) copyOf(nodes []string, gone func(h *ledger.Holding) bool, nominations bool) *ledger.Ledger {
	l := ledger.New(ledger.Options{Now: w.now})
	w.copyInto(l, nodes, gone, nominations)
	return l
}

func (w *world) copyInto(l *ledger.Ledger, nodes []string, gone func(h *ledger.Holding) bool, nominations bool) {
	for _, name := range nodes {
		l.SetNode(name, w.record.inventories[name])
		for i := range w.record.held[name] {
			if h := &w.record.held[name][i]; gone == nil || !gone(h) {
				l.Observe(*h)
			}
		}
		if !nominations {
			continue
		}
		for _, n := range w.record.nominated[name] {
			l.Nominate(n.pod, name, n.request)
		}
	}
}

// anotherNode is the name of a node that does not exist yet.
const anotherNode = "another-node"

// another returns a ledger of a node like one, which has other devices, without the pods that
// are gone.
func (w *world) another(node string, gone func(h *ledger.Holding) bool) *ledger.Ledger {
	l := ledger.New(ledger.Options{Now: w.now})
	id := func(id accel.DeviceID) accel.DeviceID { return anotherNode + "-" + id }
	inventories := slices.Clone(w.record.inventories[node])
	for i := range inventories {
		in := &inventories[i]
		in.Shares = slices.Clone(in.Shares)
		for k := range in.Shares {
			in.Shares[k].ID = id(in.Shares[k].ID)
		}
	}
	l.SetNode(anotherNode, inventories)
	for _, h := range w.record.held[node] {
		if gone(&h) {
			continue
		}
		if h.Node = anotherNode; h.Device != "" {
			h.Device = id(h.Device)
		}
		h.More = slices.Clone(h.More)
		for k := range h.More {
			h.More[k] = id(h.More[k])
		}
		l.Observe(h)
	}
	return l
}

// fits asks a ledger about one node.
func fits(l *ledger.Ledger, r accel.Request, node string) ledger.Verdict {
	var out [1]ledger.Verdict
	l.Fits(r, []string{node}, out[:])
	return out[0]
}

// heldUnits is what a pod holds.
type heldUnits = ledger.Holding
