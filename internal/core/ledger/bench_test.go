package ledger

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

const (
	benchDevices = 8
	benchSize    = 32 // units per device
	podsPerNode  = 4
)

// cluster fills a ledger with nodes of 8 cards of 32 units and 4 running pods
// per node, at 5000 nodes so 20 000 pods.
func cluster(tb testing.TB, nodes int, policy place.Policy) (*Ledger, []string) {
	tb.Helper()
	return clusterOf(tb, nodes, podsPerNode, policy)
}

// clusterOf is a cluster with another number of pods per node. One card in ten
// is unhealthy, every sixteenth node has smaller cards, and on every sixteenth
// all are unhealthy. Cards are on two NUMA nodes.
func clusterOf(tb testing.TB, nodes, pods int, policy place.Policy) (*Ledger, []string) {
	tb.Helper()
	r := rand.New(rand.NewPCG(uint64(nodes), 0))
	l := New(Options{Policy: policy})
	names := make([]string, nodes)
	for i := range names {
		names[i] = fmt.Sprintf("gcu-node-%04d.example.com", i)
		in := accel.Inventory{Resource: gcu, Unit: "1"}
		for d := range benchDevices {
			s := accel.Share{Units: benchSize, Device: accel.Device{
				Index: d, ID: deviceOf(i, d), Model: "S60", MemoryBytes: 32 << 30, NUMANode: d / (benchDevices / 2),
			}}
			if i%16 == 3 {
				s.Units /= 2
			}
			s.Health.Unhealthy = i%16 == 5 || r.IntN(10) == 0
			in.Shares = append(in.Shares, s)
		}
		l.SetNode(names[i], []accel.Inventory{in})
		for p := range pods {
			l.Observe(Holding{
				Pod: pod(fmt.Sprintf("0f6c1f33-7c53-4a3e-%04d-%012d", p, i)), Node: names[i], Resource: gcu,
				Units: accel.Units(1 + r.IntN(benchSize*podsPerNode/pods)), Device: deviceOf(i, r.IntN(benchDevices)), Confirmed: true,
			})
		}
	}
	return l, names
}

// shuffled is the order in which the scheduler asks: any but the ledger's.
func shuffled(names []string) []string {
	out := slices.Clone(names)
	rand.New(rand.NewPCG(7, 7)).Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}

func deviceOf(node, device int) accel.DeviceID {
	return accel.DeviceID(fmt.Sprintf("GCU-U5300%06d%02d", node, device))
}

// filterNeed fits on seven of eight nodes, which then are also rated.
const filterNeed = 24

// BenchmarkFilter5000x8 is one filter call over all 5000 nodes, with 20 000 and
// with 50 000 pods in the books, between two of which some other pod is bound: of
// a kind that was asked for before, and of a new kind each time.
func BenchmarkFilter5000x8(b *testing.B) {
	for _, policy := range []place.Policy{place.Binpack, place.Spread} {
		for _, pods := range []int{4, 10} {
			l, names := clusterOf(b, 5000, pods, policy)
			names = shuffled(names)
			out := make([]Verdict, len(names))
			for _, kind := range []struct {
				name string
				new  bool
			}{{"known", false}, {"new", true}} {
				for _, devices := range []int{1, 2} {
					b.Run(fmt.Sprintf("%s/pods=%d/%s kind/devices=%d", policy.Name(), 5000*pods, kind.name, devices), func(b *testing.B) {
						b.ReportAllocs()
						for i := 0; b.Loop(); i++ {
							req := on(devices, filterNeed)
							if kind.new {
								clear(l.ratings.byAsk)
							}
							l.Check(req, names, out)
							node := i % 5000
							l.Observe(Holding{Pod: pod("busy"), Node: names[node], Resource: gcu, Units: 1,
								Device: "none", Confirmed: true})
						}
						b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(names)), "ns/node")
					})
				}
			}
		}
	}
}

// BenchmarkRefresh is the renewal of one kind's ratings at 5000 nodes, as after
// new prices.
func BenchmarkRefresh(b *testing.B) {
	p := &rater{name: "prices"}
	l, names := cluster(b, 5000, p)
	l.Check(asks(filterNeed), names, make([]Verdict, len(names)))
	b.ReportAllocs()
	for b.Loop() {
		p.renew(1)
		l.Refresh(1)
	}
}

// BenchmarkEach is what a renewal of prices reads, at 5000 nodes.
func BenchmarkEach(b *testing.B) {
	l, _ := cluster(b, 5000, place.Binpack)
	b.ReportAllocs()
	for b.Loop() {
		for range l.Each(gcu) {
		}
	}
}

