package eviction

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
)

const gpuMemory accel.Resource = "nvidia.com/gpu-memory"

var (
	start    = time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)
	settings = Settings{Grace: 2 * time.Minute, MaxPerHour: 3, Exempt: []string{"kube-system"}}
)

func at(seconds int) time.Time { return start.Add(time.Duration(seconds) * time.Second) }

func over(uid string, device accel.DeviceID, excess uint64) wire.Overuse {
	return wire.Overuse{
		Pod: accel.PodRef{UID: uid, Namespace: "team", Name: uid}, Container: "main", Resource: gpuMemory, Device: device,
		AllocatedBytes: 1 << 30, UsedBytes: 1<<30 + excess<<20, Since: start.Add(-time.Hour), // by a clock that is wrong
	}
}

// candidate is one that is to be evicted at 120 s.
func candidate(uid string, device accel.DeviceID, changes ...func(*Candidate)) Candidate {
	c := Candidate{Overuse: over(uid, device, 100), First: start, Written: at(60), Confirmed: true}
	for _, change := range changes {
		change(&c)
	}
	return c
}

func excess(mib uint64) func(*Candidate) {
	return func(c *Candidate) { c.UsedBytes = c.AllocatedBytes + mib<<20 }
}

func priority(p int32) func(*Candidate) { return func(c *Candidate) { c.Priority = p } }

// said renders verdicts: "a" is evicted, and "a exempt: why" is not.
func said(verdicts []Verdict) (out []string) {
	for _, v := range verdicts {
		if v.Outcome == Evicted && v.Why == "" {
			out = append(out, v.Pod.UID)
		} else {
			out = append(out, fmt.Sprintf("%s %s: %s", v.Pod.UID, v.Outcome, v.Why))
		}
	}
	return out
}

func TestDecide(t *testing.T) {
	const limit = " rateLimit: the node's limit of 3 evictions within an hour is reached"
	with := func(c ...Candidate) []Candidate { return c }
	evicted := func(seconds ...int) (p Past) {
		for _, s := range seconds {
			p.Evicted = append(p.Evicted, at(s))
		}
		return p
	}
	for name, tt := range map[string]struct {
		now        int // seconds; 120 if 0
		candidates []Candidate
		past       Past
		want       []string
	}{
		"a pod that is over for the grace period is evicted": {candidates: with(candidate("a", "G1")), want: []string{"a"}},
		"not before, whatever the node's clock says":         {now: 119, candidates: with(candidate("a", "G1"))},
		"a list that was never rewritten proves nothing": {
			candidates: with(candidate("a", "G1", func(c *Candidate) { c.Written = start })),
		},
		"a list that is not rewritten for 150 s proves nothing": {now: 210, candidates: with(candidate("a", "G1"))},
		"a list that was rewritten less than 150 s ago does": {
			now: 209, candidates: with(candidate("a", "G1")),
			want: []string{"a"},
		},
		"a pod that does not hold the device there": {
			candidates: with(candidate("a", "G1", func(c *Candidate) { c.Confirmed = false })),
		},
		"the lowest priority first, whatever its excess": {
			candidates: with(candidate("a", "G1", priority(5), excess(900)),
				candidate("b", "G1", priority(-1), excess(1))),
			want: []string{"b"},
		},
		"then the largest excess, not the largest use": {
			candidates: with(candidate("a", "G1", func(c *Candidate) { c.AllocatedBytes, c.UsedBytes = 1<<40, 1<<40+1<<20 }),
				candidate("b", "G1", excess(2))),
			want: []string{"b"},
		},
		"one on each device": {
			candidates: with(candidate("a", "G1"),
				candidate("b", "G1"),
				candidate("c", "G2")),
			want: []string{"a", "c"},
		},
		"a pod that is over on two devices once": {
			candidates: with(candidate("a", "G1"),
				candidate("a", "G2")),
			want: []string{"a"},
		},
		"the next on a device not within 30 s": {
			candidates: with(candidate("a", "G1"),
				candidate("b", "G2")),
			past: Past{Devices: map[accel.DeviceID]time.Time{"G1": at(91)}},
			want: []string{"b"},
		},
		"but after": {
			candidates: with(candidate("a", "G1", func(c *Candidate) { c.Written = at(91) })),
			past:       Past{Devices: map[accel.DeviceID]time.Time{"G1": at(90)}},
			want:       []string{"a"},
		},
		"and not before the node has written its list again": {
			candidates: with(candidate("a", "G1", func(c *Candidate) { c.Written = at(90) })),
			past:       Past{Devices: map[accel.DeviceID]time.Time{"G1": at(90)}},
		},
		"the limit of an hour": {
			candidates: with(candidate("a", "G1")),
			past:       evicted(-3479, 0, 60),
			want:       []string{"a" + limit},
		},
		"an eviction that is an hour ago does not count": {
			candidates: with(candidate("a", "G1")),
			past:       evicted(-3480, 0, 60),
			want:       []string{"a"},
		},
		"the limit within one pass": {
			candidates: with(candidate("a", "G1"),
				candidate("b", "G2"),
				candidate("c", "G3")),
			past: evicted(0, 60),
			want: []string{"a"}, // whose eviction may fail
		},
		"an exempt namespace": {
			candidates: with(candidate("a", "G1", func(c *Candidate) { c.Pod.Namespace = "kube-system" })),
			want:       []string{"a exempt: its namespace is exempt"},
		},
		"a static pod": {
			candidates: with(candidate("a", "G1", func(c *Candidate) { c.Static = true })),
			want:       []string{"a exempt: it is a static pod"},
		},
		"a critical priority": {
			candidates: with(candidate("a", "G1", priority(2_000_000_000))),
			want:       []string{"a exempt: it has a priority of Kubernetes' critical classes"},
		},
		"the highest priority of users": {
			candidates: with(candidate("a", "G1", priority(1_000_000_000))),
			want:       []string{"a"},
		},
		"an exempt pod protects no other, and counts for no limit": {
			candidates: with(candidate("a", "G1", func(c *Candidate) { c.Static = true }),
				candidate("b", "G1")),
			past: evicted(0, 60),
			want: []string{"a exempt: it is a static pod", "b"},
		},
		"a pod that was tried waits, and the next one is evicted": {
			candidates: with(candidate("a", "G1", func(c *Candidate) { c.Retry = at(121) }),
				candidate("b", "G1", priority(1))),
			want: []string{"b"},
		},
		"a pod that was tried is tried again, and first": {
			candidates: with(candidate("a", "G1", func(c *Candidate) { c.Retry = at(120) }),
				candidate("b", "G1", priority(1))),
			want: []string{"a"},
		},
		"a pod that was evicted, or never can be, is not repeated": {
			candidates: with(candidate("a", "G1", func(c *Candidate) { c.Closed = true })),
		},
	} {
		t.Run(name, func(t *testing.T) {
			now := at(tt.now)
			if tt.now == 0 {
				now = at(120)
			}
			for range 2 { // in any order
				if diff := cmp.Diff(tt.want, said(Decide(now, tt.candidates, tt.past, settings))); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
				slices.Reverse(tt.candidates)
			}
		})
	}
}

