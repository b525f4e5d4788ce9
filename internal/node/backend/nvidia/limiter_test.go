package nvidia_test

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/backendtest"
	"github.com/divvy-gpu/divvy/internal/node/backend/nvidia/memlimit"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// limitsMissing is a backend whose library lacks limits, as that of driver 595 does.
func limitsMissing(t *testing.T, cards ...vendorsim.Card) *machine {
	t.Helper()
	root := t.TempDir()
	folder := filepath.Join(root, libraryFolder)
	if _, err := vendorsim.Build(t.Context(), vendorsim.NVIDIA, folder,
		vendorsim.Without(memlimit.SetFunction, memlimit.GetFunction)); err != nil {
		t.Fatal(err)
	}
	backendtest.Write(t, filepath.Join(folder, vendorsim.TopologyName), vendorsim.Topology{Cards: cards})
	return newMachine(t, backend.Options{DriverRoot: root}, cards...)
}

func TestLimitsOfAnOlderDriver(t *testing.T) {
	m := limitsMissing(t, vendorsim.GPUs(1, 40960)...)
	if err := m.Limitable(t.Context()); err == nil || errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("Limitable before a discovery: %v", err)
	}
	id := m.found().Devices[0].ID
	want := "lacks nvmlDeviceSetMemoryLimits_v1 and nvmlDeviceGetMemoryLimits_v1, which driver 615"
	if err := m.Limitable(t.Context()); !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), want) {
		t.Errorf("Limitable: %v, want %q", err, want)
	}
	if err := m.SetLimit(t.Context(), id, "/sys/fs/cgroup", 1<<20); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("SetLimit: %v", err)
	}
	if _, err := m.Limit(t.Context(), id, "/sys/fs/cgroup"); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("Limit: %v", err)
	}
	if err := m.ClearLimit(t.Context(), "GPU-unknown", "/sys/fs/cgroup"); err == nil || errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("ClearLimit of an unknown device: %v", err)
	}
}

func TestNoLimitsForPartitions(t *testing.T) {
	m := newMIGMachine(t, backend.Options{MIG: backend.MIGMixed}, a100s(1)...)
	m.recut(func(topology *vendorsim.Topology) {
		topology.Cards[0] = vendorsim.Partition(topology.Cards[0], "3g.20gb")
	})
	devices := m.found().Devices
	if len(devices) != 2 {
		t.Fatalf("%d devices, want a GPU and its MIG device", len(devices))
	}
	for _, d := range devices {
		for call, err := range map[string]error{
			"SetLimit":    m.SetLimit(t.Context(), d.ID, "/sys/fs/cgroup", 1<<20),
			"KeepsLimits": m.KeepsLimits(t.Context(), d.ID),
		} {
			if err == nil || !strings.Contains(err.Error(), "no memory limits for MIG devices") {
				t.Errorf("%s of %s: %v", call, d.ID, err)
			}
		}
	}
}
