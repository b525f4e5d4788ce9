package plugin

import (
	"context"
	"errors"
	"slices"

	v1 "k8s.io/api/core/v1"
	policy "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/sets"
	corelisters "k8s.io/client-go/listers/core/v1"
	policylisters "k8s.io/client-go/listers/policy/v1"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
	"github.com/divvy-gpu/divvy/internal/scheduler/decision"
)

// Plugin is the plugin of one profile.
type Plugin struct {
	core   *Core
	handle fwk.Handle
	pods   corelisters.PodLister
	claims corelisters.PersistentVolumeClaimLister
	pdbs   policylisters.PodDisruptionBudgetLister
}

var (
	_ fwk.PreFilterPlugin     = (*Plugin)(nil)
	_ fwk.PreFilterExtensions = (*Plugin)(nil)
	_ fwk.FilterPlugin        = (*Plugin)(nil)
	_ fwk.PostFilterPlugin    = (*Plugin)(nil)
	_ fwk.PreScorePlugin      = (*Plugin)(nil)
	_ fwk.ScorePlugin         = (*Plugin)(nil)
	_ fwk.ReservePlugin       = (*Plugin)(nil)
	_ fwk.BindPlugin          = (*Plugin)(nil)
	_ fwk.PostBindPlugin      = (*Plugin)(nil)
	_ fwk.EnqueueExtensions   = (*Plugin)(nil)
	_ fwk.SignPlugin          = (*Plugin)(nil)
)

// Name implements fwk.Plugin.
func (*Plugin) Name() string { return Name }

const stateKey fwk.StateKey = Name

// state is what is known of one attempt. kube-scheduler clones it for each node on which it
// tries something out; overlay and trial are the clone's own, the rest is shared.
type state struct {
	cycle *decision.Cycle
	// named is true where PreFilter named one node, and bound where the pod may be bound there.
	named, bound bool
	overlay      ledger.Overlay
	trial        trial
	scores       map[string]int64
	hold         *hold
	// rehearsed is nil but for a group that is tried out without some pods. Clones share it: they
	// do not change it.
	rehearsed *rehearsed
}

// hold is what Reserve made. The scheduling cycle writes it and the binding cycle reads it.
type hold struct {
	grant accel.Grant
	// undo is nil where there is nothing to undo.
	undo func()
}

// Clone implements fwk.StateData.
func (s *state) Clone() fwk.StateData {
	c := *s
	c.overlay = ledger.Overlay{Removed: slices.Clone(s.overlay.Removed), Added: slices.Clone(s.overlay.Added)}
	c.trial = s.trial.clone()
	return &c
}

// stateOf returns nil for a pod that asks for nothing of ours.
func stateOf(from fwk.CycleState) *state {
	data, err := from.Read(stateKey)
	if err != nil {
		return nil
	}
	s, _ := data.(*state)
	return s
}

// PreFilter implements fwk.PreFilterPlugin.
func (p *Plugin) PreFilter(ctx context.Context, cs fwk.CycleState, pod *v1.Pod, nodes []fwk.NodeInfo) (*fwk.PreFilterResult, *fwk.Status) {
	cycle, err := p.core.config.Inside.Begin(pod, len(nodes))
	var rejected *decision.RejectedError
	switch {
	case errors.As(err, &rejected):
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, err.Error())
	case err != nil:
		return nil, fwk.AsStatus(err)
	case cycle == nil:
		return p.preFilterClaims(ctx, cs, pod)
	}
	s := &state{cycle: cycle, hold: &hold{}}
	cs.Write(stateKey, s)
	name := cycle.Bound()
	s.bound = name != ""
	if inGroup(cs) {
		cycle.Waits() // how the group's attempt ends is said to others
		s.rehearsed = p.rehearses(cycle, nodes)
	}
	if !s.bound && len(pod.Spec.ResourceClaims) == 0 {
		name = p.choose(cs, pod, cycle.Ranked())
	}
	if name == "" {
		return nil, nil //nolint:nilnil // all nodes, and success
	}
	s.named = true
	return only(name), nil
}

func only(node string) *fwk.PreFilterResult { return &fwk.PreFilterResult{NodeNames: sets.New(node)} }

// inGroup reports whether the attempt is one of kube-scheduler's for a whole group of pods, which
// 1.35 does not have.
func inGroup(cs fwk.CycleState) bool {
	group, ok := cs.(interface{ IsPodGroupSchedulingCycle() bool })
	return ok && group.IsPodGroupSchedulingCycle()
}

// PreFilterExtensions implements fwk.PreFilterPlugin.
func (p *Plugin) PreFilterExtensions() fwk.PreFilterExtensions { return p }

