// Package metrics is the list of all metrics that Divvy's programs show: names,
// meanings and labels, in one table from which the programs make them and the
// reference is written. A name that was released stays.
//
// It holds no numbers and registers nothing by itself: each part makes its metrics
// from their definitions and registers them with the registry that it is given.
package metrics

import (
	"fmt"
	"runtime"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/divvy-gpu/divvy/internal/platform/version"
)

// Type is what kind of number a metric is.
type Type string

// The types, as Prometheus calls them.
const (
	Counter   Type = "counter"
	Gauge     Type = "gauge"
	Histogram Type = "histogram"
)

// Label is a label of a metric.
type Label struct {
	Name string
	// Help says what the values are; all of them where they are few.
	Help string
}

// Programs that show metrics, as divvy_build_info names them.
const (
	Node       = "divvy-node"
	PoolNode   = "divvy-node-pool"
	Extender   = "divvy-extender"
	Webhook    = "divvy-webhook"
	Schedconf  = "divvy-schedconf"
	everywhere = "all programs"
)

// Metric is the definition of a metric.
type Metric struct {
	Name string
	Type Type
	// Help is one sentence.
	Help   string
	Labels []Label
	// Buckets are the upper bounds of a histogram.
	Buckets []float64
	// Programs are those that show it.
	Programs []string
	// Absent says when the metric is not there although its program is, "" for
	// never.
	Absent string
}

// all is filled by define, in the order of the table.
var all []Metric

// All returns the definitions in the order of the table.
func All() []Metric { return slices.Clone(all) }

// define adds a definition to the table.
func define(m Metric) Metric {
	all = append(all, m)
	return m
}

// In reports whether a program shows the metric.
func (m Metric) In(program string) bool {
	return slices.Contains(m.Programs, program) || slices.Contains(m.Programs, everywhere)
}

func (m Metric) labels() []string {
	var names []string
	for _, l := range m.Labels {
		names = append(names, l.Name)
	}
	return names
}

// Desc describes the metric for a collector that makes its values when asked.
func (m Metric) Desc() *prometheus.Desc {
	return prometheus.NewDesc(m.Name, m.Help, m.labels(), nil)
}

// NewCounter makes a counter without labels.
func (m Metric) NewCounter() prometheus.Counter {
	return prometheus.NewCounter(prometheus.CounterOpts{Name: m.Name, Help: m.Help})
}

// NewCounters makes a counter with labels.
func (m Metric) NewCounters() *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Name: m.Name, Help: m.Help}, m.labels())
}

// NewCounterFunc makes a counter whose value is asked for. values are those of all
// labels of the definition.
func (m Metric) NewCounterFunc(values prometheus.Labels, f func() float64) prometheus.CounterFunc {
	return prometheus.NewCounterFunc(prometheus.CounterOpts{Name: m.Name, Help: m.Help, ConstLabels: values}, f)
}

// NewGauges makes a gauge with labels.
func (m Metric) NewGauges() *prometheus.GaugeVec {
	return prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: m.Name, Help: m.Help}, m.labels())
}

// NewGaugeFunc makes a gauge whose value is asked for. values are those of all
// labels of the definition.
func (m Metric) NewGaugeFunc(values prometheus.Labels, f func() float64) prometheus.GaugeFunc {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: m.Name, Help: m.Help, ConstLabels: values}, f)
}

// NewHistograms makes a histogram with labels.
func (m Metric) NewHistograms() *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: m.Name, Help: m.Help, Buckets: m.Buckets}, m.labels())
}

// Registry returns a registry of one program with what every program shows: the
// Go runtime, the process, what was built, and requests to the API server unless
// they are nil.
func Registry(program string, requests *API) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		BuildInfo.NewGaugeFunc(prometheus.Labels{
			"program": program, "version": version.Version, "commit": version.Commit, "go": runtime.Version(),
		}, func() float64 { return 1 }),
	)
	if requests != nil {
		r.MustRegister(requests)
	}
	return r
}

// Bool is 1 for true and 0 for false.
func Bool(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// Differences compares what a program shows, as text in Prometheus' format, with the
// table: what is missing, what is not in it, and what is of another type. Metrics of
// others, such as go_goroutines, do not count.
func Differences(program, text string) []string {
	shown := map[string]Type{}
	for line := range strings.Lines(text) {
		if f := strings.Fields(line); len(f) == 4 && f[0] == "#" && f[1] == "TYPE" {
			shown[f[2]] = Type(f[3])
		}
	}
	var out []string
	for _, m := range all {
		t, there := shown[m.Name]
		switch {
		case there && !m.In(program):
			out = append(out, m.Name+" is not in the table for "+program)
		case there && t != m.Type:
			out = append(out, fmt.Sprintf("%s is a %s, in the table a %s", m.Name, t, m.Type))
		case !there && m.In(program) && m.Absent == "":
			out = append(out, m.Name+" is missing")
		}
		delete(shown, m.Name)
	}
	for name := range shown {
		if strings.HasPrefix(name, "divvy_") {
			out = append(out, name+" is not in the table")
		}
	}
	slices.Sort(out)
	return out
}
