package fragmentation

import (
	"fmt"
	"iter"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/demand"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// newNode returns a node with devices of 16 units of a model.
func newNode(model string, cpu int64, free ...accel.Units) *place.Node {
	n := &place.Node{CPU: cpu, Cores: cpu, Memory: place.Unlimited}
	for i, f := range free {
		n.Slots = append(n.Slots, place.Slot{ID: accel.DeviceID(fmt.Sprint(model, "-", i)), Index: i, Model: model, Total: 16, Free: f})
	}
	return n
}

func all(nodes []*place.Node) iter.Seq2[string, *place.Node] {
	return func(yield func(string, *place.Node) bool) {
		for _, n := range nodes {
			if !yield("", n) {
				return
			}
		}
	}
}

// kinds counts pods that ask for units on devices with CPU, of models.
func kinds(pods float64, devices int, units accel.Units, cpu int64, models ...string) demand.Count {
	c := demand.Count{Kind: demand.Kind{Units: units, Devices: devices, CPU: cpu}, Pods: pods}
	if len(models) > 0 {
		c.Models = &accel.Selection{UseModels: models}
	}
	return c
}

// withPrior returns a policy that knows its demand, with prices for the nodes.
func withPrior(t testing.TB, nodes []*place.Node, prior ...demand.Count) *Policy {
	t.Helper()
	f := New(demand.Options{Prior: prior})
	f.Renew(all(nodes))
	if s := f.Status(); s.Err != nil || s.Epoch == 0 {
		t.Fatalf("no prices: %+v", s)
	}
	return f
}

// usual is a demand with shares of devices, several devices, models and none.
var usual = []demand.Count{
	kinds(300, 1, 16, 8000), kinds(200, 1, 8, 2000), kinds(150, 1, 5, 4000), kinds(100, 1, 3, 1000, "T4", "V100"),
	kinds(60, 1, 16, 16000, "T4"), kinds(40, 2, 16, 16000), kinds(20, 4, 16, 48000), kinds(10, 2, 8, 4000), kinds(120, 0, 0, 4000),
}

var models = []string{"T4", "V100", "A10"}

// randomNode returns a node of up to four devices. Nodes that are about as
// random come in a shuffled order of their slots.
func randomNode(r *rand.Rand) *place.Node {
	n := &place.Node{CPU: r.Int64N(64_000), Memory: r.Int64N(1 << 18), Cores: 64_000}
	if r.IntN(8) == 0 {
		n.CPU, n.Memory, n.Cores = place.Unlimited, place.Unlimited, 0
	}
	model := models[r.IntN(len(models))]
	for i := range r.IntN(5) {
		if r.IntN(6) == 0 {
			model = models[r.IntN(len(models))]
		}
		n.Slots = append(n.Slots, place.Slot{
			ID: accel.DeviceID(fmt.Sprint("d", i)), Index: i, Model: model, Total: 16,
			Free:      accel.Units(r.IntN(20) - 3), // below 0 where units that pods hold are withheld besides
			Unhealthy: r.IntN(10) == 0,
		})
	}
	return n
}

func randomNodes(r *rand.Rand, count int) []*place.Node {
	out := make([]*place.Node, count)
	for i := range out {
		out[i] = randomNode(r)
	}
	return out
}

func randomAsk(r *rand.Rand) *place.Ask {
	a := &place.Ask{CPU: r.Int64N(20_000), Memory: r.Int64N(1 << 15)}
	if r.IntN(6) > 0 {
		a.Devices, a.Units = 1+max(0, r.IntN(6)-3), accel.Units(1+r.IntN(16))
	}
	if r.IntN(4) == 0 {
		a.Only = &accel.Selection{UseModels: []string{models[r.IntN(len(models))]}}
	}
	return a
}

func TestBeforePrices(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	nodes := randomNodes(r, 50)
	f := New(demand.Options{})
	for range 8 {
		f.Observe(randomAsk(r))
	}
	f.Renew(all(nodes)) // too little is known
	f.Renew(all(nil))   // of no nodes nothing is
	for range 500 {
		n, a := nodes[r.IntN(len(nodes))], randomAsk(r)
		got, rating, ok := f.Choose(n, a, nil)
		want, wantRating, wantOK := place.Binpack.Choose(n, a, nil)
		if !slices.Equal(got, want) || rating != wantRating || ok != wantOK {
			t.Fatalf("Choose(%+v, %+v) = %v, %d, %v; binpack %v, %d, %v", n, a, got, rating, ok, want, wantRating, wantOK)
		}
	}
	if f.Epoch() != 0 || f.Status().Renewals != 2 || f.Name() != "fragmentation" {
		t.Errorf("epoch %d, %+v", f.Epoch(), f.Status())
	}
}

// plain is the potential of a node, computed anew in floating point, in units of a
// largest device: the definition in the design note, word for word.
func plain(p *snapshot, n *place.Node) float64 {
	cpu, memory := float64(max(n.CPU, 0)), float64(max(n.Memory, 0))
	value := func(u accel.Units) float64 { return float64(u) / float64(p.largest) }
	type device struct {
		free  accel.Units
		class uint8
	}
	var devices []device
	var free, waste, prices float64
	for i := range n.Slots {
		s := &n.Slots[i]
		if s.Unhealthy {
			continue
		}
		d := device{max(s.Free, 0), classOf(p.classes, s)}
		devices = append(devices, d)
		free += value(d.free)
		waste += value(d.free) - float64(p.tables[p.classes[d.class].cut].of(d.free))/one
		prices += float64(p.modelPrice[d.class]) / levels * value(d.free)
	}
	if free == 0 {
		return 0
	}
	type loss struct{ stays, weight float64 }
	var losses []loss
	total := 0.0
	for _, piece := range p.pieces {
		suits, room, pods := false, 0.0, 0.0
		for _, d := range devices {
			if piece.classes&(1<<d.class) == 0 {
				continue
			}
			suits = true
			if d.free >= piece.units {
				room += value(d.free)
				pods += float64(d.free / piece.units)
			}
		}
		for _, k := range piece.kinds {
			if !suits {
				continue
			}
			used := 0.0
			if pods > 0 && cpu >= float64(k.cpu) && memory >= float64(k.memory) {
				used = room * min(1, cpu/(float64(k.cpu)*pods), memory/(float64(k.memory)*pods))
			}
			losses = append(losses, loss{free - used, float64(k.weight)})
			total += float64(k.weight)
		}
	}
	slices.SortFunc(losses, func(a, b loss) int {
		if a.stays < b.stays {
			return -1
		}
		return 1
	})
	mismatch, left := 0.0, total*kept/256
	for _, l := range losses {
		w := min(left, l.weight)
		mismatch += w * l.stays
		left -= w
	}
	if total > 0 {
		mismatch /= total * kept / 256
	}
	slots := 0.0
	for i := range p.groups {
		g := &p.groups[i]
		fitting, ever := 0, 0
		for _, d := range devices {
			if p.classes[d.class].total >= g.units {
				ever++
			}
			if d.free >= g.units {
				fitting++
			}
		}
		if ever < g.devices {
			continue
		}
		count, rest := math.Modf(min(float64(fitting)/float64(g.devices), cpu/float64(max(g.cpu, 1)), memory/float64(max(g.memory, 1))))
		slots += (count + rest*rest*float64(p.unfinished)/256) * float64(p.slotPrice[i]) / one
	}
	return wasteWeight*waste + mismatch - slots - prices
}

// What is remembered and computed in integers is what the definition says.
func TestPotential(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	nodes := randomNodes(r, 200)
	f := withPrior(t, nodes, usual...)
	p := f.prices.Load()
	leaving := *p
	leaving.unfinished = unfinished
	for i, p := range []*snapshot{p, &leaving, p} {
		for _, n := range nodes {
			st := p.stateOf(n, nil)
			var free float64
			for _, c := range st.cells {
				free += float64(c.free) / float64(p.largest)
			}
			got, want := float64(p.potential(&st))/one, plain(p, n)
			// Kinds are sorted by 64ths of what is free.
			if math.Abs(got-want) > free/64+0.01 {
				t.Fatalf("round %d: potential(%+v) = %v, want %v", i, n, got, want)
			}
			if again := (p.fixed(&st) - p.memo.of(p.statics, &st).value); again != 0 {
				t.Fatalf("round %d: what is remembered of %+v is off by %d", i, n, again)
			}
		}
	}
}

// The device and the rating come from one function: the rating is the drop of the
// potential with the chosen device, and no other device drops it more.
func TestChooseIsTheBest(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	nodes := randomNodes(r, 200)
	f := withPrior(t, nodes, usual...)
	p := f.prices.Load()
	fitted := 0
	for range 6000 {
		n, a := nodes[r.IntN(len(nodes))], randomAsk(r)
		slots, rating, ok := f.Choose(n, a, nil)
		if _, _, fits := place.Binpack.Choose(n, a, nil); ok != fits {
			t.Fatalf("Choose(%+v, %+v) fits: %v, binpack: %v", n, a, ok, fits)
		}
		if !ok {
			if rating != place.NoRating || len(slots) != 0 {
				t.Fatalf("Choose(%+v, %+v) = %v, %d where it does not fit", n, a, slots, rating)
			}
			continue
		}
		if len(slots) != a.Devices || !slices.IsSorted(slots) {
			t.Fatalf("Choose(%+v, %+v) = %v", n, a, slots)
		}
		fitted++
		if a.Devices == 0 {
			continue
		}
		before := p.stateOf(n, nil)
		drop := func(slots ...int) int64 {
			then := *n
			then.Slots = slices.Clone(n.Slots)
			for _, i := range slots {
				then.Slots[i].Free -= a.Units
			}
			if n.CPU != place.Unlimited {
				then.CPU -= a.CPU
			}
			if n.Memory != place.Unlimited {
				then.Memory -= a.Memory
			}
			after := p.stateOf(&then, nil)
			return p.potential(&before) - p.potential(&after)
		}
		if got := drop(slots...); got != rating {
			t.Fatalf("Choose(%+v, %+v) = %v, %d; the potential drops by %d", n, a, slots, rating, got)
		}
		for i := range n.Slots {
			if a.Devices == 1 && a.Fits(&n.Slots[i]) && drop(i) > rating {
				t.Fatalf("Choose(%+v, %+v) = %v, %d; with %d the potential drops by %d", n, a, slots, rating, i, drop(i))
			}
		}
	}
	if fitted < 500 {
		t.Errorf("only %d asks fitted", fitted)
	}
}

// The order of the slots, and who asks how often and in which order, change nothing.
func TestDeterministic(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 10))
	nodes := randomNodes(r, 100)
	f, g := withPrior(t, nodes, usual...), withPrior(t, nodes, usual...)
	for range 5000 {
		n, a := nodes[r.IntN(len(nodes))], randomAsk(r)
		turned := *n
		turned.Slots = slices.Clone(n.Slots)
		r.Shuffle(len(turned.Slots), func(i, j int) { turned.Slots[i], turned.Slots[j] = turned.Slots[j], turned.Slots[i] })
		slots, rating, ok := f.Choose(n, a, nil)
		others, otherRating, otherOK := g.Choose(&turned, a, []int{7, 7, 7})
		id := func(n *place.Node, slots []int) []accel.DeviceID {
			var out []accel.DeviceID
			for _, i := range slots {
				out = append(out, n.Slots[i].ID)
			}
			slices.Sort(out)
			return out
		}
		if ok != otherOK || rating != otherRating || !slices.Equal(id(n, slots), id(&turned, others)) {
			t.Fatalf("Choose(%+v, %+v) = %v, %d, %v; turned %+v: %v, %d, %v", n, a, slots, rating, ok, turned, others, otherRating, otherOK)
		}
	}
}

