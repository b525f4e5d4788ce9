package main

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"

	dto "github.com/prometheus/client_model/go"
)

// What is wanted of Divvy: the least share of the pods per second of kube-scheduler without it,
// and the most requests of Divvy's own to the API server for one pod.
var wantedRate = map[door]float64{extender: 0.75, plugin: 1}

const mostRequests = 2.0

// Result is what is printed. Times are in seconds where a name does not say milliseconds.
type Result struct {
	Machine      Machine
	options      options
	Measurements []*Measurement
}

// Measurement is one scenario at one number of nodes.
type Measurement struct {
	Nodes       int
	Scenario    scenario
	Phases      []Phase
	Comparisons []Comparison
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
	Packing   Packing
	// Divvy is nil without Divvy.
	Divvy *DivvyTimes
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
	// Attempts are how often it looked for a node, for one pod, those included that found none.
	Attempts float64
	// Algorithm is how long an attempt took, in the mean, in milliseconds.
	Algorithm float64
	// Hints is the share of pods for which it reused the scores of the pod before.
	Hints float64
}

// DivvyTimes are from Divvy's metrics.
type DivvyTimes struct {
	// Verbs are by the question that kube-scheduler asked the extender.
	Verbs map[string]Verb
	// Requests to the API server for one pod, and of what kind they were.
	Requests     float64
	RequestKinds map[string]float64
	// Resident and Peak are the resident memory of Divvy's program in MB, at the end and at most.
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
// divvy is the program that Divvy's metrics are of.
func (p *Phase) fill(before, after sight, divvy string) {
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
	attempts := mean(before.scheduler, after.scheduler, "scheduler_scheduling_algorithm_duration_seconds", "", "")
	p.Scheduler.Attempts, p.Scheduler.Algorithm = attempts.PerPod/pods, attempts.Milliseconds
	const hints = "scheduler_batch_attempts_total"
	used, _, _ := after.scheduler.sum(hints, "result", "hint_used")
	usedBefore, _, _ := before.scheduler.sum(hints, "result", "hint_used")
	p.Scheduler.Hints = (used - usedBefore) / pods
	if after.divvy == nil {
		return
	}
	e := &DivvyTimes{Verbs: map[string]Verb{}}
	for _, verb := range []string{"filter", "prioritize", "bind"} {
		v := mean(before.divvy, after.divvy, "divvy_extender_request_duration_seconds", "verb", verb)
		if v.PerPod > 0 {
			v.PerPod /= pods
			e.Verbs[verb] = v
		}
	}
	e.RequestKinds = perPod(pods, before.divvy, after.divvy, func(s samples, add func(string, float64)) {
		s.each("divvy_api_requests_total", func(label func(string) string, m *dto.Metric) {
			add(label("verb")+" "+label("resource"), m.GetCounter().GetValue())
		})
	})
	for _, n := range e.RequestKinds {
		e.Requests += n
	}
	usage := after.usage[divvy]
	e.Resident, e.Peak = float64(usage.Resident)/1e6, float64(usage.Peak)/1e6
	p.Divvy = e
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
	for _, m := range r.Measurements {
		m.Comparisons = nil
		for _, side := range r.options.sides() {
			if reference := r.options.reference(side); side != reference {
				m.Comparisons = append(m.Comparisons, compare(m.Phases, side, reference))
			}
		}
	}
}

// binds is how the API server's metrics call binds.
const binds = "POST pods/binding"

// asked is what the API server was asked for one pod, but for watches, which last, and
// for events, which kube-scheduler leaves out where it has too many.
func asked(p *Phase) (sum float64) {
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

// verdicts are those on the limits of a scenario that is judged.
func (r *Result) verdicts(m *Measurement) (all []verdict) {
	if !m.Scenario.judged {
		return nil
	}
	for i := range m.Comparisons {
		c := &m.Comparisons[i]
		if m.Scenario.claims {
			all = append(all, m.packed(c)...)
			continue
		}
		what := fmt.Sprintf("%d nodes, %s", m.Nodes, c.Side)
		rounds := len(c.Rate.Rounds)
		if c.Reference.door == before {
			all = append(all, verdict{fmt.Sprintf("%s: %.3f of the processor time for a pod before (median of %d rounds, %.3f to %.3f); "+
				"at most %g is wanted", what, c.CPU.Median, rounds, c.CPU.Low, c.CPU.High, mostCPU), c.CPU.Median <= mostCPU})
			continue
		}
		wanted, least := "no limit, since kube-scheduler may batch pods without Divvy", 0.0
		if !r.options.batching {
			least = wantedRate[c.Side.door]
			wanted = fmt.Sprintf("at least %.2f is wanted", least)
		}
		all = append(all,
			verdict{fmt.Sprintf("%s: %.2f of the pods per second of %s (median of %d rounds, %.2f to %.2f); %s", what, c.Rate.Median,
				c.Reference, rounds, c.Rate.Low, c.Rate.High, wanted), c.Rate.Median >= least},
			verdict{fmt.Sprintf("%s: %.2f requests of Divvy's own to the API server for a pod (%.2f as Divvy counts, %.2f as the API "+
				"server does); at most %g is wanted", what, c.Requests(), c.RequestsCounted, c.RequestsServed, mostRequests),
				c.Requests() <= mostRequests})
	}
	return all
}

// disturbed is from which share of the processors on, had by others, a result says
// more of them than of Divvy.
const disturbed = 0.1

// others is the median of what others had of the processors.
func (m *Measurement) others() float64 {
	var shares []float64
	for i := range m.Phases {
		shares = append(shares, m.Phases[i].Others+m.Phases[i].Stolen)
	}
	return median(shares)
}

func (r *Result) missed() error {
	var errs []error
	for _, m := range r.Measurements {
		for _, v := range r.verdicts(m) {
			if v.ok {
				continue
			}
			if others := m.others(); others >= disturbed {
				v.text += fmt.Sprintf("; others had %.0f %% of the processors meanwhile, so measure again when they are done", others*100)
			}
			errs = append(errs, errors.New(v.text))
		}
	}
	return errors.Join(errs...)
}
