package picture

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/report/why"
)

// MaxWaiting bounds the pods that wait in a Change; the oldest are in it.
const MaxWaiting = 500

// Waiting is a pod without a node that requests an extended resource.
type Waiting struct {
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	Since     time.Time `json:"since"`
	// Request is for people: "20 enflame.com/gcu-memory".
	Request string `json:"request"`
	// Reason is a clause, from why if Explained and else from kube-scheduler.
	Reason    string `json:"reason"`
	Explained bool   `json:"explained,omitempty"`
}

// Change is what is new since a revision.
type Change struct {
	// Nodes are Node values as JSON, by name; Gone are nodes that do not exist any more.
	Nodes [][]byte
	Gone  []string
	// Waiting are all pods that wait, the oldest first, and WaitingTotal counts them; nil if they
	// are as before.
	Waiting      []Waiting
	WaitingTotal int
}

// Cluster holds the newest nodes and pods. All methods are safe for concurrent use. Objects that
// it got must not be changed.
type Cluster struct {
	// hidden is true if nodes may not be read: they are drawn from the pods on them.
	hidden bool

	mu    sync.Mutex // guards what follows
	nodes map[string]*node
	pods  map[types.NamespacedName]*v1.Pod
	// waiting are those of pods that wait, and reasons what why says of them, by UID.
	waiting map[types.NamespacedName]*v1.Pod
	reasons map[types.UID]string
	// gone are the revisions at which nodes were removed.
	gone map[string]uint64
	// revision grows with each change, waitingAt is that of the last change of waiting, and objects
	// that of the last node or pod.
	revision, waitingAt, objects uint64
	// changed is closed and replaced at each change.
	changed chan struct{}
}

// node is a node, and what is drawn of it.
type node struct {
	object *v1.Node // nil if it is not known
	pods   map[types.NamespacedName]*v1.Pod
	use    *wire.UsageReport
	// node is what is drawn of it, and drawn the same as JSON, which was new at revision.
	node     Node
	drawn    []byte
	revision uint64
	// stale is true until node shows the newest objects, and unmeasured until it shows the newest use.
	stale, unmeasured bool
}

// NewCluster returns one without nodes; hidden says that nodes may not be read, so that they are
// drawn from the pods on them.
func NewCluster(hidden bool) *Cluster {
	return &Cluster{
		hidden: hidden, nodes: map[string]*node{}, pods: map[types.NamespacedName]*v1.Pod{}, waiting: map[types.NamespacedName]*v1.Pod{},
		reasons: map[types.UID]string{}, gone: map[string]uint64{}, changed: make(chan struct{}),
	}
}

// moved says that a node or a pod changed. c.mu is held.
func (c *Cluster) moved() {
	c.touch()
	c.objects = c.revision
}

// touch says that something changed. c.mu is held.
func (c *Cluster) touch() {
	c.revision++
	close(c.changed)
	c.changed = make(chan struct{})
}

// Changed returns a channel that is closed at the next change.
func (c *Cluster) Changed() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.changed
}

// Wake closes the channel of Changed although nothing here has changed.
func (c *Cluster) Wake() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.touch()
}

// at returns a node that is to be drawn again, which it adds if there is none. c.mu is held.
func (c *Cluster) at(name string) *node {
	n := c.nodes[name]
	if n == nil {
		n = &node{pods: map[types.NamespacedName]*v1.Pod{}}
		c.nodes[name] = n
	}
	n.stale = true
	return n
}

// SetNode takes in a new or changed node.
func (c *Cluster) SetNode(object *v1.Node) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at(object.Name).object = object
	c.moved()
}

// DeleteNode takes out a node.
func (c *Cluster) DeleteNode(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n := c.nodes[name]; n != nil {
		n.object, n.use, n.stale = nil, nil, true
		c.moved()
	}
}

// SetPod takes in a new or changed pod.
func (c *Cluster) SetPod(pod *v1.Pod) {
	c.mu.Lock()
	defer c.mu.Unlock()
	key := types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}
	reason, explained := c.reasons[pod.UID]
	c.drop(key)
	c.pods[key] = pod
	ended := pod.Status.Phase == v1.PodSucceeded || pod.Status.Phase == v1.PodFailed
	switch {
	case len(extended(pod)) == 0, ended:
	case pod.Spec.NodeName != "":
		c.at(pod.Spec.NodeName).pods[key] = pod
	case pod.DeletionTimestamp == nil:
		c.waiting[key] = pod
		c.waitingAt = c.revision + 1
		if explained { // until it is explained again
			c.reasons[pod.UID] = reason
		}
	}
	c.moved()
}

// DeletePod takes out a pod.
func (c *Cluster) DeletePod(namespace, name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	key := types.NamespacedName{Namespace: namespace, Name: name}
	c.drop(key)
	delete(c.pods, key)
	c.moved()
}

// drop removes what is known of a pod from its node and from those that wait. c.mu is held.
func (c *Cluster) drop(key types.NamespacedName) {
	before := c.pods[key]
	if before == nil {
		return
	}
	if _, waited := c.waiting[key]; waited {
		delete(c.waiting, key)
		delete(c.reasons, before.UID)
		c.waitingAt = c.revision + 1
	}
	if n := c.nodes[before.Spec.NodeName]; n != nil && n.pods[key] != nil {
		delete(n.pods, key)
		n.stale = true
	}
}

