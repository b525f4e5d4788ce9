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

// PrintTable prints the report for people: a line per workload and policy.
func (r *Report) PrintTable(out io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %s, %d units; ", count(r.Cluster.Nodes, "node"), count(r.Cluster.Devices, "device"), r.Cluster.Units)
	if r.ShownNodes > 0 {
		fmt.Fprintf(&b, "%s offered for each pod; ", count(r.ShownNodes, "node"))
	}
	if len(r.Seeds) == 1 {
		fmt.Fprintf(&b, "one arrival order (seed %d)\n", r.Seeds[0])
	} else {
		fmt.Fprintf(&b, "means of %d arrival orders (seeds %d to %d)\n", len(r.Seeds), r.Seeds[0], r.Seeds[len(r.Seeds)-1])
	}
	for _, w := range r.Workloads {
		if w.Misfits > 0 {
			fmt.Fprintf(&b, "workload %s: %s of %d do not fit on any empty node and are always rejected\n", w.Name, count(w.Misfits, "pod"),
				w.Pods)
		}
	}
	b.WriteByte('\n')
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, strings.Join(append([]string{"WORKLOAD", "POLICY"}, r.heads()...), "\t"))
	for i := range r.Workloads {
		w := &r.Workloads[i]
		for j := range w.Policies {
			p := &w.Policies[j]
			fmt.Fprintln(t, strings.Join(append([]string{w.Name, p.Policy}, r.fields(w, p)...), "\t"))
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

// heads are those of the columns that depend on what was asked.
func (r *Report) heads() []string {
	switch r.Kind {
	case ChurnReport:
		return []string{"REFUSED", "ALLOCATED"}
	case FindReport:
		return []string{"NODES", "MOST", "AT LEAST"}
	case ReplayReport:
	}
	var out []string
	for _, at := range r.Arrived {
		out = append(out, fmt.Sprintf("AT %d%%", at))
	}
	return append(out, "REFUSED")
}

func (r *Report) fields(w *WorkloadResult, p *PolicyResult) []string {
	switch r.Kind {
	case ChurnReport:
		return []string{p.RefusedPercent.String(), p.AllocatedPercent.String()}
	case FindReport:
		return []string{p.Nodes.String(), fmt.Sprint(p.MostNodes), fmt.Sprint(w.FewestNodes)}
	case ReplayReport:
	}
	var out []string
	for _, at := range p.Points {
		out = append(out, at.AllocatedPercent.String())
	}
	return append(out, p.RefusedPercent.String())
}

// String is the mean and, where there is one, the deviation.
func (s Spread) String() string {
	if s.StdDev == 0 {
		return fmt.Sprintf("%.2f", s.Mean)
	}
	return fmt.Sprintf("%.2f ±%.2f", s.Mean, s.StdDev)
}

func (r *Report) footnote() string {
	switch r.Kind {
	case ChurnReport:
		return fmt.Sprintf("\nREFUSED is the part of the demand that did not fit, ALLOCATED the mean use of the devices over time, in "+
			"percent; offered load %g %%.\n", r.LoadPercent)
	case FindReport:
		return "\nNODES is the number of nodes that fits all pods, MOST that of the worst arrival order; AT LEAST is a lower bound by " +
			"total capacity.\n"
	case ReplayReport:
	}
	return "\nAT n% is the part of the devices that is allocated when pods for n % of them have arrived; REFUSED the part of the demand\n" +
		"that did not fit by the end. All in percent, ± is the standard deviation of one order.\n"
}
