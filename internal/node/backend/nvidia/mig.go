package nvidia

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/devicelist"
	"github.com/divvy-gpu/divvy/internal/node/backend/libloader"
)

// causeCapabilities: the device files that a container needs of a MIG device do not
// exist, as after a change of the MIG devices until nvidia-smi or nvidia-modprobe has
// run.
const causeCapabilities = "mig-caps-missing"

// instance is where a MIG device is on its GPU. The library uses the numbers again
// when an instance is gone.
type instance struct {
	// gpu is the number of the GPU instance, compute that of the compute instance in it.
	gpu, compute uint32
}

// anyInstance stands for every number of an instance in an event.
const anyInstance = math.MaxUint32

// wholeGPU is what an event is about that is about no instance.
var wholeGPU = instance{anyInstance, anyInstance}

// covers reports whether an event about i is about the MIG device at other.
func (i instance) covers(other instance) bool {
	return (i.gpu == anyInstance || i.gpu == other.gpu) && (i.compute == anyInstance || i.compute == other.compute)
}

// migDevice is a MIG device that the library describes.
type migDevice struct {
	// number is its number on its GPU.
	number int
	id     accel.DeviceID
	instance
	profile    migProfile
	attributes nvml.DeviceAttributes
	// err is why it cannot be offered.
	err error
}

// migPlace is where a MIG device was when it was listed last.
type migPlace struct {
	gpu accel.DeviceID
	// index is that of accel.Device.
	index int
	instance
}

// profileNumbers are the numbers of profiles by their ids. Both are the same for as
// long as the library is initialised.
type profileNumbers struct {
	gpu     map[profileKey]int
	compute map[profileKey]int
}

func (n *profileNumbers) reset() { *n = profileNumbers{map[profileKey]int{}, map[profileKey]int{}} }

// profileKey names a profile. gpuInstance is the id of the GPU instance's profile
// around a profile of compute instances.
type profileKey struct {
	gpu             accel.DeviceID
	gpuInstance, id uint32
}

// migDevices asks for the MIG devices of a GPU in MIG mode. What is wrong with one of
// them is in its err; the error is about the GPU.
func migDevices(ctx context.Context, b *Backend, lib *library, g *gpu) ([]migDevice, error) {
	count, err := queryGPU(ctx, b, lib, "nvmlDeviceGetMaxMigDeviceCount", g.Index, g.described.handle.GetMaxMigDeviceCount)
	if err != nil {
		return nil, err
	}
	if count > accel.MaxPartitions {
		return nil, fmt.Errorf("nvmlDeviceGetMaxMigDeviceCount(%d) says %d MIG devices, more than the %d that can be", g.Index, count,
			accel.MaxPartitions)
	}
	var out []migDevice
	for number := range count {
		m := migDevice{number: number}
		handle, err := queryGPU(ctx, b, lib, "nvmlDeviceGetMigDeviceHandleByIndex", g.Index, func() (nvml.Device, nvml.Return) {
			return g.described.handle.GetMigDeviceHandleByIndex(number)
		})
		if err == nil {
			err = describeMIG(ctx, b, lib, g, handle, &m)
		}
		switch {
		case libloader.IsFatal(err):
			return nil, err
		case libloader.HasCode(err, nvml.ERROR_NOT_FOUND, nvml.ERROR_INVALID_ARGUMENT):
			continue // there is none of this number, or not any more
		case err != nil:
			m.err = fmt.Errorf("MIG device %s: %w", accel.IndexText(accel.PartitionIndex(g.Index, number)), err)
		}
		out = append(out, m)
	}
	return out, nil
}

