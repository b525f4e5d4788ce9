package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/divvy-gpu/divvy/internal/app/flags"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/deviceplugin"
	"github.com/divvy-gpu/divvy/internal/platform/limit"
	"github.com/divvy-gpu/divvy/internal/platform/logging"
	"github.com/divvy-gpu/divvy/internal/platform/metrics"
	"github.com/divvy-gpu/divvy/internal/platform/version"
	"github.com/divvy-gpu/divvy/internal/pool"
)

// Bounds of poolOptions.
const (
	// maxPoolUnits is 1000 whole GPUs on one node. Kubelet accepts a list of
	// twice the length at most.
	maxPoolUnits = 1000 * pool.UnitsPerGPU
	// maxSocketPath is what a socket's address holds, see unix(7).
	maxSocketPath = 107
	// asideLength is what the name of a socket grows by when kubelet has refused
	// the name before; see package deviceplugin.
	asideLength = len("~99.sock")
)

// poolVariables are the variables of the original's DaemonSet, by flag.
var poolVariables = map[string]string{"resource": "RESOURCE_NAME", "units": "RESOURCE_NUMS", "socket": "SOCKET_NAME"}

// poolOptions are the flags of "divvy-node pool".
type poolOptions struct {
	// Resource is the extended resource that is offered, in Units.
	Resource string
	Units    int
	// Socket is the file name of the plugin's socket, in the folder
	// device-plugins below KubeletDir.
	Socket, KubeletDir string
	// Listen is the address of probes and metrics.
	Listen string
	Log    flags.Log
}

func defaultPoolOptions() poolOptions {
	return poolOptions{
		Resource: pool.Resource, Units: 10 * pool.UnitsPerGPU, Socket: "bitfusion.io",
		KubeletDir: "/var/lib/kubelet", Listen: ":9402", Log: flags.DefaultLog(),
	}
}

func (o *poolOptions) addFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.Resource, "resource", o.Resource, "extended resource to offer (also environment RESOURCE_NAME)")
	fs.IntVar(&o.Units, "units", o.Units, fmt.Sprintf("number of units that this node offers, %d per GPU (also environment RESOURCE_NUMS)",
		pool.UnitsPerGPU))
	fs.StringVar(&o.Socket, "socket", o.Socket, "file name of the socket (also environment SOCKET_NAME)")
	fs.StringVar(&o.KubeletDir, "kubelet-dir", o.KubeletDir, "kubelet's root folder; only its subfolder device-plugins is used")
	fs.StringVar(&o.Listen, "listen", o.Listen, "address to serve probes and metrics on")
	o.Log.AddFlags(fs)
}

// validate reports all mistakes at once, and returns what the flags of the log
// stand for.
func (o poolOptions) validate() (logging.Options, error) {
	var units error
	if o.Units < 1 || o.Units > maxPoolUnits {
		units = fmt.Errorf("%d: must be from 1 to %d; %d are one GPU", o.Units, maxPoolUnits, pool.UnitsPerGPU)
	}
	var folder error
	if !filepath.IsAbs(o.KubeletDir) {
		folder = fmt.Errorf("%q: must be an absolute path", o.KubeletDir)
	}
	log, err := o.Log.Options()
	return log, errors.Join(
		flags.Mistake("resource", flags.CheckResource(o.Resource)),
		flags.Mistake("units", units),
		flags.Mistake("socket", o.checkSocket()),
		flags.Mistake("kubelet-dir", folder),
		flags.Mistake("listen", flags.CheckAddress(o.Listen)),
		err,
	)
}

// checkSocket says what is wrong with the name of the socket. What has the name
// is removed, so it must never be that of one of kubelet's own files.
func (o poolOptions) checkSocket() error {
	switch name := o.Socket; {
	case name == "" || strings.HasPrefix(name, ".") || name != filepath.Base(name):
		return fmt.Errorf("%q: must be the name of a file, without a folder", name)
	case strings.HasPrefix(name, "kubelet") || name == "DEPRECATION":
		return fmt.Errorf("%q: the names that begin with \"kubelet\", and DEPRECATION, are kubelet's own", name)
	}
	if path := o.folder() + "/" + o.Socket; len(path)+asideLength > maxSocketPath {
		return fmt.Errorf("%s: the path has %d bytes and may have %d", path, len(path), maxSocketPath-asideLength)
	}
	return nil
}

// folder is kubelet's device-plugins folder.
func (o poolOptions) folder() string { return filepath.Join(o.KubeletDir, "device-plugins") }

func poolCommand() *cobra.Command {
	o := defaultPoolOptions()
	cmd := &cobra.Command{
		Use:   "pool",
		Short: "Offer units of GPUs in a remote pool",
		Long: "Offer units of GPUs in a remote pool. Any node can offer them, with or without local devices. They only count for\n" +
			"kubelet and kube-scheduler; the pool's client in the pods connects to the GPUs.\n\n" +
			"Every flag can be given as an environment variable: --log-level as " + flags.EnvPrefix + "LOG_LEVEL. Flags take precedence\n" +
			"over variables, variables over defaults.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := flags.FromEnvironment(cmd.Flags(), os.LookupEnv, poolVariables); err != nil {
				return usageError(err)
			}
			return runPool(cmd.Context(), o)
		},
	}
	o.addFlags(cmd.Flags())
	return cmd
}

