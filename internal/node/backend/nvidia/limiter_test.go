package nvidia_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/backendtest"
	"github.com/divvy-gpu/divvy/internal/node/backend/nvidia/memlimit"
	"github.com/divvy-gpu/divvy/internal/node/limits"
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

// limitDriver is a driver with limits that keeps them, and a control group.
func limitDriver(t *testing.T, accounting vendorsim.MemoryAccounting) (m *machine, group string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: only root may set limits")
	}
	m = newMachine(t, backend.Options{}, vendorsim.GPUs(2, 40960)...)
	groups := vendorsim.ControlGroups{Root: filepath.Join(t.TempDir(), "cgroup"), Proc: filepath.Join(t.TempDir(), "proc")}
	run := t.TempDir()
	m.change(func(topology *vendorsim.Topology) {
		topology.ControlGroups = groups
		topology.Driver = vendorsim.Driver{MemoryAccounting: accounting, Persistence: true, Run: run}
	})
	group, err := groups.Make("", "/kubepods/pod1/c1", accounting == vendorsim.MemoryAccountingDmem)
	if err != nil {
		t.Fatal(err)
	}
	return m, group
}

func TestLimits(t *testing.T) {
	const mib = 1 << 20
	for _, accounting := range []vendorsim.MemoryAccounting{vendorsim.MemoryAccountingMisc, vendorsim.MemoryAccountingDmem} {
		t.Run(string(accounting), func(t *testing.T) {
			m, group := limitDriver(t, accounting)
			devices := m.found().Devices
			id, other := devices[0].ID, devices[1].ID
			if err := m.Limitable(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := m.KeepsLimits(t.Context(), id); err != nil {
				t.Fatal(err)
			}
			if err := limits.Probe(t.Context(), m, id, group); err != nil {
				t.Fatal(err)
			}
			if got, err := m.Limit(t.Context(), id, group); !errors.Is(err, backend.ErrNoLimit) {
				t.Errorf("before: %+v, %v, want none", got, err)
			}
			if err := m.SetLimit(t.Context(), id, group, 3000*mib); err != nil {
				t.Fatal(err)
			}
			if got, err := m.Limit(t.Context(), id, group); err != nil || got.Bytes != 3000*mib {
				t.Errorf("after: %+v, %v, want 3000 MiB", got, err)
			}
			if got, err := m.Limit(t.Context(), other, group); !errors.Is(err, backend.ErrNoLimit) {
				t.Errorf("the other GPU: %+v, %v, want none", got, err)
			}
			for what, tt := range map[string]struct {
				group string
				bytes uint64
				want  string
			}{
				"more than the GPU has": {group, 50000 * mib, "invalid argument (2)"},
				"no such group":         {group + "x", mib, "the driver cannot open the control group"},
			} {
				if err := m.SetLimit(t.Context(), id, tt.group, tt.bytes); err == nil || !strings.Contains(err.Error(), tt.want) {
					t.Errorf("%s: %v, want %q", what, err, tt.want)
				}
			}
			if err := m.ClearLimit(t.Context(), id, group); err != nil {
				t.Fatal(err)
			}
			if got, err := m.Limit(t.Context(), id, group); !errors.Is(err, backend.ErrNoLimit) {
				t.Errorf("cleared: %+v, %v, want none", got, err)
			}
		})
	}
}

// A group without the controller gets its limit in the nearest one above that has it.
func TestLimitWithoutAController(t *testing.T) {
	m, dir := limitDriver(t, vendorsim.MemoryAccountingDmem)
	id := m.found().Devices[0].ID
	leaf := filepath.Join(dir, "leaf")
	if err := os.Mkdir(leaf, 0o750); err != nil {
		t.Fatal(err)
	}
	if err := m.SetLimit(t.Context(), id, leaf, 1<<30); !errors.Is(err, backend.ErrNoController) {
		t.Errorf("SetLimit: %v", err)
	}
	if err := limits.Set(t.Context(), m, id, limits.Group{Path: "/leaf", Dir: leaf, Scope: dir}, 1<<30); err != nil {
		t.Error(err)
	}
	if got, err := m.Limit(t.Context(), id, dir); err != nil || got.Bytes != 1<<30 {
		t.Errorf("the group above: %+v, %v", got, err)
	}
}

func TestDriverThatKeepsNoLimits(t *testing.T) {
	m, group := limitDriver(t, vendorsim.MemoryAccountingOff)
	id := m.found().Devices[0].ID
	if err := m.Limitable(t.Context()); err != nil {
		t.Errorf("Limitable: %v; the library has the functions", err)
	}
	if err := limits.Probe(t.Context(), m, id, group); err == nil || !strings.Contains(err.Error(), "the driver keeps no limit here") {
		t.Errorf("Probe: %v", err)
	}
	m.change(func(topology *vendorsim.Topology) { topology.Driver.Persistence = false })
	if err := m.KeepsLimits(t.Context(), id); err == nil || !strings.Contains(err.Error(), "persistence mode is off") {
		t.Errorf("KeepsLimits: %v", err)
	}
}

// A call that hangs is a fault of its GPU alone.
func TestLimitHangs(t *testing.T) {
	m := newMachine(t, backend.Options{CallTimeout: time.Second}, vendorsim.GPUs(2, 40960)...)
	id := m.found().Devices[0].ID
	m.change(func(topology *vendorsim.Topology) {
		topology.Cards[0].Calls.Slow = vendorsim.Delays{memlimit.SetFunction: time.Hour}
	})
	want := memlimit.SetFunction + "(0) did not answer within 1s"
	if err := m.SetLimit(t.Context(), id, "/sys/fs/cgroup", 1<<20); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("SetLimit: %v, want %q", err, want)
	}
	m.change(func(topology *vendorsim.Topology) { topology.Cards[0].Calls.Slow = nil })
	backendtest.AwaitMeasured(t, m, id)
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
