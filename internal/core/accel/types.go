// Package accel holds the vocabulary that all parts of Divvy share: devices,
// units, requests, grants and the reasons for a refusal.
//
// It is values only: standard library, no clients, no clock of its own, no
// logging. Values are safe to copy; those that hold slices or maps must not be
// changed once they were handed on.
package accel

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// DeviceID is the stable identity of a device, the uuid that the vendor's
// library reports. It is unique on a node and, for real hardware, everywhere.
type DeviceID string

// Resource is the name of an extended resource, such as
// "enflame.com/gcu-memory".
type Resource string

// JoinResources returns the names as a list that a person reads.
func JoinResources(resources []Resource) string {
	names := make([]string, len(resources))
	for i, r := range resources {
		names[i] = string(r)
	}
	return strings.Join(names, ", ")
}

// Units counts an extended resource in the integers that pods request. It is
// signed, so that a subtraction that goes wrong shows as a negative number and
// not as a huge one.
type Units int64

// MaxUnits bounds what one device is taken to hold and what one pod is counted
// with: over a million GB at the finest unit, and small enough that the sum
// over all pods of a node cannot overflow.
const MaxUnits Units = 1 << 40

// plus returns u+v, where a negative v counts as nothing and a sum beyond the
// range stays at its end: a request that overflowed to a small number would
// fit everywhere.
func (u Units) plus(v Units) Units {
	if v <= 0 {
		return u
	}
	if u > math.MaxInt64-v {
		return math.MaxInt64
	}
	return u + v
}

// NoNUMA is the NUMANode of a device whose node is not known.
const NoNUMA = -1

// Device is one schedulable accelerator as its vendor's library describes it.
type Device struct {
	// Index is the vendor's 0-based number of the device on its node; of a partition,
	// see PartitionIndex.
	Index int
	// ID is the vendor's uuid.
	ID DeviceID
	// Model is the vendor's product name, "" when unknown.
	Model string
	// MemoryBytes is the total device memory in bytes.
	MemoryBytes int64
	// NUMANode is the node's NUMA node, or NoNUMA.
	NUMANode int
	// Board names the board that carries the device, the same for all its
	// chips; "" when the device is alone on its board.
	Board string
	// Chip is the device's 0-based position on its Board, 0 without one.
	Chip int
	// PCI is the PCI address, domain:bus:device.function, "" when unknown.
	PCI string
	// Parent is the device that this one is a partition of, "" for a whole device.
	// Index, NUMANode and PCI of a partition follow from its parent's.
	Parent DeviceID
	// Profile is the size of a partition as the vendor spells it, such as "1g.10gb";
	// "" for a whole device.
	Profile string
	// Partitioned is true for a whole device in the mode in which it is cut into
	// partitions, of which there may be none.
	Partitioned bool
	// Health says whether new pods may be placed on the device.
	Health Health
}

// Health is the state of a device. The zero value is healthy.
type Health struct {
	// Unhealthy is true when no new pod may be placed on the device.
	Unhealthy bool
	// Reason says why, in words that a person reads; "" when healthy.
	Reason string
	// Cause classifies the reason, in words that a configuration names, such
	// as "xid-79", "over-temperature" or CauseLost; "" when healthy or unknown.
	Cause string
	// Quarantined is since when the device is in quarantine, in UTC and whole
	// seconds; zero when it is not. It takes no pods then until it is released,
	// however well it is.
	Quarantined time.Time
}

// Quarantine is a device that takes no pods until an administrator releases it.
type Quarantine struct {
	Device DeviceID
	// Vendor and Index are the device's at the time; the index may be another's now.
	Vendor string
	Index  int
	// Cause and Reason are those of Health; CauseAdministrator if it was put into
	// quarantine by hand.
	Cause, Reason string
	// Since is in UTC and whole seconds.
	Since time.Time
}

// Health is that of the device while it is in quarantine.
func (q Quarantine) Health() Health {
	return Health{Unhealthy: true, Reason: q.Reason, Cause: q.Cause, Quarantined: q.Since}
}

// ReasonGivenOut begins the Reason of a device that is well but takes no new
// pods of a resource, because containers hold it as another one; the name of
// that one follows.
const ReasonGivenOut = "given out as "

