package main

import (
	"fmt"
	"strings"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// samples are the metrics that a program shows at one moment.
type samples map[string]*dto.MetricFamily

func parseSamples(text string) (samples, error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(text))
	if err != nil {
		return nil, fmt.Errorf("not in Prometheus' format: %w", err)
	}
	return families, nil
}

// each calls see for each series of a metric. label returns the value of one of its
// labels, "" where it has none of that name.
func (s samples) each(name string, see func(label func(name string) string, m *dto.Metric)) {
	for _, metric := range s[name].GetMetric() {
		see(func(name string) string {
			for _, pair := range metric.GetLabel() {
				if pair.GetName() == name {
					return pair.GetValue()
				}
			}
			return ""
		}, metric)
	}
}

// series calls see for each series of a metric that has these labels among its own;
// labels are pairs of name and value.
func (s samples) series(name string, labels []string, see func(*dto.Metric)) {
	s.each(name, func(label func(string) string, metric *dto.Metric) {
		for i := 0; i+1 < len(labels); i += 2 {
			if label(labels[i]) != labels[i+1] {
				return
			}
		}
		see(metric)
	})
}

// count adds up counters.
func (s samples) count(name string, labels ...string) (sum float64) {
	s.series(name, labels, func(m *dto.Metric) { sum += m.GetCounter().GetValue() })
	return sum
}

// observed adds up histograms: how often and how much in total.
func (s samples) observed(name string, labels ...string) (times, total float64) {
	s.series(name, labels, func(m *dto.Metric) {
		times += float64(m.GetHistogram().GetSampleCount())
		total += m.GetHistogram().GetSampleSum()
	})
	return times, total
}
