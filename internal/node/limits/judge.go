package limits

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
)

// Cause says why a device's memory is not known to be limited for all that use it. It is the
// value of a label of a metric.
type Cause string

// The causes.
const (
	// CauseDriver: the driver does not keep limits of the device now.
	CauseDriver Cause = "driver"
	// CauseMissing and CauseDifferent: a container has no limit, or another one than its
	// allocation.
	CauseMissing   Cause = "limit-missing"
	CauseDifferent Cause = "limit-different"
	// CauseUnreadable: the limit of a container is not known.
	CauseUnreadable Cause = "limit-unreadable"
	// CauseUnlimitedStart: nothing proves that a container had its limit from its start,
	// as for one that started before limits were enabled.
	CauseUnlimitedStart Cause = "started-without-limit"
	// CauseRepaired: a container was without its limit for a while, and has it again.
	CauseRepaired Cause = "limit-was-lost"
	// CauseProcess: a process that no limit bounds uses the device.
	CauseProcess Cause = "process-without-limit"
	// CauseProcesses: it is not known which processes use the device.
	CauseProcesses Cause = "processes-unknown"
)

// Name names a container.
type Name struct{ Namespace, Pod, Container string }

func (n Name) String() string { return n.Namespace + "/" + n.Pod + "/" + n.Container }

// Container is a container that runs and holds memory of a device by the node's ledger.
type Container struct {
	Name
	// ID is the runtime's id.
	ID string
	// Bytes is its allocation, 0 for one that has the whole device or time slices.
	Bytes uint64
	// Groups are its control groups that have processes.
	Groups []ReadLimit
}

// ReadLimit is the limit of a group as it was read.
type ReadLimit struct {
	Group Group
	// Bytes is the limit if Err is nil. Err wraps backend.ErrNoLimit if there is none.
	Bytes uint64
	Err   error
}

// Process is a process that uses a device.
type Process struct {
	PID int
	// Container is the runtime's id of the container that it is in, "" for none. PodUID is
	// that of the pod, "" for a process of the host.
	Container, PodUID string
	// Program is what the kernel calls the program of a process of the host, in 15 bytes.
	Program string
}

// SystemPrograms are those of NVIDIA's driver and of displays that run outside of pods, as the
// kernel names them, which cuts names to 15 bytes.
var SystemPrograms = []string{"nvidia-persiste", "Xorg", "gnome-shell"}

// OfSystem reports whether a process is one of SystemPrograms. One in a pod has the name that it likes.
func (p Process) OfSystem() bool { return p.PodUID == "" && slices.Contains(SystemPrograms, p.Program) }

// Device is what one pass has found of a device.
type Device struct {
	ID accel.DeviceID
	// Problem is why the driver keeps no limits of it, nil if it does.
	Problem    error
	Containers []Container
	// Processes are those that the driver lists, unless Unlisted says why they are not known.
	Processes []Process
	Unlisted  error
}

// Loss says why a device's memory is not known to be limited.
type Loss struct {
	Cause Cause
	// Container is the one that it is about, the zero value for none.
	Container Name
	// Reason is for people.
	Reason string
}

// Repair is a limit to be set again.
type Repair struct {
	Device accel.DeviceID
	Name
	// ID is the runtime's id of the container.
	ID    string
	Group Group
	Bytes uint64
}

// Judge returns why the memory of a device is not known to be limited for all that use it, and
// which limits are to be set again. records are those of all containers. Without a loss, each
// container has had its limit from its start, and nothing else uses the device.
func Judge(d Device, records []Record) (losses []Loss, repairs []Repair) {
	if d.Problem != nil {
		losses = append(losses, Loss{Cause: CauseDriver, Reason: d.Problem.Error()})
	}
	known := map[string]bool{}
	for _, c := range d.Containers {
		known[c.ID] = true
		if c.Bytes == 0 {
			continue
		}
		broken := false
		for _, g := range c.Groups {
			cause, reason := g.judge(c.Bytes)
			if cause == "" {
				continue
			}
			broken = true
			losses = append(losses, Loss{cause, c.Name, fmt.Sprintf("container %s: %s", c.Name, reason)})
			if cause != CauseUnreadable {
				repairs = append(repairs, Repair{Device: d.ID, Name: c.Name, ID: c.ID, Group: g.Group, Bytes: c.Bytes})
			}
		}
		if cause, reason := past(d.ID, c, records); cause != "" && !broken {
			losses = append(losses, Loss{cause, c.Name, fmt.Sprintf("container %s %s", c.Name, reason)})
		}
	}
	if d.Unlisted != nil {
		losses = append(losses, Loss{Cause: CauseProcesses,
			Reason: "the processes that use the device are not known: " + d.Unlisted.Error()})
	}
	for _, p := range d.Processes {
		if known[p.Container] && p.Container != "" || p.OfSystem() {
			continue
		}
		// Its container may have started so lately that the API server does not name it yet.
		if r := recordOf(d.ID, p.Container, records); r != nil && r.Lost.IsZero() {
			continue
		}
		losses = append(losses, Loss{Cause: CauseProcess, Reason: "no limit bounds " + p.describe()})
	}
	return losses, repairs
}

