package hardware

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
)

// simulated returns simulated hardware below a temporary folder, whose device
// nodes are plain files: nodes need root.
func simulated(t *testing.T) *Simulated {
	t.Helper()
	root := t.TempDir()
	for _, dir := range []string{"dev", "usr/lib/" + Multiarch(), "usr/local", layout.StateDir} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	s := below(root)
	s.mknod = func(path string) error {
		file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		return file.Close()
	}
	s.isNode = func(path string) bool {
		_, err := os.Lstat(path)
		return err == nil
	}
	s.mount = func(path string) error { return os.MkdirAll(path, 0o755) }
	s.unmount = func(path string) error { return os.RemoveAll(filepath.Dir(path)) }
	return s
}

func TestInstallChangeRemove(t *testing.T) {
	s := simulated(t)
	before := files(t, s)
	topologies, err := filepath.Glob("../../topologies/*.ini")
	if err != nil || len(topologies) < 7 {
		t.Fatalf("topologies: %v, %v", topologies, err)
	}
	for _, path := range topologies {
		if err := s.Install(t.Context(), path); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		checkInstalled(t, s, path)
	}
	nodes := devices(t, s)
	if err := os.Remove(filepath.Join(s.deviceDir, nodes[0])); err != nil {
		t.Fatal(err)
	}
	if err := s.Restore(); err != nil || !slices.Equal(devices(t, s), nodes) {
		t.Errorf("restored %v (%v), want %v", devices(t, s), err, nodes)
	}
	if err := s.Remove(); err != nil {
		t.Fatal(err)
	}
	if after := files(t, s); !slices.Equal(after, before) {
		t.Errorf("the machine has %v, had %v", after, before)
	}
	if left, err := s.Installed(); err != nil || len(left) > 0 {
		t.Errorf("left are %v, %v", left, err)
	}
	if err := s.Remove(); err != nil {
		t.Errorf("removing nothing: %v", err)
	}
}

// checkInstalled checks that every vendor of a topology finds its library, its
// nodes and the one topology.
func checkInstalled(t *testing.T, s *Simulated, path string) {
	t.Helper()
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	topology, err := vendorsim.Parse(path, want)
	if err != nil {
		t.Fatal(err)
	}
	installed, err := s.Installed()
	if err != nil {
		t.Fatal(err)
	}
	nodes := s.nodes(topology)
	for i, node := range nodes {
		nodes[i] = relative(t, s, node)
	}
	slices.Sort(nodes)
	if got := devices(t, s); !slices.Equal(got, nodes) {
		t.Errorf("%s: devices %v, want %v", path, got, nodes)
	}
	for _, p := range s.placesOf(topology) {
		for _, l := range p.links {
			if !slices.Contains(installed, l.path) {
				t.Errorf("%s: %s is not told as installed", path, l.path)
			}
			if info, err := os.Stat(l.path); err != nil || info.Size() == 0 {
				t.Errorf("%s: nothing lies behind %s: %v", path, l.path, err)
			}
		}
		if info, err := os.Stat(p.library); err != nil || info.Size() == 0 {
			t.Errorf("%s: the library of %s: %v", path, p.vendor, err)
		}
		if got, err := os.ReadFile(p.topology()); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: the topology beside the library of %s differs (%v)", path, p.vendor, err)
		}
	}
}

// A vendor may appear while others are in use.
func TestAVendorAppears(t *testing.T) {
	s := simulated(t)
	if err := s.SetTopology(t.Context(), []byte(card(0, "enflame", ""))); err != nil {
		t.Fatal(err)
	}
	library := s.places[0].library
	before, err := os.Stat(library)
	if err != nil {
		t.Fatal(err)
	}
	both := filepath.Join(t.TempDir(), "both.ini")
	if err := os.WriteFile(both, []byte(card(0, "enflame", "")+card(1, "nvidia", "minor = 0")), 0o600); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(both)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.SetTopology(t.Context(), data); err != nil {
		t.Fatal(err)
	}
	checkInstalled(t, s, both)
	if after, err := os.Stat(library); err != nil || !os.SameFile(before, after) {
		t.Errorf("a library in use was replaced (%v)", err)
	}
	// The last card may go; the driver stays.
	if err := s.SetTopology(t.Context(), []byte(card(0, "enflame", ""))); err != nil {
		t.Fatal(err)
	}
	if got := devices(t, s); !slices.Equal(got, []string{"gcu0"}) {
		t.Errorf("devices %v, want gcu0 alone", got)
	}
	if _, err := os.Stat(s.places[1].library); err != nil {
		t.Errorf("the library went with the last card: %v", err)
	}
}

