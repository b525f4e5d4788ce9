package vendorsim_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// briefExample is a file with everything, as a person writes it.
const briefExample = `# comment
[driver]
state = loaded            # loaded | absent | broken
version = 1.3.0
[library]
delay_ms = 15             # every call takes this long
slow = EfmlInit:20 , EfmlGetDevMem:3600000
fail = EfmlGetDevMem:254, EfmlInit:6
one_lock = true
[card 0]                  # index 0..n-1
vendor = enflame
model = S60 #2
uuid = U53000090104
memory_mib = 16384
numa = 0
minor = 3
health = unhealthy
lost = true
used_mib = 12
fail = EfmlGetDevUuid:253
slow = EfmlGetDevUuid:253
delay_ms = 5
[card 1]
vendor = enflame
uuid = U53000090104
memory_mib = 0
[ driver   nvidia ]
state = absent
cuda = 12.4
memacct = misc
persistence = on
run = /run/driver
[library iluvatar]
delay_ms = 7
lacks = nvmlInit_v2 , nvmlShutdown
[cgroup]
root = groups
proc = proc
hierarchy = devices
[card 2]
vendor = nvidia
uuid = GPU-1
memory_mib = 40960
serial = 1650
board = b0
chip = 1
pci = 00000000:3B:1f.7
switch = s 0
compute = 9.0
mig = enabled
xid = 79 @ 2
[card 3]
vendor = nvidia
uuid = GPU-2
memory_mib = 40960
mig = disabled
xid = 31
health_bits = 0x8000000000000004
[mig 2.3]
profile = 1c.2g.10gb
gi = 4
ci = 1
uuid = MIG-1
memory_mib = 0
caps = 66 , 67
xid = 94@3
[ mig 2 . 0 ]
profile = 7g.40gb
caps = none
[link 2  3]
lanes = 12
one_way = true
[process 7]
card = 3
pid = 4711
mib = 300
[process 0]
card = 2
pid = 4194304
mib = n/a
mig = 3
utilization = 100
lists = mps , compute
`

// TestEveryVendorHasAStandIn: and no other has.
func TestEveryVendorHasAStandIn(t *testing.T) {
	if got := slices.Sorted(slices.Values(vendorsim.Vendors)); !slices.Equal(got, accel.VendorNames()) {
		t.Errorf("there are stand-ins of %q, and the vendors are %q", got, accel.VendorNames())
	}
}

