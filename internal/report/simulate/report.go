package simulate

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
)

// Experiment is what a report is made of: workloads on a cluster, each policy
// with each seed.
type Experiment struct {
	Cluster   *Cluster
	Workloads []*Workload
	Policies  []PolicyKind
	// Seeds is how many orders of arrival are tried, from FirstSeed on.
	FirstSeed int64
	Seeds     int
	// Arrived are the points at which allocation is told, in percent of the
	// cluster's units, ascending. The last of them is where a replay ends.
	Arrived []int
	// Strict refuses workloads with pods that fit on no node even when it is
	// empty. Otherwise they are refused each time they arrive, and Report.Notes
	// names them.
	Strict bool
	// Sample and Clock are as in Replay.
	Sample bool
	Clock  func() time.Duration
}

// Report is what a simulation found. Its JSON form is for programs and keeps
// its names.
type Report struct {
	Kind    ReportKind     `json:"kind"`
	Cluster ClusterSummary `json:"cluster"`
	// Seeds are those of the orders of arrival that all means are over.
	Seeds []int64 `json:"seeds"`
	// ShownNodes is how many nodes that fit kube-scheduler would show a policy for
	// each pod, where it was shown no more; 0 where it was shown all.
	ShownNodes int `json:"shownNodes,omitempty"`
	// Arrived are the points of PolicyResult.Points.
	Arrived []int `json:"arrivedPercent,omitempty"`
	// LoadPercent is the load of a churn.
	LoadPercent float64 `json:"loadPercent,omitempty"`
	// Notes are sentences on what is odd with the input.
	Notes     []string         `json:"notes,omitempty"`
	Workloads []WorkloadResult `json:"workloads"`
}

// ReportKind says what was asked.
type ReportKind string

// The kinds of reports, after the types that make them.
const (
	ReplayReport ReportKind = "replay"
	ChurnReport  ReportKind = "churn"
	FindReport   ReportKind = "findNodes"
)

// ClusterSummary is the cluster in numbers.
type ClusterSummary struct {
	Nodes   int `json:"nodes"`
	Devices int `json:"devices"`
	// Units are those of the healthy devices.
	Units int64 `json:"units"`
}

// WorkloadResult is one workload.
type WorkloadResult struct {
	Name string `json:"name"`
	Pods int    `json:"pods"`
	// DemandPercent is what all its pods ask for, in percent of the cluster's
	// units.
	DemandPercent float64 `json:"demandPercent"`
	// Misfits is how many of the pods fit on no node even when it is empty.
	Misfits int `json:"misfits,omitempty"`
	// FewestNodes is the bound below which no policy finds room.
	FewestNodes int            `json:"fewestNodes,omitempty"`
	Policies    []PolicyResult `json:"policies"`
}

// PolicyResult is one policy with one workload, over all seeds.
type PolicyResult struct {
	Policy string `json:"policy"`
	// Points is what was allocated at the points asked for.
	Points []Point `json:"points,omitempty"`
	// Curve is what was allocated at each percent of arrived demand, from 0 on:
	// the mean over seeds.
	Curve []float64 `json:"curve,omitempty"`
	// AllocatedPercent is the mean over the time of a churn.
	AllocatedPercent *Spread `json:"allocatedPercent,omitempty"`
	// RefusedPercent is the part of the arrived demand that found no room,
	// RefusedPods the mean number of such pods.
	RefusedPercent *Spread  `json:"refusedPercent,omitempty"`
	RefusedPods    *float64 `json:"refusedPods,omitempty"`
	// Nodes is how many nodes the workload needs; MostNodes for the worst order
	// of arrival.
	Nodes     *Spread `json:"nodes,omitempty"`
	MostNodes int     `json:"mostNodes,omitempty"`
	// Decisions is how long decisions took, when that was measured.
	Decisions *Durations `json:"decisions,omitempty"`
}

// Point is what was allocated at one point.
type Point struct {
	ArrivedPercent   int    `json:"arrivedPercent"`
	AllocatedPercent Spread `json:"allocatedPercent"`
}

// Spread is a mean over seeds and the standard deviation of one.
type Spread struct {
	Mean   float64 `json:"mean"`
	StdDev float64 `json:"stdDev"`
}

// Durations are percentiles, in microseconds.
type Durations struct {
	P50 float64 `json:"p50Microseconds"`
	P99 float64 `json:"p99Microseconds"`
	Max float64 `json:"maxMicroseconds"`
}

