package ledger

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// on asks for the units in equal parts on so many devices.
func on(devices int, units accel.Units) accel.Request {
	req := asks(units)
	req.Devices = devices
	return req
}

func TestSeveralDevices(t *testing.T) {
	w := newWorld(t, Options{})
	w.node("n1", cards(16, 32, 16))
	w.reserve("q", "n1", 4)
	g, undo, err := w.Reserve(pod("p"), time.Time{}, "n1", on(2, 20))
	want := accel.Grant{
		Resource: gcu, Node: "n1", Device: "a", DeviceUnits: 16, Units: 20, At: g.At,
		More: []accel.GrantedDevice{{Device: "c", Index: 2, DeviceUnits: 16}},
	}
	if err != nil || !reflect.DeepEqual(g, want) {
		t.Errorf("grant %+v, %v, want %+v", g, err, want)
	}
	const placed = "24/64 | a 14/16 p:10 q:4 | b 0/32 | c 10/16 p:10"
	w.want("n1", placed)
	if again, undo, err := w.Reserve(pod("p"), time.Time{}, "n1", on(2, 20)); err != nil || !reflect.DeepEqual(again, want) {
		t.Errorf("again: %+v, %v, want %+v", again, err, want)
	} else {
		undo()
	}
	undo()
	w.want("n1", "4/64 | a 4/16 q:4 | b 0/32 | c 0/16")

	_, undo, err = w.Reserve(pod("p"), time.Time{}, "n1", on(2, 20))
	if err != nil {
		t.Fatal(err)
	}
	h := Holding{Pod: pod("p"), Node: "n1", Resource: gcu, Units: 20, Device: "a", More: []accel.DeviceID{"c"}}
	w.Observe(h)
	undo()
	w.want("n1", placed)
	h.Device, h.More = "", nil
	w.Observe(h) // without a grant, nothing moves
	w.want("n1", placed)

	w.node("n1", cards(16, 32)) // c is lost
	w.want("n1", "24/48 | a 14/16 p:10 q:4 | b 0/32 | ? p:10")
	if _, _, err := w.Reserve(pod("p"), time.Time{}, "n1", on(2, 20)); !errors.Is(err, ErrHeldElsewhere) {
		t.Errorf("a device is lost: error %v, want ErrHeldElsewhere", err)
	}
	w.node("n1", cards(16, 32, 16))
	w.want("n1", placed)
	h.Device, h.More, h.Confirmed = "a", []accel.DeviceID{"b"}, true
	w.Observe(h)
	w.want("n1", "24/64 | a 14/16 p:10! q:4 | b 10/32 p:10! | c 0/16")
	h.More[0] = "c" // the caller's slice is its own
	w.want("n1", "24/64 | a 14/16 p:10! q:4 | b 10/32 p:10! | c 0/16")
	w.Forget("p")
	w.want("n1", "4/64 | a 4/16 q:4 | b 0/32 | c 0/16")
}

// A pod whose number of devices was changed behind the node's back, so that its
// units cannot be divided, is counted all the same.
func TestPartsOfWhatCannotBeDivided(t *testing.T) {
	w := newWorld(t, Options{})
	w.node("n1", cards(16, 16, 16))
	w.Observe(Holding{Pod: pod("p"), Node: "n1", Resource: gcu, Units: 8, Device: "a", More: []accel.DeviceID{"b", "c"}})
	w.want("n1", "8/48 | a 3/16 p:3 | b 3/16 p:3 | c 2/16 p:2")
}

// A reservation is made anew where it is not what is asked for any more.
func TestReserveAnew(t *testing.T) {
	avoid := func(ids ...string) accel.Request {
		req := on(2, 16)
		req.Selection = &accel.Selection{AvoidIDs: ids}
		return req
	}
	tests := map[string]struct {
		req  accel.Request
		want string
	}{
		"more devices":               {on(4, 16), "16/64 | a 4/16 p:4 | b 4/16 p:4 | c 4/16 p:4 | d 4/16 p:4"},
		"one device":                 {on(1, 16), "16/64 | a 16/16 p:16 | b 0/16 | c 0/16 | d 0/16"},
		"more units, where it is":    {on(2, 32), "32/64 | a 16/16 p:16 | b 16/16 p:16 | c 0/16 | d 0/16"},
		"a device is not wanted now": {avoid("a"), "16/64 | a 0/16 | b 8/16 p:8 | c 8/16 p:8 | d 0/16"},
		"another is not wanted":      {avoid("c"), "16/64 | a 8/16 p:8 | b 8/16 p:8 | c 0/16 | d 0/16"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, Options{})
			w.node("n1", cards(16, 16, 16, 16))
			if _, _, err := w.Reserve(pod("p"), time.Time{}, "n1", on(2, 16)); err != nil {
				t.Fatal(err)
			}
			if _, _, err := w.Reserve(pod("p"), time.Time{}, "n1", tc.req); err != nil {
				t.Fatal(err)
			}
			w.want("n1", tc.want)
		})
	}
}

