package vendors_test

import (
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/vendors"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// The libraries of all vendors are in one process, and two of them export the
// same names. Each backend must reach its own, whichever was loaded first.
func TestVendorsShareAProcess(t *testing.T) {
	topology := vendorsim.Topology{
		Drivers: map[string]vendorsim.Driver{
			vendorsim.Enflame:  {Version: "1.14.0"},
			vendorsim.Iluvatar: {Version: "4.3.0", CUDA: "10.2"},
			vendorsim.NVIDIA:   {Version: "550.54.15", CUDA: "12.4"},
		},
	}
	topology.Cards = append(topology.Cards, vendorsim.GCUs(1, 49152)...)
	topology.Cards = append(topology.Cards, vendorsim.IXBoards(1, 2, 32768)...)
	topology.Cards = append(topology.Cards, vendorsim.GPUs(3, 40960)...)

	type summary struct {
		Driver, CUDA string
		Devices      int
	}
	want := map[string]summary{
		vendorsim.Enflame:  {"1.14.0", "", 1},
		vendorsim.Iluvatar: {"4.3.0", "10.2", 2},
		vendorsim.NVIDIA:   {"550.54.15", "12.4", 3},
	}
	// The binding of NVIDIA's library has room for one in a process.
	nvidia := build(t, vendorsim.NVIDIA, topology)
	for _, order := range [][]string{ // in this order, as its library stays in the process
		{vendorsim.Enflame, vendorsim.Iluvatar, vendorsim.NVIDIA},
		{vendorsim.NVIDIA, vendorsim.Iluvatar, vendorsim.Enflame},
	} {
		t.Run(order[0]+" first", func(t *testing.T) {
			got := map[string]summary{}
			var opened []backend.Backend
			for _, vendor := range order {
				library := nvidia
				if vendor != vendorsim.NVIDIA {
					library = build(t, vendor, topology)
				}
				b, err := vendors.New(vendor, backend.Options{DriverRoot: t.TempDir(), LibraryPath: library})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() {
					if err := b.Close(); err != nil {
						t.Errorf("close %s: %v", vendor, err)
					}
				})
				opened = append(opened, b)
				// Those that are open already are asked again.
				for _, b := range opened {
					found, err := b.Discover(t.Context())
					if err != nil {
						t.Fatalf("%s: %v", b.Vendor(), err)
					}
					got[b.Vendor()] = summary{found.Driver, found.CUDA, len(found.Devices)}
					if s := got[b.Vendor()]; s != want[b.Vendor()] {
						t.Errorf("after %s was opened, %s finds %+v, want %+v", vendor, b.Vendor(), s, want[b.Vendor()])
					}
				}
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("found (-want +got):\n%s", diff)
			}
		})
	}
}

// build compiles the stand-in for a vendor's library and puts the topology
// beside it.
func build(t *testing.T, vendor string, topology vendorsim.Topology) string {
	t.Helper()
	dir := t.TempDir()
	file, err := vendorsim.Build(t.Context(), vendor, dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := topology.Write(filepath.Join(dir, vendorsim.TopologyName)); err != nil {
		t.Fatal(err)
	}
	return file
}
