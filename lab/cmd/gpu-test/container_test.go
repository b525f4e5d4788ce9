package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
)

// A container has this program, its C library, and of the devices just what the CDI
// specifications say.
func TestBundle(t *testing.T) {
	specs, dir := t.TempDir(), t.TempDir()
	write(t, filepath.Join(specs, "gpu.json"), `{"cdiVersion": "0.6.0", "kind": "nvidia.divvy.dev/gpu", "devices": [
		{"name": "GPU-a", "containerEdits": {"env": ["A=1"], "deviceNodes": [{"path": "/dev/null"}]}},
		{"name": "GPU-b", "containerEdits": {"env": ["B=1"]}}]}`, 0o600)
	if err := makeBundle(dir, specs, []string{"nvidia.divvy.dev/gpu=GPU-a"}, contextPart, libcuda, "1"); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	var c oci.Spec
	if err := json.Unmarshal(data, &c); err != nil {
		t.Fatal(err)
	}
	if want := []string{programInside, contextPart, libcuda, "1"}; !slices.Equal(c.Process.Args, want) {
		t.Errorf("it runs %q, want %q", c.Process.Args, want)
	}
	if !slices.Contains(c.Process.Env, "A=1") || slices.Contains(c.Process.Env, "B=1") {
		t.Errorf("it has the variables %q, want those of GPU-a", c.Process.Env)
	}
	if len(c.Linux.Devices) != 1 || c.Linux.Devices[0].Path != "/dev/null" || len(c.Linux.Resources.Devices) != 2 {
		t.Errorf("it has the devices %+v and may use %+v, want /dev/null alone", c.Linux.Devices, c.Linux.Resources.Devices)
	}
	var inside []string
	for _, m := range c.Mounts {
		if m.Type != "bind" {
			continue
		}
		if _, err := os.Stat(m.Source); err != nil || !slices.Contains(m.Options, "ro") {
			t.Errorf("%s is mounted with %v: %v", m.Source, m.Options, err)
		}
		inside = append(inside, filepath.Base(m.Destination))
	}
	for _, name := range []string{"gpu-test", "libc.so.6", "libm.so.6"} {
		if !slices.Contains(inside, name) {
			t.Errorf("it lacks %s: %v", name, inside)
		}
	}
	err = makeBundle(t.TempDir(), specs, []string{"nvidia.divvy.dev/gpu=GPU-c"})
	if err == nil || !strings.Contains(err.Error(), "nvidia.divvy.dev/gpu=GPU-c") {
		t.Errorf("got %v for a device that no specification has", err)
	}
}
