package why

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
)

const (
	// exactPods is up to how many pods of a node every set of them is tried.
	exactPods = 12
	// maxTrials bounds the sets that are looked at, so that an answer about a large cluster
	// takes a second or two. One that is tried on a copy counts as copyTrials.
	maxTrials  = 200_000
	copyTrials = 40
)

// victim is a pod whose end may free enough.
type victim struct {
	pod   *v1.Pod
	parts map[accel.DeviceID]accel.Units
	// beside is how much it holds of what else is short.
	beside int64
}

// byPods are the codes of hindrances that pods of the node cause, and that their end may remove.
var byPods = []Code{CPUOrMemory, Ephemeral, Pods, Ports, InsufficientCapacity}

// movable reports whether pods that end may be what the node needs.
func (j *judged) movable() bool {
	for _, h := range j.hindrances {
		if !slices.Contains(byPods, h.code) {
			return false
		}
	}
	return slices.Contains([]Code{"", NoDeviceFits, InsufficientCapacity, CapacityReserved, Ending, HeldAsOther, UnhealthyDevice}, j.code)
}

// holders are the pods of the node that hold the resource, or what else is short, and stay away
// once they end.
func (c *candidate) holders() []victim {
	var out []victim
	for _, p := range c.n.pods {
		if p.DeletionTimestamp == nil && c.wants(p) && !stays(p.Pod) && !ofSystem(p.Pod) && !related(p.Pod, c.a.pod) {
			v := victim{pod: p.Pod, parts: map[accel.DeviceID]accel.Units{}}
			for i := range c.short {
				v.beside = max(v.beside, p.requests[c.short[i].resource])
			}
			out = append(out, v)
		}
	}
	for _, d := range c.devices {
		for _, held := range d.Pods {
			for i := range out {
				if string(out[i].pod.UID) == held.Pod.UID {
					out[i].parts[d.ID] += held.Units
				}
			}
		}
	}
	slices.SortFunc(out, func(a, b victim) int { return compareVictims(a.pod, b.pod) })
	return out
}

// wants reports whether a pod holds anything that the pod lacks.
func (c *candidate) wants(p placedPod) bool {
	return p.requests[c.a.resource()] > 0 || slices.ContainsFunc(c.short, func(h hindrance) bool {
		switch h.code {
		case Pods:
			return true
		case Ports:
			return len(hostPorts(p.Pod)) > 0
		}
		return p.requests[h.resource] > 0
	})
}

// stays reports whether a pod belongs to its node, and returns at once when it ends.
func stays(p *v1.Pod) bool {
	if _, mirror := p.Annotations[v1.MirrorPodAnnotationKey]; mirror {
		return true
	}
	o := metav1.GetControllerOfNoCopy(p)
	return o != nil && (o.Kind == "DaemonSet" || o.Kind == "Node")
}

// related reports whether pods have the same controller.
func related(p, q *v1.Pod) bool {
	kind, name := controllerOf(p)
	ofKind, ofName := controllerOf(q)
	return kind != "" && kind == ofKind && name == ofName && p.Namespace == q.Namespace
}

// compareVictims orders pods, the one to end first: the lowest priority, then the youngest.
func compareVictims(a, b *v1.Pod) int {
	return cmp.Or(cmp.Compare(corev1helpers.PodPriority(a), corev1helpers.PodPriority(b)),
		b.CreationTimestamp.Compare(a.CreationTimestamp.Time),
		cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
}

// recreated counts the pods that a controller creates again.
func recreated(pods []*v1.Pod) int {
	n := 0
	for _, p := range pods {
		if metav1.GetControllerOfNoCopy(p) != nil {
			n++
		}
	}
	return n
}

// ends is a set of pods of a node whose end admits the pod.
type ends struct {
	n    *nodeView
	pods []*v1.Pod
}

// better orders sets: fewest pods, fewest that a controller recreates, lowest priority,
// youngest.
func better(a, b []*v1.Pod) bool {
	highest := func(pods []*v1.Pod) (priority int32, oldest time.Time) {
		for i, p := range pods {
			if q := corev1helpers.PodPriority(p); i == 0 || q > priority {
				priority = q
			}
			if t := p.CreationTimestamp.Time; i == 0 || t.Before(oldest) {
				oldest = t
			}
		}
		return priority, oldest
	}
	pa, oa := highest(a)
	pb, ob := highest(b)
	return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(recreated(a), recreated(b)), cmp.Compare(pa, pb), ob.Compare(oa)) < 0
}

