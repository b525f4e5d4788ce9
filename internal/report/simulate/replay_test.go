package simulate

import (
	"context"
	"errors"
	"math"
	"math/rand"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// seeded returns random numbers that are the same each time.
func seeded(seed int64) *rand.Rand { return rand.New(rand.NewSource(seed)) }

func kindOfName(t *testing.T, name string) PolicyKind {
	t.Helper()
	kinds, err := ParsePolicies(Policies(), []string{name})
	if err != nil {
		t.Fatal(err)
	}
	return kinds[0]
}

func TestArrivals(t *testing.T) {
	_, w := generated(seeded(1), 1, 50)
	total := w.Demand()
	count := func(order []int) (sum accel.Units, times []int) {
		times = make([]int, len(w.Pods))
		for _, i := range order {
			sum += w.Pods[i].Demand()
			times[i]++
		}
		return sum, times
	}
	same := arrivals(seeded(7), w.Pods, total)
	if _, times := count(same); slices.Max(times) != 1 || slices.Min(times) != 1 || slices.IsSorted(same) {
		t.Errorf("with the demand of all pods wanted, they come %v", same)
	}
	if !slices.Equal(same, arrivals(seeded(7), w.Pods, total)) || slices.Equal(same, arrivals(seeded(8), w.Pods, total)) {
		t.Error("the order is not decided by the seed alone")
	}
	more := arrivals(seeded(7), w.Pods, 3*total)
	if sum, times := count(more); !slices.Equal(more[:len(same)], same) || slices.Min(times) < 1 || sum > 3*total+7*1000 ||
		sum < 3*total-1000 {
		t.Errorf("with three times the demand wanted, %d of %d units come", sum, 3*total)
	}
	fewer := arrivals(seeded(7), w.Pods, total/2)
	if sum, times := count(fewer); slices.Max(times) != 1 || sum > total/2 || sum < total/2-8*1000 {
		t.Errorf("with half the demand wanted, %d of %d units come", sum, total/2)
	}
	// The order of the reference, as math/rand gives it: four pods, seed 42.
	if got := arrivals(seeded(42), make([]Pod, 4), 0); !slices.Equal(got, []int{2, 3, 1, 0}) {
		t.Errorf("order with seed 42 is %v", got)
	}
}

func TestNodeOrder(t *testing.T) {
	order := nodeOrder(seeded(1), 100)
	sorted := slices.Clone(order)
	slices.Sort(sorted)
	for i, n := range sorted {
		if i != n {
			t.Fatalf("the order %v is not one of all nodes", order)
		}
	}
	perm := seeded(1).Perm(100)
	for i := range order {
		if perm[order[i]] != i {
			t.Fatalf("node %d is at %d, want %d", order[i], i, perm[order[i]])
		}
	}
}

func TestReplay(t *testing.T) {
	// One device of 1000, pods of 400: two fit, then none. A pod comes for each
	// 40 %.
	c := &Cluster{Nodes: []Node{{Name: "n", CPU: 10000, Memory: 10000,
		Devices: []accel.Share{{Device: accel.Device{ID: "d"}, Units: 1000}}}}}
	w := &Workload{Name: "w", Pods: []Pod{{Name: "p", Ask: place.Ask{Devices: 1, Units: 400}}}}
	tick := time.Duration(0)
	replay := Replay{Until: 1.6, Clock: func() time.Duration { tick += time.Millisecond; return tick }}
	got, err := replay.Run(context.Background(), c, w, kindOfName(t, "binpack"), 3)
	if err != nil {
		t.Fatal(err)
	}
	want := make([]float64, 161)
	for i := range want {
		want[i] = 40 * min(float64(i/40), 2)
	}
	if !slices.Equal(got.Allocated, want) {
		t.Errorf("allocated %v", got.Allocated)
	}
	if got.Arrived != 4 || got.ArrivedUnits != 1600 || got.Refused != 2 || got.RefusedUnits != 800 || got.Seed != 3 {
		t.Errorf("counted %+v", got)
	}
	if !slices.Equal(got.Decisions, slices.Repeat([]time.Duration{time.Millisecond}, 4)) {
		t.Errorf("decisions took %v", got.Decisions)
	}
}

func TestReplayIsRepeatable(t *testing.T) {
	c, w := generated(seeded(2), 40, 400)
	for _, kind := range Policies() {
		first, err := Replay{Until: 1.3}.Run(context.Background(), c, w, kind, 5)
		if err != nil {
			t.Fatal(err)
		}
		again, err := Replay{Until: 1.3}.Run(context.Background(), c, w, kind, 5)
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(first, again) {
			t.Errorf("%s: two runs with one seed differ", kind.Name)
		}
		if last := first.Allocated[130]; last < 50 || last > 100 || first.Refused == 0 {
			t.Errorf("%s: %g %% allocated, %d refused", kind.Name, last, first.Refused)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := (Replay{Until: 1.3}).Run(ctx, c, w, Policies()[0], 5); !errors.Is(err, context.Canceled) {
		t.Errorf("a run whose context has ended: %v", err)
	}
}

// TestChurn compares with what is known of the process: as long as nothing is
// refused, the demand that is there is the offered load.
func TestChurn(t *testing.T) {
	c, w := generated(seeded(3), 60, 400)
	kind := kindOfName(t, "binpack")
	quiet, err := Churn{Load: 0.3, WarmUp: 3, Measure: 60}.Run(context.Background(), c, w, kind, 1)
	if err != nil {
		t.Fatal(err)
	}
	if quiet.Refused != 0 || math.Abs(quiet.Allocated-30) > 1.5 || quiet.RefusedPercent() != 0 {
		t.Errorf("at 30 %% load %g %% are allocated and %d of %d pods refused", quiet.Allocated, quiet.Refused, quiet.Arrived)
	}
	busy, err := Churn{Load: 2, WarmUp: 3, Measure: 20}.Run(context.Background(), c, w, kind, 1)
	if err != nil {
		t.Fatal(err)
	}
	if busy.Allocated < 80 || busy.Allocated > 100 || busy.RefusedPercent() < 40 {
		t.Errorf("at 200 %% load %g %% are allocated and %g %% refused", busy.Allocated, busy.RefusedPercent())
	}
	other, err := Churn{Load: 2, WarmUp: 3, Measure: 20}.Run(context.Background(), c, w, kindOfName(t, "spread"), 1)
	if err != nil {
		t.Fatal(err)
	}
	if other.Arrived != busy.Arrived || other.ArrivedUnits != busy.ArrivedUnits {
		t.Error("two policies with one seed see other pods")
	}
	if _, err := (Churn{Load: 1, Measure: 1}).Run(context.Background(), c, &Workload{Pods: []Pod{{Ask: place.Ask{CPU: 1}}}}, kind,
		1); err == nil {
		t.Error("no error for pods that ask for no device")
	}
}

func TestFindNodes(t *testing.T) {
	eight := func(name string) Node {
		n := Node{Name: name, CPU: 64000, Memory: 1 << 18}
		for i := range 8 {
			n.Devices = append(n.Devices, accel.Share{Device: accel.Device{ID: accel.DeviceID(string(rune('a' + i))), Index: i},
				Units: 1000})
		}
		return n
	}
	repeat := func(n int, a place.Ask) *Workload {
		w := &Workload{Name: "w"}
		for i := range n {
			w.Pods = append(w.Pods, Pod{Name: string(rune('a' + i)), Ask: a})
		}
		return w
	}
	one := &Cluster{Nodes: []Node{eight("n")}}
	tests := map[string]struct {
		cluster *Cluster
		load    *Workload
		refused float64
		want    int
		fewest  int
	}{
		"whole devices":          {cluster: one, load: repeat(20, place.Ask{Devices: 1, Units: 1000}), want: 3, fewest: 3},
		"parts that leave rests": {cluster: one, load: repeat(20, place.Ask{Devices: 1, Units: 600}), want: 3, fewest: 2},
		"CPU is what is short":   {cluster: one, load: repeat(20, place.Ask{Devices: 1, Units: 100, CPU: 32000}), want: 10, fewest: 10},
		"some may be refused":    {cluster: one, load: repeat(20, place.Ask{Devices: 1, Units: 1000}), refused: 20, want: 2, fewest: 3},
		"fewer than there are": {cluster: &Cluster{Nodes: []Node{eight("a"), eight("b"), eight("c"), eight("d")}},
			load: repeat(4, place.Ask{Devices: 4, Units: 1000}), want: 2, fewest: 2},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := Find{Refused: tt.refused}.Run(context.Background(), tt.cluster, tt.load, kindOfName(t, "binpack"), 1)
			if err != nil {
				t.Fatal(err)
			}
			if fewest := FewestNodes(tt.cluster, tt.load); got != tt.want || fewest != tt.fewest {
				t.Errorf("%d nodes, at least %d; want %d, at least %d", got, fewest, tt.want, tt.fewest)
			}
		})
	}
	var misfit *MisfitError
	if _, err := (Find{}).Run(context.Background(), one, repeat(1, place.Ask{Devices: 9, Units: 1000}), kindOfName(t, "binpack"),
		1); !errors.As(err, &misfit) {
		t.Errorf("of a pod that no number of nodes holds it is said: %v", err)
	}
}

// TestKinds: any beginning of the sequence has the kinds of nodes in the
// cluster's proportions, to less than a node.
func TestKinds(t *testing.T) {
	c, _ := generated(seeded(4), 100, 1)
	k := kindsOf(c)
	share := map[string]float64{}
	for i := range c.Nodes {
		share[kindOf(&c.Nodes[i])]++
	}
	for _, n := range []int{1, 10, 37, 100, 250} {
		have := map[string]float64{}
		names := map[string]bool{}
		for _, node := range k.cluster(n).Nodes {
			have[kindOf(&node)]++
			if names[node.Name] {
				t.Errorf("of %d nodes two are called %s", n, node.Name)
			}
			names[node.Name] = true
		}
		for kind, number := range share {
			if want := number / 100 * float64(n); math.Abs(have[kind]-want) >= 2 {
				t.Errorf("of %d nodes %g are %s, want %g", n, have[kind], kind, want)
			}
		}
	}
}
