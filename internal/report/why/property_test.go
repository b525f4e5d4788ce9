package why

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

var seeds = flag.Int("why.seeds", 200, "random clusters of TestAdvice")

// randomCluster is a small cluster with a pod that waits, most often.
func randomCluster(t *testing.T, seed int64) *builder {
	t.Helper()
	rng := rand.New(rand.NewSource(seed))
	chance := func(percent int) bool { return rng.Intn(100) < percent }
	b := newBuilder(t)
	b.Pods = make([]v1.Pod, 0, 8) // so that pointers stay
	closed := chance(40)          // nodes and pods have more that keeps the pod off
	free := map[string][]int64{}
	for i := range 1 + rng.Intn(3) {
		name := fmt.Sprintf("n%d", i)
		units := make([]accel.Units, 1+rng.Intn(4))
		for d := range units {
			units[d] = accel.Units(4 + rng.Intn(9))
		}
		n := b.node(name, units, func(in *accel.Inventory) {
			for d := range in.Shares {
				s := &in.Shares[d]
				if s.Health.Unhealthy = chance(10); s.Health.Unhealthy {
					s.Health.Reason = "hot"
				}
				if chance(10) {
					s.Withheld = 1
				}
				if chance(30) {
					s.Model = "L600"
				}
			}
		})
		for d, u := range units {
			free[name] = append(free[name], int64(u-b.inventories[name].Shares[d].Withheld))
		}
		n.Spec.Unschedulable = chance(15)
		if chance(15) {
			n.Spec.Taints = []v1.Taint{{Key: "dedicated", Value: strconv.Itoa(rng.Intn(2)), Effect: v1.TaintEffectNoSchedule}}
		}
		if closed && chance(15) {
			n.Spec.Taints = append(n.Spec.Taints, v1.Taint{Key: "maintenance", Value: "0", Effect: v1.TaintEffectNoExecute})
		}
		if chance(80) {
			n.Labels["zone"] = "a"
		}
		if !closed || chance(60) {
			n.Labels[v1.LabelArchStable] = "amd64"
		}
		n.Status.Allocatable[v1.ResourceCPU] = *resource.NewQuantity(int64(1+rng.Intn(6)), resource.DecimalSI)
		n.Status.Allocatable[v1.ResourcePods] = *resource.NewQuantity(int64(2+rng.Intn(6)), resource.DecimalSI)
	}
	for i := range rng.Intn(7) {
		name := fmt.Sprintf("n%d", rng.Intn(len(b.Nodes)))
		on := []int{rng.Intn(len(free[name]))}
		if second := (on[0] + 1) % len(free[name]); second != on[0] && chance(25) {
			on = append(on, second)
			slices.Sort(on)
		}
		if closed && chance(30) { // without devices
			b.on(fmt.Sprintf("p%d", i), name, 0).Spec.Containers[0].Resources.Requests[v1.ResourceCPU] =
				*resource.NewQuantity(int64(1+rng.Intn(4)), resource.DecimalSI)
			continue
		}
		each := free[name][on[0]]
		for _, d := range on {
			each = min(each, free[name][d])
		}
		if each <= 0 {
			continue
		}
		each = 1 + rng.Int63n(each)
		for _, d := range on {
			free[name][d] -= each
		}
		p := b.on(fmt.Sprintf("p%d", i), name, each*int64(len(on)), on...)
		if chance(10) {
			delete(p.Annotations, wire.GrantAnnotation) // on no device that is known
		}
		priority := int32(rng.Intn(2))
		p.Spec.Priority = &priority
		p.CreationTimestamp = metav1.NewTime(taken.Add(-time.Duration(rng.Intn(1000)) * time.Second))
		if chance(10) {
			at := metav1.NewTime(taken.Add(time.Second))
			p.DeletionTimestamp = &at
		}
	}
	p := b.waiting("train", int64(1+rng.Intn(14)), insufficient)
	if chance(30) {
		annotate(p, wire.CountAnnotation, strconv.Itoa(1+rng.Intn(4)))
	}
	if chance(20) {
		annotate(p, wire.AvoidModelsAnnotation, []string{"S60", "L600", "L600,S60"}[rng.Intn(3)])
	}
	if chance(20) {
		annotate(p, wire.UseModelsAnnotation, []string{"S60", "L600", "S90"}[rng.Intn(3)])
	}
	if chance(20) {
		p.Spec.NodeSelector = map[string]string{"zone": "a"}
	}
	if closed && chance(25) { // which no person labels a node with
		p.Spec.NodeSelector = map[string]string{"zone": "a", v1.LabelArchStable: "amd64"}
	}
	return b
}

