package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	dto "github.com/prometheus/client_model/go"
)

// What is asked of Divvy: the least share of the pods per second without it, by the
// number of nodes from which on it holds, and the most requests of Divvy's own to
// the API server for one pod.
const (
	wantedRatio      = 0.9
	wantedRatioLarge = 0.8
	largeFrom        = 5000
	mostRequests     = 2.0
)

// Result is what is printed. Times are in seconds where a name does not say milliseconds.
type Result struct {
	Machine Machine
	options options
	Sizes   []Size
}

// Size is the measurement at one number of nodes.
type Size struct {
	Nodes  int
	Phases []Phase

	// Rate is pods per second by side, the median of the rounds. Ratios are those with
	// Divvy over those without, by round, and Ratio is their median.
	Rate   map[side]float64
	Ratios []float64
	Ratio  float64
	// Wanted is 0 where the ratio is not judged.
	Wanted float64
	// Requests are those of Divvy's own to the API server for one pod: as the extender
	// counts them, or as the API server does, whichever are more. The API server does
	// not tell who asked; what it answered more with Divvy than without is Divvy's, and
	// the binds are.
	Requests        float64
	RequestsCounted float64
	RequestsServed  float64
	WantedRequests  float64

	// Comparison is with an earlier commit; nil without one, and all above is of the sides
	// with and without.
	Comparison *Comparison
}

// Phase is one side in one round.
type Phase struct {
	Side  side
	Round int
	Pods  int
	// CreationSeconds are from the first creation to the answer of the last one.
	CreationSeconds float64
	PodsPerSecond   float64
	// Latency is the time from asking for a pod's creation to seeing it bound.
	Latency Quantiles
	// Others is the part of the processors' time that programs had that are none of
	// those measured, and Stolen what other machines on the same hardware had.
	Others float64
	Stolen float64
	// CPU is processor time by program, for one pod.
	CPU map[string]float64
	// Server is what the API server answered, for one pod, by what was asked.
	Server map[string]float64
	// Scheduler is where the scheduler's own time went.
	Scheduler SchedulerTimes
	// Extender is nil without Divvy.
	Extender *ExtenderTimes
}

// Quantiles of a number of times, in seconds.
type Quantiles struct {
	P50 float64
	P90 float64
	P99 float64
	Max float64
}

// SchedulerTimes are from kube-scheduler's metrics.
type SchedulerTimes struct {
	// Algorithm is how long it took to choose a node, in the mean.
	Algorithm float64
	// Hints is the share of pods for which it reused the scores of the pod before.
	Hints float64
}

// ExtenderTimes are from the extender's metrics.
type ExtenderTimes struct {
	// Verbs are by the question that kube-scheduler asked.
	Verbs map[string]Verb
	// Requests to the API server for one pod, and of what kind they were.
	Requests     float64
	RequestKinds map[string]float64
	// Resident and Peak are the resident memory in MB, at the end and at most.
	Resident float64
	Peak     float64
}

// Verb is how often kube-scheduler asked for one pod, and how long an answer took
// within the extender in the mean.
type Verb struct {
	PerPod       float64
	Milliseconds float64
}

func newPhase(side side, round int, t *timeline) Phase {
	each, whole, creation := t.latencies()
	return Phase{
		Side: side, Round: round, Pods: len(each), CreationSeconds: creation.Seconds(),
		PodsPerSecond: float64(len(each)) / whole.Seconds(), Latency: quantiles(each),
	}
}

// quantiles of times in ascending order.
func quantiles(sorted []time.Duration) Quantiles {
	if len(sorted) == 0 {
		return Quantiles{}
	}
	at := func(percent int) float64 { return sorted[(len(sorted)-1)*percent/100].Seconds() }
	return Quantiles{P50: at(50), P90: at(90), P99: at(99), Max: at(100)}
}

