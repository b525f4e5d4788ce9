// Package schedconf is the program "divvy-control schedconf": it makes the
// kube-scheduler of a control-plane node ask Divvy's extender, and takes that
// back. What is changed is decided by package schedconf of internal, and done by
// package host below it; here are the flags, and where their input comes from.
package schedconf

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/app/flags"
	"github.com/divvy-gpu/divvy/internal/install/schedconf"
	"github.com/divvy-gpu/divvy/internal/install/schedconf/host"
	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/platform/logging"
)

// Command returns the subcommand with its own subcommands.
func Command() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "schedconf",
		Short: "Configure the kube-scheduler of a control-plane node to call the extender, or revert that",
		Long: "Configure the kube-scheduler of a control-plane node to call Divvy's extender, or revert that. Run it on the node, as " +
			"root:\n" +
			"it edits the static pod in /etc/kubernetes/manifests, and writes a configuration next to the existing one.\n\n" +
			"Every flag can be given as an environment variable: --log-level as " + flags.EnvPrefix + "LOG_LEVEL.\n" +
			"Flags take precedence over variables, variables over defaults.",
	}
	cmd.AddCommand(installCommand(), uninstallCommand(), statusCommand(), planCommand(), watchCommand())
	return cmd
}

// subcommand fills in what all have in common.
func subcommand(o *Options, use, short, long string, add func(*pflag.FlagSet), run func(context.Context, settings,
	io.Writer) error) *cobra.Command {
	cmd := &cobra.Command{
		Use:   use,
		Short: short,
		Long:  short + "." + long,
		Args:  cobra.NoArgs,
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			return errors.Join(flags.FromEnvironment(cmd.Flags(), os.LookupEnv, nil), o.Validate())
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := o.settings()
			if err != nil {
				return err
			}
			logger, closeLog := logging.Setup(s.logging)
			defer closeLog() //nolint:errcheck // lines are written one by one, nothing is lost
			return run(klog.NewContext(cmd.Context(), logger), s, cmd.OutOrStdout())
		},
	}
	o.addHostFlags(cmd.Flags())
	add(cmd.Flags())
	return cmd
}

// quiet are defaults for commands that answer a person.
func quiet() *Options {
	o := DefaultOptions()
	o.Log.Level = "warn"
	return &o
}

func installCommand() *cobra.Command {
	o := quiet()
	o.Log.Level = "info"
	return subcommand(o, "install", "Configure kube-scheduler on this node to call the extender", "\n\n"+
		"The command returns when kube-scheduler is healthy with the change. If it does not become healthy in time, the previous\n"+
		"state is restored and the command fails with the reason. A second run changes nothing.",
		func(fs *pflag.FlagSet) {
			o.addExtenderFlags(fs)
			o.Again = true
		}, install)
}

func uninstallCommand() *cobra.Command {
	o := quiet()
	o.Log.Level = "info"
	return subcommand(o, "uninstall", "Restore the original kube-scheduler on this node", "\n\n"+
		"The original manifest is restored byte for byte. If other parts of it were edited since, only Divvy's changes are removed.\n"+
		"Divvy's files are deleted once kube-scheduler runs without them.",
		func(fs *pflag.FlagSet) {
			o.addListenFlag(fs)
			fs.BoolVar(&o.Stay, "stay", o.Stay, "keep running and ready when done, so that no watch on this node reverts it")
		}, uninstall)
}

func statusCommand() *cobra.Command {
	o := quiet()
	return subcommand(o, "status", "Show whether kube-scheduler on this node calls the extender and is healthy",
		" The command fails if not.",
		func(fs *pflag.FlagSet) { o.addExtenderFlags(fs) }, status)
}

func planCommand() *cobra.Command {
	o := quiet()
	return subcommand(o, "plan", "Show what install would change, as a diff without keys", " Nothing is changed.",
		func(fs *pflag.FlagSet) {
			o.addExtenderFlags(fs)
			fs.BoolVar(&o.Uninstall, "uninstall", o.Uninstall, "show what uninstall would change")
		}, plan)
}

