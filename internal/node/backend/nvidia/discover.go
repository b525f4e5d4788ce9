package nvidia

import (
	"cmp"
	"context"
	"fmt"
	"math/bits"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/go-logr/logr"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/devicelist"
	"github.com/divvy-gpu/divvy/internal/node/backend/libloader"
	"github.com/divvy-gpu/divvy/internal/node/backend/sysfs"
)

// maxGPUs is more than a machine can have; a count above it is none.
const maxGPUs = 1024

// idMarks are the characters besides letters and digits in a uuid.
const idMarks = "-_."

// Discover lists the GPUs.
func (b *Backend) Discover(ctx context.Context) (backend.Found, error) {
	return b.loader.Discover(ctx, func() (backend.Found, error) {
		b.mu.Lock()
		told := b.reported.faults
		b.reported.faults = faults{}
		b.mu.Unlock()
		l, err := libloader.List(ctx, b.loader, func(ctx context.Context, lib *library) (devicelist.Listing[*gpu], error) {
			return b.list(ctx, lib, told)
		})
		if err != nil {
			b.mu.Lock()
			b.reported.faults = told.and(b.reported.faults) // nobody has heard of them
			b.mu.Unlock()
			return backend.Found{}, err
		}
		return b.record(ctx, l, told), nil
	})
}

// gpu is a GPU that the library describes.
type gpu struct {
	devicelist.Device
	described description
	// mig are the MIG devices of a GPU in MIG mode, with any strategy but none.
	mig []migDevice
	// part is what this entry is instead of a GPU, nil for a GPU.
	part *migDevice
}

// description is what the library says of a GPU, and backend.Found does not have.
type description struct {
	handle nvml.Device
	traits traits
	// ailments are those of its health, besides events.
	ailments []accel.Health
}

// list asks the library about all GPUs. Its error is one of the library as a
// whole; what is wrong with one GPU is in the listing.
func (b *Backend) list(ctx context.Context, lib *library, told faults) (l devicelist.Listing[*gpu], err error) {
	count, err := query(ctx, b, lib, "nvmlDeviceGetCount_v2", lib.api.DeviceGetCount)
	if err != nil {
		return l, err
	}
	if count > maxGPUs {
		return l, fmt.Errorf("nvmlDeviceGetCount_v2 says %d GPUs, more than the %d that can be", count, maxGPUs)
	}
	driver, cuda, err := b.versions(ctx, lib)
	if err != nil {
		return l, err
	}
	l, err = devicelist.List(kind, count, b.loader.Calls.Hung, func(index int) (*gpu, error) {
		g, err := b.describe(ctx, lib, index, told)
		if err == nil && slices.Contains(displayOnly, g.Model) {
			err = devicelist.ErrSkip
		}
		return g, err
	})
	if err != nil {
		return l, err
	}
	l.Driver, l.CUDA, l.Machine = driver, cuda, b.sysfs.Machine()
	if !l.Silent {
		if l.Links, err = b.links(ctx, lib, l.Devices); err != nil {
			return l, err
		}
	}
	addMIG(b, &l, told)
	return l, nil
}

// displayOnly are the names of the card of NVIDIA's workstations that drives the
// screen and is not for computing.
var displayOnly = []string{"NVIDIA DGX Display", "DGX Display"}

// versions asks for the versions of the driver and of CUDA, such as "12.4". Its
// error is one that libloader.IsFatal; what the library does not tell is "".
func (b *Backend) versions(ctx context.Context, lib *library) (driver, cuda string, err error) {
	driver, err = query(ctx, b, lib, "nvmlSystemGetDriverVersion", lib.api.SystemGetDriverVersion)
	switch {
	case libloader.IsFatal(err):
		return "", "", err
	case err != nil:
		driver = ""
	}
	number, err := query(ctx, b, lib, "nvmlSystemGetCudaDriverVersion_v2", lib.api.SystemGetCudaDriverVersion_v2)
	switch {
	case libloader.IsFatal(err):
		return "", "", err
	case err == nil && number > 0:
		cuda = fmt.Sprintf("%d.%d", number/1000, number%1000/10)
	}
	return clean(driver), cuda, nil
}

