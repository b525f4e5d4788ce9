// Command packing compares Divvy's placement policies with published ones on the
// public trace, see docs/performance.md: allocated share over arrived demand, or demand
// that is rejected when pods come and go.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/divvy-gpu/divvy/internal/report/simulate"
	"github.com/divvy-gpu/divvy/lab/internal/packing"
	"github.com/divvy-gpu/divvy/lab/internal/program"
)

func main() { os.Exit(program.Run("packing", run)) }

// arrived are the points at which the published experiment reports allocation.
var arrived = []int{100, 130}

func run(ctx context.Context, args []string, out io.Writer) error {
	var trace, workloads, policies, published, against string
	var within, load float64
	var seeds int
	var churn, sample, timings bool
	flags := flag.NewFlagSet("packing", flag.ContinueOnError)
	flags.SetOutput(out)
	flags.StringVar(&trace, "trace", "", "directory with openb_node_list_gpu_node.csv and lists of pods, openb_pod_list_NAME.csv")
	flags.StringVar(&workloads, "workload", "all", "names of lists of pods, joined by commas, or \"all\"")
	flags.StringVar(&policies, "policy", "all", "policies, joined by commas, or \"all\"")
	flags.StringVar(&published, "published", "", "compare with these results (columns workload, policy, arrived_percent, "+
		"allocated_percent_mean), and fail where they differ")
	flags.Float64Var(&within, "within", 0.5, "how far off a published result may be, in points")
	flags.StringVar(&against, "against", "", "count gains from this policy, as published or else as simulated")
	flags.IntVar(&seeds, "shuffles", 10, "orders of arrival to try")
	flags.BoolVar(&churn, "churn", false, "let pods come and go")
	flags.Float64Var(&load, "load", 97, "with -churn, offered load in percent of the devices")
	flags.BoolVar(&sample, "sample", false, "show a policy only as many nodes for each pod as kube-scheduler looks for")
	flags.BoolVar(&timings, "timings", false, "measure how long decisions take")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if trace == "" || flags.NArg() > 0 {
		return fmt.Errorf("want -trace DIR and flags, not %q", args)
	}
	kinds, err := simulate.ParsePolicies(packing.Policies(), strings.Split(policies, ","))
	if err != nil {
		return err
	}
	e := &simulate.Experiment{Policies: kinds, FirstSeed: 42, Seeds: seeds, Arrived: arrived, Sample: sample}
	if e.Cluster, e.Workloads, err = packing.ReadTrace(trace, strings.Split(workloads, ",")); err != nil {
		return err
	}
	if timings {
		began := time.Now()
		e.Clock = func() time.Duration { return time.Since(began) }
	}
	c := &packing.Comparison{Against: against}
	if published != "" {
		if c.Published, err = packing.ReadFile(published, packing.ReadPublished); err != nil {
			return err
		}
	}
	if churn {
		c.Report, err = e.Churn(ctx, simulate.Churn{Load: load / 100, WarmUp: 3, Measure: 3})
	} else {
		c.Report, err = e.Replay(ctx)
	}
	if err != nil {
		return err
	}
	if err := c.Check(); err != nil {
		return err
	}
	for _, note := range c.Notes {
		fmt.Fprintln(os.Stderr, note)
	}
	if err := c.PrintTable(out); err != nil || published == "" {
		return err
	}
	return compare(c, within)
}

func compare(c *packing.Comparison, within float64) error {
	compared, differences := c.Differences(within)
	for _, d := range differences {
		fmt.Fprintf(os.Stderr, "workload %s, policy %s, %d %% arrived: %+.2f points off\n", d.Workload, d.Policy, d.ArrivedPercent, d.By)
	}
	switch {
	case len(differences) > 0:
		return fmt.Errorf("%d of %d results are more than %g points off what was published", len(differences), compared, within)
	case compared > 0:
		fmt.Fprintf(os.Stderr, "%d results are within %g points of what was published.\n", compared, within)
	case c.Against == "":
		return errors.New("nothing was published of these workloads and policies at these percentages")
	}
	return nil
}