// Where devices are connected, the ledger hears of it from the node.
func TestConnectedDevicesFirst(t *testing.T) {
	w := newWorld(t, Options{})
	numa := cards(16, 16, 16, 16)
	for i := range numa {
		numa[i].NUMANode = i % 2
	}
	links := []accel.Inventory{{Resource: gcu, Shares: cards(16, 16, 16, 16), Links: []accel.Link{{A: "b", B: "d", Score: 100}}}}
	w.node("numa", numa)
	w.SetNode("links", links)
	w.node("unknown", cards(16, 16, 16, 16))
	for node, want := range map[string]string{"numa": "a c", "links": "b d", "unknown": "a b"} {
		g, _, err := w.Reserve(pod(node), time.Time{}, node, on(2, 8))
		if err != nil || len(g.More) != 1 || string(g.Device+" "+g.More[0].Device) != want {
			t.Errorf("%s: %+v, %v, want %s", node, g, err, want)
		}
	}
	if a, b := w.state.nodes.byResource[gcu].node("numa"), w.state.nodes.byResource[gcu].node("unknown"); a.graph == nil || b.graph != nil {
		t.Errorf("graphs %v and %v", a.graph, b.graph)
	}
	w.node("numa too", numa)
	if a, b := w.state.nodes.byResource[gcu].node("numa"), w.state.nodes.byResource[gcu].node("numa too"); a.graph != b.graph {
		t.Error("nodes that are built alike do not share a graph")
	}
	links[0].Links = nil // the same devices, and the link is gone
	w.SetNode("links", links)
	if w.state.nodes.byResource[gcu].node("links").graph != nil {
		t.Error("the ledger did not notice that a link is gone")
	}
}

func TestGraphsAreBounded(t *testing.T) {
	w := newWorld(t, Options{})
	for i := range maxGraphs + 10 {
		w.SetNode("n", []accel.Inventory{{Resource: gcu, Shares: cards(1, 1), Links: []accel.Link{{A: "a", B: "b", Score: i + 1}}}})
	}
	if len(w.state.nodes.graphs) > maxGraphs {
		t.Errorf("%d graphs are kept", len(w.state.nodes.graphs))
	}
}

