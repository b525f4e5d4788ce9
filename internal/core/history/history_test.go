package history

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func words(r *rand.Rand, most int) []string {
	var out []string
	for range r.IntN(most + 1) {
		out = append(out, strings.Repeat("x", r.IntN(12))+fmt.Sprint(r.IntN(1000)))
	}
	return out
}

// randomDecision has any values where a decision has some.
func randomDecision(r *rand.Rand, i int) *Decision {
	d := &Decision{
		Pod: Pod{"team", fmt.Sprint("pod-", i), fmt.Sprint("uid-", i)}, At: start.Add(time.Duration(i) * time.Second),
		Request: Request{Resource: "enflame.com/gcu-memory", Units: accel.Units(r.IntN(1 << 20)), Devices: 1 + r.IntN(8),
			CPU: r.Int64N(1e6), Memory: r.Int64N(1e6), Priority: int32(r.IntN(2000) - 1000), Policy: strings.Repeat("p", r.IntN(3))},
		Offered: r.IntN(5000), Only: words(r, MaxOnly), Fits: r.IntN(5000), Chosen: strings.Repeat("n", r.IntN(3)),
	}
	if r.IntN(3) == 0 {
		d.Request.Selection = &Selection{UseModels: words(r, 3), AvoidModels: words(r, 2), UseIDs: words(r, 3), AvoidIDs: words(r, 3),
			Isolation: accel.TierDriver}
	}
	for range r.IntN(4) {
		d.Rejected = append(d.Rejected, Rejected{Code: "noDeviceFits", Nodes: r.IntN(5000), Named: words(r, MaxNamed)})
	}
	for range r.IntN(MaxCandidates + 1) {
		c := Candidate{Node: fmt.Sprint("node-", r.IntN(100)), Rating: r.Int64() - r.Int64(), CPU: place.Unlimited, Memory: r.Int64N(1e9)}
		for k := range r.IntN(9) {
			c.Slots = append(c.Slots, Slot{Index: k, Model: []string{"", "S60", "A100"}[r.IntN(3)], Total: 48,
				Free: accel.Units(r.IntN(60) - 10), Unhealthy: r.IntN(5) == 0, Excluded: r.IntN(5) == 0, WouldGet: r.IntN(5) == 0})
		}
		for range r.IntN(5) {
			c.Terms = append(c.Terms, place.Term{Name: []string{"", "freeLeft", "waste"}[r.IntN(3)], Value: r.Int64() - r.Int64()})
		}
		d.Candidates = append(d.Candidates, c)
	}
	return d
}

func TestEntriesComeBackAsTheyWere(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	l := NewLog(start)
	var want []Entry
	for i := range 2000 {
		p := &Placement{Pod: Pod{"team", fmt.Sprint("pod-", i), fmt.Sprint("uid-", i)}, At: start.Add(time.Duration(i) * time.Second),
			Node: "node-1", Resource: "enflame.com/gcu-memory", Units: accel.Units(i), Devices: []Device{{-1, "a"}, {3, "b"}}}
		switch r.IntN(3) {
		case 0:
			l.Bound(p)
			want = append(want, Entry{Bound: p})
		case 1:
			l.Ended(p)
			want = append(want, Entry{Ended: p})
		default:
			d := randomDecision(r, i)
			l.Decided(d)
			want = append(want, Entry{Decision: d})
		}
	}
	i := 0
	for got := range l.Each {
		if diff := cmp.Diff(want[i], got); diff != "" {
			t.Fatalf("entry %d (-want +got):\n%s", i, diff)
		}
		i++
	}
	if extent := l.Extent(); i != len(want) || !extent.Since.Equal(start) || extent.Dropped != 0 {
		t.Errorf("%d of %d entries, %+v", i, len(want), extent)
	}
}

