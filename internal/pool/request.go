package pool

import (
	"errors"

	corev1 "k8s.io/api/core/v1"
)

// ErrNoRequest says that a container asks for nothing of the pool.
var ErrNoRequest = errors.New("the container asks for no GPUs of the pool")

// Request is what one container asks for, checked.
type Request struct {
	// Amount is the number of GPUs, 1 or more.
	Amount int64
	// Percent is the share of each GPU's memory, 1 to 100; 0 when MemoryBytes
	// says it.
	Percent int64
	// MemoryBytes is the memory of each GPU in bytes; 0 when Percent says it.
	MemoryBytes int64
	// Units is what the container takes of Resource.
	Units int64
}

// MemoryMB is the memory that the client is asked for, in MB (10^6 bytes),
// rounded down as the original does.
func (r Request) MemoryMB() int64 { return r.MemoryBytes / 1_000_000 }

// ParseRequest reads what a container asks for. totalMB is the memory of one GPU
// of the pool in MB (10^6 bytes), 0 when the administrator has not said it:
// requests by memory are refused then. It returns ErrNoRequest when none of the
// three keys is there, and otherwise all problems joined, each naming key, value
// and what would be accepted; the container is named by the caller.
//
// Units are Percent x Amount, or ceil(MemoryBytes x Amount x 100 / (totalMB x
// 10^6)), in exact integer arithmetic.
func ParseRequest(r corev1.ResourceRequirements, totalMB int64) (Request, error) {
	return Request{}, errors.New("not written")
}

// Asks reports whether the requirements name any resource of the pool that a
// user writes (amount, percent or memory), with whatever value.
func Asks(r corev1.ResourceRequirements) bool { return false }

// ParseMode reads the value of ModeAnnotation, in any case. The error names the
// values that are accepted.
func ParseMode(value string) (Mode, error) { return ModeNone, errors.New("not written") }

// ParseFilter reads the value of FilterAnnotation into its words, each of the
// form key=value with a key that clients know. The key server.dirver-version, as
// the guide spells it, becomes server.driver-version.
func ParseFilter(value string) ([]string, error) { return nil, errors.New("not written") }