// better fails unless the pod is rated higher on the first node.
func better(t *testing.T, f *Policy, a *place.Ask, first, second *place.Node) {
	t.Helper()
	_, one, ok := f.Choose(first, a, nil)
	_, two, too := f.Choose(second, a, nil)
	if !ok || !too || one <= two {
		t.Errorf("%+v: rated %d, %v on %+v, and %d, %v on %+v", *a, one, ok, *first, two, too, *second)
	}
}

func TestPlacements(t *testing.T) {
	many := func(n *place.Node, count int) []*place.Node { return slices.Repeat([]*place.Node{n}, count) }

	t.Run("a part goes where it leaves nothing useless", func(t *testing.T) {
		nodes := many(newNode("", 64_000, 16, 16), 20)
		f := withPrior(t, nodes, kinds(100, 1, 10, 1000), kinds(100, 1, 6, 1000), kinds(50, 1, 16, 1000))
		better(t, f, &place.Ask{Units: 6, Devices: 1, CPU: 1000}, newNode("", 64_000, 6, 0), newNode("", 64_000, 8, 0))
		better(t, f, &place.Ask{Units: 6, Devices: 1, CPU: 1000}, newNode("", 64_000, 6, 16), newNode("", 64_000, 16, 16))
		slots, _, _ := f.Choose(newNode("", 64_000, 16, 8, 6, 12), &place.Ask{Units: 6, Devices: 1}, nil)
		if !slices.Equal(slots, []int{2}) {
			t.Errorf("on one node it goes to %v, want the third", slots)
		}
	})
	t.Run("a pod with little CPU goes where CPU is short", func(t *testing.T) {
		nodes := many(newNode("", 32_000, 16, 16), 20)
		f := withPrior(t, nodes, kinds(100, 1, 16, 16_000), kinds(20, 1, 16, 1000))
		better(t, f, &place.Ask{Units: 16, Devices: 1, CPU: 1000}, newNode("", 4_000, 16, 16), newNode("", 32_000, 16, 16))
		better(t, f, &place.Ask{Units: 16, Devices: 1, CPU: 16_000}, newNode("", 48_000, 16, 16), newNode("", 17_000, 16, 16))
	})
	t.Run("a pod without a device goes where CPU is left over", func(t *testing.T) {
		nodes := many(newNode("", 32_000, 16, 16), 20)
		f := withPrior(t, nodes, kinds(100, 1, 16, 16_000), kinds(20, 0, 0, 8000))
		better(t, f, &place.Ask{CPU: 8000}, newNode("", 64_000, 16, 16), newNode("", 32_000, 16, 16))
		better(t, f, &place.Ask{CPU: 8000}, newNode("", 32_000, 0, 0), newNode("", 32_000, 16, 16))
		slots, _, ok := f.Choose(&place.Node{CPU: place.Unlimited, Memory: place.Unlimited}, &place.Ask{CPU: 1}, nil)
		if len(slots) != 0 || !ok {
			t.Errorf("on a node without devices: %v, %v", slots, ok)
		}
	})
	t.Run("whole nodes are kept for those who need them, when they are few", func(t *testing.T) {
		broken := newNode("", 64_000, 16, 16, 0, 0)
		nodes := append(many(broken, 30), newNode("", 64_000, 16, 16, 16, 16))
		f := withPrior(t, nodes, kinds(100, 1, 16, 1000), kinds(40, 4, 16, 4000))
		better(t, f, &place.Ask{Units: 16, Devices: 1, CPU: 1000}, broken, nodes[30])
		slots, _, ok := f.Choose(nodes[30], &place.Ask{Units: 16, Devices: 2}, nil)
		if !ok || len(slots) != 2 {
			t.Errorf("two devices: %v, %v", slots, ok)
		}
	})
	t.Run("nodes for pods of several devices that fit on no others are kept for them", func(t *testing.T) {
		small, large := newNode("", 64_000, 16, 16, 16, 16), newNode("", 128_000, 16, 16, 16, 16)
		nodes := append(many(small, 300), many(large, 5)...)
		f := withPrior(t, nodes, kinds(100, 1, 16, 1000), kinds(36, 4, 16, 40_000), kinds(4, 4, 16, 120_000))
		better(t, f, &place.Ask{Units: 16, Devices: 4, CPU: 40_000}, small, large)
		better(t, f, &place.Ask{Units: 16, Devices: 1, CPU: 1000}, small, large)
		better(t, f, &place.Ask{CPU: 20_000}, small, large)
	})
	t.Run("devices that are not healthy count for nothing", func(t *testing.T) {
		n := newNode("", 64_000, 4, 16)
		f := withPrior(t, many(n, 20), kinds(100, 1, 4, 1000), kinds(50, 1, 16, 1000))
		n.Slots[0].Unhealthy = true
		slots, rating, ok := f.Choose(n, &place.Ask{Units: 4, Devices: 1}, nil)
		alone, want, _ := f.Choose(newNode("", 64_000, 16), &place.Ask{Units: 4, Devices: 1}, nil)
		if !ok || !slices.Equal(slots, []int{1}) || len(alone) != 1 || rating != want {
			t.Errorf("%v, %d, %v; a node with the healthy one alone is rated %d", slots, rating, ok, want)
		}
	})
	t.Run("a model that came after the prices", func(t *testing.T) {
		f := withPrior(t, many(newNode("T4", 64_000, 16), 20), usual...)
		for _, units := range []accel.Units{1, 16, 32} {
			fresh := newNode("H100", 64_000, 16, 32)
			fresh.Slots[1].Total = 32
			slots, rating, ok := f.Choose(fresh, &place.Ask{Units: units, Devices: 1}, nil)
			if !ok || len(slots) != 1 || fresh.Slots[slots[0]].Free < units || rating == place.NoRating {
				t.Errorf("%d units: %v, %d, %v", units, slots, rating, ok)
			}
		}
	})
}