// BenchmarkFilterUnderLoad is the same while the watch delivers events as fast
// as it can: how much do writers hold a filter up?
func BenchmarkFilterUnderLoad(b *testing.B) {
	l, names := cluster(b, 5000, place.Binpack)
	asked := shuffled(names)
	out := make([]Verdict, len(names))
	stop := make(chan struct{})
	events := 0
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				node := events % len(names)
				l.Observe(Holding{
					Pod: pod("busy"), Node: names[node], Resource: gcu, Units: 1, Device: deviceOf(node, 0), Confirmed: true,
				})
				events++
			}
		}
	})
	b.ReportAllocs()
	for b.Loop() {
		l.Check(asks(filterNeed), asked, out)
	}
	elapsed := b.Elapsed()
	close(stop)
	wg.Wait()
	b.ReportMetric(float64(events)/elapsed.Seconds(), "events/s")
}

var benchSizes = []int{100, 1000, 5000}

// BenchmarkReserve is a reservation and its undo, at several sizes of the
// cluster: the cost must not grow with it.
func BenchmarkReserve(b *testing.B) {
	for _, nodes := range benchSizes {
		b.Run(fmt.Sprintf("nodes=%d", nodes), func(b *testing.B) {
			l, names := cluster(b, nodes, place.Binpack)
			p, req, refused := pod("new"), asks(4), 0
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				_, undo, err := l.Reserve(p, time.Time{}, names[i%len(names)], req)
				if err != nil {
					refused++
				}
				undo()
			}
			b.ReportMetric(float64(refused)/float64(b.N), "refused/op")
		})
	}
}

// BenchmarkObserve is one watch event: of a new pod (with the event of its end),
// of one that did not change, and of one that the node moves to another device.
func BenchmarkObserve(b *testing.B) {
	events := []struct {
		name string
		do   func(l *Ledger, h Holding, other accel.DeviceID)
	}{
		{"new", func(l *Ledger, h Holding, _ accel.DeviceID) {
			h.Pod.UID = "new"
			l.Observe(h)
			l.Forget(h.Pod.UID)
		}},
		{"same", func(l *Ledger, h Holding, _ accel.DeviceID) { l.Observe(h) }},
		{"moved and back", func(l *Ledger, h Holding, other accel.DeviceID) {
			back := h.Device
			h.Device = other
			l.Observe(h)
			h.Device = back
			l.Observe(h)
		}},
	}
	for _, event := range events {
		for _, nodes := range benchSizes {
			b.Run(fmt.Sprintf("%s/nodes=%d", event.name, nodes), func(b *testing.B) {
				l, names := cluster(b, nodes, place.Binpack)
				running := make([]Holding, nodes)
				others := make([]accel.DeviceID, nodes)
				for i, n := range names {
					running[i] = Holding{
						Pod: pod(fmt.Sprint("busy", i)), Node: n, Resource: gcu, Units: 4, Confirmed: true, Device: deviceOf(i, 0),
					}
					others[i] = deviceOf(i, 1)
					l.Observe(running[i])
				}
				b.ReportAllocs()
				for i := 0; b.Loop(); i++ {
					event.do(l, running[i%nodes], others[i%nodes])
				}
			})
		}
	}
}

// BenchmarkSetNode is a node's heartbeat with an unchanged inventory.
func BenchmarkSetNode(b *testing.B) {
	l, names := cluster(b, 5000, place.Binpack)
	u, ok := l.Node(gcu, names[0])
	if !ok {
		b.Fatal("the node is not there")
	}
	inv := publishedAgain(u)
	b.ReportAllocs()
	for b.Loop() {
		l.SetNode(names[0], inv)
	}
}

// BenchmarkNodes is the snapshot of the whole cluster for inspect.
func BenchmarkNodes(b *testing.B) {
	l, _ := cluster(b, 5000, place.Binpack)
	b.ReportAllocs()
	for b.Loop() {
		_ = slices.Collect(l.Nodes(gcu))
	}
}

// TestCheckDoesNotAllocate holds the benchmark's promise in every test run.
func TestCheckDoesNotAllocate(t *testing.T) {
	l, names := cluster(t, 600, place.Binpack)
	out := make([]Verdict, len(names))
	request := asks(filterNeed)
	if got := testing.AllocsPerRun(20, func() { l.Check(request, names, out) }); got > 4 {
		t.Errorf("%v allocations for %d nodes, want a few for the request", got, len(names))
	}
	codes := make(map[accel.ReasonCode]int)
	for _, v := range out {
		codes[v.Code]++
	}
	if codes[accel.Fits] == 0 || codes[accel.NoDeviceFits] == 0 || codes[accel.LargerThanDevice] == 0 {
		t.Errorf("the benchmark's cluster answers only %v", codes)
	}
}
