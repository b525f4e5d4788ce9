package hardware

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// simulated returns simulated hardware below a temporary folder, whose device
// nodes are plain files: nodes need root.
func simulated(t *testing.T) *Simulated {
	t.Helper()
	root := t.TempDir()
	for _, dir := range []string{"dev", "usr/lib", "usr/local", "state"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return &Simulated{
		Library:    filepath.Join(root, "usr/local/efsmi/efsmi-1.14.0/lib/libefml.so.1.0.0"),
		Link:       filepath.Join(root, "usr/lib/libefml.so"),
		DeviceDir:  filepath.Join(root, "dev"),
		RecordPath: filepath.Join(root, "state/hardware.json"),
		mknod: func(path string) error {
			file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL, 0o600)
			if err != nil {
				return err
			}
			return file.Close()
		},
	}
}

func TestInstallChangeRemove(t *testing.T) {
	s := simulated(t)
	topologies, err := filepath.Glob("../../topologies/*.ini")
	if err != nil || len(topologies) < 4 {
		t.Fatalf("topologies: %v, %v", topologies, err)
	}
	for _, topology := range topologies {
		if err := s.Install(t.Context(), topology); err != nil {
			t.Fatalf("%s: %v", topology, err)
		}
		want, err := os.ReadFile(topology)
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(s.TopologyPath())
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: the topology beside the library differs (%v)", topology, err)
		}
		if n := strings.Count(string(want), "[card "); len(devices(t, s)) != n {
			t.Errorf("%s: devices %v, want %d", topology, devices(t, s), n)
		}
	}
	before := devices(t, s)
	if err := os.Remove(filepath.Join(s.DeviceDir, before[0])); err != nil {
		t.Fatal(err)
	}
	if err := s.Restore(); err != nil || !slices.Equal(devices(t, s), before) {
		t.Errorf("restored %v (%v), want %v", devices(t, s), err, before)
	}
	if info, err := os.Stat(s.Link); err != nil || info.Size() == 0 {
		t.Errorf("the library does not lie behind its link: %v", err)
	}
	if err := s.Remove(); err != nil {
		t.Fatal(err)
	}
	if left := devices(t, s); len(left) > 0 {
		t.Errorf("devices left: %v", left)
	}
	for _, path := range []string{s.Link, filepath.Join(filepath.Dir(s.Link), "../local/efsmi"), s.RecordPath} {
		if _, err := os.Lstat(path); err == nil {
			t.Errorf("%s is left", path)
		}
	}
	if err := s.Remove(); err != nil {
		t.Errorf("removing nothing: %v", err)
	}
}

func TestInstallRefusesRealSoftware(t *testing.T) {
	topology := "../../topologies/gcu-2x16.ini"
	for name, path := range map[string]func(*Simulated) string{
		"library": func(s *Simulated) string { return s.Library },
		"link":    func(s *Simulated) string { return s.Link },
		"card":    func(s *Simulated) string { return filepath.Join(s.DeviceDir, "gcu1") },
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
			if err := s.Install(t.Context(), topology); err == nil || !strings.Contains(err.Error(), existing) {
				t.Errorf("got %v, want an error that names %s", err, existing)
			}
			if err := s.Remove(); err != nil {
				t.Fatal(err)
			}
			if data, err := os.ReadFile(existing); err != nil || string(data) != "real" {
				t.Errorf("the real file is gone or changed: %q, %v", data, err)
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

func TestMinors(t *testing.T) {
	for text, want := range map[string][]int{
		"":                              nil,
		"[driver]\nminor = 3\n":         nil,
		"[card 0]\n[card 1]\n":          {0, 1},
		"[card 1]\nminor=7\n[card 0]":   {0, 7},
		"[card 0] # first\nminor = 2#":  {2},
		"[card 0]\nminor = x\nnuma = 1": {0},
		"[card x]\nminor = 1\n[card 0]\nminor=4\n[card 1]\nminor=4": {4},
	} {
		if got := minors(text); !slices.Equal(got, want) {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
}

func devices(t *testing.T, s *Simulated) []string {
	t.Helper()
	entries, err := os.ReadDir(s.DeviceDir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}