// The Causes that all vendors have.
const (
	// CauseLost is that of a device that was there and is not any more, or that
	// the library calls lost.
	CauseLost = "lost"
	// CauseUnreachable is that of a device about which a call of the library fails
	// or does not return in time.
	CauseUnreachable = "unreachable"
	// CauseNotOffered is that of a device that works and is not offered as it is set up.
	CauseNotOffered = "not-offered"
	// CauseAdministrator is that of a device that was put into quarantine by hand.
	CauseAdministrator = "administrator"
)

// Link says how closely two devices of a node are connected.
type Link struct {
	// A and B are the devices, A < B.
	A, B DeviceID
	// Score is higher for a better connection: LinkSystem to LinkBoard for the
	// way over PCIe, and LinkLane more for each direct lane (NVLink) between the
	// two.
	Score int
}

// Scores of a Link. The scale is the one that NVIDIA's and Iluvatar's device
// plugins rank by: ten per level of nearness on PCIe, a hundred per lane.
const (
	LinkSystem     = 10  // across the interconnect between CPUs
	LinkNode       = 20  // across host bridges of one NUMA node
	LinkHostBridge = 30  // across one PCIe host bridge
	LinkSwitches   = 40  // across several PCIe switches
	LinkSwitch     = 50  // across one PCIe switch
	LinkBoard      = 60  // on one board
	LinkLane       = 100 // per direct lane, on top of the above
)

// Share is a device together with the units that a resource cuts it into.
type Share struct {
	Device
	// Units is how many units of the resource the device holds in all: 1 for a
	// device that is given out as a whole, its replicas for time slices.
	Units Units
	// Withheld is how many of Units are withheld from new pods, because containers use more of
	// the device's memory than their allocations.
	Withheld Units
	// Chips is how many chips the device is made of, when it is a whole board;
	// 0 for a single chip.
	Chips int
	// Isolation is what keeps the containers on the device apart.
	Isolation Isolation
}

// Inventory is what a node publishes of one resource.
type Inventory struct {
	Resource Resource
	// Unit is the size of one unit as configured, such as "0.1" for a tenth of
	// a GB or "1/6" for a sixth of each device; "" for resources that are not counted in memory.
	Unit string
	// Shares are the devices in ascending order of Index.
	Shares []Share
	// Links are the known connections between the devices, in ascending order of
	// A and B.
	Links []Link
	// Several is true where the node can give a pod several devices of the
	// resource. A node daemon of an earlier release gives one, whatever the grant
	// says.
	Several bool
	// Least is the fewest units of a device that a container can have, since the context of a
	// process takes a part of what it is limited to; 0 for any.
	Least Units
}

// ContainerKind tells when a container runs relative to the others of its pod.
type ContainerKind uint8

// The kinds of containers, in the order in which kubelet starts them.
const (
	// InitContainer runs to its end before the next container starts.
	InitContainer ContainerKind = iota
	// SidecarContainer is an init container that keeps running
	// (restartPolicy Always).
	SidecarContainer
	// AppContainer runs beside all other app containers.
	AppContainer
)

// ContainerRequest is what one container asks of a resource.
type ContainerRequest struct {
	Name  string
	Kind  ContainerKind
	Units Units
}

// Request is what one pod asks of one resource. It is served by devices of one
// node, in equal parts.
type Request struct {
	Resource Resource
	// Containers are those that ask for at least one unit, in the order in
	// which kubelet allocates: init containers and sidecars as written, then
	// app containers.
	Containers []ContainerRequest
	// Devices is how many devices serve the pod; 0 is one. Each container gets
	// the same part of its units on each.
	Devices int
	// CPU and Memory are the pod's peak, in millicores and MiB; 0 where nobody
	// counts them.
	CPU, Memory int64
	// Selection says which devices the pod takes; nil for any.
	Selection *Selection
	// Policy names the placement policy of this pod; "" is the cluster's.
	Policy string
	// Pod is the UID of the pod that asks: what is kept for a pod is not kept
	// from itself. "" where it is not known.
	Pod string
	// Priority is the pod's. What is kept for a pod of the same or higher
	// priority is not there for this one.
	Priority int32
}

// Selection says which devices serve a pod, by model, by identity and by isolation. All
// lists are sorted and may be empty. It must not be changed once it was handed on.
type Selection struct {
	// UseModels are the models of which a device must have one, AvoidModels
	// those that it must not have. Case does not matter; a name that ends in *
	// stands for all that begin with what is before it.
	UseModels, AvoidModels []string
	// UseIDs are the devices of which it must be one, AvoidIDs those that it
	// must not be.
	UseIDs, AvoidIDs []string
	// Isolation is the least tier that the device's memory must have.
	Isolation Tier
}

