package vendors

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/node/backend"
)

func TestOpenMakesEachBackendOnce(t *testing.T) {
	cfg := config.Default()
	cfg.Resources = append(cfg.Resources, cfg.Resources[0])
	got, err := Open(cfg, func(string) func(string, time.Duration, bool) { return nil }, nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 1 || got["enflame"] == nil {
		t.Errorf("backends: %v", got)
	}
	cfg.Resources[0].Vendor = "acme"
	if _, err := Open(cfg, func(string) func(string, time.Duration, bool) { return nil }, nil); err == nil {
		t.Error("an unknown vendor was opened")
	}
	if err := got.Close(); err != nil {
		t.Error(err)
	}
}

func TestBackendOptionsAreThoseOfTheVendor(t *testing.T) {
	c := config.Default()
	c.DriverRoot = "/host"
	c.Libraries = map[string]string{"iluvatar": "/opt/libixml.so"}
	c.Vendors = map[string]config.Vendor{
		"nvidia": {
			DriverRoot: "/run/nvidia/driver", DeviceIDs: "index", CDIKind: "nvidia.com/gpu", MigStrategy: config.MigMixed,
			CDIHookPath: "/opt/hook", CDIDisableHooks: []string{"chmod"}, CDIFeatureFlags: []string{"disable-ipc-discoverer"},
			Health: config.Health{Ignore: []string{"all"}, Heed: []string{"xid-94"}, NeverRecover: []string{"xid-79"}},
		},
		"iluvatar": {DeviceIDs: "uuid", DevRoot: "/devices"},
	}
	for vendor, want := range map[string]backend.Options{
		"enflame": {DriverRoot: "/host", HostRoot: "/host", SysfsRoot: "/host/sys", ProcRoot: "/host/proc"},
		"nvidia": {
			DriverRoot: "/host/run/nvidia/driver", HostDriverRoot: "/run/nvidia/driver", SysfsRoot: "/host/sys",
			ProcRoot: "/host/proc", MIG: "mixed",
			IndexInEnv: true, CDIKind: "nvidia.com/gpu", Ignore: []string{"all"}, Heed: []string{"xid-94"},
			NeverRecover: []string{"xid-79"}, HostRoot: "/host",
			CDI: backend.CDIOptions{
				Generator: []string{"/proc/self/exe", "generate-cdi"}, HookPath: "/opt/hook",
				DisabledHooks: []string{"chmod"}, FeatureFlags: []string{"disable-ipc-discoverer"},
			},
		},
		"iluvatar": {
			HostRoot: "/host", DriverRoot: "/host", HostDriverRoot: "/devices", SysfsRoot: "/host/sys", ProcRoot: "/host/proc",
			DevRoot: "/host/devices", LibraryPath: "/opt/libixml.so",
		},
	} {
		if diff := cmp.Diff(want, Options(c, vendor)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", vendor, diff)
		}
	}
}
