package iluvatar

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/backendtest"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

const (
	allProcesses     = "ixmlDeviceGetComputeAllProcesses"
	runningProcesses = "nvmlDeviceGetComputeRunningProcesses"
)

func TestProcessSizes(t *testing.T) {
	if v1, all := unsafe.Sizeof(process{}), unsafe.Sizeof(anyProcess{}); v1 != 16 || all != 32 {
		t.Errorf("processes have %d and %d bytes, want 16 and 32", v1, all)
	}
}

// The two functions differ in how they say that a list does not fit.
func TestMeasureManyProcesses(t *testing.T) {
	for name, fail := range map[string]vendorsim.Failures{
		"all processes":     {runningProcesses: 999},
		"running processes": {allProcesses: 3},
	} {
		for _, count := range []int{1, firstRoom, firstRoom + 1, 250} {
			t.Run(fmt.Sprintf("%s, %d", name, count), func(t *testing.T) {
				topology := boards(1, 2)
				topology.Library.Fail = fail
				n := start(t, topology, backend.Options{})
				id := n.found().Devices[1].ID
				want := backend.Measured{UsedBytes: uint64(count) << 20}
				n.change(func(topology *vendorsim.Topology) {
					topology.Cards[1].MemoryMiB = 1024
					for i := range count {
						topology.Processes = append(topology.Processes, vendorsim.Process{Card: 1, PID: 100 + i, MemoryMiB: 1})
						want.Processes = append(want.Processes, backend.Process{PID: 100 + i, Memory: new(uint64(1 << 20))})
					}
				})
				backendtest.WantMeasured(t, n, id, want)
			})
		}
	}
}

func TestMeasureFails(t *testing.T) {
	for name, tt := range map[string]struct {
		fail        vendorsim.Failures
		unsupported bool
		want        string // "" for no error
	}{
		"no function of the vendor's": {vendorsim.Failures{allProcesses: 3}, false, ""},
		"neither function": {vendorsim.Failures{allProcesses: 3, runningProcesses: 13}, true,
			runningProcesses + "(0): the library lacks this function (13)"},
		"the vendor's function fails": {vendorsim.Failures{allProcesses: 999}, false, allProcesses + "(0): unknown error (999)"},
		"a list that never fits": {vendorsim.Failures{allProcesses: 7}, false,
			allProcesses + "(0) says more than 65536 processes, which cannot be"},
		"no memory": {vendorsim.Failures{"nvmlDeviceGetMemoryInfo": 999}, false,
			"nvmlDeviceGetMemoryInfo(0): unknown error (999)"},
		"the other function for memory": {vendorsim.Failures{"nvmlDeviceGetMemoryInfo": 3}, false, ""},
	} {
		t.Run(name, func(t *testing.T) {
			n := start(t, boards(1, 1), backend.Options{})
			id := n.found().Devices[0].ID
			n.change(func(topology *vendorsim.Topology) {
				topology.Library.Fail = tt.fail
				topology.Processes = []vendorsim.Process{{PID: 1, MemoryMiB: 1}}
			})
			measured, err := n.Measure(t.Context(), id)
			if tt.want == "" {
				if err != nil || measured.UsedBytes != 1<<20 || len(measured.Processes) != 1 {
					t.Errorf("Measure = %+v, %v", measured, err)
				}
				return
			}
			if err == nil || errors.Is(err, errors.ErrUnsupported) != tt.unsupported || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Measure = %+v, %v; want %q, unsupported %v", measured, err, tt.want, tt.unsupported)
			}
		})
	}
}

func TestMeasureWithoutTheFunctions(t *testing.T) {
	for name, tt := range map[string]struct {
		without   []string
		supported bool
	}{
		"the vendor's": {[]string{allProcesses}, true}, "both": {[]string{allProcesses, runningProcesses}, false},
	} {
		t.Run(name, func(t *testing.T) {
			topology := boards(1, 1)
			topology.Processes = []vendorsim.Process{{PID: 1, MemoryMiB: 1}}
			file, _ := build(t, topology, tt.without...)
			b := newRoot(t).open(backend.Options{LibraryPath: file})
			id := backendtest.Found(t, b).Devices[0].ID
			measured, err := b.Measure(t.Context(), id)
			if tt.supported != (err == nil && len(measured.Processes) == 1) || tt.supported == errors.Is(err, errors.ErrUnsupported) {
				t.Errorf("Measure = %+v, %v", measured, err)
			}
		})
	}
}

func TestMeasureHangs(t *testing.T) {
	n := start(t, boards(2, 1), backend.Options{CallTimeout: time.Second})
	devices := n.found().Devices
	n.change(func(topology *vendorsim.Topology) {
		topology.Cards[0].Calls.Slow = vendorsim.Delays{allProcesses: time.Hour}
	})
	for range 2 {
		const want = allProcesses + "(0) did not answer within 1s"
		if _, err := n.Measure(t.Context(), devices[0].ID); err == nil || err.Error() != want {
			t.Errorf("Measure: %v, want %q", err, want)
		}
		backendtest.WantMeasured(t, n, devices[1].ID, backend.Measured{})
	}
	n.change(func(topology *vendorsim.Topology) { topology.Cards[0].Calls.Slow = nil })
	backendtest.AwaitMeasured(t, n, devices[0].ID)
}
