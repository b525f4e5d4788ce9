package alloc

import (
	"slices"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
)

// Kind says how a pool forms ids and chooses devices.
type Kind uint8

// The kinds. A resource has at most one pool of each.
const (
	// Memory counts the memory of devices in units. Each device has a range of
	// them, and a container gets units of the devices that were planned for its pod.
	Memory Kind = iota
	// Slots gives out whole devices or time slices, by a policy.
	Slots
)

// ID names a pool.
type ID struct {
	Resource accel.Resource
	Kind     Kind
}

// String is the pool's key in what a successor is told.
func (id ID) String() string {
	if id.Kind == Memory {
		return "memory " + string(id.Resource)
	}
	return "slots " + string(id.Resource)
}

// Config is what a pool is to be.
type Config struct {
	ID
	Vendor string
	// Draining says why the pool takes no new pods for good, "" while it is
	// configured.
	Draining string
	// Chooses reports whether a device is one of the pool's, by its argument
	// alone; nil for all of the vendor's.
	Chooses func(sharing.Card) bool
	// Unit is the configured memory unit of a pool of kind Memory.
	Unit sharing.MemoryUnit
	// LeastBytes is the least memory of a device that a container of such a pool can have, 0 for
	// any.
	LeastBytes uint64
	// Cut says how a pool of kind Slots cuts devices.
	Cut Cut
	// State is what earlier runs saved, nil for nothing.
	State *State
}

// Cut says how devices are cut into slots.
type Cut struct {
	// SplitBoards makes each chip of a board a device of its own.
	SplitBoards bool
	// Replicas returns how many slices a device has, 0 for one that is given out
	// as a whole, by its argument alone; nil for whole devices.
	Replicas func(sharing.Card) int
	Policy   sharing.SlotPolicy
	// Single rejects containers that ask for more than one slice.
	Single bool
}

// Discovery is the outcome of looking for a vendor's devices.
type Discovery struct {
	// Devices are those that can be described, healthy or not, in ascending order
	// of Index.
	Devices []accel.Device
	Links   []accel.Link
	// Faults are the devices that cannot be used at all.
	Faults []Fault
	// Err is why no device is known, nil when the library answered.
	Err error
	// Unreachable is why containers cannot reach the devices as configured.
	Unreachable error
}

// Fault is a device that the vendor's library counts and cannot describe. ID is ""
// when it is not known which.
type Fault struct {
	ID  accel.DeviceID
	Err error
	// NotOffered is true for a device that can be described, and that no pool can be made
	// of as it is set up.
	NotOffered bool
}

// PodKey is how kubelet names a pod in its list.
type PodKey struct{ Namespace, Name string }

// Listed is a pod that kubelet has taken up, with what its containers hold. Plain
// init containers are not listed.
type Listed struct {
	PodKey
	Containers []Holding
}

// Holding is what a container holds.
type Holding struct {
	Container string
	// Units are the ids of each resource.
	Units map[accel.Resource][]string
}

// Pod is a pod of this node as the API server shows it.
type Pod struct {
	accel.PodRef
	// Requests are those of the resources of which it requests something.
	Requests []accel.Request
	// Planned is the signed allocation for this node, nil for none.
	Planned *accel.Grant
	Created time.Time
	// Started is true when kubelet must have admitted the pod already or never
	// will, Ended when its containers have ended for good, Deleting while it is
	// being deleted.
	Started, Ended, Deleting bool
}

// Key is how kubelet names the pod.
func (p *Pod) Key() PodKey { return PodKey{p.Namespace, p.Name} }

// request is what the pod requests of a resource; it has no containers where that
// is nothing.
func (p *Pod) request(r accel.Resource) accel.Request {
	for i := range p.Requests {
		if p.Requests[i].Resource == r {
			return p.Requests[i]
		}
	}
	return accel.Request{Resource: r}
}

// planned returns the devices of the allocation that was planned of a resource,
// sorted.
func (p *Pod) planned(r accel.Resource) ([]accel.DeviceID, bool) {
	if p.Planned == nil || p.Planned.Resource != r {
		return nil, false
	}
	devices := p.Planned.Devices()
	slices.Sort(devices)
	return devices, true
}

