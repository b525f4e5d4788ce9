// Package cause says why a pod with a shared resource waits where the sum over a node's
// devices hides it: as functions of values, for the extender, which writes it on the pod, and
// for kubectl-divvy, which explains more.
package cause

import (
	"fmt"
	"strings"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
)

// Code names a cause as kubectl divvy why does. Codes are stable.
type Code string

// The codes that a sum hides.
const (
	LargerThanDevice   Code = "largerThanDevice"
	IsolationNotStated Code = "isolationNotStated"
	HeldAsOther        Code = "heldAsOther"
	NoDeviceFits       Code = "noDeviceFits"
)

// Codes returns them, in the order in which they count where several hold.
func Codes() []Code { return []Code{LargerThanDevice, IsolationNotStated, HeldAsOther, NoDeviceFits} }

// Reason is the code as a condition and an event name it.
func (c Code) Reason() string {
	if c == "" {
		return ""
	}
	return strings.ToUpper(string(c[:1])) + string(c[1:])
}

// Size is what the pod requests, for people: "20 units of enflame.com/gcu-memory", with the
// bytes where they are known.
func Size(r *accel.Request, bytes string) string {
	text := fmt.Sprintf("%d units of %s", r.Peak(), r.Resource)
	if bytes != "" {
		text += " (" + bytes + ")"
	}
	return text
}

// NoneFree says that no device has as much free.
func NoneFree(r *accel.Request, size string) string {
	if r.Devices > 1 {
		return fmt.Sprintf("no node has %d devices with %d units of %s free on each", r.Devices, r.Each(), r.Resource)
	}
	return "no device has " + size + " free"
}

// TooLarge says that the request is above every device.
func TooLarge(size string) string { return size + " are more than any device has" }

// NotStated says that no device states the tier that the pod requires.
func NotStated(r *accel.Request) string {
	return fmt.Sprintf("isolation %s required, and no device of %s states it", r.Selection.Isolation, r.Resource)
}

// Sentence says what a cause is, without numbers that change while pods come and go.
func Sentence(c Code, r *accel.Request) string {
	size := Size(r, "")
	switch c {
	case LargerThanDevice:
		return TooLarge(size)
	case IsolationNotStated:
		return NotStated(r)
	case HeldAsOther:
		return NoneFree(r, size) + ": devices that have it are allocated as another resource"
	case NoDeviceFits:
		return NoneFree(r, size) + ", although the sum of a node's devices is enough"
	}
	return ""
}

// Shortage is what the sums over devices hide of a request, over all nodes that offer the
// resource. The zero value hides nothing.
type Shortage struct {
	// Everywhere is the cause that holds on each of the nodes, "" for none.
	Everywhere Code
	// Larger counts the nodes whose devices are all smaller than the request.
	Larger int
	// HeldAsOther and Scattered count the nodes on which these causes hold, see ledger.Hidden.
	HeldAsOther, Scattered int
}

// Of returns what the sums hide of a request; nothing where it fits on a node. It is the same
// for all pods that request the same on devices: capacity that is reserved for a pod counts as taken, and CPU
// and memory, which no sum hides, do not count.
func Of(l *ledger.Ledger, r accel.Request, nodes []string) Shortage {
	r.Pod, r.CPU, r.Memory = "", 0, 0
	verdicts := make([]ledger.Verdict, len(nodes))
	l.Fits(r, nodes, verdicts)
	var s Shortage
	var offering, notIsolated int
	for i := range verdicts {
		switch verdicts[i].Code {
		case accel.Fits:
			return Shortage{}
		case accel.NodeUnknown:
			continue
		case accel.LargerThanDevice:
			s.Larger++
		case accel.NotIsolated:
			notIsolated++
		case accel.NoDeviceFits, accel.TooSmall, accel.TooFewDevices, accel.NotSelected, accel.NoCapacity, accel.Unservable:
		}
		offering++
	}
	switch {
	case offering == 0:
	case s.Larger == offering:
		s.Everywhere = LargerThanDevice
	case notIsolated == offering:
		s.Everywhere = IsolationNotStated
	default:
		s.Scattered, s.HeldAsOther = ledger.Hidden(l, r, nodes, verdicts)
	}
	return s
}

// Code returns the cause for a pod, "" where none is certain: which nodes are closed to a pod is
// known from kube-scheduler's message alone.
//
// What holds everywhere holds on the nodes that are open. Devices that are held as another
// resource are on an open node if more nodes have such than are closed. A node that the
// extender was asked about is open, and its sum is enough; if more were than have only smaller
// devices, the free units of one are scattered.
func (s Shortage) Code(m Message) Code {
	switch {
	case s.Everywhere != "":
		return s.Everywhere
	case s.HeldAsOther > m.Closed:
		return HeldAsOther
	case s.Scattered > 0 && m.Asked > s.Larger:
		return NoDeviceFits
	}
	return ""
}