// clean makes a text of the library fit to be shown.
func clean(text string) string {
	return strings.ToValidUTF8(strings.TrimSpace(text), "?")
}

// describe asks the library about one GPU. With an error, the ID is set if the
// library gave one.
func (b *Backend) describe(ctx context.Context, lib *library, index int, told faults) (*gpu, error) {
	g := &gpu{Device: devicelist.Device{Device: accel.Device{Index: index, NUMANode: accel.NoNUMA}}}
	handle, err := queryGPU(ctx, b, lib, "nvmlDeviceGetHandleByIndex_v2", index, func() (nvml.Device, nvml.Return) {
		return lib.api.DeviceGetHandleByIndex(index)
	})
	if err != nil {
		return g, err
	}
	g.described.handle = handle
	uuid, err := queryGPU(ctx, b, lib, "nvmlDeviceGetUUID", index, handle.GetUUID)
	if err != nil {
		return g, err
	}
	if err := devicelist.CheckUUID(uuid, idMarks); err != nil {
		return g, fmt.Errorf("GPU %d: %w", index, err)
	}
	g.ID = accel.DeviceID(uuid)
	name, err := queryGPU(ctx, b, lib, "nvmlDeviceGetName", index, handle.GetName)
	if err != nil && !unsupported(err) {
		return g, err
	}
	g.Model = clean(name)
	// Without its number no container could get the GPU, and a made-up one
	// might be another's.
	if g.Minor, err = queryGPU(ctx, b, lib, "nvmlDeviceGetMinorNumber", index, handle.GetMinorNumber); err != nil {
		return g, err
	}
	if g.described.traits, err = b.askTraits(ctx, lib, g); err != nil {
		return g, err
	}
	g.Partitioned = g.described.traits.partitioned
	memory, err := queryGPU(ctx, b, lib, "nvmlDeviceGetMemoryInfo", index, handle.GetMemoryInfo)
	switch {
	case unsupported(err): // the GPU shares the CPU's memory; it has none to be shared by, but is good as a whole
	case err != nil:
		return g, monitorHint(g.Partitioned, err)
	default:
		if g.MemoryBytes, err = devicelist.Memory("nvmlDeviceGetMemoryInfo", memory.Total); err != nil {
			return g, fmt.Errorf("GPU %d: %w", index, err)
		}
	}
	if err := b.locate(ctx, lib, g); err != nil {
		return g, err
	}
	g.described.traits.class = b.sysfs.OfDevice(g.PCI, "class")
	if g.described.ailments, err = b.ailments(ctx, lib, g); err != nil {
		return g, err
	}
	cut := g.Partitioned && b.options.MIG != backend.MIGNone
	if cut {
		if g.mig, err = migDevices(ctx, b, lib, g); err != nil {
			return g, monitorHint(g.Partitioned, err)
		}
	}
	g.Health = gravest(b.options, slices.Concat(g.described.ailments, told.ofGPU(g.ID, cut)))
	return g, nil
}

// locate asks where the GPU is: its PCI address and NUMA node.
func (b *Backend) locate(ctx context.Context, lib *library, g *gpu) error {
	pci, err := queryGPU(ctx, b, lib, "nvmlDeviceGetPciInfo_v3", g.Index, g.described.handle.GetPciInfo)
	switch {
	case unsupported(err): // the GPU works without
	case err != nil:
		return err
	default:
		g.PCI = address(pci)
	}
	var known bool
	if g.NUMANode, known = b.sysfs.NUMANode(g.PCI); known {
		return nil // also that there is none: NVML has node 0 then
	}
	// In a container that does not see the kernel's files, the library knows.
	nodes, err := queryGPU(ctx, b, lib, "nvmlDeviceGetMemoryAffinity", g.Index, func() ([]uint, nvml.Return) {
		return g.described.handle.GetMemoryAffinity(maxNUMANodes, nvml.AFFINITY_SCOPE_NODE)
	})
	if libloader.IsFatal(err) {
		return err
	}
	if node, ok := onlyBit(nodes); ok && err == nil {
		g.NUMANode = node
	}
	return nil
}

