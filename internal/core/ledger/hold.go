package ledger

import (
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// Hold is Reserve for a bind that a scheduler may begin much later, once volumes are there or
// the other pods of a gang fit: the reservation does not expire. It ends by undo, when the pod
// is observed or forgotten, or some time after Begin, as any other.
//
// A reservation of an earlier bind whose outcome is unknown is shared as it is: it ends when
// that outcome is known.
func Hold(l *Ledger, pod accel.PodRef, created time.Time, node string, req accel.Request) (accel.Grant, func(), error) {
	grant, undo, err := l.Reserve(pod, created, node, req)
	if err != nil {
		return grant, undo, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if h := l.state.pods.reserved(pod.UID, req.Resource); h != nil && h.reservation.binds == 1 {
		h.reservation.held = true
	}
	return grant, undo, nil
}

// Begin says that the bind of a pod begins for which Hold reserved something.
func Begin(l *Ledger, podUID string, res accel.Resource) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if h := l.state.pods.reserved(podUID, res); h != nil {
		h.reservation.held = false
		h.reservation.since = l.rules.now()
	}
}

// Bound is the node on which a pod that is not observed has a reservation whose bind began,
// "" for none: the outcome of that bind is not known, so the pod can go to no other node.
func Bound(l *Ledger, podUID string, res accel.Resource) string {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if h := l.state.pods.reserved(podUID, res); h != nil && !h.reservation.held && !h.expects() {
		return h.Node
	}
	return ""
}
