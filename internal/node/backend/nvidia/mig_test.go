package nvidia_test

import (
	"fmt"
	"maps"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// a100s are GPUs of 40 GB that can be cut.
func a100s(n int) []vendorsim.Card {
	cards := vendorsim.GPUs(n, 40960)
	for i := range cards {
		cards[i].Model, cards[i].MIG, cards[i].NUMA = "NVIDIA A100-SXM4-40GB", vendorsim.MIGDisabled, i
	}
	return cards
}

// migMachine is a machine whose driver has device files for its MIG devices.
type migMachine struct {
	*machine
	root string
}

func newMIGMachine(t *testing.T, o backend.Options, cards ...vendorsim.Card) *migMachine {
	t.Helper()
	root := t.TempDir()
	o.ProcRoot, o.DevRoot = root+"/proc", root
	m := &migMachine{newMachine(t, o, cards...), root}
	m.recut(func(*vendorsim.Topology) {})
	return m
}

// recut changes the MIG devices, with the files that the driver makes for them.
func (m *migMachine) recut(f func(*vendorsim.Topology)) {
	m.t.Helper()
	m.change(f)
	if err := m.topology.WriteCapabilities(m.root, func(path string) error { return os.WriteFile(path, nil, 0o600) }); err != nil {
		m.t.Fatal(err)
	}
}

// shown are the devices as "index profile health", and the faults with their causes.
func shown(found backend.Found) (devices, faults []string) {
	for _, d := range found.Devices {
		text := accel.IndexText(d.Index)
		if d.Partitioned {
			text += " cut"
		}
		if d.Profile != "" {
			text += " " + d.Profile
		}
		if d.Health.Unhealthy {
			text += " " + d.Health.Cause
		}
		devices = append(devices, text)
	}
	for _, f := range found.Faults {
		faults = append(faults, strings.TrimSpace(accel.IndexText(f.Index)+" "+f.Cause))
	}
	return devices, faults
}

// TestStrategies: which devices are listed, and what is wrong with a layout.
func TestStrategies(t *testing.T) {
	cut := vendorsim.Partition
	gpus := a100s(3)
	for name, tt := range map[string]struct {
		strategy string
		cards    []vendorsim.Card
		devices  []string
		faults   []string
		problem  string
	}{
		"none": {backend.MIGNone, []vendorsim.Card{cut(gpus[0], "1g.5gb"), gpus[1]}, []string{"0 cut", "1"}, nil, ""},
		"mixed": {
			backend.MIGMixed, []vendorsim.Card{gpus[0], cut(gpus[1], "3g.20gb", "", "1g.5gb", "1g.5gb+me"), cut(gpus[2])},
			[]string{"0", "1 cut", "2 cut", "1:0 3g.20gb", "1:2 1g.5gb", "1:3 1g.5gb+me"}, nil, "",
		},
		"mixed with parts of instances": {
			backend.MIGMixed, []vendorsim.Card{cut(gpus[0], "1c.2g.10gb", "1c.2g.10gb", "2g.10gb")},
			[]string{"0 cut", "0:2 2g.10gb"}, []string{"0:0 not-offered", "0:1 not-offered"}, "",
		},
		"single, none cut": {backend.MIGSingle, gpus[:2], []string{"0", "1"}, nil, ""},
		"single, all alike": {
			backend.MIGSingle, []vendorsim.Card{cut(gpus[0], "1g.5gb", "1g.5gb"), cut(gpus[1], "1g.5gb")},
			[]string{"0 cut", "1 cut", "0:0 1g.5gb", "0:1 1g.5gb", "1:0 1g.5gb"}, nil, "",
		},
		"single, parts of instances": {
			backend.MIGSingle, []vendorsim.Card{cut(gpus[0], "1c.2g.10gb", "1c.2g.10gb")},
			[]string{"0 cut", "0:0 1c.2g.10gb", "0:1 1c.2g.10gb"}, nil, "",
		},
		"single, one is whole": {
			backend.MIGSingle, []vendorsim.Card{cut(gpus[0], "1g.5gb"), gpus[1]}, []string{"0 cut", "1", "0:0 1g.5gb"}, nil,
			"GPU 0 is in MIG mode and GPU 1 is not",
		},
		"single, one is empty": {
			backend.MIGSingle, []vendorsim.Card{cut(gpus[0], "1g.5gb"), cut(gpus[1])}, []string{"0 cut", "1 cut", "0:0 1g.5gb"}, nil,
			"GPU 1 is in MIG mode and has no MIG devices",
		},
		"single, they differ": {
			backend.MIGSingle, []vendorsim.Card{cut(gpus[0], "1g.5gb", "2g.10gb")}, []string{"0 cut", "0:0 1g.5gb", "0:1 2g.10gb"}, nil,
			"the MIG devices differ: 0:0 is 1g.5gb (4960 MiB), 0:1 is 2g.10gb (9920 MiB)",
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMIGMachine(t, backend.Options{MIG: tt.strategy}, tt.cards...)
			found := m.found()
			devices, faults := shown(found)
			if diff := cmp.Diff(tt.devices, devices); diff != "" {
				t.Errorf("devices (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tt.faults, faults); diff != "" {
				t.Errorf("faults (-want +got):\n%s", diff)
			}
			if (found.Problem == nil) != (tt.problem == "") || found.Problem != nil &&
				!strings.Contains(found.Problem.Error(), tt.problem) {
				t.Errorf("problem is %v, want %q", found.Problem, tt.problem)
			}
			for _, d := range found.Devices {
				if gpu, _, mig := accel.SplitIndex(d.Index); mig && (d.NUMANode != tt.cards[gpu].NUMA || d.PCI == "" ||
					string(d.Parent) != tt.cards[gpu].UUID || d.Model != tt.cards[gpu].Model) {
					t.Errorf("MIG device %+v is not where its GPU is", d)
				}
			}
		})
	}
}

// TestEditsOfMIGDevices: what a container gets of MIG devices of two GPUs.
func TestEditsOfMIGDevices(t *testing.T) {
	gpus := a100s(2)
	for i := range gpus {
		gpus[i] = vendorsim.Partition(gpus[i], "1g.5gb", "1g.5gb")
	}
	for _, byIndex := range []bool{false, true} {
		m := newMIGMachine(t, backend.Options{MIG: backend.MIGMixed, IndexInEnv: byIndex}, gpus...)
		m.found()
		one, two := m.topology.MIGInstances(0), m.topology.MIGInstances(1)
		e, err := m.Edits(accel.DeviceID(two[1].UUID), accel.DeviceID(one[1].UUID), accel.DeviceID(one[0].UUID))
		if err != nil {
			t.Fatal(err)
		}
		want := strings.Join([]string{one[0].UUID, one[1].UUID, two[1].UUID}, ",")
		if byIndex {
			want = "0:0,0:1,1:1"
		}
		if got := e.Env["NVIDIA_VISIBLE_DEVICES"]; got != want {
			t.Errorf("by index %t: NVIDIA_VISIBLE_DEVICES is %q, want %q", byIndex, got, want)
		}
		var nodes []string
		for _, n := range e.DeviceNodes {
			nodes = append(nodes, n.Path)
		}
		wantNodes := []string{"/dev/nvidia0"}
		for i, mig := range []vendorsim.MIGInstance{one[0], one[1], two[1]} {
			if i == 2 {
				wantNodes = append(wantNodes, "/dev/nvidia1")
			}
			wantNodes = append(wantNodes, fmt.Sprint("/dev/nvidia-caps/nvidia-cap", mig.Caps.GPUInstance),
				fmt.Sprint("/dev/nvidia-caps/nvidia-cap", mig.Caps.ComputeInstance))
		}
		if diff := cmp.Diff(wantNodes, nodes); diff != "" {
			t.Errorf("device nodes (-want +got):\n%s", diff)
		}
		if len(e.CDIDevices) != 3 || e.CDIDevices[2].Name != two[1].UUID {
			t.Errorf("CDI devices are %v", e.CDIDevices)
		}
	}
}

// TestCapabilitiesOfMIGDevices: a device whose files do not exist is unhealthy until they
// do.
func TestCapabilitiesOfMIGDevices(t *testing.T) {
	m := newMIGMachine(t, backend.Options{MIG: backend.MIGMixed}, vendorsim.Partition(a100s(1)[0], "1g.5gb", "1g.5gb"))
	m.recut(func(t *vendorsim.Topology) { t.Cards[0].MIGDevices[1].Caps.Missing = true })
	m.wantCauses("a file is missing", "- - mig-caps-missing")
	m.recut(func(t *vendorsim.Topology) { t.Cards[0].MIGDevices[1].Caps.Missing = false })
	m.wantCauses("all files are there", "- - -")
	if err := os.RemoveAll(m.root + "/proc"); err != nil {
		t.Fatal(err)
	}
	m.wantCauses("the driver does not say which files", "- mig-caps-missing mig-caps-missing")
}

// TestEventsOfMIGDevices: an error of an instance is that of its MIG devices, one of the
// GPU that of all.
func TestEventsOfMIGDevices(t *testing.T) {
	gpus := a100s(2)
	gpus[0] = vendorsim.Partition(gpus[0], "1g.5gb", "2g.10gb")
	m := newMIGMachine(t, backend.Options{MIG: backend.MIGMixed}, gpus...)
	m.wantCauses("at first", "- - - -")
	woken := m.listening()
	m.change(func(t *vendorsim.Topology) { t.Cards[0].MIGDevices[1].XID = vendorsim.XID{Code: 94, Number: 1} })
	m.wantWoken(woken)
	m.wantCauses("an error of an instance", "- - - xid-94")
	m.wantCauses("once", "- - - -")
	woken = m.await()
	m.raise(0, 79)
	m.wantWoken(woken)
	m.wantCauses("an error of the GPU", "xid-79 - xid-79 xid-79")
}

// TestMIGDevicesComeAndGo: each discovery lists what exists, also under numbers that
// others had; events of new ones are heard.
func TestMIGDevicesComeAndGo(t *testing.T) {
	gpu := vendorsim.Partition(a100s(1)[0], "1g.5gb", "2g.10gb")
	m := newMIGMachine(t, backend.Options{MIG: backend.MIGMixed}, gpu)
	m.found()
	was := accel.DeviceID(m.topology.MIGInstances(0)[1].UUID)
	for _, tt := range []struct {
		profiles []string
		want     string
	}{{[]string{"3g.20gb"}, "0 cut, 0:0 3g.20gb"}, {nil, "0 cut"}, {[]string{"", "1g.5gb"}, "0 cut, 0:1 1g.5gb"}} {
		m.recut(func(t *vendorsim.Topology) { t.Cards[0] = vendorsim.Partition(t.Cards[0], tt.profiles...) })
		if got, _ := shown(m.found()); strings.Join(got, ", ") != tt.want {
			t.Errorf("with %q, devices are %q, want %q", tt.profiles, got, tt.want)
		}
	}
	if _, err := m.Edits(was); err == nil || !strings.Contains(err.Error(), "now") {
		t.Errorf("the MIG device whose number another one has: %v", err)
	}
	woken := m.listening()
	m.change(func(t *vendorsim.Topology) { t.Cards[0].MIGDevices[0].XID = vendorsim.XID{Code: 94, Number: 1} })
	m.wantWoken(woken)
	m.wantCauses("an error of a new one", "- xid-94")
	m.recut(func(t *vendorsim.Topology) { t.Cards[0].MIG, t.Cards[0].MIGDevices = vendorsim.MIGDisabled, nil })
	if got, _ := shown(m.found()); strings.Join(got, ", ") != "0" {
		t.Errorf("out of MIG mode, devices are %q", got)
	}
}

// TestMIGDevicesOfALostGPU: they are faults with it.
func TestMIGDevicesOfALostGPU(t *testing.T) {
	gpus := a100s(2)
	gpus[1] = vendorsim.Partition(gpus[1], "1g.5gb", "1g.5gb")
	m := newMIGMachine(t, backend.Options{MIG: backend.MIGMixed}, gpus...)
	m.found()
	m.change(func(t *vendorsim.Topology) { t.Cards[1].Lost = true })
	for range 2 {
		found := m.found()
		devices, _ := shown(found)
		var faults []string
		for _, f := range found.Faults {
			faults = append(faults, accel.IndexText(f.Index)+" "+string(f.ID))
		}
		want := []string{"1 " + gpus[1].UUID, "1:0 " + m.topology.MIGInstances(1)[0].UUID, "1:1 " + m.topology.MIGInstances(1)[1].UUID}
		if strings.Join(devices, ", ") != "0" || !cmp.Equal(want, faults) {
			t.Errorf("devices are %q, faults %q; want %q", devices, faults, want)
		}
	}
}

// TestMIGFunctionsThatFail: the GPU or the MIG device that is cut is a fault, and no call ends the
// process.
func TestMIGFunctionsThatFail(t *testing.T) {
	gpus := a100s(2)
	gpus[1] = vendorsim.Partition(gpus[1], "1g.5gb")
	for function, want := range map[string]string{
		"nvmlDeviceGetMaxMigDeviceCount": "1", "nvmlDeviceGetMigDeviceHandleByIndex": "1:0,1:1,1:2,1:3,1:4,1:5,1:6",
		"nvmlDeviceGetAttributes_v2": "1:0", "nvmlGpuInstanceGetInfo": "1:0", "nvmlComputeInstanceGetInfo_v2": "1:0",
		"nvmlDeviceGetMigMode": "0,1",
	} {
		t.Run(function, func(t *testing.T) {
			m := newMIGMachine(t, backend.Options{MIG: backend.MIGMixed}, gpus...)
			m.change(func(t *vendorsim.Topology) { t.Library.Fail = vendorsim.Failures{function: 999} })
			var got []string
			for _, f := range m.found().Faults {
				got = append(got, accel.IndexText(f.Index))
			}
			if strings.Join(got, ",") != want {
				t.Errorf("faults are %q, want %s", got, want)
			}
		})
	}
}

// TestLabelsOfMIGDevices compares with what NVIDIA's GPU feature discovery writes.
func TestLabelsOfMIGDevices(t *testing.T) {
	gpus := a100s(2)
	small := vendorsim.Partition(gpus[0], "1g.5gb", "1g.5gb")
	ofOne := func(prefix string) map[string]string { // of a MIG device of 1g.5gb
		return map[string]string{
			prefix + ".memory": "4960", prefix + ".multiprocessors": "14", prefix + ".slices.gi": "1", prefix + ".slices.ci": "1",
			prefix + ".engines.copy": "1", prefix + ".engines.decoder": "0", prefix + ".engines.encoder": "0",
			prefix + ".engines.jpeg": "0",
			prefix + ".engines.ofa":  "0",
		}
	}
	with := func(more ...map[string]string) map[string]string {
		out := map[string]string{}
		for _, m := range more {
			maps.Copy(out, m)
		}
		return out
	}
	type labels = map[string]string
	for name, tt := range map[string]struct {
		strategy string
		cards    []vendorsim.Card
		sharing  backend.Sharing
		want     labels // those that begin with nvidia.com/gpu.{product,count,...} and nvidia.com/mig
	}{
		"none": {backend.MIGNone, []vendorsim.Card{small, gpus[1]}, backend.Sharing{Replicas: 1}, labels{
			"gpu.product": "NVIDIA-A100-SXM4-40GB", "gpu.count": "2", "gpu.replicas": "1", "gpu.sharing-strategy": "none",
			"gpu.memory": "40960", "mig.strategy": "none",
		}},
		"mixed": {backend.MIGMixed, []vendorsim.Card{small, gpus[1]}, backend.Sharing{Replicas: 1}, with(labels{
			"gpu.product": "NVIDIA-A100-SXM4-40GB", "gpu.count": "2", "gpu.replicas": "1", "gpu.sharing-strategy": "none",
			"gpu.memory": "40960", "mig.strategy": "mixed", "mig-1g.5gb.product": "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb",
			"mig-1g.5gb.count": "2", "mig-1g.5gb.replicas": "1", "mig-1g.5gb.sharing-strategy": "none",
		}, ofOne("mig-1g.5gb"))},
		"mixed, all cut and shared": {
			backend.MIGMixed, []vendorsim.Card{small},
			backend.Sharing{Replicas: 4, Profiles: map[string]backend.Sharing{"1g.5gb": {Replicas: 2}}},
			with(labels{
				"gpu.product": "NVIDIA-A100-SXM4-40GB", "gpu.count": "1", "gpu.replicas": "0", "gpu.memory": "40960",
				"mig.strategy": "mixed", "mig-1g.5gb.product": "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb-SHARED",
				"mig-1g.5gb.count": "2", "mig-1g.5gb.replicas": "2", "mig-1g.5gb.sharing-strategy": "time-slicing",
			}, ofOne("mig-1g.5gb")),
		},
		"single": {backend.MIGSingle, []vendorsim.Card{small}, backend.Sharing{Replicas: 1}, with(labels{
			"gpu.product": "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", "gpu.count": "2", "gpu.replicas": "1", "gpu.sharing-strategy": "none",
			"mig.strategy": "single",
		}, ofOne("gpu"))},
		"single, none cut": {backend.MIGSingle, gpus, backend.Sharing{Replicas: 1}, labels{
			"gpu.product": "NVIDIA-A100-SXM4-40GB", "gpu.count": "2", "gpu.replicas": "1", "gpu.sharing-strategy": "none",
			"gpu.memory": "40960", "mig.strategy": "single",
		}},
		"single, invalid": {backend.MIGSingle, []vendorsim.Card{small, gpus[1]}, backend.Sharing{Replicas: 1}, labels{
			"gpu.product": "NVIDIA-A100-SXM4-40GB-MIG-INVALID", "gpu.count": "0", "gpu.replicas": "0", "gpu.memory": "0",
			"mig.strategy": "single",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMIGMachine(t, backend.Options{MIG: tt.strategy}, tt.cards...)
			m.found()
			want := labels{"nvidia.com/mig.capable": "true"}
			for key, value := range tt.want {
				want["nvidia.com/"+key] = value
			}
			got := m.Labels(tt.sharing)
			maps.DeleteFunc(got, func(key, _ string) bool {
				for _, other := range []string{"cuda.", "gpu.present", "gpu.machine", "gpu.family", "gpu.mode", "gpu.compute."} {
					if strings.HasPrefix(key, "nvidia.com/"+other) {
						return true
					}
				}
				return false
			})
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("labels (-want +got):\n%s", diff)
			}
		})
	}
}

