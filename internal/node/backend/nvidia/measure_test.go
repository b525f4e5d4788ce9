package nvidia_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/backendtest"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

const (
	computeList  = "nvmlDeviceGetComputeRunningProcesses_v3"
	graphicsList = "nvmlDeviceGetGraphicsRunningProcesses_v3"
	mpsList      = "nvmlDeviceGetMPSComputeRunningProcesses_v3"
	utilization  = "nvmlDeviceGetProcessUtilization"
)

// described is what was measured: "pid MiB percent" of each process, with "-" for what is
// not known.
func described(m backend.Measured) []string {
	out := []string{fmt.Sprintf("%d used", m.UsedBytes>>20)}
	for _, p := range m.Processes {
		memory, part := "-", "-"
		if p.Memory != nil {
			memory = fmt.Sprint(*p.Memory >> 20)
		}
		if p.Utilization != nil {
			part = fmt.Sprint(int(*p.Utilization*100 + 0.5))
		}
		out = append(out, fmt.Sprintf("%d %s %s", p.PID, memory, part))
	}
	return out
}

func (m *machine) wantMeasured(what string, id accel.DeviceID, want ...string) {
	m.t.Helper()
	if diff := cmp.Diff(want, described(backendtest.Measured(m.t, m, id))); diff != "" {
		m.t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

// busy are processes in all lists of the first card.
func busy(topology *vendorsim.Topology) {
	topology.Cards[0].UsedMiB = 50
	topology.Processes = []vendorsim.Process{
		{PID: 30, MemoryMiB: 300, Utilization: 70, Lists: vendorsim.ListCompute | vendorsim.ListGraphics | vendorsim.ListMPS},
		{PID: 20, MemoryMiB: 20, Lists: vendorsim.ListGraphics},
		{PID: 10, MemoryMiB: vendorsim.UnknownMemory, Utilization: 5, Lists: vendorsim.ListMPS},
	}
}

// Each list may be missing; what it has in common with another one stays.
func TestMeasureLists(t *testing.T) {
	for name, tt := range map[string]struct {
		fail        vendorsim.Failures
		want        []string
		unsupported bool // instead
		err         string
	}{
		"all":               {want: []string{"370 used", "10 - 5", "20 20 0", "30 300 70"}},
		"no compute list":   {fail: vendorsim.Failures{computeList: 3}, want: []string{"370 used", "10 - 5", "20 20 0", "30 300 70"}},
		"no graphics list":  {fail: vendorsim.Failures{graphicsList: 3}, want: []string{"370 used", "10 - 5", "30 300 70"}},
		"no list of MPS":    {fail: vendorsim.Failures{mpsList: 13}, want: []string{"370 used", "20 20 0", "30 300 70"}},
		"no utilization":    {fail: vendorsim.Failures{utilization: 3}, want: []string{"370 used", "10 - -", "20 20 -", "30 300 -"}},
		"utilization fails": {fail: vendorsim.Failures{utilization: 999}, want: []string{"370 used", "10 - -", "20 20 -", "30 300 -"}},
		"no sample":         {fail: vendorsim.Failures{utilization: 6}, want: []string{"370 used", "10 - 0", "20 20 0", "30 300 0"}},
		"no lists at all": {fail: vendorsim.Failures{computeList: 3, graphicsList: 3, mpsList: 3}, unsupported: true,
			err: mpsList + "(0): not supported (3)"},
		"no memory of its own": {fail: vendorsim.Failures{"nvmlDeviceGetMemoryInfo": 3}, unsupported: true,
			err: "nvmlDeviceGetMemoryInfo(0)"},
		"a list fails":             {fail: vendorsim.Failures{graphicsList: 999}, err: graphicsList + "(0): unknown error (999)"},
		"a list that always grows": {fail: vendorsim.Failures{utilization: 7}, want: []string{"370 used", "10 - -", "20 20 -", "30 300 -"}},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, backend.Options{}, vendorsim.GPUs(2, 40960)...)
			m.change(busy)
			ids := m.found().Devices
			m.change(func(topology *vendorsim.Topology) { topology.Cards[0].Calls.Fail = tt.fail })
			m.wantMeasured("the other GPU", ids[1].ID, "0 used")
			if tt.err == "" {
				m.wantMeasured("the GPU", ids[0].ID, tt.want...)
				return
			}
			_, err := m.Measure(t.Context(), ids[0].ID)
			if err == nil || errors.Is(err, errors.ErrUnsupported) != tt.unsupported || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("Measure: %v, want %q, unsupported %v", err, tt.err, tt.unsupported)
			}
		})
	}
}

