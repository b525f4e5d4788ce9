package nvidia

import (
	"regexp"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// The memory of GPUs as nvmlDeviceGetMemoryInfo says it, in bytes. NVIDIA reserves a
// little, so that it is below the size in the GPU's name.
const (
	a100of40 int64 = 40960 << 20
	a100of80 int64 = 81920 << 20
	h100of80 int64 = 81559 << 20
	h200     int64 = 143771 << 20
	a30      int64 = 24576 << 20
	b200     int64 = 183359 << 20
)

// TestProfileNames compares with what "nvidia-smi mig -lgip" and "-lcip" print for real
// GPUs. Sizes are in MiB, as those tools print them or, of newer GPUs, close to it.
func TestProfileNames(t *testing.T) {
	for _, tt := range []struct {
		gpu     string
		total   int64
		gi, ci  int
		memory  uint64
		want    string
		partial bool
	}{
		{"A100 40 GB", a100of40, nvml.GPU_INSTANCE_PROFILE_1_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE, 4864, "1g.5gb", false},
		{"A100 40 GB", a100of40, nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1, nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE, 4864, "1g.5gb+me", false},
		{"A100 40 GB", a100of40, nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV2, nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE, 9856, "1g.10gb", false},
		{"A100 40 GB", a100of40, nvml.GPU_INSTANCE_PROFILE_2_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_2_SLICE, 9856, "2g.10gb", false},
		{"A100 40 GB", a100of40, nvml.GPU_INSTANCE_PROFILE_2_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE, 9856, "1c.2g.10gb", true},
		{"A100 40 GB", a100of40, nvml.GPU_INSTANCE_PROFILE_3_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_3_SLICE, 20096, "3g.20gb", false},
		{"A100 40 GB", a100of40, nvml.GPU_INSTANCE_PROFILE_3_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_2_SLICE, 20096, "2c.3g.20gb", true},
		{"A100 40 GB", a100of40, nvml.GPU_INSTANCE_PROFILE_4_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_4_SLICE, 20096, "4g.20gb", false},
		{"A100 40 GB", a100of40, nvml.GPU_INSTANCE_PROFILE_7_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_7_SLICE, 40192, "7g.40gb", false},
		{"A100 80 GB", a100of80, nvml.GPU_INSTANCE_PROFILE_1_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE, 9728, "1g.10gb", false},
		{"A100 80 GB", a100of80, nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1, nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE, 9728, "1g.10gb+me", false},
		{"A100 80 GB", a100of80, nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV2, nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE, 19968, "1g.20gb", false},
		{"A100 80 GB", a100of80, nvml.GPU_INSTANCE_PROFILE_2_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_2_SLICE, 19968, "2g.20gb", false},
		{"A100 80 GB", a100of80, nvml.GPU_INSTANCE_PROFILE_3_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_3_SLICE, 40192, "3g.40gb", false},
		{"A100 80 GB", a100of80, nvml.GPU_INSTANCE_PROFILE_4_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_4_SLICE, 40192, "4g.40gb", false},
		{"A100 80 GB", a100of80, nvml.GPU_INSTANCE_PROFILE_7_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_7_SLICE, 80384, "7g.80gb", false},
		{"A100 80 GB", a100of80, nvml.GPU_INSTANCE_PROFILE_7_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_3_SLICE, 80384, "3c.7g.80gb", true},
		{"H100 80 GB", h100of80, nvml.GPU_INSTANCE_PROFILE_1_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE, 9984, "1g.10gb", false},
		{"H100 80 GB", h100of80, nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV2, nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE, 20096, "1g.20gb", false},
		{"H100 80 GB", h100of80, nvml.GPU_INSTANCE_PROFILE_2_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_2_SLICE, 20096, "2g.20gb", false},
		{"H100 80 GB", h100of80, nvml.GPU_INSTANCE_PROFILE_3_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_3_SLICE, 40448, "3g.40gb", false},
		{"H100 80 GB", h100of80, nvml.GPU_INSTANCE_PROFILE_7_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_7_SLICE, 81153, "7g.80gb", false},
		{"H200", h200, nvml.GPU_INSTANCE_PROFILE_1_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE, 16896, "1g.18gb", false},
		{"H200", h200, nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1, nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE, 16896, "1g.18gb+me", false},
		{"H200", h200, nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV2, nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE, 33792, "1g.35gb", false},
		{"H200", h200, nvml.GPU_INSTANCE_PROFILE_2_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_2_SLICE, 33792, "2g.35gb", false},
		{"H200", h200, nvml.GPU_INSTANCE_PROFILE_3_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_3_SLICE, 71424, "3g.71gb", false},
		{"H200", h200, nvml.GPU_INSTANCE_PROFILE_7_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_7_SLICE, 143424, "7g.141gb", false},
		{"A30", a30, nvml.GPU_INSTANCE_PROFILE_1_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE, 5952, "1g.6gb", false},
		{"A30", a30, nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1, nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE, 5952, "1g.6gb+me", false},
		{"A30", a30, nvml.GPU_INSTANCE_PROFILE_2_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_2_SLICE, 12032, "2g.12gb", false},
		{"A30", a30, nvml.GPU_INSTANCE_PROFILE_2_SLICE_REV1, nvml.COMPUTE_INSTANCE_PROFILE_2_SLICE, 12032, "2g.12gb+me", false},
		{"A30", a30, nvml.GPU_INSTANCE_PROFILE_4_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_4_SLICE, 24192, "4g.24gb", false},
		{"B200", b200, nvml.GPU_INSTANCE_PROFILE_1_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE, 22528, "1g.23gb", false},
		{"B200", b200, nvml.GPU_INSTANCE_PROFILE_2_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_2_SLICE, 45312, "2g.45gb", false},
		{"B200", b200, nvml.GPU_INSTANCE_PROFILE_3_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_3_SLICE, 91136, "3g.90gb", false},
		{"B200", b200, nvml.GPU_INSTANCE_PROFILE_7_SLICE, nvml.COMPUTE_INSTANCE_PROFILE_7_SLICE, 182784, "7g.180gb", false},
		{"24 GB with graphics", a30, nvml.GPU_INSTANCE_PROFILE_1_SLICE_GFX, nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE, 5952, "1g.6gb+gfx",
			false},
		{"24 GB with graphics", a30, nvml.GPU_INSTANCE_PROFILE_3_SLICE_GFX, nvml.COMPUTE_INSTANCE_PROFILE_3_SLICE, 18000, "3g.18gb+gfx",
			false},
		{"24 GB without media", a30, nvml.GPU_INSTANCE_PROFILE_1_SLICE_NO_ME, nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE, 5952, "1g.6gb-me",
			false},
		{"24 GB, all media", a30, nvml.GPU_INSTANCE_PROFILE_2_SLICE_ALL_ME, nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1, 12032,
			"1c.2g.12gb+me.all", true},
	} {
		t.Run(tt.gpu+" "+tt.want, func(t *testing.T) {
			got, err := profileOf(tt.gi, tt.ci, tt.memory, tt.total)
			if err != nil || got.String() != tt.want || got.whole() == tt.partial {
				t.Errorf("profile is %s, whole %t, %v; want %s, whole %t", got, got.whole(), err, tt.want, !tt.partial)
			}
		})
	}
}

func TestProfilesThatAreNotKnown(t *testing.T) {
	for name, tt := range map[string]struct {
		gi, ci int
		memory uint64
		total  int64
		want   string
	}{
		"GPU instance":       {99, 0, 4864, a100of40, "its GPU instance has the profile 99, which is not known"},
		"compute instance":   {0, 99, 4864, a100of40, "its compute instance has the profile 99, which is not known"},
		"no memory":          {0, 0, 0, a100of40, "it has 0 MiB"},
		"more than its GPU":  {0, 0, 40961, a100of40, "it has 40961 MiB"},
		"a GPU without":      {0, 0, 4864, 0, "it has 4864 MiB"},
		"a number too large": {0, 0, 1 << 60, a100of40, "which cannot be"},
	} {
		t.Run(name, func(t *testing.T) {
			if got, err := profileOf(tt.gi, tt.ci, tt.memory, tt.total); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("profile %s, %v; want %s", got, err, tt.want)
			}
		})
	}
}

// FuzzProfileName: a name has the form of NVIDIA's tools, and its memory is within an
// eighth of the GPU's of what the MIG device has.
func FuzzProfileName(f *testing.F) {
	f.Add(0, 0, uint64(4864), a100of40)
	f.Add(16, 8, uint64(80384), a100of80)
	f.Add(-1, 3, uint64(1)<<63, int64(-1))
	form := regexp.MustCompile(`^([1-8]c\.)?[1-8]g\.[0-9]+gb(\+me|\+me\.all|\+gfx|-me)?$`)
	f.Fuzz(func(t *testing.T, gi, ci int, memory uint64, total int64) {
		p, err := profileOf(gi, ci, memory, total)
		if err != nil {
			return
		}
		if !form.MatchString(p.String()) {
			t.Errorf("name %q", p)
		}
		const gib = 1 << 30
		size := float64(p.gigabytes) * gib
		if least, most := float64(memory<<20)-gib, float64(memory<<20)+float64(total)/8+2*gib; size < least || size > most {
			t.Errorf("profileOf(%d, %d, %d, %d) is %s", gi, ci, memory, total, p)
		}
	})
}
