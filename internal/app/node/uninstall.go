package node

import (
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/divvy-gpu/divvy/internal/app/flags"
	"github.com/divvy-gpu/divvy/internal/node/cleanup"
)

type uninstallOptions struct{ cleanup.Options }

func (o *uninstallOptions) addFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.Host, "host", o.Host, "mount point of the host's root folder; the other folders are paths on the host")
	fs.StringVar(&o.KubeletDir, "kubelet-dir", o.KubeletDir,
		"kubelet's root folder, with the sockets in device-plugins; empty to keep the sockets")
	fs.StringVar(&o.StateDir, "state-dir", o.StateDir, "divvy-node's state folder; empty to keep it")
	fs.StringVar(&o.CDIDir, "cdi-dir", o.CDIDir, "folder of CDI specifications; empty to keep them")
	fs.StringSliceVar(&o.Resources, "resources", o.Resources,
		"resources whose sockets belong to divvy-node, in addition to those with a state file")
	fs.StringVar(&o.PoolSocket, "pool-socket", o.PoolSocket, "socket name of \"divvy-node pool\"; empty for none")
	fs.StringSliceVar(&o.Shared, "shared-dirs", o.Shared,
		"more folders that kubelet created for divvy-node, inner folders first; each is removed if it is empty and not older than "+
			"the state folder")
	fs.StringSliceVar(&o.LogDirs, "log-dirs", o.LogDirs, "folders of log files")
	fs.BoolVar(&o.RemoveLogs, "remove-logs", o.RemoveLogs, "also remove the log files of all Divvy programs")
	fs.StringVar(&o.Listen, "listen", o.Listen, "address to serve /healthz and /readyz on, such as :9404; the program then runs until it "+
		"receives SIGTERM. If empty, it exits when "+
		"done")
	fs.DurationVar(&o.LockTimeout, "lock-timeout", o.LockTimeout, "how long to wait for a running divvy-node to exit")
}

// validate reports all mistakes at once.
func (o uninstallOptions) validate() error {
	var errs []error
	for _, f := range []struct{ flag, path string }{
		{"host", o.Host}, {"kubelet-dir", o.KubeletDir}, {"state-dir", o.StateDir}, {"cdi-dir", o.CDIDir},
	} {
		if err := checkFolder(f.path); err != nil && (f.path != "" || f.flag == "host") {
			errs = append(errs, flags.Mistake(f.flag, err))
		}
	}
	for _, list := range []struct {
		flag  string
		paths []string
	}{{"shared-dirs", o.Shared}, {"log-dirs", o.LogDirs}} {
		for _, path := range list.paths {
			errs = append(errs, flags.Mistake(list.flag, checkFolder(path)))
		}
	}
	for _, r := range o.Resources {
		errs = append(errs, flags.Mistake("resources", flags.CheckResource(r)))
	}
	if o.PoolSocket != "" {
		errs = append(errs, flags.Mistake("pool-socket", checkSocket("/device-plugins", o.PoolSocket)))
	}
	if o.Listen != "" {
		errs = append(errs, flags.Mistake("listen", flags.CheckAddress(o.Listen)))
	}
	if o.LockTimeout < 0 {
		errs = append(errs, flags.Mistake("lock-timeout", fmt.Errorf("%v is negative", o.LockTimeout)))
	}
	return errors.Join(errs...)
}

func checkFolder(path string) error {
	if !filepath.IsAbs(path) {
		return fmt.Errorf("%q: must be an absolute path", path)
	}
	return nil
}

func uninstallCommand() *cobra.Command {
	o := uninstallOptions{cleanup.Options{Leftovers: cleanup.Default(), LockTimeout: 2 * time.Minute}}
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Remove what divvy-node left on this host",
		Long: "Remove what divvy-node left on this host after it exited: its sockets in kubelet's folder, its state, the CDI\n" +
			"specifications that it wrote, and folders that are then empty. Running containers are not affected. The command prints\n" +
			"each removed file, and each file that may be Divvy's but is kept, with the reason. A second run changes nothing.\n\n" +
			"The chart runs it on every node during \"helm uninstall\". For a host that was unavailable then, run it by hand with the\n" +
			"same flags; the defaults are those of the chart.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.validate(); err != nil {
				return usageError(err)
			}
			return cleanup.Run(cmd.Context(), o.Options, cmd.OutOrStdout())
		},
	}
	o.addFlags(cmd.Flags())
	return cmd
}
