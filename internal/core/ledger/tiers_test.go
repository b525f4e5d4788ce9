package ledger

import (
	"slices"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// isolated states tiers of the shares, attested at a time.
func isolated(shares []accel.Share, attested time.Time, tiers ...accel.Tier) []accel.Share {
	for i, tier := range tiers {
		shares[i].Isolation = accel.Isolation{Memory: tier}
		if tier == accel.TierCooperative || tier == accel.TierDriver {
			shares[i].Isolation.Attested = attested
		}
	}
	return shares
}

func requires(units accel.Units, tier accel.Tier) accel.Request {
	req := asks(units)
	req.Selection = &accel.Selection{Isolation: tier}
	return req
}

func TestTiersThatPodsRequire(t *testing.T) {
	none, cooperative, driver, hardware := accel.TierNone, accel.TierCooperative, accel.TierDriver, accel.TierHardware
	for name, tt := range map[string]struct {
		stated   []accel.Tier
		required accel.Tier
		units    accel.Units
		devices  int
		want     accel.ReasonCode
	}{
		"no tier is required":                    {[]accel.Tier{none}, none, 4, 1, accel.Fits},
		"the tier":                               {[]accel.Tier{driver}, driver, 4, 1, accel.Fits},
		"a higher one":                           {[]accel.Tier{hardware}, cooperative, 4, 1, accel.Fits},
		"a lower one":                            {[]accel.Tier{cooperative}, driver, 4, 1, accel.NotIsolated},
		"none":                                   {[]accel.Tier{none, none}, cooperative, 4, 1, accel.NotIsolated},
		"one of two devices":                     {[]accel.Tier{none, driver}, driver, 4, 1, accel.Fits},
		"one of two devices, and two are needed": {[]accel.Tier{none, driver}, driver, 8, 2, accel.TooFewDevices},
		"a device that is too small":             {[]accel.Tier{driver, none}, driver, 17, 1, accel.LargerThanDevice},
		"no tier, on a device that is too small": {[]accel.Tier{none}, driver, 17, 1, accel.NotIsolated},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, Options{})
			w.node("n1", isolated(cards(slices.Repeat([]accel.Units{16}, len(tt.stated))...), w.clock, tt.stated...))
			req := requires(tt.units, tt.required)
			req.Devices = tt.devices
			w.code(req, tt.want)
		})
	}
}

func TestTierGoesWithItsAttestation(t *testing.T) {
	w := newWorld(t, Options{})
	start := w.clock
	at := func(d time.Duration) { w.clock = start.Add(d) }
	w.node("n1", isolated(cards(16), start, accel.TierDriver))
	w.node("n2", isolated(cards(16), start, accel.TierHardware))
	req := requires(4, accel.TierDriver)
	code := func(want accel.ReasonCode) {
		t.Helper()
		out := make([]Verdict, 2)
		w.Check(req, []string{"n1", "n2"}, out)
		if out[0].Code != want || out[1].Code != accel.Fits {
			t.Errorf("after %v: codes %v and %v, want %v and fits", w.clock.Sub(start), out[0].Code, out[1].Code, want)
		}
	}
	at(time.Minute)
	code(accel.Fits)
	at(time.Minute + time.Millisecond) // no inventory came, and the verdict is another one
	code(accel.NotIsolated)
	w.code(req, accel.NotIsolated)
	if _, undo, err := w.Reserve(pod("p"), time.Time{}, "n1", req); err == nil {
		undo()
		t.Error("a pod was placed on a device whose attestation is too old")
	}
	if usage, _ := w.Node(gcu, "n1"); usage.Devices[0].Isolation != (accel.Isolation{}) {
		t.Errorf("the device is shown at %v", usage.Devices[0].Isolation)
	}
	w.node("n1", isolated(cards(16), w.clock.Truncate(time.Second), accel.TierDriver))
	code(accel.Fits)
	at(3 * time.Minute) // the sweep does the same
	w.Expire()
	if tier := w.state.nodes.publishing(gcu, "n1").slots[0].Tier; tier != accel.TierNone {
		t.Errorf("after the sweep the device is at tier %v", tier)
	}
	if len(w.state.nodes.attested.nodes) != 0 || w.state.nodes.attested.next.Load() != 0 {
		t.Error("the ledger still waits for tiers to end")
	}
	code(accel.NotIsolated)
}

