package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// Nothing may take a machine without a GPU for a successful test.
func TestWithoutAGPU(t *testing.T) {
	var out strings.Builder
	err := run(t.Context(), &out, options{root: t.TempDir(), watch: time.Second})
	if !errors.Is(err, errNoGPU) || exitCode(err) != 3 {
		t.Errorf("got exit code %d, %v; want 3 and that there is no GPU\n%s", exitCode(err), err, &out)
	}
}

// A driver that does not answer although there is a GPU is a failure.
func TestWithABrokenDriver(t *testing.T) {
	root := withNodes(t, "nvidia0")
	var out strings.Builder
	if err := run(t.Context(), &out, options{root: root, watch: time.Second}); exitCode(err) != 1 {
		t.Errorf("got exit code %d, %v; want 1\n%s", exitCode(err), err, &out)
	}
}

// The whole test on simulated GPUs, and one that must fail.
func TestOnSimulatedGPUs(t *testing.T) {
	library, err := vendorsim.Build(t.Context(), vendor, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	topology := vendorsim.Topology{Cards: vendorsim.GPUs(4, 40<<10)}
	path := filepath.Join(filepath.Dir(library), vendorsim.TopologyName)
	root := withNodes(t, "nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1", "nvidia2", "nvidia3")
	t.Run("a lab on the machine does not look like success", func(t *testing.T) {
		if err := topology.Write(path); err != nil {
			t.Fatal(err)
		}
		var out strings.Builder
		if err := run(t.Context(), &out, options{root: root, library: library, watch: time.Second}); exitCode(err) != exitNoGPU {
			t.Errorf("got exit code %d, %v; want %d\n%s", exitCode(err), err, exitNoGPU, &out)
		}
	})
	for name, ill := range map[string]bool{"healthy": false, "one is lost": true} {
		t.Run(name, func(t *testing.T) {
			topology.Cards[2].Lost = ill
			if err := topology.Write(path); err != nil {
				t.Fatal(err)
			}
			var out strings.Builder
			err := run(t.Context(), &out, options{root: root, library: library, watch: 2 * time.Second, simulated: true})
			if (err != nil) != ill || errors.Is(err, errNoGPU) {
				t.Errorf("got %v\n%s", err, &out)
			}
		})
	}
}

// withNodes returns a machine's root folder with files in /dev.
func withNodes(t *testing.T, names ...string) string {
	t.Helper()
	root := t.TempDir()
	if err := os.Mkdir(filepath.Join(root, "dev"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if err := os.WriteFile(filepath.Join(root, "dev", name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return root
}