// Where pods leave, a node that is nearly whole is left to become so.
func TestPodsLeave(t *testing.T) {
	nearly, half := newNode("", 64_000, 16, 16, 16, 0), newNode("", 64_000, 16, 16, 0, 0)
	nodes := append(slices.Repeat([]*place.Node{nearly, half}, 10), newNode("", 64_000, 16, 16, 16, 16), newNode("", 64_000, 0, 0, 0, 0))
	f := withPrior(t, nodes, kinds(100, 1, 16, 1000), kinds(40, 4, 16, 4000))
	ask := &place.Ask{Units: 16, Devices: 1, CPU: 1000}
	_, one, _ := f.Choose(nearly, ask, nil)
	_, two, _ := f.Choose(half, ask, nil)
	if one != two || f.Status().Leaving {
		t.Errorf("before any pod left: rated %d and %d, %+v", one, two, f.Status())
	}
	epoch := f.Epoch()
	nodes[21] = newNode("", 64_000, 16, 0, 0, 0) // a pod has left
	f.Renew(all(nodes))
	if !f.Status().Leaving || f.Epoch() == epoch {
		t.Errorf("after one left: %+v, epoch %d", f.Status(), epoch)
	}
	better(t, f, ask, half, nearly)
}

// TestGroups: pods of several devices are of one group if they need about as much CPU, for
// which its slots suffice; pods that need more take such a slot as well.
func TestGroups(t *testing.T) {
	pods := func(devices int, percent float64, cpu, memory int64) demand.Count {
		c := kinds(percent/float64(devices), devices, 16, cpu)
		c.Memory = memory
		return c
	}
	s := newStatics([]class{{total: 16}}, []float64{1000}, []demand.Count{pods(1, 45, 1000, 1), pods(4, 20, 64_000, 8),
		pods(4, 10, 65_000, 32), pods(4, 10, 66_000, 9), pods(4, 10, 120_000, 8), pods(2, 5, 120_000, 64)})
	want := []group{
		{devices: 2, units: 16, cpu: 120_000, memory: 64, share: 0.05},
		{devices: 4, units: 16, cpu: 65_000, memory: 16, share: 0.5},
		{devices: 4, units: 16, cpu: 66_000, memory: 9, share: 0.2},
		{devices: 4, units: 16, cpu: 120_000, memory: 8, share: 0.1},
	}
	opts := cmp.Options{cmp.AllowUnexported(group{}), cmpopts.EquateApprox(0, 1e-9)}
	if diff := cmp.Diff(want, s.groups, opts); diff != "" {
		t.Errorf("groups (-want +got):\n%s", diff)
	}
	var many []demand.Count
	for i := range 2 * maxGroups {
		many = append(many, pods(2+i, float64(1+i%2), 1000, 0))
	}
	s = newStatics([]class{{total: 16}}, []float64{1000}, many)
	if len(s.groups) != maxGroups {
		t.Errorf("%d groups, want %d", len(s.groups), maxGroups)
	}
	for _, g := range s.groups {
		if g.devices%2 == 0 {
			t.Errorf("group %+v is kept, although it is rarer", g)
		}
	}
}

