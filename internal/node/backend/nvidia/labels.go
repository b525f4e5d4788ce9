package nvidia

import (
	"context"
	"maps"
	"slices"
	"strconv"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/libloader"
)

// traits are what labels tell of a GPU and nothing else needs.
type traits struct {
	major, minor int  // compute capability; 0.0 when not known
	migCapable   bool // it can be cut into partitions
	partitioned  bool // it is
	class        string
	// attributes are those of a MIG device.
	attributes nvml.DeviceAttributes
}

// askTraits asks for what labels tell of a GPU, and whether it is in MIG mode, without
// which it cannot be offered with another strategy than none. What else the library does
// not tell is left out.
func (b *Backend) askTraits(ctx context.Context, lib *library, g *gpu) (t traits, err error) {
	type numbers [2]int
	compute, err := queryGPU(ctx, b, lib, "nvmlDeviceGetCudaComputeCapability", g.Index, func() (numbers, nvml.Return) {
		major, minor, code := g.described.handle.GetCudaComputeCapability()
		return numbers{major, minor}, code
	})
	switch {
	case libloader.IsFatal(err):
		return t, err
	case err == nil:
		t.major, t.minor = compute[0], compute[1]
	}
	mode, err := queryGPU(ctx, b, lib, "nvmlDeviceGetMigMode", g.Index, func() (int, nvml.Return) {
		mode, _, code := g.described.handle.GetMigMode()
		return mode, code
	})
	switch {
	case libloader.IsFatal(err):
		return t, err
	case err == nil:
		t.migCapable, t.partitioned = true, mode == nvml.DEVICE_MIG_ENABLE
	case !unsupported(err) && b.options.MIG != backend.MIGNone:
		return t, err // whether it may be given out as a whole is not known
	}
	return t, nil
}

const (
	// labelPrefix is the domain of the labels.
	labelPrefix = "nvidia.com/"
	// sharedSuffix marks the product of GPUs that pods share under the name of
	// whole ones.
	sharedSuffix = "-SHARED"
	// maxProduct keeps a product with the suffix within what a label may hold.
	maxProduct = 63 - len(sharedSuffix)
)

// Labels describes the node by the labels of NVIDIA's GPU feature discovery,
// but for its time stamp, which would make the node change every minute. On a
// node with several models, what is said of a GPU is said of the most frequent
// one, of the lowest index among equals, and the count is that of all GPUs. MIG
// devices are described by strategy: in the place of GPUs, or beside them.
func (b *Backend) Labels(sharing backend.Sharing) map[string]string {
	last := b.table.Last()
	gpus := backend.Whole(last.Devices)
	if len(gpus) == 0 {
		return nil
	}
	b.mu.Lock()
	known, invalid := maps.Clone(b.traits), b.reported.problem != nil
	b.mu.Unlock()
	model := backend.MostFrequent(gpus)
	// GPUs in MIG mode are not given out by this name, unless there are others.
	whole := b.options.MIG == backend.MIGNone ||
		slices.ContainsFunc(gpus, func(d accel.Device) bool { return d.Model == model.Model && !d.Partitioned })
	t := known[model.ID]
	labels := map[string]string{
		"gpu.present":  "true",
		"gpu.machine":  last.Machine,
		"gpu.family":   family(t.major, t.minor),
		"gpu.mode":     mode(t.class),
		"mig.capable":  strconv.FormatBool(slices.ContainsFunc(gpus, func(d accel.Device) bool { return known[d.ID].migCapable })),
		"mig.strategy": b.options.MIG,
	}
	sharingLabels(labels, "gpu.", sharing, whole, len(gpus), model.Model)
	if model.MemoryBytes > 0 {
		labels["gpu.memory"] = strconv.FormatInt(model.MemoryBytes>>20, 10) // MiB
	}
	if t.major > 0 {
		labels["gpu.compute.major"] = strconv.Itoa(t.major)
		labels["gpu.compute.minor"] = strconv.Itoa(t.minor)
	}
	migLabels(labels, b.options.MIG, invalid, last.Devices, known, sharing)
	labels["cuda.driver-version.full"], labels["cuda.runtime-version.full"] = last.Driver, last.CUDA
	backend.VersionLabels(labels, "cuda.driver-version.", last.Driver, "major", "minor", "revision")
	backend.VersionLabels(labels, "cuda.runtime-version.", last.CUDA, "major", "minor")
	// The names of earlier releases.
	backend.VersionLabels(labels, "cuda.driver.", last.Driver, "major", "minor", "rev")
	backend.VersionLabels(labels, "cuda.runtime.", last.CUDA, "major", "minor")
	return backend.Labels(labelPrefix, labels)
}