// candidate is a node of which pods may end for one that waits.
type candidate struct {
	world   *world
	a       *ask
	n       *nodeView
	short   []hindrance // what pods cause besides
	devices []ledger.DeviceUsage
	victims []victim
	least   int // pods that must end at least
}

// newCandidate returns a node with the pods that may end there.
func newCandidate(w *world, a *ask, n *nodeView, short []hindrance) candidate {
	usage, _ := w.ledger.Node(a.shared.Resource, n.Name)
	c := candidate{world: w, a: a, n: n, short: short, devices: usage.Devices}
	c.victims = c.holders()
	return c
}

// endPods is kind 4.
func (s *search) endPods() (Change, bool) {
	if s.a.resource() == "" || s.a.mistake != nil || len(s.a.several) > 0 {
		return Change{}, false
	}
	var all []candidate
	for i := range s.nodes {
		if j := &s.nodes[i]; j.movable() {
			c := newCandidate(s.world, s.a, j.n, j.hindrances)
			if c.least = c.atLeast(c.victims); c.least <= len(c.victims) && len(c.victims) > 0 {
				all = append(all, c)
			}
		}
	}
	slices.SortStableFunc(all, func(a, b candidate) int { return a.least - b.least })
	var best *ends
	trials := maxTrials
	for i := range all {
		c := &all[i]
		if trials <= 0 || best != nil && c.least > len(best.pods) {
			break
		}
		most := len(c.victims)
		if best != nil {
			most = min(most, len(best.pods))
		}
		if len(c.victims) > exactPods {
			if pods := c.greedy(&trials); pods != nil && (best == nil || better(pods, best.pods)) {
				best = &ends{c.n, pods}
			}
			continue
		}
		for size := c.least; size <= most; size++ {
			found := false
			for set := range subsets(len(c.victims), size) {
				pods := podsOf(c.victims, set)
				if trials--; trials <= 0 {
					break
				}
				if best != nil && !better(pods, best.pods) || !c.enough(set) {
					continue
				}
				if trials -= copyTrials; s.world.fitsWithout(c.n, s.a, uidsOf(pods), goneUIDs(uidsOf(pods))) {
					best, found = &ends{c.n, pods}, true
				}
			}
			if found || trials <= 0 {
				break
			}
		}
	}
	if best == nil {
		return Change{}, false
	}
	return s.ending(best), true
}

// ending is the change that a set of pods ends.
func (s *search) ending(b *ends) Change {
	c := Change{Kind: ChangeEnd}
	var texts []string
	may := true
	for _, p := range b.pods {
		text := s.heldText(p)
		if priority := corev1helpers.PodPriority(p); priority > corev1helpers.PodPriority(s.a.pod) {
			text += fmt.Sprintf("; its priority is higher, %d", priority)
		}
		if owner := ownerText(p); owner != "" {
			text += fmt.Sprintf("; %s recreates it", owner)
		}
		if budget, protected := s.snapshot.budgetOf(p); protected {
			text += fmt.Sprintf("; PodDisruptionBudget %s allows no disruption", budget)
		}
		texts = append(texts, fmt.Sprintf("%s/%s (%s)", p.Namespace, p.Name, text))
		may = may && s.snapshot.MayDelete != nil && s.snapshot.MayDelete(p.Namespace)
		may = may && named(p.Namespace, p.Name)
		c.Commands = append(c.Commands, kubectl("delete", "pod", "-n", p.Namespace, p.Name))
	}
	c.Text = "end " + strings.Join(texts, ", ")
	if !may {
		c.Commands, c.By = nil, "a user who may delete the pods"
	}
	c = s.world.placed(c, s.a, b.n, goneUIDs(uidsOf(b.pods)))
	c.Verified = c.Verified && recreated(b.pods) == 0 // which of the two gets the devices, the order of the queue says
	return c
}

// heldText is what a pod holds of what the pod lacks: units, or else CPU and the like.
func (s *search) heldText(p *v1.Pod) string {
	held := requestsOf(p)
	if units := held[s.a.resource()]; units > 0 || s.a.resource() == "" {
		return count(int(units), "unit")
	}
	var parts []string
	for _, name := range []v1.ResourceName{v1.ResourceCPU, v1.ResourceMemory} {
		if held[name] > 0 {
			parts = append(parts, quantity(name, held[name])+" "+string(name))
		}
	}
	return cmp.Or(strings.Join(parts, ", "), "no units")
}