// TestRetriesAreKeptOnce: the same question again says nothing new; another outcome does,
// and so does the first question after a bind.
func TestRetriesAreKeptOnce(t *testing.T) {
	l := NewLog(start)
	d := Decision{Pod: Pod{"team", "p", "u"}, At: start, Rejected: []Rejected{{Code: "noDeviceFits", Nodes: 3}}}
	count := func() (n int) {
		for range l.Each {
			n++
		}
		return n
	}
	for range 1000 {
		l.Decided(&d)
	}
	if n := count(); n != 1 {
		t.Errorf("a thousand retries are kept as %d", n)
	}
	d.Rejected[0].Code = "tooFewDevices"
	l.Decided(&d)
	l.Bound(&Placement{Pod: d.Pod, At: start})
	l.Decided(&d)
	if n := count(); n != 4 {
		t.Errorf("%d entries, want 4", n)
	}
	about := l.About("team", "p")
	if about.Decision == nil || about.Bound != nil || about.Decision.Rejected[0].Code != "tooFewDevices" {
		t.Errorf("%+v", about)
	}
	if other := l.About("team", "q"); other != (Entry{}) {
		t.Errorf("of an unknown pod: %+v", other)
	}
}

// TestWaitingPodsLeaveTheRest: their retries, of which each end elsewhere changes the counts,
// do not push out what was decided about others, however many wait.
func TestWaitingPodsLeaveTheRest(t *testing.T) {
	for _, waiting := range []int{1000, 12_000} {
		l := NewLog(start)
		placed := Pod{"team", "placed", "placed"}
		l.Decided(&Decision{Pod: placed, At: start, Chosen: "n", Fits: 1})
		l.Bound(&Placement{Pod: placed, At: start, Node: "n"})
		const rounds = 10
		for i := range rounds {
			for k := range waiting {
				l.Decided(&Decision{Pod: Pod{"team", fmt.Sprint("p", k), fmt.Sprint("uid-", k)}, Offered: 500 - i, Rejected: []Rejected{
					{Code: "noDeviceFits", Nodes: 500 - i}, {Code: "tooFewDevices", Nodes: 1 + i}}})
			}
		}
		entries := 0
		for range l.Each {
			entries++
		}
		if dropped := int(l.Extent().Dropped); entries+dropped > 2+waiting*rounds/2 {
			t.Errorf("%d pods in %d rounds made %d entries", waiting, rounds, entries+dropped)
		} else if waiting <= 1000 && l.About("team", "placed").Decision == nil {
			t.Error("the decision about a placed pod is gone")
		}
	}
}

// TestPodThatIsCreatedAgain: the end of the pod before it may come late.
func TestPodThatIsCreatedAgain(t *testing.T) {
	l := NewLog(start)
	before, now := Pod{"team", "train-0", "before"}, Pod{"team", "train-0", "now"}
	for _, pod := range []Pod{before, now} {
		l.Decided(&Decision{Pod: pod, At: start, Chosen: "node-1", Fits: 1})
		l.Bound(&Placement{Pod: pod, At: start, Node: "node-1"})
	}
	l.Ended(&Placement{Pod: before, At: start.Add(time.Minute), Node: "node-1"})
	e := l.About("team", "train-0")
	if e.Decision == nil || e.Decision.Pod != now || e.Bound == nil || e.Bound.Pod != now || e.Ended != nil {
		t.Errorf("%+v", e)
	}
	l.Ended(&Placement{Pod: now, At: start.Add(time.Hour), Node: "node-1"})
	if e := l.About("team", "train-0"); e.Decision.Pod != now || e.Ended == nil || e.Ended.Pod != now {
		t.Errorf("after its end: %+v", e)
	}
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// TestBudgetHoldsInAStorm: a hundred thousand decisions about pods with the longest names
// take no more than the budget, and the newest are kept; so do as many short entries.
func TestBudgetHoldsInAStorm(t *testing.T) {
	long := func(i int) Pod {
		return Pod{strings.Repeat("n", 63), strings.Repeat("p", 240) + fmt.Sprint(i), fmt.Sprintf("01234567-89ab-cdef-0123-%012d", i)}
	}
	for name, add := range map[string]func(l *Log, r *rand.Rand, i int){
		"decisions with long names": func(l *Log, r *rand.Rand, i int) {
			d := randomDecision(r, i)
			d.Pod = long(i)
			for k := range d.Candidates {
				d.Candidates[k].Node = strings.Repeat("n", 253)
			}
			l.Decided(d)
		},
		"short ends": func(l *Log, _ *rand.Rand, i int) {
			l.Ended(&Placement{Pod: Pod{"team", "p", "01234567-89ab-cdef-0123-" + fmt.Sprint(i)}, Node: "node-000123",
				At: start.Add(time.Duration(i) * time.Second)})
		},
		"retries": func(l *Log, r *rand.Rand, i int) {
			d := randomDecision(r, i%20_000)
			d.Pod = long(i % 20_000)
			l.Decided(d)
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(3, 4))
			before := heap()
			l := NewLog(start)
			most := uint64(0)
			for i := range 100_000 {
				add(l, r, i)
				if i%20_000 == 19_999 {
					most = max(most, heap()-before)
				}
			}
			if most > Budget {
				t.Errorf("the log takes %d bytes, its budget is %d", most, Budget)
			}
			var last Entry
			kept := 0
			for e := range l.Each {
				last = e
				kept++
			}
			extent := l.Extent()
			if kept < 4000 || extent.Dropped == 0 || extent.Since.Equal(start) || !last.At().After(extent.Since) {
				t.Errorf("%d are kept, the last one of %s; %+v", kept, last.At(), extent)
			}
			runtime.KeepAlive(l)
		})
	}
}