func TestMeasureManyProcesses(t *testing.T) {
	m := newMachine(t, backend.Options{}, vendorsim.GPUs(1, 40960)...)
	id := m.found().Devices[0].ID
	want := []string{"200 used"}
	m.change(func(topology *vendorsim.Topology) {
		for i := range 200 {
			topology.Processes = append(topology.Processes, vendorsim.Process{PID: 1000 - i, MemoryMiB: 1, Utilization: i % 2})
			want = append(want, fmt.Sprintf("%d 1 %d", 801+i, (199-i)%2))
		}
	})
	m.wantMeasured("200 processes", id, want...)
}

// A sample counts until there is a newer one, for a second at most.
func TestMeasureUtilization(t *testing.T) {
	m := newMachine(t, backend.Options{}, vendorsim.GPUs(1, 40960)...)
	id := m.found().Devices[0].ID
	use := func(percent int) {
		m.change(func(topology *vendorsim.Topology) {
			topology.Processes = []vendorsim.Process{{PID: 1, Utilization: percent}}
		})
	}
	use(40)
	for range 5 {
		m.wantMeasured("at once again", id, "0 used", "1 0 40")
	}
	use(90)
	until := func(want string) {
		t.Helper()
		for end := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
			got := described(backendtest.Measured(t, m, id))
			if got[1] == want {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("processes are %q, want %q", got[1:], want)
			}
		}
	}
	until("1 0 90")
	use(0)
	until("1 0 0")
}

func TestMeasureMIG(t *testing.T) {
	m := newMIGMachine(t, backend.Options{MIG: backend.MIGMixed}, a100s(2)...)
	m.recut(func(topology *vendorsim.Topology) {
		topology.Cards[0].UsedMiB = 50
		topology.Cards[0] = vendorsim.Partition(topology.Cards[0], "3g.20gb", "", "1g.5gb")
		topology.Processes = []vendorsim.Process{
			{MIG: new(0), PID: 10, MemoryMiB: 300}, {MIG: new(2), PID: 20, MemoryMiB: 20}, {MIG: new(0), PID: 30, Lists: vendorsim.ListMPS},
		}
	})
	ids := map[string]accel.DeviceID{}
	for _, d := range m.found().Devices {
		ids[accel.IndexText(d.Index)] = d.ID
	}
	m.wantMeasured("the first MIG device", ids["0:0"], "300 used", "10 300 -", "30 0 -")
	m.wantMeasured("the second MIG device", ids["0:2"], "20 used", "20 20 -")
	m.wantMeasured("the GPU that has both", ids["0"], "370 used", "10 300 -", "20 20 -", "30 0 -")
	m.wantMeasured("the GPU that is not cut", ids["1"], "0 used")

	// The number of a MIG device that is gone becomes another's.
	m.recut(func(topology *vendorsim.Topology) {
		topology.Processes = nil
		topology.Cards[0] = vendorsim.Partition(topology.Cards[0], "1g.5gb")
	})
	if measured, err := m.Measure(t.Context(), ids["0:0"]); err == nil || !strings.Contains(err.Error(), "was GPU 0:0, which is MIG-") {
		t.Errorf("Measure of a MIG device that is gone = %+v, %v", measured, err)
	}
	if measured, err := m.Measure(t.Context(), ids["0:2"]); err == nil || errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("Measure of a MIG device without a successor = %+v, %v", measured, err)
	}
	m.change(func(topology *vendorsim.Topology) {
		topology.Cards[0].Calls.Fail = vendorsim.Failures{"nvmlDeviceGetMemoryInfo": 4}
	})
	if _, err := m.Measure(t.Context(), ids["0"]); err == nil || !strings.Contains(err.Error(), "monitor capability") {
		t.Errorf("Measure without permission: %v, want the reason", err)
	}
}

