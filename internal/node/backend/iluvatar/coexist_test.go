package iluvatar

import (
	"path/filepath"
	"testing"

	"github.com/ebitengine/purego"

	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// nvml is NVIDIA's library as its Go binding loads and calls it: for the whole
// process, each function by its name wherever it is found first.
type nvml struct{ handle uintptr }

func loadNVML(t *testing.T, file string) nvml {
	t.Helper()
	handle, err := purego.Dlopen(file, purego.RTLD_LAZY|purego.RTLD_GLOBAL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := purego.Dlclose(handle); err != nil {
			t.Error(err)
		}
	})
	return nvml{handle}
}

// says returns what the process takes for NVIDIA's driver and CUDA version.
func (n nvml) says(t *testing.T) (driver string, cuda int32) {
	t.Helper()
	bind := func(function any, name string) {
		t.Helper()
		address, err := purego.Dlsym(purego.RTLD_DEFAULT, name)
		if err != nil {
			t.Fatal(err)
		}
		purego.RegisterFunc(function, address)
	}
	var start func() int32
	var version func(*text, uint32) int32
	var cudaVersion func(*int32) int32
	bind(&start, "nvmlInit_v2")
	bind(&version, "nvmlSystemGetDriverVersion")
	bind(&cudaVersion, "nvmlSystemGetCudaDriverVersion_v2")
	var out text
	if a, b, c := start(), version(&out, versionSize), cudaVersion(&cuda); a != 0 || b != 0 || c != 0 {
		t.Errorf("NVIDIA's calls return %d, %d and %d", a, b, c)
	}
	return out.String(), cuda
}

// NVIDIA's library and Iluvatar's export the same names. In one process each
// must be reached by those who mean it, whichever was loaded first, and calls
// that a library makes of its own functions must stay in it: of the stand-in,
// nvmlSystemGetCudaDriverVersion_v2 calls the function without the suffix
// through the dynamic linker.
func TestNVIDIAsLibraryInTheSameProcess(t *testing.T) {
	topology := boards(2, 2)
	topology.Cards = append(topology.Cards, vendorsim.GPUs(3, 40960)...)
	topology.Drivers = map[string]vendorsim.Driver{
		vendorsim.NVIDIA:   {Version: "550.54.15", CUDA: "12.4"},
		vendorsim.Iluvatar: {Version: "4.3.0", CUDA: "10.2"},
	}
	dir := t.TempDir()
	file, err := vendorsim.Build(t.Context(), vendorsim.NVIDIA, dir)
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, vendorsim.TopologyName), topology)

	check := func(t *testing.T, n nvml, b *Backend) {
		t.Helper()
		for range 2 {
			found, err := b.Discover(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if found.Driver != "4.3.0" || found.CUDA != "10.2" || len(found.Devices) != 4 || len(found.Faults) != 0 {
				t.Errorf("Iluvatar's library tells of driver %s with CUDA %s, %d devices and faults %v; want 4.3.0, 10.2, 4 and none",
					found.Driver, found.CUDA, len(found.Devices), found.Faults)
			}
			if driver, cuda := n.says(t); driver != "550.54.15" || cuda != 12040 {
				t.Errorf("NVIDIA's library tells of driver %s with CUDA %d, want 550.54.15 and 12040", driver, cuda)
			}
		}
	}
	// In this order: NVIDIA's library stays in the process once it was there.
	t.Run("Iluvatar's first", func(t *testing.T) {
		b := start(t, topology, backend.Options{}).Backend
		if _, err := b.Discover(t.Context()); err != nil {
			t.Fatal(err)
		}
		check(t, loadNVML(t, file), b)
	})
	t.Run("NVIDIA's first", func(t *testing.T) {
		n := loadNVML(t, file)
		n.says(t)
		check(t, n, start(t, topology, backend.Options{}).Backend)
	})
}