func TestParse(t *testing.T) {
	got, err := vendorsim.Parse("topology.ini", []byte(briefExample))
	if err != nil {
		t.Fatal(err)
	}
	want := vendorsim.Topology{
		Driver: vendorsim.Driver{State: vendorsim.DriverLoaded, Version: "1.3.0"},
		Library: vendorsim.Library{OneLock: true, Calls: vendorsim.Calls{
			Delay: 15 * time.Millisecond,
			Slow:  vendorsim.Delays{"EfmlGetDevMem": time.Hour, "EfmlInit": 20 * time.Millisecond},
			Fail:  vendorsim.Failures{"EfmlGetDevMem": 254, "EfmlInit": 6},
		}},
		Drivers: map[string]vendorsim.Driver{"nvidia": {State: vendorsim.DriverAbsent, CUDA: "12.4",
			MemoryAccounting: vendorsim.MemoryAccountingMisc, Persistence: true, Run: "/run/driver"}},
		Libraries: map[string]vendorsim.Library{"iluvatar": {Calls: vendorsim.Calls{Delay: 7 * time.Millisecond},
			Lacks: []string{"nvmlInit_v2", "nvmlShutdown"}}},
		ControlGroups: vendorsim.ControlGroups{Root: "groups", Proc: "proc", Hierarchy: "devices"},
		Links:         []vendorsim.Link{{A: 2, B: 3, Lanes: 12, OneWay: true}},
		Processes: []vendorsim.Process{{Card: 3, PID: 4711, MemoryMiB: 300}, {
			Card: 2, MIG: new(3), PID: 4194304, MemoryMiB: vendorsim.UnknownMemory, Utilization: 100,
			Lists: vendorsim.ListCompute | vendorsim.ListMPS,
		}},
		Cards: []vendorsim.Card{
			{
				Vendor: "enflame", Model: "S60", UUID: "U53000090104",
				MemoryMiB: 16384, UsedMiB: 12, Minor: new(3), Unhealthy: true, Lost: true,
				Calls: vendorsim.Calls{
					Delay: 5 * time.Millisecond,
					Slow:  vendorsim.Delays{"EfmlGetDevUuid": 253 * time.Millisecond},
					Fail:  vendorsim.Failures{"EfmlGetDevUuid": 253},
				},
			},
			{Vendor: "enflame", UUID: "U53000090104", NUMA: -1},
			{
				Vendor: "nvidia", UUID: "GPU-1", MemoryMiB: 40960, NUMA: -1, Serial: "1650",
				Board: "b0", Chip: 1, PCI: "00000000:3B:1f.7", Switch: "s 0", Compute: "9.0",
				MIG: vendorsim.MIGEnabled, XID: vendorsim.XID{Code: 79, Number: 2},
				MIGDevices: []vendorsim.MIGDevice{
					{Profile: "7g.40gb", Caps: vendorsim.MIGCaps{Missing: true}},
					{
						Index: 3, Profile: "1c.2g.10gb", GI: new(4), CI: new(1), UUID: "MIG-1", MemoryMiB: new(int64(0)),
						Caps: vendorsim.MIGCaps{GPUInstance: 66, ComputeInstance: 67}, XID: vendorsim.XID{Code: 94, Number: 3},
					},
				},
			},
			{
				Vendor: "nvidia", UUID: "GPU-2", MemoryMiB: 40960, NUMA: -1,
				MIG: vendorsim.MIGDisabled, XID: vendorsim.XID{Code: 31}, HealthBits: 1<<63 | 4,
			},
		},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("topology (-want +got):\n%s", diff)
	}
}

