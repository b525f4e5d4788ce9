package mps_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

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
			h := mps.Host{Root: root, Mount: func(source, target, fstype string, _ uintptr, _ string) error {
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