// fill adds what the programs did between two moments.
func (p *Phase) fill(before, after sight) {
	pods := float64(p.Pods)
	p.CPU = map[string]float64{}
	ours := 0.0
	for name, now := range after.usage {
		seconds := (now.CPU - before.usage[name].CPU).Seconds()
		p.CPU[name] = seconds * 1e3 / pods
		ours += seconds
	}
	if whole := after.at.Sub(before.at).Seconds() * float64(runtime.NumCPU()); whole > 0 {
		p.Others = max(0, (after.machine.used-before.machine.used).Seconds()-ours) / whole
		p.Stolen = (after.machine.stolen - before.machine.stolen).Seconds() / whole
	}
	p.Server = perPod(pods, before.server, after.server, func(s samples, add func(string, float64)) {
		s.each("apiserver_request_total", func(label func(string) string, m *dto.Metric) {
			name := label("verb") + " " + label("resource")
			if sub := label("subresource"); sub != "" {
				name += "/" + sub
			}
			add(name, m.GetCounter().GetValue())
		})
	})
	p.Scheduler.Algorithm = mean(before.scheduler, after.scheduler, "scheduler_scheduling_algorithm_duration_seconds", "", "").Milliseconds
	const hints = "scheduler_batch_attempts_total"
	used, _, _ := after.scheduler.sum(hints, "result", "hint_used")
	usedBefore, _, _ := before.scheduler.sum(hints, "result", "hint_used")
	p.Scheduler.Hints = (used - usedBefore) / pods
	if after.extender == nil {
		return
	}
	e := &ExtenderTimes{Verbs: map[string]Verb{}}
	for _, verb := range []string{"filter", "prioritize", "bind"} {
		v := mean(before.extender, after.extender, "divvy_extender_request_duration_seconds", "verb", verb)
		v.PerPod /= pods
		e.Verbs[verb] = v
	}
	e.RequestKinds = perPod(pods, before.extender, after.extender, func(s samples, add func(string, float64)) {
		s.each("divvy_api_requests_total", func(label func(string) string, m *dto.Metric) {
			add(label("verb")+" "+label("resource"), m.GetCounter().GetValue())
		})
	})
	for _, n := range e.RequestKinds {
		e.Requests += n
	}
	usage := after.usage[extenderName]
	e.Resident, e.Peak = float64(usage.Resident)/1e6, float64(usage.Peak)/1e6
	p.Extender = e
}

// mean returns how often a histogram was observed between two moments, as PerPod,
// and the mean.
func mean(before, after samples, name, label, value string) Verb {
	_, times, total := after.sum(name, label, value)
	_, timesBefore, totalBefore := before.sum(name, label, value)
	if times -= timesBefore; times == 0 {
		return Verb{}
	}
	return Verb{PerPod: times, Milliseconds: (total - totalBefore) / times * 1e3}
}

// perPod returns by how much amounts grew between two moments, divided by the number
// of pods; read adds up what a program shows. What did not grow is left out.
func perPod(pods float64, before, after samples, read func(s samples, add func(name string, amount float64))) map[string]float64 {
	grown := map[string]float64{}
	read(after, func(name string, amount float64) { grown[name] += amount })
	read(before, func(name string, amount float64) { grown[name] -= amount })
	for name, amount := range grown {
		if amount <= 0 {
			delete(grown, name)
			continue
		}
		grown[name] = amount / pods
	}
	return grown
}