// AddPod implements fwk.PreFilterExtensions: a pod that was removed is back, or one counts that is
// nominated to the node.
func (p *Plugin) AddPod(_ context.Context, cs fwk.CycleState, _ *v1.Pod, added fwk.PodInfo, node fwk.NodeInfo) *fwk.Status {
	s, pod := stateOf(cs), added.GetPod()
	if s == nil {
		return nil
	}
	if s.rehearsed != nil && pod.Spec.NodeName != "" {
		return s.rehearsed.putBack(s.cycle, pod)
	}
	uid := string(pod.UID)
	if s.trial.putBack(pod, func(c []ledger.Candidate) []string { return s.cycle.Victims(node.Node().Name, c) }, p.budgets) {
		if i := slices.Index(s.overlay.Removed, uid); i >= 0 {
			s.overlay.Removed = slices.Delete(s.overlay.Removed, i, i+1)
		}
		return nil
	}
	if pod.Spec.NodeName == "" && !s.cycle.Counted(uid, node.Node().Name) {
		if request, asks := s.cycle.Requests(pod); asks {
			s.overlay.Added = append(s.overlay.Added, request)
		}
	}
	return nil
}

// budgets are all disruption budgets; none where they cannot be listed, as kube-scheduler has it.
func (p *Plugin) budgets() []*policy.PodDisruptionBudget {
	all, _ := p.pdbs.List(labels.Everything())
	return all
}

// RemovePod implements fwk.PreFilterExtensions.
func (*Plugin) RemovePod(_ context.Context, cs fwk.CycleState, _ *v1.Pod, removed fwk.PodInfo, _ fwk.NodeInfo) *fwk.Status {
	s, pod := stateOf(cs), removed.GetPod()
	if s == nil {
		return nil
	}
	if s.rehearsed != nil && pod.Spec.NodeName != "" {
		s.rehearsed.remove(pod)
		return nil
	}
	uid := string(pod.UID)
	if i := slices.IndexFunc(s.overlay.Added, func(r accel.Request) bool { return r.Pod == uid }); i >= 0 {
		s.overlay.Added = slices.Delete(s.overlay.Added, i, i+1)
		return nil
	}
	s.trial.remove(pod)
	if _, asks := s.cycle.Requests(pod); asks {
		s.overlay.Removed = append(s.overlay.Removed, uid)
	}
	return nil
}

// Filter implements fwk.FilterPlugin.
func (p *Plugin) Filter(_ context.Context, cs fwk.CycleState, _ *v1.Pod, node fwk.NodeInfo) *fwk.Status {
	s := stateOf(cs)
	if s == nil {
		return nil
	}
	name, overlay := node.Node().Name, s.overlay
	if s.rehearsed != nil {
		overlay.Removed = s.rehearsed.away[name]
		overlay.Added = slices.Concat(p.core.rehearsal.on(name), overlay.Added)
	}
	r, refused := s.cycle.Refuse(name, overlay)
	switch {
	case !refused && s.trial.spares(s.overlay.Removed):
		return nil
	case !refused:
		return fwk.NewStatus(fwk.Unschedulable, "fewer pods have to be evicted if this one is")
	case r.Unresolvable:
		return fwk.NewStatus(fwk.UnschedulableAndUnresolvable, r.Reason)
	}
	return fwk.NewStatus(fwk.Unschedulable, r.Reason)
}

// ofPreemption precedes what PostFilter says, which follows the reasons of the nodes in one text.
const ofPreemption = "preemption: "

// PostFilter implements fwk.PostFilterPlugin. It must be before DefaultPreemption.
func (p *Plugin) PostFilter(ctx context.Context, cs fwk.CycleState, pod *v1.Pod, statuses fwk.NodeToStatusReader) (
	*fwk.PostFilterResult, *fwk.Status) {
	s, c := stateOf(cs), claimedOf(cs)
	switch {
	case c != nil && c.named, s != nil && s.named && !s.bound:
		p.core.failed.add(string(pod.UID))
		p.core.config.Narrowed()
		p.core.config.Activator.soon(ctx, p.handle, pod)
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable,
			ofPreemption+"the pod cannot run on the node that the policy rates best; trying all nodes")
	case s == nil:
	case s.bound:
		s.cycle.Failed()
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, ofPreemption+"the pod may be bound already")
	default:
		s.cycle.Failed()
		// Room on a node that the pod cannot run on any more, such as one that is cordoned, helps it nothing.
		node := pod.Status.NominatedNodeName
		if s.cycle.RoomIsComing(p.left(node)) && statuses.Get(node).Code() != fwk.UnschedulableAndUnresolvable {
			return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, ofPreemption+"terminating pods make room on the nominated node")
		}
		// A nomination that came to nothing is for DefaultPreemption to take back.
		if node == "" && !s.cycle.Evictions() {
			return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, ofPreemption+"no pod of lower priority holds any of "+
				string(s.cycle.Request().Resource))
		}
	}
	return nil, fwk.NewStatus(fwk.Unschedulable)
}

// left returns which pods, by their UIDs, this attempt does not see on a node.
func (p *Plugin) left(node string) func(podUID string) bool {
	info, err := p.handle.SnapshotSharedLister().NodeInfos().Get(node)
	if err != nil {
		return nil
	}
	there := podsOf(info)
	return func(podUID string) bool { return !there.Has(podUID) }
}

// podsOf returns UIDs.
func podsOf(info fwk.NodeInfo) sets.Set[string] {
	uids := sets.New[string]()
	for _, pod := range info.GetPods() {
		uids.Insert(string(pod.GetPod().UID))
	}
	return uids
}

