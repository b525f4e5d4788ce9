package ledger

import (
	"strings"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// Hidden counts the nodes on which a request does not fit for a reason that the sum over the
// devices hides, of those whose verdict is accel.NoDeviceFits. On heldAsOther it would fit if
// the devices that are allocated as another resource were not; on the scattered ones the free
// units of all devices together are enough. Capacity that is reserved for other pods is taken. It
// copies no pods, and lets writers have their turn as Check does.
func Hidden(l *Ledger, req accel.Request, nodes []string, verdicts []Verdict) (scattered, heldAsOther int) {
	ask, _, err := l.rules.ask(req)
	if err != nil {
		return 0, 0
	}
	hidden := func(names []string, verdicts []Verdict) {
		l.mu.RLock()
		defer l.mu.RUnlock()
		for i, name := range names {
			if verdicts[i].Code != accel.NoDeviceFits {
				continue
			}
			n := l.state.nodes.publishing(req.Resource, name)
			if n == nil {
				continue
			}
			switch slots := l.state.slotsFor(n, &req); {
			case n.heldAsOther(slots, &ask):
				heldAsOther++
			case n.sum(slots) >= req.Peak():
				scattered++
			}
		}
	}
	for from := 0; from < len(nodes); from += checkChunk {
		to := min(from+checkChunk, len(nodes))
		hidden(nodes[from:to], verdicts[from:to])
	}
	return scattered, heldAsOther
}

// sum is what is free on the healthy devices of a node that has these slots for a request. It
// is at most what kube-scheduler counts, see freeTogether: units that are withheld, and those of
// pods that are gone, are not free here, so they are not called scattered.
func (n *node) sum(slots []place.Slot) accel.Units {
	free := -n.used
	for i := range slots {
		if !slots[i].Unhealthy {
			free += n.shares[i].Units - n.shares[i].Withheld
		}
		free -= n.slots[i].Free - slots[i].Free // reserved
	}
	return free
}

// heldAsOther reports whether a request would fit if the devices that are allocated as another
// resource were healthy.
func (n *node) heldAsOther(slots []place.Slot, a *place.Ask) bool {
	able, held := 0, false
	for i := range slots {
		s := slots[i]
		if s.Unhealthy && strings.HasPrefix(n.shares[i].Health.Reason, accel.ReasonGivenOut) {
			s.Unhealthy, held = false, true
		}
		if a.Fits(&s) {
			able++
		}
	}
	return held && able >= a.Devices
}
