package runtimesetup

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
)

func TestResolve(t *testing.T) {
	h := files{containerd1: "version = 2\n" + legacyCRI}.host(t)
	configured := func(vendor string, ways ...config.Injection) config.NodeConfig {
		c := config.Default()
		c.DriverRoot = string(h)
		c.Resources = []config.Resource{{Name: "nvidia.com/gpu", Vendor: vendor, Mode: config.ModeExclusive}}
		c.Vendors = map[string]config.Vendor{Vendor: {Injection: ways, CDIKind: "nvidia.com/gpu"}}
		return c
	}
	var r Resolver
	resolve := func(c config.NodeConfig) []config.Injection {
		t.Helper()
		before := c.Vendors[Vendor].Injection
		got := r.Resolve(context.Background(), c, "")
		if diff := cmp.Diff(before, c.Vendors[Vendor].Injection); diff != "" {
			t.Errorf("the configuration that was given changed:\n%s", diff)
		}
		if got.Vendors[Vendor].CDIKind != "nvidia.com/gpu" {
			t.Errorf("other settings are %+v", got.Vendors[Vendor])
		}
		return got.Vendors[Vendor].Injection
	}

	auto := configured(Vendor, config.InjectAuto)
	if diff := cmp.Diff([]config.Injection{config.InjectEnvironment}, resolve(auto)); diff != "" {
		t.Errorf("auto (-want +got):\n%s", diff)
	}
	first := r.Report()
	if first.Pinned || len(first.Findings) != 1 || first.String() != "nvidia devices reach containers by environment: "+
		"NVIDIA's runtime is the default of containerd and reads the environment" {
		t.Errorf("report: %+v", first)
	}
	// The administrator goes over to CDI while the daemon runs.
	file := filepath.Join(string(h), containerd1)
	if err := os.WriteFile(file, []byte(cdiCRI), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(string(h), "usr/bin/nvidia-ctk"), 0o755); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]config.Injection{config.InjectCDI}, resolve(auto)); diff != "" {
		t.Errorf("auto after a change (-want +got):\n%s", diff)
	}
	// The operator replaces its toolkit, which takes the configuration away meanwhile.
	if err := os.WriteFile(file, []byte("version = 2\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	diff := cmp.Diff([]config.Injection{config.InjectCDI}, resolve(auto))
	if diff != "" || !strings.Contains(r.Report().String(), "as before") {
		t.Errorf("while the toolkit is replaced: %s (-want +got):\n%s", r.Report(), diff)
	}
	if err := os.WriteFile(file, []byte(cdiCRI), 0o644); err != nil {
		t.Fatal(err)
	}
	if resolve(auto); strings.Contains(r.Report().String(), "as before") {
		t.Errorf("afterwards: %s", r.Report())
	}
	pinned := configured(Vendor, config.InjectEnvironment, config.InjectDeviceNodes)
	if diff := cmp.Diff([]config.Injection{config.InjectEnvironment, config.InjectDeviceNodes}, resolve(pinned)); diff != "" {
		t.Errorf("a way that is configured (-want +got):\n%s", diff)
	}
	if got := r.Report(); !got.Pinned || got.Detected.Injection != config.InjectCDI || len(got.Findings) > 0 {
		t.Errorf("report: %+v", got)
	}
	if got := r.Report().Published(); got.Detected != "cdi" || len(got.Injection) != 2 || !got.Pinned {
		t.Errorf("published: %+v", got)
	}
	resolve(configured("enflame", config.InjectAuto))
	if got := r.Report(); got != nil || got.String() != "" || got.Published() != nil {
		t.Errorf("report of a node without NVIDIA's devices: %+v", got)
	}
}

func TestResolveWithAHookProgramElsewhere(t *testing.T) {
	const hook = "/opt/nvidia/toolkit/nvidia-cdi-hook"
	c := config.Default()
	c.DriverRoot = string(files{containerd1: "version = 3\n", hook: ""}.host(t))
	c.Resources = []config.Resource{{Name: "nvidia.com/gpu", Vendor: Vendor, Mode: config.ModeExclusive}}
	c.Vendors = map[string]config.Vendor{Vendor: {Injection: []config.Injection{config.InjectAuto}, CDIHookPath: hook}}
	var r Resolver
	if diff := cmp.Diff([]config.Injection{config.InjectCDI}, r.Resolve(t.Context(), c, "").Vendors[Vendor].Injection); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