// sharingLabels adds how many devices there are under a prefix and how pods share
// them. Devices that are not given out by that name have no replicas.
func sharingLabels(labels map[string]string, prefix string, sharing backend.Sharing, offered bool, count int, product string) {
	labels[prefix+"count"] = strconv.Itoa(count)
	labels[prefix+"product"] = product
	switch {
	case !offered:
		labels[prefix+"replicas"], labels[prefix+"sharing-strategy"] = "0", ""
	case sharing.Replicas > 1:
		labels[prefix+"replicas"], labels[prefix+"sharing-strategy"] = strconv.Itoa(sharing.Replicas), "time-slicing"
		if !sharing.Renamed {
			value := backend.LabelValue(product)
			labels[prefix+"product"] = value[:min(len(value), maxProduct)] + sharedSuffix
		}
	default:
		labels[prefix+"replicas"], labels[prefix+"sharing-strategy"] = "1", "none"
	}
}

// migLabels adds what the strategy says of MIG devices.
func migLabels(labels map[string]string, strategy string, invalid bool, devices []accel.Device, known map[accel.DeviceID]traits,
	sharing backend.Sharing,
) {
	in := slices.IndexFunc(devices, func(d accel.Device) bool { return d.Partitioned })
	switch {
	case strategy == backend.MIGNone || in < 0:
		return
	case invalid:
		sharingLabels(labels, "gpu.", sharing, false, 0, devices[in].Model+"-MIG-INVALID")
		labels["gpu.memory"] = "0"
		return
	}
	counts := map[string]int{}
	for _, d := range devices {
		if d.Profile != "" {
			counts[d.Profile]++
		}
	}
	for profile, count := range counts {
		prefix, of := "gpu.", sharing
		name := accel.ProfileName(profile)
		if strategy == backend.MIGMixed {
			prefix, of = "mig-"+name+".", sharing.Profiles[name]
		}
		first := devices[slices.IndexFunc(devices, func(d accel.Device) bool { return d.Profile == profile })]
		sharingLabels(labels, prefix, of, true, count, first.Model+"-MIG-"+name)
		a := known[first.ID].attributes
		for key, value := range map[string]uint32{
			"multiprocessors": a.MultiprocessorCount, "slices.gi": a.GpuInstanceSliceCount, "slices.ci": a.ComputeInstanceSliceCount,
			"engines.copy": a.SharedCopyEngineCount, "engines.decoder": a.SharedDecoderCount, "engines.encoder": a.SharedEncoderCount,
			"engines.jpeg": a.SharedJpegCount, "engines.ofa": a.SharedOfaCount,
		} {
			labels[prefix+key] = strconv.FormatUint(uint64(value), 10)
		}
		labels[prefix+"memory"] = strconv.FormatUint(a.MemorySizeMB, 10)
	}
}

// family is the architecture of a compute capability.
func family(major, minor int) string {
	switch major {
	case 1:
		return "tesla"
	case 2:
		return "fermi"
	case 3:
		return "kepler"
	case 5:
		return "maxwell"
	case 6:
		return "pascal"
	case 7:
		if minor < 5 {
			return "volta"
		}
		return "turing"
	case 8:
		if minor < 9 {
			return "ampere"
		}
		return "ada-lovelace"
	case 9:
		return "hopper"
	case 10, 11, 12:
		return "blackwell"
	}
	return "undefined"
}

// mode is what a GPU of that PCI class is for.
func mode(class string) string {
	switch class {
	case "0x030000": // a display controller of the kind that drives screens
		return "graphics"
	case "0x030200": // a 3D controller
		return "compute"
	}
	return "unknown"
}