// brokenFiles are files with mistakes. FuzzTopology gives them to the parser
// in C as well.
var brokenFiles = map[string]struct {
	text string
	want []string // all mistakes, without the file's name
}{
	"all at once, in order": {
		"colour = red\n[driver]\nstate = sleepy\nthis line\n[card 0]\nvendor = acme\nmemory_mib = much\nspeed = 3\n[wheel]\nsize = 3\n",
		[]string{
			`1: key "colour" stands before the first section`,
			`3: state = "sleepy" is not loaded, absent or broken`,
			`4: neither a section nor key = value: "this line"`,
			`5: [card 0] has no uuid`,
			`6: vendor = "acme" is not enflame, nvidia or iluvatar`,
			`7: memory_mib = "much" is not an integer from 0 to 4294967295`,
			`8: unknown key "speed" in [card 0]`,
			`9: unknown section [wheel]`,
		},
	},
	"card twice": {
		"[card 0]\nvendor = enflame\nuuid = a\nmemory_mib = 1\n[card 0]\nvendor = enflame\n",
		[]string{"5: card 0 is described twice, first in line 1"},
	},
	"a gap": {
		"[card 0]\nvendor = enflame\nuuid = a\nmemory_mib = 1\n[card 2]\nvendor = enflame\nuuid = c\nmemory_mib = 1\n",
		[]string{"5: there is a card 2 but no card 1"},
	},
	"key twice":     {"[driver]\nversion = 1\nversion = 1\n", []string{"3: version is given twice in this section"}},
	"section twice": {"[library]\n[library]\n", []string{"2: section [library] is given twice"}},
	"open section":  {"[driver\n", []string{"1: a section has no closing ]"}},
	"card number":   {"[card 1024]\n", []string{`1: card = "1024" is not an integer from 0 to 1023`}},
	"signed number": {"[library]\ndelay_ms = +5\n", []string{`2: delay_ms = "+5" is not an integer from 0 to 3600000`}},
	"huge number": {"[library]\ndelay_ms = 99999999999999999999\n",
		[]string{`2: delay_ms = "99999999999999999999" is not an integer from 0 to 3600000`}},
	"fail without code": {"[library]\nfail = EfmlInit\n", []string{"2: fail wants function:code, separated by commas"}},
	"fail with nothing": {"[library]\nfail = EfmlInit:6,\n", []string{"2: fail wants function:code, separated by commas"}},
	"fail with success": {"[library]\nfail = EfmlInit:0\n", []string{`2: fail code = "0" is not an integer from 1 to 999`}},
	"slow with nothing": {"[card 0]\nvendor = enflame\nuuid = a\nmemory_mib = 1\nslow = EfmlInit\n",
		[]string{"5: slow wants function:milliseconds, separated by commas"}},
	"slow and fast": {"[library]\nslow = EfmlInit:0\n", []string{`2: slow milliseconds = "0" is not an integer from 1 to 3600000`}},
	"lock":          {"[library]\none_lock = yes\n", []string{`2: one_lock = "yes" is not true or false`}},
	"limits": {"[driver]\nmemacct = on\npersistence = true\nrun =\nrun = x\n", []string{
		`2: memacct = "on" is not dmem, misc or off`, `3: persistence = "true" is not on or off`,
		`4: run is empty`, `5: run is given twice in this section`}},
	"long path": {"[driver]\nrun = " + strings.Repeat("r", 256) + "\n", []string{`2: run is longer than 255 bytes`}},
	"control groups": {"[cgroup]\nproc = \nroof = /\n[cgroup]\n[cgroup x]\n", []string{
		`1: [cgroup] has no root`, `2: proc is empty`, `3: unknown key "roof" in [cgroup]`, `4: section [cgroup] is given twice`,
		`5: unknown section [cgroup x]`}},
	"lacks nothing":  {"[library]\nlacks = nvmlInit_v2,\n", []string{`2: lacks names "", which is no function`}},
	"lacks twice":    {"[library]\nlacks = f, f\n", []string{`2: lacks names f twice`}},
	"lacks too many": {"[library]\nlacks = " + manyFunctions(33) + "\n", []string{`2: lacks has more than 32 functions`}},
	"fail twice":     {"[library]\nfail = EfmlInit:6,EfmlInit:7\n", []string{"2: fail names EfmlInit twice"}},
	"long uuid": {"[card 0]\nvendor = enflame\nmemory_mib = 1\nuuid = " + strings.Repeat("u", 64) + "\n",
		[]string{"4: uuid is longer than 63 bytes"}},
	"more used than there": {
		"[card 0]\nvendor = enflame\nuuid = a\nmemory_mib = 1\nused_mib = 2\n",
		[]string{"1: [card 0] has used_mib above memory_mib"},
	},
	"health": {
		"[card 0]\nvendor = enflame\nuuid = a\nmemory_mib = 1\nhealth = fine\nlost = no\nnuma = -2\nminor = -1\n",
		[]string{
			`5: health = "fine" is not healthy or unhealthy`,
			`6: lost = "no" is not true or false`,
			`7: numa = "-2" is not an integer from -1 to 1023`,
			`8: minor = "-1" is not an integer from 0 to 1048575`,
		},
	},
	"settings of a vendor": {
		"[driver acme]\n[driver  nvidia]\ncuda = 12\n[ driver nvidia ]\n[library iluvatar]\nspeed = 3\n",
		[]string{
			`1: unknown section [driver acme]`,
			`3: cuda = "12" is not a version such as 12.4`,
			`4: section [driver nvidia] is given twice`,
			`6: unknown key "speed" in [library iluvatar]`,
		},
	},
	"where a card is": {
		"[card 0]\nvendor = nvidia\nuuid = a\nmemory_mib = 1\nchip = -1\npci = 0:0:0.0\ncompute = 9.0.1\nmig = on\n" +
			"xid = 0\nhealth_bits = 4\nboard = " + strings.Repeat("b", 64) + "\nvendor = acme\nhealth_bits = 0x1\n",
		[]string{
			`5: chip = "-1" is not an integer from 0 to 1023`,
			`6: pci = "0:0:0.0" is not an address such as 0000:3b:00.0`,
			`7: compute = "9.0.1" is not a version such as 12.4`,
			`8: mig = "on" is not disabled or enabled`,
			`9: xid = "0" is not an integer from 1 to 999`,
			`10: health_bits = "4" is not a mask such as 0x4`,
			`11: board is longer than 63 bytes`,
			`12: vendor is given twice in this section`,
			`13: health_bits is given twice in this section`,
		},
	},
	"pci of 33 devices": {"[card 0]\nvendor = nvidia\nuuid = a\nmemory_mib = 1\npci = 0000:00:20.0\n",
		[]string{`5: pci = "0000:00:20.0" is not an address such as 0000:3b:00.0`}},
	"number of an error": {"[card 0]\nvendor = nvidia\nuuid = a\nmemory_mib = 1\nxid = 79@\n",
		[]string{`5: number of the xid = "" is not an integer from 0 to 1000000`}},
	"links": {
		"[card 0]\nvendor = nvidia\nuuid = a\nmemory_mib = 1\n[card 1]\nvendor = enflame\nuuid = b\nmemory_mib = 1\n" +
			"[link]\n[link 0]\n[link 0 x]\n[link 0 0]\n[link 0 1]\n[link 1 0]\n[link 0 7]\nlanes = 19\none_way = maybe\nspeed = 3\n",
		[]string{
			`9: unknown section [link]`,
			`10: link = "" is not an integer from 0 to 1023`,
			`11: link = "x" is not an integer from 0 to 1023`,
			`12: link 0 0 joins a card with itself`,
			`13: [link 0 1] has no lanes`,
			`13: [link 0 1] joins cards of two vendors`,
			`14: link 1 0 is described twice, first in line 13`,
			`15: [link 0 7] names a card that is not there`,
			`16: lanes = "19" is not an integer from 1 to 18`,
			`17: one_way = "maybe" is not true or false`,
			`18: unknown key "speed" in [link 0 7]`,
		},
	},
	"MIG devices": {
		"[card 0]\nvendor = nvidia\nuuid = a\nmemory_mib = 40960\n[card 1]\nvendor = enflame\nuuid = b\nmemory_mib = 40960\n" +
			"[mig]\n[mig 0]\n[mig 0.x]\n[mig 0.7]\n[mig 1024.0]\n[mig 0.1]\n[mig 0.1]\n[mig 7.0]\nprofile = 1g.5gb\n" +
			"[mig 1.0]\nprofile = 1g.5gb\n[mig 0.2]\nprofile = 1g.10GB\n[mig 0.3]\nprofile = 1g.5gb\nprofile = 1g.5gb\n" +
			"gi = 15\nci = 8\nmemory_mib = -1\ncaps = 1\nxid = x\nsize = 3\n",
		[]string{
			`9: unknown section [mig]`,
			`10: mig = "0" is not a card and a number such as 0.1`,
			`11: number of the mig = "x" is not an integer from 0 to 6`,
			`12: number of the mig = "7" is not an integer from 0 to 6`,
			`13: mig = "1024" is not an integer from 0 to 1023`,
			`14: [mig 0.1] has no profile`,
			`14: [mig 0.1] has profile "", which its card does not have`,
			`15: mig 0.1 is described twice, first in line 14`,
			`16: [mig 7.0] names a card that is not there`,
			`18: [mig 1.0] is of a card that is not NVIDIA's`,
			`20: [mig 0.2] has profile "1g.10GB", which its card does not have`,
			`24: profile is given twice in this section`,
			`25: gi = "15" is not an integer from 0 to 14`,
			`26: ci = "8" is not an integer from 0 to 7`,
			`27: memory_mib = "-1" is not an integer from 0 to 4294967295`,
			`28: caps = "1" is not two minors such as 66,67, or none`,
			`29: xid = "x" is not an integer from 1 to 999`,
			`30: unknown key "size" in [mig 0.3]`,
		},
	},
	"a MIG device of no card": {"[mig 0.0]\nprofile = 1g.5gb\n", []string{`1: [mig 0.0] names a card that is not there`}},
	"a MIG device of another vendor's": {"[card 0]\nvendor = iluvatar\nuuid = a\nmemory_mib = 40960\n[mig 0.0]\nprofile = 1g.5gb\n",
		[]string{`5: [mig 0.0] is of a card that is not NVIDIA's`}},
	"a profile of another GPU": {"[mig 0.0]\nprofile = 1g.10gb+me\n[card 0]\nvendor = nvidia\nuuid = a\nmemory_mib = 40960\n",
		[]string{`1: [mig 0.0] has profile "1g.10gb+me", which its card does not have`}},
	"minors of a MIG device": {"[mig 0.0]\ncaps = 0,1\n[mig 0.1]\ncaps = 1,\n",
		[]string{`1: [mig 0.0] has no profile`, `1: [mig 0.0] names a card that is not there`,
			`2: caps = "0" is not an integer from 1 to 1048575`, `3: [mig 0.1] has no profile`,
			`3: [mig 0.1] names a card that is not there`, `4: caps = "" is not an integer from 1 to 1048575`}},
	"processes": {
		"[card 0]\nvendor = nvidia\nuuid = a\nmemory_mib = 10\nused_mib = 2\n[card 1]\nvendor = enflame\nuuid = b\nmemory_mib = 10\n" +
			"[process]\n[process 256]\n[process 0]\ncard = 0\npid = 1\nmib = 8\n[process 0]\n[process 1]\ncard = 0\npid = 2\nmib = 1\n" +
			"[process 2]\ncard = 1\npid = 3\nmib = 11\n[process 3]\ncard = 2\npid = 0\nmib = much\nspeed = 3\n[process 4]\n",
		[]string{
			`10: unknown section [process]`,
			`11: process = "256" is not an integer from 0 to 255`,
			`16: process 0 is described twice, first in line 12`,
			`17: [process 1] needs more memory than its card has left`,
			`21: [process 2] needs more memory than its card has left`,
			`25: [process 3] names a card that is not there`,
			`27: pid = "0" is not an integer from 1 to 4194304`,
			`28: mib = "much" is not an integer from 0 to 4294967295`,
			`29: unknown key "speed" in [process 3]`,
			`30: [process 4] has no card`,
			`30: [process 4] has no pid`,
			`30: [process 4] has no mib`,
			`30: [process 4] needs more memory than its card has left`,
		},
	},
	"too much memory in use": {
		"[process 0]\ncard = 0\npid = 1\nmib = 9\n[card 0]\nvendor = nvidia\nuuid = a\nmemory_mib = 10\nused_mib = 2\n",
		[]string{`1: [process 0] needs more memory than its card has left`},
	},
	"a process without a card": {"[process 0]\ncard = 0\npid = 1\nmib = 9\n",
		[]string{`1: [process 0] names a card that is not there`}},
	"a GCU's process with utilization": {
		"[card 0]\nvendor = enflame\nuuid = a\nmemory_mib = 10\n[process 0]\ncard = 0\npid = 1\nmib = 9\nutilization = 1\n",
		[]string{`5: [process 0] has what only NVIDIA's library reports`}},
	"an IX GPU's process in a list": {
		"[card 0]\nvendor = iluvatar\nuuid = a\nmemory_mib = 10\n[process 0]\ncard = 0\npid = 1\nmib = 9\nlists = compute\n",
		[]string{`5: [process 0] has what only NVIDIA's library reports`}},
	"a process on no MIG device": {
		"[card 0]\nvendor = nvidia\nuuid = a\nmemory_mib = 40960\n[mig 0.1]\nprofile = 1g.5gb\n" +
			"[process 0]\ncard = 0\npid = 1\nmib = 9\nmig = 0\n",
		[]string{`7: [process 0] is on a MIG device that its card does not have`}},
	"keys of a process": {
		"[card 0]\nvendor = nvidia\nuuid = a\nmemory_mib = 10\n[process 0]\ncard = 0\npid = 1\nmib = 9\n" +
			"mig = 7\nutilization = 101\nlists = \n[process 1]\nlists = mps,video\n[process 2]\nlists = mps,mps\n",
		[]string{
			`5: [process 0] is on a MIG device that its card does not have`,
			`9: mig = "7" is not an integer from 0 to 6`, `10: utilization = "101" is not an integer from 0 to 100`,
			`11: lists names "", which is not compute, graphics or mps`,
			`12: [process 1] has no card`, `12: [process 1] has no pid`, `12: [process 1] has no mib`,
			`13: lists names "video", which is not compute, graphics or mps`,
			`14: [process 2] has no card`, `14: [process 2] has no pid`, `14: [process 2] has no mib`,
			`15: lists names mps twice`,
		},
	},
	"a process without its memory": {"[process 0]\ncard = 0\npid = 1\n", []string{`1: [process 0] has no mib`,
		`1: [process 0] names a card that is not there`}},
	"not text": {"[driver]\nversion = 1\x00\n", []string{"1: the file is not text, it contains a NUL byte"}},
}