// TestExplanationSaysWhatPolicyDid: of random candidates, the devices that the policy chooses
// are marked, the terms add up to the rating, and no rejected device is chosen.
func TestExplanationSaysWhatPolicyDid(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	explained := 0
	for i := range 3000 {
		n := place.Node{CPU: place.Unlimited, Memory: place.Unlimited, Cores: place.Unlimited}
		only := &accel.Selection{}
		for k := range 1 + r.IntN(8) {
			id := fmt.Sprint("gpu-", k)
			n.Slots = append(n.Slots, place.Slot{ID: accel.DeviceID(id), Index: k, Total: 16, Free: accel.Units(r.IntN(18) - 1),
				Unhealthy: r.IntN(8) == 0})
			if r.IntN(6) == 0 {
				only.AvoidIDs = append(only.AvoidIDs, id)
			}
		}
		ask := place.Ask{Devices: 1 + max(0, r.IntN(5)-3), Units: accel.Units(1 + r.IntN(18)), Only: only}
		policy := place.Policies()[r.IntN(2)]
		slots, rating, ok := policy.Choose(&n, &ask, nil)
		if !ok {
			continue
		}
		explained++
		d := &Decision{Pod: Pod{"team", "p", fmt.Sprint(i)}, Candidates: []Candidate{CandidateOf("node", rating, &n, &ask, policy)}}
		e := Explain(Entry{Decision: d}, policy, ask)
		got := e.Ratings[0]
		if len(e.Notes) > 0 || Sum(got.Terms) != rating || got.Rating != rating {
			t.Fatalf("%s of %+v for %+v: %+v", policy.Name(), n, ask, e)
		}
		var chosen []int
		for k, d := range got.Devices {
			if d.WouldGet {
				chosen = append(chosen, k)
			}
			if fits := ask.Fits(&n.Slots[k]); fits != (d.Rejected == "") || d.WouldGet && !fits || d.Chosen {
				t.Fatalf("device %d of %+v for %+v: %+v", k, n, ask, d)
			}
			if ask.Devices == 1 && d.Rejected == "" && Sum(d.Terms) > rating {
				t.Fatalf("device %d is better than the chosen one: %+v", k, got)
			}
		}
		if diff := cmp.Diff(slots, chosen); diff != "" {
			t.Fatalf("chosen (-want +got):\n%s", diff)
		}
	}
	if explained < 1000 {
		t.Errorf("only %d were explained", explained)
	}
}

// BenchmarkDecided keeps a decision with three candidates of eight devices.
// candidate is a node of devices of 16 units, with so much free.
func candidate(name string, policy place.Policy, ask place.Ask, free ...accel.Units) Candidate {
	n := place.Node{CPU: place.Unlimited, Memory: place.Unlimited, Cores: place.Unlimited}
	for i, f := range free {
		n.Slots = append(n.Slots, place.Slot{ID: accel.DeviceID(fmt.Sprint(i)), Index: i, Total: 16, Free: f})
	}
	_, rating, _ := policy.Choose(&n, &ask, nil)
	return CandidateOf(name, rating, &n, &ask, policy)
}

