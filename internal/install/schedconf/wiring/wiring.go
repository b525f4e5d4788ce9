package wiring

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/divvy-gpu/divvy/internal/install/schedconf"
	"github.com/divvy-gpu/divvy/internal/install/schedconf/host"
	"github.com/divvy-gpu/divvy/internal/platform/events"
)

// Install configures kube-scheduler, and returns when it is healthy with that.
func Install(ctx context.Context, n Node, s Source, out io.Writer) error {
	h, err := n.open(nil)
	if err != nil {
		return err
	}
	e, err := s.withProxy(h).desired(ctx, n.Client, h)
	if err != nil {
		return err
	}
	r, err := h.Install(ctx, e, host.InstallOptions{Again: true})
	printNotes(out, r.Notes)
	var rolledBack *host.RolledBackError
	if errors.As(err, &rolledBack) {
		n.tell(ctx, events.SchedulerRolledBack, err.Error())
	}
	if err != nil {
		return err
	}
	if !r.Changed {
		fmt.Fprintf(out, "On node %s, %s; nothing was changed.\n", n.Name, wiredMessage(e))
		return nil
	}
	n.tell(ctx, events.SchedulerWired, wiredMessage(e))
	fmt.Fprintf(out, "On node %s, %s; it is healthy.\n", n.Name, wiredMessage(e))
	return nil
}

func wiredMessage(e schedconf.Extender) string {
	if e.Program != nil {
		return "divvy-scheduler runs in place of kube-scheduler and manages " + strings.Join(e.Resources, ", ")
	}
	return fmt.Sprintf("kube-scheduler calls Divvy's extender at %s for %s", e.URL, strings.Join(e.Resources, ", "))
}

// watchEnds is how long an uninstall waits for a watch on this node: a little longer
// than the terminationGracePeriodSeconds of the DaemonSet's pods.
const watchEnds = 20 * time.Second

// Uninstall restores kube-scheduler.
func Uninstall(ctx context.Context, n Node, out io.Writer) error {
	h, err := n.open(nil)
	if err != nil {
		return err
	}
	r, err := h.Uninstall(ctx, host.UninstallOptions{WatchEnds: watchEnds})
	if err != nil {
		return err
	}
	n.restored(ctx, r, out)
	return nil
}

func (n Node) restored(ctx context.Context, r host.Result, out io.Writer) {
	printNotes(out, r.Notes)
	if !r.Changed {
		fmt.Fprintf(out, "kube-scheduler on node %s does not call the extender.\n", n.Name)
		return
	}
	n.tell(ctx, events.SchedulerUnwired, "kube-scheduler runs with its original configuration")
	fmt.Fprintf(out, "kube-scheduler on node %s was restored and is healthy.\n", n.Name)
}

// Plan prints what Install would change, or Uninstall, as a diff without keys.
func Plan(ctx context.Context, n Node, s Source, uninstall bool, out io.Writer) error {
	h, err := n.open(nil)
	if err != nil {
		return err
	}
	var e schedconf.Extender
	if !uninstall {
		if e, err = s.withProxy(h).desired(ctx, n.Client, h); err != nil {
			return err
		}
	}
	diff, notes, err := h.Plan(e, uninstall)
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

var errNotWired = errors.New("kube-scheduler is not configured as expected")

// Status prints how kube-scheduler is configured, and fails if that is not as expected.
func Status(ctx context.Context, n Node, s Source, out io.Writer) error {
	h, err := n.open(nil)
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
	line("node", "%s", n.Name)
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
	if st.Program != "" {
		line("replaced by", "%s", st.Program)
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
	switch e, err := s.withProxy(h).desired(ctx, n.Client, h); {
	case st.Program != "" && s.Image == "":
		line("not compared", "--replace-image is not set")
	case !st.Wired && s.Image == "":
		problems = append(problems, "it does not call the extender")
	case err != nil:
		line("not compared", "%v", err)
	default:
		problems = append(problems, st.Differences(e)...)
	}
	if st.Failure != nil {
		problems = append(problems, "a change was rolled back")
	}
	if st.Pending {
		install := "install"
		if st.Program != "" || s.Image != "" {
			install += " with " + host.ReplaceFlags + ","
		}
		problems = append(problems, "a change was not completed; run "+install+" or uninstall to complete it")
	}
	want, err := h.Want()
	if err == nil {
		err = host.NewMirror(host.MirrorConfig{Client: n.Client, Node: n.Name}).Now(ctx, want)
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

func printNotes(out io.Writer, notes []string) {
	for _, note := range notes {
		fmt.Fprintln(out, "note:", note)
	}
}
