package schedconf

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
)

func TestMain(m *testing.M) {
	klog.SetLoggerWithOptions(logr.Discard(), klog.ContextualLogger(true))
	os.Exit(m.Run())
}

func TestValidate(t *testing.T) {
	for want, change := range map[string]func(*Options){
		"--manifest":           func(o *Options) { o.Node.Manifest = "a" },
		"--kubernetes-dir":     func(o *Options) { o.Node.Dir = "" },
		"--timeout: 0s":        func(o *Options) { o.Node.Timeout = 0 },
		"--settle: 2m0s":       func(o *Options) { o.Node.Settle = 2 * time.Minute },
		"--extender-url":       func(o *Options) { o.Extender.URL = "ftp://a" },
		"--extender-service":   func(o *Options) { o.Extender.Service = "divvy-extender" },
		"--extender-proxy":     func(o *Options) { o.Extender.Proxy = "32764" },
		"combined with --ext":  func(o *Options) { o.Extender.Proxy, o.Extender.URL = "127.0.0.1:1", "http://a" },
		"--client-cert-file":   func(o *Options) { o.Extender.CertFile = "/a" },
		"--resources: \"gpu\"": func(o *Options) { o.Extender.Resources = []string{"gpu"} },
		"--replace-image":      func(o *Options) { o.Extender.Image = "divvy-scheduler-MINOR" },
		"--replace-flag":       func(o *Options) { o.Extender.Args = []string{"--policy=spread"} },
		"--listen":             func(o *Options) { o.Listen = "9402" },
		"--log-level":          func(o *Options) { o.Log.Level = "loud" },
		"--resync":             func(o *Options) { o.Resync = -1 },
		"--extender-timeout":   func(o *Options) { o.Extender.Timeout = 0 },
	} {
		o := DefaultOptions()
		change(&o)
		if err := o.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the error is %v, want %q", err, want)
		}
	}
	o := DefaultOptions()
	if err := o.Validate(); err != nil {
		t.Errorf("the defaults: %v", err)
	}
}

// TestCommands: what each subcommand takes, and where a machine is no node.
func TestCommands(t *testing.T) {
	for name, flag := range map[string]string{"install": "extender-url", "uninstall": "stay", "status": "extender-service",
		"plan": "uninstall", "watch": "resync"} {
		cmd, _, err := Command().Find([]string{name})
		if err != nil || cmd.Name() != name || cmd.Flags().Lookup(flag) == nil || cmd.Flags().Lookup("manifest") == nil {
			t.Errorf("%s is %v, %v", name, cmd.Name(), err)
		}
	}
	dir := t.TempDir()
	was := kubeconfigs
	t.Cleanup(func() { kubeconfigs = was })
	kubeconfigs = []string{filepath.Join(dir, "admin.conf")} // this machine may be a node
	kubeconfig := filepath.Join(dir, "config")
	text := "apiVersion: v1\nkind: Config\ncurrent-context: a\ncontexts: [{name: a, context: {cluster: a, user: a}}]\nclusters: [{name: " +
		"a, cluster: {server: 'http://127.0.0.1:1'}}]\nusers: [{name: a}]\n"
	if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for want, args := range map[string][]string{
		"no kube-scheduler on this node": {"plan", "--extender-url", "http://127.0.0.1:1/x", "--kubeconfig", kubeconfig,
			"--resources", "a.b/c", "--manifest", filepath.Join(dir, "m", "none.yaml"), "--kubernetes-dir", dir},
		"--extender-url":   {"install", "--extender-url", "garbage"},
		"set --kubeconfig": {"status", "--manifest", "/none/x"},
		"unknown flag":     {"uninstall", "--extender-url", "http://a"},
	} {
		cmd := Command()
		var out bytes.Buffer
		cmd.SetOut(&out)
		cmd.SetErr(&out)
		cmd.SetArgs(args)
		if err := cmd.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: the error is %v, want %q", args, err, want)
		}
	}
}
