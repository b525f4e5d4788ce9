package nodeagent

import (
	"context"
	"errors"
	"fmt"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/events"
	"github.com/divvy-gpu/divvy/internal/sharing"
)

// Reasons of refusals, in the metrics.
const (
	refusedNoRoom     = "noRoom"
	refusedHeld       = "held"
	refusedUnknownID  = "unknownID"
	refusedNotOffered = "notOffered"
	refusedTooMany    = "tooMany"
	refusedKubelet    = "kubelet"
	refusedOther      = "other"
)

var refusalReasons = []string{
	refusedNoRoom, refusedHeld, refusedUnknownID, refusedNotOffered, refusedTooMany, refusedKubelet, refusedOther,
}

// refusedError says which of the reasons an error has. Its text is that of the
// error.
type refusedError struct {
	error
	reason string
}

// Unwrap returns the error without its reason.
func (e *refusedError) Unwrap() error { return e.error }

// refuse is fmt.Errorf with a reason.
func refuse(reason, format string, args ...any) error {
	return &refusedError{fmt.Errorf(format, args...), reason}
}

// refusalReason returns why kubelet was refused.
func refusalReason(err error) string {
	var named *refusedError
	var conflict *conflictError
	switch {
	case errors.As(err, &named):
		return named.reason
	case errors.Is(err, sharing.ErrNoRoom), errors.Is(err, sharing.ErrTooFewSlots):
		return refusedNoRoom
	case errors.As(err, &conflict):
		return refusedHeld
	}
	return refusedOther
}

// noteRefusal counts that a container was refused, and tells the users of the node
// once of each reason: the pod has an event of kubelet's with the text.
func (a *Agent) noteRefusal(ctx context.Context, resource accel.Resource, err error) {
	if err == nil || ctx.Err() != nil {
		return // kubelet does not wait any more
	}
	reason := refusalReason(err)
	a.metrics.refused.WithLabelValues(string(resource), reason).Inc()
	a.events.Once(events.OnNode(a.o.Node), events.AllocationRefused, string(resource)+" "+reason,
		fmt.Sprintf("a container that asks for %s was refused: %v", resource, err))
}
