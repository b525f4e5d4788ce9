package flags

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/platform/logging"
)

// Options are the flags of a subcommand.
type Options interface {
	AddFlags(*pflag.FlagSet)
	// Validate reports all mistakes at once.
	Validate() error
}

// Program completes a subcommand that runs with the options, and with a logger as log says. Each
// flag can be given as an environment variable; theirs are as in FromEnvironment.
func Program(cmd *cobra.Command, o Options, log *Log, theirs map[string]string,
	run func(ctx context.Context, out io.Writer) error) *cobra.Command {
	cmd.Args = cobra.NoArgs
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := errors.Join(FromEnvironment(cmd.Flags(), os.LookupEnv, theirs), o.Validate()); err != nil {
			return err
		}
		options, err := log.Options()
		if err != nil {
			return err
		}
		logger, closeLog := logging.Setup(options)
		defer closeLog() //nolint:errcheck // lines are written one by one, nothing is lost
		return run(klog.NewContext(cmd.Context(), logger), cmd.OutOrStdout())
	}
	o.AddFlags(cmd.Flags())
	return cmd
}

// EnvironmentHelp ends the description of a program whose flags can be given as variables.
const EnvironmentHelp = "\n\nEvery flag can be given as an environment variable: --log-level as " + EnvPrefix + "LOG_LEVEL.\n" +
	"Flags take precedence over variables, variables over defaults."

// Server are the flags of a program that answers requests in the cluster.
type Server struct {
	// Listen and MetricsListen are host:port; the host may be empty. An empty
	// MetricsListen serves no metrics.
	Listen, MetricsListen string
	// Kubeconfig is a file, "" for the pod's service account.
	Kubeconfig string
	// ShutdownDelay is how long requests are still answered after SIGTERM.
	ShutdownDelay time.Duration

	Log Log
}

// AddFlags adds the flags; the help of --listen and --shutdown-delay says what is served.
func (s *Server) AddFlags(fs *pflag.FlagSet, listen, shutdownDelay string) {
	fs.StringVar(&s.Listen, "listen", s.Listen, listen)
	fs.StringVar(&s.MetricsListen, "metrics-listen", s.MetricsListen, "address to serve Prometheus metrics on; empty to disable")
	AddKubeconfig(fs, &s.Kubeconfig)
	fs.DurationVar(&s.ShutdownDelay, "shutdown-delay", s.ShutdownDelay, shutdownDelay)
	s.Log.AddFlags(fs)
}

// Validate reports all mistakes at once.
func (s *Server) Validate() error {
	var metrics, delay error
	if s.MetricsListen != "" {
		if metrics = CheckAddress(s.MetricsListen); s.MetricsListen == s.Listen {
			metrics = errors.Join(metrics, fmt.Errorf("%s is the address of --listen", s.MetricsListen))
		}
	}
	if s.ShutdownDelay < 0 {
		delay = fmt.Errorf("%s: must not be negative", s.ShutdownDelay)
	}
	_, log := s.Log.Options()
	return errors.Join(Mistake("listen", CheckAddress(s.Listen)), Mistake("metrics-listen", metrics), Mistake("shutdown-delay", delay), log)
}

// AddKubeconfig adds --kubeconfig of a program that runs in a pod.
func AddKubeconfig(fs *pflag.FlagSet, file *string) {
	fs.StringVar(file, "kubeconfig", *file, "kubeconfig file; the pod's service account if empty")
}