// atLeast is how many of some pods must end on the node at least: enough of the largest on each
// of as many devices as the pod needs.
func (c *candidate) atLeast(victims []victim) int {
	r := c.a.shared
	if r.Resource == "" {
		return 1
	}
	k := max(r.Devices, 1)
	each := r.Peak() / accel.Units(k)
	var counts []int
	for i := range c.devices {
		d := &c.devices[i]
		if d.Health.Unhealthy || !r.Selection.Allows(d.ID, d.Model, d.Isolation.Memory) {
			continue
		}
		var parts []accel.Units
		for _, v := range victims {
			if u := v.parts[d.ID]; u > 0 {
				parts = append(parts, u)
			}
		}
		slices.SortFunc(parts, func(a, b accel.Units) int { return cmp.Compare(b, a) })
		free := d.Units - d.Withheld - d.Used
		need := 0
		for need < len(parts) && free < each {
			free += parts[need]
			need++
		}
		if free >= each {
			counts = append(counts, need)
		}
	}
	if len(counts) < k {
		return len(victims) + 1
	}
	slices.Sort(counts)
	return max(counts[k-1], 1)
}

// enough reports, without a copy, whether the devices would have enough without a set.
func (c *candidate) enough(set []int) bool {
	if c.a.shared.Resource == "" {
		return true
	}
	chosen := make([]victim, len(set))
	for i, at := range set {
		chosen[i] = c.victims[at]
	}
	return c.atLeast(chosen) <= len(set)
}

// greedy ends the largest pods of one device after the other until the pod fits, then those that
// hold most of what else is short, and lets those live that need not end.
func (c *candidate) greedy(trials *int) []*v1.Pod {
	r, n := c.a.shared, c.n
	order := slices.Clone(c.victims)
	var pods []*v1.Pod
	sizes := func(v victim) accel.Units {
		var most accel.Units
		for _, u := range v.parts {
			most = max(most, u)
		}
		return most
	}
	try := func(pods []*v1.Pod) bool {
		gone := uidsOf(pods)
		*trials -= copyTrials
		return *trials > 0 && c.world.fitsWithout(n, c.a, gone, goneUIDs(gone))
	}
	slices.SortStableFunc(order, func(a, b victim) int {
		return cmp.Or(cmp.Compare(sizes(b), sizes(a)), cmp.Compare(b.beside, a.beside))
	})
	var best []*v1.Pod
	in := n.inventory(r.Resource)
	devices := 1
	if in != nil {
		devices = len(in.Shares)
	}
	for d := range devices {
		pods = nil
		onDevice := func(v victim) bool { return in == nil || r.Devices > 1 || v.parts[in.Shares[d].ID] > 0 }
		first, rest := partition(order, onDevice)
		if len(c.short) > 0 {
			first = append(first, rest...)
		}
		fit := false
		for i := 0; i < len(first) && !fit; i++ {
			pods = append(pods, first[i].pod)
			fit = try(pods)
		}
		if !fit {
			continue
		}
		for i := 0; i < len(pods); {
			if rest := slices.Delete(slices.Clone(pods), i, i+1); len(rest) > 0 && try(rest) {
				pods = rest
			} else {
				i++
			}
		}
		if best == nil || better(pods, best) {
			best = pods
		}
		if r.Devices > 1 {
			break // the same for each
		}
	}
	return best
}

// partition splits a list, in its order.
func partition(all []victim, is func(victim) bool) (yes, no []victim) {
	for _, v := range all {
		if is(v) {
			yes = append(yes, v)
		} else {
			no = append(no, v)
		}
	}
	return yes, no
}

func podsOf(victims []victim, set []int) []*v1.Pod {
	out := make([]*v1.Pod, len(set))
	for i, at := range set {
		out[i] = victims[at].pod
	}
	return out
}

func uidsOf(pods []*v1.Pod) map[types.UID]bool {
	out := make(map[types.UID]bool, len(pods))
	for _, p := range pods {
		out[p.UID] = true
	}
	return out
}

func goneUIDs(gone map[types.UID]bool) func(*heldUnits) bool {
	return func(h *heldUnits) bool { return gone[types.UID(h.Pod.UID)] }
}