// confirmed reports whether the planned allocation is what kubelet gave.
func (p *Pod) confirmed(r accel.Resource) bool {
	return p.Planned != nil && p.Planned.Resource == r && p.Planned.Confirmed
}

// View is what is known of the node's pods when kubelet's list is taken.
type View struct {
	// Listed is kubelet's list.
	Listed []Listed
	Pods   []Pod
	// Complete is true once all pods of the API server are among Pods.
	Complete bool
	// Ending are the devices, by resource, of pods that are gone before their
	// containers.
	Ending map[accel.Resource][]accel.DeviceID
	// Running are those of the pods that Engine.Unlisted returns whose containers still run, by
	// UID.
	Running map[string]bool
	// Grace is how long what was given to a container counts as held although
	// kubelet does not list it.
	Grace time.Duration
	Now   time.Time
}

// How long something that was given to a container counts as held although
// kubelet does not list it.
const (
	// Recorded is the time that kubelet may take from the answer to its records.
	Recorded = time.Second
	// RecordedBefore is the same where kubelet asks the next question: it has
	// recorded what it was answered before, but for containers that are given
	// their devices again beside the admission of pods.
	RecordedBefore = 100 * time.Millisecond
)

// Unit is one id of a resource.
type Unit struct {
	ID        string
	Unhealthy bool
	// NUMANodes are the NUMA nodes that it is near to; none when that is not known
	// or not to be weighed.
	NUMANodes []int
}

// Question is kubelet's question for units for one container.
type Question struct {
	// Available are the ids that kubelet has free, Must those that must be in the
	// answer, and Size how many ids the container gets.
	Available, Must []string
	Size            int
	Pods            []Pod
	Now             time.Time
}

// Preference is the answer to a Question.
type Preference struct {
	IDs     []string
	Devices []accel.DeviceID
	// Pod is the one that the question is taken to be for, the zero value when
	// none is known, and Planned what was planned for it.
	Pod     accel.PodRef
	Planned []accel.DeviceID
}

// Allocation is what a container gets. It counts once it was passed to Give.
type Allocation struct {
	// IDs are in the order of the devices.
	IDs []string
	// Devices are the chips that the container reaches, in the order in which it
	// sees them.
	Devices []accel.DeviceID

	pool    *pool
	asked   question // of a pool of memory
	cards   []item   // of slots
	unasked bool
}

// Named reports whether the ids mean something to the vendor's software.
func (a *Allocation) Named() bool { return a.pool.config.Kind == Slots }

// Plan is what has to be written before units are offered.
type Plan struct {
	// Save is true when State is to be in the state file.
	Save  bool
	State State
	// Describe are the devices that containers must be able to reach; nil to leave
	// it as it is.
	Describe []accel.Device
	Settled  bool // nothing has to be written
}

// Written is what became of a Plan.
type Written struct {
	// Unsaved is why the state file does not hold the state, nil when it does.
	Unsaved error
	// Unspecified are the devices that containers cannot reach, with the reason.
	Unspecified map[accel.DeviceID]error
}

// Offer is what kubelet is told of a pool.
type Offer struct {
	// Units is meant as it is when Changed is true; otherwise kubelet keeps what it
	// has.
	Units   []Unit
	Changed bool
}

// Report says how the problem of a pool changed.
type Report struct {
	Before, Now error
	// Absent is true where the node has no device for the pool.
	Absent bool
}

// Usage is what containers hold of a pool.
type Usage struct {
	// Known is false before kubelet was asked.
	Known bool
	// Devices counts the units held of each device.
	Devices map[accel.DeviceID]int
	// Slots are the slots that each pod holds, by kubelet's last list; nil for units
	// of memory.
	Slots map[PodKey][]string
}

// Status is how a pool is.
type Status struct {
	// Problem is why it is not offered as configured, nil when it is.
	Problem error
	// Known reports whether the inventory is worth publishing.
	Known bool
	// Absent reports whether the node has nothing that the pool could be made of.
	Absent bool
	// Idle reports whether it is certain that no container holds anything, and
	// Drained the same of a pool that takes no new pods.
	Idle, Drained bool
	// Present counts the devices of the pool that the library lists.
	Present int
}
