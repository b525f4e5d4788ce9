package nvidia

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/go-logr/logr"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/backend"
	"github.com/divvy-gpu/divvy/internal/backend/sysfs"
)

// maxGPUs is more than a machine can have; a count above it is none.
const maxGPUs = 1024

// Discover lists the GPUs.
func (b *Backend) Discover(ctx context.Context) (backend.Found, error) {
	select {
	case b.turn <- struct{}{}:
		defer func() { <-b.turn }()
	case <-ctx.Done():
		return backend.Found{}, fmt.Errorf("discover %s devices: %w", Vendor, ctx.Err())
	}
	b.mu.Lock()
	told := b.told
	b.told = faults{}
	b.mu.Unlock()
	found, err := b.discover(ctx, told)
	if err == nil {
		return found, nil
	}
	b.mu.Lock()
	b.told = told.and(b.told) // nobody has heard of them
	b.mu.Unlock()
	switch {
	case errors.Is(err, backend.ErrClosed):
		return backend.Found{}, backend.ErrClosed
	case ctx.Err() != nil:
		return backend.Found{}, fmt.Errorf("discover %s devices: %w", Vendor, ctx.Err())
	}
	return backend.Found{}, &backend.UnavailableError{Vendor: Vendor, Err: err}
}

// discover lists the GPUs, if need be with the library initialised anew: it
// counts its GPUs when it is initialised, and a driver that was loaded again
// while the library was in use serves it no more.
func (b *Backend) discover(ctx context.Context, told faults) (backend.Found, error) {
	lib, fresh, err := b.ready(ctx)
	if err != nil {
		return backend.Found{}, err
	}
	again := b.plug.Changed(b.sysfs.Bound("nvidia"), fresh)
	var l listing
	if !again {
		l, err = b.list(ctx, lib, told)
		again = !fresh && b.wantsInit(l, err)
	}
	if again {
		if err := b.end(ctx); err != nil {
			return backend.Found{}, err
		}
		if lib, _, err = b.ready(ctx); err != nil {
			return backend.Found{}, err
		}
		l, err = b.list(ctx, lib, told)
	}
	if err != nil {
		return backend.Found{}, err
	}
	return b.record(ctx, l, told), nil
}

