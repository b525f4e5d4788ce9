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

// sum adds up the series of a metric that have this label: counters, and how often and how
// much in total histograms were observed. The name of the label may be "".
func (s samples) sum(name, label, value string) (counted, times, total float64) {
	s.each(name, func(of func(string) string, m *dto.Metric) {
		if of(label) == value {
			counted += m.GetCounter().GetValue()
			times += float64(m.GetHistogram().GetSampleCount())
			total += m.GetHistogram().GetSampleSum()
		}
	})
	return counted, times, total
}