// extended returns the extended resources that the pod's containers request.
func extended(pod *v1.Pod) []accel.Resource {
	var out []accel.Resource
	for _, containers := range [][]v1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range containers {
			for name, amount := range containers[i].Resources.Limits {
				domain, _, named := strings.Cut(string(name), "/")
				if !named || domain == "kubernetes.io" || strings.HasSuffix(domain, ".kubernetes.io") || amount.Sign() <= 0 ||
					slices.Contains(out, accel.Resource(name)) {
					continue
				}
				out = append(out, accel.Resource(name))
			}
		}
	}
	slices.Sort(out)
	return out
}

// SetUse takes in what is in use of a node's devices, nil if that is not known.
func (c *Cluster) SetUse(name string, report *wire.UsageReport) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n := c.nodes[name]; n != nil && n.object != nil {
		n.use, n.unmeasured = report, true
		c.touch()
	}
}

// SetReason takes in why a pod waits, unless another has its name now.
func (c *Cluster) SetReason(pod *v1.Pod, reason string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.waiting[types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}]
	if before, had := c.reasons[pod.UID]; now == nil || now.UID != pod.UID || had && before == reason {
		return
	}
	c.reasons[pod.UID] = reason
	c.waitingAt = c.revision + 1
	c.touch()
}

// Since returns what has changed since a revision, 0 for all, and the revision that it leads to.
func (c *Cluster) Since(revision uint64) (Change, uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out Change
	// In the order of names, so that what a page gets first stays first.
	for _, name := range slices.Sorted(maps.Keys(c.nodes)) {
		n := c.nodes[name]
		if n.stale || n.unmeasured {
			c.draw(name, n)
		}
		if n.drawn != nil && n.revision > revision {
			out.Nodes = append(out.Nodes, n.drawn)
		}
	}
	for name, at := range c.gone {
		if at > revision && revision > 0 {
			out.Gone = append(out.Gone, name)
		}
	}
	slices.Sort(out.Gone)
	if c.waitingAt > revision || revision == 0 {
		out.Waiting, out.WaitingTotal = c.waitingList(), len(c.waiting)
	}
	return out, c.revision
}

// draw computes a node again. It is shown if it has devices. c.mu is held.
func (c *Cluster) draw(name string, n *node) {
	if n.stale {
		pods := slices.SortedFunc(maps.Values(n.pods), func(a, b *v1.Pod) int { return cmp.Compare(a.UID, b.UID) })
		switch {
		case n.object != nil:
			n.node = NodeOf(n.object, pods)
		case c.hidden:
			n.node = unseen(name, pods)
		default:
			n.node = Node{}
		}
	}
	n.node.Measure(n.use)
	n.stale, n.unmeasured = false, false
	var drawn []byte
	if len(n.node.Devices) > 0 || n.node.Problem != "" {
		var err error
		if drawn, err = json.Marshal(n.node); err != nil { // of strings, numbers and times: none
			drawn = nil
		}
	}
	if n.object == nil && len(n.pods) == 0 {
		delete(c.nodes, name)
	}
	if bytes.Equal(drawn, n.drawn) {
		return
	}
	c.revision++
	if drawn == nil {
		c.gone[name] = c.revision
	} else {
		delete(c.gone, name)
	}
	n.drawn, n.revision = drawn, c.revision
}

// waitingPods are the pods that wait, the oldest first. c.mu is held.
func (c *Cluster) waitingPods() []*v1.Pod {
	return slices.SortedFunc(maps.Values(c.waiting), func(a, b *v1.Pod) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Namespace, b.Namespace),
			cmp.Compare(a.Name, b.Name))
	})
}

// waitingList is never nil. c.mu is held.
func (c *Cluster) waitingList() []Waiting {
	pods := c.waitingPods()
	out := make([]Waiting, 0, min(len(pods), MaxWaiting))
	for _, pod := range pods[:min(len(pods), MaxWaiting)] {
		w := Waiting{Namespace: pod.Namespace, Name: pod.Name, Since: pod.CreationTimestamp.UTC()}
		for i, name := range extended(pod) {
			if i > 0 {
				w.Request += ", "
			}
			w.Request += fmt.Sprintf("%d %s", kube.RequestOf(pod, name).Peak(), name)
		}
		if w.Reason, w.Explained = c.reasons[pod.UID]; !w.Explained {
			for _, condition := range pod.Status.Conditions {
				if condition.Type == v1.PodScheduled {
					w.Reason = condition.Message
				}
			}
		}
		out = append(out, w)
	}
	return out
}

// Objects returns a number that grows with each change of a node or pod.
func (c *Cluster) Objects() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.objects
}

// Waits reports whether any pod waits.
func (c *Cluster) Waits() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.waiting) > 0
}

// Snapshot returns all nodes and pods as why reads them, and the pods in Waiting of a Change. Taken
// and what concerns rights are the caller's.
func (c *Cluster) Snapshot() (s *why.Snapshot, waiting []*v1.Pod) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s = &why.Snapshot{Pods: make([]v1.Pod, 0, len(c.pods)), Nodes: make([]v1.Node, 0, len(c.nodes))}
	for _, n := range c.nodes {
		if n.object != nil {
			s.Nodes = append(s.Nodes, *n.object)
		}
	}
	for _, pod := range c.pods {
		s.Pods = append(s.Pods, *pod)
	}
	waiting = c.waitingPods()
	return s, waiting[:min(len(waiting), MaxWaiting)]
}

// Names returns the nodes that may be asked for the use of their devices.
func (c *Cluster) Names() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []string
	for name, n := range c.nodes {
		if n.object != nil && n.object.Annotations[wire.InventoryAnnotation] != "" {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}
