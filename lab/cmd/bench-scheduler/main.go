// Command bench-scheduler measures how fast pods are placed on simulated nodes by
// kube-scheduler that counts the resource, by kube-scheduler with Divvy's extender, and by
// divvy-scheduler, in one run and on one machine: the lab's real etcd, API server and
// kube-scheduler, and nodes that exist in the API server alone. It needs no root.
//
// The pods are the same, and so are all settings of the scheduler but the extender and the
// plugin. The sides take turns in several rounds, each with a scheduler of its own that
// starts with empty nodes, and each round begins with another side. One phase before the
// first round is not counted. The sides of a round are compared, and the median of the
// rounds counts: what else a machine does changes from minute to minute. How much of the
// processors others had is shown with each.
//
// The scenario claims is about pods with ResourceClaims, on nodes of its own, without the extender: it
// is not asked about them. There the nodes that the pods are on count as well.
//
// With -before it compares the extender's processor time for a pod with that of an earlier
// commit instead, in the same way.
//
// It ends with an error where Divvy is slower than it should be, sends more requests to the API
// server, or assigned a device to more pods than fit on it.
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

	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/lab/internal/controlplane"
	"github.com/divvy-gpu/divvy/lab/internal/program"
)

func main() { os.Exit(program.Run("bench-scheduler", run)) }

// options are the flags.
type options struct {
	sizes     []int
	pods      int
	rounds    int
	policies  []string
	scenarios []scenario
	// batching has kube-scheduler's profile let pods be batched.
	batching bool
	flags    []string // of Divvy's programs
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
	var sizes, divvy, policies, names string
	flags := flag.NewFlagSet("bench-scheduler", flag.ContinueOnError)
	flags.SetOutput(out)
	flags.StringVar(&sizes, "nodes", "1000,5000", "numbers of simulated nodes with 8 cards of 16 units, one measurement each")
	flags.IntVar(&o.pods, "pods", 2000, "pods that are placed each time")
	flags.IntVar(&o.rounds, "rounds", 9, "how often each side takes its turn; a third of it in scenarios other than throughput, "+
		"which have no limits")
	flags.StringVar(&policies, "policy", place.Binpack.Name()+","+place.Fragmentation, "placement policies of Divvy")
	flags.StringVar(&names, "scenario", scenarioNames(false), "what is placed: pods of 4 units (throughput); the same at half the pods "+
		"per second without Divvy (latency), or while 1000 pods wait that fit nowhere (full); pods of 1 to 16 units and of two devices "+
		"(mixed); pods of 4 units of which each fifth evicts another (preemption); alone, pods with a claim of 2 GiB each, on "+
		"devices of 80 GiB (claims)")
	flags.BoolVar(&o.batching, "batching", false, "let kube-scheduler batch pods, on both sides: PodTopologySpread gets defaultingType "+
		"List, since it batches none with its defaults; no ratio is judged then")
	flags.StringVar(&divvy, "flags", "", "further flags of the extender and of divvy-scheduler, such as --choose-node=false")
	flags.StringVar(&o.before, "before", "", "divvy-control of an earlier commit: the extender's processor time for a pod is compared "+
		"with it, and the other sides are not measured")
	flags.BoolVar(&o.keep, "keep", false, "keep the folder with the logs")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	o.flags = strings.Fields(divvy)
	var err error
	if o.scenarios, err = selected(names); err != nil {
		return o, err
	}
	for policy := range strings.SplitSeq(policies, ",") {
		if !slices.Contains(place.Names(), policy) || slices.Contains(o.policies, policy) {
			return o, fmt.Errorf("-policy is %q: must be some of %s, each once, joined by commas", policies,
				strings.Join(place.Names(), ", "))
		}
		o.policies = append(o.policies, policy)
	}
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
	case o.claims() && o.before != "":
		return o, errors.New("-before compares extenders, which are not asked about claims: choose other scenarios")
	case o.before != "":
		if _, err := exec.LookPath(o.before); err != nil {
			return o, fmt.Errorf("-before: %w", err)
		}
	}
	for _, size := range o.sizes {
		for i := range o.scenarios {
			if err := o.scenarios[i].check(o.pods, size); err != nil {
				return o, err
			}
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
	var plugin string
	if o.before == "" {
		fmt.Fprintln(out, "Building divvy-scheduler.")
		if plugin, err = controlplane.BuildPlugin(ctx, dir, "", ""); err != nil {
			return err
		}
	}
	result := Result{Machine: machine, options: o}
	for _, size := range o.sizes {
		b := &bench{options: o, programs: programs, plugin: plugin, nodes: o.scenarios[0].nodes(size)}
		measured, err := b.measure(ctx, filepath.Join(dir, strconv.Itoa(size)), out)
		if err != nil {
			return fmt.Errorf("%d nodes: %w", size, err)
		}
		result.Measurements = append(result.Measurements, measured...)
	}
	result.judge()
	if err := result.print(out); err != nil {
		return err
	}
	return result.missed()
}

// measure measures all scenarios on a control plane in dir.
func (b *bench) measure(ctx context.Context, dir string, out io.Writer) (all []*Measurement, err error) {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make a folder for the control plane: %w", err)
	}
	if b.plane, err = controlplane.Start(ctx, b.programs.BinDir, dir); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.plane.Stop()) }()
	if b.options.claims() {
		if b.controller, err = b.plane.StartClaimController(); err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, b.controller.Stop(stopGrace)) }()
	}
	if err := b.prepare(ctx); err != nil {
		return nil, err
	}
	o := &b.options
	fmt.Fprintf(out, "%d simulated nodes are there; %d pods a phase.\n", b.nodes.Count, o.pods)
	sides := o.sides()
	// An API server and an etcd that have just begun are a quarter faster than they are
	// later, which the side that comes first would have to itself.
	warming := &scenarios[0]
	if o.claims() {
		warming = &o.scenarios[0]
	}
	first, err := b.phase(ctx, warming, sides[0], 0)
	if err != nil {
		return nil, fmt.Errorf("before the first round: %w", err)
	}
	for i := range o.scenarios {
		m := &Measurement{Nodes: b.nodes.Count, Scenario: o.scenarios[i]}
		if len(b.plain) == 0 && m.Scenario.paced {
			b.plain = []float64{first.PodsPerSecond}
		}
		if !m.Scenario.filled {
			if err := b.empty(ctx, filled); err != nil {
				return nil, err
			}
		}
		for round := range m.Scenario.rounds(o.rounds) {
			for _, side := range order(sides, round) {
				p, err := b.phase(ctx, &m.Scenario, side, round+1)
				if err != nil {
					return nil, fmt.Errorf("%s, round %d, %s: %w", m.Scenario.name, round+1, side, err)
				}
				fmt.Fprintf(out, "  %s, round %d, %s: %.1f pods/s\n", m.Scenario.name, round+1, side, p.PodsPerSecond)
				if m.Scenario.judged && side == sides[0] {
					b.plain = append(b.plain, p.PodsPerSecond)
				}
				m.Phases = append(m.Phases, p)
			}
		}
		all = append(all, m)
	}
	return all, nil
}