// TestSlotPrices: a slot has a price where few are free beside the number of pods by which
// demand for them strays, or that are yet to come.
func TestSlotPrices(t *testing.T) {
	// Of 10000 devices, pods of 4 take 40 %: 1000 of them, of which 100 are demanding.
	s := newStatics([]class{{total: 16}}, []float64{10_000}, []demand.Count{kinds(6000, 1, 16, 1000), kinds(900, 4, 16, 40_000),
		kinds(100, 4, 16, 120_000)})
	for name, tc := range map[string]struct {
		free  float64 // devices
		slots []int64
		want  []float64 // of what the devices are worth
	}{
		"none of either":                     {0, []int64{0, 0}, []float64{1, 1}},
		"enough of both":                     {500, []int64{200, 60}, []float64{0, 0}},
		"none for demanding pods":            {500, []int64{200, 0}, []float64{0, 1}},
		"a deviation of each":                {100, []int64{32, 10}, []float64{0.31, 0.31}},
		"two deviations of each":             {100, []int64{64, 20}, []float64{0.04, 0.04}},
		"fewer than will come":               {400, []int64{64, 20}, []float64{0.97, 0.04}},
		"an empty cluster with broken nodes": {10_000, []int64{1500, 250}, []float64{1, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			for i, price := range s.at([]float64{16 * tc.free}, tc.slots).slotPrice {
				if got := float64(price) / (4 * one); math.Abs(got-tc.want[i]) > 1.0/levels {
					t.Errorf("the price of group %+v is %.2f, want %v", s.groups[i], got, tc.want[i])
				}
			}
		})
	}
}

