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
	"k8s.io/apimachinery/pkg/types"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// administrator is who may carry out a change of the cluster.
const administrator = "administrator"

// search looks for changes that admit one pod.
type search struct {
	x     *Explainer
	a     *ask
	nodes []judged
	// open are the nodes that only the resource keeps the pod off, and shut those that one
	// removable thing does besides.
	open []*nodeView
	shut []obstacle
	// tolerable are those that one taint does, and the toleration of it.
	tolerable []obstacle
	remake    remake
}

// obstacle is a node that one change opens.
type obstacle struct {
	n      *nodeView
	change Change
}

func nodesOf(all []obstacle) []*nodeView {
	out := make([]*nodeView, len(all))
	for i := range all {
		out[i] = all[i].n
	}
	return out
}

// changeFor is the change that opens a node.
func changeFor(all []obstacle, node string) Change {
	return all[slices.IndexFunc(all, func(o obstacle) bool { return o.n.Name == node })].change
}

// admitted is the first change after which the pod fits on the node that it opens.
func (s *search) admitted(all []obstacle) (Change, bool) {
	n, ok := s.admits(s.a, nodesOf(all)) // of all at once: one node costs as much as all
	if !ok {
		return Change{}, false
	}
	return s.at(changeFor(all, n.Name), s.a, n, nil), true
}

// explainChanges adds the smallest change of each kind.
func (x *Explainer) explainChanges(e *Explanation, a *ask, nodes []judged, blocked bool) {
	if blocked && !slices.ContainsFunc(e.Causes, func(c Cause) bool {
		return slices.Contains([]Code{NotDivisible, AnnotationWrong, UnitMismatch, Misspelt}, c.Code)
	}) {
		return
	}
	if anyFits(nodes) {
		return // nothing needs to change
	}
	s := &search{x: x, a: a, nodes: nodes, remake: x.snapshot.remake(a.pod)}
	for i := range nodes {
		j := &nodes[i]
		switch {
		case len(j.hindrances) == 0:
			s.open = append(s.open, j.n)
		case len(j.hindrances) == 1 && !slices.ContainsFunc(j.n.Spec.Taints, isHandled):
			if c, ok := s.removal(j.n, &j.hindrances[0]); ok {
				s.shut = append(s.shut, obstacle{j.n, c})
			}
			if t := j.hindrances[0].taint; t != nil && !isSystems(*t) {
				s.tolerable = append(s.tolerable, obstacle{j.n, s.toleration(t)})
			}
		}
	}
	slices.SortStableFunc(s.shut, func(p, q obstacle) int { return p.change.Cost - q.change.Cost })
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
	if slices.ContainsFunc(e.Causes, func(c Cause) bool { return c.Code == NoSuchResource && len(c.Nodes) == 0 }) {
		found = nil // the pod needs something else, too
	}
	if name := a.pod.Spec.SchedulerName; x.othersPlace(e, a.pod) {
		for i := range found {
			found[i].Verified = false
		}
		if len(found) > 0 {
			e.Notes = append(e.Notes, fmt.Sprintf("No change is verified, because the scheduler %q decides about the pod.", name))
		}
	}
	why := x.world.unjudged(a.pod)
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
	}
	if len(found) == 0 {
		e.Notes = append(e.Notes, "No change of this pod alone helps.")
	}
}

// admits returns the first of the nodes on which an ask fits, by its resource.
func (s *search) admits(a *ask, nodes []*nodeView) (*nodeView, bool) {
	if a.mistake != nil || len(a.several) > 0 {
		return nil, false
	}
	about := a.resource()
	names := make([]string, 0, len(nodes))
	able := make([]*nodeView, 0, len(nodes))
	for _, n := range nodes {
		if about != "" && a.requests[about] > a.free(n, about) {
			continue
		}
		if a.shared.Resource != "" {
			in := n.inventory(a.shared.Resource)
			if in == nil || a.shared.Devices > 1 && !in.Several {
				continue
			}
		}
		able, names = append(able, n), append(names, n.Name)
	}
	if len(able) == 0 {
		return nil, false
	}
	if a.shared.Resource == "" {
		return able[0], true
	}
	verdicts := make([]ledger.Verdict, len(names))
	s.x.world.ledger.Fits(a.shared, names, verdicts)
	for i, v := range verdicts {
		if v.Code == accel.Fits {
			return able[i], true
		}
	}
	return nil, false
}

// at fills in where a change puts the pod.
func (s *search) at(c Change, a *ask, n *nodeView, gone func(*heldUnits) bool) Change {
	c.Node, c.Verified = n.Name, !c.unsure
	if a.shared.Resource == "" {
		return c
	}
	ref := accel.PodRef{UID: string(a.pod.UID), Namespace: a.pod.Namespace, Name: a.pod.Name}
	if ref.UID == "" {
		ref.UID = "waiting"
	}
	g, _, err := s.x.world.copyOf([]string{n.Name}, gone, true).Reserve(ref, time.Time{}, n.Name, a.shared)
	if err != nil {
		c.Verified = false // the core has the last word
		return c
	}
	c.Devices = []string{accel.IndexText(g.Index)}
	for _, d := range g.More {
		c.Devices = append(c.Devices, accel.IndexText(d.Index))
	}
	return c
}

// slack is how long after the end of its grace period a pod may take to be gone.
const slack = 30 * time.Second