func TestParseMistakes(t *testing.T) {
	for name, tt := range brokenFiles {
		t.Run(name, func(t *testing.T) {
			_, err := vendorsim.Parse("t.ini", []byte(tt.text))
			if err == nil {
				t.Fatal("no mistake was found")
			}
			want := "t.ini:" + strings.Join(tt.want, "\nt.ini:")
			if diff := cmp.Diff(want, err.Error()); diff != "" {
				t.Errorf("mistakes (-want +got):\n%s", diff)
			}
		})
	}
}

func TestWriteAndReadBack(t *testing.T) {
	want := vendorsim.Topology{
		Driver:  vendorsim.Driver{State: vendorsim.DriverAbsent, Version: "2"},
		Library: vendorsim.Library{Calls: vendorsim.Calls{Delay: time.Second, Fail: vendorsim.Failures{"b": 2, "a": 1}}, OneLock: true},
		Drivers: map[string]vendorsim.Driver{
			"nvidia": {State: vendorsim.DriverLoaded, Version: "550.54.15", CUDA: "12.4",
				MemoryAccounting: vendorsim.MemoryAccountingDmem, Persistence: true, Run: "run"},
			"iluvatar": {State: vendorsim.DriverBroken},
		},
		Libraries: map[string]vendorsim.Library{"iluvatar": {Calls: vendorsim.Calls{Fail: vendorsim.Failures{"c": 3},
			Slow: vendorsim.Delays{"d": time.Second}}, Lacks: []string{"f", "e"}}},
		ControlGroups: vendorsim.ControlGroups{Root: "/cgroup", Hierarchy: "name=systemd"},
		Cards:         slices.Concat(vendorsim.GCUs(2, 32768), vendorsim.GPUs(3, 40960), vendorsim.IXBoards(2, 2, 32768)),
		Links:         vendorsim.AllLinked(2, 3, 4),
		Processes: []vendorsim.Process{{Card: 2, PID: 7, MemoryMiB: 300}, {Card: 2, PID: 8, MemoryMiB: vendorsim.UnknownMemory},
			{Card: 0, PID: 9, MemoryMiB: 1},
			{Card: 3, MIG: new(2), PID: 10, Utilization: 7, Lists: vendorsim.ListGraphics | vendorsim.ListMPS},
		},
	}
	want.Links[1].OneWay = true
	want.Cards[2].PCI, want.Cards[2].Switch, want.Cards[2].HealthBits = "0000:3b:00.0", "s0", 0x14
	want.Cards[3].XID = vendorsim.XID{Code: 79, Number: 4}
	want.Cards[4].XID = vendorsim.XID{Code: 48}
	want.Cards[1].Minor = new(9)
	want.Cards[1].UUID = want.Cards[0].UUID // hardware that cannot be
	want.Cards[1].Calls.Fail = vendorsim.Failures{"EfmlGetDevMem": 254}
	want.Cards[2].Calls.Delay, want.Cards[2].Calls.Slow = time.Hour, vendorsim.Delays{"nvmlDeviceGetUUID": time.Millisecond}
	want.Cards[3] = vendorsim.Partition(want.Cards[3], "1g.5gb", "", "3g.20gb")
	want.Cards[3].MIGDevices[1] = vendorsim.MIGDevice{Index: 2, Profile: "3g.20gb", GI: new(2), CI: new(0), UUID: "MIG-2",
		MemoryMiB: new(int64(1)), Caps: vendorsim.MIGCaps{GPUInstance: 3, ComputeInstance: 4}, XID: vendorsim.XID{Code: 94}}
	want.Cards[4] = vendorsim.Partition(want.Cards[4], "7g.40gb")
	want.Cards[4].MIG, want.Cards[4].MIGDevices[0].Caps.Missing = vendorsim.MIGDisabled, true
	dir := t.TempDir()
	path := filepath.Join(dir, "topology.ini")
	for range 2 { // the second replaces the first
		if err := want.Write(path); err != nil {
			t.Fatal(err)
		}
	}
	got, err := vendorsim.Read(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("topology (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(want, want.Clone()); diff != "" {
		t.Errorf("clone (-want +got):\n%s", diff)
	}
	other := want.Clone()
	other.Drivers["nvidia"] = vendorsim.Driver{}
	other.Libraries["iluvatar"].Fail["c"], other.Libraries["iluvatar"].Lacks[0] = 4, "g"
	other.Links[0].Lanes = 1
	other.Processes[0].PID, *other.Processes[3].MIG = 9, 0
	other.Cards[3].MIGDevices[0].Profile = "2g.10gb"
	*other.Cards[3].MIGDevices[1].GI, *other.Cards[3].MIGDevices[1].MemoryMiB = 1, 2
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("a clone shares something with the original (-want +got):\n%s", diff)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != 1 {
		t.Errorf("Write left behind %v", entries)
	}
}

func TestValidate(t *testing.T) {
	topology := vendorsim.Topology{
		Driver: vendorsim.Driver{State: "asleep", Version: " 1"},
		Library: vendorsim.Library{Calls: vendorsim.Calls{
			Delay: time.Microsecond, Fail: vendorsim.Failures{"two words": 3, "f": 1000}, Slow: vendorsim.Delays{"": 0},
		}},
		Cards: []vendorsim.Card{
			{Vendor: "enflame", UUID: "a\nlost = true", Model: "S60 #2", MemoryMiB: -1},
			{Vendor: "enflame", UUID: "b", MemoryMiB: 1, UsedMiB: 2, NUMA: -2, Minor: new(-1)},
			{Vendor: "nvidia", MemoryMiB: 40960, MIGDevices: []vendorsim.MIGDevice{
				{Index: 7, Profile: "1g.10gb", GI: new(15), CI: new(-1), UUID: " ", MemoryMiB: new(int64(-1)),
					Caps: vendorsim.MIGCaps{GPUInstance: 1}, XID: vendorsim.XID{Number: 1}},
				{Index: 1, Profile: "1g.6gb", Caps: vendorsim.MIGCaps{GPUInstance: 1, ComputeInstance: 2, Missing: true}},
				{Index: 1, Profile: "1g.5gb"},
			}},
			{Chip: -1, PCI: "3b:00.0", Compute: "9", MIG: "on", XID: vendorsim.XID{Number: 1}, Board: " b"},
		},
		Drivers: map[string]vendorsim.Driver{"acme": {CUDA: "12", MemoryAccounting: "on", Run: "a #b"}},
		Libraries: map[string]vendorsim.Library{"nvidia": {Calls: vendorsim.Calls{Delay: -1},
			Lacks: slices.Repeat([]string{"f"}, 2)}},
		ControlGroups: vendorsim.ControlGroups{Proc: strings.Repeat("p", 256), Hierarchy: " "},
		Links: []vendorsim.Link{
			{A: 0, B: 1, Lanes: 1}, {A: 1, B: 0, Lanes: 1}, {A: 1, B: 1, Lanes: 1}, {A: 0, B: 4, Lanes: 1}, {A: 3, B: 0},
		},
		Processes: []vendorsim.Process{
			{Card: 5}, {Card: 1, PID: 1, MemoryMiB: -2, Utilization: -1}, {Card: 2, PID: 1, MemoryMiB: 40961},
			{Card: 2, PID: 1, MIG: new(0), Lists: 8},
		},
	}
	want := `[driver]: state = "asleep" is not loaded, absent or broken
[driver]: version = " 1" cannot be written: line breaks, outer white space or a comment
[driver acme]: vendor = "acme" is not enflame, nvidia or iluvatar
[driver acme]: cuda = "12" is not a version such as 12.4
[driver acme]: memacct = "on" is not dmem, misc or off
[driver acme]: run = "a #b" cannot be written: line breaks, outer white space or a comment
[library]: delay of 1µs is not in whole milliseconds from 0 to 1h0m0s
[library]: slow names "", which is no function
[library]: delay of 0s is not in whole milliseconds from 1 to 1h0m0s
[library]: fail code = "1000" is not an integer from 1 to 999
[library]: fail names "two words", which is no function
[library nvidia]: delay of -1ns is not in whole milliseconds from 0 to 1h0m0s
[library nvidia]: lacks names f twice
[cgroup]: root is empty
[cgroup]: hierarchy = " " cannot be written: line breaks, outer white space or a comment
[cgroup]: proc is longer than 255 bytes
[card 0]: model = "S60 #2" cannot be written: line breaks, outer white space or a comment
[card 0]: uuid = "a\nlost = true" cannot be written: line breaks, outer white space or a comment
[card 0]: memory_mib = "-1" is not an integer from 0 to 4294967295
[card 0]: has used_mib above memory_mib
[card 1]: has used_mib above memory_mib
[card 1]: numa = "-2" is not an integer from -1 to 1023
[card 1]: minor = "-1" is not an integer from 0 to 1048575
[mig 2.7]: number of the mig = "7" is not an integer from 0 to 6
[mig 2.7]: uuid = " " cannot be written: line breaks, outer white space or a comment
[mig 2.7]: gi = "15" is not an integer from 0 to 14
[mig 2.7]: ci = "-1" is not an integer from 0 to 7
[mig 2.7]: memory_mib = "-1" is not an integer from 0 to 4294967295
[mig 2.7]: caps = "0" is not an integer from 1 to 1048575
[mig 2.7]: xid = "0" is not an integer from 1 to 999
[mig 2.1]: has profile "1g.6gb", which its card does not have
[mig 2.1]: has caps that are missing and are not
[mig 2.1]: is described twice
[card 3]: vendor = "" is not enflame, nvidia or iluvatar
[card 3]: board = " b" cannot be written: line breaks, outer white space or a comment
[card 3]: chip = "-1" is not an integer from 0 to 1023
[card 3]: pci = "3b:00.0" is not an address such as 0000:3b:00.0
[card 3]: compute = "9" is not a version such as 12.4
[card 3]: mig = "on" is not disabled or enabled
[card 3]: xid = "0" is not an integer from 1 to 999
[link 1 0]: is described twice
[link 1 1]: joins a card with itself
[link 0 4]: names a card that is not there
[link 3 0]: joins cards of two vendors
[link 3 0]: lanes = "0" is not an integer from 1 to 18
[process 0]: pid = "0" is not an integer from 1 to 4194304
[process 0]: names a card that is not there
[process 1]: mib = "-2" is not an integer from 0 to 4294967295
[process 1]: utilization = "-1" is not an integer from 0 to 100
[process 1]: has what only NVIDIA's library reports
[process 2]: needs more memory than its card has left
[process 3]: lists = "8" is not an integer from 0 to 7
[process 3]: is on a MIG device that its card does not have`
	err := topology.Validate()
	if err == nil {
		t.Fatal("no mistake was found")
	}
	if diff := cmp.Diff(want, err.Error()); diff != "" {
		t.Errorf("mistakes (-want +got):\n%s", diff)
	}
	path := filepath.Join(t.TempDir(), "topology.ini")
	if err := topology.Write(path); err == nil {
		t.Error("Write took it")
	}
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("Write made the file: %v", err)
	}
}

// manyFunctions returns names of n functions for a key.
func manyFunctions(n int) string {
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprint("f", i)
	}
	return strings.Join(names, ",")
}