func TestTraffic(t *testing.T) {
	var tr traffic
	for i, step := range []struct {
		free []float64
		want bool
	}{
		{[]float64{8, 8, 8}, false},
		{[]float64{8, 6, 4}, false}, // pods come
		{[]float64{8, 6, 4}, false},
		{[]float64{4, 6, 4.5}, false}, // a little comes free: 0.5 of about 9
		{[]float64{4, 7, 4}, true},
		{[]float64{4, 7, 4}, true},    // nothing happens
		{[]float64{0, 0, 0, 0}, true}, // a node came: nothing is known
		{[]float64{0, 8, 0, 0}, true},
		{[]float64{0, 8, 0, 0}, true},
	} {
		if tr.look(step.free); tr.leaving != step.want {
			t.Errorf("step %d: %+v, want leaving %t", i, tr, step.want)
		}
	}
	// Once they only come, it is forgotten.
	free := []float64{0, 100}
	for range 60 {
		free[1]--
		tr.look(free)
	}
	if tr.leaving {
		t.Errorf("pods only come: %+v", tr)
	}
}

// A model that some pods need costs nothing while there is enough of it, and then
// the more the less there is.
func TestScarceModels(t *testing.T) {
	cluster := func(freeT4 int) []*place.Node {
		var out []*place.Node
		for i := range 100 {
			out = append(out, newNode("T4", 64_000, 16), newNode("V100", 64_000, 16))
			if i >= freeT4 {
				out[len(out)-2].Slots[0].Free = 0
			}
		}
		return out
	}
	prior := []demand.Count{kinds(700, 1, 16, 1000), kinds(300, 1, 16, 1000, "T4")}
	f := withPrior(t, cluster(100), prior...)
	last := int64(0)
	var seen []int64
	for free := 100; free >= 0; free -= 5 {
		f.Renew(all(cluster(free)))
		p := f.prices.Load()
		if v := p.modelPrice[1]; v != 0 {
			t.Errorf("with %d T4 free V100 has the price %d", free, v)
		}
		if p.modelPrice[0] < last {
			t.Errorf("with %d T4 free the price falls from %d to %d", free, last, p.modelPrice[0])
		}
		last = p.modelPrice[0]
		seen = append(seen, last)
	}
	if seen[0] != 0 || last != modelWeight*levels {
		t.Errorf("prices of T4: %v", seen)
	}
	anything, t4 := &place.Ask{Units: 16, Devices: 1, CPU: 1000}, &place.Ask{Units: 16, Devices: 1, CPU: 1000,
		Only: &accel.Selection{UseModels: []string{"T4"}}}
	better(t, f, anything, newNode("V100", 64_000, 16), newNode("T4", 64_000, 16))
	if _, _, ok := f.Choose(newNode("T4", 64_000, 16), t4, nil); !ok {
		t.Error("a pod that needs a T4 does not get it")
	}
	if _, _, ok := f.Choose(newNode("V100", 64_000, 16), t4, nil); ok {
		t.Error("a pod that needs a T4 gets a V100")
	}
}