// TestEventOfAMIGDeviceThatCannotBeDescribed: it is reported once the MIG device is.
func TestEventOfAMIGDeviceThatCannotBeDescribed(t *testing.T) {
	m := newMIGMachine(t, backend.Options{MIG: backend.MIGMixed}, vendorsim.Partition(a100s(1)[0], "1g.5gb", "2g.10gb"))
	m.wantCauses("at first", "- - -")
	woken := m.listening()
	m.change(func(t *vendorsim.Topology) {
		t.Cards[0].MIGDevices[1].XID = vendorsim.XID{Code: 95, Number: 1}
		t.Library.Fail = vendorsim.Failures{"nvmlDeviceGetAttributes_v2": 999}
	})
	m.wantWoken(woken)
	m.found()
	m.change(func(t *vendorsim.Topology) { t.Library.Fail = nil })
	m.wantCauses("described again", "- - xid-95")
	m.wantCauses("once", "- - -")
}

// TestUnequalLayoutOfALostGPU: by the strategy single nothing is offered because the GPU
// that differs cannot be described.
func TestUnequalLayoutOfALostGPU(t *testing.T) {
	gpus := a100s(2)
	m := newMIGMachine(t, backend.Options{MIG: backend.MIGSingle}, vendorsim.Partition(gpus[0], "1g.5gb"), gpus[1])
	m.found()
	m.change(func(t *vendorsim.Topology) { t.Cards[1].Lost = true })
	found := m.found()
	product := m.Labels(backend.Sharing{Replicas: 1})["nvidia.com/gpu.product"]
	if found.Problem == nil || !strings.HasSuffix(product, "-MIG-INVALID") {
		t.Errorf("problem is %v, the product %q", found.Problem, product)
	}
	m.change(func(t *vendorsim.Topology) { t.Cards = t.Cards[:1] })
	if found := m.found(); found.Problem != nil {
		t.Errorf("without that GPU, the problem is %v", found.Problem)
	}
}