func TestWhyANodeRefuses(t *testing.T) {
	w := newWorld(t, Options{})
	s := broken(cards(16, 16, 8, 16), 3)
	s[0].Model, s[1].Model, s[2].Model, s[3].Model = "S60", "S60", "S60", "S90"
	w.node("n1", s)
	w.confirm("q", "n1", 10, "a")
	w.SetCapacity("n1", 1000, 512)
	ask := func(devices int, units accel.Units, change func(*accel.Request)) accel.Request {
		req := on(devices, units)
		if change != nil {
			change(&req)
		}
		return req
	}
	selection := func(s accel.Selection) func(*accel.Request) {
		return func(r *accel.Request) { r.Selection = &s }
	}
	tests := map[string]struct {
		req  accel.Request
		want accel.ReasonCode
	}{
		"two devices":                     {ask(2, 16, nil), accel.Fits},
		"two with more than is free":      {ask(2, 20, nil), accel.NoDeviceFits},
		"three, one is broken":            {ask(3, 45, nil), accel.NoDeviceFits},
		"four that are large enough":      {ask(4, 48, nil), accel.TooFewDevices},
		"five":                            {ask(5, 5, nil), accel.TooFewDevices},
		"two that are too large":          {ask(2, 34, nil), accel.LargerThanDevice},
		"units that cannot be divided":    {ask(2, 7, nil), accel.Unservable},
		"a policy that nobody knows":      {ask(1, 1, func(r *accel.Request) { r.Policy = "best" }), accel.Unservable},
		"another policy":                  {ask(1, 1, func(r *accel.Request) { r.Policy = "spread" }), accel.Fits},
		"a model":                         {ask(1, 16, selection(accel.Selection{UseModels: []string{"s60"}})), accel.Fits},
		"a model that is broken":          {ask(1, 16, selection(accel.Selection{UseModels: []string{"S90"}})), accel.NoDeviceFits},
		"a model that is not there":       {ask(1, 1, selection(accel.Selection{UseModels: []string{"S91"}})), accel.NotSelected},
		"a device that is too small":      {ask(1, 9, selection(accel.Selection{UseIDs: []string{"c"}})), accel.LargerThanDevice},
		"two of one device":               {ask(2, 2, selection(accel.Selection{UseIDs: []string{"c"}})), accel.TooFewDevices},
		"all CPU and memory":              {ask(1, 1, func(r *accel.Request) { r.CPU, r.Memory = 1000, 512 }), accel.Fits},
		"too much CPU":                    {ask(1, 1, func(r *accel.Request) { r.CPU = 1001 }), accel.NoCapacity},
		"too much memory":                 {ask(1, 1, func(r *accel.Request) { r.Memory = 513 }), accel.NoCapacity},
		"too much CPU, no device":         {accel.Request{Resource: gcu, CPU: 1001}, accel.NoCapacity},
		"CPU alone":                       {accel.Request{Resource: gcu, CPU: 1000}, accel.Fits},
		"no device fits, nor does memory": {ask(2, 20, func(r *accel.Request) { r.Memory = 513 }), accel.NoDeviceFits},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			var out [1]Verdict
			w.Check(tc.req, []string{"n1"}, out[:])
			if out[0].Code != tc.want || (out[0].Code == accel.Fits) != (out[0].Rating != place.NoRating) {
				t.Errorf("Check: %+v, want code %d", out[0], tc.want)
			}
			if tc.req.Peak() == 0 {
				return
			}
			_, undo, err := w.Reserve(pod("p"), time.Time{}, "n1", tc.req)
			undo()
			var nf *accel.NoFitError
			switch {
			case tc.want == accel.Fits && err != nil:
				t.Errorf("Reserve: %v", err)
			case tc.want == accel.Unservable && !errors.Is(err, ErrPolicyUnknown) && !errors.Is(err, ErrIndivisible):
				t.Errorf("Reserve: %v, want ErrPolicyUnknown or ErrIndivisible", err)
			case tc.want != accel.Fits && tc.want != accel.Unservable && (!errors.As(err, &nf) || nf.Code != tc.want):
				t.Errorf("Reserve: %v, want code %d", err, tc.want)
			}
		})
	}
	w.want("n1", "10/56 | a 10/16 q:10! | b 0/16 | c 0/8 | d 0/16")
}