// Without a prior the policy learns, and with one it follows a demand that changes.
func TestLearning(t *testing.T) {
	nodes := slices.Repeat([]*place.Node{newNode("", 64_000, 16, 16)}, 50)
	thirds, halves := &place.Ask{Units: 5, Devices: 1, CPU: 1000}, &place.Ask{Units: 8, Devices: 1, CPU: 1000}
	whole := &place.Ask{Units: 16, Devices: 1, CPU: 1000}
	f := New(demand.Options{HalfLife: 200})
	f.minPods = 50
	learn := func(count int, asks ...*place.Ask) {
		for i := range count {
			f.Observe(asks[i%len(asks)])
		}
		f.Renew(all(nodes))
	}
	learn(40, thirds, whole)
	if f.Epoch() != 0 {
		t.Errorf("40 pods of 50 are believed: %+v", f.Status())
	}
	useful := func(free accel.Units) float64 {
		return float64(f.prices.Load().tables[0].of(free)) / one * 16
	}
	learn(80, thirds, whole)
	s := f.Status()
	if s.Epoch != 1 || s.Tables != 1 || s.Kinds != 2 || useful(8) >= 7 {
		t.Errorf("after thirds: %+v, 8 free units are worth %v", s, useful(8))
	}
	f.Renew(all(nodes))
	if again := f.Status(); again.Epoch != 1 || again.Tables != 1 || again.Renewals != s.Renewals+1 {
		t.Errorf("nothing happened, yet %+v after %+v", again, s)
	}
	learn(3000, halves, whole)
	if s := f.Status(); s.Epoch != 2 || useful(8) < 7.9 || useful(7) > 1 {
		t.Errorf("after halves: %+v, 8 free units are worth %v, 7 %v", s, useful(8), useful(7))
	}
}

// From MinPods on what was learned is believed.
func TestMinPods(t *testing.T) {
	nodes := slices.Repeat([]*place.Node{newNode("", 64_000, 16, 16)}, 50)
	f := New(demand.Options{})
	for n := 1; n <= MinPods; n++ {
		f.Observe(&place.Ask{Units: 5, Devices: 1, CPU: 1000})
		f.Renew(all(nodes))
		if believed := f.Epoch() > 0; believed != (n == MinPods) {
			t.Errorf("%d pods are believed: %t", n, believed)
		}
	}
}

