//nolint:thelper // the functions with a Harness are tests, which Run names
package backendtest

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// Measured measures a device, which must work.
func Measured(t testing.TB, m backend.Meter, id accel.DeviceID) backend.Measured {
	t.Helper()
	measured, err := m.Measure(t.Context(), id)
	if err != nil {
		t.Fatalf("Measure(%s): %v", id, err)
	}
	return measured
}

// WantMeasured measures a device, of which that must be in use; what utilization there is
// does not count.
func WantMeasured(t testing.TB, m backend.Meter, id accel.DeviceID, want backend.Measured) {
	t.Helper()
	got := Measured(t, m, id)
	for i := range got.Processes {
		got.Processes[i].Utilization = nil
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("in use of %s (-want +got):\n%s", id, diff)
	}
}

// AwaitMeasured measures a device until that works, as after a call that hung.
func AwaitMeasured(t testing.TB, m backend.Meter, id accel.DeviceID) {
	t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		_, err := m.Measure(t.Context(), id)
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("Measure after recovery: %v", err)
		}
	}
}

// meter returns the ability of the node's backend to measure, nil if it has none.
func (n *node) meter() backend.Meter {
	m, _ := n.Backend.(backend.Meter)
	return m
}

func testMeasure(t *testing.T, h Harness) {
	topology := h.topology(2)
	topology.Cards[1].UsedMiB = 100
	n := open(t, h, topology)
	m := n.meter()
	if m == nil {
		return // the ability is optional
	}
	first, second := h.ID(topology.Cards[0].UUID), h.ID(topology.Cards[1].UUID)
	wantErr := func(what string, id accel.DeviceID) {
		t.Helper()
		if measured, err := m.Measure(t.Context(), id); err == nil || errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("Measure of %s = %+v, %v; want another error", what, measured, err)
		}
	}
	if _, err := m.Measure(t.Context(), first); backend.Unavailable(err) == nil {
		t.Errorf("Measure before the first Discover: %v, want an UnavailableError", err)
	}
	n.found()
	WantMeasured(t, m, first, backend.Measured{})
	WantMeasured(t, m, second, backend.Measured{UsedBytes: 100 << 20})
	n.change(func(topology *vendorsim.Topology) {
		topology.Processes = []vendorsim.Process{
			{Card: 1, PID: 40, MemoryMiB: 20}, {Card: 0, PID: 3, MemoryMiB: 1}, {Card: 1, PID: 7, MemoryMiB: vendorsim.UnknownMemory},
		}
	})
	WantMeasured(t, m, first, backend.Measured{UsedBytes: 1 << 20, Processes: []backend.Process{{PID: 3, Memory: new(uint64(1 << 20))}}})
	WantMeasured(t, m, second, backend.Measured{
		UsedBytes: 120 << 20, Processes: []backend.Process{{PID: 7}, {PID: 40, Memory: new(uint64(20 << 20))}},
	})
	wantErr("a device that was never listed", "none")
	wantErr("no device", "")

	n.change(func(topology *vendorsim.Topology) { topology.Cards[0].Lost = true })
	wantErr("a lost device", first)
	Measured(t, m, second)
	n.change(func(topology *vendorsim.Topology) {
		topology.Cards[0].Lost, topology.Cards[0].UUID = false, "GPU-another"
	})
	wantErr("a device in whose place another is", first)
	n.change(func(topology *vendorsim.Topology) { topology.Cards[0].UUID = h.topology(1).Cards[0].UUID })
	Measured(t, m, first)
	n.change(func(topology *vendorsim.Topology) { topology.Cards, topology.Processes = topology.Cards[:1], nil })
	wantErr("a device that is gone", second)
	n.found()
	wantErr("a device that is not listed any more", second)

	n.change(func(topology *vendorsim.Topology) { topology.Driver.State = vendorsim.DriverAbsent })
	n.unavailable()
	if _, err := m.Measure(t.Context(), first); backend.Unavailable(err) == nil {
		t.Errorf("Measure without a driver: %v, want an UnavailableError", err)
	}
	n.change(func(topology *vendorsim.Topology) { topology.Driver.State = vendorsim.DriverLoaded })
	n.found()
	Measured(t, m, first)

	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := m.Measure(canceled, first); !errors.Is(err, context.Canceled) {
		t.Errorf("Measure with a canceled context: %v", err)
	}
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Measure(t.Context(), first); !errors.Is(err, backend.ErrClosed) {
		t.Errorf("Measure after Close: %v", err)
	}
}

// testMeasureHungCard: a call that hangs is waited for once, and delays no other device.
func testMeasureHungCard(t *testing.T, h Harness) {
	topology := h.topology(2)
	n := openWith(t, h, topology, backend.Options{CallTimeout: callLimit})
	m := n.meter()
	if m == nil {
		return // the ability is optional
	}
	first, second := h.ID(topology.Cards[0].UUID), h.ID(topology.Cards[1].UUID)
	n.revive()
	n.change(func(topology *vendorsim.Topology) {
		topology.Cards[1].Calls.Slow = vendorsim.Delays{h.CardCall: time.Hour}
	})
	want := h.CardCall + "(1) did not answer within " + callLimit.String()
	for i := range 3 {
		start := time.Now()
		_, err := m.Measure(t.Context(), second)
		if err == nil || err.Error() != want {
			t.Errorf("Measure of a device that hangs: %v, want %q", err, want)
		}
		if took := time.Since(start); i > 0 && took >= callLimit {
			t.Errorf("Measure waited %v for a call that hangs already", took)
		}
		Measured(t, m, first)
	}
	n.change(calm)
	AwaitMeasured(t, m, second)
}

// testMeasureInUse: while the library is initialised again and again and closed at last, a
// measurement is right, or none.
func testMeasureInUse(t *testing.T, h Harness) {
	topology := h.topology(2)
	topology.Processes = []vendorsim.Process{{Card: 0, PID: 1, MemoryMiB: 3}, {Card: 1, PID: 2, MemoryMiB: 5}}
	n := open(t, h, topology)
	m := n.meter()
	if m == nil {
		return // the ability is optional
	}
	n.found()
	var users sync.WaitGroup
	measured := make([]int, len(topology.Processes))
	for i, p := range topology.Processes {
		users.Go(func() {
			for {
				got, err := m.Measure(t.Context(), h.ID(topology.Cards[i].UUID))
				switch {
				case errors.Is(err, backend.ErrClosed):
					return
				case err != nil: // the driver is not loaded, or only now
				case got.UsedBytes != uint64(p.MemoryMiB)<<20 || len(got.Processes) != 1 || got.Processes[0].PID != p.PID:
					t.Errorf("in use of device %d: %+v", i, got)
				default:
					measured[i]++
				}
				time.Sleep(time.Millisecond)
			}
		})
	}
	for range 5 {
		n.change(func(topology *vendorsim.Topology) { topology.Driver.State = vendorsim.DriverAbsent })
		n.unavailable()
		n.change(func(topology *vendorsim.Topology) { topology.Driver.State = vendorsim.DriverLoaded })
		n.found()
		time.Sleep(20 * time.Millisecond)
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
	users.Wait()
	for i, times := range measured {
		if times == 0 {
			t.Errorf("device %d was never measured", i)
		}
	}
}
