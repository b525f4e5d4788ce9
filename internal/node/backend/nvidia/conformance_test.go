package nvidia_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/backendtest"
	"github.com/divvy-gpu/divvy/internal/node/backend/nvidia"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// driverRoot is a driver installation with the stand-in for NVML. All tests of
// the process use this one library, since the binding has room for one: each
// test puts its own topology into the file that the library reads.
var driverRoot string

// libraryFolder is where a distribution puts the library.
const libraryFolder = "usr/lib/x86_64-linux-gnu"

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && generators[os.Args[1]] != nil {
		os.Exit(generators[os.Args[1]]())
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	var err error
	if driverRoot, err = os.MkdirTemp("", "nvidia-"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = os.RemoveAll(driverRoot) }() // in the temporary folder
	if _, err := vendorsim.Build(context.Background(), vendorsim.NVIDIA, filepath.Join(driverRoot, libraryFolder)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

func topologyPath() string {
	return filepath.Join(driverRoot, libraryFolder, vendorsim.TopologyName)
}

// write makes the topology the hardware of this process.
func write(t testing.TB, topology vendorsim.Topology) {
	t.Helper()
	backendtest.Write(t, topologyPath(), topology)
}

func put(t testing.TB, dir, file, text string) {
	t.Helper()
	full := filepath.Join(dir, file)
	if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(full, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// harness is what the tests of all vendors must know of this one.
var harness = backendtest.Harness{
	Cards:    vendorsim.GPUs,
	ID:       func(uuid string) accel.DeviceID { return accel.DeviceID(uuid) },
	CardCall: "nvmlDeviceGetMemoryInfo",
	FailCode: 999,
	LinkCall: "nvmlDeviceGetTopologyCommonAncestor",
	Open: func(t *testing.T, first vendorsim.Topology, o backend.Options) (backend.Backend, string) {
		t.Helper()
		write(t, first)
		o.DriverRoot = driverRoot
		b, err := nvidia.New(o)
		if err != nil {
			t.Fatal(err)
		}
		return b, topologyPath()
	},
}

func TestConformance(t *testing.T) { backendtest.Run(t, harness) }
