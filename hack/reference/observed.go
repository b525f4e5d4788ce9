package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/platform/metrics"
)

// metricsPage writes the table of metrics, by who shows them.
func metricsPage(_ string, w *strings.Builder) error {
	w.WriteString("[metrics.md](../metrics.md) describes where they are served, what to alert on, and how many series there are. Besides " +
		"these, each\n" +
		"program shows those of the Go runtime (`go_...`) and of its process (`process_...`).\n")
	groups := []struct {
		title string
		in    func(m metrics.Metric) bool
	}{
		{"All programs", func(m metrics.Metric) bool { return m.In("") }},
		{"divvy-extender", only(metrics.Extender)},
		{"divvy-node", only(metrics.Node)},
		{"divvy-schedconf", only(metrics.Schedconf)},
		{"The webhooks of the remote pool", only(metrics.Webhook)},
		{"divvy-node pool", only(metrics.PoolNode)},
	}
	written := map[string]bool{}
	write := func(title string, in func(m metrics.Metric) bool) {
		var rows []metrics.Metric
		for _, m := range metrics.All() {
			if in(m) && !written[m.Name] {
				rows = append(rows, m)
				written[m.Name] = true
			}
		}
		if len(rows) == 0 {
			return
		}
		fmt.Fprintf(w, "\n## %s\n\n", title)
		table(w, "metric", "type", "meaning", "labels")
		for _, m := range rows {
			var labels []string
			for _, l := range m.Labels {
				labels = append(labels, code(l.Name)+": "+l.Help)
			}
			help := m.Help
			if len(m.Programs) > 1 {
				help += " Shown by " + strings.Join(m.Programs, ", ") + "."
			}
			if m.Absent != "" {
				help += " Not there " + m.Absent + "."
			}
			row(w, code(m.Name), string(m.Type), help, strings.Join(labels, "; "))
		}
	}
	write(groups[0].title, func(m metrics.Metric) bool { return m.In("") || len(m.Programs) > 1 })
	for _, g := range groups[1:] {
		write(g.title, g.in)
	}
	if i := slices.IndexFunc(metrics.All(), func(m metrics.Metric) bool { return !written[m.Name] }); i >= 0 {
		return fmt.Errorf("%s is in no section", metrics.All()[i].Name)
	}
	return nil
}

// only are metrics of one program alone.
func only(program string) func(metrics.Metric) bool {
	return func(m metrics.Metric) bool { return len(m.Programs) == 1 && m.Programs[0] == program }
}

// eventsPage writes the table of events.
func eventsPage(_ string, w *strings.Builder) error {
	w.WriteString("Each event is sent once per cause, and similar events are aggregated; a program sends at most 50 events at once and " +
		"then 5 per second\n" +
		"(`divvy_events_total` counts those that were dropped). kube-scheduler's `FailedScheduling` and kubelet's\n" +
		"`UnexpectedAdmissionError` carry Divvy's reasons too, word for word.\n\n")
	table(w, "reason", "type", "on", "by", "meaning")
	for _, k := range events.All() {
		row(w, code(k.Reason), k.Type, k.On, code(k.By), k.Meaning)
	}
	return nil
}
