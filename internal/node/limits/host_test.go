package limits

import (
	"path/filepath"
	"testing"
)

func TestController(t *testing.T) {
	for name, tt := range map[string]struct {
		files     map[string]string
		want, err string
	}{
		"Linux 6.14":      {map[string]string{"cg/cgroup.controllers": "cpu misc dmem\n"}, "dmem", ""},
		"an older kernel": {map[string]string{"cg/cgroup.controllers": "cpu misc\n"}, "misc", ""},
		"neither":         {map[string]string{"cg/cgroup.controllers": "cpu memory\n"}, "", "it has cpu, memory"},
		"version 1": {map[string]string{"cg/memory/tasks": "", "proc/filesystems": "nodev\tcgroup\nnodev\tcgroup2\n"}, "",
			"control groups v2 are required, and the node has v1; start the node with"},
		"an old kernel": {map[string]string{"cg/memory/tasks": "", "proc/filesystems": "nodev\tcgroup\n"}, "", "the kernel has v1 alone"},
		"nothing":       {nil, "", "control groups v2 are required"},
	} {
		root := t.TempDir()
		put(t, root, tt.files)
		got, err := Controller(filepath.Join(root, "proc"), filepath.Join(root, "cg"))
		if tt.err != "" {
			wantError(t, name, err, tt.err)
		} else if err != nil || got != tt.want {
			t.Errorf("%s: %q, %v, want %q", name, got, err, tt.want)
		}
	}
}

func TestOwnGroup(t *testing.T) {
	root := t.TempDir()
	put(t, root, map[string]string{"host/a/b/cgroup.events": "", "own/cgroup.events": "", "top/cgroup.procs": ""})
	host, own, top := filepath.Join(root, "host"), filepath.Join(root, "own"), filepath.Join(root, "top")
	for name, tt := range map[string]struct{ path, own, want, err string }{
		"the host's namespace":   {"/a/b", own, host + "/a/b", ""},
		"a namespace of its own": {"/", own, own, ""},
		"the top":                {"/", top, "", "own control group"},
		"a group that is gone":   {"/c", own, "", "no such file"},
		"another namespace":      {"/../a/b", own, "", "outside of the namespace"},
	} {
		got, err := OwnGroup(tt.path, host, tt.own)
		if tt.err != "" {
			wantError(t, name, err, tt.err)
		} else if err != nil || got != tt.want {
			t.Errorf("%s: %q, %v, want %q", name, got, err, tt.want)
		}
	}
}
