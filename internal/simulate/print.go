package simulate

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// PrintJSON prints the report for programs.
func (r *Report) PrintJSON(out io.Writer) error {
	enc := json.NewEncoder(out)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

// PrintTable prints the report for people: a line per workload and policy and,
// of several workloads, the means over them.
func (r *Report) PrintTable(out io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %s, %d units; ", count(r.Cluster.Nodes, "node"), count(r.Cluster.Devices, "device"), r.Cluster.Units)
	if r.ShownNodes > 0 {
		fmt.Fprintf(&b, "%s shown for each pod; ", count(r.ShownNodes, "node"))
	}
	if len(r.Seeds) == 1 {
		fmt.Fprintf(&b, "one order of arrival (seed %d)\n", r.Seeds[0])
	} else {
		fmt.Fprintf(&b, "means of %d orders of arrival (seeds %d to %d)\n", len(r.Seeds), r.Seeds[0], r.Seeds[len(r.Seeds)-1])
	}
	for _, w := range r.Workloads {
		if w.Misfits > 0 {
			fmt.Fprintf(&b, "workload %s: %s of %d fit on no node even when it is empty and are always refused\n", w.Name, count(w.Misfits, "pod"), w.Pods)
		}
	}
	b.WriteByte('\n')
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	columns, row := r.columns()
	fmt.Fprintln(t, strings.Join(append([]string{"WORKLOAD", "POLICY"}, columns...), "\t"))
	for i := range r.Workloads {
		w := &r.Workloads[i]
		for j := range w.Policies {
			p := &w.Policies[j]
			fmt.Fprintln(t, strings.Join(append([]string{w.Name, p.Policy}, row(w, p)...), "\t"))
		}
	}
	if len(r.Workloads) > 1 {
		for _, m := range r.means() {
			fmt.Fprintln(t, strings.Join(append([]string{"(mean)", m.Policy}, row(&WorkloadResult{}, &m)...), "\t"))
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	b.WriteString(r.footnote())
	_, err := io.WriteString(out, b.String())
	return err
}

// count is "1 node", "2 nodes".
func count(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprintf("%d %s", n, what)
}

// columns returns the heads of the columns that depend on what was asked, and
// what makes their fields.
func (r *Report) columns() ([]string, func(w *WorkloadResult, p *PolicyResult) []string) {
	var heads []string
	var fields []func(w *WorkloadResult, p *PolicyResult) string
	add := func(head string, field func(w *WorkloadResult, p *PolicyResult) string) {
		heads, fields = append(heads, head), append(fields, field)
	}
	switch r.Kind {
	case ReplayReport:
		published, gains := r.told()
		for i, at := range r.Arrived {
			add(fmt.Sprintf("AT %d%%", at), func(_ *WorkloadResult, p *PolicyResult) string { return p.Points[i].AllocatedPercent.text() })
			if published {
				add("PUBLISHED", func(_ *WorkloadResult, p *PolicyResult) string {
					at := &p.Points[i]
					if at.PublishedPercent == nil {
						return "-"
					}
					return fmt.Sprintf("%.2f (%+.2f)", *at.PublishedPercent, at.AllocatedPercent.Mean-*at.PublishedPercent)
				})
			}
			if gains {
				add("GAIN", func(_ *WorkloadResult, p *PolicyResult) string { return fmt.Sprintf("%+.2f", *p.Points[i].GainPoints) })
			}
		}
		add("REFUSED", func(_ *WorkloadResult, p *PolicyResult) string { return p.RefusedPercent.text() })
	case ChurnReport:
		add("REFUSED", func(_ *WorkloadResult, p *PolicyResult) string { return p.RefusedPercent.text() })
		add("ALLOCATED", func(_ *WorkloadResult, p *PolicyResult) string { return p.AllocatedPercent.text() })
	case FindReport:
		add("NODES", func(_ *WorkloadResult, p *PolicyResult) string { return p.Nodes.text() })
		add("MOST", func(_ *WorkloadResult, p *PolicyResult) string { return fmt.Sprint(p.MostNodes) })
		add("AT LEAST", func(w *WorkloadResult, _ *PolicyResult) string {
			if w.FewestNodes == 0 {
				return "-" // in a mean
			}
			return fmt.Sprint(w.FewestNodes)
		})
	}
	if len(r.Workloads) > 0 && len(r.Workloads[0].Policies) > 0 && r.Workloads[0].Policies[0].Decisions != nil {
		micro := func(of func(*Durations) float64) func(*WorkloadResult, *PolicyResult) string {
			return func(_ *WorkloadResult, p *PolicyResult) string {
				if p.Decisions == nil {
					return "-"
				}
				return fmt.Sprintf("%.1f", of(p.Decisions))
			}
		}
		add("P50 US", micro(func(d *Durations) float64 { return d.P50 }))
		add("P99 US", micro(func(d *Durations) float64 { return d.P99 }))
	}
	return heads, func(w *WorkloadResult, p *PolicyResult) []string {
		out := make([]string, len(fields))
		for i, field := range fields {
			out[i] = field(w, p)
		}
		return out
	}
}

// text is the mean and, where there is one, the deviation.
func (s *Spread) text() string {
	if s.StdDev == 0 {
		return fmt.Sprintf("%.2f", s.Mean)
	}
	return fmt.Sprintf("%.2f ±%.2f", s.Mean, s.StdDev)
}

// told reports whether any published result and any gain is to be shown.
func (r *Report) told() (published, gains bool) {
	for _, w := range r.Workloads {
		for _, p := range w.Policies {
			for _, at := range p.Points {
				published = published || at.PublishedPercent != nil
				gains = gains || at.GainPoints != nil
			}
		}
	}
	return published, gains
}

// footnote explains the columns.
func (r *Report) footnote() string {
	switch r.Kind {
	case ChurnReport:
		return fmt.Sprintf("\nREFUSED is the part of the demand that found no room, ALLOCATED the devices' mean use over time, in percent; offered load %g %%.\n", r.LoadPercent)
	case FindReport:
		return "\nNODES holds all pods, MOST for the worst order of arrival; AT LEAST is a bound: fewer nodes have not enough in sum.\n"
	case ReplayReport:
	}
	text := "\nAT n% is the part of the devices that is allocated when pods for n % of them have arrived; REFUSED the part of the demand\nthat found no room till the end. All in percent, ± is the standard deviation of one order."
	if _, gains := r.told(); gains {
		text += " GAIN is in points against " + r.Against + "."
	}
	return text + "\n"
}

// means are the results of each policy over the workloads, weighted equally.
// What is told of some workloads alone is left out.
func (r *Report) means() []PolicyResult {
	n := float64(len(r.Workloads))
	out := make([]PolicyResult, len(r.Workloads[0].Policies))
	for j := range out {
		m := &out[j]
		first := &r.Workloads[0].Policies[j]
		m.Policy = first.Policy
		over := func(of func(*PolicyResult) *Spread) *Spread {
			if of(first) == nil {
				return nil
			}
			s := &Spread{}
			for i := range r.Workloads {
				s.Mean += of(&r.Workloads[i].Policies[j]).Mean / n
			}
			return s
		}
		m.AllocatedPercent = over(func(p *PolicyResult) *Spread { return p.AllocatedPercent })
		m.RefusedPercent = over(func(p *PolicyResult) *Spread { return p.RefusedPercent })
		m.Nodes = over(func(p *PolicyResult) *Spread { return p.Nodes })
		for i := range r.Workloads {
			m.MostNodes = max(m.MostNodes, r.Workloads[i].Policies[j].MostNodes)
		}
		for k := range first.Points {
			at := Point{ArrivedPercent: first.Points[k].ArrivedPercent}
			at.AllocatedPercent = *over(func(p *PolicyResult) *Spread { return &p.Points[k].AllocatedPercent })
			every := func(of func(*Point) *float64) *float64 {
				var sum float64
				for i := range r.Workloads {
					v := of(&r.Workloads[i].Policies[j].Points[k])
					if v == nil {
						return nil
					}
					sum += *v / n
				}
				return &sum
			}
			at.PublishedPercent = every(func(p *Point) *float64 { return p.PublishedPercent })
			at.GainPoints = every(func(p *Point) *float64 { return p.GainPoints })
			m.Points = append(m.Points, at)
		}
	}
	return out
}