func TestCapacity(t *testing.T) {
	w := newWorld(t, Options{})
	w.node("n1", cards(16, 16))
	with := func(cpu, memory int64) accel.Request {
		req := asks(1)
		req.CPU, req.Memory = cpu, memory
		return req
	}
	fits := func(when string, cpu, memory int64) {
		t.Helper()
		w.check()
		for more := range int64(2) { // exactly so much is left
			var out [1]Verdict
			w.Check(with(cpu+more, memory), []string{"n1"}, out[:])
			if want := []accel.ReasonCode{accel.Fits, accel.NoCapacity}[more]; out[0].Code != want {
				t.Errorf("%s: %d CPU: code %d, want %d", when, cpu+more, out[0].Code, want)
			}
			w.Check(with(cpu, memory+more), []string{"n1"}, out[:])
			if want := []accel.ReasonCode{accel.Fits, accel.NoCapacity}[more]; out[0].Code != want {
				t.Errorf("%s: %d memory: code %d, want %d", when, memory+more, out[0].Code, want)
			}
		}
	}
	w.Charge("early", "n1", 100, 10)
	w.SetCapacity("n1", 1000, 100)
	w.SetCapacity("", 1, 1)
	fits("a pod that was there before", 900, 90)
	w.Charge("early", "n1", 50, 20)
	fits("it changed", 950, 80)
	w.Charge("", "n1", 1, 1)
	w.Charge("nowhere", "", 1, 1)
	w.Charge("negative", "n1", -1, -1)
	fits("charges of nothing", 950, 80)
	_, undo, err := w.Reserve(pod("p"), time.Time{}, "n1", with(900, 70))
	if err != nil {
		t.Fatal(err)
	}
	fits("a reservation", 50, 10)
	if _, _, err := w.Reserve(pod("q"), time.Time{}, "n1", with(51, 1)); !errors.Is(err, accel.ErrNoFit) ||
		!strings.Contains(err.Error(), "CPU") {
		t.Errorf("too much: %v", err)
	}
	w.node("n1", broken(cards(16, 16), 0))
	if g, again, err := w.Reserve(pod("p"), time.Time{}, "n1", with(950, 70)); err != nil || g.Device != "b" {
		t.Errorf("its own CPU stands in its way: %+v, %v", g, err)
	} else {
		fits("made anew", 0, 10)
		again()
	}
	undo()
	fits("given back", 950, 80)
	w.Observe(Holding{Pod: pod("p"), Node: "n1", Resource: gcu, Units: 1, Device: "b", CPU: 200, Memory: 30})
	fits("observed", 750, 50)
	w.Observe(Holding{Pod: pod("p"), Node: "n2", Resource: gcu, Units: 1, CPU: 200, Memory: 30})
	fits("observed on another node", 950, 80)
	w.Forget("p")
	w.SetCapacity("n1", 10, 10)
	w.Forget("early")
	fits("the node shrank", 10, 10)
	w.Charge("x", "n1", 100, 100)
	var out [1]Verdict
	if w.Check(asks(1), []string{"n1"}, out[:]); out[0].Code != accel.Fits {
		t.Errorf("a pod of no CPU on an overdrawn node: %+v", out[0])
	}
	w.DeleteNode("n1")
	w.node("n1", cards(16))
	if w.Check(with(1<<60, 1<<60), []string{"n1"}, out[:]); out[0].Code != accel.Fits {
		t.Errorf("no capacity is known: %+v", out[0])
	}
	w.Forget("x")
	w.DeleteNode("n1")
	w.check()
	if len(w.state.nodes.hosts.byName) != 0 || len(w.state.nodes.hosts.charges) != 0 {
		t.Errorf("left: %v, %v", w.state.nodes.hosts.byName, w.state.nodes.hosts.charges)
	}
}

// A scheduler that has looked at CPU and memory itself is not refused by the
// ledger's count, which may lag behind.
func TestCapacityChecked(t *testing.T) {
	seen := &rater{name: "seen"}
	w := newWorld(t, Options{Policy: seen, CapacityChecked: true})
	w.node("n1", cards(16))
	w.SetCapacity("n1", 10, 10)
	req := asks(1)
	req.CPU, req.Memory = 15, 4
	var out [1]Verdict
	if w.Check(req, []string{"n1"}, out[:]); out[0].Code != accel.Fits || seen.last.CPU != 15 || seen.last.Memory != 10 ||
		seen.last.Cores != 10 {
		t.Errorf("%+v; the policy saw %d CPU of %d, %d memory, want 15 of 10, 10", out[0], seen.last.CPU, seen.last.Cores, seen.last.Memory)
	}
	if _, _, err := w.Reserve(pod("p"), time.Time{}, "n1", req); err != nil {
		t.Errorf("Reserve: %v", err)
	}
}

// rater takes the first device and rates by a number that can be changed.
type rater struct {
	name   string
	price  atomic.Int64
	epoch  atomic.Uint64
	chosen atomic.Int64 // how often it was asked
	last   place.Node
}

func (r *rater) Name() string  { return r.name }
func (r *rater) Epoch() uint64 { return r.epoch.Load() }

func (r *rater) Choose(n *place.Node, a *place.Ask, buf []int) ([]int, int64, bool) {
	r.chosen.Add(1)
	r.last = *n
	chosen, _, ok := place.Binpack.Choose(n, a, buf)
	return chosen, r.price.Load(), ok
}

func (r *rater) renew(price int64) {
	r.price.Store(price)
	r.epoch.Add(1)
}

