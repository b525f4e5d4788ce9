package nvidia

import (
	"fmt"
	"math"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// gpuInstanceProfile is what a profile of GPU instances stands for in the names of
// MIG devices, by its number in nvmlDeviceGetGpuInstanceProfileInfo.
type gpuInstanceProfile struct {
	slices int
	// suffix names what the profile has or lacks beside its slices: media engines (me)
	// or graphics (gfx).
	suffix string
}

var gpuInstanceProfiles = map[int]gpuInstanceProfile{
	nvml.GPU_INSTANCE_PROFILE_1_SLICE:        {1, ""},
	nvml.GPU_INSTANCE_PROFILE_2_SLICE:        {2, ""},
	nvml.GPU_INSTANCE_PROFILE_3_SLICE:        {3, ""},
	nvml.GPU_INSTANCE_PROFILE_4_SLICE:        {4, ""},
	nvml.GPU_INSTANCE_PROFILE_6_SLICE:        {6, ""},
	nvml.GPU_INSTANCE_PROFILE_7_SLICE:        {7, ""},
	nvml.GPU_INSTANCE_PROFILE_8_SLICE:        {8, ""},
	nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1:   {1, "+me"},
	nvml.GPU_INSTANCE_PROFILE_2_SLICE_REV1:   {2, "+me"},
	nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV2:   {1, ""}, // with twice the memory
	nvml.GPU_INSTANCE_PROFILE_1_SLICE_GFX:    {1, "+gfx"},
	nvml.GPU_INSTANCE_PROFILE_2_SLICE_GFX:    {2, "+gfx"},
	nvml.GPU_INSTANCE_PROFILE_3_SLICE_GFX:    {3, "+gfx"},
	nvml.GPU_INSTANCE_PROFILE_4_SLICE_GFX:    {4, "+gfx"},
	nvml.GPU_INSTANCE_PROFILE_1_SLICE_NO_ME:  {1, "-me"},
	nvml.GPU_INSTANCE_PROFILE_2_SLICE_NO_ME:  {2, "-me"},
	nvml.GPU_INSTANCE_PROFILE_1_SLICE_ALL_ME: {1, "+me.all"},
	nvml.GPU_INSTANCE_PROFILE_2_SLICE_ALL_ME: {2, "+me.all"},
}

// computeInstanceProfiles are the slices of the profiles of compute instances, by
// their number in nvmlGpuInstanceGetComputeInstanceProfileInfo.
var computeInstanceProfiles = map[int]int{
	nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE:      1,
	nvml.COMPUTE_INSTANCE_PROFILE_2_SLICE:      2,
	nvml.COMPUTE_INSTANCE_PROFILE_3_SLICE:      3,
	nvml.COMPUTE_INSTANCE_PROFILE_4_SLICE:      4,
	nvml.COMPUTE_INSTANCE_PROFILE_6_SLICE:      6,
	nvml.COMPUTE_INSTANCE_PROFILE_7_SLICE:      7,
	nvml.COMPUTE_INSTANCE_PROFILE_8_SLICE:      8,
	nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1: 1,
	nvml.COMPUTE_INSTANCE_PROFILE_7_SLICE_NVL:  7,
}

// migProfile is the profile of a MIG device.
type migProfile struct {
	// compute and slices count the slices of its compute instance, and those of the GPU
	// instance that the compute instance is in.
	compute, slices int
	// gigabytes is the memory of the GPU instance, rounded as NVIDIA's tools do.
	gigabytes int
	suffix    string
}

// profileOf returns the profile of a MIG device by the numbers of the profiles of its
// GPU instance and of its compute instance, its memory in MiB and that of the GPU in
// bytes. The memory in the name follows from the two sizes, so names of GPUs that are
// not known yet are right as well.
func profileOf(gpuInstance, computeInstance int, memoryMiB uint64, total int64) (migProfile, error) {
	g, ok := gpuInstanceProfiles[gpuInstance]
	if !ok {
		return migProfile{}, fmt.Errorf("its GPU instance has the profile %d, which is not known", gpuInstance)
	}
	c, ok := computeInstanceProfiles[computeInstance]
	if !ok {
		return migProfile{}, fmt.Errorf("its compute instance has the profile %d, which is not known", computeInstance)
	}
	if total <= 0 || memoryMiB == 0 || memoryMiB > uint64(total)>>20 {
		return migProfile{}, fmt.Errorf("it has %d MiB of its GPU's %d bytes of memory, which cannot be", memoryMiB, total)
	}
	return migProfile{compute: c, slices: g.slices, gigabytes: gigabytes(memoryMiB, total), suffix: g.suffix}, nil
}

// gigabytes is the memory in the name of a profile: a GPU's memory is cut into eighths,
// and the name counts those in GiB of the GPU, rounded up.
func gigabytes(memoryMiB uint64, total int64) int {
	const eighths, gib = 8, 1 << 30
	part := math.Ceil(float64(memoryMiB)*(1<<20)/float64(total)*eighths) / eighths
	return int(math.Round(part * math.Ceil(float64(total)/gib)))
}

// String is the name, such as "1g.10gb", "1c.2g.10gb" or "1g.10gb+me".
func (p migProfile) String() string {
	name := fmt.Sprintf("%dg.%dgb%s", p.slices, p.gigabytes, p.suffix)
	if p.whole() {
		return name
	}
	return fmt.Sprintf("%dc.%s", p.compute, name)
}

// whole reports whether the MIG device has all of its GPU instance.
func (p migProfile) whole() bool { return p.compute == p.slices }
