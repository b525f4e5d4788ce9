package nvidia

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/libloader"
)

// ignoredByDefault are the causes that do not count unless the configuration
// says so: errors of the application and not of the GPU, the list of NVIDIA's
// own device plugin.
var ignoredByDefault = []string{"xid-13", "xid-31", "xid-43", "xid-45", "xid-68", "xid-109"}

// Causes of ill health besides those that all vendors have and "xid-N".
const (
	// causeDoubleBit: an error in its memory that could not be corrected.
	causeDoubleBit = "ecc-double-bit"
	// causeRowRemap: a bad row of its memory could not be replaced by a spare
	// one, which is a reason to have the GPU replaced.
	causeRowRemap = "row-remap-failure"
)

// FatalByDefault are the causes after which a GPU is put into quarantine unless the
// configuration says otherwise: those for which NVIDIA's catalogue of XIDs says that
// the GPU must be reset, the machine restarted or the hardware examined, and what NVML
// says of its memory. docs/design/027-quarantine.md has each with the reason.
var FatalByDefault = []string{
	"xid-46", "xid-48", "xid-62", "xid-64", "xid-74", "xid-79", "xid-95", "xid-110", "xid-119", "xid-120", "xid-136",
	"xid-140", "xid-143", "xid-158", causeDoubleBit, causeRowRemap,
}

// Causes returns the causes that a device of the vendor can be unhealthy for, as
// patterns with "*".
func Causes() []string {
	return []string{"xid-*", causeDoubleBit, causeRowRemap, causeCapabilities, accel.CauseUnreachable, accel.CauseLost}
}

// subject is what an event is about.
type subject struct {
	device accel.DeviceID // a GPU
	// instance is wholeGPU unless it is about MIG devices.
	instance
}

// faults are what events told of, which is no state that could be asked for.
// The zero value is none.
type faults struct {
	of map[subject][]accel.Health
	// all are faults of a GPU that the library does not tell; it may be any.
	all []accel.Health
}

// maxFaults bounds how many causes are kept; a library that makes up more tells
// nothing.
const maxFaults = 64

// add returns f with faults of that subject; of each cause the first one stays.
func (f faults) add(on subject, faults ...accel.Health) faults {
	f.of = maps.Clone(f.of)
	if f.of == nil {
		f.of = map[subject][]accel.Health{}
	}
	f.of[on] = with(f.of[on], faults)
	return f
}

// addAll returns f with a fault of every GPU; of each cause the first one stays.
func (f faults) addAll(faults ...accel.Health) faults {
	f.all = with(f.all, faults)
	return f
}

func with(list, more []accel.Health) []accel.Health {
	list = slices.Clone(list)
	for _, h := range more {
		same := func(old accel.Health) bool { return old.Cause == h.Cause }
		if len(list) < maxFaults && !slices.ContainsFunc(list, same) {
			list = append(list, h)
		}
	}
	return list
}

// and returns the faults of f and those of later ones.
func (f faults) and(later faults) faults {
	for on, faults := range later.of {
		f = f.add(on, faults...)
	}
	return f.addAll(later.all...)
}

// about returns the faults of the subjects that are such, those of every GPU last.
func (f faults) about(is func(subject) bool) []accel.Health {
	var out []accel.Health
	// In one order, as of several equally grave ones the first is told.
	for _, on := range slices.SortedFunc(maps.Keys(f.of), func(a, b subject) int {
		return cmp.Or(cmp.Compare(b.gpu, a.gpu), cmp.Compare(b.compute, a.compute), cmp.Compare(a.device, b.device))
	}) {
		if is(on) {
			out = append(out, f.of[on]...)
		}
	}
	return append(out, f.all...)
}

// ofGPU returns the faults of a GPU. Those of its MIG devices are its own unless it is
// cut into them.
func (f faults) ofGPU(id accel.DeviceID, cut bool) []accel.Health {
	return f.about(func(on subject) bool { return on.device == id && (!cut || on.instance == wholeGPU) })
}

// ofMIG returns the faults of a MIG device of that GPU: those of the GPU and its own.
func (f faults) ofMIG(gpu accel.DeviceID, m *migDevice) []accel.Health {
	return f.about(func(on subject) bool {
		return on.device == m.id || on.device == gpu && on.covers(m.instance)
	})
}

// devices returns those that have faults of their own, sorted.
func (f faults) devices() []accel.DeviceID {
	var out []accel.DeviceID
	for on := range f.of {
		out = append(out, on.device)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// xidDoubleBit is the driver's number for causeDoubleBit.
const xidDoubleBit = "xid-48"

// doubleBit is the cause of an error in memory that could not be corrected. The
// library tells it as an event of its own, but a configuration may name it by
// its number.
func doubleBit(o backend.Options) string {
	if slices.Contains(slices.Concat(o.Ignore, o.Heed, o.NeverRecover), xidDoubleBit) {
		return xidDoubleBit
	}
	return causeDoubleBit
}

// unwell is ill health for a cause, or none when the cause does not count.
func unwell(o backend.Options, cause, format string, args ...any) accel.Health {
	if !o.Counts(cause, ignoredByDefault...) {
		return accel.Health{}
	}
	return accel.Health{Unhealthy: true, Cause: cause, Reason: fmt.Sprintf(format, args...)}
}

// ailments is what the library tells of a GPU's health when it is asked, and that its
// events cannot be heard. Its error is one that libloader.IsFatal.
func (b *Backend) ailments(ctx context.Context, lib *library, g *gpu) ([]accel.Health, error) {
	failed, err := queryGPU(ctx, b, lib, "nvmlDeviceGetRemappedRows", g.Index, func() (bool, nvml.Return) {
		_, _, _, failed, code := g.described.handle.GetRemappedRows()
		return failed, code
	})
	var all []accel.Health
	switch {
	case libloader.IsFatal(err):
		return nil, err
	case unsupported(err):
	case err != nil:
		all = append(all, unreachable(b.options, err))
	case failed:
		all = append(all, unwell(b.options, causeRowRemap, "a bad row of its memory could not be replaced, nvmlDeviceGetRemappedRows says"))
	}
	b.mu.Lock()
	unheard := b.unheard.why[g.ID]
	b.mu.Unlock()
	if unheard != nil {
		all = append(all, unreachable(b.options, unheard))
	}
	return all, nil
}

// gravest is the health that is told of several: what the library tells when it is
// asked, then what events told of, unless one of these is to keep the device away for
// good.
func gravest(o backend.Options, all []accel.Health) accel.Health {
	all = slices.DeleteFunc(slices.Clone(all), func(h accel.Health) bool { return !h.Unhealthy }) // what does not count
	if len(all) == 0 {
		return accel.Health{}
	}
	var causes []string
	for _, h := range all {
		causes = append(causes, h.Cause)
	}
	return all[o.Gravest(causes, FatalByDefault...)]
}

// unreachable is the health of a GPU about which a call failed.
func unreachable(o backend.Options, err error) accel.Health {
	if libloader.HasCode(err, nvml.ERROR_GPU_IS_LOST) {
		return unwell(o, accel.CauseLost, "%v", err)
	}
	return unwell(o, accel.CauseUnreachable, "%v", err)
}
