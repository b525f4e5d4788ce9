// Command bench-scheduler measures how fast kube-scheduler places pods on simulated
// nodes, with Divvy's extender and without, in one run and on one machine: the lab's
// real etcd, API server and kube-scheduler, and nodes that exist in the API server
// alone. It needs no root.
//
// Without Divvy, kube-scheduler counts the same resource by itself, as it counts any
// extended resource. The pods are the same, and so are all settings of the scheduler
// but the extender. The two take turns in several rounds, each with a scheduler of
// its own that starts with empty nodes, and each second round begins with the other
// side. One phase before the first round is not counted. The two of a round are
// compared, and the median of the rounds counts: what else a machine does changes
// from minute to minute. How much of the processors others had is shown with each.
//
// With -before it compares the processor time for a pod with that of an earlier commit
// instead, in the same way.
//
// It ends with an error where Divvy is slower than it should be, asks more of the API
// server, or gave a device to more pods than have room on it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/divvy-gpu/divvy/lab/internal/controlplane"
	"github.com/divvy-gpu/divvy/lab/internal/program"
)

func main() { os.Exit(program.Run("bench-scheduler", run)) }

// options are the flags.
type options struct {
	sizes  []int
	pods   int
	rounds int
	// batching has kube-scheduler's profile let pods be batched.
	batching bool
	extender []string // flags
	// before is divvy-control of an earlier commit, with which this one is compared.
	before string
	keep   bool
}

// limits of flags.
const (
	maxNodes = 20_000
	maxPods  = 100_000
)

func parse(args []string, out io.Writer) (options, error) {
	var o options
	var sizes, extender string
	flags := flag.NewFlagSet("bench-scheduler", flag.ContinueOnError)
	flags.SetOutput(out)
	flags.StringVar(&sizes, "nodes", "1000,5000", "numbers of simulated nodes with 8 cards of 16 units, one measurement each")
	flags.IntVar(&o.pods, "pods", 2000, "pods of 4 units that are placed each time")
	flags.IntVar(&o.rounds, "rounds", 5, "how often each side takes its turn; the medians are judged")
	flags.BoolVar(&o.batching, "batching", false, "let kube-scheduler batch pods, on both sides: PodTopologySpread gets defaultingType "+
		"List, since it batches none with its defaults; no ratio is judged then")
	flags.StringVar(&extender, "extender", "", "further flags of the extender, such as --choose-node=false")
	flags.StringVar(&o.before, "before", "", "divvy-control of an earlier commit: the processor time for a pod is compared with it, "+
		"instead of pods per second without Divvy")
	flags.BoolVar(&o.keep, "keep", false, "keep the folder with the logs")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	o.extender = strings.Fields(extender)
	for one := range strings.SplitSeq(sizes, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(one))
		if err != nil || n < 1 || n > maxNodes {
			return o, fmt.Errorf("-nodes is %q: must be numbers from 1 to %d, joined by commas", sizes, maxNodes)
		}
		o.sizes = append(o.sizes, n)
	}
	switch {
	case flags.NArg() > 0:
		return o, fmt.Errorf("unknown argument %q", flags.Arg(0))
	case o.pods < 1 || o.pods > maxPods:
		return o, fmt.Errorf("-pods is %d: must be from 1 to %d", o.pods, maxPods)
	case o.rounds < 1:
		return o, fmt.Errorf("-rounds is %d: must be at least 1", o.rounds)
	case o.before != "":
		if _, err := exec.LookPath(o.before); err != nil {
			return o, fmt.Errorf("-before: %w", err)
		}
	}
	for _, size := range o.sizes {
		// A half keeps the last pods from a search for room that a benchmark of the
		// usual case is not about.
		if asked, room := o.pods*podUnits, size*cardsPerNode*cardUnits/2; asked > room {
			return o, fmt.Errorf("-pods %d ask for %d units; half of what %d nodes have are %d", o.pods, asked, size, room)
		}
	}
	return o, nil
}

func run(ctx context.Context, args []string, out io.Writer) (err error) {
	o, err := parse(args, out)
	if err != nil {
		return err
	}
	machine, err := describe()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "divvy-bench-")
	if err != nil {
		return fmt.Errorf("make a folder for the control plane: %w", err)
	}
	defer func() {
		if o.keep {
			fmt.Fprintln(out, "Logs are in", dir)
			return
		}
		err = errors.Join(err, os.RemoveAll(dir))
	}()
	programs, err := controlplane.Build(ctx, dir, "", out)
	if err != nil {
		return err
	}
	machine.Kubernetes, machine.Etcd = programs.Kubernetes, programs.Etcd
	result := Result{Machine: machine, options: o}
	for _, size := range o.sizes {
		measured, err := measureSize(ctx, o, programs, filepath.Join(dir, strconv.Itoa(size)), size, out)
		if err != nil {
			return fmt.Errorf("%d nodes: %w", size, err)
		}
		result.Sizes = append(result.Sizes, measured)
	}
	result.judge()
	if err := result.print(out); err != nil {
		return err
	}
	return result.missed()
}

// other is the side with which Divvy is compared.
func (o options) other() side {
	if o.before != "" {
		return before
	}
	return without
}

// measureSize measures both sides at one number of nodes.
func measureSize(ctx context.Context, o options, programs controlplane.Programs, dir string, size int, out io.Writer) (s Size, err error) {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return s, fmt.Errorf("make a folder for the control plane: %w", err)
	}
	plane, err := controlplane.Start(ctx, programs.BinDir, dir)
	if err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, plane.Stop()) }()
	b, err := newBench(ctx, o, programs, plane, size)
	if err != nil {
		return s, err
	}
	fmt.Fprintf(out, "%d simulated nodes are there; %d pods, %d rounds.\n", size, o.pods, o.rounds)
	s.Nodes = size
	// An API server and an etcd that have just begun are a quarter faster than they are
	// later, which the side that comes first would have to itself.
	if _, err := b.phase(ctx, o.other(), 0); err != nil {
		return s, fmt.Errorf("before the first round: %w", err)
	}
	for round := range o.rounds {
		sides := []side{o.other(), with}
		if round%2 == 1 {
			slices.Reverse(sides)
		}
		for _, side := range sides {
			phase, err := b.phase(ctx, side, round+1)
			if err != nil {
				return s, fmt.Errorf("round %d %s Divvy: %w", round+1, side, err)
			}
			fmt.Fprintf(out, "  round %d, %-7s Divvy: %7.1f pods/s\n", round+1, side, phase.PodsPerSecond)
			s.Phases = append(s.Phases, phase)
		}
	}
	return s, nil
}
