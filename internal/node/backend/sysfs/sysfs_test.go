package sysfs_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend/sysfs"
)

func TestAddress(t *testing.T) {
	for text, want := range map[string]string{
		"0000:3b:00.0": "0000:3b:00.0",
		"00000000:3B:00.0\x00\x00\x00\x00\x00\x00\x00\x00": "0000:3b:00.0",
		"00010000:E1:1F.7\x00":                             "10000:e1:1f.7",
		"0001:00:00.0\x00old":                              "0001:00:00.0",
		"":                                                 "",
		"\x00":                                             "",
		"3b:00.0":                                          "",
		"0000:3b:00.8":                                     "",
		"000000000:3b:00.0":                                "",
		"../../../etc/passwd":                              "",
	} {
		if got := sysfs.Address(text); got != want {
			t.Errorf("Address(%q) = %q, want %q", text, got, want)
		}
	}
}

func TestReads(t *testing.T) {
	dir := t.TempDir()
	put := func(file, text string) {
		t.Helper()
		full := filepath.Join(dir, file)
		if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(full, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	put("devices/pci/0000:3b:00.0/numa_node", "1\n")
	put("devices/pci/0000:3c:00.0/numa_node", "-1\n")
	put("class/dmi/id/product_name", "PowerEdge R740\n")
	put("bus/pci/drivers/nvidia/new_id", "")
	if err := os.MkdirAll(filepath.Join(dir, "bus/pci/devices"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, address := range []string{"0000:3b:00.0", "0000:3c:00.0"} {
		// The kernel's links lead upwards.
		for _, link := range []struct{ at, to string }{
			{"bus/pci/devices", "../../../devices/pci/"}, {"bus/pci/drivers/nvidia", "../../../../devices/pci/"},
		} {
			if err := os.Symlink(link.to+address, filepath.Join(dir, link.at, address)); err != nil {
				t.Fatal(err)
			}
		}
	}
	root := sysfs.Root(dir)
	type numa struct {
		node  int
		known bool
	}
	for address, want := range map[string]numa{
		"0000:3b:00.0": {1, true}, "0000:3c:00.0": {accel.NoNUMA, true}, "0000:3d:00.0": {accel.NoNUMA, false}, "": {accel.NoNUMA, false},
	} {
		if node, known := root.NUMANode(address); node != want.node || known != want.known {
			t.Errorf("NUMANode(%q) = %d, %t, want %+v", address, node, known, want)
		}
	}
	if got := root.Machine(); got != "PowerEdge R740" {
		t.Errorf("Machine = %q", got)
	}
	if got := root.Bound("nvidia"); got != "0000:3b:00.0 0000:3c:00.0" {
		t.Errorf("Bound = %q", got)
	}
	if got := root.Bound("none"); got != "" {
		t.Errorf("Bound of no driver = %q", got)
	}
}

func TestPlugWaitsUntilNothingMoreChanges(t *testing.T) {
	var p sysfs.Plug
	for i, step := range []struct {
		now   string
		fresh bool
		want  bool
	}{
		{"a", true, false},
		{"a", false, false},
		{"a b", false, true}, // seen
		{"a b", true, false}, // initialised anew
		{"a b", false, false},
		{"a b c", false, true},
		{"a b c d", false, true}, // and another one
		{"a b c d", false, true}, // settled
		{"a b c d", false, false},
		{"", false, true}, // the driver is gone
	} {
		if got := p.Changed(step.now, step.fresh); got != step.want {
			t.Errorf("step %d: Changed = %v, want %v", i, got, step.want)
		}
	}
}