// subsets yields the sets of k of n positions, in lexical order. A set is valid until the
// next one.
func subsets(n, k int) func(yield func([]int) bool) {
	return func(yield func([]int) bool) {
		if k > n || k <= 0 {
			return
		}
		set := make([]int, k)
		for i := range set {
			set[i] = i
		}
		for yield(set) {
			i := k - 1
			for i >= 0 && set[i] == n-k+i {
				i--
			}
			if i < 0 {
				return
			}
			set[i]++
			for j := i + 1; j < k; j++ {
				set[j] = set[j-1] + 1
			}
		}
	}
}

// isHandled reports whether a taint says that a controller starts or removes the node. Such a
// node is left alone, also for a pod that tolerates the taint.
func isHandled(t v1.Taint) bool {
	switch t.Key {
	case "ToBeDeletedByClusterAutoscaler", "DeletionCandidateOfClusterAutoscaler":
		return true
	}
	return isStartup(t) || strings.Contains(t.Key, "cloudprovider.kubernetes.io/") || strings.HasPrefix(t.Key, "karpenter.sh/")
}

// startupTaints are the beginnings of the keys of taints that a node has until something on it
// is ready. Cluster autoscalers know them by these.
var startupTaints = []string{
	"startup-taint.cluster-autoscaler.kubernetes.io/", "ignore-taint.cluster-autoscaler.kubernetes.io/", "readiness.k8s.io/",
	"node.cloudprovider.kubernetes.io/uninitialized", "karpenter.sh/unregistered",
}

// isStartup reports whether a taint says that its node is not ready for pods yet. What set it
// removes it.
func isStartup(t v1.Taint) bool {
	return strings.HasSuffix(t.Key, "/agent-not-ready") ||
		slices.ContainsFunc(startupTaints, func(prefix string) bool { return strings.HasPrefix(t.Key, prefix) })
}

// isPassing reports whether a taint is one of a state of its node, which a controller sets and
// removes itself. A new node has none.
func isPassing(t v1.Taint) bool {
	return isHandled(t) || strings.HasPrefix(t.Key, "node.kubernetes.io/")
}

// isSystems reports whether a taint is one that a person leaves alone: a controller's, or that
// of nodes which run the cluster itself.
func isSystems(t v1.Taint) bool {
	return isPassing(t) || strings.HasPrefix(t.Key, "node-role.kubernetes.io/")
}

// moreNodes is kind 5: an empty node like one of the cluster.
func (s *search) moreNodes() (Change, bool) {
	if s.a.mistake != nil || len(s.a.several) > 0 {
		return Change{}, false
	}
	passing := []Code{Cordoned, NodeNotReady, Stale}
	for i := range s.nodes {
		j := &s.nodes[i]
		fixed := judged{code: j.code}
		for _, h := range j.hindrances {
			if !slices.Contains(passing, h.code) && (h.taint == nil || !isPassing(*h.taint)) {
				fixed.hindrances = append(fixed.hindrances, h)
			}
		}
		if !fixed.movable() || s.a.resource() != "" && j.n.allocatable[s.a.resource()] == 0 {
			continue
		}
		gone := map[types.UID]bool{}
		for _, p := range j.n.pods {
			if !stays(p.Pod) {
				gone[p.UID] = true
			}
		}
		fresh := *j.n.without(gone)
		fresh.nominated = nil
		node := fresh.Node.DeepCopy()
		node.Name = anotherNode
		if _, has := node.Labels[v1.LabelHostname]; has {
			node.Labels[v1.LabelHostname] = anotherNode
		}
		node.Spec.Unschedulable = false
		node.Spec.Taints = slices.DeleteFunc(node.Spec.Taints, isPassing)
		node.Status.Conditions = nil
		fresh.Node = node
		if len(s.a.hindrances(&fresh)) > 0 {
			continue
		}
		if about := s.a.resource(); about != "" && s.a.requests[about] > s.a.free(&fresh, about) {
			continue
		}
		if !s.a.offeredBy(j.n) {
			continue
		}
		if r := s.a.shared; r.Resource != "" {
			l := s.world.another(j.n.Name, func(h *heldUnits) bool { return gone[types.UID(h.Pod.UID)] || isEnding(h) })
			if fits(l, r, anotherNode).Code != accel.Fits {
				continue
			}
		}
		return Change{Kind: ChangeMoreNodes, By: administrator, Text: "add a node like " + j.n.Name, Verified: true}, true
	}
	return Change{}, false
}