// Prices follow the hardware: models and sizes that come and go.
func TestOtherCluster(t *testing.T) {
	nodes := slices.Repeat([]*place.Node{newNode("T4", 64_000, 16, 16)}, 50)
	f := withPrior(t, nodes, usual...)
	one := f.prices.Load()
	fresh := newNode("V100", 64_000, 32)
	fresh.Slots[0].Total = 32
	f.Renew(all(append(slices.Clone(nodes), fresh)))
	two := f.prices.Load()
	if len(one.classes) != 1 || len(two.classes) != 2 || two.largest != 32 || two.epoch <= one.epoch || len(two.tables) != 2 {
		t.Errorf("%d classes, then %d of at most %d units", len(one.classes), len(two.classes), two.largest)
	}
	// The class that is gone is dropped by the census after that which misses it.
	f.Renew(all([]*place.Node{fresh}))
	f.Renew(all([]*place.Node{fresh}))
	if p := f.prices.Load(); len(p.classes) != 1 || p.classes[0].model != "V100" || p.capacity != 32 {
		t.Errorf("%+v, %v units", p.classes, p.capacity)
	}
	// Sizes that are no sizes, and more classes than can be told apart.
	var odd []*place.Node
	for i := range 2 * maxClasses {
		n := newNode(fmt.Sprint("model-", i), 64_000, 16, 16)
		n.Slots[1].Total = accel.Units(-i)
		odd = append(odd, n)
	}
	f.Renew(all(odd))
	f.Renew(all(odd))
	if p := f.prices.Load(); len(p.classes) != maxClasses {
		t.Errorf("%d classes, want %d", len(p.classes), maxClasses)
	}
	for _, n := range odd {
		if slots, _, ok := f.Choose(n, &place.Ask{Units: 16, Devices: 1}, nil); !ok || len(slots) != 1 {
			t.Fatalf("on %+v: %v, %v", n, slots, ok)
		}
	}
}

// Decisions, renewals and learning at the same time; run it with -race.
func TestConcurrent(t *testing.T) {
	r := rand.New(rand.NewPCG(11, 12))
	nodes := randomNodes(r, 100)
	f := withPrior(t, nodes, usual...)
	var wait sync.WaitGroup
	for w := range 4 {
		wait.Go(func() {
			r := rand.New(rand.NewPCG(13, uint64(w)))
			var buf []int
			for range 2000 {
				n, a := nodes[r.IntN(len(nodes))], randomAsk(r)
				slots, rating, ok := f.Choose(n, a, buf)
				if ok && (len(slots) != a.Devices || rating == place.NoRating) {
					t.Errorf("Choose(%+v, %+v) = %v, %d", n, a, slots, rating)
				}
				buf = slots
				f.Observe(a)
				f.Epoch()
			}
		})
	}
	for range 30 {
		// Of nodes that differ, so that prices do.
		f.Renew(all(nodes[:50+r.IntN(50)]))
		f.Status()
	}
	wait.Wait()
	if s := f.Status(); s.Renewals != 31 || s.Epoch < 2 {
		t.Errorf("%+v", s)
	}
}

func TestAtLeast(t *testing.T) {
	for _, tc := range []struct{ n, mean, want float64 }{{0, 0, 0}, {5, 0, 0}, {0, 10, 1}, {10, 10, 0.56}, {20, 10, 0}, {100, 100, 0.52},
		{-3, 4, 1}} {
		if got := atLeast(tc.n, tc.mean); math.Abs(got-tc.want) > 0.01 {
			t.Errorf("atLeast(%v, %v) = %v, want %v", tc.n, tc.mean, got, tc.want)
		}
	}
	for _, tc := range []struct{ n, mean, want float64 }{{5, 0, 0}, {0, 100, 1}, {10, 100, 0.32}, {20, 100, 0.05}, {50, 100, 0}} {
		if got := strays(tc.n, tc.mean); math.Abs(got-tc.want) > 0.01 {
			t.Errorf("strays(%v, %v) = %v, want %v", tc.n, tc.mean, got, tc.want)
		}
	}
	for price, want := range map[float64]int64{-1: 0, 0: 0, 0.5: levels / 2, 1: levels, 7: levels, math.Inf(1): levels, math.Inf(-1): 0} {
		if got := level(price); got != want {
			t.Errorf("level(%v) = %d, want %d", price, got, want)
		}
	}
}

func TestScale(t *testing.T) {
	for _, tc := range []struct {
		largest, units accel.Units
		want           int64
	}{
		{16, 8, one / 2}, {16, 16, one}, {16, 17, one}, {16, -1, 0}, {1, 1, one},
		{math.MaxInt64, math.MaxInt64 / 2, one / 2}, {accel.MaxUnits, accel.MaxUnits, one}, {3, 1, one / 3},
	} {
		if got := (scale{tc.largest}).value(tc.units); got != tc.want {
			t.Errorf("%d of %d units have the value %d, want %d", tc.units, tc.largest, got, tc.want)
		}
	}
}

// Two states in one place of the memo do not get each other's answers.
func TestMemo(t *testing.T) {
	f := withPrior(t, slices.Repeat([]*place.Node{newNode("T4", 64_000, 16, 16)}, 50), usual...)
	s := f.prices.Load().statics
	places := map[uint64]int{}
	shared := 0
	for cpu := range int64(2 * memoSize) {
		st := state{cpu, maxCPU, []cell{{accel.Units(cpu % 17), 0}}}
		at := st.hash() % memoSize
		places[at]++
		if places[at] == 1 {
			continue
		}
		shared++
		if r := s.memo.of(s, &st); r.value != s.fixed(&st) || !st.equal(r) {
			t.Fatalf("%+v is remembered as %+v", st, r)
		}
	}
	if shared == 0 || len(places) < memoSize/2 {
		t.Errorf("%d states in %d places", 2*memoSize, len(places))
	}
}

