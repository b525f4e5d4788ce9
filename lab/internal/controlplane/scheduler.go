package controlplane

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/internal/install/schedconf"
	labscheduler "github.com/divvy-gpu/divvy/lab/internal/scheduler"
)

// SchedulerOptions are the settings of a kube-scheduler.
type SchedulerOptions struct {
	// Name is that of the process, of its files, and of the scheduler that pods ask
	// for; "default-scheduler" is the one that pods get which ask for none.
	Name string
	// Extender is Divvy's; nil for none. The configuration has it as Divvy's own
	// "schedconf" writes it.
	Extender *schedconf.Extender
	// Kubeconfig says how it reaches the API server; "" for an account of its own.
	Kubeconfig string
	// QPS is how many requests it may send to the API server in a second, with twice
	// as many at once; 0 for kube-scheduler's own 50.
	QPS int
	// Settings are further fields of the configuration, such as
	// percentageOfNodesToScore.
	Settings map[string]any
	// Args are further flags.
	Args []string

	plugin bool // its profiles have Divvy's plugin
}

// Scheduler is a kube-scheduler that runs.
type Scheduler struct {
	*Process
	address string // URL
	client  *http.Client
}

// configPath is where a node would have the configuration.
const configPath = "/etc/kubernetes/scheduler-config.yaml"

// StartScheduler starts a kube-scheduler and waits until it has read the cluster.
// Its version is only what the configuration is checked for.
func (c *ControlPlane) StartScheduler(ctx context.Context, version string, o SchedulerOptions) (*Scheduler, error) {
	path, err := c.own("kube-scheduler")
	if err != nil {
		return nil, err
	}
	s, err := c.startScheduler(o, version, func(config string, flags []string) (*Process, error) {
		return StartProcess(o.Name, path, c.path(o.Name+".log"), nil, append([]string{"--config=" + config}, flags...)...)
	})
	if err != nil {
		return nil, err
	}
	err = c.await(ctx, s.Process, func(ctx context.Context) error {
		_, err := get(ctx, s.client, s.address+"/readyz")
		return err
	})
	if err != nil {
		return nil, errors.Join(err, s.Stop(stopGrace))
	}
	return s, nil
}

// startScheduler calls start with the path of a configuration and with flags.
func (c *ControlPlane) startScheduler(o SchedulerOptions, version string, start func(config string, flags []string) (*Process, error)) (
	*Scheduler, error) {
	kubeconfig := o.Kubeconfig
	if kubeconfig == "" {
		var err error
		if kubeconfig, err = c.KubeconfigFor(o.Name, "system:kube-scheduler"); err != nil {
			return nil, err
		}
	}
	config, err := o.configuration(kubeconfig, version)
	if err != nil {
		return nil, err
	}
	file := c.path(o.Name + ".yaml")
	if err := os.WriteFile(file, config, 0o600); err != nil {
		return nil, fmt.Errorf("write the configuration of %s: %w", o.Name, err)
	}
	ports, err := FreePorts(1)
	if err != nil {
		return nil, err
	}
	process, err := start(file, append([]string{
		"--bind-address=" + loopback,
		fmt.Sprintf("--secure-port=%d", ports[0]),
		"--cert-dir=" + c.path(o.Name+"-certs"),
		// Its metrics are read by this program, from this machine.
		"--authorization-always-allow-paths=/healthz,/readyz,/livez,/metrics",
	}, o.Args...))
	if err != nil {
		return nil, err
	}
	return &Scheduler{Process: process, address: fmt.Sprintf("https://%s:%d", loopback, ports[0]), client: &http.Client{
		Transport: &http.Transport{
			TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // it signs its own certificate; nothing secret is said
		},
	}}, nil
}

// Metrics returns the scheduler's metrics in Prometheus' text format.
func (s *Scheduler) Metrics(ctx context.Context) (string, error) {
	return get(ctx, s.client, s.address+"/metrics")
}

func (o SchedulerOptions) configuration(kubeconfig, version string) ([]byte, error) {
	connection := map[string]any{"kubeconfig": kubeconfig}
	if o.QPS > 0 {
		connection["qps"], connection["burst"] = o.QPS, 2*o.QPS
	}
	config := map[string]any{
		"apiVersion":       "kubescheduler.config.k8s.io/v1",
		"kind":             "KubeSchedulerConfiguration",
		"clientConnection": connection,
		"leaderElection":   map[string]any{"leaderElect": false},
		"profiles":         []any{map[string]any{"schedulerName": o.Name}},
	}
	for key, value := range o.Settings {
		config[key] = value
	}
	base, err := yaml.Marshal(config)
	if err != nil {
		return nil, fmt.Errorf("configuration of %s: %w", o.Name, err)
	}
	switch {
	case o.plugin:
		return plugged(base)
	case o.Extender != nil:
		return wired(base, version, *o.Extender)
	}
	return base, nil
}

// wired returns the configuration as Divvy changes it on a node where kube-scheduler
// runs with this one.
func wired(base []byte, version string, extender schedconf.Extender) ([]byte, error) {
	manifest, err := labscheduler.Manifest("registry.k8s.io/kube-scheduler:" + version)
	if err != nil {
		return nil, err
	}
	const kubeconfigFlag = "- --kubeconfig=" + labscheduler.Kubeconfig
	text := string(manifest)
	if strings.Count(text, kubeconfigFlag) != 1 {
		return nil, fmt.Errorf("the manifest of the lab's kube-scheduler has no single line %q", kubeconfigFlag)
	}
	text = strings.Replace(text, kubeconfigFlag, "- --config="+configPath, 1)
	for _, edit := range [][2]string{
		{"volumeMounts:\n", "volumeMounts:\n    - mountPath: " + configPath + "\n      name: config\n      readOnly: true\n"},
		{"volumes:\n", "volumes:\n  - hostPath:\n      path: " + configPath + "\n      type: File\n    name: config\n"},
	} {
		if strings.Count(text, edit[0]) != 1 {
			return nil, fmt.Errorf("the manifest of the lab's kube-scheduler has no single %q", edit[0])
		}
		text = strings.Replace(text, edit[0], edit[1], 1)
	}
	change, err := schedconf.Wire(schedconf.Input{
		Manifest: []byte(text), ManifestPath: filepath.Join("/etc/kubernetes/manifests", labscheduler.ManifestFile), Version: version,
		ReadFile: func(path string) ([]byte, error) {
			if path == configPath {
				return base, nil
			}
			return nil, fmt.Errorf("%s: %w", path, fs.ErrNotExist)
		},
	}, extender)
	if err != nil {
		return nil, fmt.Errorf("wire kube-scheduler to the extender: %w", err)
	}
	if len(change.Files) != 1 {
		return nil, fmt.Errorf("wiring kube-scheduler writes %d files, where one was expected", len(change.Files))
	}
	return change.Files[0].Content, nil
}
