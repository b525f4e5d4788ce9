package controlplane

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	kubeschedulerv1 "k8s.io/kube-scheduler/config/v1"
	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/internal/install/schedconf"
)

func TestSchedulerConfiguration(t *testing.T) {
	o := SchedulerOptions{Name: "with", QPS: 500, Settings: map[string]any{"percentageOfNodesToScore": 30}}
	for name, extender := range map[string]*schedconf.Extender{
		"without": nil,
		"with":    {URL: "http://127.0.0.1:4711/gcushare-scheduler", Resources: []string{"enflame.com/gcu-memory"}},
	} {
		t.Run(name, func(t *testing.T) {
			o := o
			o.Extender = extender
			data, err := o.configuration("/x/with.conf", "v1.37.1")
			if err != nil {
				t.Fatal(err)
			}
			var config kubeschedulerv1.KubeSchedulerConfiguration
			if err := yaml.Unmarshal(data, &config); err != nil {
				t.Fatalf("%v in\n%s", err, data)
			}
			if config.ClientConnection.Kubeconfig != "/x/with.conf" || config.ClientConnection.QPS != 500 ||
				config.ClientConnection.Burst != 1000 {
				t.Errorf("connection: %+v", config.ClientConnection)
			}
			if config.PercentageOfNodesToScore == nil || *config.PercentageOfNodesToScore != 30 || len(config.Profiles) != 1 ||
				*config.Profiles[0].SchedulerName != "with" {
				t.Errorf("the settings are not those that were given:\n%s", data)
			}
			if extender == nil {
				if len(config.Extenders) != 0 {
					t.Errorf("extenders: %+v", config.Extenders)
				}
				return
			}
			if len(config.Extenders) != 1 || config.Extenders[0].URLPrefix != extender.URL || !config.Extenders[0].NodeCacheCapable ||
				config.Extenders[0].BindVerb != "bind" {
				t.Errorf("extenders: %+v", config.Extenders)
			}
		})
	}
}

// The plugin changes the profiles' plugins, and nothing else.
func TestPluginConfiguration(t *testing.T) {
	o := SchedulerOptions{Name: "with", QPS: 500, Settings: map[string]any{"profiles": []any{
		map[string]any{"schedulerName": "a", "percentageOfNodesToScore": 30}, map[string]any{"schedulerName": "b"},
	}}}
	read := func() (config kubeschedulerv1.KubeSchedulerConfiguration) {
		t.Helper()
		data, err := o.configuration("/x/with.conf", "")
		if err == nil {
			err = yaml.UnmarshalStrict(data, &config)
		}
		if err != nil {
			t.Fatalf("%v in\n%s", err, data)
		}
		return config
	}
	plain := read()
	o.plugin = true
	config := read()
	for i := range config.Profiles {
		p := config.Profiles[i].Plugins
		if p == nil || len(p.MultiPoint.Enabled) != 1 || len(p.PostFilter.Enabled) != 3 || len(p.Bind.Enabled) != 2 {
			t.Errorf("plugins: %+v", p)
		}
		config.Profiles[i].Plugins = nil
	}
	if diff := cmp.Diff(plain, config); diff != "" {
		t.Errorf("differs from a configuration without the plugin in more than plugins:\n%s", diff)
	}
}

func TestProcess(t *testing.T) {
	dir := t.TempDir()
	start := func(script string) *Process {
		t.Helper()
		p, err := StartProcess("sh", "/bin/sh", filepath.Join(dir, "log"), []string{"WORD=hello"}, "-c", script)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = p.Kill() })
		return p
	}
	t.Run("one that ends by itself", func(t *testing.T) {
		p := start("echo $WORD; exit 3")
		<-p.ended
		if p.Running() || p.Err().Error() != "exit status 3" || p.LogTail(1) != "hello" {
			t.Errorf("running %t, %v, log %q", p.Running(), p.Err(), p.LogTail(1))
		}
		if err := p.Stop(time.Second); err != nil {
			t.Errorf("to stop it again: %v", err)
		}
	})
	t.Run("one that does not end when asked", func(t *testing.T) {
		p := start("trap '' TERM; echo ready; while :; do sleep 0.05; done")
		for p.LogTail(1) != "ready" && p.Running() {
			time.Sleep(10 * time.Millisecond)
		}
		if usage, err := p.Usage(); err != nil || usage.Resident <= 0 || usage.Peak < usage.Resident {
			t.Errorf("usage %+v, %v", usage, err)
		}
		if err := p.Stop(100 * time.Millisecond); err != nil || p.Running() {
			t.Errorf("it runs: %t, %v", p.Running(), err)
		}
		if status, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGKILL {
			t.Errorf("it ended with %v", p.cmd.ProcessState)
		}
		if _, err := p.Usage(); err == nil {
			t.Error("a process that is gone uses something")
		}
	})
	if _, err := StartProcess("none", filepath.Join(dir, "none"), filepath.Join(dir, "log"), nil); err == nil ||
		!strings.Contains(err.Error(), "start none") {
		t.Errorf("a program that is not there: %v", err)
	}
}

// The lab's own programs must not be taken for those of a cluster that runs beside.
func TestOwnPrograms(t *testing.T) {
	bin, dir := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(bin, "etcd"), []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	c := &ControlPlane{binDir: bin, dir: dir}
	for range 2 {
		if path, err := c.own("etcd"); err != nil || !strings.HasPrefix(path, dir) {
			t.Errorf("own = %s, %v", path, err)
		}
	}
	if _, err := c.own("kubelet"); err == nil || !strings.Contains(err.Error(), "there is no program") {
		t.Errorf("a program that was not built: %v", err)
	}
}

func TestFreePorts(t *testing.T) {
	ports, err := FreePorts(5)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[int]bool{}
	for _, port := range ports {
		seen[port] = true
	}
	if len(seen) != 5 {
		t.Errorf("ports %v", ports)
	}
}
