package vendorsim_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

func TestWriteCapabilities(t *testing.T) {
	cards := vendorsim.GPUs(3, 40960)
	cards[1] = vendorsim.Partition(cards[1], "1g.5gb", "1c.2g.10gb", "1c.2g.10gb", "1g.5gb")
	cards[1].Minor = new(4)
	cards[1].MIGDevices[0].Caps = vendorsim.MIGCaps{GPUInstance: 700, ComputeInstance: 701}
	cards[1].MIGDevices[3].Caps.Missing = true
	cards[2].MIG = vendorsim.MIGNotSupported
	divided := vendorsim.Topology{Cards: cards}
	whole := vendorsim.Topology{Cards: vendorsim.GPUs(1, 40960)}
	root := t.TempDir()
	for _, step := range []struct {
		name     string
		topology vendorsim.Topology
		nodes    string   // in dev/nvidia-caps, without nvidia-cap
		access   string   // below proc/driver/nvidia/capabilities/
		lines    []string // of mig-minors, among others
	}{
		// The minor of a GPU instance is 3 + 135*gpu + 9*gi, and those of its compute instances follow.
		{"divided", divided, "1 2 570 571 572 700 701",
			"gpu4/mig/gi3/access gpu4/mig/gi3/ci0/access gpu4/mig/gi3/ci1/access gpu4/mig/gi7/access gpu4/mig/gi7/ci0/access " +
				"gpu4/mig/gi8/access gpu4/mig/gi8/ci0/access mig/config mig/monitor",
			[]string{"config 1", "monitor 2", "gpu0/gi0/access 3", "gpu0/gi7/access 66", "gpu0/gi7/ci0/access 67", "gpu4/gi3/access 570",
				"gpu4/gi3/ci1/access 572", "gpu4/gi7/access 700", "gpu4/gi7/ci0/access 701",
				"gpu4/gi7/ci1/access 608", "gpu4/gi8/access 615",
				"gpu4/gi8/ci0/access 616"}},
		{"whole", whole, "1 2", "mig/config mig/monitor", []string{"config 1", "monitor 2", "gpu0/gi0/ci0/access 4"}},
		{"without MIG", vendorsim.Topology{Cards: cards[2:]}, "", "", nil},
		{"divided again", divided, "1 2 570 571 572 700 701",
			"gpu4/mig/gi3/access gpu4/mig/gi3/ci0/access gpu4/mig/gi3/ci1/access gpu4/mig/gi7/access gpu4/mig/gi7/ci0/access " +
				"gpu4/mig/gi8/access gpu4/mig/gi8/ci0/access mig/config mig/monitor", []string{"gpu4/gi7/access 700"}},
	} {
		t.Run(step.name, func(t *testing.T) {
			err := step.topology.WriteCapabilities(root, func(path string) error { return os.WriteFile(path, nil, 0o600) })
			if err != nil {
				t.Fatal(err)
			}
			var nodes, access []string
			for _, file := range regularFiles(t, root) {
				if name, ok := strings.CutPrefix(file, "dev/nvidia-caps/nvidia-cap"); ok {
					nodes = append(nodes, name)
				} else if name, ok := strings.CutPrefix(file, "proc/driver/nvidia/capabilities/"); ok {
					access = append(access, name)
				} else if file != "proc/driver/nvidia-caps/mig-minors" {
					t.Errorf("there is a file %s", file)
				}
			}
			if got := strings.Join(nodes, " "); got != step.nodes {
				t.Errorf("device files are %s, want %s", got, step.nodes)
			}
			if got := strings.Join(access, " "); got != step.access {
				t.Errorf("capabilities are %s, want %s", got, step.access)
			}
			minors, err := os.ReadFile(filepath.Join(root, "proc/driver/nvidia-caps/mig-minors"))
			if (err == nil) != (step.lines != nil) {
				t.Fatal(err)
			}
			lines := strings.Split(string(minors), "\n")
			for _, line := range step.lines {
				if !slices.Contains(lines, line) {
					t.Errorf("mig-minors has no line %q", line)
				}
			}
		})
	}
	data, err := os.ReadFile(filepath.Join(root, "proc/driver/nvidia/capabilities/gpu4/mig/gi3/ci1/access"))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff("DeviceFileMinor: 572\nDeviceFileMode: 292\nDeviceFileModify: 1\n", string(data)); diff != "" {
		t.Errorf("access (-want +got):\n%s", diff)
	}
}

// regularFiles lists the files below root, relative to it.
func regularFiles(t *testing.T, root string) []string {
	t.Helper()
	var files []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			name, _ := filepath.Rel(root, path)
			files = append(files, name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}
