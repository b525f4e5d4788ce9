package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/app/flags"
	"github.com/divvy-gpu/divvy/internal/node/poolplugin"
	"github.com/divvy-gpu/divvy/internal/platform/logging"
	"github.com/divvy-gpu/divvy/internal/platform/version"
	"github.com/divvy-gpu/divvy/internal/pool"
)

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

type poolOptions struct {
	poolplugin.Options

	Log flags.Log
}

func defaultPoolOptions() poolOptions {
	return poolOptions{
		Options: poolplugin.Options{
			Resource: pool.Resource, Units: 10 * pool.UnitsPerGPU, Socket: "bitfusion.io", KubeletDir: "/var/lib/kubelet", Listen: ":9402",
		},
		Log: flags.DefaultLog(),
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
		flags.Mistake("socket", checkSocket(o.Folder(), o.Socket)),
		flags.Mistake("kubelet-dir", folder),
		flags.Mistake("listen", flags.CheckAddress(o.Listen)),
		err,
	)
}

// checkSocket says what is wrong with the name of the socket. What has the name
// is removed, so it must never be that of one of kubelet's own files.
func checkSocket(folder, name string) error {
	switch {
	case name == "" || strings.HasPrefix(name, ".") || name != filepath.Base(name):
		return fmt.Errorf("%q: must be the name of a file, without a folder", name)
	case strings.HasPrefix(name, "kubelet") || name == "DEPRECATION":
		return fmt.Errorf("%q: the names that begin with \"kubelet\", and DEPRECATION, are kubelet's own", name)
	}
	if path := folder + "/" + name; len(path)+asideLength > maxSocketPath {
		return fmt.Errorf("%s: the path has %d bytes and may have %d", path, len(path), maxSocketPath-asideLength)
	}
	return nil
}

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
	return poolplugin.Run(ctx, o.Options)
}
