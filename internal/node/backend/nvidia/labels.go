package nvidia

import (
	"context"
	"strconv"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/libloader"
)

// traits are what labels tell of a GPU and nothing else needs.
type traits struct {
	major, minor int  // compute capability; 0.0 when not known
	migCapable   bool // it can be cut into partitions
	partitioned  bool // it is
	class        string
}

// askTraits asks for what labels tell of a GPU. Its error is one that libloader.IsFatal;
// what the library does not tell is left out.
func (b *Backend) askTraits(ctx context.Context, lib *library, g *gpu) (t traits, err error) {
	type numbers [2]int
	compute, err := queryGPU(ctx, b, lib, "nvmlDeviceGetCudaComputeCapability", g.Index, func() (numbers, nvml.Return) {
		major, minor, code := g.handle.GetCudaComputeCapability()
		return numbers{major, minor}, code
	})
	switch {
	case libloader.IsFatal(err):
		return t, err
	case err == nil:
		t.major, t.minor = compute[0], compute[1]
	}
	mode, err := queryGPU(ctx, b, lib, "nvmlDeviceGetMigMode", g.Index, func() (int, nvml.Return) {
		mode, _, code := g.handle.GetMigMode()
		return mode, code
	})
	switch {
	case libloader.IsFatal(err):
		return t, err
	case err == nil:
		t.migCapable, t.partitioned = true, mode == nvml.DEVICE_MIG_ENABLE
	}
	t.class = b.sysfs.OfDevice(g.PCI, "class")
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
// one, of the lowest index among equals, and the count is that of all GPUs.
func (b *Backend) Labels(sharing backend.Sharing) map[string]string {
	last := b.table.Last()
	if len(last.Devices) == 0 {
		return nil
	}
	model := backend.MostFrequent(last.Devices)
	b.mu.Lock()
	t := b.traits[model.ID]
	b.mu.Unlock()
	labels := map[string]string{
		"gpu.present":          "true",
		"gpu.machine":          last.Machine,
		"gpu.count":            strconv.Itoa(len(last.Devices)),
		"gpu.replicas":         strconv.Itoa(max(sharing.Replicas, 1)),
		"gpu.sharing-strategy": "none",
		"gpu.product":          model.Model,
		"gpu.family":           family(t.major, t.minor),
		"gpu.mode":             mode(t.class),
		"mig.capable":          strconv.FormatBool(t.migCapable),
		"mig.strategy":         "none", // GPUs are offered whole
	}
	if sharing.Replicas > 1 {
		labels["gpu.sharing-strategy"] = "time-slicing"
		if !sharing.Renamed {
			product := backend.LabelValue(model.Model)
			labels["gpu.product"] = product[:min(len(product), maxProduct)] + sharedSuffix
		}
	}
	if model.MemoryBytes > 0 {
		labels["gpu.memory"] = strconv.FormatInt(model.MemoryBytes>>20, 10) // MiB
	}
	if t.major > 0 {
		labels["gpu.compute.major"] = strconv.Itoa(t.major)
		labels["gpu.compute.minor"] = strconv.Itoa(t.minor)
	}
	labels["cuda.driver-version.full"], labels["cuda.runtime-version.full"] = last.Driver, last.CUDA
	backend.VersionLabels(labels, "cuda.driver-version.", last.Driver, "major", "minor", "revision")
	backend.VersionLabels(labels, "cuda.runtime-version.", last.CUDA, "major", "minor")
	// The names of earlier releases.
	backend.VersionLabels(labels, "cuda.driver.", last.Driver, "major", "minor", "rev")
	backend.VersionLabels(labels, "cuda.runtime.", last.CUDA, "major", "minor")
	return backend.Labels(labelPrefix, labels)
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
