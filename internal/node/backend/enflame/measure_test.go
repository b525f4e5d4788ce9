package enflame

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/backendtest"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

func TestProcessSize(t *testing.T) {
	if size := unsafe.Sizeof(process{}); size != 24 {
		t.Errorf("a process has %d bytes, want 24", size)
	}
}

// The library lists 64 processes at most. What the others use is in use all the same.
func TestMeasureManyProcesses(t *testing.T) {
	r := newRoot(t)
	topology := vendorsim.Topology{Cards: vendorsim.GCUs(2, 16384)}
	path := r.install(topology)
	b := r.open(backend.Options{})
	id := backendtest.Found(t, b).Devices[1].ID
	var want []backend.Process
	for i := range 70 {
		topology.Processes = append(topology.Processes, vendorsim.Process{Card: 1, PID: 100 + i, MemoryMiB: 2})
		if i < maxProcesses {
			want = append(want, backend.Process{PID: 100 + i, Memory: new(uint64(2 << 20))})
		}
	}
	backendtest.Write(t, path, topology)
	backendtest.WantMeasured(t, b, id, backend.Measured{UsedBytes: 140 << 20, Processes: want})
}

func TestMeasureFails(t *testing.T) {
	for name, tt := range map[string]struct {
		without     string
		fail        vendorsim.Failures
		unsupported bool
		want        string
	}{
		"an older library": {without: "EfmlGetProcessInfo", unsupported: true, want: "lacks EfmlGetProcessInfo"},
		"not supported": {fail: vendorsim.Failures{"EfmlGetProcessInfo": 3}, unsupported: true,
			want: "EfmlGetProcessInfo(0): not supported (3)"},
		"no processes": {fail: vendorsim.Failures{"EfmlGetProcessInfo": 254}, want: "EfmlGetProcessInfo(0): failure (254)"},
		"no memory":    {fail: vendorsim.Failures{"EfmlGetDevMem": 254}, want: "EfmlGetDevMem(0): failure (254)"},
	} {
		t.Run(name, func(t *testing.T) {
			file, err := vendorsim.Build(t.Context(), vendorsim.Enflame, t.TempDir(), vendorsim.Without(tt.without))
			if err != nil {
				t.Fatal(err)
			}
			topology := vendorsim.Topology{Cards: vendorsim.GCUs(1, 1024)}
			path := filepath.Join(filepath.Dir(file), vendorsim.TopologyName)
			backendtest.Write(t, path, topology)
			b := newRoot(t).open(backend.Options{LibraryPath: file})
			id := backendtest.Found(t, b).Devices[0].ID
			topology.Library.Fail = tt.fail
			backendtest.Write(t, path, topology)
			measured, err := b.Measure(t.Context(), id)
			if err == nil || errors.Is(err, errors.ErrUnsupported) != tt.unsupported || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Measure = %+v, %v; want %q, unsupported %v", measured, err, tt.want, tt.unsupported)
			}
		})
	}
}

// A list that hangs keeps the card from being asked for anything else, and no other card.
func TestMeasureHangs(t *testing.T) {
	r := newRoot(t)
	topology := vendorsim.Topology{Cards: vendorsim.GCUs(2, 1024)}
	path := r.install(topology)
	b := r.open(backend.Options{CallTimeout: time.Second})
	devices := backendtest.Found(t, b).Devices
	topology.Cards[0].Calls.Slow = vendorsim.Delays{"EfmlGetProcessInfo": time.Hour}
	backendtest.Write(t, path, topology)
	for range 2 {
		const want = "EfmlGetProcessInfo(0) did not answer within 1s"
		if _, err := b.Measure(t.Context(), devices[0].ID); err == nil || err.Error() != want {
			t.Errorf("Measure: %v, want %q", err, want)
		}
		backendtest.WantMeasured(t, b, devices[1].ID, backend.Measured{})
	}
	topology.Cards[0].Calls.Slow = nil
	backendtest.Write(t, path, topology)
	backendtest.AwaitMeasured(t, b, devices[0].ID)
}
