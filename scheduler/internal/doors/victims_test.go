package doors

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	policy "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"
	fwk "k8s.io/kube-scheduler/framework"
	config "k8s.io/kubernetes/pkg/scheduler/apis/config"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/defaultpreemption"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/feature"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// randomCluster has a few nodes with pods of several priorities, on one or two devices each, and
// sometimes budgets.
func randomCluster(r *rand.Rand) *cluster {
	c := &cluster{}
	started := r.Perm(100)
	for n := range 1 + r.IntN(3) {
		name := fmt.Sprint("node-", n)
		sizes := make([]accel.Units, 1+r.IntN(3))
		for i := range sizes {
			sizes[i] = accel.Units(6 + 4*r.IntN(3))
		}
		c.node(name, nil, sizes...)
		free := slices.Clone(sizes)
		for p := range 1 + r.IntN(7) {
			on := []int{r.IntN(len(sizes))}
			if second := r.IntN(len(sizes)); r.IntN(4) == 0 && second != on[0] {
				on = append(on, second)
			}
			each := accel.Units(1 + r.IntN(5))
			if slices.ContainsFunc(on, func(d int) bool { return free[d] < each }) {
				continue
			}
			pod := podOf(fmt.Sprintf("%s-p%d", name, p), int64(each), len(on), int32(r.IntN(4)))
			pod.Labels = map[string]string{"app": fmt.Sprint(r.IntN(3))}
			pod.Status.StartTime = &metav1.Time{Time: time.Unix(int64(started[0]), 0)}
			pod.CreationTimestamp = *pod.Status.StartTime
			if started = started[1:]; r.IntN(10) == 0 {
				pod.DeletionTimestamp = &metav1.Time{Time: time.Unix(1000, 0)}
			}
			for _, d := range on {
				free[d] -= each
			}
			c.runs(pod, name, on...)
		}
	}
	if r.IntN(2) == 0 {
		for app := range 2 {
			c.budgets = append(c.budgets, budget(fmt.Sprint("budget-", app), int32(r.IntN(2)), "app", fmt.Sprint(app)))
		}
	}
	return c
}

func podOf(name string, each int64, devices int, priority int32) *v1.Pod {
	pod := newPod(name, each*int64(devices))
	pod.Spec.Priority = &priority
	if devices > 1 {
		pod.Annotations = map[string]string{wire.CountAnnotation: fmt.Sprint(devices)}
	}
	return pod
}

func budget(name string, allowed int32, label, value string) *policy.PodDisruptionBudget {
	return &policy.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name},
		Spec:       policy.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{label: value}}},
		Status:     policy.PodDisruptionBudgetStatus{DisruptionsAllowed: allowed},
	}
}

// harm says how bad it is to evict some pods: see docs/design/018-preemption.md.
type harm struct {
	violations, pods int
	priority         int32
}

func (h harm) compare(o harm) int {
	return cmp.Or(cmp.Compare(h.violations, o.violations), cmp.Compare(h.pods, o.pods), cmp.Compare(h.priority, o.priority))
}

// place is one node, counted from what its pods hold.
type place struct {
	cluster *cluster
	node    string
	each    accel.Units // that the pod requests of each device
	devices int
	lower   []*v1.Pod // pods of lower priority, the most important first
	violate map[string]bool
}

func (c *cluster) place(node string, pod *v1.Pod, each accel.Units, devices int) *place {
	p := &place{cluster: c, node: node, each: each, devices: devices, violate: map[string]bool{}}
	for _, q := range c.pods {
		if q.Spec.NodeName == node && *q.Spec.Priority < *pod.Spec.Priority {
			p.lower = append(p.lower, q)
		}
	}
	slices.SortFunc(p.lower, func(a, b *v1.Pod) int {
		return cmp.Or(cmp.Compare(*b.Spec.Priority, *a.Spec.Priority), a.Status.StartTime.Compare(b.Status.StartTime.Time))
	})
	for _, b := range c.budgets {
		left := b.Status.DisruptionsAllowed
		for _, q := range p.lower {
			if q.Labels["app"] == b.Spec.Selector.MatchLabels["app"] {
				if left--; left < 0 {
					p.violate[q.Name] = true
				}
			}
		}
	}
	return p
}

// fits reports whether the pod fits once some of the lower pods are gone.
func (p *place) fits(gone func(*v1.Pod) bool) bool {
	free := map[accel.DeviceID]accel.Units{}
	for _, s := range p.cluster.offers[p.node].Shares {
		free[s.Device.ID] = s.Units
	}
	for _, q := range p.cluster.pods {
		if q.Spec.NodeName != p.node || gone(q) {
			continue
		}
		on := p.cluster.held[string(q.UID)]
		quantity := q.Spec.Containers[0].Resources.Limits[v1.ResourceName(memory)]
		for _, d := range on {
			free[d] -= accel.Units(quantity.Value()) / accel.Units(len(on))
		}
	}
	able := 0
	for _, f := range free {
		if f >= p.each {
			able++
		}
	}
	return able >= p.devices
}

