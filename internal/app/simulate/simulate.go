// Package simulate is the subcommand "kubectl-divvy simulate": it replays a
// workload on a cluster that exists only in memory, with one placement policy
// or several side by side, and says how much of the devices they allocate, how
// much demand is refused, or how many nodes are needed; or it plans which pods to
// move so that others fit.
package simulate

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/divvy-gpu/divvy/internal/app/kubectl"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/report/simulate"
	"github.com/divvy-gpu/divvy/internal/report/simulate/live"
)

const about = `Replay a workload on a simulated cluster in memory, and compare placement policies.

Nodes and pods come from the live cluster or from a dump. Pods arrive one at a time, in an order
determined by a seed, and each is either placed immediately or rejected permanently. The table shows how
much of the devices is allocated after a given demand has arrived. With --churn, pods also leave; with
--find-nodes, the smallest number of nodes that the pods need is determined.

With --replay, the decisions that the extender has made are replayed with each policy: the pods arrive and
end as they did. The table shows which pods would be elsewhere or not be placed, and how many devices would
be in use.

With --defragment, the pods stay where they are, and the command plans which few of them to move, and in
which order, to admit the pods that wait, or to empty a node. Each step is carried out on a copy in memory
first, with the extender's own code, and is printed with its commands. Exit status with --defragment: 0
every waiting pod fits or the node is empty, 1 not all of it, or no plan helps, 2 wrong usage, 3 no answer
possible.`

const examples = `  kubectl divvy simulate --from-cluster
  kubectl divvy simulate --from-cluster --find-nodes
  kubectl divvy simulate --dump cluster.json
  kubectl divvy simulate --from-dump cluster.json --policy binpack,fragmentation --churn
  kubectl divvy simulate --replay decisions.json --policy spread
  kubectl divvy simulate --from-cluster --defragment
  kubectl divvy simulate --from-cluster --defragment --empty-node gcu-1`

// Command returns the subcommand. What it shows goes to cmd's output, what it
// has to say about that to cmd's error output.
func Command() *cobra.Command {
	c := kubectl.New()
	cmd := command(c.Clients)
	c.AddFlags(cmd.Flags())
	return cmd
}

// command is Command without the flags that choose a cluster.
func command(connect func() (kube.Clients, error)) *cobra.Command {
	o := DefaultOptions()
	cmd := &cobra.Command{
		Use:     "simulate",
		Short:   "Compare placement policies on a workload, or plan moves of pods, without touching anything",
		Long:    about,
		Example: examples,
		Args:    cobra.NoArgs,
		PreRunE: func(*cobra.Command, []string) error {
			err := o.Validate()
			if err != nil && o.Defragment {
				return &kubectl.ExitError{Code: ExitUsage, Err: err}
			}
			return err
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			return Run(cmd.Context(), o, connect, cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	o.AddFlags(cmd.Flags())
	return cmd
}

// Run does what the options say. It calls connect only if a live cluster is
// asked for.
func Run(ctx context.Context, o Options, connect func() (kube.Clients, error), in io.Reader, out, errOut io.Writer) error {
	if err := o.Validate(); err != nil {
		return err
	}
	if o.Defragment {
		return o.defragment(ctx, connect, in, out)
	}
	if o.Replay != "" {
		return o.replay(ctx, in, out, errOut)
	}
	if o.Dump != "" {
		return dump(ctx, o.Dump, connect, out)
	}
	e, err := o.experiment(ctx, connect, in, errOut)
	if err != nil {
		return err
	}
	var r *simulate.Report
	switch {
	case o.Churn:
		r, err = e.Churn(ctx, simulate.Churn{Load: o.Load / 100, WarmUp: o.WarmUp, Measure: o.Measure})
	case o.FindNodes:
		r, err = e.FindNodes(ctx, simulate.Find{Refused: o.Refused})
	default:
		r, err = e.Replay(ctx)
	}
	if err != nil {
		return err
	}
	for _, note := range r.Notes {
		fmt.Fprintln(errOut, note)
	}
	if o.Output == formatJSON {
		return r.PrintJSON(out)
	}
	return r.PrintTable(out)
}

func (o *Options) experiment(ctx context.Context, connect func() (kube.Clients, error), in io.Reader,
	errOut io.Writer) (*simulate.Experiment, error) {
	kinds, err := o.kinds()
	if err != nil {
		return nil, err
	}
	l, err := o.live(ctx, connect, in)
	if err != nil {
		return nil, err
	}
	c, w, err := l.Simulation(o.Resource, errOut)
	if err != nil {
		return nil, err
	}
	return &simulate.Experiment{
		Cluster: c, Workloads: []*simulate.Workload{w}, Policies: kinds, FirstSeed: o.Seed, Seeds: o.Shuffles, Arrived: o.Arrived,
		Strict: o.Strict, Sample: o.Sample,
	}, nil
}

// replay replays recorded decisions.
func (o *Options) replay(ctx context.Context, in io.Reader, out, errOut io.Writer) error {
	kinds, err := o.kinds()
	if err != nil {
		return err
	}
	f, name, err := live.Open(o.Replay, in)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // it was only read
	l, record, err := live.ReadExport(f, name)
	if err != nil {
		return err
	}
	c, resource, err := l.Nodes(o.Resource, errOut)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	for i := range c.Nodes { // what other pods take of them is not recorded
		c.Nodes[i].CPU, c.Nodes[i].Memory = place.Unlimited, place.Unlimited
	}
	d := simulate.Decisions{Cluster: c, Resource: resource, Record: record, Policies: kinds}
	r, err := d.Run(ctx)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	for _, note := range r.Notes {
		fmt.Fprintln(errOut, note)
	}
	if o.Output == formatJSON {
		return r.PrintJSON(out)
	}
	return r.PrintTable(out)
}

// live reads the cluster, or the dump of one.
func (o *Options) live(ctx context.Context, connect func() (kube.Clients, error), in io.Reader) (*live.Cluster, error) {
	if o.FromCluster {
		return live.Read(ctx, connect)
	}
	f, name, err := live.Open(o.FromDump, in)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // it was only read
	return live.ReadDump(f, name)
}

func dump(ctx context.Context, path string, connect func() (kube.Clients, error), out io.Writer) error {
	l, err := live.Read(ctx, connect)
	if err != nil {
		return err
	}
	if path == "-" {
		return l.Write(out)
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	if err := errors.Join(l.Write(f), f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}