// judge compares a limit with the allocation.
func (l ReadLimit) judge(bytes uint64) (Cause, string) {
	switch {
	case errors.Is(l.Err, backend.ErrNoLimit):
		return CauseMissing, fmt.Sprintf("has no limit and should have %d MiB", bytes/MiB)
	case l.Err != nil:
		return CauseUnreadable, "its limit cannot be read: " + l.Err.Error()
	case l.Bytes != bytes:
		return CauseDifferent, fmt.Sprintf("has a limit of %d bytes and should have %d", l.Bytes, bytes)
	}
	return "", ""
}

// past returns why a container that has its limit may hold more than that nevertheless.
func past(id accel.DeviceID, c Container, records []Record) (Cause, string) {
	r := recordOf(id, c.ID, records)
	switch {
	case r == nil:
		return CauseUnlimitedStart, "started without a limit; the device counts as limited again when the container has ended"
	case !r.Lost.IsZero():
		return CauseRepaired, fmt.Sprintf("was without its limit at %s; the device counts as limited again when the container has ended",
			r.Lost.Format(time.RFC3339))
	}
	return "", ""
}

// recordOf returns the record of a container, nil if there is none.
func recordOf(id accel.DeviceID, container string, records []Record) *Record {
	i := slices.IndexFunc(records, func(r Record) bool { return r.Device == id && container != "" && r.Owner() == container })
	if i < 0 {
		return nil
	}
	return &records[i]
}

func (p Process) describe() string {
	switch {
	case p.Container != "":
		return fmt.Sprintf("a process in container %s of pod %s, which holds nothing of the device", p.Container, p.PodUID)
	case p.PodUID != "":
		return "a process of pod " + p.PodUID
	}
	return fmt.Sprintf("a process of the host (%s)", cmp.Or(p.Program, "unknown program"))
}

// gain is how many passes in a row must find no loss after one until a device counts as limited.
// The first pass of a watch is enough: what was lost before has a record.
const gain = 2

// Status is whether the memory of a device is limited for all that use it.
type Status struct {
	// Attested is when the last pass found so, the zero time if it did not or was the first
	// one that did.
	Attested time.Time
	Losses   []Loss
	// passes without a loss in a row
	passes int
}

// Watch keeps the status of devices over the passes. The zero value knows none. It is for one
// goroutine.
type Watch struct {
	devices map[accel.DeviceID]Status
}

// Look takes the losses of all devices in a pass and returns their status and, by device, the
// losses that the pass before did not have. Devices that are not among them are forgotten.
func (w *Watch) Look(losses map[accel.DeviceID][]Loss, now time.Time) (status map[accel.DeviceID]Status, fresh map[accel.DeviceID][]Loss) {
	status, fresh = map[accel.DeviceID]Status{}, map[accel.DeviceID][]Loss{}
	for id, found := range losses {
		before := w.devices[id]
		if len(found) == 0 {
			s := Status{passes: min(before.passes+1, gain)}
			if w.devices == nil {
				s.passes = gain
			}
			if s.passes == gain {
				s.Attested = now
			}
			status[id] = s
			continue
		}
		status[id] = Status{Losses: found}
		for _, l := range found {
			// That a limit was lost follows from the loss that was found before it was set again.
			if !slices.ContainsFunc(before.Losses, func(b Loss) bool {
				return b.Container == l.Container && (b.Cause == l.Cause || l.Cause == CauseRepaired)
			}) {
				fresh[id] = append(fresh[id], l)
			}
		}
	}
	w.devices = status
	return status, fresh
}
