package ledger

import (
	"sync/atomic"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// attested are the nodes with tiers that end to count without another attestation.
type attested struct {
	nodes map[*node]struct{}
	// next is no later than when the first of the tiers ends to count, in microseconds since
	// 1970; 0 for never. It is written under the ledger's lock and read without.
	next atomic.Int64
}

// expireTiers takes away the tiers that do not count any more. The caller does not hold the
// ledger's lock. Where there are none, it costs nothing.
func expireTiers(l *Ledger) {
	next := l.state.nodes.attested.next.Load()
	if next == 0 || l.rules.now().UnixMicro() <= next {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state.nodes.expireTiers(l.rules.now())
}

// expireTiers is the same for a caller that holds the lock. Its cost depends on the nodes
// with such tiers, and is due once in accel.MaxAttestationAge while all renew them.
func (ns *nodes) expireTiers(now time.Time) {
	if next := ns.attested.next.Load(); next == 0 || now.UnixMicro() <= next {
		return
	}
	ns.attested.next.Store(0)
	for n := range ns.attested.nodes {
		ns.tier(n, now)
	}
}

// attest says when the tiers of a node's slots end to count.
func (ns *nodes) attest(n *node, until map[accel.DeviceID]time.Time, now time.Time) {
	n.until = make([]time.Time, len(n.slots))
	for i := range n.slots {
		n.until[i] = until[n.slots[i].ID]
	}
	ns.tier(n, now)
}

// tier gives the slots of a node the tiers that count, and notes when that changes.
func (ns *nodes) tier(n *node, now time.Time) {
	changed := false
	var first time.Time
	for i := range n.slots {
		tier, until := n.shares[i].Isolation.Memory, n.until[i]
		switch {
		case until.IsZero():
		case now.After(until):
			tier = accel.TierNone
		case first.IsZero() || until.Before(first):
			first = until
		}
		if n.slots[i].Tier != tier {
			n.slots[i].Tier, changed = tier, true
		}
	}
	if changed {
		n.touch()
	}
	if first.IsZero() {
		delete(ns.attested.nodes, n)
		return
	}
	ns.attested.nodes[n] = struct{}{}
	if next := ns.attested.next.Load(); next == 0 || first.UnixMicro() < next {
		ns.attested.next.Store(first.UnixMicro())
	}
}

// expiries says when the tiers of these shares end to count. What was published before keeps
// its time: a clock that is ahead must not make it count for longer each time that something
// else of the node changes.
func (n *node) expiries(shares []accel.Share, now time.Time) map[accel.DeviceID]time.Time {
	var out map[accel.DeviceID]time.Time
	for i := range shares {
		s := &shares[i]
		until := s.Isolation.Until(now)
		if until.IsZero() {
			continue
		}
		if at := n.find(s.ID); at >= 0 && n.shares[at].Isolation == s.Isolation {
			until = n.until[at]
		}
		if out == nil {
			out = map[accel.DeviceID]time.Time{}
		}
		if _, twice := out[s.ID]; !twice {
			out[s.ID] = until
		}
	}
	return out
}

// sameButAttested reports whether nothing but the time of the attestation differs.
func sameButAttested(a, b accel.Share) bool {
	a.Isolation.Attested, b.Isolation.Attested = time.Time{}, time.Time{}
	return a == b
}
