package alloc

import (
	"errors"
	"fmt"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
)

// Reason classifies why a container was rejected.
type Reason string

// The reasons of rejections.
const (
	NoRoom     Reason = "noRoom"
	Held       Reason = "held"
	UnknownID  Reason = "unknownID"
	NotOffered Reason = "notOffered"
	TooMany    Reason = "tooMany"
	Kubelet    Reason = "kubelet"
	// Isolation is of a device that does not have the tier that the pod requires, and of a
	// pod that would get around the tier that the device has.
	Isolation Reason = "isolation"
	Other     Reason = "other"
)

// Reasons returns all reasons.
func Reasons() []Reason {
	return []Reason{NoRoom, Held, UnknownID, NotOffered, TooMany, Kubelet, Isolation, Other}
}

// RejectedError is an error that has a reason. Its text is that of the error.
type RejectedError struct {
	error
	Reason Reason
}

// Unwrap returns the error without its reason.
func (e *RejectedError) Unwrap() error { return e.error }

// Reject is fmt.Errorf with a reason.
func Reject(reason Reason, format string, args ...any) error {
	return &RejectedError{fmt.Errorf(format, args...), reason}
}

// ReasonOf returns why a container was rejected.
func ReasonOf(err error) Reason {
	var named *RejectedError
	switch {
	case errors.As(err, &named):
		return named.Reason
	case errors.Is(err, sharing.ErrNoRoom), errors.Is(err, sharing.ErrTooFewSlots):
		return NoRoom
	case errors.Is(err, sharing.ErrNotIsolated):
		return Isolation
	}
	return Other
}

// InDoubt reports whether a rejection may be wrong: only kubelet knows what was given
// back since its last list, and the API server which pods run.
func InDoubt(err error) bool {
	var conflict *conflict
	return errors.As(err, &conflict)
}

// MayPass reports whether the same question may be answered otherwise in a while: the rejection is
// in doubt, or another claim holds what was asked for.
func MayPass(err error) bool {
	var busy *busy
	return InDoubt(err) || errors.As(err, &busy)
}

// busy says that a claim is in the way of another one. Kubelet's list does not say when it leaves.
type busy struct{ error }

func busyf(format string, args ...any) error {
	return &RejectedError{&busy{fmt.Errorf(format, args...)}, Held}
}

// conflict says that a slot that kubelet wants to give out is held.
type conflict struct{ error }

func conflictf(format string, args ...any) error {
	return &RejectedError{&conflict{fmt.Errorf(format, args...)}, Held}
}

// unknownf is the rejection while it is not known what containers hold of another
// pool.
func unknownf(r accel.Resource) error {
	return conflictf("it is not known yet which devices containers hold as %s", r)
}

// ErrNotAsked is why nothing is known yet of what containers hold.
var ErrNotAsked = errors.New("kubelet was not asked yet who holds what")