// TestAdvice: on random clusters, every verified change admits the pod once its commands are
// carried out, nothing smaller of its kind does, and where no change of a kind is given,
// there is none. What admits a pod is decided by naive, a second implementation.
func TestAdvice(t *testing.T) {
	kinds := map[ChangeKind]int{}
	for seed := range int64(*seeds) {
		b := randomCluster(t, seed)
		before, err := json.Marshal(&b.Snapshot.Pods)
		if err != nil {
			t.Fatal(err)
		}
		e := New(&b.Snapshot).Pod(b.Snapshot.Pod("team-a", "train"))
		if after, _ := json.Marshal(&b.Snapshot.Pods); !bytes.Equal(after, before) {
			t.Fatalf("seed %d: the snapshot was changed", seed)
		}
		checkAdvice(t, seed, b, &e, kinds)
		if t.Failed() {
			checkPrint(t, &e)
			return
		}
	}
	t.Logf("changes of %d clusters: %v", *seeds, kinds)
	for _, kind := range append(slices.Clone(changeKinds), "patch") {
		if kinds[kind] == 0 {
			t.Errorf("no cluster has a change of kind %s", kind)
		}
	}
}

func checkPrint(t *testing.T, e *Explanation) {
	t.Helper()
	var out strings.Builder
	if err := Print(&out, e); err != nil {
		t.Fatal(err)
	}
	t.Log(out.String())
}

func checkAdvice(t *testing.T, seed int64, b *builder, e *Explanation, kinds map[ChangeKind]int) {
	t.Helper()
	pod := b.Snapshot.Pod("team-a", "train")
	fits := naive(&b.Snapshot, pod)
	if says := e.Causes[0].Code == Backoff; says != fits {
		t.Errorf("seed %d: causes %+v, but it fits: %v", seed, e.Causes, fits)
		return
	}
	if fits {
		if len(e.Changes) > 0 {
			t.Errorf("seed %d: changes %+v of a pod that fits", seed, e.Changes)
		}
		return
	}
	given := map[ChangeKind]*Change{}
	single := false
	for i := range e.Changes {
		c := &e.Changes[i]
		kinds[c.Kind]++
		if !c.Verified {
			t.Errorf("seed %d: %q is not verified", seed, c.Text)
			continue
		}
		pair := strings.Contains(c.Text, ", and ")
		if pair {
			kinds["pair"]++
		}
		if after := carryOut(t, &b.Snapshot, c); !naive(after, after.Pod("team-a", "train")) {
			t.Errorf("seed %d: %q does not admit the pod", seed, c.Text)
		}
		if after, ok := applyPatches(t, &b.Snapshot, c); ok {
			kinds["patch"]++
			if !naive(after, after.Pod("team-a", "train")) {
				t.Errorf("seed %d: the patches of %q do not admit the pod: %+v", seed, c.Text, c.Patch)
			}
		}
		if !pair {
			given[c.Kind] = c
			single = single || c.Kind != ChangeMoreNodes
		}
	}
	found := bruteForce(t, &b.Snapshot)
	if !slices.ContainsFunc(e.Changes, func(c Change) bool { return c.Kind != ChangeMoreNodes }) {
		kinds["none"]++
		if two := pairs(&b.Snapshot); two != "" {
			t.Errorf("seed %d: no change, but %q admits the pod", seed, two)
		}
	}
	for kind, least := range found {
		c := given[kind]
		switch {
		case c == nil:
			t.Errorf("seed %d: no change of kind %s, but %q admits the pod", seed, kind, least.text)
		case least.size < sizeOf(pod, c):
			t.Errorf("seed %d: %q is of size %d, but %q admits the pod", seed, c.Text, sizeOf(pod, c), least.text)
		}
	}
	for kind := range given {
		if _, ok := found[kind]; !ok && kind != ChangeMoreNodes && kind != ChangeAnnotation && kind != ChangeRequest {
			t.Errorf("seed %d: brute force finds no change of kind %s", seed, kind)
		}
	}
	if !single && len(e.Changes) > 0 && e.Changes[0].Kind != ChangeMoreNodes && len(found) > 0 {
		t.Errorf("seed %d: the pair %q, but %v is enough", seed, e.Changes[0].Text, found)
	}
}

