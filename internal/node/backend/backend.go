// Package backend is the contract between Divvy's node daemon and the vendors
// of accelerators. A vendor is three things: which devices there are, how they
// are, and what a container needs to reach one. It knows nothing of sharing,
// kubelet or scheduling.
//
// A vendor implements Backend, Notifier if its library can tell of changes by
// itself, Labeler if it has names of its own for a node's labels, Specifier if
// device nodes alone are not all that CDI should give a container, and Meter if its
// library knows which processes use a device. The vendors stand in one list, in package
// vendors below this one. Package backendtest has the suite that every vendor passes.
//
// Health has no call of its own: Discover returns devices with their health,
// and Watch calls it again and again. So loss, recovery, a driver that is
// loaded late and a card that got another index all take the one path that is
// used every few seconds, and a missed event costs one interval at most. A
// contract that reports single changes was turned down, because every vendor
// would need its own poll loop and its own idea of what a change is.
package backend

import (
	"context"
	"errors"
	"time"

	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// Backend reaches one vendor's devices on this node. Its methods are safe for
// concurrent use.
type Backend interface {
	// Vendor is the vendor's name as the configuration spells it: "enflame".
	Vendor() string

	// Discover lists the devices as they are now. Devices that cannot be used
	// are in Found.Faults and never hide the others.
	//
	// An error means that nothing is known about any device now. It is an
	// *UnavailableError when the vendor's library or driver is missing, broken
	// or does not answer; the caller calls again later, which starts afresh and
	// finds what has appeared since. It wraps ctx's error when ctx ended first.
	// Discover never outlives ctx, whatever the library does. A call about one
	// device that hangs is a fault of that device, and is waited for once.
	//
	// Health is as it is now, without memory: Watch applies the policy of
	// recovery. A fault that the vendor tells as an event, not as a state, is
	// in the first Discover that begins after it and in no later one.
	Discover(ctx context.Context) (Found, error)

	// Edits returns what a container needs to reach the devices, all of which
	// an earlier Discover listed; the last one that did so decides. It calls
	// no library, so it also answers while the library does not. Without ids,
	// and for an id that was never listed, it is an error.
	Edits(ids ...accel.DeviceID) (Edits, error)

	// Close lets go of the library. Calls after Close return ErrClosed; Close
	// again returns nil.
	Close() error
}

// Notifier is an optional ability of a Backend: it hears of changes without
// asking. Devices of a Backend without it are only polled.
type Notifier interface {
	// AwaitChange returns nil once something may have changed that Discover
	// would tell. It returns an error when ctx ends, and when the library
	// cannot be asked now; the caller then waits a while before the next call.
	// One caller at a time.
	AwaitChange(ctx context.Context) error
}

// Labeler is an optional ability of a Backend: it describes the node in the
// labels that the vendor's own feature discovery gives a node, so that node
// selectors written for it keep working.
type Labeler interface {
	// Labels returns whole label keys with their values, of the last Discover;
	// none when it found no device. It calls no library.
	Labels(Sharing) map[string]string
}

// Sharing says how the vendor's whole devices are offered, for Labels.
type Sharing struct {
	// Replicas is how many pods may share one device by time slices, 1 for
	// none.
	Replicas int
	// Renamed is true when the shared resource has another name than the
	// vendor's whole device.
	Renamed bool
	// Profiles say the same of partitions that are resources of their own, by the
	// name of their profile (accel.ProfileName).
	Profiles map[string]Sharing
}

// Specifier is an optional ability of a Backend: it knows all that a container needs
// in the Container Device Interface, such as the driver's libraries. Without it, the
// CDI specification has the device nodes of Edits alone.
type Specifier interface {
	// SpecCause returns a text that differs from an earlier one when Specify may
	// return something else, such as for another driver; "" while there is no
	// device. An error says why Specify would fail. It calls no library and
	// does not wait for anything.
	SpecCause() (string, error)
	// Specify describes the devices that the last Discover listed. It takes seconds,
	// ends soon after ctx does whatever the vendor's software does, and bounds its time
	// by itself too. One caller at a time.
	//
	// The caller mistrusts nothing of the outcome: all paths are the host's, and all
	// edits are valid.
	Specify(ctx context.Context) (Specification, error)
}

// Specification is what containers get of a vendor's devices by CDI.
type Specification struct {
	// Common is what a container gets with any of the devices.
	Common cdispecs.ContainerEdits
	// Devices are what it gets with each device besides.
	Devices map[accel.DeviceID]cdispecs.ContainerEdits
	// Failed are the devices that cannot be described, with the reason.
	Failed map[accel.DeviceID]error
}

// Meter is an optional ability of a Backend: it knows what is in use of a device, and
// which processes use it.
type Meter interface {
	// Measure returns what is in use of a device that the last Discover listed. It
	// never outlives ctx, whatever the library does, and waits for a call that hangs
	// once. An error says that nothing is known of the device now; it wraps
	// errors.ErrUnsupported if the library cannot say this of the device at all.
	Measure(ctx context.Context, id accel.DeviceID) (Measured, error)
}

// Measured is what was in use of a device at one moment.
type Measured struct {
	// UsedBytes is the device memory in use, by processes and by the driver itself.
	UsedBytes uint64
	// Processes use the device, in ascending order of PID, each once.
	Processes []Process
}

// Process is what one process uses of a device.
type Process struct {
	// PID is the process's id in the PID namespace of the caller, which is the host's.
	PID int
	// Memory is the device memory that it uses, in bytes; nil if the library does not
	// know that.
	Memory *uint64
	// Utilization is the part of the device's compute time that it had lately, from 0
	// to 1; nil if the library does not know that.
	Utilization *float64
}

// Limiter is an optional ability of a Backend: it bounds the memory of a device that the
// processes of a control group allocate, in the vendor's driver. Its methods are safe for
// concurrent use, never outlive ctx whatever the library does, and take the folder of a
// control group as this process sees it. They fail for partitions and for devices that are
// cut into partitions.
type Limiter interface {
	// Limitable returns nil if the driver has such limits at all, whatever the device and the
	// control group; otherwise the error says what is missing and wraps errors.ErrUnsupported.
	Limitable(ctx context.Context) error
	// KeepsLimits returns nil if the driver keeps the limits of a device while no program
	// uses it; otherwise the error says what to configure.
	KeepsLimits(ctx context.Context, id accel.DeviceID) error
	// SetLimit bounds what the group may allocate of a device from now on, in bytes. Memory
	// that was allocated before may not count. The error wraps ErrNoController if this
	// group cannot have a limit, although one above it may.
	SetLimit(ctx context.Context, id accel.DeviceID, group string, bytes uint64) error
	// ClearLimit removes the limit of the group, also one that does not exist.
	ClearLimit(ctx context.Context, id accel.DeviceID, group string) error
	// Limit returns the limit of the group, or of the nearest group above that has one. The
	// error wraps ErrNoLimit if there is none.
	Limit(ctx context.Context, id accel.DeviceID, group string) (MemoryLimit, error)
}

// MemoryLimit is a limit as the driver reports it, in bytes.
type MemoryLimit struct {
	Bytes, UsedBytes uint64
}

// ErrNoLimit says that a control group has no limit.
var ErrNoLimit = errors.New("the control group has no limit")

// ErrNoController says that the driver finds nothing in a control group to keep a limit in.
var ErrNoController = errors.New("the control group has no controller for device memory")

// Options say where a vendor's library is, how long to wait for it and what of
// it counts. Configuration fills them in; the zero value is a driver installed
// in "/".
type Options struct {
	// DriverRoot is the folder that this process sees the vendor's driver
	// installation in: "/" (the default), or "/host" in a container that has
	// the host's root mounted there. Symbolic links are followed inside it.
	DriverRoot string
	// HostDriverRoot is the same folder as the container runtime on the host
	// sees it, "/" by default. It is the prefix of DeviceNode.HostPath.
	HostDriverRoot string
	// HostRoot is where this process sees the host's root: "/" (the default), or the
	// part of DriverRoot before the path on the host.
	HostRoot string
	// LibraryPath names the library's file, as this process sees it. When it
	// is set, no other file is tried.
	LibraryPath string
	// CallTimeout bounds every single call of the vendor's library,
	// DefaultCallTimeout when zero.
	CallTimeout time.Duration
	// SysfsRoot is where the kernel's sysfs is seen, DriverRoot/sys when "".
	SysfsRoot string
	// ProcRoot is where the kernel's proc file system is seen, DriverRoot/proc when "".
	ProcRoot string
	// DevRoot is the folder that this process sees the dev folder with the device
	// nodes in, DriverRoot when "".
	DevRoot string
	// MIG is how partitions of NVIDIA's GPUs are listed: MIGNone (the default),
	// MIGSingle or MIGMixed.
	MIG string
	// DRS lists the DRS instances of Enflame's cards.
	DRS bool
	// IndexInEnv makes Edits.Env name devices by Index instead of by ID.
	IndexInEnv bool
	// CDIKind replaces the vendor's kind of CDI devices unless it is "".
	CDIKind string
	// CDI is for a Specifier.
	CDI CDIOptions
	// Ignore are the causes of ill health (accel.Health.Cause) that do not
	// count, as patterns with "*"; "all" stands for every cause and "default"
	// for those that the vendor ignores without being told. Nil is "default".
	Ignore []string
	// Heed are the causes that count although Ignore names them, as patterns.
	Heed []string
	// Pause keeps the library out of the process while it is set; nil for never. It is
	// for vendors whose drivers are replaced under a running node, so far NVIDIA.
	Pause *Pause
	// NeverRecover are the causes, as patterns, after which a device is put into
	// quarantine (Recovery.Never); "default" stands for those that are the vendor's
	// anyway, and nil is "default". A device that is ill for several causes at once is
	// told to be so for one of these, see Gravest.
	NeverRecover []string
	// Observe is told how long each call of the library took, but for those that
	// wait for an event, and whether it did not answer in time; nil for nobody. It
	// is called from any goroutine and must not block. call is the library's
	// function, or "load".
	Observe func(call string, took time.Duration, hung bool)
}

// The values of Options.MIG, which are those of NVIDIA's device plugin.
const (
	// MIGNone lists GPUs alone, also those in MIG mode.
	MIGNone = "none"
	// MIGSingle lists GPUs and their MIG devices, which are alike or are a Problem.
	MIGSingle = "single"
	// MIGMixed lists GPUs and their MIG devices that have all of their GPU instance.
	MIGMixed = "mixed"
)

// CDIHookPlaces are where the program can be on the host that NVIDIA's CDI hooks run:
// the GPU operator's toolkit first, since a package of the host beside it is older.
var CDIHookPlaces = []string{
	"/usr/local/nvidia/toolkit/nvidia-cdi-hook", "/usr/bin/nvidia-cdi-hook",
	"/usr/local/nvidia/toolkit/nvidia-ctk", "/usr/bin/nvidia-ctk",
}

// CDIOptions say how complete CDI specifications are generated.
type CDIOptions struct {
	// Generator is the command that generates a specification, for vendors whose
	// software must not run in this process: the program and its first arguments.
	Generator []string
	// Timeout bounds the command, DefaultCDITimeout when zero.
	Timeout time.Duration
	// HookPath is the program on the host that changes a container before it starts;
	// "" for the first that is found in the vendor's usual places.
	HookPath string
	// DisabledHooks and FeatureFlags are words of the vendor's software.
	DisabledHooks, FeatureFlags []string
}

// DefaultCDITimeout is the limit for generating a specification. It takes a second
// or two; a driver that initialises its GPUs for it may need several more.
const DefaultCDITimeout = 30 * time.Second

// DefaultCallTimeout is the limit for one call of a vendor's library. Calls
// take microseconds to some milliseconds; a driver that resets a card may hold
// one up for seconds.
const DefaultCallTimeout = 5 * time.Second

// Found is the outcome of one discovery.
type Found struct {
	// Driver is the version of the vendor's driver, "" when it does not tell.
	Driver string
	// Devices are those that can be described, healthy or not, in ascending
	// order of Index. Their IDs differ from each other. A device that is cut into
	// partitions is among them as well as its partitions are.
	Devices []accel.Device
	// CUDA is the highest CUDA version that the driver serves, such as "12.4";
	// "" for vendors without CUDA.
	CUDA string
	// Links are the connections between the Devices, in ascending order of A
	// and then B; pairs that are not listed have none that is known.
	Links []accel.Link
	// Problem is why none of the devices may be offered as the options say; nil when they
	// may.
	Problem error
	// Faults are the devices that the library counts but that cannot be used
	// at all, in ascending order of Index.
	Faults []Fault
	// Silent is true when the library stopped answering in the course of the
	// discovery: a call about one of the Faults hangs, and nothing has been answered
	// since. Links are not known then, and devices may be in Unasked.
	Silent bool
	// Unasked are the devices that the library counts and that could not be asked
	// for no fault of their own that is known, in ascending order of Index. Watch
	// shows them as they were, for a while.
	Unasked []Fault
}

// Fault is a device that the vendor's library counts but cannot describe, or
// describes in a way that cannot be true, such as an empty uuid, or about which a
// call of it hangs.
type Fault struct {
	// Index is the vendor's number of the device.
	Index int
	// ID is the device's identity: as the library gave it, or as an earlier
	// Discover of the same Backend listed it under this Index. It is "" when
	// neither is known.
	ID accel.DeviceID
	// Err says what is wrong, for people, and names the device.
	Err error
	// Cause is that of accel.Health; "" is accel.CauseLost.
	Cause string
}

// Edits is what one container needs to reach its devices. Which of the parts
// are put into the container is for the configuration to say: the environment
// alone (the vendor's container runtime does the rest), with the device nodes,
// or with the CDI names.
type Edits struct {
	// Env names the devices in the variables that the vendor's software reads.
	Env map[string]string
	// ReplicaEnv are the names of variables in which the vendor's software
	// expects the ids that kubelet gave the container, joined by commas: those
	// of the units, "<uuid>::<n>" for a time slice. A backend knows devices and
	// no units, so whoever answers kubelet sets them. It is sorted, and nil for
	// vendors without such a variable.
	ReplicaEnv []string
	// ByMounts names the devices by mounts, for vendors whose runtime can be
	// told so; nil for others. It takes the place of Env.
	ByMounts *ByMounts
	// DeviceNodes are the device nodes, in the order of the devices' Index.
	DeviceNodes []DeviceNode
	// CDIDevices are the CDI names, in the order of the devices' Index, one
	// per device. The CDI specification must define each of them with what a
	// Specifier says, or else with the DeviceNodes that Edits returns for that
	// device alone. It must not define Env, which names all devices of the
	// container in one variable.
	CDIDevices []CDIDevice
	// FormerCDIDevices are the names that earlier releases gave the devices, with
	// their DeviceNodes. Containers that have them keep them.
	FormerCDIDevices []CDIDevice
}

// ByMounts is a way to name devices that a container cannot forge: anybody may
// set a variable, but not mount a host's path.
type ByMounts struct {
	Env    map[string]string
	Mounts []Mount
}

// Mount is a file or folder of the host that a container gets.
type Mount struct {
	// Path is inside the container, HostPath as the container runtime sees it.
	Path, HostPath string
	ReadOnly       bool
}

// DeviceNode is a device file that a container gets.
type DeviceNode struct {
	// Path is the file inside the container.
	Path string
	// HostPath is the file as the container runtime sees it.
	HostPath string
	// Permissions are cgroup device permissions, a subset of "rwm".
	Permissions string
}

// CDIDevice is a device's name in the Container Device Interface.
type CDIDevice struct {
	// Kind is the CDI vendor and class: "enflame.com/gcu".
	Kind string
	// Name is the device's name within its kind.
	Name string
}

// String returns the fully qualified name: "enflame.com/gcu=GCU-U53000090104".
func (d CDIDevice) String() string { return d.Kind + "=" + d.Name }
