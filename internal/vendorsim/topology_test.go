package vendorsim_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/vendorsim"
)

// briefExample is a file with everything, as a person writes it.
const briefExample = `# comment
[driver]
state = loaded            # loaded | absent | broken
version = 1.3.0
[library]
delay_ms = 15             # every call takes this long
fail = EfmlGetDevMem:254, EfmlInit:6
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
[card 1]
vendor = enflame
uuid = U53000090104
memory_mib = 0
`

func TestParse(t *testing.T) {
	got, err := vendorsim.Parse("topology.ini", []byte(briefExample))
	if err != nil {
		t.Fatal(err)
	}
	want := vendorsim.Topology{
		Driver: vendorsim.Driver{State: vendorsim.DriverLoaded, Version: "1.3.0"},
		Library: vendorsim.Library{
			Delay: 15 * time.Millisecond,
			Fail:  vendorsim.Failures{"EfmlGetDevMem": 254, "EfmlInit": 6},
		},
		Cards: []vendorsim.Card{
			{
				Vendor: "enflame", Model: "S60", UUID: "U53000090104",
				MemoryMiB: 16384, UsedMiB: 12, Minor: new(3), Unhealthy: true, Lost: true,
				Fail: vendorsim.Failures{"EfmlGetDevUuid": 253},
			},
			{Vendor: "enflame", UUID: "U53000090104", NUMA: -1},
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
	"key twice":         {"[driver]\nversion = 1\nversion = 1\n", []string{"3: version is given twice in this section"}},
	"section twice":     {"[library]\n[library]\n", []string{"2: section [library] is given twice"}},
	"open section":      {"[driver\n", []string{"1: a section has no closing ]"}},
	"card number":       {"[card 1024]\n", []string{`1: card = "1024" is not an integer from 0 to 1023`}},
	"signed number":     {"[library]\ndelay_ms = +5\n", []string{`2: delay_ms = "+5" is not an integer from 0 to 3600000`}},
	"huge number":       {"[library]\ndelay_ms = 99999999999999999999\n", []string{`2: delay_ms = "99999999999999999999" is not an integer from 0 to 3600000`}},
	"fail without code": {"[library]\nfail = EfmlInit\n", []string{"2: fail wants function:code, separated by commas"}},
	"fail with nothing": {"[library]\nfail = EfmlInit:6,\n", []string{"2: fail wants function:code, separated by commas"}},
	"fail with success": {"[library]\nfail = EfmlInit:0\n", []string{`2: fail code = "0" is not an integer from 1 to 999`}},
	"fail twice":        {"[library]\nfail = EfmlInit:6,EfmlInit:7\n", []string{"2: fail names EfmlInit twice"}},
	"long uuid":         {"[card 0]\nvendor = enflame\nmemory_mib = 1\nuuid = " + strings.Repeat("u", 64) + "\n", []string{"4: uuid is longer than 63 bytes"}},
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
		Library: vendorsim.Library{Delay: time.Second, Fail: vendorsim.Failures{"b": 2, "a": 1}},
		Cards:   vendorsim.GCUs(2, 32768),
	}
	want.Cards[1].Minor = new(9)
	want.Cards[1].UUID = want.Cards[0].UUID // hardware that cannot be
	want.Cards[1].Fail = vendorsim.Failures{"EfmlGetDevMem": 254}
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
		Driver:  vendorsim.Driver{State: "asleep", Version: " 1"},
		Library: vendorsim.Library{Delay: time.Microsecond, Fail: vendorsim.Failures{"two words": 3, "f": 1000}},
		Cards: []vendorsim.Card{
			{Vendor: "enflame", UUID: "a\nlost = true", Model: "S60 #2", MemoryMiB: -1},
			{Vendor: "enflame", UUID: "b", MemoryMiB: 1, UsedMiB: 2, NUMA: -2, Minor: new(-1)},
			{},
		},
	}
	want := `[driver]: state = "asleep" is not loaded, absent or broken
[driver]: version = " 1" cannot be written: line breaks, outer white space or a comment
[library]: delay of 1µs is not in whole milliseconds from 0 to 1h0m0s
[library]: fail code = "1000" is not an integer from 1 to 999
[library]: fail names "two words", which is no function
[card 0]: model = "S60 #2" cannot be written: line breaks, outer white space or a comment
[card 0]: uuid = "a\nlost = true" cannot be written: line breaks, outer white space or a comment
[card 0]: memory_mib = "-1" is not an integer from 0 to 4294967295
[card 0]: has used_mib above memory_mib
[card 1]: has used_mib above memory_mib
[card 1]: numa = "-2" is not an integer from -1 to 1023
[card 1]: minor = "-1" is not an integer from 0 to 1048575
[card 2]: vendor = "" is not enflame, nvidia or iluvatar`
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