// Validate reports all mistakes at once.
func (e *Experiment) Validate() error {
	errs := []error{e.Cluster.Validate()}
	switch {
	case len(e.Workloads) == 0:
		errs = append(errs, errors.New("no workload was chosen"))
	case len(e.Policies) == 0:
		errs = append(errs, errors.New("no policy was chosen"))
	}
	if e.Seeds < 1 {
		errs = append(errs, fmt.Errorf("%d seeds: at least one is needed", e.Seeds))
	}
	for _, kind := range e.Policies {
		if kind.Placer != nil && e.Sample {
			errs = append(errs, fmt.Errorf("policy %s: it is shown all nodes, so no sample can be simulated", kind.Name))
		}
	}
	for _, w := range e.Workloads {
		if w.Demand() == 0 {
			errs = append(errs, fmt.Errorf("workload %s: no pod requests a device", w.Name))
		}
	}
	return errors.Join(errs...)
}

// maxMisfits is how many pods that fit nowhere an error names.
const maxMisfits = 5

// MisfitError says that pods of a workload fit on no node.
type MisfitError struct {
	Workload *Workload
	// Pods are positions in the workload.
	Pods []int
}

func (e *MisfitError) Error() string {
	var lines []string
	for _, i := range e.Pods[:min(len(e.Pods), maxMisfits)] {
		p := &e.Workload.Pods[i]
		where := p.Source
		if where == "" {
			where = "workload " + e.Workload.Name
		}
		lines = append(lines, fmt.Sprintf("%s: pod %q requests %s, more than any empty node has", where, p.Name, describe(p)))
	}
	if more := len(e.Pods) - len(lines); more > 0 {
		lines = append(lines, fmt.Sprintf("and %d more pods of workload %s", more, e.Workload.Name))
	}
	return strings.Join(lines, "\n")
}

func describe(p *Pod) string {
	parts := []string{}
	switch a := &p.Ask; {
	case a.Devices == 1:
		parts = append(parts, fmt.Sprintf("%d units of one device", a.Units))
	case a.Devices > 1:
		parts = append(parts, fmt.Sprintf("%d devices with %d units each", a.Devices, a.Units))
	}
	if s := p.Ask.Only; s != nil && len(s.UseModels) > 0 {
		parts = append(parts, "a device of model "+strings.Join(s.UseModels, " or "))
	}
	if p.Ask.CPU > 0 {
		parts = append(parts, fmt.Sprintf("%d millicores", p.Ask.CPU))
	}
	if p.Ask.Memory > 0 {
		parts = append(parts, fmt.Sprintf("%d MiB of memory", p.Ask.Memory))
	}
	return strings.Join(parts, ", ")
}

// begin makes the parts that all reports have. Its error joins *MisfitError
// where pods fit nowhere and must; none of them can be placed on any number of
// nodes.
func (e *Experiment) begin(kind ReportKind) (*Report, error) {
	if err := e.Validate(); err != nil {
		return nil, err
	}
	r := &Report{Kind: kind, Cluster: ClusterSummary{Nodes: len(e.Cluster.Nodes), Units: int64(e.Cluster.Units())}}
	for i := range e.Cluster.Nodes {
		r.Cluster.Devices += len(e.Cluster.Nodes[i].Devices)
	}
	if e.Sample {
		r.ShownNodes = ShownNodes(len(e.Cluster.Nodes))
	}
	for i := range e.Seeds {
		r.Seeds = append(r.Seeds, e.FirstSeed+int64(i))
	}
	var errs []error
	for _, w := range e.Workloads {
		misfits := Misfits(e.Cluster, w)
		if len(misfits) > 0 {
			err := &MisfitError{w, misfits}
			if e.Strict || kind == FindReport {
				errs = append(errs, err)
			}
			r.Notes = append(r.Notes, err.Error())
		}
		r.Workloads = append(r.Workloads, WorkloadResult{
			Name: w.Name, Pods: len(w.Pods), DemandPercent: percent(w.Demand(), e.Cluster.Units()), Misfits: len(misfits),
			Policies: make([]PolicyResult, len(e.Policies)),
		})
	}
	return r, errors.Join(errs...)
}