// wait is kind 0: pods that are ending free enough. Where only those do that should be gone
// already, the change is not verified.
func (s *search) wait() (Change, bool) {
	var late *Change
	for i := range s.nodes {
		n := s.nodes[i].n
		if !s.nodes[i].movable() {
			continue
		}
		c := Change{Kind: ChangeWait, until: s.x.snapshot.Taken}
		gone, overdue := map[types.UID]bool{}, map[types.UID]bool{}
		for _, p := range n.pods {
			at := p.DeletionTimestamp
			switch {
			case at == nil:
			case at.Add(slack).Before(s.x.snapshot.Taken):
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
		known := endingOn(s.x.world, n.Name, s.a.shared.Resource) // also those that their node alone knows
		if len(gone) == 0 && len(known) == 0 && len(overdue) == 0 {
			continue
		}
		ends := func(h *heldUnits) bool { return isEnding(h) && !overdue[types.UID(h.Pod.UID)] }
		if s.fitsWithout(n, s.a, gone, ends) {
			c.stuck, c.Text = "", waitText(n, gone, known)
			return s.at(c, s.a, n, ends), true
		}
		maps.Copy(gone, overdue)
		if late == nil && len(overdue) > 0 && s.fitsWithout(n, s.a, gone, isEnding) {
			c.Text = waitText(n, gone, known)
			c = s.at(c, s.a, n, isEnding)
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

// fitsWithout reports whether an ask fits on a node without some pods: by all filters, and
// by the core on a copy.
func (s *search) fitsWithout(n *nodeView, a *ask, gone map[types.UID]bool, held func(*heldUnits) bool) bool {
	rest := n.without(gone)
	if a.mistake != nil || len(a.several) > 0 || len(a.hindrances(rest)) > 0 {
		return false
	}
	if about := a.resource(); about != "" && a.requests[about] > a.free(rest, about) {
		return false
	}
	if a.shared.Resource == "" {
		return true
	}
	in := n.inventory(a.shared.Resource)
	if in == nil || a.shared.Devices > 1 && !in.Several {
		return false
	}
	return fits(s.x.world.copyOf([]string{n.Name}, held, true), a.shared, n.Name).Code == accel.Fits
}

// removal is the change of a node that takes a hindrance away. Its Cost orders such changes.
func (s *search) removal(n *nodeView, h *hindrance) (Change, bool) {
	c := Change{Kind: ChangeNode, By: administrator, Node: n.Name}
	switch h.code {
	case Cordoned:
		c.Text, c.Commands = "uncordon "+n.Name, ofNode(n.Name, "uncordon", n.Name)
	case Selector:
		missing := missingLabels(s.a.pod, n.Node)
		if len(missing) == 0 || s.a.pod.Spec.NodeName != "" {
			return Change{}, false
		}
		c.Cost = 1
		var pairs []string
		for _, k := range slices.Sorted(maps.Keys(missing)) {
			if _, has := n.Labels[k]; has || !keyed(k) || !mayLabel(k) {
				return Change{}, false
			}
			pairs = append(pairs, k+"="+missing[k])
		}
		c.Text = "label " + n.Name + " " + strings.Join(pairs, ",")
		c.Commands = ofNode(n.Name, append([]string{"label", "node", n.Name}, pairs...)...)
	case Taint:
		if isSystems(*h.taint) {
			return Change{}, false
		}
		c.Cost = 2
		c.Text = "remove taint " + taintText(h.taint) + " of " + n.Name
		if keyed(h.taint.Key) {
			c.Commands = ofNode(n.Name, "taint", "node", n.Name, taintText(h.taint)+"-")
		}
	default:
		return Change{}, false
	}
	return c, true
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
	if c, ok := s.admitted(s.shut); ok {
		return c, true
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
			}
		case j.code == Disabled:
			c.Text, c.Commands = "enable Divvy on "+j.n.Name, ofNode(j.n.Name, "label", "node", j.n.Name, labelEnabled+"-")
		case slices.Contains([]Code{DaemonMissing, NotRegistered, InventoryBroken, OldRelease}, j.code):
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

// annotation is kind 2: other annotations, else one more toleration.
func (s *search) annotation() (Change, bool) {
	for v := range s.annotationVariants(s.a, s.open) {
		if n, ok := s.admits(v.a, v.nodes); ok {
			return s.at(v.change, v.a, n, nil), true
		}
	}
	return s.admitted(s.tolerable)
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
			for _, key := range slices.Sorted(maps.Keys(set)) {
				if set[key] == "" {
					delete(changed.Annotations, key)
					command = append(command, key+"-")
					continue
				}
				_, has := p.Annotations[key]
				overwrite = overwrite || has
				changed.Annotations[key] = set[key]
				command = append(command, key+"="+set[key])
			}
			if overwrite {
				command = append(command, "--overwrite")
			}
			c.Commands = ofPod(p, command...)
			return variant{s.x.world.newAsk(changed), c, nodes}
		}
		if r := a.shared; r.Resource != "" && len(a.several) == 0 {
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

// toleration is the change of the pod that tolerates a taint. It is about nodes that nothing
// else keeps the pod off: it matches no other taint.
func (s *search) toleration(t *v1.Taint) Change {
	p := s.a.pod
	add := v1.Toleration{Key: t.Key, Operator: v1.TolerationOpEqual, Value: t.Value, Effect: t.Effect}
	op := jsonPatch("add", "/spec/tolerations/-", add)
	if len(p.Spec.Tolerations) == 0 {
		op = jsonPatch("add", "/spec/tolerations", []v1.Toleration{add})
	}
	return Change{Kind: ChangeAnnotation, Text: "tolerate taint " + taintText(t),
		Commands: ofPod(p, "patch", "pod", "-n", p.Namespace, p.Name, "--type=json", "-p", "["+op+"]")}
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