// harm counts no pod that is being deleted.
func (p *place) harm(names []string, budgets bool) (h harm) {
	for _, q := range p.lower {
		if q.DeletionTimestamp != nil || !slices.Contains(names, q.Name) {
			continue
		}
		if budgets && p.violate[q.Name] {
			h.violations++
		}
		if h.pods == 0 || *q.Spec.Priority > h.priority {
			h.priority = *q.Spec.Priority
		}
		h.pods++
	}
	return h
}

// least goes through all sets of some pods, and returns the least harm that makes room.
func (p *place) least(of []*v1.Pod, budgets bool) (least harm, possible bool) {
	for set := range uint(1) << len(of) {
		var names []string
		for i, q := range of {
			if set&(1<<i) != 0 {
				names = append(names, q.Name)
			}
		}
		if !p.fits(func(q *v1.Pod) bool { return slices.Contains(names, q.Name) }) {
			continue
		}
		if h := p.harm(names, budgets); !possible || h.compare(least) < 0 {
			least, possible = h, true
		}
	}
	return least, possible
}

// victims runs kube-scheduler's preemption on all nodes on which it may help, and returns the victims by node.
func (p *compiled) victims(tb testing.TB, state fwk.CycleState, pod *v1.Pod, why map[string]*fwk.Status,
	budgets []*policy.PodDisruptionBudget) map[string]*extenderv1.Victims {
	tb.Helper()
	all, err := p.snapshot.NodeInfos().List()
	if err != nil {
		tb.Fatal(err)
	}
	var nodes []fwk.NodeInfo
	for _, n := range all {
		if why[n.Node().Name].Code() == fwk.Unschedulable {
			nodes = append(nodes, n)
		}
	}
	if len(nodes) == 0 {
		return nil
	}
	args := &config.DefaultPreemptionArgs{MinCandidateNodesPercentage: 100, MinCandidateNodesAbsolute: 100}
	stock, err := defaultpreemption.New(tb.Context(), args, p.Framework, feature.Features{})
	if err != nil {
		tb.Fatal(err)
	}
	candidates, _, err := stock.Evaluator.DryRunPreemption(tb.Context(), state, pod, nodes, budgets, 0, int32(len(nodes))+1)
	if err != nil {
		tb.Fatal(err)
	}
	return stock.CandidatesToVictimsMap(candidates)
}

func namesOf(v *extenderv1.Victims) (out []string) {
	for _, p := range v.Pods {
		out = append(out, p.Name)
	}
	slices.Sort(out)
	return out
}

