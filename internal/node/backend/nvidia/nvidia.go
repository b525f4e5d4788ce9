// Package nvidia reaches NVIDIA's GPUs through the vendor's management library
// (NVML), libnvidia-ml.so.1, which the binding go-nvml loads at run time.
//
// The library is the only source of facts, and it is not trusted: it may be
// missing, broken, slow or hung, contradict itself or appear hours after the
// daemon has started. Each call of it has a time limit, and a call that
// exceeds it makes further calls fail at once until it returns. Package nvmltable
// makes it possible to unload the library and to load another release.
//
// Devices are GPUs and, with the strategies single and mixed, their MIG devices. Those
// come and go while the daemon runs, and the library gives the numbers of a MIG device
// that is gone to another one, so that each discovery lists them again and nothing but
// the uuid is an identity.
package nvidia

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/devicelist"
	"github.com/divvy-gpu/divvy/internal/node/backend/libloader"
	"github.com/divvy-gpu/divvy/internal/node/backend/nvidia/memlimit"
	"github.com/divvy-gpu/divvy/internal/node/backend/sysfs"
)

// Vendor is this vendor's name in the configuration.
const Vendor = "nvidia"

var (
	_ backend.Notifier  = (*Backend)(nil)
	_ backend.Labeler   = (*Backend)(nil)
	_ backend.Specifier = (*Backend)(nil)
	_ backend.Meter     = (*Backend)(nil)
	_ backend.Limiter   = (*Backend)(nil)
)

// kind is what the vendor's devices are called. The kind of CDI devices is Divvy's
// own: that of NVIDIA's device plugin, which was Divvy's before, may be in a file
// that the plugin left behind, and a name that two files define is unresolvable.
// kubelet remembers the names that it gave containers, so it is chosen for good.
var kind = devicelist.Kind{
	Vendor: Vendor,
	Noun:   "GPU",
	File:   "dev/nvidia",
	Shared: []string{"dev/nvidiactl", "dev/nvidia-uvm", "dev/nvidia-uvm-tools", "dev/nvidia-modeset"},
	CDI:    "nvidia.divvy.dev/gpu",

	FormerCDI: "k8s.device-plugin.nvidia.com/gpu",
}

// Backend reaches the GPUs of this node. It is a backend.Backend, a
// backend.Notifier, a backend.Labeler, a backend.Specifier, a backend.Meter and a
// backend.Limiter.
type Backend struct {
	backend.Specifier
	backend.Meter
	backend.Limiter
	options backend.Options
	sysfs   sysfs.Root
	loader  *libloader.Loader[*library]
	table   *devicelist.Table
	// news has a token when devices were listed since somebody looked.
	news chan struct{}

	// during is for the discovery that runs.
	during struct {
		near     nearness
		profiles profileNumbers
	}

	// set hears the events of the GPUs in hears, and heard is the round that it
	// was made for, 0 for none. set is used on the events queue only.
	set   nvml.EventSet
	heard atomic.Uint64
	// worked is true once the library could be initialised. It is used on both
	// queues.
	worked bool

	mu sync.Mutex // guards what follows; not held during calls of the library
	// hears has the GPUs whose events set hears; nil without a set.
	hears map[nvml.Device]accel.DeviceID
	// traits are those of each GPU that was ever listed.
	traits map[accel.DeviceID]traits
	// places are those of the MIG devices that were listed last.
	places   map[accel.DeviceID]migPlace
	reported struct {
		// problem is that of the last listing.
		problem error
		// faults are those that events told of and no discovery did: since the
		// last one, and of GPUs that it could not list.
		faults faults
	}
	unheard unheard
	// born counts how often the library was initialised.
	born uint64
	// lost is true when the last wait for an event ended because a GPU is lost.
	lost bool
}

// unheard are the GPUs whose events cannot be heard although they have some, with the
// reason; at is when that was found out.
type unheard struct {
	why map[accel.DeviceID]error
	at  time.Time
}

// New returns a backend. It does not load the library; the first Discover
// does, and later ones do if that fails.
func New(o backend.Options) (*Backend, error) {
	o, err := o.Complete()
	if err != nil {
		return nil, fmt.Errorf("nvidia: %w", err)
	}
	b := &Backend{
		options: o,
		sysfs:   sysfs.Root(o.SysfsRoot),
		table:   devicelist.New(kind, o),
		news:    make(chan struct{}, 1),
		traits:  map[accel.DeviceID]traits{},
	}
	b.during.profiles.reset()
	b.loader = libloader.New(o.CallTimeout, libloader.Steps[*library]{
		Vendor:       Vendor,
		Observe:      o.Observe,
		Name:         "libnvidia-ml.so.1",
		InitCall:     "nvmlInit_v2",
		ShutdownCall: "nvmlShutdown",
		Load:         func(old *library) (*library, error) { return load(memlimit.Places(o), old) },
		Init:         b.initialise,
		Shutdown:     b.shutdown,
		Close:        unload,
		Started:      b.started,
		Pause:        o.Pause,
		Bound:        func() string { return b.sysfs.Bound("nvidia") },
	})
	b.Specifier = &specifier{options: o, devices: b.table.Last, library: b.loader.Current}
	b.Meter = &meter{backend: b, recent: map[accel.DeviceID]utilization{}}
	b.Limiter = limiter{b}
	return b, nil
}

// Vendor returns "nvidia".
func (b *Backend) Vendor() string { return Vendor }

// initialise initialises the library. Both queues are the caller's: the binding
// writes to its own variables here, so nothing else may run.
func (b *Backend) initialise(lib *library) error {
	err := lib.check("nvmlInit_v2", lib.init())
	if libloader.HasCode(err, nvml.ERROR_LIB_RM_VERSION_MISMATCH) && b.worked {
		return &backend.RestartNeededError{
			Reason: fmt.Sprintf("%s no longer goes with the driver in the kernel, which was replaced: %v", lib.Path, err),
		}
	}
	b.worked = b.worked || err == nil
	return err
}

// shutdown shuts the library down. Both queues are the caller's.
func (b *Backend) shutdown(lib *library) {
	b.forgetSet(lib)
	_ = lib.shutdown() // it refuses when the driver is gone
}

// started drops what is true until the library is initialised anew.
func (b *Backend) started() {
	b.during.near = nearness{} // GPUs may sit in other slots since
	b.during.profiles.reset()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.born++
	b.unheard.why = nil // of before the driver was loaded
}

// Close shuts the library down and unloads it, unless another backend of the process uses
// it. When a call does not return, Close leaves the library as it is and says so.
func (b *Backend) Close() error { return b.loader.Close() }