// No numbers, however odd, lead to a panic, a device that does not fit, or an answer
// that depends on who asks first.
func FuzzChoose(f *testing.F) {
	f.Add(int64(16), int64(8), int64(16), int64(4), int64(64_000), int64(1<<18), int64(1000), int64(1), uint8(1))
	f.Add(int64(math.MaxInt64), int64(math.MaxInt64), int64(1), int64(1), place.Unlimited, place.Unlimited, int64(math.MaxInt64),
		int64(math.MaxInt64), uint8(2))
	f.Add(int64(math.MinInt64), int64(math.MaxInt64), int64(-1), int64(0), int64(-1), int64(math.MinInt64), int64(-1), int64(math.MinInt64),
		uint8(0))
	f.Add(int64(1), int64(math.MaxInt64), int64(1<<62), int64(1<<61), int64(1), int64(1), int64(0), int64(0), uint8(3))
	f.Fuzz(func(t *testing.T, total, free, usualUnits, units, cpu, memory, podCPU, podMemory int64, devices uint8) {
		n := &place.Node{CPU: cpu, Memory: memory, Cores: cpu}
		for i := range 3 {
			n.Slots = append(n.Slots, place.Slot{ID: accel.DeviceID(fmt.Sprint(i)), Index: i, Model: models[i%2], Total: accel.Units(total),
				Free: accel.Units(free)})
		}
		n.Slots[2].Total, n.Slots[2].Free = 16, 16
		prior := []demand.Count{
			{Kind: demand.Kind{Units: accel.Units(usualUnits), Devices: 1, CPU: podCPU}, Pods: 100, Memory: podMemory},
			{Kind: demand.Kind{Units: accel.Units(units), Devices: int(devices), CPU: podCPU}, Pods: 100, Memory: podMemory},
			kinds(100, 1, 8, 1000, "T4"),
		}
		a := &place.Ask{Units: accel.Units(units), Devices: int(devices % 5), CPU: podCPU, Memory: podMemory}
		var last int64
		for i := range 2 {
			p := New(demand.Options{Prior: prior})
			p.Renew(all([]*place.Node{n, newNode("T4", 64_000, 16, 8)}))
			slots, rating, ok := p.Choose(n, a, nil)
			if ok != (rating != place.NoRating) && a.Devices > 0 || ok && len(slots) != a.Devices || i > 0 && rating != last {
				t.Fatalf("Choose(%+v, %+v) = %v, %d, %v", n, a, slots, rating, ok)
			}
			for _, at := range slots {
				if !a.Fits(&n.Slots[at]) {
					t.Fatalf("Choose(%+v, %+v) = %v, which does not fit", n, a, slots)
				}
			}
			last = rating
		}
	})
}

// BenchmarkChoose rates nodes whose states are known (as nearly all are) and
// nodes whose states are not.
func BenchmarkChoose(b *testing.B) {
	r := rand.New(rand.NewPCG(15, 16))
	nodes := randomNodes(r, 1213)
	f := withPrior(b, nodes, usual...)
	asks := []*place.Ask{{Units: 8, Devices: 1, CPU: 2000}, {Units: 16, Devices: 1, CPU: 8000}, {Units: 16, Devices: 2, CPU: 16_000},
		{CPU: 4000}}
	b.Run("known", func(b *testing.B) {
		var buf []int
		for i := 0; b.Loop(); i++ {
			buf, _, _ = f.Choose(nodes[i%50], asks[i%len(asks)], buf)
		}
	})
	b.Run("unknown", func(b *testing.B) {
		var buf []int
		n := *newNode("T4", 1<<30, 16, 8, 5, 3)
		for i := 0; b.Loop(); i++ {
			n.CPU = 1<<30 + int64(i)
			buf, _, _ = f.Choose(&n, asks[i%2], buf)
		}
	})
}

// BenchmarkRenew renews prices of the trace's number of nodes, without new tables
// and with.
func BenchmarkRenew(b *testing.B) {
	nodes := randomNodes(rand.New(rand.NewPCG(17, 18)), 1213)
	b.Run("prices", func(b *testing.B) {
		f := withPrior(b, nodes, usual...)
		for b.Loop() {
			f.Renew(all(nodes))
		}
	})
	b.Run("tables", func(b *testing.B) {
		f := withPrior(b, nodes, usual...)
		for b.Loop() {
			f.counted = 0 // as if nothing had been counted when the tables were made
			f.Renew(all(nodes))
		}
	})
}
