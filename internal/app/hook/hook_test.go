package hook

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/limits"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

const pod = "/kubepods/pod0a1b2c3d-0000-4000-8000-000000000001/" +
	"3f0c9a1be4d27586a1b2c3d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60718"

func TestMainFails(t *testing.T) {
	root := t.TempDir()
	for name, text := range map[string]string{
		"proc/1/cgroup": "0::" + pod + "\n", "proc/2/cgroup": "4:pids:" + pod + "\n", "cg" + pod + "/x": "",
	} {
		file := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o750); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	host := []string{"--proc-root=" + root + "/proc", "--cgroup-root=" + root + "/cg", "--record-dir=" + root + "/run",
		"--driver-root=" + root}
	const version2, version1 = `{"id":"c","pid":1}`, `{"id":"c","pid":2}`
	for name, tt := range map[string]struct {
		args []string
		in   string
		want string // on the standard error
		code int
	}{
		"nothing":             {nil, "", "divvy-hook limit --device=UUID", 1},
		"another command":     {[]string{"x"}, "", `unknown command "x"`, 1},
		"another flag":        {[]string{"limit", "--x"}, "", "not defined: -x", 1},
		"an argument":         {[]string{"limit", "--device=a", "--hard-mib=1", "x"}, "", `unexpected argument "x"`, 1},
		"no device":           {[]string{"limit", "--hard-mib=1"}, "", "--device is missing", 1},
		"no amount":           {[]string{"limit", "--device=a"}, "", "either --hard-mib", 1},
		"a negative amount":   {[]string{"limit", "--device=a", "--hard-mib=-1"}, "", "invalid value", 1},
		"a very large amount": {[]string{"limit", "--device=a", "--hard-mib=18446744073709551615"}, "", "too large", 1},
		"an amount and none":  {[]string{"limit", "--device=a", "--hard-mib=1", "--max"}, "", "either --hard-mib", 1},
		"no state":            {append([]string{"limit", "--device=a", "--hard-mib=1"}, host...), "", "state of the container", 1},
		"version 1": {append([]string{"limit", "--device=a", "--hard-mib=1"}, host...), version1,
			"control groups v2 are required", 1},
		"no library": {append([]string{"limit", "--device=a", "--hard-mib=1"}, host...), version2,
			"libnvidia-ml.so.1 not found", 1},
		"no library to clear":  {append([]string{"limit", "--device=a", "--max"}, host...), version2, "libnvidia-ml.so.1 not found", 0},
		"version 1 to clear":   {append([]string{"limit", "--device=a", "--max"}, host...), version1, "control groups v2 are required", 0},
		"no library to check":  {[]string{"check", "--driver-root=" + root}, "", "libnvidia-ml.so.1 not found", 1},
		"check with arguments": {[]string{"check", "x"}, "", "unexpected argument", 1},
	} {
		var out, diagnostics strings.Builder
		code := Main(t.Context(), tt.args, Streams{In: strings.NewReader(tt.in), Out: &out, Err: &diagnostics})
		text := diagnostics.String()
		if code != tt.code || !strings.HasPrefix(text, "divvy-hook: ") || !strings.Contains(text, tt.want) || out.Len() > 0 ||
			strings.Count(text, "\n") != 1 {
			t.Errorf("%s: exit code %d, %q %q, want %q", name, code, text, out.String(), tt.want)
		}
	}
}

// TestHookOnADriver: the limit is the driver's afterwards, for that container alone.
func TestHookOnADriver(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: only root may set limits")
	}
	for _, accounting := range []vendorsim.MemoryAccounting{vendorsim.MemoryAccountingMisc, vendorsim.MemoryAccountingDmem} {
		t.Run(string(accounting), func(t *testing.T) {
			root := t.TempDir()
			folder := filepath.Join(root, "usr/lib64")
			if _, err := vendorsim.Build(t.Context(), vendorsim.NVIDIA, folder); err != nil {
				t.Fatal(err)
			}
			groups := vendorsim.ControlGroups{Root: "cgroup", Proc: "proc"}
			topology := vendorsim.Topology{Cards: vendorsim.GPUs(1, 40960), ControlGroups: groups,
				Driver: vendorsim.Driver{MemoryAccounting: accounting, Persistence: true}}
			text, err := topology.Encode()
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(folder, vendorsim.TopologyName), text, 0o600); err != nil {
				t.Fatal(err)
			}
			dmem := accounting == vendorsim.MemoryAccountingDmem
			dir, err := groups.Make(folder, pod, dmem)
			if err != nil {
				t.Fatal(err)
			}
			other, err := groups.Make(folder, pod[:len(pod)-1]+"9", dmem)
			if err != nil {
				t.Fatal(err)
			}
			if err := groups.Place(folder, 42, pod); err != nil {
				t.Fatal(err)
			}
			gpu := topology.Cards[0].UUID
			run := func(what string, code int, args ...string) string {
				t.Helper()
				var diagnostics strings.Builder
				args = append(args, "--device="+gpu, "--driver-root="+root, "--proc-root="+folder+"/proc",
					"--cgroup-root="+folder+"/cgroup",
					"--record-dir="+root+"/run")
				got := Main(t.Context(), args, Streams{In: strings.NewReader(`{"id":"c","pid":42}`), Out: &diagnostics, Err: &diagnostics})
				if got != code {
					t.Errorf("%s: exit code %d, %s", what, got, &diagnostics)
				}
				return diagnostics.String()
			}
			l, err := open(root)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close() //nolint:errcheck // the test has ended
			run("a limit", 0, "limit", "--hard-mib=3000")
			if got, err := l.Limit(t.Context(), accel.DeviceID(gpu), dir); err != nil || got.Bytes != 3000*limits.MiB {
				t.Errorf("the limit is %+v, %v", got, err)
			}
			if got, err := l.Limit(t.Context(), accel.DeviceID(gpu), other); !errors.Is(err, backend.ErrNoLimit) {
				t.Errorf("the limit of another container is %+v, %v", got, err)
			}
			records, err := limits.ReadRecords(root+"/run", folder+"/cgroup")
			if err != nil || len(records) != 1 || records[0].Container != "c" || records[0].Bytes != 3000*limits.MiB {
				t.Errorf("records are %+v, %v", records, err)
			}
			if text := run("more than the GPU has", 1, "limit", "--hard-mib=50000"); !strings.Contains(text, "invalid argument") {
				t.Errorf("more than the GPU has: %s", text)
			}
			run("none", 0, "limit", "--max")
			if got, err := l.Limit(t.Context(), accel.DeviceID(gpu), dir); !errors.Is(err, backend.ErrNoLimit) {
				t.Errorf("the cleared limit is %+v, %v", got, err)
			}
		})
	}
}
