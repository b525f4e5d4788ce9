package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
)

func (r *Result) print(out io.Writer) error {
	m := r.Machine
	fmt.Fprintf(out, "\n%s, %d cores, %.0f GB, Linux %s; Kubernetes %s, etcd %s, %s.\n", m.CPU, m.Cores, m.MemoryGB, m.Linux, m.Kubernetes,
		m.Etcd, m.Go)
	fmt.Fprintf(out, "Load before the run: %.1f processes on average, which compete with all that is measured.\n", m.Load)
	for _, m := range r.Measurements {
		fmt.Fprintf(out, "\n%s: %d nodes, %d devices of %d units each; %d pods a phase.\n\n", m.Scenario.name, m.Nodes, cardsPerNode,
			m.Scenario.nodes(m.Nodes).Units, r.options.pods)
		if m.Scenario.claims {
			fmt.Fprint(out, claimConditions, "\n\n")
		}
		if err := m.printPhases(out); err != nil {
			return err
		}
		sides := r.options.sides()
		if m.Scenario.claims {
			fmt.Fprintln(out, "\nNodes that the pods are on, by round, and the fewest that have the memory:")
			for i := range m.Phases {
				p := &m.Phases[i]
				fmt.Fprintf(out, "  %s: %d of %d\n", p.Side, p.Packing.Nodes, p.Packing.Fewest)
			}
		}
		fmt.Fprintln(out, "\nProcessor time for a pod, in ms:")
		for _, side := range sides {
			fmt.Fprintf(out, "  %s: %s\n", side, m.cpu(side))
		}
		fmt.Fprintln(out, "\nRequests for a pod that the API server answered, from all clients:")
		for _, side := range sides {
			fmt.Fprintf(out, "  %s: %s\n", side, m.answered(side))
		}
		m.printDivvy(out)
		if err := r.printComparisons(out, m); err != nil {
			return err
		}
		for _, v := range r.verdicts(m) {
			fmt.Fprintln(out, v)
		}
	}
	return nil
}

func (m *Measurement) printPhases(out io.Writer) error {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "round\tside\tpods/s\tmade in s\tlatency p50 ms\tp90\tp99\tmax\tattempts\tms each\thints %\tothers %\tstolen %\t")
	for i := range m.Phases {
		p := &m.Phases[i]
		l := p.Latency
		fmt.Fprintf(table, "%d\t%s\t%.1f\t%.1f\t%.0f\t%.0f\t%.0f\t%.0f\t%.2f\t%.2f\t%.0f\t%.0f\t%.0f\t\n", p.Round, p.Side, p.PodsPerSecond,
			p.CreationSeconds, l.P50*1e3, l.P90*1e3, l.P99*1e3, l.Max*1e3, p.Scheduler.Attempts, p.Scheduler.Algorithm,
			p.Scheduler.Hints*100, p.Others*100, p.Stolen*100)
	}
	if err := table.Flush(); err != nil {
		return fmt.Errorf("print the result: %w", err)
	}
	return nil
}

// printComparisons prints medians of the rounds, with ratios to the reference by round.
func (r *Result) printComparisons(out io.Writer, m *Measurement) error {
	fmt.Fprintln(out, "\nMedians of the rounds. A ratio is by round; its interval has the median with a confidence of 95 %, or is from "+
		"the smallest to the\nlargest where there are fewer than six rounds.")
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "side\tpods/s\tratio\tlatency p50 ms\tp99 ms\tratio of p99\tprocessor ms a pod\tratio\t")
	for _, side := range r.options.sides() {
		of := func(value func(*Phase) float64) float64 { return median(values(m.Phases, side, value)) }
		var rate, latency, cpu string
		if i := slices.IndexFunc(m.Comparisons, func(c Comparison) bool { return c.Side == side }); i >= 0 {
			c := &m.Comparisons[i]
			rate, latency, cpu = c.Rate.String(), c.P99.String(), c.CPU.String()
		}
		fmt.Fprintf(table, "%s\t%.1f\t%s\t%.0f\t%.0f\t%s\t%.2f\t%s\t\n", side, of(rateOf), rate,
			of(func(p *Phase) float64 { return p.Latency.P50 })*1e3, of(p99Of)*1e3, latency, of(cpuOf), cpu)
	}
	if err := table.Flush(); err != nil {
		return fmt.Errorf("print the result: %w", err)
	}
	return nil
}

// mean returns the mean over all rounds of a side.
func (m *Measurement) mean(side side, of func(*Phase) map[string]float64) map[string]float64 {
	mean, phases := map[string]float64{}, 0.0
	for i := range m.Phases {
		p := &m.Phases[i]
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
func (m *Measurement) cpu(side side) string {
	mean := m.mean(side, func(p *Phase) map[string]float64 { return p.CPU })
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(mean)) {
		parts = append(parts, fmt.Sprintf("%s %.2f", name, mean[name]))
	}
	return strings.Join(parts, ", ") + fmt.Sprintf("; together, without this program, %.2f", measured(mean))
}

// rare is what is not printed: fewer requests for a pod than this.
const rare = 0.01

// answered is what the API server answered.
func (m *Measurement) answered(side side) string {
	mean := m.mean(side, func(p *Phase) map[string]float64 { return p.Server })
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(mean)) {
		if mean[name] >= rare {
			parts = append(parts, fmt.Sprintf("%.2f %s", mean[name], name))
		}
	}
	return strings.Join(parts, ", ")
}

func (m *Measurement) printDivvy(out io.Writer) {
	for i := range m.Phases {
		p := &m.Phases[i]
		if p.Divvy == nil {
			continue
		}
		fmt.Fprintf(out, "%s in round %d: ", p.Side, p.Round)
		for _, verb := range slices.Sorted(maps.Keys(p.Divvy.Verbs)) {
			v := p.Divvy.Verbs[verb]
			fmt.Fprintf(out, "%s %.2f ms (%.2f a pod), ", verb, v.Milliseconds, v.PerPod)
		}
		fmt.Fprintf(out, "%.0f MB, at most %.0f MB; requests of its own for a pod:", p.Divvy.Resident, p.Divvy.Peak)
		for _, kind := range slices.Sorted(maps.Keys(p.Divvy.RequestKinds)) {
			fmt.Fprintf(out, " %.3f %s", p.Divvy.RequestKinds[kind], kind)
		}
		fmt.Fprintln(out)
	}
}
