package ledger

import (
	"slices"
	"testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// TestHidden: a node counts where the sum that kube-scheduler knows is enough, or where devices
// that are allocated as another resource would be, of the nodes on which no device fits.
func TestHidden(t *testing.T) {
	held := func(shares []accel.Share, at int) []accel.Share {
		shares[at].Health = accel.Health{Unhealthy: true, Reason: accel.ReasonGivenOut + "enflame.com/gcu"}
		return shares
	}
	holds := func(uid, device string, units accel.Units) Holding {
		return Holding{Pod: pod(uid), Node: "n1", Resource: gcu, Units: units, Device: accel.DeviceID(device)}
	}
	for name, tt := range map[string]struct {
		shares                 []accel.Share
		pods                   []Holding
		nominated              accel.Units
		units                  accel.Units
		scattered, heldAsOther int
	}{
		"scattered":            {cards(16, 16), []Holding{holds("x", "a", 10), holds("y", "b", 10)}, 0, 8, 1, 0},
		"the sum is too small": {cards(16, 16), []Holding{holds("x", "a", 10), holds("y", "b", 10)}, 0, 13, 0, 0},
		"it fits":              {cards(16, 16), nil, 0, 8, 0, 0},
		"units are withheld":   {withholding(cards(16, 16), 10, 15), nil, 0, 8, 0, 0},
		"units on no device":   {cards(16, 16), []Holding{holds("x", "a", 10), holds("y", "b", 10), holds("z", "", 8)}, 0, 8, 0, 0},
		"units on an unhealthy device": {broken(cards(16, 16, 16), 2), []Holding{holds("x", "a", 9), holds("y", "b", 9),
			holds("z", "c", 7)}, 0, 8, 0, 0},
		"units are reserved": {cards(16, 16, 16), []Holding{holds("x", "a", 10), holds("y", "b", 12),
			holds("z", "c", 8)}, 8, 8, 1, 0},
		"so many that the sum is not":  {cards(16, 16), []Holding{holds("x", "a", 10), holds("y", "b", 8)}, 8, 8, 0, 0},
		"held as other":                {held(cards(16, 16), 0), []Holding{holds("y", "b", 10)}, 0, 8, 0, 1},
		"held as other, used too":      {held(cards(16, 16), 0), []Holding{holds("x", "a", 10), holds("y", "b", 10)}, 0, 8, 0, 0},
		"held as other, and scattered": {held(cards(16, 16, 16), 0), []Holding{holds("y", "b", 10), holds("z", "c", 10)}, 0, 8, 0, 1},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, Options{})
			w.SetNode("n1", inventory(tt.shares))
			for _, h := range tt.pods {
				w.Observe(h)
			}
			if tt.nominated > 0 {
				w.Nominate("other", "n1", asks(tt.nominated))
			}
			nodes := slices.Repeat([]string{"n1", "unknown"}, checkChunk)
			verdicts := make([]Verdict, len(nodes))
			w.Fits(asks(tt.units), nodes, verdicts)
			scattered, heldAsOther := Hidden(w.Ledger, asks(tt.units), nodes, verdicts)
			if scattered != checkChunk*tt.scattered || heldAsOther != checkChunk*tt.heldAsOther {
				t.Errorf("%d times: %d scattered, %d held as another resource", checkChunk, scattered, heldAsOther)
			}
		})
	}
}
