package iluvatar

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

func TestLabels(t *testing.T) {
	sys := t.TempDir()
	dmi := filepath.Join(sys, "class/dmi/id")
	if err := os.MkdirAll(dmi, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dmi, "product_name"), []byte("Server R1 (rev 2)\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	topology := boards(1, 2)
	topology.Driver = vendorsim.Driver{Version: "4.3.0", CUDA: "10.2"}
	n := start(t, topology, backend.Options{SysfsRoot: sys})
	n.found()
	want := map[string]string{
		"iluvatar.com/gpu.present":                "true",
		"iluvatar.com/gpu.machine":                "Server-R1--rev-2",
		"iluvatar.com/gpu.product":                "BI-V150",
		"iluvatar.com/gpu.count":                  "2",
		"iluvatar.com/gpu.memory":                 "32768",
		"iluvatar.com/ix.driver-version.full":     "4.3.0",
		"iluvatar.com/ix.driver-version.major":    "4",
		"iluvatar.com/ix.driver-version.minor":    "3",
		"iluvatar.com/ix.driver-version.revision": "0",
		"iluvatar.com/cuda.runtime-version.full":  "10.2",
		"iluvatar.com/cuda.runtime-version.major": "10",
		"iluvatar.com/cuda.runtime-version.minor": "2",
	}
	if diff := cmp.Diff(want, n.Labels(backend.Sharing{Replicas: 1})); diff != "" {
		t.Errorf("labels (-want +got):\n%s", diff)
	}
}

// A discovery that fails tells nothing of the node, so the labels stay.
func TestLabelsOutliveAnAbsentDriver(t *testing.T) {
	n := start(t, boards(1, 2), backend.Options{})
	n.found()
	want := n.Labels(backend.Sharing{Replicas: 1})
	n.change(func(topology *vendorsim.Topology) { topology.Driver.State = vendorsim.DriverAbsent })
	reason(t, n.Backend)
	if diff := cmp.Diff(want, n.Labels(backend.Sharing{Replicas: 1})); diff != "" {
		t.Errorf("labels (-before +with the driver absent):\n%s", diff)
	}
}