func list(t *testing.T, written time.Time, pods ...wire.Overuse) string {
	t.Helper()
	text, err := wire.EncodeOveruse(wire.OveruseList{Time: written, Pods: pods})
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// TestHistory: from when an entry counts.
func TestHistory(t *testing.T) {
	later := over("a", "G1", 1)
	later.Since = later.Since.Add(time.Second)
	elsewhere := over("a", "G2", 1)
	other := over("a", "G1", 1)
	other.Container = "side"
	a, more, b := over("a", "G1", 1), over("a", "G1", 2), over("b", "G1", 1)
	for name, tt := range map[string]struct {
		lists map[int]string // by second; "" for none
		want  []string       // the entry of pod a: when it was first seen, and its list written
	}{
		"listed once":               {map[int]string{0: list(t, start, a)}, []string{"0 0"}},
		"rewritten":                 {map[int]string{0: list(t, start, a), 60: list(t, at(60), a)}, []string{"0 60"}},
		"rewritten with more use":   {map[int]string{0: list(t, start, a), 60: list(t, at(60), more)}, []string{"0 60"}},
		"the same list, read again": {map[int]string{0: list(t, start, a), 60: list(t, start, a)}, []string{"0 0"}},
		"not listed in between":     {map[int]string{0: list(t, start, a), 30: "", 60: list(t, at(60), a)}, []string{"60 60"}},
		"a list in between without it": {map[int]string{0: list(t, start, a), 30: list(t, at(30), b), 60: list(t, at(60), a)},
			[]string{"60 60"}},
		"a list in between that is garbled": {map[int]string{0: list(t, start, a), 30: "{", 60: list(t, at(60), a)}, []string{"60 60"}},
		"another beginning":                 {map[int]string{0: list(t, start, a), 60: list(t, at(60), later)}, []string{"60 60"}},
		"another device":                    {map[int]string{0: list(t, start, a), 60: list(t, at(60), elsewhere)}, []string{"60 60"}},
		"another container":                 {map[int]string{0: list(t, start, a), 60: list(t, at(60), other)}, []string{"60 60"}},
		"stale in between":                  {map[int]string{0: list(t, start, a), 150: list(t, at(150), a)}, []string{"150 150"}},
		"late, but not stale":               {map[int]string{0: list(t, start, a), 149: list(t, at(149), a)}, []string{"0 149"}},
		"removed":                           {map[int]string{0: list(t, start, a), 60: ""}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			h := NewHistory()
			for second := range 300 {
				text, read := tt.lists[second]
				if !read {
					continue
				}
				lists := map[string]string{}
				if text != "" {
					lists["n"] = text
				}
				if errs := h.See(at(second), lists); (errs["n"] != nil) != (text == "{") {
					t.Errorf("second %d: %v", second, errs)
				}
			}
			var got []string
			candidates, _ := h.Candidates("n")
			for _, c := range candidates {
				got = append(got, fmt.Sprintf("%.0f %.0f", c.First.Sub(start).Seconds(), c.Written.Sub(start).Seconds()))
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// A replica that leads again counts from the beginning, and knows what it evicted itself.
func TestRestart(t *testing.T) {
	h := NewHistory()
	a := over("a", "G1", 1)
	h.See(start, map[string]string{"n": list(t, start, a)})
	h.Record(at(120), "n", &a, Evicted)
	h.Restart()
	if nodes := h.Nodes(); len(nodes) > 0 {
		t.Errorf("lists of %v are kept", nodes)
	}
	h.See(at(130), map[string]string{"n": list(t, start, a)})
	candidates, past := h.Candidates("n")
	want := []Candidate{{Overuse: a, First: at(130), Written: at(130)}}
	if diff := cmp.Diff(want, candidates); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if len(past.Evicted) != 1 || !past.Devices["G1"].Equal(at(120)) {
		t.Errorf("what was evicted is %+v", past)
	}
	// Nothing of a node is left when no decision needs it any more.
	h.See(at(140), nil)
	if len(h.nodes) != 1 {
		t.Error("what was evicted is forgotten")
	}
	h.See(at(120+3600), nil)
	if len(h.nodes) != 0 {
		t.Errorf("%d nodes are remembered", len(h.nodes))
	}
}

var _ Cluster = cluster.Overuse{}
