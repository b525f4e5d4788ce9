package cgroup

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const (
	goneUID  = "0a1b2c3d-0000-4000-8000-000000000001"
	otherUID = "0a1b2c3d-0000-4000-8000-000000000002"
)

// put writes files below root, with their folders.
func put(t *testing.T, root string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func TestRunningPods(t *testing.T) {
	const systemd = "0a1b2c3d_0000_4000_8000_000000000001"
	for name, tt := range map[string]struct {
		files map[string]string
		want  bool
	}{
		"version 2": {map[string]string{"cgroup.controllers": "", "kubepods/pod" + goneUID +
			"/cgroup.events": "populated 1\nfrozen 0\n"}, true},
		"version 2, all have ended": {map[string]string{"cgroup.controllers": "", "kubepods/pod" + goneUID +
			"/cgroup.events": "populated 0\nfrozen 0\n"}, false},
		"version 2, of a class of service": {map[string]string{"cgroup.controllers": "", "kubepods/besteffort/pod" + goneUID +
			"/cgroup.events": "frozen 0\npopulated 1\n"}, true},
		"version 2, by systemd": {map[string]string{
			"cgroup.controllers": "", "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + systemd +
				".slice/cgroup.events": "populated 1\n",
		}, true},
		"version 2, by systemd, below a root of its own": {map[string]string{
			"cgroup.controllers": "", "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod" + systemd +
				".slice/cgroup.events": "populated 1\n",
		}, true},
		"version 1":                      {map[string]string{"pids/kubepods/burstable/pod" + goneUID + "/pids.current": "3\n"}, true},
		"version 1, all have ended":      {map[string]string{"pids/kubepods/burstable/pod" + goneUID + "/pids.current": "0\n"}, false},
		"version 1, no count":            {map[string]string{"memory/kubepods/pod" + goneUID + "/abc/tasks": ""}, true},
		"version 1, no count, no groups": {map[string]string{"memory/kubepods/pod" + goneUID + "/tasks": ""}, false},
		"no group": {map[string]string{"cgroup.controllers": "", "kubepods/pod" + otherUID +
			"/cgroup.events": "populated 1\n"}, false},
		"another name that begins alike": {map[string]string{"cgroup.controllers": "", "kubepods/pod" + goneUID +
			"x/cgroup.events": "populated 1\n"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			put(t, root, tt.files)
			got, err := RunningPods(root, []string{goneUID, "unknown"})
			if err != nil || got[goneUID] != tt.want || got["unknown"] {
				t.Errorf("runningPods = %v, %v, want %t", got, err, tt.want)
			}
		})
	}
	if _, err := RunningPods(t.TempDir(), []string{goneUID}); err == nil ||
		!strings.Contains(err.Error(), "no control groups are mounted") {
		t.Errorf("without control groups: %v", err)
	}
	root := t.TempDir()
	put(t, root, map[string]string{"pids/kubepods/pod" + goneUID + "/pids.current": "many"})
	if _, err := RunningPods(root, []string{goneUID}); err == nil || !strings.Contains(err.Error(), "pids.current") {
		t.Errorf("a count that is none: %v", err)
	}
}

func TestMembers(t *testing.T) {
	const (
		pod   = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0a1b2c3d_0000_4000_8000_000000000001.slice"
		plain = "kubepods/pod" + otherUID
	)
	inContainer := []Owner{{goneUID, mainID}}
	for name, tt := range map[string]struct {
		files map[string]string
		want  map[int][]Owner
		err   string
	}{
		"version 2, by systemd": {map[string]string{
			"cgroup.controllers": "", "cgroup.procs": "2\n3\n", "system.slice/mps.service/cgroup.procs": "40\n",
			pod + "/cgroup.procs": "", pod + "/cri-containerd-" + mainID + ".scope/cgroup.procs": "10\n11\n",
			pod + "/cri-containerd-" + sidecarID + ".scope/cgroup.procs": "12\n",
		}, map[int][]Owner{10: inContainer, 11: inContainer, 12: {{goneUID, sidecarID}}}, ""},
		"groups that a container made, and processes outside of the namespace": {map[string]string{
			"cgroup.controllers": "", pod + "/cri-containerd-" + mainID + ".scope/a/b/c/d/e/f/g/cgroup.procs": "0\n10\n",
		}, map[int][]Owner{10: inContainer}, ""},
		"version 1": {map[string]string{
			"pids/" + plain + "/" + mainID + "/cgroup.procs": "10\n", "pids/cgroup.procs": "2\n",
			"memory/" + plain + "/" + sidecarID + "/cgroup.procs": "10\n",
		}, map[int][]Owner{10: {{otherUID, mainID}}}, ""},
		"no pods: a container's view of its own groups": {map[string]string{"cgroup.controllers": "", "cgroup.procs": "2\n"}, nil,
			"no control group of a pod"},
		"no groups": {map[string]string{}, nil, "no control groups are mounted"},
		"a text that is none": {map[string]string{"cgroup.controllers": "", plain + "/cgroup.procs": "many\n"}, nil,
			plain + "/cgroup.procs"},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			put(t, root, tt.files)
			got, err := Members(root)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Fatalf("Members: %v, want %q", err, tt.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestGroups(t *testing.T) {
	const pod, other = "kubepods/burstable/pod" + goneUID, "kubepods/pod" + otherUID
	root := t.TempDir()
	put(t, root, map[string]string{
		"cgroup.controllers": "", "cgroup.procs": "1\n",
		pod + "/cgroup.procs": "2\n", pod + "/" + mainID + "/cgroup.procs": "10\n",
		pod + "/" + sidecarID + "/cgroup.procs": "", pod + "/" + sidecarID + "/container/cgroup.procs": "11\n12\n",
		other + "/" + mainID + "/cgroup.procs": "13\n",
	})
	got, err := Groups(root, func(uid string) bool { return uid == goneUID })
	if err != nil {
		t.Fatal(err)
	}
	for i := range got {
		if inode, err := Inode(filepath.Join(root, got[i].Path)); err != nil || inode != got[i].Inode {
			t.Errorf("inode of %s is %d, %v, want %d", got[i].Path, inode, err, got[i].Inode)
		}
		got[i].Inode = 0
	}
	want := []Group{
		{Owner: Owner{goneUID, mainID}, Path: "/" + pod + "/" + mainID},
		{Owner: Owner{goneUID, sidecarID}, Path: "/" + pod + "/" + sidecarID + "/container"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	put(t, root, map[string]string{pod + "/" + mainID + "/cgroup.procs": "many"})
	_, err = Groups(root, func(uid string) bool { return uid == goneUID })
	if err == nil || !strings.Contains(err.Error(), "cgroup.procs") {
		t.Errorf("a text that is none: %v", err)
	}
	version1 := t.TempDir()
	put(t, version1, map[string]string{"pids/" + pod + "/" + mainID + "/cgroup.procs": "10\n"})
	if _, err := Groups(version1, func(string) bool { return true }); !errors.Is(err, ErrNotUnified) {
		t.Errorf("version 1: %v", err)
	}
	if _, err := Inode(filepath.Join(root, "cgroup.procs")); err == nil {
		t.Error("a file has the inode of a group")
	}
}