// TestVictimsOfBothDoors holds the victims of both doors against all sets of pods, in random states.
func TestVictimsOfBothDoors(t *testing.T) {
	const states = 500
	var evicts, budgeted, several, stockMore, stockVain, same, differ, reduced int
	for seed, left := uint64(0), states; left > 0; seed++ {
		r := rand.New(rand.NewPCG(seed, 19))
		c := randomCluster(r)
		each, devices := accel.Units(4+r.IntN(9)), 1
		if r.IntN(3) == 0 {
			devices = 2
		}
		pod := podOf("preemptor", int64(each), devices, int32(2+r.IntN(3)))
		names, places := c.names(), map[string]*place{}
		var want []string
		for _, name := range names {
			places[name] = c.place(name, pod, each, devices)
			if places[name].fits(func(*v1.Pod) bool { return false }) {
				want = append(want, name)
			}
		}
		if len(want) > 0 && seed >= states/5 {
			continue // no door is asked for victims, which some states are enough to see
		}
		left--

		inside, outside, counting := c.plugin(t, false, false), c.extender(t, false), c.plugin(t, false, true)
		state, fits, why := inside.attempt(t, pod)
		var filtered extenderv1.ExtenderFilterResult
		outside.ask(t, "/filter", extenderv1.ExtenderArgs{Pod: pod, NodeNames: &names}, &filtered)
		var fit []string
		if filtered.NodeNames != nil {
			fit = *filtered.NodeNames
		}
		slices.Sort(fit)
		if !slices.Equal(fits, want) || !slices.Equal(fit, want) {
			t.Fatalf("seed %d: the pod fits on %v; the plugin says %v, the extender %v", seed, want, fits, fit)
		}
		if len(want) > 0 {
			continue // no door is asked for victims
		}

		plugged := inside.victims(t, state, pod, why, c.budgets)
		stockState, stockFits, stockWhy := counting.attempt(t, pod)
		proposed := counting.victims(t, stockState, pod, stockWhy, c.budgets)
		question := extenderv1.ExtenderPreemptionArgs{Pod: pod, NodeNameToMetaVictims: map[string]*extenderv1.MetaVictims{}}
		for name, v := range proposed {
			meta := &extenderv1.MetaVictims{NumPDBViolations: v.NumPDBViolations}
			for _, p := range v.Pods {
				meta.Pods = append(meta.Pods, &extenderv1.MetaPod{UID: string(p.UID)})
			}
			question.NodeNameToMetaVictims[name] = meta
		}
		for _, name := range stockFits { // as versions after 1.37 ask, where the sum is enough
			question.NodeNameToMetaVictims[name] = &extenderv1.MetaVictims{}
		}
		if len(plugged) == 0 && seed%10 > 0 {
			clear(question.NodeNameToMetaVictims) // where nothing makes room the extender waits for its watch
		}
		var answer extenderv1.ExtenderPreemptionResult
		outside.ask(t, "/preempt", question, &answer)

		for _, name := range names {
			p := places[name]
			least, possible := p.least(p.lower, true)
			v := plugged[name]
			if possible != (v != nil) {
				t.Fatalf("seed %d: %s: room can be made: %t; the plugin has victims: %t (%v)", seed, name, possible, v != nil, why[name])
			}
			plain, _ := p.least(p.lower, false)
			var told []string
			if m := answer.NodeNameToMetaVictims[name]; m != nil {
				for _, q := range m.Pods {
					told = append(told, q.UID[len("uid-"):])
				}
			}
			asked := question.NodeNameToMetaVictims[name] != nil
			if asked && possible != (len(told) > 0) {
				t.Fatalf("seed %d: %s: room can be made: %t; the extender evicts %v", seed, name, possible, told)
			}
			if !possible {
				continue
			}
			evicts++
			if len(c.budgets) > 0 {
				budgeted++
			}
			if devices > 1 {
				several++
			}
			got := namesOf(v)
			if h := p.harm(got, true); h != least || !p.fits(gone(got)) {
				t.Fatalf("seed %d: %s: the plugin evicts %v: harm %+v, the least is %+v", seed, name, got, h, least)
			}
			flagged := 0
			for _, q := range got {
				if p.violate[q] {
					flagged++
				}
			}
			if int64(flagged) != v.NumPDBViolations {
				t.Fatalf("seed %d: %s: %d of %v violate a budget, kube-scheduler counts %d", seed, name, flagged, got, v.NumPDBViolations)
			}
			if !asked {
				continue
			}
			slices.Sort(told)
			if !p.fits(gone(told)) || len(told) != len(slices.Compact(slices.Clone(told))) {
				t.Fatalf("seed %d: %s: the extender evicts %v", seed, name, told)
			}
			// The extender takes the least harmful of what is proposed, and of all where that makes no room. It
			// knows no budgets.
			wanted := plain
			if stock := proposed[name]; stock != nil {
				names := namesOf(stock)
				if p.fits(gone(names)) {
					of := slices.DeleteFunc(slices.Clone(p.lower), func(q *v1.Pod) bool { return !slices.Contains(names, q.Name) })
					wanted, _ = p.least(of, false)
					reduced++
					if h := p.harm(names, false); h.compare(plain) > 0 {
						stockMore++
					}
				} else {
					stockVain++
				}
			}
			if h := p.harm(told, false); h != wanted {
				t.Fatalf("seed %d: %s: the extender evicts %v: harm %+v, the least is %+v", seed, name, told, h, wanted)
			}
			if p.harm(got, false) == p.harm(told, false) {
				same++
			} else if differ++; wanted == plain && len(c.budgets) == 0 {
				t.Fatalf("seed %d: %s: the plugin evicts %v, the extender %v", seed, name, got, told)
			}
		}
	}
	t.Logf("%d nodes where room can be made, %d with budgets, %d for several devices; both doors as harmful %d, not %d; "+
		"of kube-scheduler's own victims by the sum: %d make no room, %d do and are more harmful than needed, of %d that do",
		evicts, budgeted, several, same, differ, stockVain, stockMore, reduced)
	if evicts < 250 || budgeted < 120 || several < 40 || stockMore < 10 || stockVain < 50 {
		t.Error("too few cases of interest")
	}
}

func gone(names []string) func(*v1.Pod) bool {
	return func(p *v1.Pod) bool { return slices.Contains(names, p.Name) }
}