// runPool offers the units until ctx ends. It returns when all that it started
// has ended.
func runPool(ctx context.Context, o poolOptions) error {
	options, err := o.validate()
	if err != nil {
		return usageError(err)
	}
	log, closeLog := logging.Setup(options)
	defer closeLog() //nolint:errcheck // lines are written one by one, nothing is lost
	ctx = klog.NewContext(ctx, log)
	log.Info("Starting", "version", version.String("divvy-node pool"), "resource", o.Resource, "units", o.Units)
	if _, ok := os.LookupEnv("INTERVAL"); ok {
		log.Info("The variable INTERVAL has no effect: the units are sent to kubelet once, when it connects")
	}
	p, err := newPoolPlugin(o)
	if err != nil {
		return err
	}
	return p.run(ctx)
}

// poolPlugin is the parts, put together.
type poolPlugin struct {
	options  poolOptions
	server   *deviceplugin.Server
	limits   *limit.Limiter
	registry *prometheus.Registry
}

func newPoolPlugin(o poolOptions) (*poolPlugin, error) {
	p := &poolPlugin{options: o, limits: limit.New(limit.Config{}), registry: metrics.Registry(metrics.PoolNode, nil)}
	units := poolUnits{count: o.Units}
	p.server = deviceplugin.NewServer(o.folder(), o.Socket, accel.Resource(o.Resource), units)
	if err := p.server.SetUnits(units.list()); err != nil {
		return nil, err
	}
	p.registry.MustRegister(
		p.limits,
		metrics.PoolUnits.NewGaugeFunc(nil, func() float64 { return float64(o.Units) }),
		metrics.PoolRegistrations.NewCounterFunc(nil, func() float64 { return float64(p.server.Registrations()) }),
		metrics.PoolRegistered.NewGaugeFunc(nil, func() float64 { return metrics.Bool(p.server.Ready() == nil) }),
	)
	return p, nil
}

// run serves kubelet, probes and metrics until ctx ends or one of them fails.
func (p *poolPlugin) run(ctx context.Context) error {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	serve, stop, err := listen(ctx, p.options.Listen, p.limits, p)
	if err != nil {
		return err
	}
	var work sync.WaitGroup
	work.Go(func() {
		if err := serve(); err != nil {
			fail(err)
		}
	})
	work.Go(func() {
		if err := p.server.Run(ctx); err != nil {
			fail(err)
		}
	})
	<-ctx.Done()
	klog.FromContext(ctx).Info("Stopping", "cause", context.Cause(ctx).Error())
	stop()
	work.Wait()
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
		return cause
	}
	return nil
}

// Ready returns nil while kubelet knows the units.
func (p *poolPlugin) Ready() error { return p.server.Ready() }

// Alive returns an error when the plugin does not answer kubelet.
func (p *poolPlugin) Alive(ctx context.Context) error { return p.server.Alive(ctx) }

func (p *poolPlugin) gatherer() prometheus.Gatherer { return p.registry }

// poolUnits are the units "0", "1" and so on. No unit is better than another, and
// a container needs nothing for having one: the mutating webhook has put the
// client into its pod.
type poolUnits struct{ count int }

// list returns the units as kubelet is told of them.
func (u poolUnits) list() []deviceplugin.Unit {
	out := make([]deviceplugin.Unit, u.count)
	for i := range out {
		out[i].ID = strconv.Itoa(i)
	}
	return out
}

// set returns the ids as a set, or an error when one of them is no unit or comes
// twice.
func (u poolUnits) set(ids []string) (map[string]bool, error) {
	out := make(map[string]bool, len(ids))
	for _, id := range ids {
		n, err := strconv.Atoi(id)
		if err != nil || n < 0 || n >= u.count || id != strconv.Itoa(n) {
			return nil, fmt.Errorf("%q is none of the units 0 to %d", id, u.count-1)
		}
		if out[id] {
			return nil, fmt.Errorf("unit %q is named twice", id)
		}
		out[id] = true
	}
	return out, nil
}

// Prefer implements deviceplugin.Allocator.
func (u poolUnits) Prefer(_ context.Context, available, must []string, size int) ([]string, error) {
	taken, err := u.set(must)
	if err != nil {
		return nil, err
	}
	if _, err := u.set(available); err != nil {
		return nil, err
	}
	out := slices.Clone(must)
	for _, id := range available {
		if len(out) >= size {
			break
		}
		if !taken[id] {
			out = append(out, id)
		}
	}
	if len(out) != size {
		return nil, fmt.Errorf("%d units are asked for, %d must be among them, and %d are free", size, len(must), len(available))
	}
	return out, nil
}

// Allocate implements deviceplugin.Allocator.
func (u poolUnits) Allocate(_ context.Context, ids []string) (*pluginapi.ContainerAllocateResponse, error) {
	if _, err := u.set(ids); err != nil {
		return nil, err
	}
	return &pluginapi.ContainerAllocateResponse{}, nil
}