func watchCommand() *cobra.Command {
	o := DefaultOptions()
	o.Listen = "127.0.0.1:9402"
	return subcommand(&o, "watch", "Install, and repeat whenever something it depends on changes", "\n\n"+
		"It configures the scheduler again after kubeadm upgrade and after changes of the scheduler's own configuration, and\n"+
		"follows the extender's address and certificates. It is ready while kube-scheduler is configured and healthy.",
		func(fs *pflag.FlagSet) {
			o.addExtenderFlags(fs)
			o.addListenFlag(fs)
			fs.DurationVar(&o.Resync, "resync", o.Resync, "interval of checks when nothing is known to have changed")
		}, watch)
}

// open returns the node, which does not wait for others where the turn is nil.
func (s settings) open(clients kube.Clients, turn host.Turn) (*host.Host, error) {
	c := host.Config{
		Manifest: s.Manifest, Dir: s.Dir, Version: s.KubeVersion, Visible: s.HostPaths,
		Turn: turn,
		Scheduler: host.NewMirror(host.MirrorConfig{
			Client: clients.Kubernetes, Node: s.NodeName, Timeout: s.Timeout, Settle: s.Settle, LogDir: s.PodLogDir,
		}),
	}
	return host.New(c)
}

// reach returns clients of the API server, and the node for who was told to look at
// it or to change it now.
func (s settings) reach() (kube.Clients, *host.Host, error) {
	clients, err := connect(s.Kubeconfig)
	if err != nil {
		return clients, nil, err
	}
	h, err := s.open(clients, nil)
	return clients, h, err
}

// desired is what kube-scheduler of the node is to ask. Resources that are not given are
// those that it asks about.
func (s settings) desired(ctx context.Context, clients kube.Clients, h *host.Host) (schedconf.Extender, error) {
	st, err := h.Status()
	if err != nil {
		return schedconf.Extender{}, err
	}
	if len(s.Resources) == 0 {
		s.Resources = []string{defaultResource}
		if st.Extender != nil && len(st.Extender.Resources) > 0 {
			s.Resources = st.Extender.Resources
		}
	}
	if s.ExtenderProxy != "" {
		want, err := h.Want()
		if err != nil {
			return schedconf.Extender{}, err
		}
		if !want.HostNetwork {
			s.ExtenderProxy = "" // out of its reach
		}
	}
	return s.extender(ctx, clients.Kubernetes)
}

func install(ctx context.Context, s settings, out io.Writer) error {
	clients, h, err := s.reach()
	if err != nil {
		return err
	}
	e, err := s.withProxy(h).desired(ctx, clients, h)
	if err != nil {
		return err
	}
	r, err := h.Install(ctx, e, host.InstallOptions{Again: s.Again})
	printNotes(out, r.Notes)
	var rolledBack *host.RolledBackError
	if errors.As(err, &rolledBack) {
		tell(ctx, clients.Kubernetes, s.NodeName, events.SchedulerRolledBack, err.Error())
	}
	if err != nil {
		return err
	}
	if !r.Changed {
		fmt.Fprintf(out, "kube-scheduler on node %s already calls the extender at %s; nothing was changed.\n", s.NodeName, e.URL)
		return nil
	}
	tell(ctx, clients.Kubernetes, s.NodeName, events.SchedulerWired, wiredMessage(e))
	fmt.Fprintf(out, "kube-scheduler on node %s now calls the extender at %s and is healthy.\n", s.NodeName, e.URL)
	return nil
}

func wiredMessage(e schedconf.Extender) string {
	return fmt.Sprintf("kube-scheduler calls Divvy's extender at %s for %s", e.URL, strings.Join(e.Resources, ", "))
}

// watchEnds is how long an uninstall waits for a watch on this node: a little longer
// than the terminationGracePeriodSeconds of the DaemonSet's pods.
const watchEnds = 20 * time.Second

func uninstall(ctx context.Context, s settings, out io.Writer) error {
	clients, h, err := s.reach()
	if err != nil {
		return err
	}
	done := func(r host.Result) {
		printNotes(out, r.Notes)
		if !r.Changed {
			fmt.Fprintf(out, "kube-scheduler on node %s does not call the extender.\n", s.NodeName)
			return
		}
		tell(ctx, clients.Kubernetes, s.NodeName, events.SchedulerUnwired, "kube-scheduler runs with its original configuration")
		fmt.Fprintf(out, "kube-scheduler on node %s was restored and is healthy.\n", s.NodeName)
	}
	if s.Stay {
		return stay(ctx, s, h, done)
	}
	r, err := h.Uninstall(ctx, host.UninstallOptions{WatchEnds: watchEnds})
	if err != nil {
		return err
	}
	done(r)
	return nil
}

