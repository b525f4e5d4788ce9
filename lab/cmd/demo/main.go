// Command demo shows the scenario of the GCUShare guide, section 4.1, on a real
// Kubernetes: four pods share two cards of 16 GB by memory. It brings up what
// it needs, says what happens and why, and checks everything that it shows.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/divvy-gpu/divvy/lab/internal/checks"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/progress"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

// namespace is for the demo's pods alone.
const namespace = "gcushare-demo"

func run(ctx context.Context, out io.Writer) (err error) {
	started := time.Now()
	fmt.Fprint(out, `Four pods share the memory of two cards, on a real Kubernetes that runs on this
machine: API server, scheduler, kubelet and containers are the real ones. Only
the cards are not: device nodes /dev/gcu0 to gcu7 and a library that reports 8
cards of 16 GB stand in for them.

`)
	s, err := testenv.SetUp(ctx, testenv.Options{Topology: testenv.Guide, MemoryUnit: "1", Namespace: namespace, Out: out})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()

	var printed strings.Builder
	both := io.MultiWriter(out, &printed)
	d := &demo{lab: s, out: both, checks: checks.Checks{Out: both}}
	if err := d.play(ctx); err != nil {
		return fmt.Errorf("the demo could not go on after %d checks: %w", d.checks.Made(), errors.Join(err, d.checks.Err()))
	}
	d.checks.NoError("docs/demo.md shows what was printed", s.CLI.CheckShown("docs/demo.md", "make demo", printed.String()))
	fmt.Fprintf(out, "\nThe cluster still runs, for you to play with; `make demo-down` takes it away without a trace.\n"+
		"  export KUBECONFIG=%s PATH=%s:%s:$PATH\n\n", layout.AdminKubeconfig, product.Programs(), s.Cluster.BinDir)
	fmt.Fprintf(out, "%s (%s)\n", verdict(&d.checks), progress.Elapsed(time.Since(started)))
	return d.checks.Err()
}

// verdict says in one line what was checked.
func verdict(c *checks.Checks) string {
	const what = "cards that the pods see, events, and inspect's books over two units of memory"
	if c.Failed() == 0 {
		return fmt.Sprintf("demo: %d checks of %s: all are as the guide says", c.Made(), what)
	}
	return fmt.Sprintf("demo: %d checks of %s: %d DIFFER", c.Made(), what, c.Failed())
}

// play shows the scenario in units of 1 GB and of 0.1 GB.
func (d *demo) play(ctx context.Context) error {
	d.title("The node, as Kubernetes sees it")
	d.say(`divvy-node has found the cards through the vendor's library and offers their
memory to kubelet, in units of 1 GB. The number of cards is shown beside it.`)
	if err := d.node(ctx, 128); err != nil {
		return err
	}
	if err := d.scenario(ctx, 1); err != nil {
		return err
	}
	d.title("The same with finer units")
	d.say(`memoryUnit is a value of the chart. Pods of the former unit are gone, as they
must be: their requests would change their meaning. With "0.1" one unit is a
tenth of a GB, so 4 GB are 40 units.`)
	if err := d.changeUnit(ctx, "0.1"); err != nil {
		return err
	}
	if err := d.node(ctx, 1280); err != nil {
		return err
	}
	if err := d.scenario(ctx, 10); err != nil {
		return err
	}
	d.title("Back to units of 1 GB")
	return d.changeUnit(ctx, "1")
}