// TestChosenIsWhatThePodGot: other devices are not called chosen, nor is a node that another
// program chose explained.
func TestChosenIsWhatThePodGot(t *testing.T) {
	ask := place.Ask{Units: 4, Devices: 1}
	d := Decision{Pod: Pod{"team", "p", "u"}, At: start, Request: Request{Resource: "r", Units: 4, Devices: 1}, Offered: 2, Fits: 2,
		Chosen: "a", Candidates: []Candidate{candidate("a", place.Binpack, ask, 4, 16), candidate("b", place.Binpack, ask, 16, 6)}}
	const nodes = `
  POLICY    binpack
  NODES     2 offered by kube-scheduler, the pod fits on 2
  a  rated 0: freeLeft 0
    device 0  4 of 16 free   %s
    device 1  16 of 16 free  %s
  b  rated -2: freeLeft -2
    device 0  16 of 16 free  would be rated -12: freeLeft -12
    device 1  6 of 16 free   would get
`
	const first, second = "would be rated 0: freeLeft 0", "would be rated -12: freeLeft -12"
	won := "  WON       a over b by freeLeft 0 against -2\n"
	for name, tt := range map[string]struct {
		chosen string
		bound  *Placement
		want   string
	}{
		"bound": {"a", &Placement{Node: "a", Devices: []Device{{0, "x"}}},
			" and was bound to a, device 0." + fmt.Sprintf(nodes, "chosen", second) + won},
		"bound to another device": {"a", &Placement{Node: "a", Devices: []Device{{1, "y"}}},
			" and was bound to a, device 1." + fmt.Sprintf(nodes, first, "chosen") + won},
		"not bound": {"a", nil, ": a was chosen, and the pod is not bound yet." + fmt.Sprintf(nodes, "would get", second) + won},
		"by kube-scheduler": {"", &Placement{Node: "z", Devices: []Device{{0, "x"}}},
			" and was bound to z, device 0; kube-scheduler chose the node." + fmt.Sprintf(nodes, "would get", second)},
		"a node that went away while it was rated": {"y", nil,
			": y was chosen, and the pod is not bound yet." + fmt.Sprintf(nodes, "would get", second)},
	} {
		d := d
		d.Chosen = tt.chosen
		e := Explain(Entry{Decision: &d, Bound: tt.bound}, place.Binpack, ask)
		var b strings.Builder
		if err := e.Print(&b); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff("team/p requested 4 units of r at 2026-01-02T03:04:05Z"+tt.want, b.String()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// TestTermsAreThoseOfTheDecision, whatever the policy would say by now. A node that changed
// while it was rated has none.
func TestTermsAreThoseOfTheDecision(t *testing.T) {
	ask := place.Ask{Units: 4, Devices: 1}
	d := Decision{Candidates: []Candidate{candidate("a", place.Binpack, ask, 6, 16)}}
	e := Explain(Entry{Decision: &d}, place.Spread, ask) // as if its weights were others
	if r := e.Ratings[0]; Sum(r.Terms) != r.Rating || !r.Devices[0].WouldGet || r.Devices[1].Terms != nil {
		t.Errorf("%+v", r)
	}
	if len(e.Notes) != 1 || !strings.Contains(e.Notes[0], "were renewed since") {
		t.Errorf("%q", e.Notes)
	}
	n := place.Node{CPU: place.Unlimited, Memory: place.Unlimited, Cores: place.Unlimited, Slots: []place.Slot{{Total: 16, Free: 16}}}
	d.Candidates[0] = CandidateOf("b", -2, &n, &ask, place.Binpack)
	e = Explain(Entry{Decision: &d}, place.Binpack, ask)
	if len(e.Ratings[0].Terms) > 0 || len(e.Notes) != 1 || !strings.Contains(e.Notes[0], "node b changed while it was rated") {
		t.Errorf("%+v, %q", e.Ratings[0], e.Notes)
	}
}

func BenchmarkDecided(b *testing.B) {
	r := rand.New(rand.NewPCG(7, 8))
	d := randomDecision(r, 0)
	d.Candidates = nil
	for range MaxCandidates {
		c := Candidate{Node: "node-000123", CPU: place.Unlimited, Memory: place.Unlimited, Cores: place.Unlimited}
		for k := range 8 {
			c.Slots = append(c.Slots, Slot{Index: k, Model: "S60", Total: 480, Free: accel.Units(r.IntN(480))})
		}
		d.Candidates = append(d.Candidates, c)
	}
	l := NewLog(start)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		d.Request.Units = accel.Units(i)
		l.Decided(d)
	}
}
