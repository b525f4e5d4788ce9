package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/divvy-gpu/divvy/internal/app/flags"
	"github.com/divvy-gpu/divvy/internal/limit"
)

// cleanAgain is how long uninstall waits after an attempt that failed.
const cleanAgain = 2 * time.Second

// uninstallOptions are the flags of "divvy-node uninstall".
type uninstallOptions struct {
	leftovers
	// Listen is the address of the probes; "" for a program that cleans once and
	// ends.
	Listen string
	// LockTimeout is how long one attempt waits for the daemon to end.
	LockTimeout time.Duration
}

func defaultUninstallOptions() uninstallOptions {
	return uninstallOptions{
		leftovers: leftovers{
			Host: "/", KubeletDir: "/var/lib/kubelet", StateDir: "/var/lib/divvy", CDIDir: "/var/run/cdi",
			LogDirs: []string{"/var/log/topscloud/gcushare"}, PoolSocket: "bitfusion.io",
		},
		LockTimeout: 2 * time.Minute,
	}
}

func (o *uninstallOptions) addFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.Host, "host", o.Host, "where the host's root folder is mounted; the folders below are named as on the host")
	fs.StringVar(&o.KubeletDir, "kubelet-dir", o.KubeletDir, "kubelet's folder, whose device-plugins has the sockets; empty: sockets are left alone")
	fs.StringVar(&o.StateDir, "state-dir", o.StateDir, "the daemon's folder for what survives a restart; empty: it is left alone")
	fs.StringVar(&o.CDIDir, "cdi-dir", o.CDIDir, "folder of CDI specifications; empty: they are left alone")
	fs.StringSliceVar(&o.Resources, "resources", o.Resources, "resources whose sockets are the daemon's, besides those of which there is a state file")
	fs.StringVar(&o.PoolSocket, "pool-socket", o.PoolSocket, "name of the socket of \"divvy-node pool\"; empty for none")
	fs.StringSliceVar(&o.Shared, "shared-dirs", o.Shared, "more folders that kubelet made for the daemon's pods, inner ones first; each goes if it is empty and not older than "+
		"the state folder")
	fs.StringSliceVar(&o.LogDirs, "log-dirs", o.LogDirs, "folders of log files")
	fs.BoolVar(&o.RemoveLogs, "remove-logs", o.RemoveLogs, "remove Divvy's log files too, of all its programs")
	fs.StringVar(&o.Listen, "listen", o.Listen, "address to serve /healthz and /readyz on, such as :9404; the program then stays until it is told to end. Empty: it ends when "+
		"all is done")
	fs.DurationVar(&o.LockTimeout, "lock-timeout", o.LockTimeout, "how long to wait for a daemon that still runs")
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
		errs = append(errs, flags.Mistake("pool-socket", poolOptions{Socket: o.PoolSocket, KubeletDir: "/"}.checkSocket()))
	}
	if o.Listen != "" {
		errs = append(errs, flags.Mistake("listen", flags.CheckAddress(o.Listen)))
	}
	if o.LockTimeout < 0 {
		errs = append(errs, flags.Mistake("lock-timeout", fmt.Errorf("%v is negative", o.LockTimeout)))
	}
	return errors.Join(errs...)
}

// checkFolder says what is wrong with the path of a folder.
func checkFolder(path string) error {
	if !filepath.IsAbs(path) {
		return fmt.Errorf("%q: must be an absolute path", path)
	}
	return nil
}

func uninstallCommand() *cobra.Command {
	o := defaultUninstallOptions()
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Removes what divvy-node left on this host",
		Long: "Removes what divvy-node left on this host once it has ended: its sockets in kubelet's folder, its state, the CDI\n" +
			"specifications that it wrote, and the folders that are empty then. Containers that run are left alone. Every file that is\n" +
			"removed is printed, and so is what might have been ours and is left, with the reason. Again, it does nothing.\n\n" +
			"The chart runs it on every node while Divvy is uninstalled. By hand, on a host that was away then, it takes the same\n" +
			"flags; the defaults are those of the chart.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.validate(); err != nil {
				return usageError(err)
			}
			return runUninstall(cmd.Context(), o, cmd.OutOrStdout())
		},
	}
	o.addFlags(cmd.Flags())
	return cmd
}

// runUninstall cleans, until that succeeds when it is to stay.
func runUninstall(ctx context.Context, o uninstallOptions, out io.Writer) error {
	attempt := func() error {
		ctx, cancel := context.WithTimeout(ctx, o.LockTimeout)
		defer cancel()
		return o.clean(ctx, out)
	}
	if o.Listen == "" {
		return attempt()
	}
	p := &uninstalling{}
	p.set(errors.New("the host is not clean yet"))
	serve, stop, err := listen(ctx, o.Listen, limit.New(limit.Config{}), p)
	if err != nil {
		return err
	}
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	var work sync.WaitGroup
	work.Go(func() {
		if err := serve(); err != nil {
			fail(err)
		}
	})
	for ctx.Err() == nil {
		err := attempt()
		p.set(err)
		if err == nil {
			fmt.Fprintln(out, "done: nothing of divvy-node is left on this host")
			break
		}
		if ctx.Err() == nil {
			fmt.Fprintf(out, "not done: %s; trying again\n", strings.ReplaceAll(err.Error(), "\n", "; "))
		}
		select {
		case <-ctx.Done():
		case <-time.After(cleanAgain):
		}
	}
	<-ctx.Done()
	stop()
	work.Wait()
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
		return cause
	}
	return nil
}

// uninstalling is what the probes are told. It is safe for concurrent use.
type uninstalling struct{ last atomic.Pointer[error] }

func (u *uninstalling) set(err error) { u.last.Store(&err) }

// Ready returns nil once the host is clean.
func (u *uninstalling) Ready() error { return *u.last.Load() }

// Alive returns nil: every wait of the program has a limit.
func (u *uninstalling) Alive(context.Context) error { return nil }

func (u *uninstalling) gatherer() prometheus.Gatherer { return prometheus.NewRegistry() }
