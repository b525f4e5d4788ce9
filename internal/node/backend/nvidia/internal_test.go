package nvidia

import (
	"fmt"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/devicelist"
)

// A fault that the library does not assign to a GPU may be any GPU's.
func TestEventOfAnUnknownGPUMarksAll(t *testing.T) {
	b, err := New(backend.Options{})
	if err != nil {
		t.Fatal(err)
	}
	xid := func(code uint64) nvml.EventData {
		return nvml.EventData{EventType: nvml.EventTypeXidCriticalError, EventData: code}
	}
	b.note(t.Context(), xid(13))
	b.note(t.Context(), nvml.EventData{EventType: nvml.EventTypeClock})
	if h := b.reported.faults.ofGPU("GPU-a", false); len(h) > 0 {
		t.Errorf("after what does not count, health is %+v", h)
	}
	b.note(t.Context(), xid(79))
	b.note(t.Context(), xid(94))
	b.note(t.Context(), xid(79))
	want := []accel.Health{
		{Unhealthy: true, Cause: "xid-79", Reason: "critical error XID 79 of a GPU that the library does not identify"},
		{Unhealthy: true, Cause: "xid-94", Reason: "critical error XID 94 of a GPU that the library does not identify"},
	}
	for _, id := range []accel.DeviceID{"GPU-a", "GPU-b"} {
		if diff := cmp.Diff(want, b.reported.faults.ofGPU(id, false)); diff != "" {
			t.Errorf("health of %s (-want +got):\n%s", id, diff)
		}
	}
}

func TestFaultsKeepOneOfEachCause(t *testing.T) {
	sick := func(cause, reason string) accel.Health {
		return accel.Health{Unhealthy: true, Cause: cause, Reason: reason}
	}
	a, other := subject{"a", wholeGPU}, subject{"b", wholeGPU}
	one := faults{}.add(a, sick("1", "first")).add(a, sick("2", "first")).add(a, sick("1", "second"))
	both := one.and(faults{}.add(a, sick("2", "third"), sick("3", "third")).add(other, sick("4", "third")).addAll(sick("5", "third")))
	for id, want := range map[accel.DeviceID]string{"a": "1first 2first 3third 5third", "b": "4third 5third", "c": "5third"} {
		var got []string
		for _, h := range both.ofGPU(id, false) {
			got = append(got, h.Cause+h.Reason)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("faults of %s are %q, want %q", id, got, want)
		}
	}
	if len(one.ofGPU("a", false)) != 2 || len(one.ofGPU("b", false)) > 0 || len(one.ofGPU("c", false)) > 0 {
		t.Error("faults that were added to others changed these")
	}
	for n := range uint64(1000) {
		one = one.add(a, sick(fmt.Sprint(n), ""))
	}
	if n := len(one.ofGPU("a", false)); n > maxFaults {
		t.Errorf("%d faults are kept", n)
	}
}

func TestOnlyBit(t *testing.T) {
	for _, tt := range []struct {
		words []uint
		bit   int
		ok    bool
	}{
		{nil, 0, false}, {[]uint{0, 0}, 0, false}, {[]uint{1}, 0, true}, {[]uint{0, 1 << 6}, 70, true},
		{[]uint{3}, 0, false}, {[]uint{1, 1}, 0, false},
	} {
		if bit, ok := onlyBit(tt.words); ok != tt.ok || ok && bit != tt.bit {
			t.Errorf("onlyBit(%b) = %d, %v", tt.words, bit, ok)
		}
	}
}

func TestFamily(t *testing.T) {
	for version, want := range map[[2]int]string{
		{3, 5}: "kepler", {6, 0}: "pascal", {7, 0}: "volta", {7, 5}: "turing", {8, 0}: "ampere", {8, 6}: "ampere",
		{8, 9}: "ada-lovelace", {9, 0}: "hopper", {10, 0}: "blackwell", {12, 0}: "blackwell", {0, 0}: "undefined",
	} {
		if got := family(version[0], version[1]); got != want {
			t.Errorf("family of %v is %s, want %s", version, got, want)
		}
	}
}

func TestMode(t *testing.T) {
	for class, want := range map[string]string{"0x030000": "graphics", "0x030200": "compute", "": "unknown"} {
		if got := mode(class); got != want {
			t.Errorf("mode of class %q is %s, want %s", class, got, want)
		}
	}
}

func TestNodesThatADeviceNeeds(t *testing.T) {
	const gi, ci = "/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-caps/nvidia-cap2"
	for name, tt := range map[string]struct {
		device string
		nodes  []string
		want   bool
	}{
		"a GPU":                       {"GPU-a", []string{"/dev/nvidia0", "/dev/dri/card1"}, true},
		"a GPU without its node":      {"GPU-a", []string{"/dev/nvidia-uvm", "/dev/nvidiactl"}, false},
		"a GPU with two":              {"GPU-a", []string{"/dev/nvidia0", "/dev/nvidia1"}, false},
		"a MIG device":                {"MIG-a", []string{"/dev/nvidia10", gi, ci}, true},
		"a MIG device without a node": {"MIG-a", []string{"/dev/nvidia10", gi}, false},
		"a MIG device without a GPU":  {"MIG-a", []string{gi, ci}, false},
	} {
		d := cdispecs.Device{Name: tt.device}
		for _, path := range tt.nodes {
			d.ContainerEdits.DeviceNodes = append(d.ContainerEdits.DeviceNodes, &cdispecs.DeviceNode{Path: path})
		}
		if got := hasNodes(d); got != tt.want {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
}

// While a driver is replaced, there are GPUs that were listed and no library.
func TestNoSpecificationWithoutTheLibrary(t *testing.T) {
	s := &specifier{
		devices: func() devicelist.Last { return devicelist.Last{Devices: []accel.Device{{ID: "GPU-a"}}} },
		library: func() (*library, error) { return nil, nil },
	}
	const want = "the driver's library is not loaded"
	if cause, err := s.SpecCause(); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("SpecCause = %q, %v; want an error with %q", cause, err, want)
	}
	if _, err := s.Specify(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("Specify: %v; want an error with %q", err, want)
	}
}
