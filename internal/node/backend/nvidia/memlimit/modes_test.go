package memlimit_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/nvidia/memlimit"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// TestComputeMode is with the stand-in whose state all processes share, without the functions
// of limits, which a driver with MPS may lack.
func TestComputeMode(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: only root may set the compute mode")
	}
	root := t.TempDir()
	dir := filepath.Join(root, "usr/lib64")
	without := vendorsim.Without(memlimit.SetFunction, memlimit.GetFunction)
	if _, err := vendorsim.Build(t.Context(), vendorsim.NVIDIA, dir, without); err != nil {
		t.Fatal(err)
	}
	cards := vendorsim.Topology{Cards: []vendorsim.Card{{Vendor: vendorsim.NVIDIA, UUID: "GPU-a", MemoryMiB: 1024, NUMA: -1},
		{Vendor: vendorsim.NVIDIA, UUID: "GPU-b", MemoryMiB: 1024, NUMA: -1}}}
	cards.Driver.Persistence = true
	if err := cards.Write(filepath.Join(dir, vendorsim.TopologyName)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []bool{true, false} {
		l, err := memlimit.OpenAny(memlimit.Places(backend.Options{DriverRoot: root}))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := l.Exclusive("GPU-a"); err != nil || got == want {
			t.Errorf("the mode before is exclusive: %t, %v", got, err)
		}
		if err := l.SetExclusive("GPU-a", want); err != nil {
			t.Error(err)
		}
		if got, err := l.Exclusive("GPU-a"); err != nil || got != want {
			t.Errorf("the mode is exclusive: %t, %v, want %t", got, err, want)
		}
		if got, err := l.Exclusive("GPU-b"); err != nil || got {
			t.Errorf("the mode of the other device is exclusive: %t, %v", got, err)
		}
		if err := l.SetExclusive("GPU-c", true); err == nil {
			t.Error("a device that does not exist has a mode")
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
}
