package simulate

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/history"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

const recordedMemory accel.Resource = "enflame.com/gcu-memory"

// recordedCluster has nodes of devices with 16 units.
func recordedCluster(nodes, devices int) *Cluster {
	c := &Cluster{}
	for i := range nodes {
		n := Node{Name: fmt.Sprintf("node-%02d", i), CPU: place.Unlimited, Memory: place.Unlimited}
		for k := range devices {
			n.Devices = append(n.Devices, accel.Share{Units: 16, Device: accel.Device{ID: accel.DeviceID(fmt.Sprintf("%s-%d", n.Name, k)),
				Index: k, NUMANode: accel.NoNUMA}})
		}
		c.Nodes = append(c.Nodes, n)
	}
	return c
}

// record plays random pods on a ledger with a policy, as the extender does, and records it
// from the middle on.
func record(t *testing.T, seed int64, c *Cluster, policy place.Policy) *history.Record {
	t.Helper()
	rng := rand.New(rand.NewSource(seed))
	l := ledger.New(ledger.Options{Policy: policy, ReservationTTL: time.Hour})
	var names []string
	for _, n := range c.Nodes {
		names = append(names, n.Name)
		l.SetNode(n.Name, []accel.Inventory{{Resource: recordedMemory, Unit: "1", Shares: n.Devices, Several: true}})
	}
	at := time.Unix(1_800_000_000, 0).UTC()
	r := &history.Record{APIVersion: history.APIVersion, Kind: history.RecordKind}
	var live []history.Placement
	var waiting []history.Decision
	const pods = 60
	verdicts := make([]ledger.Verdict, len(names))
	attempt := func(d history.Decision, keep bool) bool {
		request := d.Request.Request(d.Pod.UID)
		l.Check(request, names, verdicts)
		best := -1
		for i, v := range verdicts {
			if v.Code == accel.Fits && (best < 0 || v.Rating > verdicts[best].Rating) {
				best = i
			}
		}
		if best >= 0 {
			d.Chosen = names[best]
		}
		d.At = at
		if keep {
			r.Entries = append(r.Entries, history.Entry{Decision: &d})
		}
		if best < 0 {
			return false
		}
		grant, _, err := l.Reserve(accel.PodRef{UID: d.Pod.UID}, at, names[best], request)
		if err != nil {
			t.Fatal(err)
		}
		p := history.Placement{Pod: d.Pod, At: at, Node: grant.Node, Resource: recordedMemory, Units: grant.Units}
		for _, id := range grant.Devices() {
			p.Devices = append(p.Devices, history.Device{ID: id})
		}
		if keep {
			r.Entries = append(r.Entries, history.Entry{Bound: &p})
		}
		live = append(live, p)
		return true
	}
	for i := range 2 * pods {
		keep := i >= pods // what was before is not recorded
		at = at.Add(time.Second)
		if len(live) > 4 && rng.Intn(3) == 0 {
			k := rng.Intn(len(live))
			gone := live[k]
			live = slices.Delete(live, k, k+1)
			gone.At = at
			l.Forget(gone.Pod.UID)
			if keep {
				r.Entries = append(r.Entries, history.Entry{Ended: &gone})
			}
			var still []history.Decision
			for _, d := range waiting {
				if !attempt(d, keep) {
					still = append(still, d)
				}
			}
			waiting = still
			at = at.Add(time.Second)
		}
		devices := 1 + max(0, rng.Intn(6)-4)
		d := history.Decision{Pod: history.Pod{Namespace: "team", Name: fmt.Sprint("p", i), UID: fmt.Sprint("u", i)}, Offered: len(names),
			Request: history.Request{Resource: recordedMemory, Devices: devices, Units: accel.Units(devices * (1 + rng.Intn(16)))}}
		if !attempt(d, keep) && keep {
			waiting = append(waiting, d)
		}
	}
	r.Held = live
	return r
}