func plan(ctx context.Context, s settings, out io.Writer) error {
	clients, h, err := s.reach()
	if err != nil {
		return err
	}
	var e schedconf.Extender
	if !s.Uninstall {
		if e, err = s.withProxy(h).desired(ctx, clients, h); err != nil {
			return err
		}
	}
	diff, notes, err := h.Plan(e, s.Uninstall)
	if err != nil {
		return err
	}
	printNotes(out, notes)
	if diff == "" {
		fmt.Fprintln(out, "No changes are needed.")
		return nil
	}
	fmt.Fprint(out, diff)
	return nil
}

// errNotWired is what status fails with.
var errNotWired = errors.New("kube-scheduler is not configured as expected")

func status(ctx context.Context, s settings, out io.Writer) error {
	clients, h, err := s.reach()
	if err != nil {
		return err
	}
	st, err := h.Status()
	if err != nil {
		return err
	}
	line := func(name, format string, args ...any) {
		fmt.Fprintf(out, "%-16s %s\n", name+":", fmt.Sprintf(format, args...))
	}
	line("node", "%s", s.NodeName)
	line("manifest", "%s", st.Manifest)
	if st.Version != "" {
		line("kube-scheduler", "%s", st.Version)
	}
	if st.ConfigPath != "" {
		line("configuration", "%s (%s)", st.ConfigPath, st.APIVersion)
	}
	if len(st.Profiles) > 0 {
		line("profiles", "%s", strings.Join(st.Profiles, ", "))
	}
	if st.Extender != nil {
		line("extender", "%s", st.Extender.URL)
		line("resources", "%s", strings.Join(st.Extender.Resources, ", "))
	}
	for _, url := range st.OtherExtenders {
		line("other extender", "%s", url)
	}
	if st.Backup != "" {
		line("original", "%s", st.Backup)
	}
	if f := st.Failure; f != nil {
		line("rolled back", "%s, attempt %d: %s", f.At.UTC().Format("2006-01-02T15:04:05Z"), f.Attempts, f.Reason)
	}
	var problems []string
	if !st.Wired {
		problems = append(problems, "it does not call the extender")
	} else if e, err := s.withProxy(h).desired(ctx, clients, h); err != nil {
		line("not compared", "%v", err)
	} else {
		problems = append(problems, st.Differences(e)...)
	}
	if st.Failure != nil {
		problems = append(problems, "a change was rolled back")
	}
	if st.Pending {
		problems = append(problems, "a change was not completed; run install or uninstall to complete it")
	}
	want, err := h.Want()
	if err == nil {
		err = host.NewMirror(host.MirrorConfig{Client: clients.Kubernetes, Node: s.NodeName}).Now(ctx, want)
	}
	if err != nil {
		problems = append(problems, err.Error())
	} else {
		line("health", "well")
	}
	if len(problems) == 0 {
		line("state", "wired")
		return nil
	}
	line("state", "%s", strings.Join(problems, "; "))
	return errNotWired
}

// withProxy returns the settings for a command of a person, who need not know of the
// local proxy: where kube-scheduler is wired to it, it stays so.
func (s settings) withProxy(h *host.Host) settings {
	if st, err := h.Status(); err == nil && s.ExtenderProxy == "" && s.ExtenderURL == "" && st.Extender != nil {
		s.ExtenderProxy = proxyOf(st.Extender.URL)
	}
	return s
}

// proxyOf returns the address of the local proxy that kube-scheduler is wired to, ""
// where it is wired to something else.
func proxyOf(extenderURL string) string {
	u, err := url.Parse(extenderURL)
	if err != nil || u.Scheme != "https" || !net.ParseIP(u.Hostname()).IsLoopback() {
		return ""
	}
	return u.Host
}

func printNotes(out io.Writer, notes []string) {
	for _, note := range notes {
		fmt.Fprintln(out, "note:", note)
	}
}
