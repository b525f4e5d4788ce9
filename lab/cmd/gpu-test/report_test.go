package main

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/divvy-gpu/divvy/lab/internal/checks"
)

func TestReport(t *testing.T) {
	r := report{
		Date: time.Date(2027, 1, 2, 3, 4, 5, 0, time.UTC), Version: "gpu-test v1.2.3", Verdict: "2 checks on 1 GPUs: 1 DIFFER",
		Sections: []section{
			{Title: "One", Tables: []table{{Head: []string{"a", "b"}, Rows: [][]string{{"1|2", "<none>"}}}}, Notes: []string{"It\nis."}},
			{Title: "Two", Checks: []checks.Result{{OK: true, Text: "x: 1"}, {Text: "y: wanted 1, got 2"}}},
		},
	}
	want := `# Test on a GPU, 2027-01-02

gpu-test v1.2.3. 2 checks on 1 GPUs: 1 DIFFER.

## One

| a | b |
|---|---|
| 1\|2 | &lt;none> |

It is.

## Two

| check | result |
|---|---|
| x: 1 | ok |
| y: wanted 1, got 2 | **differs** |
`
	if diff := cmp.Diff(want, r.Markdown()); diff != "" {
		t.Errorf("report (-want +got):\n%s", diff)
	}
}

func TestAnonymous(t *testing.T) {
	for text, want := range map[string]string{
		"GPU-a1b2c3d4-0000-4000-8000-000000000001":                  "GPU-a1b2c3d4...",
		"MIG-GPU-A1B2C3D4-0000-4000-8000-000000000001/1/0":          "MIG-GPU-A1B2C3D4.../1/0",
		"on node7 and node7.example.com, not on node77 or a-node7.": "on HOST and HOST, not on node77 or a-node7.",
		"/home/ann/x /home/bob /srv/eve/y /root/z /rooted":          "~/x ~ ~/y ~/z /rooted",
	} {
		if got := anonymous(text, "node7.example.com", "/srv/eve"); got != want {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
	}
}

func TestLimitsVerdict(t *testing.T) {
	both := map[string]bool{limitFunctions[0]: true, limitFunctions[1]: true}
	for name, tt := range map[string]struct {
		driver   string
		exported map[string]bool
		right    bool
		want     string
	}{
		"an older driver":            {"595.91.07", nil, true, "older than 615"},
		"the first with them":        {"615.71.09", both, true, "both are exported"},
		"backported":                 {"595.91.07", both, true, "both are exported"},
		"a newer one without":        {"620.1", nil, false, "not older than 615"},
		"only one":                   {"615.71.09", map[string]bool{limitFunctions[0]: true}, false, "only " + limitFunctions[1]},
		"a driver without a version": {"", nil, false, "has no number"},
	} {
		if got, right := limitsVerdict(tt.driver, tt.exported); right != tt.right || !strings.Contains(got, tt.want) {
			t.Errorf("%s: got %q, %t; want %q, %t", name, got, right, tt.want, tt.right)
		}
	}
}

func TestCgroups(t *testing.T) {
	for name, tt := range map[string]struct {
		files map[string]string
		want  cgroups
	}{
		"none":      {nil, cgroups{}},
		"version 1": {map[string]string{"memory/tasks": ""}, cgroups{Version: 1}},
		"the root":  {map[string]string{"cgroup.controllers": "cpu dmem\n"}, cgroups{Version: 2, Controllers: []string{"cpu", "dmem"}}},
		"below the root": {map[string]string{"cgroup.controllers": "", "cgroup.type": "domain\n"},
			cgroups{Version: 2, Controllers: []string{}, Below: true}},
	} {
		root := t.TempDir()
		for file, text := range tt.files {
			path := filepath.Join(root, "sys/fs/cgroup", file)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			write(t, path, text, 0o600)
		}
		if got := cgroupsOf(root); !reflect.DeepEqual(got, tt.want) {
			t.Errorf("%s: got %+v, want %+v", name, got, tt.want)
		}
	}
}

func TestUseOfSeveralLists(t *testing.T) {
	own := uint32(os.Getpid())
	got := useOf([]processList{
		{Name: "compute", Processes: []process{{PID: own, Bytes: 100, Known: true}, {PID: 1 << 30}}},
		{Name: "graphics", Processes: []process{{PID: own, Bytes: 300, Known: true}, {PID: 1<<30 + 1, Bytes: 5, Known: true}}},
		{Name: "MPS", Err: "not supported"},
	})
	if want := (use{bytes: 305, unknown: 1, withoutEntry: 2}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if !fits(105, 100) || fits(106, 100) || !fits(0, 0) || fits(1, 0) {
		t.Error("a sum may be 5 % above what is used, and no more")
	}
}

func TestDifferences(t *testing.T) {
	edits := func(device string, hooks ...*cdispecs.Hook) cdispecs.ContainerEdits {
		return cdispecs.ContainerEdits{DeviceNodes: []*cdispecs.DeviceNode{{Path: "/dev/" + device}}, Hooks: hooks}
	}
	hook := func(path string, args ...string) *cdispecs.Hook {
		return &cdispecs.Hook{HookName: "createContainer", Path: path, Args: append([]string{filepath.Base(path)}, args...)}
	}
	divvys := &cdispecs.Spec{Kind: "a.b/c", ContainerEdits: edits("ctl", hook("/opt/nvidia-cdi-hook", "update-ldcache")),
		Devices: []cdispecs.Device{{Name: "GPU-0", ContainerEdits: edits("nvidia0")}, {Name: "GPU-1", ContainerEdits: edits("nvidia1")}}}
	theirs := &cdispecs.Spec{Kind: "a.b/c", ContainerEdits: edits("ctl", hook("/usr/bin/nvidia-ctk", "hook", "update-ldcache"),
		hook("/usr/bin/nvidia-ctk", "hook", "new")), Devices: []cdispecs.Device{
		{Name: "0", ContainerEdits: edits("nvidia7")}, {Name: "1:0"}, {Name: "2"},
	}}
	theirs.ContainerEdits.Mounts = []*cdispecs.Mount{{ContainerPath: "/l/libx.so.580.1"}, {ContainerPath: "/l/y.bin", HostPath: "/z/y.bin"}}
	c := comparison{hooks: true, driver: "580.1", release: "2", theirRelease: "1",
		names: map[string]string{"0": "GPU-0", "GPU-0": "GPU-0"}, inMIGMode: map[string]bool{"GPU-1": true}}
	explained := map[string]bool{}
	for _, d := range c.compare(divvys, theirs) {
		explained[d.In+" has "+d.What] = d.Why != ""
	}
	want := map[string]bool{
		"Divvy has hooks run by /opt/nvidia-cdi-hook":     true,
		"nvidia-ctk has hooks run by /usr/bin/nvidia-ctk": true,
		"nvidia-ctk has mount /l/libx.so.580.1 from  ()":  false,
		"nvidia-ctk has mount /l/y.bin from /z/y.bin ()":  true,
		"nvidia-ctk has hook createContainer new":         true,
		"nvidia-ctk has device 0":                         true,
		"nvidia-ctk has device 1:0":                       true,
		"nvidia-ctk has device 2":                         false,
		"Divvy has device GPU-0: node /dev/nvidia0":       false,
		"nvidia-ctk has device GPU-0: node /dev/nvidia7":  false,
		"Divvy has device GPU-1":                          true,
	}
	if diff := cmp.Diff(want, explained); diff != "" {
		t.Errorf("differences and whether they are explained (-want +got):\n%s", diff)
	}
}
