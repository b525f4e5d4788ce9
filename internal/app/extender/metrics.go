package extender

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/divvy-gpu/divvy/internal/kube"
	"github.com/divvy-gpu/divvy/internal/version"
)

var (
	nodesDesc = prometheus.NewDesc("divvy_extender_books_nodes",
		"Nodes in the books, by state: good, or broken when their inventory does not count.", []string{"state"}, nil)
	podsDesc = prometheus.NewDesc("divvy_extender_books_pods",
		"Pods in the books that ask for a shared resource: waiting for a node, granted a device, or ungranted on a node.", []string{"state"}, nil)
	buildDesc = prometheus.NewDesc("divvy_build_info", "Always 1; the labels say what runs.", []string{"version"}, nil)
)

// booksCollector shows the size of the books when it is asked for.
type booksCollector struct{ books *kube.Books }

// Describe implements prometheus.Collector.
func (booksCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- nodesDesc
	ch <- podsDesc
	ch <- buildDesc
}

// Collect implements prometheus.Collector.
func (c booksCollector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(desc *prometheus.Desc, value int, label string) {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, float64(value), label)
	}
	size := c.books.Size()
	gauge(nodesDesc, size.Nodes-size.BadNodes, "good")
	gauge(nodesDesc, size.BadNodes, "broken")
	gauge(podsDesc, size.Waiting, "waiting")
	gauge(podsDesc, size.Granted, "granted")
	gauge(podsDesc, size.Ungranted, "ungranted")
	gauge(buildDesc, 1, version.Version)
}