// wantsInit reports whether the outcome of list is one that another
// initialisation may mend.
func (b *Backend) wantsInit(l listing, err error) bool {
	var code *codeError
	if err != nil {
		return errors.As(err, &code)
	}
	none := len(l.gpus) == 0 && len(l.faults) > 0
	for _, f := range l.faults {
		none = none && errors.As(f.Err, &code)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	again := none && !b.revived
	b.revived = none
	return again
}

// listing is what the library says about all GPUs.
type listing struct {
	driver, cuda string
	machine      string
	gpus         []*gpu
	links        []accel.Link
	faults       []backend.Fault
}

// gpu is a GPU that the library describes.
type gpu struct {
	accel.Device
	handle nvml.Device
	minor  int
	traits traits
}

// list asks the library about all GPUs. Its error is one of the library as a
// whole; what is wrong with one GPU is in the listing.
func (b *Backend) list(ctx context.Context, lib *library, told faults) (listing, error) {
	count, err := query(ctx, b, b.calls, lib, "nvmlDeviceGetCount_v2", lib.api.DeviceGetCount)
	if err != nil {
		return listing{}, err
	}
	if count > maxGPUs {
		return listing{}, fmt.Errorf("nvmlDeviceGetCount_v2 says %d GPUs, more than the %d that can be", count, maxGPUs)
	}
	l := listing{machine: b.sysfs.Machine()}
	if l.driver, l.cuda, err = b.versions(ctx, lib); err != nil {
		return listing{}, err
	}
	for index := range count {
		g, err := b.describe(ctx, lib, index, told)
		switch {
		case isFatal(err):
			return listing{}, err
		case err != nil:
			l.faults = append(l.faults, backend.Fault{Index: index, ID: g.ID, Err: err})
		case slices.Contains(displayOnly, g.Model):
		default:
			l.gpus = append(l.gpus, g)
		}
	}
	l.rejectDuplicates("uuid", func(g *gpu) any { return g.ID })
	l.rejectDuplicates("device file number", func(g *gpu) any { return g.minor })
	slices.SortFunc(l.faults, func(a, b backend.Fault) int { return a.Index - b.Index })
	l.links, err = b.links(ctx, lib, l.gpus)
	return l, err
}

// displayOnly are the names of the card of NVIDIA's workstations that drives the
// screen and is not for computing.
var displayOnly = []string{"NVIDIA DGX Display", "DGX Display"}

// versions asks for the versions of the driver and of CUDA, such as "12.4". Its
// error is one that isFatal; what the library does not tell is "".
func (b *Backend) versions(ctx context.Context, lib *library) (driver, cuda string, err error) {
	driver, err = query(ctx, b, b.calls, lib, "nvmlSystemGetDriverVersion", lib.api.SystemGetDriverVersion)
	switch {
	case isFatal(err):
		return "", "", err
	case err != nil:
		driver = ""
	}
	number, err := query(ctx, b, b.calls, lib, "nvmlSystemGetCudaDriverVersion_v2", lib.api.SystemGetCudaDriverVersion_v2)
	switch {
	case isFatal(err):
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
	g := &gpu{Device: accel.Device{Index: index, NUMANode: accel.NoNUMA}}
	handle, err := queryGPU(ctx, b, b.calls, lib, "nvmlDeviceGetHandleByIndex_v2", index, func() (nvml.Device, nvml.Return) {
		return lib.api.DeviceGetHandleByIndex(index)
	})
	if err != nil {
		return g, err
	}
	g.handle = handle
	uuid, err := queryGPU(ctx, b, b.calls, lib, "nvmlDeviceGetUUID", index, handle.GetUUID)
	if err != nil {
		return g, err
	}
	if g.ID, err = deviceID(uuid); err != nil {
		return g, fmt.Errorf("GPU %d: %w", index, err)
	}
	name, err := queryGPU(ctx, b, b.calls, lib, "nvmlDeviceGetName", index, handle.GetName)
	if err != nil && !unsupported(err) {
		return g, err
	}
	g.Model = clean(name)
	// Without its number no container could get the GPU, and a made-up one
	// might be another's.
	if g.minor, err = queryGPU(ctx, b, b.calls, lib, "nvmlDeviceGetMinorNumber", index, handle.GetMinorNumber); err != nil {
		return g, err
	}
	memory, err := queryGPU(ctx, b, b.calls, lib, "nvmlDeviceGetMemoryInfo", index, handle.GetMemoryInfo)
	switch {
	case err != nil:
		return g, err
	case memory.Total == 0:
		return g, fmt.Errorf("GPU %d: it has no memory, nvmlDeviceGetMemoryInfo says 0 bytes", index)
	case memory.Total > math.MaxInt64:
		return g, fmt.Errorf("GPU %d: nvmlDeviceGetMemoryInfo says %d bytes, which cannot be", index, memory.Total)
	}
	g.MemoryBytes = int64(memory.Total)
	if err := b.locate(ctx, lib, g); err != nil {
		return g, err
	}
	if g.traits, err = b.traits(ctx, lib, g); err != nil {
		return g, err
	}
	g.Health, err = b.health(ctx, lib, g, told)
	return g, err
}

// locate asks where the GPU is: its PCI address and NUMA node.
func (b *Backend) locate(ctx context.Context, lib *library, g *gpu) error {
	pci, err := queryGPU(ctx, b, b.calls, lib, "nvmlDeviceGetPciInfo_v3", g.Index, g.handle.GetPciInfo)
	switch {
	case unsupported(err): // the GPU works without
	case err != nil:
		return err
	default:
		g.PCI = address(pci)
	}
	if g.NUMANode = b.sysfs.NUMANode(g.PCI); g.NUMANode != accel.NoNUMA {
		return nil
	}
	// In a container that does not see the kernel's files, the library knows.
	nodes, err := queryGPU(ctx, b, b.calls, lib, "nvmlDeviceGetMemoryAffinity", g.Index, func() ([]uint, nvml.Return) {
		return g.handle.GetMemoryAffinity(maxNUMANodes, nvml.AFFINITY_SCOPE_NODE)
	})
	if isFatal(err) {
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

// deviceID makes an ID of the library's uuid. An ID becomes part of CDI names,
// annotations and logs, so it consists of the characters that are allowed in
// all of them.
func deviceID(uuid string) (accel.DeviceID, error) {
	if uuid == "" {
		return "", errors.New("its uuid is empty")
	}
	bad := strings.ContainsFunc(uuid, func(c rune) bool {
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		return !letter && c != '-' && c != '_' && c != '.'
	})
	if bad {
		return "", fmt.Errorf("its uuid %q has characters other than letters, digits and -_. in it", uuid)
	}
	return accel.DeviceID(uuid), nil
}

// rejectDuplicates makes faults of all GPUs that share what must be a GPU's
// own: which of them is the right one cannot be told, and to guess would swap
// one user's GPU for another's.
func (l *listing) rejectDuplicates(what string, property func(*gpu) any) {
	sharing := map[any][]int{}
	for _, g := range l.gpus {
		sharing[property(g)] = append(sharing[property(g)], g.Index)
	}
	l.gpus = slices.DeleteFunc(l.gpus, func(g *gpu) bool {
		indices := sharing[property(g)]
		if len(indices) == 1 {
			return false
		}
		l.faults = append(l.faults, backend.Fault{
			Index: g.Index,
			ID:    g.ID,
			Err:   fmt.Errorf("GPU %d: GPUs %v have the same %s %v", g.Index, indices, what, property(g)),
		})
		return true
	})
}

// record keeps what Edits, Labels, AwaitChange and later discoveries need of a
// listing, and returns it as the outcome of a discovery.
func (b *Backend) record(ctx context.Context, l listing, told faults) backend.Found {
	found := backend.Found{Driver: l.driver, CUDA: l.cuda, Links: l.links, Faults: l.faults}
	f := facts{driver: l.driver, cuda: l.cuda, machine: l.machine, traits: map[accel.DeviceID]traits{}}
	seenBefore := b.facts.traits
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, g := range l.gpus {
		found.Devices = append(found.Devices, g.Device)
		f.places = append(f.places, place{g.Index, g.ID})
		f.traits[g.ID] = g.traits
		b.gpus[g.ID] = known{index: g.Index, minor: g.minor}
		b.at[g.Index], b.owner[g.minor] = g.ID, g.ID
		if g.traits.partitioned && !seenBefore[g.ID].partitioned {
			logr.FromContextOrDiscard(ctx).Info("A GPU is in MIG mode; it is offered whole, its partitions are not",
				"vendor", Vendor, "device", g.ID)
		}
	}
	f.devices = found.Devices
	for id, h := range told.of {
		if _, listed := f.traits[id]; !listed {
			// A GPU often has an error and is lost at once. It is told of when
			// the GPU is back, for those whom the error keeps from trusting it.
			b.told = b.told.add(id, h...)
		}
	}
	for i := range found.Faults {
		fault := &found.Faults[i]
		last := b.at[fault.Index]
		if _, listed := f.traits[last]; fault.ID == "" && !listed {
			fault.ID = last
		}
	}
	if b.round == 0 || !slices.Equal(f.places, b.facts.places) {
		b.round++
	}
	b.facts = f
	select {
	case b.news <- struct{}{}:
	default: // somebody will look
	}
	return found
}

// place is a GPU under its index.
type place struct {
	index int
	id    accel.DeviceID
}