func TestInstallRefusesRealSoftware(t *testing.T) {
	dir := t.TempDir()
	topology := filepath.Join(dir, "all.ini")
	text := card(0, "enflame", "") + card(1, "nvidia", "mig = disabled") + card(2, "iluvatar", "")
	if err := os.WriteFile(topology, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, path := range map[string]func(*Simulated) string{
		"Enflame's library":      func(s *Simulated) string { return s.places[0].library },
		"Enflame's link":         func(s *Simulated) string { return s.places[0].links[0].path },
		"Enflame's card":         func(s *Simulated) string { return s.places[0].node(s.deviceDir, 0) },
		"NVIDIA's library":       func(s *Simulated) string { return s.places[1].library },
		"NVIDIA's link":          func(s *Simulated) string { return s.places[1].links[0].path },
		"NVIDIA's kernel driver": func(s *Simulated) string { return s.places[1].real[0] },
		"NVIDIA's card":          func(s *Simulated) string { return s.places[1].node(s.deviceDir, 1) },
		"NVIDIA's control node":  func(s *Simulated) string { return filepath.Join(s.deviceDir, "nvidiactl") },
		"NVIDIA's capabilities":  func(s *Simulated) string { return filepath.Join(s.deviceDir, "nvidia-caps/nvidia-cap1") },
		"Iluvatar's software":    func(s *Simulated) string { return s.places[2].links[0].path },
		"Iluvatar's card":        func(s *Simulated) string { return s.places[2].node(s.deviceDir, 2) },
		"Iluvatar's control":     func(s *Simulated) string { return filepath.Join(s.deviceDir, "itrctl") },
	} {
		t.Run(name, func(t *testing.T) {
			s := simulated(t)
			existing := path(s)
			if err := os.MkdirAll(filepath.Dir(existing), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(existing, []byte("real"), 0o600); err != nil {
				t.Fatal(err)
			}
			before := files(t, s)
			if err := s.Install(t.Context(), topology); err == nil || !strings.Contains(err.Error(), existing) {
				t.Errorf("got %v, want an error that names %s", err, existing)
			}
			if err := s.Remove(); err != nil {
				t.Fatal(err)
			}
			if data, err := os.ReadFile(existing); err != nil || string(data) != "real" {
				t.Errorf("the real file is gone or changed: %q, %v", data, err)
			}
			if after := files(t, s); !slices.Equal(after, before) {
				t.Errorf("the machine has %v, had %v", after, before)
			}
		})
	}
}

func TestInstallReportsAWrongTopology(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.ini")
	if err := os.WriteFile(path, []byte("[card 0]\nmemory_mib = much\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := simulated(t).Install(t.Context(), path); err == nil || !strings.Contains(err.Error(), "x.ini:2") {
		t.Errorf("got %v, want an error that names the line", err)
	}
}

// TestEveryVendorHasAPlace: and no other has.
func TestEveryVendorHasAPlace(t *testing.T) {
	var got []string
	for _, p := range Default.places {
		got = append(got, p.vendor)
	}
	if slices.Sort(got); !slices.Equal(got, accel.VendorNames()) {
		t.Errorf("the lab has places for libraries of %q, and the vendors are %q", got, accel.VendorNames())
	}
}

func TestNodes(t *testing.T) {
	s := below("/")
	for text, want := range map[string][]string{
		"":                        nil,
		"[driver]\nversion = 3\n": nil,
		card(0, "enflame", ""):    {"/dev/gcu0"},
		card(0, "nvidia", "") + card(1, "enflame", "minor = 0"): {"/dev/gcu0", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools",
			"/dev/nvidia0", "/dev/nvidiactl"},
		card(0, "nvidia", "minor = 2\nmig = enabled\n[mig 0.1]\nprofile = 7g.1gb"): {
			"/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-caps/nvidia-cap2",
			"/dev/nvidia-caps/nvidia-cap273", "/dev/nvidia-caps/nvidia-cap274", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools",
			"/dev/nvidia2", "/dev/nvidiactl",
		},
		card(0, "iluvatar", "minor = 4") + card(1, "iluvatar", "minor = 4"): {"/dev/iluvatar4", "/dev/itrctl"},
	} {
		topology, err := vendorsim.Parse("test", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		if got := s.nodes(topology); !slices.Equal(got, want) {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
}

func card(number int, vendor, lines string) string {
	return fmt.Sprintf("[card %d]\nvendor = %s\nuuid = GPU-%d\nmemory_mib = 1024\n%s\n", number, vendor, number, lines)
}

func devices(t *testing.T, s *Simulated) []string {
	t.Helper()
	var names []string
	err := filepath.WalkDir(s.deviceDir, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			names = append(names, relative(t, s, path))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(names)
	return names
}

// relative returns the path of a device node without its root.
func relative(t *testing.T, s *Simulated, node string) string {
	t.Helper()
	name, err := filepath.Rel(s.deviceDir, node)
	if err != nil {
		t.Fatal(err)
	}
	return name
}

// files lists all below the root of a simulated machine.
func files(t *testing.T, s *Simulated) []string {
	t.Helper()
	var paths []string
	err := filepath.WalkDir(filepath.Dir(s.deviceDir), func(path string, _ fs.DirEntry, err error) error {
		paths = append(paths, path)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return paths
}