// runs does one run for each workload, policy and seed, several at a time, and
// hands the results over, those of one workload and policy together.
func runs[T any](ctx context.Context, e *Experiment, r *Report,
	run func(ctx context.Context, w *Workload, k PolicyKind, seed int64) (T, error), done func(w *WorkloadResult, p *PolicyResult, all []T),
) error {
	per := len(e.Policies) * e.Seeds
	all := make([]T, len(e.Workloads)*per)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(runtime.GOMAXPROCS(0))
	for i := range all {
		group.Go(func() error {
			var err error
			all[i], err = run(ctx, e.Workloads[i/per], e.Policies[i%per/e.Seeds], r.Seeds[i%e.Seeds])
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	for i := 0; i < len(all); i += e.Seeds {
		w := &r.Workloads[i/per]
		p := &w.Policies[i%per/e.Seeds]
		p.Policy = e.Policies[i%per/e.Seeds].Name
		done(w, p, all[i:i+e.Seeds])
	}
	return nil
}

// Replay makes a report of pods that arrive until the demand is that of the
// last point.
func (e *Experiment) Replay(ctx context.Context) (*Report, error) {
	r, err := e.begin(ReplayReport)
	if err != nil {
		return nil, err
	}
	if len(e.Arrived) == 0 || !slices.IsSorted(e.Arrived) || e.Arrived[0] < 1 {
		return nil, errors.New("arrived demand: needs one or more percentages above 0, ascending")
	}
	r.Arrived = e.Arrived
	replay := Replay{Until: float64(e.Arrived[len(e.Arrived)-1]) / 100, Sample: e.Sample, Clock: e.Clock}
	run := func(ctx context.Context, w *Workload, k PolicyKind, seed int64) (Curve, error) {
		return replay.Run(ctx, e.Cluster, w, k, seed)
	}
	return r, runs(ctx, e, r, run, func(_ *WorkloadResult, p *PolicyResult, all []Curve) {
		for _, at := range e.Arrived {
			p.Points = append(p.Points, Point{at, spread(all, func(c *Curve) float64 { return c.Allocated[at] })})
		}
		for at := range e.Arrived[len(e.Arrived)-1] + 1 {
			p.Curve = append(p.Curve, spread(all, func(c *Curve) float64 { return c.Allocated[at] }).Mean)
		}
		tallied(p, all, func(c *Curve) *Tally { return &c.Tally })
	})
}

// Churn makes a report of pods that come and go.
func (e *Experiment) Churn(ctx context.Context, churn Churn) (*Report, error) {
	r, err := e.begin(ChurnReport)
	if err != nil {
		return nil, err
	}
	r.LoadPercent = 100 * churn.Load
	churn.Sample, churn.Clock = e.Sample, e.Clock
	run := func(ctx context.Context, w *Workload, k PolicyKind, seed int64) (Churned, error) {
		return churn.Run(ctx, e.Cluster, w, k, seed)
	}
	return r, runs(ctx, e, r, run, func(_ *WorkloadResult, p *PolicyResult, all []Churned) {
		allocated := spread(all, func(c *Churned) float64 { return c.Allocated })
		p.AllocatedPercent = &allocated
		tallied(p, all, func(c *Churned) *Tally { return &c.Tally })
	})
}

// FindNodes makes a report of how many nodes each workload needs.
func (e *Experiment) FindNodes(ctx context.Context, find Find) (*Report, error) {
	r, err := e.begin(FindReport)
	if err != nil {
		return nil, err
	}
	find.Sample = e.Sample
	for i, w := range e.Workloads {
		r.Workloads[i].FewestNodes = FewestNodes(e.Cluster, w)
	}
	run := func(ctx context.Context, w *Workload, k PolicyKind, seed int64) (int, error) {
		return find.Run(ctx, e.Cluster, w, k, seed)
	}
	return r, runs(ctx, e, r, run, func(_ *WorkloadResult, p *PolicyResult, all []int) {
		nodes := spread(all, func(n *int) float64 { return float64(*n) })
		p.Nodes, p.MostNodes = &nodes, slices.Max(all)
	})
}

// spread is over all of them, of which there is one at least.
func spread[T any](all []T, of func(*T) float64) Spread {
	var sum float64
	for i := range all {
		sum += of(&all[i])
	}
	n := float64(len(all))
	s := Spread{Mean: sum / n}
	if n > 1 {
		var squares float64
		for i := range all {
			d := of(&all[i]) - s.Mean
			squares += d * d
		}
		s.StdDev = math.Sqrt(squares / (n - 1))
	}
	return s
}

// tallied adds what became of the pods of all runs together.
func tallied[T any](p *PolicyResult, all []T, of func(*T) *Tally) {
	refused := spread(all, func(t *T) float64 { return of(t).RefusedPercent() })
	pods := spread(all, func(t *T) float64 { return float64(of(t).Refused) })
	p.RefusedPercent, p.RefusedPods = &refused, &pods.Mean
	var ds []time.Duration
	for i := range all {
		ds = append(ds, of(&all[i]).Decisions...)
	}
	if len(ds) == 0 {
		return
	}
	slices.Sort(ds)
	micro := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
	at := func(part float64) float64 { return micro(ds[int(part*float64(len(ds)-1))]) }
	p.Decisions = &Durations{P50: at(0.5), P99: at(0.99), Max: micro(ds[len(ds)-1])}
}