// A policy is asked about a node only when the node or the prices changed.
func TestVerdictsAreRemembered(t *testing.T) {
	p := &rater{name: "prices"}
	w := newWorld(t, Options{Policies: []place.Policy{p}})
	names := make([]string, 600)
	for i := range names {
		names[i] = fmt.Sprintf("n%03d", i)
		w.node(names[i], cards(16, 16))
	}
	req := asks(4)
	req.Policy = p.name
	out := make([]Verdict, len(names))
	check := func(when string, asked, rating int64) {
		t.Helper()
		before := p.chosen.Load()
		w.Check(req, names, out)
		if got := p.chosen.Load() - before; got != asked {
			t.Errorf("%s: asked about %d nodes, want %d", when, got, asked)
		}
		for i, v := range out {
			if want := (Verdict{Rating: rating}); v != want {
				t.Fatalf("%s: %s is %+v, want %+v", when, names[i], v, want)
			}
		}
	}
	check("at first", 600, 0)
	check("again", 0, 0)
	slices.Reverse(names)
	check("in another order", 0, 0)
	w.reserve("p", names[0], 4)
	w.reserve("q", names[300], 4)
	check("two nodes changed", 2, 0)
	w.node(names[5], cards(16, 16))
	check("a node that publishes the same", 0, 0)
	w.DeleteNode(names[7])
	w.node(names[7], cards(8))
	check("a node that was replaced", 1, 0)
	w.Charge("x", names[9], 1, 1)
	check("CPU that nobody counts", 0, 0)
	p.renew(7)
	check("new prices", 600, 7)
	check("new prices, again", 0, 7)

	p.renew(8)
	before := p.chosen.Load()
	w.Refresh(0)
	if got := p.chosen.Load() - before; got != 0 {
		t.Errorf("a refresh of no asks looked at %d nodes", got)
	}
	w.Refresh(1)
	if got := p.chosen.Load() - before; got != 600 {
		t.Errorf("a refresh looked at %d nodes, want 600", got)
	}
	check("after a refresh", 0, 8)

	w.SetCapacity(names[0], 100, 100)
	req.CPU = 3
	check("an ask of its own once capacities count", 600, 8)
	w.Charge("y", names[0], 1, 1)
	check("CPU that counts", 1, 8)
}

// Requests that were made up ask no policy, and leave what is remembered of others.
func TestFitsAsksNoPolicy(t *testing.T) {
	p := &rater{name: "prices"}
	w := newWorld(t, Options{Policy: p})
	names := make([]string, 600)
	for i := range names {
		names[i] = fmt.Sprintf("n%03d", i)
		w.node(names[i], cards(16, 16))
	}
	w.state.nodes.widest.Store(maxRated) // as if there were so many nodes: one ask is remembered
	out := make([]Verdict, len(names))
	w.Check(asks(4), names, out)
	before := p.chosen.Load()
	for i := range 100 {
		made := asks(4)
		made.Selection = &accel.Selection{AvoidIDs: []string{fmt.Sprint("made-up-", i)}}
		slices.Reverse(names)
		w.Fits(made, names, out)
		for j, v := range out {
			if v != (Verdict{}) {
				t.Fatalf("%s is %+v", names[j], v)
			}
		}
	}
	w.Check(asks(4), names, out)
	if got := p.chosen.Load() - before; got != 0 {
		t.Errorf("the policy was asked about %d nodes", got)
	}
}

// The last asks are refreshed.
func TestRefreshTakesTheLastAsks(t *testing.T) {
	p := &rater{name: "prices"}
	w := newWorld(t, Options{Policy: p})
	w.node("n1", cards(16))
	var out [1]Verdict
	for _, units := range []accel.Units{1, 2, 3, 1} {
		w.Check(asks(units), []string{"n1"}, out[:])
	}
	p.renew(1)
	w.Refresh(2)
	for _, tc := range []struct {
		units accel.Units
		asked int64
	}{{1, 0}, {3, 0}, {2, 1}} {
		before := p.chosen.Load()
		w.Check(asks(tc.units), []string{"n1"}, out[:])
		if got := p.chosen.Load() - before; got != tc.asked || out[0].Rating != 1 {
			t.Errorf("%d units: asked %d times, want %d; %+v", tc.units, got, tc.asked, out[0])
		}
	}
}

