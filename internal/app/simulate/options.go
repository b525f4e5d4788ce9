package simulate

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/pflag"

	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/report/simulate"
)

const (
	formatTable = "table"
	formatJSON  = "json"
)

// Options are what a user may choose.
type Options struct {
	// FromCluster takes nodes and pods from a live cluster, FromDump from a file.
	// Dump is a file to write what the live cluster has.
	FromCluster    bool
	FromDump, Dump string
	// Replay is a file of recorded decisions to replay instead of a workload.
	Replay string
	// Resource is the one to simulate, of a cluster that shares several.
	Resource string

	Policies  []string
	Shuffles  int
	Seed      int64
	Arrived   []int
	Churn     bool
	Load      float64
	WarmUp    float64
	Measure   float64
	FindNodes bool
	// Refused is the share of the demand, in percent, that may be rejected when the number
	// of nodes is determined.
	Refused float64
	// Defragment plans moves of pods instead of a simulation: that admit the pods that wait,
	// or empty a node.
	Defragment bool
	EmptyNode  string
	// Sample shows policies no more nodes than kube-scheduler would.
	Sample bool
	// Strict rejects workloads with pods that fit on no node.
	Strict bool
	Output string
}

// DefaultOptions returns the defaults, with the policies of the extender.
func DefaultOptions() Options {
	return Options{
		Policies: place.Names(),
		Shuffles: 10, Seed: 42, Arrived: []int{100, 130},
		Load: 97, WarmUp: 3, Measure: 3,
		Output: formatTable,
	}
}

// AddFlags adds a flag for every option, with its present value as default.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	var names []string
	for _, k := range simulate.Policies() {
		names = append(names, k.Name)
	}
	fs.BoolVar(&o.FromCluster, "from-cluster", o.FromCluster, "read nodes and pods from the live cluster; nothing is changed there")
	fs.StringVar(&o.FromDump, "from-dump", o.FromDump,
		"read nodes and pods from a file written by --dump or by \"kubectl get nodes,pods -A -o json\"; \"-\" for standard input")
	fs.StringVar(&o.Replay, "replay", o.Replay, "replay the decisions in a file written by \"kubectl divvy explain --export\" with each "+
		"policy, and show what would differ; \"-\" for standard input")
	fs.StringVar(&o.Dump, "dump", o.Dump, "write the nodes and pods of the live cluster that simulations need to this file and exit; "+
		"\"-\" for standard output")
	fs.StringVar(&o.Resource, "resource", o.Resource, "extended resource to simulate, if the nodes share several")
	fs.StringSliceVar(&o.Policies, "policy", o.Policies, "policies to compare: "+strings.Join(names, ", ")+", or \"all\"")
	fs.IntVar(&o.Shuffles, "shuffles", o.Shuffles, "number of arrival orders to simulate; results are averaged over them")
	fs.Int64Var(&o.Seed, "seed", o.Seed, "seed of the first arrival order; the others use the next seeds")
	fs.IntSliceVar(&o.Arrived, "arrived", o.Arrived,
		"report allocation when this demand has arrived, in percent of the devices; the simulation ends at the last value")
	fs.BoolVar(&o.Churn, "churn", o.Churn, "let pods arrive and leave, and report how much demand is rejected")
	fs.Float64Var(&o.Load, "load", o.Load, "with --churn, offered load in percent of the devices")
	fs.Float64Var(&o.WarmUp, "warm-up", o.WarmUp, "with --churn, warm-up time, in mean pod lifetimes")
	fs.Float64Var(&o.Measure, "measure", o.Measure, "with --churn, measured time, in mean pod lifetimes")
	fs.BoolVar(&o.FindNodes, "find-nodes", o.FindNodes,
		"find the smallest number of nodes, mixed as in the cluster, that fits each workload")
	fs.Float64Var(&o.Refused, "refused", o.Refused, "with --find-nodes, demand that may be rejected, in percent of the workload")
	fs.BoolVar(&o.Defragment, "defragment", o.Defragment, "plan the fewest moves of pods that admit the pods that wait now, and print "+
		"them with their commands; nothing is moved")
	fs.StringVar(&o.EmptyNode, "empty-node", o.EmptyNode, "with --defragment, plan moves that empty this node instead")
	fs.BoolVar(&o.Sample, "sample", o.Sample, "offer a policy only as many nodes per pod as kube-scheduler samples, round robin; if "+
		"false, all nodes")
	fs.BoolVar(&o.Strict, "strict", o.Strict, "fail if a pod requests more than any node has, instead of printing a note; always on with "+
		"--find-nodes")
	fs.StringVarP(&o.Output, "output", "o", o.Output, "table or json; with --defragment, table is text")
}

// Validate reports all mistakes at once.
func (o Options) Validate() error {
	var errs []error
	mistake := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	sources := 0
	for _, given := range []bool{o.FromCluster, o.FromDump != "", o.Dump != "", o.Replay != ""} {
		if given {
			sources++
		}
	}
	if sources != 1 {
		mistake("exactly one of --from-cluster, --from-dump FILE, --replay FILE and --dump FILE is required")
	}
	if o.Churn && o.FindNodes {
		mistake("--churn and --find-nodes cannot be combined")
	}
	if o.Defragment && (o.Churn || o.FindNodes || o.Dump != "") {
		mistake("--defragment cannot be combined with --churn, --find-nodes or --dump")
	}
	if o.Replay != "" && (o.Churn || o.FindNodes || o.Defragment) {
		mistake("--replay cannot be combined with --churn, --find-nodes or --defragment")
	}
	if o.EmptyNode != "" && !o.Defragment {
		mistake("--empty-node requires --defragment")
	}
	if _, err := o.kinds(); err != nil {
		errs = append(errs, err)
	}
	if o.Shuffles < 1 || o.Shuffles > 10000 {
		mistake("--shuffles %d: must be from 1 to 10000", o.Shuffles)
	}
	if len(o.Arrived) == 0 {
		mistake("--arrived: at least one percentage is required")
	}
	for i, at := range o.Arrived {
		if at < 1 || at > 1000 {
			mistake("--arrived %d: must be from 1 to 1000 percent", at)
		} else if i > 0 && at <= o.Arrived[i-1] {
			mistake("--arrived %d after %d: must be ascending", at, o.Arrived[i-1])
		}
	}
	for _, f := range []struct {
		flag             string
		value            float64
		lowest, highest  float64
		lowestIsExcluded bool
	}{
		{"load", o.Load, 0, 1000, true}, {"warm-up", o.WarmUp, 0, 1000, false}, {"measure", o.Measure, 0, 1000, true},
		{"refused", o.Refused, 0, 100, false},
	} {
		if !(f.value >= f.lowest && f.value <= f.highest) || f.lowestIsExcluded && f.value == f.lowest { // NaN is refused
			from := "from"
			if f.lowestIsExcluded {
				from = "above"
			}
			mistake("--%s %g: must be %s %g and at most %g", f.flag, f.value, from, f.lowest, f.highest)
		}
	}
	if o.Output != formatTable && o.Output != formatJSON {
		mistake("--output %q: must be table or json", o.Output)
	}
	return errors.Join(errs...)
}

// kinds returns the policies, each once.
func (o *Options) kinds() ([]simulate.PolicyKind, error) {
	out, err := simulate.ParsePolicies(simulate.Policies(), o.Policies)
	if err != nil {
		return nil, fmt.Errorf("--policy: %w", err)
	}
	return out, nil
}
