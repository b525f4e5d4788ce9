package nvidia

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/devicelist"
)

// gpuWith is a GPU of that index in MIG mode with MIG devices of these profiles.
func gpuWith(index int, profiles ...migProfile) *gpu {
	g := wholeGPUOf(index)
	g.Partitioned = true
	for i, p := range profiles {
		g.mig = append(g.mig, migDevice{
			number: i, id: accel.DeviceID(fmt.Sprintf("MIG-%d-%d", index, i)), profile: p, instance: instance{uint32(i + 1), 0},
			attributes: nvml.DeviceAttributes{GpuInstanceSliceCount: uint32(p.slices), MemorySizeMB: uint64(p.gigabytes) << 10},
		})
	}
	return g
}

func wholeGPUOf(index int) *gpu {
	return &gpu{Device: devicelist.Device{Device: accel.Device{Index: index, ID: accel.DeviceID(fmt.Sprintf("GPU-%d", index))}}}
}

var (
	small = migProfile{compute: 1, slices: 1, gigabytes: 10}
	large = migProfile{compute: 3, slices: 3, gigabytes: 40}
	part  = migProfile{compute: 1, slices: 3, gigabytes: 40}
)

// TestUniform: by the strategy single nothing is offered unless all GPUs are cut alike.
func TestUniform(t *testing.T) {
	broken := gpuWith(1, small, large)
	broken.mig[1].err = errors.New("it does not answer")
	for name, tt := range map[string]struct {
		strategy string
		gpus     []*gpu
		want     string // "" for none
	}{
		"no GPU":                       {backend.MIGSingle, nil, ""},
		"none in MIG mode":             {backend.MIGSingle, []*gpu{wholeGPUOf(0), wholeGPUOf(1)}, ""},
		"all alike":                    {backend.MIGSingle, []*gpu{gpuWith(0, small, small), gpuWith(1, small)}, ""},
		"alike and parts of instances": {backend.MIGSingle, []*gpu{gpuWith(0, part, part)}, ""},
		"one is not in MIG mode": {backend.MIGSingle, []*gpu{gpuWith(0, small), wholeGPUOf(1)},
			"GPU 0 is in MIG mode and GPU 1 is not"},
		"one has no MIG devices": {backend.MIGSingle, []*gpu{gpuWith(0, small), gpuWith(1)},
			"GPU 1 is in MIG mode and has no MIG devices"},
		"they differ on one GPU": {backend.MIGSingle, []*gpu{gpuWith(0, small, large)},
			"the MIG devices differ: 0:0 is 1g.10gb (10240 MiB), 0:1 is 3g.40gb (40960 MiB)"},
		"they differ between GPUs": {backend.MIGSingle, []*gpu{gpuWith(0, small), gpuWith(1, large)},
			"0:0 is 1g.10gb (10240 MiB), 1:0 is"},
		"one that cannot be read":    {backend.MIGSingle, []*gpu{gpuWith(0, small), broken}, ""},
		"anything by strategy mixed": {backend.MIGMixed, []*gpu{gpuWith(0, small, large), wholeGPUOf(1), gpuWith(2)}, ""},
		"anything by strategy none":  {backend.MIGNone, []*gpu{gpuWith(0, small), wholeGPUOf(1)}, ""},
		"the attributes alone differ": {backend.MIGSingle, []*gpu{gpuWith(0, small), withEngines(gpuWith(1, small))},
			"the MIG devices differ"},
	} {
		t.Run(name, func(t *testing.T) {
			err := uniform(tt.strategy, tt.gpus)
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("problem is %v, want %q", err, tt.want)
			}
			if err != nil && !strings.Contains(err.Error(), "migStrategy mixed") {
				t.Errorf("problem %q names no remedy", err)
			}
		})
	}
}

func withEngines(g *gpu) *gpu {
	g.mig[0].attributes.SharedDecoderCount = 1
	return g
}