// What is remembered of different asks is not mixed up, and does not grow for
// ever.
func TestAsksAreToldApart(t *testing.T) {
	w := newWorld(t, Options{})
	s := cards(16, 16)
	s[0].Model, s[1].Model = "a,b", "c"
	w.node("n1", s)
	selections := []*accel.Selection{
		nil, {UseModels: []string{"a"}}, {UseModels: []string{"a,b"}}, {AvoidModels: []string{"a", "c"}},
		{AvoidModels: []string{"a,b", "c"}},
		{UseIDs: []string{"a"}}, {AvoidIDs: []string{"a"}}, {AvoidIDs: []string{"a", "b"}}, {UseModels: []string{"a", "b"}},
	}
	want := []bool{true, false, true, true, false, true, true, false, false}
	for range 2 {
		for i, s := range selections {
			req := asks(1)
			req.Selection = s
			var out [1]Verdict
			if w.Check(req, []string{"n1"}, out[:]); (out[0].Code == accel.Fits) != want[i] {
				t.Errorf("selection %+v: %+v, want a fit: %t", s, out[0], want[i])
			}
		}
	}
	w.state.nodes.widest.Store(maxRated / 4) // as if there were so many nodes
	for i := range 20 {
		var out [1]Verdict
		w.Check(asks(1), []string{"n1"}, out[:]) // used all the time
		w.Check(asks(accel.Units(2+i)), []string{"n1"}, out[:])
	}
	kept := make(map[accel.Units]bool)
	for key := range w.ratings.byAsk {
		kept[key.units] = true
	}
	if want := map[accel.Units]bool{1: true, 19: true, 20: true, 21: true}; !reflect.DeepEqual(kept, want) {
		t.Errorf("asks of %v units are remembered, want %v", kept, want)
	}
}

// split is a policy that has another one for each resource.
type split struct {
	place.Policy
	of map[accel.Resource]place.Policy
}

func (s split) For(r accel.Resource) place.Policy { return s.of[r] }

// A policy that has one for each resource decides with that of the request.
func TestPerResource(t *testing.T) {
	one, other := &rater{name: "split"}, &rater{name: "split"}
	one.price.Store(3)
	other.price.Store(5)
	const another accel.Resource = "a.example/b"
	w := newWorld(t, Options{Policies: []place.Policy{split{&rater{name: "split"}, map[accel.Resource]place.Policy{gcu: one,
		another: other}}}})
	w.SetNode("n1", []accel.Inventory{{Resource: gcu, Unit: "1", Shares: cards(16)}, {Resource: another, Unit: "1", Shares: cards(16)}})
	var out [1]Verdict
	for resource, want := range map[accel.Resource]*rater{gcu: one, another: other} {
		req := asks(1)
		req.Resource, req.Policy = resource, "split"
		before := want.chosen.Load()
		if w.Check(req, []string{"n1"}, out[:]); out[0].Code != accel.Fits || want.chosen.Load() != before+1 {
			t.Errorf("%s: %+v, its policy was asked %d times", resource, out[0], want.chosen.Load()-before)
		}
		if _, _, err := w.Reserve(pod(string(resource)), time.Time{}, "n1", req); err != nil || want.chosen.Load() != before+2 {
			t.Errorf("Reserve of %s: %v, its policy was asked %d times", resource, err, want.chosen.Load()-before)
		}
	}
}

func TestEach(t *testing.T) {
	w := newWorld(t, Options{})
	for i := range 3 * usageChunk / 2 {
		w.node(fmt.Sprintf("n%02d", i), cards(16, 8))
	}
	w.observe("early", "only a pod", 4, "a")
	w.confirm("p", "n03", 4, "b")
	w.SetCapacity("n03", 100, 50)
	w.Charge("x", "n03", 1, 2)
	last, count := "", 0
	for name, n := range w.Each(gcu) {
		if name <= last {
			t.Errorf("%s comes after %s", name, last)
		}
		last = name
		want := place.Node{CPU: place.Unlimited, Memory: place.Unlimited, Cores: place.Unlimited, Slots: []place.Slot{
			{ID: "a", Total: 16, Free: 16}, {ID: "b", Index: 1, Total: 8, Free: 8},
		}}
		if name == "n03" {
			want.CPU, want.Memory, want.Cores, want.Slots[1].Free = 99, 48, 100, 4
		}
		if !reflect.DeepEqual(*n, want) {
			t.Errorf("%s is %+v, want %+v", name, *n, want)
		}
		w.confirm(fmt.Sprint("p", count), name, 1, "a") // the ledger may be used meanwhile
		count++
	}
	if count != 3*usageChunk/2 {
		t.Errorf("%d nodes", count)
	}
	for name := range w.Each(gcu) {
		if name != "n00" {
			t.Errorf("went on to %s", name)
		}
		break
	}
	for name := range w.Each("none") {
		t.Errorf("%s of an unknown resource", name)
	}
}
