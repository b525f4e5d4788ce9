package node

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/deviceplugin"
	"github.com/divvy-gpu/divvy/internal/node/nodeconfig"
)

const head = "apiVersion: config.divvy.dev/v1alpha1\nkind: NodeConfig\n"

// write puts a file into a folder of its own.
func write(t *testing.T, name, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// hasAll fails the test for each part that the text lacks.
func hasAll(t *testing.T, text string, parts ...string) {
	t.Helper()
	for _, p := range parts {
		if !strings.Contains(text, p) {
			t.Errorf("missing %q in:\n%s", p, text)
		}
	}
}

func TestRunRefusesBadSettings(t *testing.T) {
	broken := write(t, "node.yaml", head+"colour: blue\nresources:\n- {name: enflame.com/gcu-memory, vendor: acme, memoryUnit: \"3\"}\n")
	tests := map[string]struct {
		options Options
		want    []string
	}{
		"no node name": {Options{}, []string{"--node-name", "NODE_NAME"}},
		"no such file": {Options{NodeName: "n", Places: nodeconfig.Places{Files: []string{"/nowhere/node.yaml"}}},
			[]string{"/nowhere/node.yaml"}},
		"all mistakes of a file": {
			Options{NodeName: "n", Places: nodeconfig.Places{Files: []string{broken}}},
			[]string{broken, "3 mistakes", `line 3: unknown key "colour"`, `vendor: "acme" is not known; use one of enflame`,
				`memoryUnit: "3"`},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			err := Run(t.Context(), tt.options)
			if err == nil {
				t.Fatal("accepted")
			}
			hasAll(t, err.Error(), tt.want...)
			if ExitCode(err) == 0 {
				t.Error("the exit code says that all is well")
			}
		})
	}
}

func TestVersion(t *testing.T) {
	cmd := Command("divvy-node")
	var out bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetArgs([]string{"--version"})
	if err := cmd.Execute(); err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(out.String(), "divvy-node ") {
		t.Errorf("--version prints %q", out.String())
	}
}

func TestOpenMakesEachBackendOnce(t *testing.T) {
	cfg := config.Default()
	cfg.Resources = append(cfg.Resources, cfg.Resources[0])
	got, err := openBackends(cfg, newLibraryMetrics().observer)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 1 || got["enflame"] == nil {
		t.Errorf("backends: %v", got)
	}
	cfg.Resources[0].Vendor = "acme"
	if _, err := openBackends(cfg, newLibraryMetrics().observer); err == nil {
		t.Error("an unknown vendor was opened")
	}
	if err := got.close(); err != nil {
		t.Error(err)
	}
}

func TestBackendOptionsAreThoseOfTheVendor(t *testing.T) {
	c := config.Default()
	c.DriverRoot = "/host"
	c.Libraries = map[string]string{"iluvatar": "/opt/libixml.so"}
	c.Vendors = map[string]config.Vendor{
		"nvidia": {
			DriverRoot: "/run/nvidia/driver", DeviceIDs: "index", CDIKind: "nvidia.com/gpu",
			Health: config.Health{Ignore: []string{"all"}, Heed: []string{"xid-94"}, NeverRecover: []string{"xid-79"}},
		},
		"iluvatar": {DeviceIDs: "uuid", DevRoot: "/devices"},
	}
	for vendor, want := range map[string]backend.Options{
		"enflame": {DriverRoot: "/host", SysfsRoot: "/host/sys"},
		"nvidia": {
			DriverRoot: "/host/run/nvidia/driver", HostDriverRoot: "/run/nvidia/driver", SysfsRoot: "/host/sys",
			IndexInEnv: true, CDIKind: "nvidia.com/gpu", Ignore: []string{"all"}, Heed: []string{"xid-94"},
			NeverRecover: []string{"xid-79"},
		},
		"iluvatar": {DriverRoot: "/host", HostDriverRoot: "/devices", SysfsRoot: "/host/sys", LibraryPath: "/opt/libixml.so"},
	} {
		if diff := cmp.Diff(want, backendOptions(c, vendor)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", vendor, diff)
		}
	}
}

// A configuration is refused exactly when a socket of one of its resources
// cannot be made: the check names sockets as package deviceplugin does.
func TestSocketsThatCannotBeMadeAreRefused(t *testing.T) {
	const (
		longest = 107        // sun_path of unix(7)
		aside   = len("~99") // after the name of a socket that cannot be taken
	)
	for _, names := range [][]accel.Resource{
		{"nvidia.com/gpu"},
		{"nvidia.com/gpu", "nvidia.org/gpu"},
		{"nvidia.com/gpu", "nvidia.org/gpu.shared", "nvidia.org/gpu"},
		{"kubelet.com/sock", "a-b.com/c", "a.com/b-c"},
	} {
		sockets := deviceplugin.SocketNames(names...)
		for folder := range 100 {
			c := config.Default()
			c.KubeletDir = "/" + strings.Repeat("k", folder)
			c.Resources = nil
			dir := filepath.Join(c.KubeletDir, "device-plugins")
			want := len(filepath.Join(dir, "kubelet.sock")) > longest
			for i, name := range names {
				c.Resources = append(c.Resources, config.Resource{Name: string(name), Vendor: "nvidia", Mode: config.ModeExclusive})
				want = want || len(filepath.Join(dir, sockets[i]))+aside > longest
			}
			if got := config.Validate(c, []string{"nvidia"}); want != (len(got) > 0) {
				t.Errorf("%v in a folder of %d letters, sockets %v: %q", names, folder, sockets, got)
			}
		}
	}
}
