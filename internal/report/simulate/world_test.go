package simulate

import (
	"fmt"
	"math/rand"
	"slices"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// generated returns a cluster and a workload with all kinds of nodes and pods.
func generated(rng *rand.Rand, nodes, pods int) (*Cluster, *Workload) {
	c := &Cluster{}
	for i := range nodes {
		n := Node{Name: fmt.Sprintf("node-%03d", i), CPU: []int64{16000, 64000, 128000}[rng.Intn(3)], Memory: 1 << 18}
		model := []string{"A", "B", "C"}[rng.Intn(3)]
		for j := range []int{1, 2, 4, 8}[rng.Intn(4)] {
			n.Devices = append(n.Devices, accel.Share{
				Device: accel.Device{ID: accel.DeviceID(fmt.Sprintf("%d/%d", i, j)), Index: j, Model: model}, Units: 1000,
			})
		}
		c.Nodes = append(c.Nodes, n)
	}
	only := &accel.Selection{UseModels: []string{"A", "C"}}
	w := &Workload{Name: "generated"}
	for i := range pods {
		p := Pod{Name: fmt.Sprintf("pod-%05d", i), Ask: place.Ask{CPU: []int64{1000, 4000, 8000, 12000}[rng.Intn(4)],
			Memory: 1 << (10 + rng.Intn(5))}}
		switch rng.Intn(10) {
		case 0:
		case 1:
			p.Ask.Devices, p.Ask.Units = 1<<rng.Intn(4), 1000
		case 2, 3:
			p.Ask.Devices, p.Ask.Units = 1, 1000
		default:
			p.Ask.Devices, p.Ask.Units = 1, []accel.Units{50, 190, 250, 500, 810}[rng.Intn(5)]
		}
		if p.Ask.Devices > 0 && rng.Intn(4) == 0 {
			p.Ask.Only = only
		}
		w.Pods = append(w.Pods, p)
	}
	return c, w
}

// naive decides as a world does, without remembering anything.
func naive(w *world, p place.Policy, a *place.Ask) string {
	nodes := map[string]place.Node{}
	for name, n := range w.books.Each(resource) {
		c := *n
		c.Slots = slices.Clone(n.Slots)
		nodes[name] = c
	}
	best, rating := "", place.NoRating
	for _, name := range w.names {
		n := nodes[name]
		if _, r, ok := p.Choose(&n, a, nil); ok && (best == "" || r > rating) {
			best, rating = name, r
		}
	}
	return best
}

// TestDecisions compares decisions by the books with decisions that rate every
// node anew, while pods come and go; and looks whether nothing is given out
// twice and all comes back.
func TestDecisions(t *testing.T) {
	for _, kind := range Policies() {
		t.Run(kind.Name, func(t *testing.T) {
			rng := seeded(1)
			c, load := generated(rng, 16, 200)
			w := newRun(c, load, kind, rng, nil, false, func() time.Duration { return 0 })
			var there []placement
			refused := 0
			for i := range 700 {
				if len(there) > 0 && rng.Intn(5) < 2 {
					j := rng.Intn(len(there))
					w.remove(there[j])
					there = slices.Delete(there, j, j+1)
					continue
				}
				ask := &load.Pods[rng.Intn(len(load.Pods))].Ask
				w.renew(i)
				want := naive(w.world, w.policy, ask)
				got, ok, err := w.place(ask)
				switch {
				case err != nil:
					t.Fatal(err)
				case ok != (want != "") || ok && w.names[got.at] != want:
					t.Fatalf("step %d: pod %+v went to %q (%t), want %q", i, ask, w.names[got.at], ok, want)
				case !ok:
					refused++
				default:
					w.learn(ask)
					there = append(there, got)
				}
				var used accel.Units
				for _, n := range w.books.Each(resource) {
					if n.CPU < 0 || n.Memory < 0 {
						t.Fatalf("step %d: %d millicores and %d MiB are left", i, n.CPU, n.Memory)
					}
					for _, s := range n.Slots {
						if used += s.Total - s.Free; s.Free < 0 {
							t.Fatalf("step %d: device %+v", i, s)
						}
					}
				}
				if used != w.allocated {
					t.Fatalf("step %d: %d units are used and %d counted", i, used, w.allocated)
				}
			}
			if refused == 0 {
				t.Error("no pod was refused: the test did not fill the cluster")
			}
			for _, p := range there {
				w.remove(p)
			}
			for _, n := range w.books.Each(resource) {
				for _, s := range n.Slots {
					if s.Free != s.Total {
						t.Errorf("after all pods have gone, %d of %d units are free", s.Free, s.Total)
					}
				}
			}
		})
	}
}

// indifferent rates all nodes alike.
type indifferent struct{}

func (indifferent) Name() string  { return "indifferent" }
func (indifferent) Epoch() uint64 { return 0 }

func (indifferent) Choose(_ *place.Node, _ *place.Ask, buf []int) ([]int, int64, bool) {
	return append(buf[:0], 0), 0, true
}

func TestRandomTies(t *testing.T) {
	c := &Cluster{}
	for i := range 4 {
		c.Nodes = append(c.Nodes, Node{Name: fmt.Sprint(i), CPU: place.Unlimited, Memory: place.Unlimited,
			Devices: []accel.Share{{Device: accel.Device{ID: "d"}, Units: 1 << 40}}})
	}
	ask := &place.Ask{Devices: 1, Units: 1}
	count := func(ties *rand.Rand) [4]int {
		w := newWorld(c, []int{0, 1, 2, 3}, indifferent{}, ties, false)
		var n [4]int
		for range 4000 {
			p, ok, err := w.place(ask)
			if !ok || err != nil {
				t.Fatalf("placed: %t, %v", ok, err)
			}
			n[w.names[p.at][0]-'0']++
		}
		return n
	}
	if n := count(nil); n != [4]int{4000, 0, 0, 0} {
		t.Errorf("without chance the nodes got %v, want all on the first", n)
	}
	for i, n := range count(seeded(1)) {
		if n < 900 || n > 1100 {
			t.Errorf("node %d got %d of 4000 pods, want about 1000", i, n)
		}
	}
}