// pairs are two changes of kinds 1 to 3 that admit the pod together, "" for none.
func pairs(s *Snapshot) string {
	type step struct {
		text   string
		change func(s *Snapshot, p *v1.Pod)
	}
	var nodes, annotations, requests []step
	for i := range s.Nodes {
		n := s.Nodes[i].Name
		nodes = append(nodes, step{"uncordon " + n, func(s *Snapshot, _ *v1.Pod) { s.Nodes[i].Spec.Unschedulable = false }},
			step{"untaint " + n, func(s *Snapshot, _ *v1.Pod) { s.Nodes[i].Spec.Taints = nil }},
			step{"label " + n, func(s *Snapshot, _ *v1.Pod) { s.Nodes[i].Labels["zone"] = "a" }})
	}
	for k := 1; k <= 14; k++ {
		annotations = append(annotations, step{fmt.Sprint(k, " devices"), func(_ *Snapshot, p *v1.Pod) {
			annotate(p, wire.CountAnnotation, strconv.Itoa(k))
		}})
	}
	for _, key := range []string{wire.AvoidModelsAnnotation, wire.UseModelsAnnotation} {
		annotations = append(annotations, step{"drop " + key, func(_ *Snapshot, p *v1.Pod) { delete(p.Annotations, key) }})
	}
	dropped := []step{{"no selector", func(_ *Snapshot, p *v1.Pod) { p.Spec.NodeSelector = nil }}}
	have := s.Pod("team-a", "train").Spec.Containers[0].Resources.Requests[memory]
	for u := int64(1); u < have.Value(); u++ {
		requests = append(requests, step{fmt.Sprint(u, " units"), func(_ *Snapshot, p *v1.Pod) { setUnits(p, u) }})
	}
	for _, lists := range [][2][]step{{nodes, nodes}, {nodes, annotations}, {nodes, requests}, {nodes, dropped}, {annotations, requests}} {
		for _, first := range lists[0] {
			for _, second := range lists[1] {
				c := cloneOf(s)
				p := c.Pod("team-a", "train")
				first.change(c, p)
				second.change(c, p)
				if naive(c, p) {
					return first.text + ", " + second.text
				}
			}
		}
	}
	return ""
}

// brute is the smallest change of a kind.
type brute struct {
	text string
	size int
}

// sizeOf is what a change must be smallest in: devices, units away, pods.
func sizeOf(p *v1.Pod, c *Change) int {
	have := p.Spec.Containers[0].Resources.Requests[memory]
	size, units := 0, int64(0)
	switch {
	case c.Text == "use one device":
		return 1
	case strings.HasPrefix(c.Text, "spread over "):
		_, _ = fmt.Sscanf(c.Text, "spread over %d", &size)
		return size
	case c.Kind == ChangeRequest:
		if n, _ := fmt.Sscanf(c.Text, "request %d instead", &units); n == 1 && !strings.Contains(c.Text, "cpu") {
			return int(max(units-have.Value(), have.Value()-units))
		}
	case c.Kind == ChangeEnd:
		return len(c.Commands)
	}
	return 1000 // of another sort, which is tried after these
}

