package why

import (
	"fmt"
	"maps"
	"slices"
	"sort"
	"strconv"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// administrator is who may carry out a change of the cluster.
const administrator = "administrator"

// search looks for changes that admit one pod.
type search struct {
	snapshot *Snapshot
	world    *world
	a        *ask
	nodes    []judged
	// open are the nodes that only the resource keeps the pod off, shut those that one
	// removable thing does besides, and barred those that several do.
	open         []*nodeView
	shut, barred []obstacle
	// tolerable are those that only taints do, those with the fewest first.
	tolerable []obstacle
	remake    remake
}

// obstacle is a node that changes open, one for each hindrance. They are made where they are the
// ones to show: of thousands of nodes, one is.
type obstacle struct {
	n    *nodeView
	all  []hindrance
	cost int
}

func nodesOf(all []obstacle) []*nodeView {
	out := make([]*nodeView, len(all))
	for i := range all {
		out[i] = all[i].n
	}
	return out
}

// newSearch looks at what keeps the pod off each node.
func newSearch(snapshot *Snapshot, w *world, a *ask, nodes []judged) *search {
	s := &search{snapshot: snapshot, world: w, a: a, nodes: nodes, remake: snapshot.remake(a.pod)}
	for i := range nodes {
		j := &nodes[i]
		if len(j.hindrances) == 0 {
			s.open = append(s.open, j.n)
			continue
		}
		if slices.ContainsFunc(j.n.Spec.Taints, isHandled) {
			continue
		}
		o, ok := s.obstacle(j.n, j.hindrances)
		switch {
		case !ok:
		case len(o.all) == 1:
			s.shut = append(s.shut, o)
		default:
			s.barred = append(s.barred, o)
		}
		if !slices.ContainsFunc(j.hindrances, func(h hindrance) bool { return h.taint == nil || isSystems(*h.taint) }) {
			s.tolerable = append(s.tolerable, obstacle{j.n, j.hindrances, len(j.hindrances)})
		}
	}
	for _, list := range [][]obstacle{s.shut, s.barred, s.tolerable} {
		slices.SortStableFunc(list, func(p, q obstacle) int { return p.cost - q.cost })
	}
	return s
}

// barrier is what the removal of one more hindrance costs: more than any single one.
const barrier = 10

// obstacle returns a node with hindrances that all are removable.
func (s *search) obstacle(n *nodeView, all []hindrance) (o obstacle, ok bool) {
	o = obstacle{n: n, all: all}
	for i := range all {
		cost, removable := s.removable(n, &all[i])
		if !removable {
			return o, false
		}
		o.cost += barrier + cost
	}
	return o, true
}

// opening is the change that opens a node of the list.
func (s *search) opening(of []obstacle, node string) Change {
	o := of[slices.IndexFunc(of, func(o obstacle) bool { return o.n.Name == node })]
	c := s.removal(o.n, &o.all[len(o.all)-1])
	for i := len(o.all) - 2; i >= 0; i-- { // the last taint first: the patch of one names its position
		c = join(c, s.removal(o.n, &o.all[i]))
	}
	return c
}

// join is one change after another.
func join(first, second Change) Change {
	second.Text = first.Text + ", and " + second.Text
	if first.Commands == nil || second.Commands == nil { // half of it would not help
		first.Commands, second.Commands, first.Patch, second.Patch = nil, nil, nil, nil
	}
	second.Commands = append(slices.Clone(first.Commands), second.Commands...)
	second.Patch = append(slices.Clone(first.Patch), second.Patch...)
	if first.By != "" {
		second.By = first.By
	}
	return second
}

// changes are the smallest of each kind.
func (s *search) changes() []Change {
	var found []Change
	for _, one := range []func() (Change, bool){s.wait, s.node, s.annotation, s.request, s.endPods} {
		if c, ok := one(); ok {
			found = append(found, c)
		}
	}
	if !slices.ContainsFunc(found, func(c Change) bool { return c.Verified || c.unsure }) {
		if c, ok := s.pair(); ok {
			found = append(found, c)
		}
	}
	if c, ok := s.moreNodes(); ok {
		found = append(found, c)
	}
	return found
}

// explainChanges adds the smallest change of each kind.
func (d *diagnosis) explainChanges(blocked bool) {
	e, a := d.e, d.a
	if blocked && !slices.ContainsFunc(e.Causes, func(c Cause) bool {
		return slices.Contains([]Code{NotDivisible, PolicyUnknown, AnnotationWrong, UnitMismatch, Misspelt, SelectionMistake}, c.Code)
	}) {
		return
	}
	if anyFits(d.nodes) {
		return // nothing needs to change
	}
	found := newSearch(d.snapshot, d.world, a, d.nodes).changes()
	if slices.ContainsFunc(e.Causes, func(c Cause) bool { return c.Code == NoSuchResource && len(c.Nodes) == 0 }) {
		found = nil // the pod needs something else, too
	}
	if name := a.pod.Spec.SchedulerName; d.othersPlace() {
		for i := range found {
			found[i].Verified = false
		}
		if len(found) > 0 {
			e.Notes = append(e.Notes, fmt.Sprintf("No change is verified, because the scheduler %q decides about the pod.", name))
		}
	}
	why := d.world.unjudged(a.pod)
	for _, c := range e.Causes {
		if quoted(c.Code) || c.Code == NodeNotLabelled && len(c.Nodes) == 0 { // which labels, the extender's options say
			why = append(why, c.Detail)
		}
	}
	if len(why) > 0 {
		for i := range found {
			found[i].Verified = false
		}
		if len(found) > 0 {
			e.Notes = append(e.Notes, "No change is verified, because kube-scheduler also looks at what is not judged here: "+
				strings.Join(why, "; ")+".")
		}
	}
	e.Changes = append(e.Changes, found...)
	if slices.ContainsFunc(found, func(c Change) bool { return c.Kind == ChangeEnd && len(c.Commands) > 0 }) {
		e.Notes = append(e.Notes, "kubectl delete does not respect PodDisruptionBudgets.")
		d.snapshot.noteSource(e, SourceBudgets)
	}
	if len(found) == 0 {
		e.Notes = append(e.Notes, "No change of this pod alone helps.")
	}
}

// slack is how long after the end of its grace period a pod may take to be gone.
const slack = 30 * time.Second

// wait is kind 0: pods that are ending free enough. Where only those do that should be gone
// already, or a controller may create them again, the change is not verified.
func (s *search) wait() (Change, bool) {
	var late *Change
	for i := range s.nodes {
		n := s.nodes[i].n
		if !s.nodes[i].movable() {
			continue
		}
		c := Change{Kind: ChangeWait, until: s.snapshot.Taken}
		gone, overdue := map[types.UID]bool{}, map[types.UID]bool{}
		for _, p := range n.pods {
			at := p.DeletionTimestamp
			switch {
			case at == nil:
			case at.Add(slack).Before(s.snapshot.Taken):
				overdue[p.UID] = true
				since := at.Time
				if grace := p.DeletionGracePeriodSeconds; grace != nil {
					since = since.Add(-time.Duration(*grace) * time.Second)
				}
				c.stuck = fmt.Sprintf("%s/%s has been terminating since %s; check kubelet and finalizers", p.Namespace, p.Name,
					since.UTC().Format(time.RFC3339))
			default:
				gone[p.UID] = true
				if at.After(c.until) {
					c.until = at.Time
				}
			}
		}
		c.until = c.until.Add(slack)
		known := endingOn(s.world, n.Name, s.a.shared.Resource) // also those that their node alone knows
		if len(gone) == 0 && len(known) == 0 && len(overdue) == 0 {
			continue
		}
		ends := func(h *heldUnits) bool { return isEnding(h) && !overdue[types.UID(h.Pod.UID)] }
		if s.world.fitsWithout(n, s.a, gone, ends) {
			c.stuck, c.Text = "", waitText(n, gone, known)
			c.unsure = slices.ContainsFunc(n.pods, func(p placedPod) bool {
				return gone[p.UID] && metav1.GetControllerOfNoCopy(p.Pod) != nil
			})
			return s.world.placed(c, s.a, n, ends), true
		}
		maps.Copy(gone, overdue)
		if late == nil && len(overdue) > 0 && s.world.fitsWithout(n, s.a, gone, isEnding) {
			c.Text = waitText(n, gone, known)
			c = s.world.placed(c, s.a, n, isEnding)
			c.Verified = false
			late = &c
		}
	}
	if late == nil {
		return Change{}, false
	}
	return *late, true
}

func waitText(n *nodeView, gone map[types.UID]bool, known []string) string {
	names := podsText(n.pods, gone)
	if len(names) == 0 {
		names = known
	}
	verb := " has"
	if len(names) > 1 {
		verb = " have"
	}
	return "wait until " + listed(names, 3) + verb + " terminated"
}

func podsText(pods []placedPod, chosen map[types.UID]bool) []string {
	var out []string
	for _, p := range pods {
		if chosen[p.UID] {
			out = append(out, p.Namespace+"/"+p.Name)
		}
	}
	return out
}

// removable reports whether a change of the node takes a hindrance away. The cost orders
// such changes.
func (s *search) removable(n *nodeView, h *hindrance) (cost int, ok bool) {
	switch h.code {
	case Cordoned:
		return 0, true
	case Selector:
		missing := missingLabels(s.a.pod, n.Node)
		for k := range missing {
			if _, has := n.Labels[k]; has || !keyed(k) || !mayLabel(k) {
				return 0, false
			}
		}
		return 1, len(missing) > 0 && s.a.pod.Spec.NodeName == ""
	case Taint:
		return 2, !isSystems(*h.taint)
	}
	return 0, false
}

// removal is the change of a node that takes a hindrance away which is removable.
func (s *search) removal(n *nodeView, h *hindrance) Change {
	c := Change{Kind: ChangeNode, By: administrator, Node: n.Name}
	switch h.code {
	case Cordoned:
		c.Text, c.Commands = "uncordon "+n.Name, ofNode(n.Name, "uncordon", n.Name)
		c.patches("node", "", n.Name, patchMerge, nested(nil, "spec", "unschedulable"))
	case Selector:
		missing := missingLabels(s.a.pod, n.Node)
		var pairs []string
		for _, k := range slices.Sorted(maps.Keys(missing)) {
			pairs = append(pairs, k+"="+missing[k])
		}
		c.Text = "label " + n.Name + " " + strings.Join(pairs, ",")
		c.Commands = ofNode(n.Name, append([]string{"label", "node", n.Name}, pairs...)...)
		c.patches("node", "", n.Name, patchMerge, nested(missing, "metadata", "labels"))
	default:
		c.Text = "remove taint " + taintText(h.taint) + " of " + n.Name
		if keyed(h.taint.Key) {
			c.Commands = ofNode(n.Name, "taint", "node", n.Name, taintText(h.taint)+"-")
			path := fmt.Sprintf("/spec/taints/%d", slices.IndexFunc(n.Spec.Taints, func(t v1.Taint) bool { return t.MatchTaint(h.taint) }))
			c.patches("node", "", n.Name, patchJSON, []operation{{Op: "test", Path: path, Value: h.taint}, {Op: "remove", Path: path}})
		}
	}
	return c
}

// mayLabel reports whether a label of a node is a person's to set, by its key. Those that
// kubelet, a cloud provider or a vendor's discovery set say what the node is.
func mayLabel(key string) bool {
	if key == labelEnabled {
		return true
	}
	for i := range accel.Vendors {
		if v := &accel.Vendors[i]; key == v.NodeLabel || v.Owns(key) {
			return key == v.NodeLabel
		}
	}
	domain, _, has := strings.Cut(key, "/")
	return !has || !slices.ContainsFunc([]string{"kubernetes.io", "k8s.io", "karpenter.sh"}, func(of string) bool {
		return domain == of || strings.HasSuffix(domain, "."+of)
	})
}

// node is kind 1.
func (s *search) node() (Change, bool) {
	if n, ok := s.world.admits(s.a, nodesOf(s.shut)); ok { // of all at once: one node costs as much as all
		return s.world.placed(s.opening(s.shut, n.Name), s.a, n, nil), true
	}
	for i := range s.nodes {
		j := &s.nodes[i]
		if len(j.hindrances) > 0 {
			continue
		}
		c := Change{Kind: ChangeNode, By: administrator, Node: j.n.Name}
		switch v := accel.VendorOfMemory(s.a.shared.Resource); {
		case j.code == NodeNotLabelled && v != nil:
			c.Text = "label " + j.n.Name + " as a node with devices"
			if _, has := j.n.Labels[v.NodeLabel]; !has { // with another value, a person decided so
				c.Commands = ofNode(j.n.Name, "label", "node", j.n.Name, v.NodeLabel+"=true")
				c.patches("node", "", j.n.Name, patchMerge, nested("true", "metadata", "labels", v.NodeLabel))
			}
		case j.code == Disabled:
			c.Text, c.Commands = "enable Divvy on "+j.n.Name, ofNode(j.n.Name, "label", "node", j.n.Name, labelEnabled+"-")
			c.patches("node", "", j.n.Name, patchMerge, nested(nil, "metadata", "labels", labelEnabled))
		case slices.Contains([]Code{DaemonMissing, NotRegistered, InventoryBroken, OldRelease, DriverMissing, ListTooLong}, j.code):
			c.Text, c.Commands = "examine divvy-node on "+j.n.Name, []string{kubectl("divvy", "doctor")}
		default:
			continue
		}
		return c, true
	}
	return Change{}, false
}

// variant is a pod with a change, and what the change is.
type variant struct {
	a      *ask
	change Change
	nodes  []*nodeView // that nothing but the resource keeps it off
}

// annotation is kind 2: other annotations, else more tolerations.
func (s *search) annotation() (Change, bool) {
	for v := range s.annotationVariants(s.a, s.open) {
		if n, ok := s.world.admits(v.a, v.nodes); ok {
			return s.world.placed(v.change, v.a, n, nil), true
		}
	}
	n, ok := s.world.admits(s.a, nodesOf(s.tolerable))
	if !ok {
		return Change{}, false
	}
	i := slices.IndexFunc(s.tolerable, func(o obstacle) bool { return o.n == n })
	return s.world.placed(s.toleration(s.tolerable[i].all), s.a, n, nil), true
}

// annotationVariants yields the pod with other annotations, which can be changed while it
// waits: the ones to prefer first.
func (s *search) annotationVariants(a *ask, nodes []*nodeView) func(yield func(variant) bool) {
	return func(yield func(variant) bool) {
		p := a.pod
		annotate := func(text string, set map[string]string) variant {
			c := Change{Kind: ChangeAnnotation, Text: text}
			changed := p.DeepCopy()
			if changed.Annotations == nil {
				changed.Annotations = map[string]string{}
			}
			command := []string{"annotate", "pod", "-n", p.Namespace, p.Name}
			overwrite := false
			values := map[string]any{}
			for _, key := range slices.Sorted(maps.Keys(set)) {
				if set[key] == "" {
					delete(changed.Annotations, key)
					command, values[key] = append(command, key+"-"), nil
					continue
				}
				_, has := p.Annotations[key]
				overwrite = overwrite || has
				changed.Annotations[key], values[key] = set[key], set[key]
				command = append(command, key+"="+set[key])
			}
			if overwrite {
				command = append(command, "--overwrite")
			}
			c.Commands = ofPod(p, command...)
			c.patches(kindPod, p.Namespace, p.Name, patchMerge, nested(values, "metadata", "annotations"))
			return variant{s.world.newAsk(changed), c, nodes}
		}
		if r := a.shared; r.Resource != "" && len(a.several) == 0 {
			if set := s.world.corrected(a); len(set) > 0 && !yield(annotate("correct "+strings.Join(slices.Sorted(maps.Keys(set)), ", "),
				set)) {
				return
			}
			for k := 1; k <= wire.MaxDevices; k++ {
				if k == max(r.Devices, 1) && a.mistake == nil {
					continue
				}
				each := r.Peak() / accel.Units(k)
				if each == 0 {
					break
				}
				text := fmt.Sprintf("spread over %d devices (%d each)", k, each)
				if k == 1 {
					text = "use one device"
				}
				if v := annotate(text, map[string]string{wire.CountAnnotation: strconv.Itoa(k)}); v.a.mistake == nil && !yield(v) {
					return
				}
			}
			for _, set := range selectionDrops(p) {
				if !yield(annotate(dropText(p, set), set)) {
					return
				}
			}
			if sel := r.Selection; sel != nil && sel.Isolation != accel.TierNone {
				for _, name := range slices.Backward(accel.TierNames()) {
					tier, _ := accel.ParseTier(name)
					if tier.Meets(sel.Isolation) {
						continue
					}
					text := fmt.Sprintf("accept isolation %s instead of %s", name, sel.Isolation)
					if !yield(annotate(text, map[string]string{wire.IsolationAnnotation: name})) {
						return
					}
				}
			}
		}
	}
}

// toleration is the change of the pod that tolerates taints. It is about nodes that nothing
// else keeps the pod off: it matches no other taint.
func (s *search) toleration(taints []hindrance) Change {
	p := s.a.pod
	var add []v1.Toleration
	var ops []operation
	var names []string
	for i := range taints {
		t := taints[i].taint
		one := v1.Toleration{Key: t.Key, Operator: v1.TolerationOpEqual, Value: t.Value, Effect: t.Effect}
		add, names = append(add, one), append(names, taintText(t))
		ops = append(ops, operation{Op: "add", Path: "/spec/tolerations/-", Value: one})
	}
	if len(p.Spec.Tolerations) == 0 {
		ops = []operation{{Op: "add", Path: "/spec/tolerations", Value: add}}
	}
	c := Change{Kind: ChangeAnnotation, Text: "tolerate taint " + strings.Join(names, " and "),
		Commands: ofPod(p, "patch", "pod", "-n", p.Namespace, p.Name, "--type=json", "-p", textOf(ops))}
	c.patches(kindPod, p.Namespace, p.Name, patchJSON, ops)
	return c
}

// selectionDrops are the ways to select devices less narrowly, those that drop the fewest
// names first: single names to avoid, whole annotations, then several of these.
func selectionDrops(p *v1.Pod) []map[string]string {
	type atom struct {
		key, value string // what the annotation is then; "" for none
		names      int
	}
	var atoms []atom
	for _, key := range wire.AskAnnotations() {
		text, has := p.Annotations[key]
		if !has || key == wire.IsolationAnnotation && validIsolation(text) {
			continue
		}
		names, err := kube.ParseNames(text)
		avoids := key == wire.AvoidModelsAnnotation || key == wire.AvoidDevicesAnnotation
		if err == nil && avoids && len(names) > 1 {
			for i := range names {
				rest := slices.Delete(slices.Clone(names), i, i+1)
				atoms = append(atoms, atom{key, strings.Join(rest, ","), 1})
			}
		}
		atoms = append(atoms, atom{key, "", max(len(names), 1)})
	}
	type drop struct {
		set   map[string]string
		names int
	}
	var drops []drop
	for i, a := range atoms {
		drops = append(drops, drop{map[string]string{a.key: a.value}, a.names})
		for _, b := range atoms[:i] {
			if b.key != a.key {
				drops = append(drops, drop{map[string]string{a.key: a.value, b.key: b.value}, a.names + b.names})
			}
		}
	}
	sort.SliceStable(drops, func(i, j int) bool { return drops[i].names < drops[j].names })
	out := make([]map[string]string, len(drops))
	for i := range drops {
		out[i] = drops[i].set
	}
	return out
}

func validIsolation(text string) bool {
	_, err := accel.ParseTier(text)
	return err == nil
}

func dropText(p *v1.Pod, set map[string]string) string {
	var parts []string
	for _, key := range slices.Sorted(maps.Keys(set)) {
		if set[key] == "" {
			parts = append(parts, "drop "+key)
			continue
		}
		before, _ := kube.ParseNames(p.Annotations[key])
		after, _ := kube.ParseNames(set[key])
		for _, name := range before {
			if !slices.Contains(after, name) {
				parts = append(parts, "drop "+name+" from "+key)
			}
		}
	}
	return strings.Join(parts, ", ")
}
