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

// victims are the pods of a node that hold the resource and stay away once they end.
func (s *search) victims(c *candidate) []victim {
	var out []victim
	about := s.a.resource()
	for _, p := range c.n.pods {
		if p.DeletionTimestamp == nil && p.requests[about] > 0 && !stays(p.Pod) && !related(p.Pod, s.a.pod) {
			out = append(out, victim{pod: p.Pod, parts: map[accel.DeviceID]accel.Units{}})
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

// candidate is a node of which pods may end.
type candidate struct {
	n       *nodeView
	devices []ledger.DeviceUsage
	victims []victim
	least   int // pods that must end at least
}

// newCandidate returns a node with the pods that may end there.
func newCandidate(s *search, n *nodeView) candidate {
	usage, _ := s.x.world.ledger.Node(s.a.shared.Resource, n.Name)
	c := candidate{n: n, devices: usage.Devices}
	c.victims = s.victims(&c)
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
			c := newCandidate(s, j.n)
			if c.least = s.least(&c, c.victims); c.least <= len(c.victims) && len(c.victims) > 0 {
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
			if pods := s.greedy(c, &trials); pods != nil && (best == nil || better(pods, best.pods)) {
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
				if best != nil && !better(pods, best.pods) || !s.enough(c, set) {
					continue
				}
				if trials -= copyTrials; s.fitsWithout(c.n, s.a, uidsOf(pods), goneUIDs(uidsOf(pods))) {
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
		text := count(int(requestsOf(p)[s.a.resource()]), "unit")
		if priority := corev1helpers.PodPriority(p); priority > corev1helpers.PodPriority(s.a.pod) {
			text += fmt.Sprintf("; its priority is higher, %d", priority)
		}
		if owner := ownerText(p); owner != "" {
			text += fmt.Sprintf("; %s recreates it", owner)
		}
		texts = append(texts, fmt.Sprintf("%s/%s (%s)", p.Namespace, p.Name, text))
		may = may && s.x.snapshot.MayDelete != nil && s.x.snapshot.MayDelete(p.Namespace)
		may = may && named(p.Namespace, p.Name)
		c.Commands = append(c.Commands, kubectl("delete", "pod", "-n", p.Namespace, p.Name))
	}
	c.Text = "end " + strings.Join(texts, ", ")
	if !may {
		c.Commands, c.By = nil, "a user who may delete the pods"
	}
	c = s.at(c, s.a, b.n, goneUIDs(uidsOf(b.pods)))
	c.Verified = c.Verified && recreated(b.pods) == 0 // which of the two gets the devices, the order of the queue says
	return c
}

// least is how many pods must end on a node at least: enough of the largest on each of as
// many devices as the pod needs.
func (s *search) least(c *candidate, victims []victim) int {
	r := s.a.shared
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
func (s *search) enough(c *candidate, set []int) bool {
	if s.a.shared.Resource == "" {
		return true
	}
	chosen := make([]victim, len(set))
	for i, at := range set {
		chosen[i] = c.victims[at]
	}
	return s.least(c, chosen) <= len(set)
}

// greedy ends the largest pods of one device after the other until the pod fits, then lets
// those live that need not end.
func (s *search) greedy(c *candidate, trials *int) []*v1.Pod {
	r, n := s.a.shared, c.n
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
		return *trials > 0 && s.fitsWithout(n, s.a, gone, goneUIDs(gone))
	}
	slices.SortStableFunc(order, func(a, b victim) int { return cmp.Compare(sizes(b), sizes(a)) })
	var best []*v1.Pod
	in := n.inventory(r.Resource)
	devices := 1
	if in != nil {
		devices = len(in.Shares)
	}
	for d := range devices {
		pods = nil
		for _, v := range order {
			if in == nil || r.Devices > 1 || v.parts[in.Shares[d].ID] > 0 {
				pods = append(pods, v.pod)
			}
			if len(pods) > 0 && try(pods) {
				break
			}
		}
		if len(pods) == 0 || !try(pods) {
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
	return strings.Contains(t.Key, "cloudprovider.kubernetes.io/") || strings.HasPrefix(t.Key, "karpenter.sh/") ||
		strings.HasSuffix(t.Key, "/agent-not-ready")
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
		if r := s.a.shared; r.Resource != "" {
			in := j.n.inventory(r.Resource)
			if in == nil || r.Devices > 1 && !in.Several {
				continue
			}
			l := s.x.world.another(j.n.Name, func(h *heldUnits) bool { return gone[types.UID(h.Pod.UID)] || isEnding(h) })
			if fits(l, r, anotherNode).Code != accel.Fits {
				continue
			}
		}
		return Change{Kind: ChangeMoreNodes, By: administrator, Text: "add a node like " + j.n.Name, Verified: true}, true
	}
	return Change{}, false
}
