package controlplane

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"sigs.k8s.io/yaml"

	divvy "github.com/divvy-gpu/divvy/internal/app/scheduler"
	"github.com/divvy-gpu/divvy/lab/internal/build"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
)

// PluginLease is for how long a divvy-scheduler may lead without renewing its Lease.
const PluginLease = 3 * time.Second

// BuildPlugin builds a divvy-scheduler of this checkout into dir, and returns its path: that of a
// module in its folder of scheduler/ for a version of Kubernetes, or with two empty strings the
// newest one for the lab's. It is compiled as the lab's kube-scheduler is.
func BuildPlugin(ctx context.Context, dir, module, kubernetes string) (string, error) {
	lab, err := layout.LabDir()
	if err != nil {
		return "", err
	}
	versions, err := build.ReadVersions(build.ModuleDir(lab))
	if err != nil {
		return "", err
	}
	components := build.Components()
	i := slices.IndexFunc(components, func(c build.Component) bool { return c.Name == "kube-scheduler" })
	if i < 0 {
		return "", errors.New("build divvy-scheduler: the lab has no kube-scheduler")
	}
	if kubernetes != "" {
		versions[components[i].Module] = kubernetes
	}
	flags, err := components[i].LinkerFlags(versions)
	if err != nil {
		return "", err
	}
	program := filepath.Join(dir, "divvy-scheduler")
	if module != "" {
		program += "-" + filepath.Base(module)
	}
	if err := build.RunGo(ctx, filepath.Join(filepath.Dir(lab), "scheduler", module), []string{"CGO_ENABLED=0"}, nil,
		"build", "-buildvcs=false", "-trimpath", "-ldflags", flags, "-o", program, "."); err != nil {
		return "", fmt.Errorf("build divvy-scheduler: %w", err)
	}
	return program, nil
}

// PluginOptions say how a divvy-scheduler is started.
type PluginOptions struct {
	// Scheduler are the settings of the kube-scheduler in it, without an extender. Its Args are
	// kube-scheduler's, behind "--", and a Kubeconfig is for Divvy too.
	Scheduler SchedulerOptions
	// Program is the path of divvy-scheduler.
	Program string
	// Resources are those that it manages.
	Resources []string
	// Pod is the name of its pod, for which it takes part in an election; "" for none.
	Pod string
	// Args are flags of Divvy's.
	Args []string
}

// Plugin is a divvy-scheduler that runs.
type Plugin struct {
	// Scheduler is its process. Its metrics are kube-scheduler's, and there while it leads.
	Scheduler
	divvy endpoint
}

// StartPlugin starts a divvy-scheduler and waits until it answers, which it does before it has read
// the cluster. kube-scheduler's requests are sent by an account of its own, as StartScheduler has it,
// and Divvy's with an administrator's rights, as StartExtender has it.
func (c *ControlPlane) StartPlugin(ctx context.Context, o PluginOptions) (*Plugin, error) {
	if err := c.Prepare(ctx); err != nil {
		return nil, err
	}
	key, err := c.GrantKey()
	if err != nil {
		return nil, err
	}
	ports, err := FreePorts(2)
	if err != nil {
		return nil, err
	}
	address := func(i int) string { return fmt.Sprintf("%s:%d", loopback, ports[i]) }
	args := []string{
		"--kubeconfig=" + cmp.Or(o.Scheduler.Kubeconfig, c.Kubeconfig()), "--grant-key-file=" + key,
		"--resources=" + strings.Join(o.Resources, ","), "--listen=" + address(0), "--metrics-listen=" + address(1), "--tls-listen=",
	}
	var env []string
	if o.Pod != "" {
		args = append(args, "--leader-elect", "--leader-elect-name=divvy-scheduler", "--leader-elect-namespace="+Namespace,
			"--leader-elect-duration="+PluginLease.String())
		env = []string{"POD_NAME=" + o.Pod}
	}
	o.Scheduler.plugin = true
	scheduler, err := c.startScheduler(o.Scheduler, "", func(config string, flags []string) (*Process, error) {
		args := slices.Concat(args, []string{"--scheduler-config=" + config}, o.Args, []string{"--"}, flags)
		return StartProcess(o.Scheduler.Name, o.Program, c.path(o.Scheduler.Name+".log"), env, args...)
	})
	if err != nil {
		return nil, err
	}
	p := &Plugin{Scheduler: *scheduler, divvy: endpoint{url: "http://" + address(0), metrics: "http://" + address(1) + "/metrics"}}
	if err := c.await(ctx, p.Process, func(ctx context.Context) error { _, err := p.Leads(ctx); return err }); err != nil {
		return nil, errors.Join(fmt.Errorf("start divvy-scheduler: %w", err), p.Stop(stopGrace))
	}
	return p, nil
}

// URL is where it answers for Divvy.
func (p *Plugin) URL() string { return p.divvy.url }

// Leads reports whether it is the replica that leads.
func (p *Plugin) Leads(ctx context.Context) (bool, error) { return p.divvy.Leads(ctx) }

// DivvyMetrics returns Divvy's metrics in Prometheus' text format.
func (p *Plugin) DivvyMetrics(ctx context.Context) (string, error) {
	return get(ctx, http.DefaultClient, p.divvy.metrics)
}

// plugged returns a configuration of kube-scheduler whose profiles have the plugin, as the example
// has it, and what else they have.
func plugged(base []byte) ([]byte, error) {
	type profiled struct {
		Profiles []map[string]any `json:"profiles"`
	}
	var example, has profiled
	config := map[string]any{}
	if err := errors.Join(yaml.Unmarshal([]byte(divvy.Example), &example), yaml.Unmarshal(base, &has),
		yaml.Unmarshal(base, &config)); err != nil {
		return nil, fmt.Errorf("enable the plugin: %w", err)
	}
	for _, profile := range has.Profiles {
		plugins, _ := profile["plugins"].(map[string]any)
		if plugins == nil {
			plugins = map[string]any{}
		}
		maps.Copy(plugins, example.Profiles[0]["plugins"].(map[string]any))
		profile["plugins"] = plugins
	}
	config["profiles"] = has.Profiles
	out, err := yaml.Marshal(config)
	if err != nil {
		return nil, fmt.Errorf("enable the plugin: %w", err)
	}
	return out, nil
}