// What a node attests must cost no verdicts of pods that require nothing, as long as its tier
// stays.
func TestRenewedAttestationKeepsVerdicts(t *testing.T) {
	w := newWorld(t, Options{})
	w.node("n1", isolated(cards(16), w.clock, accel.TierDriver))
	before := w.state.nodes.generation
	for range 10 {
		w.clock = w.clock.Add(30 * time.Second)
		w.node("n1", isolated(cards(16), w.clock, accel.TierDriver))
	}
	if after := w.state.nodes.generation; after != before {
		t.Errorf("the node changed %d times", after-before)
	}
	w.code(requires(4, accel.TierDriver), accel.Fits)
	usage, _ := w.Node(gcu, "n1")
	if got := usage.Devices[0].Isolation.Attested; !got.Equal(w.clock) {
		t.Errorf("the device was attested at %v, want %v", got, w.clock)
	}
	w.node("n1", isolated(cards(16), w.clock, accel.TierNone))
	w.code(requires(4, accel.TierDriver), accel.NotIsolated)
}

func TestAttestationFromTheFuture(t *testing.T) {
	w := newWorld(t, Options{})
	ahead := w.clock.Add(time.Hour)
	w.node("n1", isolated(cards(16, 16), ahead, accel.TierDriver))
	w.clock = w.clock.Add(45 * time.Second)
	// Something else changes, the attestation is the same.
	w.node("n1", isolated(cards(16, 12), ahead, accel.TierDriver))
	w.code(requires(4, accel.TierDriver), accel.Fits)
	w.clock = w.clock.Add(30 * time.Second)
	w.code(requires(4, accel.TierDriver), accel.NotIsolated)
}

func TestTierIsPartOfTheQuestion(t *testing.T) {
	w := newWorld(t, Options{})
	w.node("n1", isolated(cards(16), w.clock, accel.TierCooperative))
	for range 2 { // the second time by what is remembered
		w.code(requires(4, accel.TierCooperative), accel.Fits)
		w.code(requires(4, accel.TierDriver), accel.NotIsolated)
		w.code(asks(4), accel.Fits)
	}
	out := make([]Verdict, 1)
	for range 2 {
		w.Check(requires(4, accel.TierHardware), []string{"n1"}, out)
		if got := out[0].Stated.String(); got != "cooperative" {
			t.Errorf("the node is said to state %q, want cooperative", got)
		}
	}
}

// A device that lost its tier serves no reservation that requires it, makes no room by
// evictions, and no capacity is kept on it.
func TestLostTier(t *testing.T) {
	w := newWorld(t, Options{})
	w.node("n1", isolated(cards(16, 16), w.clock, accel.TierDriver, accel.TierDriver))
	g, _, err := w.Reserve(pod("p"), time.Time{}, "n1", requires(4, accel.TierDriver))
	if err != nil || g.Device != "a" {
		t.Fatalf("Reserve = %v, %v", g.Device, err)
	}
	w.node("n1", isolated(cards(16, 16), w.clock, accel.TierNone, accel.TierDriver))
	if g, _, err = w.Reserve(pod("p"), time.Time{}, "n1", requires(4, accel.TierDriver)); err != nil || g.Device != "b" {
		t.Errorf("after device a lost its tier: %v, %v, want device b", g.Device, err)
	}

	w.Observe(Holding{Pod: pod("low"), Node: "n1", Resource: gcu, Units: 16, Device: "a", Priority: 1})
	w.Observe(Holding{Pod: pod("mid"), Node: "n1", Resource: gcu, Units: 12, Device: "b", Priority: 5})
	high := requires(16, accel.TierDriver)
	high.Pod, high.Priority = "high", 10
	w.Forget("p")
	evictions := w.Evict(high, []Proposal{{Node: "n1", Victims: []string{"low"}}})
	if got := evictions[0].Victims; !slices.Equal(got, []string{"mid"}) {
		t.Errorf("evicted %v, want the pod on the device with the tier", got)
	}
	if w.MakesRoom(high, "n1", nil) {
		t.Error("the device without the tier is said to have room")
	}
	w.Forget("low")
	other := asks(16)
	other.Pod = "other"
	w.code(other, accel.Fits) // device a: nothing is kept there
}