// Allows reports whether the device of that ID and model may serve the pod, if its memory
// has that tier at the time. A nil selection allows all.
func (s *Selection) Allows(id DeviceID, model string, tier Tier) bool {
	return s.Names(id, model) && s.Isolates(tier)
}

// Isolates reports whether a device of that tier is isolated enough for the pod.
func (s *Selection) Isolates(tier Tier) bool {
	return s == nil || s.Isolation == TierNone || tier.Meets(s.Isolation)
}

// Names reports whether the lists allow the device of that ID and model, whatever its
// tier.
func (s *Selection) Names(id DeviceID, model string) bool {
	if s == nil {
		return true
	}
	if len(s.UseModels) > 0 && !anyModel(s.UseModels, model) || anyModel(s.AvoidModels, model) {
		return false
	}
	if _, named := slices.BinarySearch(s.UseIDs, string(id)); len(s.UseIDs) > 0 && !named {
		return false
	}
	_, avoided := slices.BinarySearch(s.AvoidIDs, string(id))
	return !avoided
}

// anyModel reports whether the model is one that the names stand for.
func anyModel(names []string, model string) bool {
	return slices.ContainsFunc(names, func(name string) bool {
		if prefix, open := strings.CutSuffix(name, "*"); open {
			return len(model) >= len(prefix) && strings.EqualFold(model[:len(prefix)], prefix)
		}
		return strings.EqualFold(model, name)
	})
}

// Peak returns the units that the pod holds at its highest: init containers
// run one after the other beside the sidecars started before them, then all
// app containers run beside all sidecars. The formula is that of
// kube-scheduler (k8s.io/component-helpers/resource, PodRequests). Amounts below
// zero count as nothing, sums beyond the range stay at its end.
func (r Request) Peak() Units {
	var sidecars, initPeak, apps Units
	for _, c := range r.Containers {
		switch c.Kind {
		case SidecarContainer:
			sidecars = sidecars.plus(c.Units)
			initPeak = max(initPeak, sidecars)
		case InitContainer:
			initPeak = max(initPeak, sidecars.plus(c.Units))
		case AppContainer:
			apps = apps.plus(c.Units)
		}
	}
	return max(initPeak, sidecars.plus(apps))
}

// Each returns the part of Peak that is requested on each device.
func (r Request) Each() Units { return r.Peak() / Units(max(r.Devices, 1)) }

// Least returns the fewest units that a container has of a device.
func (r Request) Least() Units {
	least := r.Each()
	for _, c := range r.Containers {
		if c.Units > 0 {
			least = min(least, c.Units/Units(max(r.Devices, 1)))
		}
	}
	return least
}

// Key is the same for requests that fit on the same nodes.
func (r Request) Key() string {
	key := fmt.Sprintf("%s %d %d %d %d %d %d %s", r.Resource, r.Priority, r.Peak(), r.Least(), r.Devices, r.CPU, r.Memory, r.Policy)
	if s := r.Selection; s != nil {
		key += fmt.Sprintf(" %q %s", [][]string{s.UseModels, s.AvoidModels, s.UseIDs, s.AvoidIDs}, s.Isolation)
	}
	return key
}

// PodRef identifies a pod. UID decides; the names are for people.
type PodRef struct {
	UID       string
	Namespace string
	Name      string
}

// String returns namespace/name.
func (p PodRef) String() string { return p.Namespace + "/" + p.Name }

// Grant says which devices of which node serve a pod.
type Grant struct {
	Resource Resource
	Node     string
	Device   DeviceID
	// Index is the device's Index at the time of the grant.
	Index int
	// DeviceUnits are all units of the device.
	DeviceUnits Units
	// Units are the pod's peak, on all its devices together.
	Units Units
	// More are the second device and those after, in the order in which the node
	// publishes them; nil for a pod on one. Each device carries the same part of Units.
	More []GrantedDevice
	// At is when the device was chosen; kubelet serves the oldest grant first.
	At time.Time
	// Confirmed is true once the node has seen kubelet hand the units out.
	Confirmed bool
}