// A call that hangs is a fault of its GPU alone, whichever it is.
func TestMeasureHangs(t *testing.T) {
	for _, call := range []string{computeList, utilization} {
		t.Run(call, func(t *testing.T) {
			m := newMachine(t, backend.Options{CallTimeout: time.Second}, vendorsim.GPUs(2, 40960)...)
			m.change(busy)
			ids := m.found().Devices
			m.change(func(topology *vendorsim.Topology) {
				topology.Cards[0].Calls.Slow = vendorsim.Delays{call: time.Hour}
			})
			for range 2 {
				want := call + "(0) did not answer within 1s"
				if _, err := m.Measure(t.Context(), ids[0].ID); err == nil || err.Error() != want {
					t.Errorf("Measure: %v, want %q", err, want)
				}
				m.wantMeasured("the other GPU", ids[1].ID, "0 used")
			}
			m.change(func(topology *vendorsim.Topology) { topology.Cards[0].Calls.Slow = nil })
			backendtest.AwaitMeasured(t, m, ids[0].ID)
		})
	}
}

// A library of an older driver lacks the functions.
func TestMeasureWithoutTheFunctions(t *testing.T) {
	for name, tt := range map[string]struct {
		without []string
		want    string // of the process; "" for unsupported
	}{
		"one list":    {[]string{mpsList}, "30 300 70"},
		"utilization": {[]string{utilization}, "30 300 -"},
		"all lists":   {[]string{computeList, graphicsList, mpsList}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			folder := filepath.Join(root, libraryFolder)
			if _, err := vendorsim.Build(t.Context(), vendorsim.NVIDIA, folder, vendorsim.Without(tt.without...)); err != nil {
				t.Fatal(err)
			}
			topology := vendorsim.Topology{Cards: vendorsim.GPUs(1, 40960)}
			busy(&topology)
			topology.Processes = topology.Processes[:1]
			backendtest.Write(t, filepath.Join(folder, vendorsim.TopologyName), topology)
			m := newMachine(t, backend.Options{DriverRoot: root}, topology.Cards...)
			id := m.found().Devices[0].ID
			if tt.want != "" {
				m.wantMeasured(name, id, "350 used", tt.want)
				return
			}
			if measured, err := m.Measure(t.Context(), id); !errors.Is(err, errors.ErrUnsupported) {
				t.Errorf("Measure = %+v, %v; want one that is not supported", measured, err)
			}
		})
	}
}

// While the driver is paused, its library is not in the process, even if Measure is called before Discover.
func TestMeasureWhilePaused(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	pause := backend.NewPause(accel.Health{})
	m := newMachine(t, backend.Options{Pause: pause}, vendorsim.GPUs(1, 40960)...)
	m.change(busy)
	id := m.found().Devices[0].ID
	m.wantMeasured("before the pause", id, "370 used", "10 - 5", "20 20 0", "30 300 70")
	pause.Set(upgrading)
	_, err := m.Measure(t.Context(), id)
	_, want := m.Discover(t.Context())
	var paused *backend.PausedError
	if !errors.As(err, &paused) || err.Error() != want.Error() || backend.Unavailable(err) == nil {
		t.Errorf("Measure: %v, want the error of Discover: %v", err, want)
	}
	if lines := mapped(t); len(lines) > 0 {
		t.Errorf("mapped while paused:\n%s", strings.Join(lines, "\n"))
	}
	pause.Set(accel.Health{})
	if _, err := m.Measure(t.Context(), id); backend.Unavailable(err) == nil || errors.As(err, new(*backend.PausedError)) {
		t.Errorf("Measure after the pause and before a Discover: %v", err)
	}
	m.found()
	m.wantMeasured("after the pause", id, "370 used", "10 - 5", "20 20 0", "30 300 70")
	if err := os.Remove(topologyPath()); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Measure(t.Context(), id); err == nil || errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("Measure with a broken library: %v", err)
	}
	m.change(busy)
}
