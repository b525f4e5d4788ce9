package mps_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/divvy-gpu/divvy/internal/node/mps"
)

func TestHost(t *testing.T) {
	for name, tt := range map[string]struct {
		driverRoot, program string
		want                []string // mounts
		runs                string   // the program, in its root
	}{
		"driver of the host": {"/", "usr/bin", []string{"tmpfs run/divvy/mps/shm", "run/divvy/mps/shm dev/shm"}, "/usr/bin/" + mps.Program},
		"driver container": {"/run/nvidia/driver", "run/nvidia/driver/usr/local/bin", []string{
			"tmpfs run/divvy/mps/shm", "dev run/nvidia/driver/dev", "run/divvy/mps run/nvidia/driver/run/divvy/mps",
			"run/divvy/mps/shm run/nvidia/driver/dev/shm",
		}, "/usr/local/bin/" + mps.Program},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			var mounts []string
			h := mps.Host{Root: root, Mount: func(source, target, fstype string, _ uintptr, data string) error {
				if fstype == "tmpfs" && !strings.Contains(data, "size=") {
					t.Errorf("the shared memory is mounted with %q, without a bound", data)
				}
				at := strings.TrimPrefix(target, root+"/")
				if fstype != "" {
					source = fstype
				}
				mounts = append(mounts, strings.TrimPrefix(source, root+"/")+" "+at)
				return nil
			}}
			if _, err := h.Prepare(tt.driverRoot); err == nil || !strings.Contains(err.Error(),
				"there is no nvidia-cuda-mps-control in the driver's folder "+tt.driverRoot+" of the host") || len(mounts) > 0 {
				t.Errorf("without the program: %v, %q", err, mounts)
			}
			file := filepath.Join(root, tt.program, mps.Program)
			if err := os.MkdirAll(filepath.Dir(file), 0o750); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(file, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			tool, err := h.Prepare(tt.driverRoot)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, mounts); diff != "" {
				t.Errorf("mounts (-want +got):\n%s", diff)
			}
			cmd, err := tool(t.Context(), []string{"A=b"}, "-f")
			if err != nil || cmd.Path != tt.runs || cmd.SysProcAttr.Chroot != filepath.Join(root, tt.driverRoot) ||
				!slices.Equal(cmd.Args, []string{tt.runs, "-f"}) || !slices.Equal(cmd.Env, []string{"A=b"}) {
				t.Errorf("command is %+v, %v", cmd, err)
			}
		})
	}
}

// TestTidy: what containers have left goes when none has the shared memory any more.
func TestTidy(t *testing.T) {
	h := mps.Host{Root: t.TempDir()}
	proc, shared := filepath.Join(h.Root, "proc"), mps.SharedMemoryDir(h.Dir())
	put := func(file, text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(file), 0o750); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	process := func(pid, space, mounts, maps string) {
		t.Helper()
		put(filepath.Join(proc, pid, "mountinfo"), mounts)
		put(filepath.Join(proc, pid, "maps"), maps)
		if err := os.MkdirAll(filepath.Join(proc, pid, "ns"), 0o750); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink("mnt:["+space+"]", filepath.Join(proc, pid, "ns/mnt")); err != nil {
			t.Fatal(err)
		}
	}
	expect := func(what string, want ...string) {
		t.Helper()
		if err := h.Tidy(proc, []int{7}); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		var got []string
		left, _ := os.ReadDir(shared)
		for _, one := range left {
			got = append(got, one.Name())
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: left are %q, want %q", what, got, want)
		}
	}
	expect("before the first daemon")
	put(filepath.Join(shared, "left"), "x")
	put(filepath.Join(shared, "ring"), "x")
	var stat unix.Stat_t
	if err := unix.Stat(shared, &stat); err != nil {
		t.Fatal(err)
	}
	mount := fmt.Sprintf("5 4 %d:%d / %%s rw - tmpfs divvy-mps rw\n", unix.Major(stat.Dev), unix.Minor(stat.Dev))
	process("self", "1", "", "")
	process("7", "1", fmt.Sprintf(mount, "/dev/shm"), "7f00-7f01 rw-s 00000000 00:05 9 /dev/shm/ring\n")
	process("8", "2", fmt.Sprintf(mount, "/run/divvy/mps/shm"), "")
	process("9", "3", fmt.Sprintf(mount, "/dev/shm"), "")
	expect("a container has it", "left", "ring")
	if err := os.RemoveAll(filepath.Join(proc, "9")); err != nil {
		t.Fatal(err)
	}
	expect("no container has it", "ring")
}