// describeMIG asks the library about one MIG device. With an error, the id is set if
// the library gave one.
func describeMIG(ctx context.Context, b *Backend, lib *library, g *gpu, handle nvml.Device, m *migDevice) error {
	uuid, err := queryGPU(ctx, b, lib, "nvmlDeviceGetUUID", g.Index, handle.GetUUID)
	if err != nil {
		return err
	}
	if strings.Contains(uuid, "/") {
		return fmt.Errorf("its uuid %q is in the form of drivers before R470; update the driver", uuid)
	}
	if err := devicelist.CheckUUID(uuid, idMarks); err != nil {
		return err
	}
	m.id = accel.DeviceID(uuid)
	gpuInstance, err := queryGPU(ctx, b, lib, "nvmlDeviceGetGpuInstanceId", g.Index, handle.GetGpuInstanceId)
	if err != nil {
		return err
	}
	computeInstance, err := queryGPU(ctx, b, lib, "nvmlDeviceGetComputeInstanceId", g.Index, handle.GetComputeInstanceId)
	if err != nil {
		return err
	}
	m.instance = instance{uint32(gpuInstance), uint32(computeInstance)} //nolint:gosec // the binding widens what has 32 bits
	if m.attributes, err = queryGPU(ctx, b, lib, "nvmlDeviceGetAttributes_v2", g.Index, handle.GetAttributes); err != nil {
		return err
	}
	if _, err := devicelist.Memory("nvmlDeviceGetAttributes_v2", m.attributes.MemorySizeMB<<20); err != nil {
		return err
	}
	ofGPU, ofCompute, err := migProfiles(ctx, b, lib, g, m.instance)
	if err != nil {
		return err
	}
	m.profile, err = profileOf(ofGPU, ofCompute, m.attributes.MemorySizeMB, g.MemoryBytes)
	return err
}