// bruteForce tries every change of each kind and returns the smallest that admits the pod.
func bruteForce(t *testing.T, s *Snapshot) map[ChangeKind]brute {
	t.Helper()
	out := map[ChangeKind]brute{}
	try := func(kind ChangeKind, size int, text string, change func(s *Snapshot, p *v1.Pod)) {
		if had, ok := out[kind]; ok && had.size <= size {
			return
		}
		c := cloneOf(s)
		change(c, c.Pod("team-a", "train"))
		if naive(c, c.Pod("team-a", "train")) {
			out[kind] = brute{text, size}
		}
	}
	remove := func(gone func(*v1.Pod) bool) func(*Snapshot, *v1.Pod) {
		return func(s *Snapshot, _ *v1.Pod) {
			s.Pods = slices.DeleteFunc(s.Pods, func(p v1.Pod) bool { return gone(&p) })
		}
	}
	try(ChangeWait, 1000, "wait", remove(func(p *v1.Pod) bool { return p.DeletionTimestamp != nil }))
	for i := range s.Nodes {
		try(ChangeNode, 1000, "uncordon", func(s *Snapshot, _ *v1.Pod) { s.Nodes[i].Spec.Unschedulable = false })
		if len(s.Nodes[i].Spec.Taints) == 1 {
			try(ChangeNode, 1000, "taint", func(s *Snapshot, _ *v1.Pod) { s.Nodes[i].Spec.Taints = nil })
		}
		try(ChangeNode, 1000, "label", func(s *Snapshot, _ *v1.Pod) { s.Nodes[i].Labels["zone"] = "a" })
	}
	for k := 1; k <= 14; k++ {
		try(ChangeAnnotation, k, fmt.Sprint(k, " devices"), func(_ *Snapshot, p *v1.Pod) {
			annotate(p, wire.CountAnnotation, strconv.Itoa(k))
		})
	}
	drop := func(keys ...string) {
		try(ChangeAnnotation, 1000, "drop "+strings.Join(keys, ", "), func(_ *Snapshot, p *v1.Pod) {
			for _, key := range keys {
				delete(p.Annotations, key)
			}
		})
	}
	drop(wire.AvoidModelsAnnotation)
	drop(wire.UseModelsAnnotation)
	drop(wire.UseModelsAnnotation, wire.AvoidModelsAnnotation)
	for _, value := range []string{"0", "1"} {
		try(ChangeAnnotation, 1000, "tolerate", func(_ *Snapshot, p *v1.Pod) {
			p.Spec.Tolerations = []v1.Toleration{{Key: "dedicated", Operator: v1.TolerationOpEqual, Value: value},
				{Key: "maintenance", Operator: v1.TolerationOpEqual, Value: "0"}}
		})
	}
	have := s.Pod("team-a", "train").Spec.Containers[0].Resources.Requests[memory]
	for u := int64(1); u <= have.Value()+4; u++ {
		if size := int(max(u-have.Value(), have.Value()-u)); size > 0 {
			try(ChangeRequest, size, fmt.Sprint(u, " units"), func(_ *Snapshot, p *v1.Pod) { setUnits(p, u) })
		}
	}
	try(ChangeRequest, 1000, "no selector", func(_ *Snapshot, p *v1.Pod) { p.Spec.NodeSelector = nil })
	var holders []*v1.Pod
	for i := range s.Pods {
		if p := &s.Pods[i]; p.Spec.NodeName != "" && p.DeletionTimestamp == nil {
			holders = append(holders, p)
		}
	}
	for set := range 1 << len(holders) {
		size := 0
		gone := map[string]bool{}
		for i, p := range holders {
			if set>>i&1 == 1 {
				size++
				gone[p.Name] = true
			}
		}
		if size > 0 {
			try(ChangeEnd, size, fmt.Sprint("end ", gone), remove(func(p *v1.Pod) bool { return gone[p.Name] }))
		}
	}
	return out
}
