package backend

import (
	"errors"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// ErrClosed is returned by a Backend that was closed.
var ErrClosed = errors.New("backend is closed")

// UnavailableError says that a vendor's devices cannot be asked for now: no
// library, no driver, or a library that fails or does not answer. It is a
// state to report and to wait out, not a reason to end. Test with errors.As.
type UnavailableError struct {
	// Vendor is the Backend's vendor.
	Vendor string
	// Err is the exact reason, for people.
	Err error
	// Silent is true when the library does not answer: the devices may be as they
	// were. Otherwise it is certain that they cannot be used.
	Silent bool
}

func (e *UnavailableError) Error() string {
	return e.Vendor + " devices are unavailable: " + e.Err.Error()
}

// Unwrap returns the reason.
func (e *UnavailableError) Unwrap() error { return e.Err }

// Reason is the reason alone, without the vendor, for status texts that name
// the vendor elsewhere.
func (e *UnavailableError) Reason() string { return e.Err.Error() }

// PausedError says that the library may not be used now, see Pause. It is within an
// *UnavailableError; test with errors.As.
type PausedError struct {
	// Health is that of all devices meanwhile.
	Health accel.Health
	// Unreleased says why the library is still in the process; nil if it is not.
	Unreleased error
}

func (e *PausedError) Error() string {
	if e.Unreleased == nil {
		return e.Health.Reason
	}
	return e.Health.Reason + "; the library is still in use: " + e.Unreleased.Error()
}

// RestartNeededError says that no later call can succeed in this process: a
// library that it has loaded for good no longer goes with the driver. The
// program reports itself as not alive, so that it is started again. It is
// within an *UnavailableError; test with errors.As.
type RestartNeededError struct {
	// Reason says what does not go together, for people.
	Reason string
}

func (e *RestartNeededError) Error() string { return e.Reason + "; divvy-node must be restarted" }