// PreScore implements fwk.PreScorePlugin.
func (*Plugin) PreScore(_ context.Context, cs fwk.CycleState, _ *v1.Pod, nodes []fwk.NodeInfo) *fwk.Status {
	s, c := stateOf(cs), claimedOf(cs)
	if s == nil && c == nil {
		return fwk.NewStatus(fwk.Skip)
	}
	names := make([]string, len(nodes))
	for i, node := range nodes {
		names[i] = node.Node().Name
	}
	if s == nil {
		c.preScore(names)
		return nil
	}
	s.scores = scoresOf(names, s.cycle.Scores(names))
	return nil
}

// Score implements fwk.ScorePlugin.
func (*Plugin) Score(_ context.Context, cs fwk.CycleState, _ *v1.Pod, node fwk.NodeInfo) (int64, *fwk.Status) {
	name := node.Node().Name
	if s := stateOf(cs); s != nil {
		return s.scores[name], nil
	}
	if c := claimedOf(cs); c != nil {
		return c.scores[name], nil
	}
	return 0, nil
}

// ScoreExtensions implements fwk.ScorePlugin.
func (*Plugin) ScoreExtensions() fwk.ScoreExtensions { return nil }

// Reserve implements fwk.ReservePlugin. The watch may have shown something since Filter; then the
// pod is rejected, and tried again.
func (p *Plugin) Reserve(ctx context.Context, cs fwk.CycleState, pod *v1.Pod, node string) *fwk.Status {
	s := stateOf(cs)
	if s == nil {
		return nil
	}
	if s.rehearsed != nil && inGroup(cs) {
		s.rehearsed.node = node
		p.core.rehearsal.place(node, s.cycle.Request())
		return nil
	}
	grant, undo, err := s.cycle.Hold(node)
	if before := s.hold.undo; before != nil {
		before() // it is the same reservation
	}
	if err != nil {
		*s.hold = hold{}
		p.core.config.Activator.soon(ctx, p.handle, pod)
		return fwk.NewStatus(fwk.Unschedulable, err.Error())
	}
	*s.hold = hold{grant: grant, undo: undo}
	return nil
}

// Unreserve implements fwk.ReservePlugin. Something stood against the node after all: if it was
// named, the next attempt is over all nodes.
func (p *Plugin) Unreserve(_ context.Context, cs fwk.CycleState, pod *v1.Pod, _ string) {
	if c := claimedOf(cs); c != nil && c.named {
		p.core.failed.add(string(pod.UID))
	}
	s := stateOf(cs)
	if s != nil && s.rehearsed != nil {
		p.core.rehearsal.undo(string(pod.UID))
	}
	if s != nil && s.hold.undo != nil {
		s.hold.undo()
		*s.hold = hold{}
		if s.named && !s.bound {
			p.core.failed.add(string(pod.UID))
		}
	}
}

// Bind implements fwk.BindPlugin. It must be before DefaultBinder.
func (p *Plugin) Bind(ctx context.Context, cs fwk.CycleState, pod *v1.Pod, node string) *fwk.Status {
	s := stateOf(cs)
	if s == nil {
		return fwk.NewStatus(fwk.Skip)
	}
	if s.hold.undo == nil || s.hold.grant.Node != node {
		return fwk.AsStatus(errors.New("nothing is reserved for the pod on the node; the plugin is not enabled for Reserve"))
	}
	if err := context.Cause(ctx); err != nil {
		return fwk.AsStatus(err)
	}
	// A bind that has begun is finished: while the request is on its way nothing shows what becomes of it.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), decision.BindTimeout)
	defer cancel()
	if p.core.config.Lead != nil {
		bounded, release, err := p.core.config.Lead(ctx)
		if err != nil {
			return fwk.AsStatus(err)
		}
		defer release()
		ctx = bounded
	}
	err := s.cycle.Bind(ctx, &s.hold.grant)
	if errors.Is(err, cluster.ErrOutcomeUnknown) {
		s.hold.undo = nil // it ends when the outcome is known
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "Could not bind", "pod", klog.KObj(pod), "node", node)
		return fwk.AsStatus(err)
	}
	return nil
}

// PostBind implements fwk.PostBindPlugin.
func (p *Plugin) PostBind(_ context.Context, cs fwk.CycleState, pod *v1.Pod, _ string) {
	p.core.failed.forget(string(pod.UID))
	if c := claimedOf(cs); c != nil && c.units != nil && !cluster.ComesWithNode(pod) {
		p.core.learning.Learn(*c.units)
	}
}

// SignPod implements fwk.SignPlugin: pods of ours cannot be treated alike, as each changes what is
// free; to others the plugin makes no difference.
func (p *Plugin) SignPod(_ context.Context, pod *v1.Pod) ([]fwk.SignFragment, *fwk.Status) {
	if requests, _ := kube.RequestsOf(pod, p.core.config.Resources); len(requests) > 0 {
		return nil, fwk.NewStatus(fwk.Unschedulable, "the pod requests shared devices")
	}
	return nil, nil
}
