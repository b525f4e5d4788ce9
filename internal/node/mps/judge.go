package mps

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/limits"
)

// Causes of a loss beside those of package limits.
const (
	// CauseDaemon: the control daemon does not serve.
	CauseDaemon limits.Cause = "mps-daemon"
	// CauseFault: a server has had a fault, and serves again when its clients have ended.
	CauseFault limits.Cause = "mps-fault"
	// CauseMode: processes could use the GPU without MPS.
	CauseMode limits.Cause = "compute-mode"
)

// States of a server in which it serves.
var serving = []string{"ACTIVE", "INITIALIZING"}

// Device is what one pass of the node's daemon knows of a GPU.
type Device struct {
	ID accel.DeviceID
	// Problem is why its containers are not given MPS, or why nothing is known of it.
	Problem error
	// Report is of the service, nil if it has none of the GPU.
	Report *DeviceReport
	// Processes are those that the driver lists, unless Unlisted says why they are not known.
	Processes []limits.Process
	Unlisted  error
	// Strangers are the ids of the processes that the last pass found to be no clients. First is
	// true if there was none.
	Strangers []int
	First     bool
}

// Judge returns why the programs on a GPU are not known to be clients of MPS, and the
// processes that are not. A process counts when two passes have found it, since lists of
// processes and clients are not of the same moment; in the first pass it counts at once, as the
// tier may not be stated on trust.
func Judge(d Device) (losses []limits.Loss, strangers []int) {
	loss := func(cause limits.Cause, format string, args ...any) {
		losses = append(losses, limits.Loss{Cause: cause, Reason: fmt.Sprintf(format, args...)})
	}
	switch {
	case d.Problem != nil:
		loss(CauseDaemon, "%v", d.Problem)
		return losses, nil
	case d.Report == nil:
		loss(CauseDaemon, "the control daemon of MPS has not started yet")
		return losses, nil
	case d.Report.Problem != "":
		loss(CauseDaemon, "%s", d.Report.Problem)
	}
	if !d.Report.Exclusive {
		loss(CauseMode, "the compute mode was not EXCLUSIVE_PROCESS, so that programs could use the GPU without MPS")
	}
	var known []int
	for _, s := range d.Report.Servers {
		known = append(append(known, s.PID), s.Clients...)
		if !slices.Contains(serving, s.State) {
			loss(CauseFault, "MPS server %d is in state %s; it serves again when all programs that use it have ended", s.PID, s.State)
		}
	}
	if d.Unlisted != nil {
		loss(limits.CauseProcesses, "the processes that use the device are not known: %v", d.Unlisted)
	}
	for _, p := range d.Processes {
		if slices.Contains(known, p.PID) || p.OfSystem() {
			continue
		}
		strangers = append(strangers, p.PID)
		if d.First || slices.Contains(d.Strangers, p.PID) {
			loss(limits.CauseProcess, "process %d (%s) uses the device without MPS", p.PID, cmp.Or(p.Program, "of pod "+p.PodUID))
		}
	}
	return losses, strangers
}
