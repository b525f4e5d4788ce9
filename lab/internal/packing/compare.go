package packing

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/divvy-gpu/divvy/internal/report/simulate"
)

// Comparison is a report beside what was published.
type Comparison struct {
	*simulate.Report

	// Published is what the report is compared with, nil for nothing.
	Published []Published `json:"published,omitempty"`
	// Against names the policy that gains are counted from, as it was published or
	// else as it is in the report; "" for none.
	Against string `json:"against,omitempty"`
}

// Check reports points without a result to count gains from.
func (c *Comparison) Check() error {
	if c.Against == "" {
		return nil
	}
	for i := range c.Workloads {
		for at := range c.Arrived {
			if c.base(&c.Workloads[i], at) == nil {
				return fmt.Errorf("gains against %s: it is neither simulated nor published with workload %s at %d %%",
					c.Against, c.Workloads[i].Name, c.Arrived[at])
			}
		}
	}
	return nil
}

// published is what was published of a policy, nil for nothing.
func (c *Comparison) published(w *simulate.WorkloadResult, policy string, arrived int) *float64 {
	for i := range c.Published {
		if p := &c.Published[i]; p.Workload == w.Name && p.Policy == policy && p.Arrived == arrived {
			return &p.Allocated
		}
	}
	return nil
}

// base is what gains are counted from at a point, nil for nothing.
func (c *Comparison) base(w *simulate.WorkloadResult, at int) *float64 {
	if p := c.published(w, c.Against, c.Arrived[at]); p != nil {
		return p
	}
	for i := range w.Policies {
		if w.Policies[i].Policy == c.Against {
			return &w.Policies[i].Points[at].AllocatedPercent.Mean
		}
	}
	return nil
}

// Difference is a result that is not what was published.
type Difference struct {
	Workload, Policy string
	ArrivedPercent   int
	// By is what was found less what was published, in points.
	By float64
}

// Differences returns the results that differ from the published ones by more
// than within points, and how many were compared. A published policy that was
// not simulated is not compared.
func (c *Comparison) Differences(within float64) (compared int, out []Difference) {
	for i := range c.Workloads {
		w := &c.Workloads[i]
		for _, p := range w.Policies {
			for _, at := range p.Points {
				published := c.published(w, p.Policy, at.ArrivedPercent)
				if published == nil {
					continue
				}
				compared++
				if by := at.AllocatedPercent.Mean - *published; math.Abs(by) > within {
					out = append(out, Difference{w.Name, p.Policy, at.ArrivedPercent, by})
				}
			}
		}
	}
	slices.SortStableFunc(out, func(a, b Difference) int { return cmp.Compare(math.Abs(b.By), math.Abs(a.By)) })
	return compared, out
}

// A column is a number of each workload and policy, nil where there is none.
type column struct {
	head, format string
	of           func(w *simulate.WorkloadResult, p *simulate.PolicyResult) *float64
}

func (c *Comparison) columns() []column {
	var out []column
	add := func(head, format string, of func(w *simulate.WorkloadResult, p *simulate.PolicyResult) *float64) {
		out = append(out, column{head, format, of})
	}
	for i, at := range c.Arrived {
		add(fmt.Sprintf("AT %d%%", at), "%.2f", func(_ *simulate.WorkloadResult, p *simulate.PolicyResult) *float64 {
			return &p.Points[i].AllocatedPercent.Mean
		})
		if c.Published != nil {
			add("PUBLISHED", "%.2f", func(w *simulate.WorkloadResult, p *simulate.PolicyResult) *float64 {
				return c.published(w, p.Policy, at)
			})
		}
		if c.Against != "" {
			add("GAIN", "%+.2f", func(w *simulate.WorkloadResult, p *simulate.PolicyResult) *float64 {
				gain := p.Points[i].AllocatedPercent.Mean - *c.base(w, i)
				return &gain
			})
		}
	}
	add("REFUSED", "%.2f", func(_ *simulate.WorkloadResult, p *simulate.PolicyResult) *float64 { return &p.RefusedPercent.Mean })
	if c.Kind == simulate.ChurnReport {
		add("ALLOCATED", "%.2f", func(_ *simulate.WorkloadResult, p *simulate.PolicyResult) *float64 { return &p.AllocatedPercent.Mean })
	}
	if c.Workloads[0].Policies[0].Decisions != nil {
		add("P50 US", "%.1f", func(_ *simulate.WorkloadResult, p *simulate.PolicyResult) *float64 { return &p.Decisions.P50 })
		add("P99 US", "%.1f", func(_ *simulate.WorkloadResult, p *simulate.PolicyResult) *float64 { return &p.Decisions.P99 })
	}
	return out
}

// PrintTable prints a line per workload and policy and, of several workloads, the
// means over them, weighted equally. A number that some of them do not have has no
// mean.
func (c *Comparison) PrintTable(out io.Writer) error {
	columns := c.columns()
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	line := func(fields []string) { fmt.Fprintln(t, strings.Join(fields, "\t")) }
	heads := []string{"WORKLOAD", "POLICY"}
	for _, col := range columns {
		heads = append(heads, col.head)
	}
	line(heads)
	show := func(name, policy string, number func(column) *float64) {
		fields := []string{name, policy}
		for _, col := range columns {
			if n := number(col); n != nil {
				fields = append(fields, fmt.Sprintf(col.format, *n))
			} else {
				fields = append(fields, "-")
			}
		}
		line(fields)
	}
	for i := range c.Workloads {
		w := &c.Workloads[i]
		for j := range w.Policies {
			show(w.Name, w.Policies[j].Policy, func(col column) *float64 { return col.of(w, &w.Policies[j]) })
		}
	}
	if len(c.Workloads) > 1 {
		for j := range c.Workloads[0].Policies {
			show("(mean)", c.Workloads[0].Policies[j].Policy, func(col column) *float64 {
				var sum float64
				for i := range c.Workloads {
					n := col.of(&c.Workloads[i], &c.Workloads[i].Policies[j])
					if n == nil {
						return nil
					}
					sum += *n
				}
				mean := sum / float64(len(c.Workloads))
				return &mean
			})
		}
	}
	return t.Flush()
}