// migProfiles asks for the numbers of the profiles of a GPU instance and of a compute
// instance in it.
func migProfiles(ctx context.Context, b *Backend, lib *library, g *gpu, of instance) (ofGPU, ofCompute int, err error) {
	gpuInstance, err := queryGPU(ctx, b, lib, "nvmlDeviceGetGpuInstanceById", g.Index, func() (nvml.GpuInstance, nvml.Return) {
		return g.described.handle.GetGpuInstanceById(int(of.gpu))
	})
	if err != nil {
		return 0, 0, err
	}
	gpuInfo, err := queryGPU(ctx, b, lib, "nvmlGpuInstanceGetInfo", g.Index, gpuInstance.GetInfo)
	if err != nil {
		return 0, 0, err
	}
	computeInstance, err := queryGPU(ctx, b, lib, "nvmlGpuInstanceGetComputeInstanceById", g.Index,
		func() (nvml.ComputeInstance, nvml.Return) { return gpuInstance.GetComputeInstanceById(int(of.compute)) })
	if err != nil {
		return 0, 0, err
	}
	computeInfo, err := queryGPU(ctx, b, lib, "nvmlComputeInstanceGetInfo_v2", g.Index, computeInstance.GetInfo)
	if err != nil {
		return 0, 0, err
	}
	ofGPU, err = numberOf(b.during.profiles.gpu, profileKey{gpu: g.ID, id: gpuInfo.ProfileId}, nvml.GPU_INSTANCE_PROFILE_COUNT,
		func(number int) (uint32, error) {
			info, err := queryGPU(ctx, b, lib, "nvmlDeviceGetGpuInstanceProfileInfo", g.Index,
				func() (nvml.GpuInstanceProfileInfo, nvml.Return) {
					return g.described.handle.GetGpuInstanceProfileInfo(number)
				})
			return info.Id, err
		})
	if err != nil {
		return 0, 0, fmt.Errorf("profile of its GPU instance: %w", err)
	}
	ofCompute, err = numberOf(b.during.profiles.compute, profileKey{g.ID, gpuInfo.ProfileId, computeInfo.ProfileId},
		nvml.COMPUTE_INSTANCE_PROFILE_COUNT, func(number int) (uint32, error) {
			info, err := queryGPU(ctx, b, lib, "nvmlGpuInstanceGetComputeInstanceProfileInfo", g.Index,
				func() (nvml.ComputeInstanceProfileInfo, nvml.Return) {
					return gpuInstance.GetComputeInstanceProfileInfo(number, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
				})
			return info.Id, err
		})
	if err != nil {
		return 0, 0, fmt.Errorf("profile of its compute instance: %w", err)
	}
	return ofGPU, ofCompute, nil
}

// numberOf returns the number of a profile by its id. Numbers that the GPU does not
// have are not supported, or no argument, depending on the driver.
func numberOf(known map[profileKey]int, key profileKey, count int, id func(number int) (uint32, error)) (int, error) {
	if number, ok := known[key]; ok {
		return number, nil
	}
	for number := range count {
		got, err := id(number)
		switch {
		case libloader.HasCode(err, nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_INVALID_ARGUMENT):
		case err != nil:
			return 0, err
		case got == key.id:
			known[key] = number
			return number, nil
		}
	}
	return 0, fmt.Errorf("the GPU has none of the id %d", key.id)
}

// addMIG adds the MIG devices of the listed GPUs to a listing, and to its faults and to
// what was not asked the MIG devices that GPUs there had when they were listed last.
func addMIG(b *Backend, l *devicelist.Listing[*gpu], told faults) {
	strategy := b.options.MIG
	if strategy == backend.MIGNone {
		return
	}
	var minors capabilities
	if slices.ContainsFunc(l.Devices, func(g *gpu) bool { return len(g.mig) > 0 }) {
		minors = parseCapabilities(readProc(b.options, capabilitiesFile))
	}
	b.mu.Lock()
	before := b.reported.problem
	b.mu.Unlock()
	if l.Problem = uniform(strategy, l.Devices); l.Problem == nil && len(l.Faults)+len(l.Unasked) > 0 {
		l.Problem = before // a GPU that cannot be described now may be the one that differs
	}
	seen := map[accel.DeviceID]int{}
	for _, g := range l.Devices {
		for _, m := range g.mig {
			seen[m.id]++
		}
	}
	for _, g := range slices.Clone(l.Devices) {
		for i := range g.mig {
			m := &g.mig[i]
			if m.err == nil && seen[m.id] > 1 {
				m.err = fmt.Errorf("several MIG devices have its uuid %s", m.id)
			}
			fault := backend.Fault{Index: accel.PartitionIndex(g.Index, m.number), ID: m.id, Err: m.err}
			if fault.Err == nil && strategy == backend.MIGMixed && !m.profile.whole() {
				fault.Err, fault.Cause = partOfInstance(fault.Index, m.profile), accel.CauseNotOffered
			}
			if fault.Err != nil {
				l.Faults = append(l.Faults, fault)
			} else {
				l.Devices = append(l.Devices, partition(b, g, m, minors, told))
			}
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	l.Faults, l.Unasked = withPlaces(l.Faults, b.places), withPlaces(l.Unasked, b.places)
}

// partition is a MIG device as the entry of a listing.
func partition(b *Backend, g *gpu, m *migDevice, minors capabilities, told faults) *gpu {
	out := &gpu{described: description{traits: g.described.traits}, part: m}
	out.Device = devicelist.Device{Device: g.Device.Device, Minor: g.Minor, Owner: g.ID}
	out.Index, out.ID = accel.PartitionIndex(g.Index, m.number), m.id
	out.Parent, out.Profile, out.Partitioned = g.ID, m.profile.String(), false
	out.MemoryBytes = int64(m.attributes.MemorySizeMB << 20) //nolint:gosec // checked where it was asked for
	var missing []string
	out.Nodes, missing = minors.nodes(g.Minor, m.instance)
	for i, one := range missing {
		missing[i] = fmt.Sprintf("/proc/%s has no %s", capabilitiesFile, one)
	}
	for _, node := range out.Nodes {
		if !b.table.Exists(node) {
			missing = append(missing, fmt.Sprintf("/%s does not exist", node))
		}
	}
	ailments := slices.Concat(g.described.ailments, told.ofMIG(g.ID, m))
	if len(missing) > 0 {
		ailments = append(ailments, unwell(b.options, causeCapabilities, "%s; run nvidia-smi on the node, which makes the device files",
			strings.Join(missing, ", ")))
	}
	out.Health = gravest(b.options, ailments)
	return out
}

// uniform returns why nothing may be offered by the strategy single: with it a pod that
// requests a GPU gets a MIG device, and must get the same wherever it lands.
func uniform(strategy string, gpus []*gpu) error {
	if strategy != backend.MIGSingle {
		return nil
	}
	const remedy = "; give all GPUs the same MIG devices, or turn MIG mode off on all of them, or use migStrategy mixed"
	in := slices.IndexFunc(gpus, func(g *gpu) bool { return g.Partitioned })
	if in < 0 {
		return nil
	}
	if out := slices.IndexFunc(gpus, func(g *gpu) bool { return !g.Partitioned }); out >= 0 {
		return fmt.Errorf("migStrategy single: GPU %d is in MIG mode and GPU %d is not"+remedy, gpus[in].Index, gpus[out].Index)
	}
	var first *migDevice
	name := func(g *gpu, m *migDevice) string {
		return fmt.Sprintf("%s is %s (%d MiB)", accel.IndexText(accel.PartitionIndex(g.Index, m.number)), m.profile,
			m.attributes.MemorySizeMB)
	}
	at := ""
	for _, g := range gpus {
		if len(g.mig) == 0 {
			return fmt.Errorf("migStrategy single: GPU %d is in MIG mode and has no MIG devices"+remedy, g.Index)
		}
		for i := range g.mig {
			m := &g.mig[i]
			switch {
			case m.err != nil: // a fault of its own
			case first == nil:
				first, at = m, name(g, m)
			case m.attributes != first.attributes || m.profile != first.profile:
				return fmt.Errorf("migStrategy single: the MIG devices differ: %s, %s"+remedy, at, name(g, m))
			}
		}
	}
	return nil
}

// partOfInstance is why a MIG device with only a part of its GPU instance is not offered.
func partOfInstance(index int, profile migProfile) error {
	return fmt.Errorf("MIG device %s has the profile %s, a part of a GPU instance, and is not offered; make one compute instance of "+
		"%d slices of its GPU instance", accel.IndexText(index), profile, profile.slices)
}

// withPlaces adds to faults of GPUs the same of their MIG devices.
func withPlaces(faults []backend.Fault, places map[accel.DeviceID]migPlace) []backend.Fault {
	out := slices.Clone(faults)
	for _, f := range faults {
		for id, at := range places {
			gpu, _, _ := accel.SplitIndex(at.index)
			if gpu == f.Index && (f.ID == "" || f.ID == at.gpu) {
				out = append(out, backend.Fault{Index: at.index, ID: id, Err: f.Err, Cause: f.Cause})
			}
		}
	}
	slices.SortFunc(out, func(a, b backend.Fault) int { return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.ID, b.ID)) })
	return out
}

// placesOf returns the places after a discovery: those of the MIG devices that it found,
// and of those before whose GPU could not be asked.
func placesOf(l *devicelist.Listing[*gpu], before map[accel.DeviceID]migPlace) map[accel.DeviceID]migPlace {
	out := map[accel.DeviceID]migPlace{}
	for _, g := range l.Devices {
		for i := range g.mig {
			if m := &g.mig[i]; m.id != "" {
				out[m.id] = migPlace{g.ID, accel.PartitionIndex(g.Index, m.number), m.instance}
			}
		}
	}
	for _, faults := range [][]backend.Fault{l.Faults, l.Unasked} {
		for _, f := range faults {
			if at, known := before[f.ID]; known && out[f.ID] == (migPlace{}) {
				out[f.ID] = at
			}
		}
	}
	return out
}

// unheardByMIG reports whether no MIG device is listed that an event about an instance
// is about, while there are some of its GPU that cannot be described now.
func unheardByMIG(listed []*gpu, on subject) bool {
	if on.instance == wholeGPU {
		return false
	}
	undescribed := false
	for _, g := range listed {
		switch {
		case g.ID == on.device:
			undescribed = slices.ContainsFunc(g.mig, func(m migDevice) bool { return m.err != nil })
		case g.part != nil && g.Parent == on.device && on.covers(g.part.instance):
			return false
		}
	}
	return undescribed
}

// readProc returns what a file of the kernel's proc file system says, "" for one that
// cannot be read.
func readProc(o backend.Options, file string) string {
	data, err := os.ReadFile(filepath.Join(o.ProcRoot, file))
	if err != nil {
		return ""
	}
	return string(data)
}

// monitorHint explains an error about a GPU in MIG mode that the daemon's rights cause.
func monitorHint(partitioned bool, err error) error {
	if !partitioned || !libloader.HasCode(err, nvml.ERROR_NO_PERMISSION) {
		return err
	}
	return errors.Join(err, errors.New("a GPU in MIG mode is read with the monitor capability only; the host's /dev must be mounted into "+
		"divvy-node, which must be privileged"))
}