// TestReplayOfTheSamePolicy places every pod as it was recorded, in random histories in which
// pods wait and end, also those that held devices before the record began.
func TestReplayOfTheSamePolicy(t *testing.T) {
	waited, held := 0, 0
	for seed := range int64(200) {
		c := recordedCluster(3, 4)
		for _, policy := range place.Policies() {
			r := record(t, seed, c, policy)
			kinds, err := ParsePolicies(Policies(), []string{policy.Name()})
			if err != nil {
				t.Fatal(err)
			}
			got, err := (&Decisions{Cluster: c, Resource: recordedMemory, Record: r, Policies: kinds}).Run(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			one := got.Policies[0]
			if len(one.Differences) > 0 || one.Outcome != got.Recorded {
				t.Fatalf("seed %d, %s: recorded %+v, replayed %+v", seed, policy.Name(), got.Recorded, one)
			}
			waited, held = waited+got.Recorded.NotPlaced, held+got.Held
		}
	}
	if waited < 100 || held < 1000 {
		t.Errorf("%d pods waited to the end, %d held devices before", waited, held)
	}
}

// TestReplayOfAnotherPolicy says which pods it places otherwise, and how full devices are.
func TestReplayOfAnotherPolicy(t *testing.T) {
	c := recordedCluster(2, 2)
	r := &history.Record{APIVersion: history.APIVersion, Kind: history.RecordKind, Extent: history.Extent{Dropped: 3}}
	at := time.Unix(1_800_000_000, 0).UTC()
	add := func(name string, units accel.Units, node string, device accel.DeviceID, only ...string) {
		at = at.Add(time.Second)
		pod := history.Pod{Namespace: "team", Name: name, UID: name}
		r.Entries = append(r.Entries, history.Entry{Decision: &history.Decision{Pod: pod, At: at, Offered: 2, Only: only,
			Request: history.Request{Resource: recordedMemory, Units: units, Devices: 1}}})
		if node != "" {
			p := history.Placement{Pod: pod, At: at, Node: node, Resource: recordedMemory, Units: units,
				Devices: []history.Device{{ID: device}}}
			r.Entries = append(r.Entries, history.Entry{Bound: &p})
			r.Held = append(r.Held, p)
		}
	}
	add("a", 4, "node-00", "node-00-0")
	add("b", 4, "node-00", "node-00-0")
	add("c", 4, "node-01", "node-01-0", "node-01") // offered alone
	add("d", 16, "node-00", "node-00-1")
	add("e", 16, "node-01", "node-01-1")
	add("f", 16, "", "")
	kinds, err := ParsePolicies(Policies(), []string{"binpack", "spread"})
	if err != nil {
		t.Fatal(err)
	}
	got, err := (&Decisions{Cluster: c, Resource: recordedMemory, Record: r, Policies: kinds}).Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if want := (Outcome{Placed: 5, NotPlaced: 1, InUse: 4, Units: 44}); got.Recorded != want {
		t.Errorf("recorded %+v, want %+v", got.Recorded, want)
	}
	if b := got.Policies[0]; len(b.Differences) != 0 || b.Outcome != got.Recorded {
		t.Errorf("binpack: %+v", b)
	}
	spread := got.Policies[1]
	if spread.Placed != 4 || spread.NotPlaced != 2 || spread.OtherDevice != 1 || len(spread.Differences) != 3 {
		t.Errorf("spread: %+v", spread)
	}
	var out bytes.Buffer
	if err := got.PrintTable(&out); err != nil {
		t.Fatal(err)
	}
	const want = `6 pods decided from 2027-01-15T08:00:01Z to 2027-01-15T08:00:06Z, beside 0 that held devices before

POLICY       PLACED  NOT PLACED  ELSEWHERE  OTHER DEVICE  DEVICES IN USE  EMPTY
as recorded  5       1                                    4               0
binpack      5       1           0          0             4               0
spread       4       2           1          1             4               0

spread:
  team/b: node-00 node-00-1 instead of node-00 node-00-0
  team/d: node-01 node-01-1 instead of node-00 node-00-1
  team/e: not placed instead of node-01 node-01-1
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if len(got.Notes) != 1 || !strings.Contains(got.Notes[0], "3 older entries were not kept") {
		t.Errorf("notes %q", got.Notes)
	}
}

func TestReplayOfNothing(t *testing.T) {
	d := Decisions{Cluster: recordedCluster(1, 1), Resource: recordedMemory, Record: &history.Record{}}
	if _, err := d.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "no decision about enflame.com/gcu-memory") {
		t.Errorf("%v", err)
	}
}

// TestReplayPrintsNoControlCharacters: a file may be anybody's.
func TestReplayPrintsNoControlCharacters(t *testing.T) {
	x := newTale()
	x.decided("\x1b]0;title\x07p", 4, 1)
	x.bound("\x1b]0;title\x07p", 4, "\x1b[2Jnode")
	if _, text := x.run(t, recordedCluster(1, 1), "binpack"); strings.ContainsAny(text, "\x1b\x07") ||
		!strings.Contains(text, "team/?]0;title?p: node-00 node-00-0 instead of ?[2Jnode") {
		t.Errorf("%q", text)
	}
}

// TestReplayOfBindsWithoutOutcome: what pods held says that they were bound.
func TestReplayOfBindsWithoutOutcome(t *testing.T) {
	x := newTale()
	x.decided("a", 16, 2)
	x.ended("a", 16, "node-00")
	x.decided("b", 16, 2)
	x.Held = append(x.Held, *x.placement("b", 16, "node-00"))
	got, text := x.run(t, recordedCluster(2, 1), "binpack")
	if want := (Outcome{Placed: 2, InUse: 1, Empty: 1, Units: 16}); got.Recorded != want || got.Policies[0].Outcome != want ||
		len(got.Policies[0].Differences) > 0 {
		t.Error(text)
	}
}

// TestReplayOfAPodThatWaitedUntilItsEnd: it takes nothing afterwards.
func TestReplayOfAPodThatWaitedUntilItsEnd(t *testing.T) {
	x := newTale()
	x.decided("a", 16, 1)
	x.bound("a", 16, "node-00")
	x.decided("waits", 16, 1)
	x.Entries = append(x.Entries, history.Entry{Ended: &history.Placement{Pod: history.Pod{UID: "waits"}, At: x.at}})
	x.ended("a", 16, "node-00")
	x.decided("b", 16, 1)
	x.bound("b", 16, "node-00")
	if got, text := x.run(t, recordedCluster(1, 1), "binpack"); len(got.Policies[0].Differences) > 0 {
		t.Error(text)
	}
}

// TestReplayAllowsNodesThatWereFull: kube-scheduler does not offer nodes that have too few
// units free, which is the recorded policy's doing; others it left out for reasons of its own.
func TestReplayAllowsNodesThatWereFull(t *testing.T) {
	all := []string{"node-00", "node-01", "node-02"}
	x := newTale() // placed by spread
	for i, node := range all {
		x.decided(fmt.Sprint("p", i), 4, 3, all...)
		x.bound(fmt.Sprint("p", i), 4, node)
	}
	x.decided("picky", 2, 1, "node-02") // the others have enough free: it may not go there
	x.bound("picky", 2, "node-02")
	x.ended("p0", 4, "node-00")
	x.decided("large", 16, 1, "node-00") // node-01 has 12 free, and node-02 10
	x.bound("large", 16, "node-00")
	got, text := x.run(t, recordedCluster(3, 1), "binpack", "spread")
	if b := got.Policies[0]; b.NotPlaced != 0 || len(b.Differences) != 3 || b.Differences[2].Replayed.Node != "node-01" {
		t.Errorf("binpack: %s", text)
	}
	if s := got.Policies[1]; len(s.Differences) > 0 {
		t.Errorf("spread: %s", text)
	}
}

// TestReplayOfAFullCluster keeps no list of thousands of nodes for each pod.
func TestReplayOfAFullCluster(t *testing.T) {
	x := newTale()
	for i := range maxOnly + 1 {
		x.Held = append(x.Held, *x.placement(fmt.Sprint("h", i), 1, fmt.Sprintf("node-%02d", i)))
	}
	x.decided("large", 16, 1, "node-00")
	got, _ := x.run(t, recordedCluster(maxOnly+2, 1), "binpack")
	if got.Policies[0].Placed != 1 || len(got.Notes) != 1 || !strings.HasPrefix(got.Notes[0], "For 1 decisions kube-scheduler") {
		t.Errorf("%+v", got)
	}
}

// TestReplayNotesWhatItCannotKnow, of nodes that are gone and of pods that another replica
// placed.
func TestReplayNotesWhatItCannotKnow(t *testing.T) {
	x := newTale()
	before := x.placement("before", 4, "node-00")
	x.decided("a", 4, 2)
	x.bound("a", 4, "gone")
	x.Held = append(x.Held, *before, *x.placement("b", 4, "gone"), *x.placement("c", 4, "node-00"))
	got, _ := x.run(t, recordedCluster(1, 1), "binpack")
	if len(got.Notes) != 2 || !strings.HasPrefix(got.Notes[0], "2 pods held devices of nodes that") ||
		!strings.HasPrefix(got.Notes[1], "1 pod got devices during the record") {
		t.Errorf("%q", got.Notes)
	}
}

// tries counts how often a replay tries to place a pod, before each of which it asks whether
// to go on.
type tries struct {
	context.Context
	n, most int
}

func (c *tries) Err() error {
	if c.n++; c.n > c.most {
		return context.Canceled
	}
	return nil
}

// TestReplayTriesEqualPodsOnce for each end, however many wait, and can be stopped.
func TestReplayTriesEqualPodsOnce(t *testing.T) {
	const full, waiting = 20, 1000
	x := newTale()
	for i := range full {
		x.decided(fmt.Sprint("f", i), 16, full)
		x.bound(fmt.Sprint("f", i), 16, fmt.Sprintf("node-%02d", i))
	}
	for i := range waiting {
		x.decided(fmt.Sprint("w", i), 16, full)
		x.Entries[len(x.Entries)-1].Decision.Request.Selection = &history.Selection{AvoidModels: []string{"old"}}
	}
	for i := range full {
		x.ended(fmt.Sprint("f", i), 16, fmt.Sprintf("node-%02d", i))
		x.bound(fmt.Sprint("w", i), 16, fmt.Sprintf("node-%02d", i))
	}
	kinds, err := ParsePolicies(Policies(), []string{"binpack"})
	if err != nil {
		t.Fatal(err)
	}
	d := Decisions{Cluster: recordedCluster(full, 1), Resource: recordedMemory, Record: &x.Record, Policies: kinds}
	ctx := &tries{t.Context(), 0, math.MaxInt}
	if got, err := d.Run(ctx); err != nil || got.Policies[0].Placed != 2*full || ctx.n > full+waiting+2*full {
		t.Errorf("%v, %d tries: %+v", err, ctx.n, got)
	}
	if _, err := d.Run(&tries{t.Context(), 0, full + waiting + 3}); !errors.Is(err, context.Canceled) {
		t.Errorf("stopped among the retries: %v", err)
	}
}

// tale is a record that a test makes, an entry a second.
type tale struct {
	history.Record
	at time.Time
}

func newTale() *tale {
	return &tale{history.Record{APIVersion: history.APIVersion, Kind: history.RecordKind}, time.Unix(1_800_000_000, 0).UTC()}
}

func (x *tale) decided(name string, units accel.Units, offered int, only ...string) {
	x.at = x.at.Add(time.Second)
	x.Entries = append(x.Entries, history.Entry{Decision: &history.Decision{Pod: history.Pod{Namespace: "team", Name: name, UID: name},
		At: x.at, Offered: offered, Only: only, Request: history.Request{Resource: recordedMemory, Units: units, Devices: 1}}})
}

// placement is of a pod on the first device of a node.
func (x *tale) placement(name string, units accel.Units, node string) *history.Placement {
	x.at = x.at.Add(time.Second)
	return &history.Placement{Pod: history.Pod{Namespace: "team", Name: name, UID: name}, At: x.at, Node: node, Resource: recordedMemory,
		Units: units, Devices: []history.Device{{ID: accel.DeviceID(node + "-0")}}}
}

func (x *tale) bound(name string, units accel.Units, node string) {
	x.Entries = append(x.Entries, history.Entry{Bound: x.placement(name, units, node)})
}

func (x *tale) ended(name string, units accel.Units, node string) {
	x.Entries = append(x.Entries, history.Entry{Ended: x.placement(name, units, node)})
}

func (x *tale) run(t *testing.T, c *Cluster, policies ...string) (*DecisionReport, string) {
	t.Helper()
	kinds, err := ParsePolicies(Policies(), policies)
	if err != nil {
		t.Fatal(err)
	}
	if err := x.Validate(); err != nil {
		t.Fatal(err)
	}
	got, err := (&Decisions{Cluster: c, Resource: recordedMemory, Record: &x.Record, Policies: kinds}).Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := got.PrintTable(&b); err != nil {
		t.Fatal(err)
	}
	return got, b.String()
}