// TestMIGDevicesOfAListing: MIG devices are entries of their own after the GPUs, and
// those that are not offered are faults.
func TestMIGDevicesOfAListing(t *testing.T) {
	b, err := New(backend.Options{MIG: backend.MIGMixed, DriverRoot: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	twice := gpuWith(2, small, small)
	twice.mig[1].id = twice.mig[0].id
	first := gpuWith(0, small, part)
	first.NUMANode, first.PCI, first.Model, first.Minor = 1, "0000:3b:00.0", "NVIDIA H100", 4
	l := devicelist.Listing[*gpu]{Devices: []*gpu{first, wholeGPUOf(1), twice}}
	addMIG(b, &l, faults{})
	var got []string
	for _, g := range l.Devices {
		got = append(got, accel.IndexText(g.Index)+" "+string(g.ID)+" "+g.Profile)
	}
	if diff := cmp.Diff([]string{"0 GPU-0 ", "1 GPU-1 ", "2 GPU-2 ", "0:0 MIG-0-0 1g.10gb"}, got); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
	d := l.Devices[3]
	if d.Parent != "GPU-0" || d.Partitioned || d.NUMANode != 1 || d.PCI != first.PCI || d.Model != first.Model || d.Minor != 4 ||
		d.Owner != "GPU-0" || d.MemoryBytes != 10<<30 {
		t.Errorf("MIG device is %+v", d.Device)
	}
	if d.Health.Cause != causeCapabilities || !strings.Contains(d.Health.Reason, "gpu4/gi1/ci0/access") {
		t.Errorf("without capabilities, health is %+v", d.Health)
	}
	texts := map[string]string{}
	for _, f := range l.Faults {
		texts[accel.IndexText(f.Index)+" "+string(f.ID)+" "+f.Cause] = f.Err.Error()
	}
	if len(texts) != 3 || !strings.Contains(texts["0:1 MIG-0-1 not-offered"], "1c.3g.40gb, a part of a GPU instance") ||
		!strings.Contains(texts["2:0 MIG-2-0 "], "several MIG devices") || !strings.Contains(texts["2:1 MIG-2-0 "], "several MIG devices") {
		t.Errorf("faults are %v", texts)
	}
}

// TestMIGDevicesOfAGPUThatFails: they fail with it, as they were listed last.
func TestMIGDevicesOfAGPUThatFails(t *testing.T) {
	l := devicelist.Listing[*gpu]{Devices: []*gpu{gpuWith(0, small, small), gpuWith(1, small)}}
	places := placesOf(&l, nil)
	lost := backend.Fault{Index: 0, ID: "GPU-0", Err: errors.New("lost"), Cause: accel.CauseUnreachable}
	got := withPlaces([]backend.Fault{lost}, places)
	if len(got) != 3 || got[1].ID != "MIG-0-0" || got[2].ID != "MIG-0-1" || got[2].Index != accel.PartitionIndex(0, 1) ||
		got[2].Cause != accel.CauseUnreachable {
		t.Errorf("faults are %v", got)
	}
	if other := withPlaces([]backend.Fault{{Index: 0, ID: "GPU-x", Err: lost.Err}}, places); len(other) != 1 {
		t.Errorf("another GPU's faults are %v", other)
	}
	after := placesOf(&devicelist.Listing[*gpu]{Devices: []*gpu{gpuWith(1)}, Faults: got}, places)
	if len(after) != 2 || after["MIG-0-1"] != places["MIG-0-1"] {
		t.Errorf("places are %v after GPU 0 failed and GPU 1 lost its MIG devices", after)
	}
}

// TestEventsOfInstances: an event about an instance is about its MIG devices alone, one
// about a GPU about all of them.
func TestEventsOfInstances(t *testing.T) {
	b, err := New(backend.Options{})
	if err != nil {
		t.Fatal(err)
	}
	b.hears = map[nvml.Device]accel.DeviceID{nil: "GPU-0"}
	xid := func(code uint64, gi, ci uint32) {
		b.note(t.Context(), nvml.EventData{EventType: nvml.EventTypeXidCriticalError, EventData: code, GpuInstanceId: gi,
			ComputeInstanceId: ci})
	}
	xid(94, 1, 0)
	xid(95, 2, anyInstance)
	xid(79, anyInstance, anyInstance)
	xid(92, 0, 0)
	for _, tt := range []struct {
		gpu  accel.DeviceID
		of   instance
		want string
	}{
		{"GPU-0", instance{1, 0}, "xid-79 xid-94"}, {"GPU-0", instance{1, 1}, "xid-79"}, {"GPU-0", instance{2, 3}, "xid-79 xid-95"},
		{"GPU-0", instance{0, 0}, "xid-79 xid-92"}, {"GPU-1", instance{1, 0}, ""},
	} {
		if got := causesOf(b.reported.faults.ofMIG(tt.gpu, &migDevice{id: "MIG-x", instance: tt.of})); got != tt.want {
			t.Errorf("instance %v of %s has %q, want %q", tt.of, tt.gpu, got, tt.want)
		}
	}
	if got := causesOf(b.reported.faults.ofGPU("GPU-0", true)); got != "xid-79" {
		t.Errorf("the GPU has %q", got)
	}
	if got := causesOf(b.reported.faults.ofGPU("GPU-0", false)); got != "xid-79 xid-95 xid-94 xid-92" {
		t.Errorf("a GPU that is not cut has %q", got)
	}
}

func causesOf(all []accel.Health) string {
	var out []string
	for _, h := range all {
		out = append(out, h.Cause)
	}
	return strings.Join(out, " ")
}