func (r *Result) judge() {
	for i := range r.Sizes {
		s := &r.Sizes[i]
		if r.options.before != "" {
			s.Comparison = compare(s.Phases)
			continue
		}
		rates, counted, served := map[side][]float64{}, []float64{}, []float64{}
		for _, p := range s.Phases {
			rates[p.Side] = append(rates[p.Side], p.PodsPerSecond)
			if p.Extender != nil {
				counted = append(counted, p.Extender.Requests)
			}
		}
		s.Ratios = nil
		for _, pair := range byRound(s.Phases) {
			s.Ratios = append(s.Ratios, pair[with].PodsPerSecond/pair[without].PodsPerSecond)
			served = append(served, asked(pair[with])-asked(pair[without])+pair[without].Server[binds])
		}
		s.Rate = map[side]float64{with: median(rates[with]), without: median(rates[without])}
		s.Ratio, s.RequestsCounted, s.RequestsServed = median(s.Ratios), median(counted), median(served)
		s.Requests = max(s.RequestsCounted, s.RequestsServed)
		s.Wanted, s.WantedRequests = wantedRatio, mostRequests
		if s.Nodes >= largeFrom {
			s.Wanted = wantedRatioLarge
		}
		if r.options.batching {
			s.Wanted = 0
		}
	}
}

// binds is how the API server's metrics call binds.
const binds = "POST pods/binding"

// asked is what the API server was asked for one pod, but for watches, which last, and
// for events, which kube-scheduler leaves out where it has too many.
func asked(p Phase) (sum float64) {
	for name, n := range p.Server {
		if verb, of, _ := strings.Cut(name, " "); verb != "WATCH" && of != "events" {
			sum += n
		}
	}
	return sum
}

// median is the middle one of the values, or the mean of the two in the middle; 0 of
// none.
func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	if n == 0 {
		return 0
	}
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// verdict is what came of one limit.
type verdict struct {
	text string
	ok   bool
}

func (v verdict) String() string {
	if v.ok {
		return "PASS  " + v.text
	}
	return "MISS  " + v.text
}

func (s *Size) verdicts() []verdict {
	if s.Comparison != nil {
		return []verdict{s.Comparison.verdict(s.Nodes)}
	}
	wanted := "no limit, since kube-scheduler may batch pods without it"
	if s.Wanted > 0 {
		wanted = fmt.Sprintf("at least %.1f is wanted", s.Wanted)
	}
	return []verdict{
		{fmt.Sprintf("%d nodes: with Divvy %.2f of the pods per second without it (median of %d rounds, %.2f to %.2f); %s",
			s.Nodes, s.Ratio, len(s.Ratios), slices.Min(s.Ratios), slices.Max(s.Ratios), wanted), s.Ratio >= s.Wanted},
		{fmt.Sprintf("%d nodes: %.2f requests of Divvy's own to the API server for a pod (%.2f as the extender counts, %.2f as the API "+
			"server does); at most %g is wanted",
			s.Nodes, s.Requests, s.RequestsCounted, s.RequestsServed, s.WantedRequests), s.Requests <= s.WantedRequests},
	}
}

// disturbed is from which share of the processors on, had by others, a result says
// more of them than of Divvy.
const disturbed = 0.1

// others is the median of what others had of the processors.
func (s *Size) others() float64 {
	var shares []float64
	for _, p := range s.Phases {
		shares = append(shares, p.Others+p.Stolen)
	}
	return median(shares)
}

func (r *Result) missed() error {
	var errs []error
	for _, s := range r.Sizes {
		for _, v := range s.verdicts() {
			if v.ok {
				continue
			}
			if others := s.others(); others >= disturbed {
				v.text += fmt.Sprintf("; others had %.0f %% of the processors meanwhile, so measure again when they are done", others*100)
			}
			errs = append(errs, errors.New(v.text))
		}
	}
	return errors.Join(errs...)
}