// maxNUMANodes is how many NUMA nodes the kernel can count.
const maxNUMANodes = 1024

// onlyBit returns the number of the bit that is set, when there is just one.
func onlyBit(words []uint) (bit int, ok bool) {
	for i, w := range words {
		switch n := bits.OnesCount(w); {
		case n == 0:
		case n > 1 || ok:
			return 0, false
		default:
			bit, ok = i*bits.UintSize+bits.TrailingZeros(w), true
		}
	}
	return bit, ok
}

// address returns the kernel's spelling of an address that NVML gives, "" when
// it gives none. The field is filled up with NULs, and its domain has eight
// digits.
func address(pci nvml.PciInfo) string {
	for _, field := range [][]uint8{chars(pci.BusId[:]), chars(pci.BusIdLegacy[:])} {
		if a := sysfs.Address(string(field)); a != "" {
			return a
		}
	}
	return ""
}

// chars are C's characters as bytes.
func chars[T ~int8 | ~uint8](field []T) []uint8 {
	out := make([]uint8, len(field))
	for i, c := range field {
		out[i] = uint8(c)
	}
	return out
}

// blame adds what events told of GPUs that cannot be described now: a GPU often has an
// error and is lost at once, and the error is what says whether it may come back.
func blame(o backend.Options, table *devicelist.Table, found *backend.Found, told faults, places map[accel.DeviceID]migPlace) {
	for _, id := range told.devices() {
		if slices.ContainsFunc(found.Devices, func(d accel.Device) bool { return d.ID == id }) {
			continue
		}
		h := gravest(o, told.ofGPU(id, false))
		named := false
		for _, faults := range [][]backend.Fault{found.Faults, found.Unasked} {
			for i := range faults {
				f := &faults[i]
				if at, mig := places[f.ID]; f.ID == id || mig && at.gpu == id {
					f.Err, f.Cause, named = fmt.Errorf("%s; %w", h.Reason, f.Err), h.Cause, true
				}
			}
		}
		if index, known := table.Index(id); !named && known {
			found.Faults = append(found.Faults, backend.Fault{
				Index: index, ID: id, Err: fmt.Errorf("%s; the library does not list the GPU any more", h.Reason), Cause: h.Cause,
			})
		}
	}
	slices.SortFunc(found.Faults, func(a, b backend.Fault) int { return cmp.Compare(a.Index, b.Index) })
}

// record keeps what Edits, Labels, AwaitChange and later discoveries need of a
// listing, and returns it as the outcome of a discovery.
func (b *Backend) record(ctx context.Context, l devicelist.Listing[*gpu], told faults) backend.Found {
	listed := map[accel.DeviceID]bool{}
	b.mu.Lock()
	for _, g := range l.Devices {
		listed[g.ID] = true
		if g.Partitioned && !b.traits[g.ID].partitioned {
			logr.FromContextOrDiscard(ctx).Info("A GPU is in MIG mode",
				"vendor", Vendor, "device", g.ID, "migStrategy", b.options.MIG, "migDevices", len(g.mig))
		}
		if g.part != nil {
			g.described.traits.attributes = g.part.attributes
		}
		b.traits[g.ID] = g.described.traits
	}
	for on, h := range told.of {
		if !listed[on.device] || unheardByMIG(l.Devices, on) {
			// A GPU often has an error and is lost at once. It is told of when
			// the GPU is back, for those whom the error keeps from trusting it.
			b.reported.faults = b.reported.faults.add(on, h...)
		}
	}
	b.places = placesOf(&l, b.places)
	places := b.places
	b.reported.problem = l.Problem
	b.mu.Unlock()
	found := devicelist.Record(b.table, l)
	blame(b.options, b.table, &found, told, places)
	select {
	case b.news <- struct{}{}:
	default: // somebody will look
	}
	return found
}