// Devices are all devices of the grant, in the order in which the node publishes them.
func (g *Grant) Devices() []DeviceID {
	devices := []DeviceID{g.Device}
	for _, d := range g.More {
		devices = append(devices, d.Device)
	}
	return devices
}

// GrantedDevice is one device of a grant.
type GrantedDevice struct {
	Device DeviceID
	// Index is the device's Index at the time of the grant.
	Index int
	// DeviceUnits are all units of the device.
	DeviceUnits Units
}

// ReasonCode classifies why a pod does not fit on a node.
type ReasonCode uint8

// The reasons. Fits is the zero value.
const (
	Fits ReasonCode = iota
	// NodeUnknown: the node is not known or publishes no inventory of the
	// resource.
	NodeUnknown
	// NoDeviceFits: no healthy device has enough free units now; pods that end
	// may change that.
	NoDeviceFits
	// LargerThanDevice: the request is larger than any device of the node, so
	// no eviction can help.
	LargerThanDevice
	// TooFewDevices: fewer devices of the node than asked for are large enough
	// and allowed by the pod's selection, so no eviction can help.
	TooFewDevices
	// NotSelected: the pod's selection allows no device of the node.
	NotSelected
	// NotIsolated: no device that the pod's selection allows otherwise has the tier that
	// the pod requires. An attestation may change that, evicting pods does not.
	NotIsolated
	// NoCapacity: the node has not enough CPU or memory left; pods that end may
	// change that.
	NoCapacity
	// TooSmall: a container asks for less of a device than one of the node can have, see
	// Inventory.Least.
	TooSmall
	// Unservable: the request is one that no node serves as it is written: its
	// units cannot be divided by its devices, or its policy is not known.
	Unservable
)

// Unresolvable reports whether evicting pods from the node cannot help.
func (c ReasonCode) Unresolvable() bool {
	return c != Fits && c != NoDeviceFits && c != NoCapacity
}

// ErrNoFit is the error of a placement for which no device has room. Test with
// errors.Is; errors that wrap it say how much was asked and where.
var ErrNoFit = errors.New("no device has enough free units")

// NoFitError says what was asked for and what would have been there.
type NoFitError struct {
	Node     string
	Resource Resource
	// Code says what is short.
	Code ReasonCode
	// Devices is how many devices were asked for.
	Devices int
	// Need and Largest are in units; Need is asked for on each device, Largest is
	// the most that any one healthy device has free.
	Need, Largest Units
	// Required is the tier that the pod requires, and Stated are those of the devices
	// that its selection allows otherwise.
	Required Tier
	Stated   TierSet
}

func (e *NoFitError) Error() string {
	switch {
	case e.Code == NotSelected:
		return fmt.Sprintf("node %s: no device of %s is allowed by the pod's annotations: %v", e.Node, e.Resource, ErrNoFit)
	case e.Code == NotIsolated:
		return fmt.Sprintf("node %s: %s: %v", e.Node, WhyNotIsolated(e.Required, e.Stated), ErrNoFit)
	case e.Code == TooSmall:
		return fmt.Sprintf("node %s: %s: %v", e.Node, WhyTooSmall(e.Resource), ErrNoFit)
	case e.Code == TooFewDevices:
		return fmt.Sprintf("node %s: fewer than %d devices of %s with %d units are allowed for the pod: %v", e.Node, e.Devices, e.Resource,
			e.Need, ErrNoFit)
	case e.Code == NoCapacity:
		return fmt.Sprintf("node %s: insufficient CPU or memory for a pod with devices of %s: %v", e.Node, e.Resource, ErrNoFit)
	case e.Devices > 1:
		return fmt.Sprintf("node %s: %d devices with %d units of %s each requested, at most %d are free on any: %v",
			e.Node, e.Devices, e.Need, e.Resource, e.Largest, ErrNoFit)
	}
	return fmt.Sprintf("node %s: %d units of %s requested on one device, at most %d are free on any: %v",
		e.Node, e.Need, e.Resource, e.Largest, ErrNoFit)
}

// WhyTooSmall says that a container asks for less than one can have.
func WhyTooSmall(r Resource) string {
	return fmt.Sprintf("a container requests no more of %s than the context of a process takes", r)
}

// Unwrap makes errors.Is(err, ErrNoFit) true.
func (e *NoFitError) Unwrap() error { return ErrNoFit }