func (r *Result) print(out io.Writer) error {
	m := r.Machine
	fmt.Fprintf(out, "\n%s, %d cores, %.0f GB, Linux %s; Kubernetes %s, etcd %s, %s.\n", m.CPU, m.Cores, m.MemoryGB, m.Linux, m.Kubernetes,
		m.Etcd, m.Go)
	fmt.Fprintf(out, "Load before the run: %.1f processes on average, which compete with all that is measured.\n", m.Load)
	for _, s := range r.Sizes {
		fmt.Fprintf(out, "\n%d nodes, %d cards of %d units each; %d pods a phase.\n\n", s.Nodes, cardsPerNode, cardUnits,
			r.options.pods)
		table := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
		fmt.Fprintln(table, "round\tDivvy\tpods/s\tmade in s\tlatency p50 s\tp90\tp99\tmax\tchoose ms\thints %\tothers %\tstolen %\t")
		for _, p := range s.Phases {
			fmt.Fprintf(table, "%d\t%s\t%.1f\t%.1f\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.0f\t%.0f\t%.0f\t\n", p.Round, p.Side, p.PodsPerSecond,
				p.CreationSeconds,
				p.Latency.P50, p.Latency.P90, p.Latency.P99, p.Latency.Max, p.Scheduler.Algorithm, p.Scheduler.Hints*100, p.Others*100,
				p.Stolen*100)
		}
		if err := table.Flush(); err != nil {
			return fmt.Errorf("print the result: %w", err)
		}
		fmt.Fprintln(out, "\nProcessor time for a pod, in ms:")
		sides := s.sides()
		for _, side := range sides {
			fmt.Fprintf(out, "  %-7s Divvy: %s\n", side, s.cpu(side))
		}
		fmt.Fprintln(out, "\nRequests for a pod that the API server answered, everybody's:")
		for _, side := range sides {
			fmt.Fprintf(out, "  %-7s Divvy: %s\n", side, s.answered(side))
		}
		s.printExtender(out)
		if s.Comparison == nil {
			fmt.Fprintf(out, "\nPods per second, medians: with Divvy %.1f, without %.1f.\n", s.Rate[with], s.Rate[without])
		}
		for _, v := range s.verdicts() {
			fmt.Fprintln(out, v)
		}
	}
	return nil
}

// sides are those that were measured.
func (s *Size) sides() []side {
	if s.Comparison != nil {
		return []side{before, with}
	}
	return []side{without, with}
}

// mean returns the mean over all rounds of a side.
func (s *Size) mean(side side, of func(Phase) map[string]float64) map[string]float64 {
	mean, phases := map[string]float64{}, 0.0
	for _, p := range s.Phases {
		if p.Side != side {
			continue
		}
		phases++
		for name, amount := range of(p) {
			mean[name] += amount
		}
	}
	for name := range mean {
		mean[name] /= phases
	}
	return mean
}

// cpu is the processor time of each program.
func (s *Size) cpu(side side) string {
	mean := s.mean(side, func(p Phase) map[string]float64 { return p.CPU })
	whole := 0.0
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(mean)) {
		whole += mean[name]
		parts = append(parts, fmt.Sprintf("%s %.2f", name, mean[name]))
	}
	return strings.Join(parts, ", ") + fmt.Sprintf("; together %.2f", whole)
}

// rare is what is not printed: fewer requests for a pod than this.
const rare = 0.01

// answered is what the API server answered.
func (s *Size) answered(side side) string {
	mean := s.mean(side, func(p Phase) map[string]float64 { return p.Server })
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(mean)) {
		if mean[name] >= rare {
			parts = append(parts, fmt.Sprintf("%.2f %s", mean[name], name))
		}
	}
	return strings.Join(parts, ", ")
}

func (s *Size) printExtender(out io.Writer) {
	for _, p := range s.Phases {
		if p.Extender == nil {
			continue
		}
		fmt.Fprintf(out, "The extender in round %d: ", p.Round)
		for _, verb := range []string{"filter", "prioritize", "bind"} {
			v := p.Extender.Verbs[verb]
			fmt.Fprintf(out, "%s %.2f ms (%.2f a pod), ", verb, v.Milliseconds, v.PerPod)
		}
		fmt.Fprintf(out, "%.0f MB, at most %.0f MB; requests for a pod:", p.Extender.Resident, p.Extender.Peak)
		for _, kind := range slices.Sorted(maps.Keys(p.Extender.RequestKinds)) {
			fmt.Fprintf(out, " %.3f %s", p.Extender.RequestKinds[kind], kind)
		}
		fmt.Fprintln(out)
	}
}
