package extender

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/platform/metrics"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
)

// booksCollector shows what the books hold when it is asked for, so that nothing
// is counted between two scrapes and nothing stays of what is gone.
type booksCollector struct {
	size      func() cluster.Size
	ledger    *ledger.Ledger
	resources []accel.Resource
	// devices shows each device; without, nodes alone.
	devices bool
	ready   func() bool
	leading func() bool
}

var (
	nodesDesc         = metrics.ExtenderBooksNodes.Desc()
	podsDesc          = metrics.ExtenderBooksPods.Desc()
	readyDesc         = metrics.ExtenderReady.Desc()
	leaderDesc        = metrics.ExtenderLeader.Desc()
	reservationsDesc  = metrics.ExtenderReservations.Desc()
	expectedDesc      = metrics.ExtenderExpected.Desc()
	nodeUnitsDesc     = metrics.ExtenderNodeUnits.Desc()
	nodeUsedDesc      = metrics.ExtenderNodeUnitsUsed.Desc()
	unitBytesDesc     = metrics.ExtenderNodeUnitBytes.Desc()
	namespaceUsedDesc = metrics.ExtenderNamespaceUnitsUsed.Desc()
	deviceUnitsDesc   = metrics.ExtenderDeviceUnits.Desc()
	deviceUsedDesc    = metrics.ExtenderDeviceUnitsUsed.Desc()
	deviceFreeDesc    = metrics.ExtenderDeviceUnitsFree.Desc()
)

// termsCollector shows how often this replica began to lead.
type termsCollector struct{ terms func() int }

var termsDesc = metrics.ExtenderTerms.Desc()

// Describe implements prometheus.Collector.
func (termsCollector) Describe(ch chan<- *prometheus.Desc) { ch <- termsDesc }

// Collect implements prometheus.Collector.
func (c termsCollector) Collect(ch chan<- prometheus.Metric) {
	ch <- prometheus.MustNewConstMetric(termsDesc, prometheus.CounterValue, float64(c.terms()))
}

// Describe implements prometheus.Collector.
func (booksCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		nodesDesc, podsDesc, readyDesc, leaderDesc, reservationsDesc, expectedDesc, nodeUnitsDesc, nodeUsedDesc, unitBytesDesc,
		namespaceUsedDesc,
		deviceUnitsDesc, deviceUsedDesc, deviceFreeDesc,
	} {
		ch <- d
	}
}

// gauges is where gauges are sent.
type gauges chan<- prometheus.Metric

func (ch gauges) send(desc *prometheus.Desc, value float64, labels ...string) {
	ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
}

// deviceGauge is one of the gauges of a device, which share their labels: those of all
// devices of a large cluster take tens of megabytes until they are written.
type deviceGauge struct {
	desc   *prometheus.Desc
	labels []*dto.LabelPair
	value  float64
}

// Desc implements prometheus.Metric.
func (g deviceGauge) Desc() *prometheus.Desc { return g.desc }

// Write implements prometheus.Metric.
func (g deviceGauge) Write(m *dto.Metric) error {
	m.Label, m.Gauge = g.labels, &dto.Gauge{Value: &g.value}
	return nil
}

// Collect implements prometheus.Collector.
func (c booksCollector) Collect(out chan<- prometheus.Metric) {
	ch := gauges(out)
	size := c.size()
	ch.send(nodesDesc, float64(size.Nodes-size.BadNodes), "good")
	ch.send(nodesDesc, float64(size.BadNodes), "broken")
	ch.send(podsDesc, float64(size.Waiting), "waiting")
	ch.send(podsDesc, float64(size.Granted), "granted")
	ch.send(podsDesc, float64(size.Ungranted), "ungranted")
	ch.send(readyDesc, metrics.Bool(c.ready()))
	ch.send(leaderDesc, metrics.Bool(c.leading()))
	counts := c.ledger.Counts()
	ch.send(reservationsDesc, float64(counts.Reservations))
	ch.send(expectedDesc, float64(counts.Expected))
	for _, resource := range c.resources {
		for node := range c.ledger.Nodes(resource) {
			c.node(ch, string(resource), &node)
		}
	}
}

// node shows one node.
func (c booksCollector) node(ch gauges, resource string, node *ledger.NodeUsage) {
	ch.send(nodeUnitsDesc, float64(node.Total), node.Name, resource)
	ch.send(nodeUsedDesc, float64(node.Used), node.Name, resource)
	// A unit is written as a decimal number of GB: 0.1.
	if gb, err := strconv.ParseFloat(node.Unit, 64); err == nil {
		ch.send(unitBytesDesc, gb*(1<<30), node.Name, resource)
	}
	namespaces := map[string]accel.Units{}
	for _, pod := range node.Unplaced {
		namespaces[pod.Pod.Namespace] += pod.Units
	}
	for i := range node.Devices {
		device := &node.Devices[i]
		for _, pod := range device.Pods {
			namespaces[pod.Pod.Namespace] += pod.Units
		}
		if !c.devices {
			continue
		}
		free := max(device.Units-device.Used, 0)
		if device.Health.Unhealthy {
			free = 0
		}
		labels := prometheus.MakeLabelPairs(deviceUnitsDesc, []string{node.Name, resource, string(device.ID), strconv.Itoa(device.Index)})
		ch <- deviceGauge{deviceUnitsDesc, labels, float64(device.Units)}
		ch <- deviceGauge{deviceUsedDesc, labels, float64(device.Used)}
		ch <- deviceGauge{deviceFreeDesc, labels, float64(free)}
	}
	for namespace, units := range namespaces {
		ch.send(namespaceUsedDesc, float64(units), namespace, node.Name, resource)
	}
}

var (
	demandSeenDesc    = metrics.ExtenderDemandSeen.Desc()
	demandPodsDesc    = metrics.ExtenderDemandPods.Desc()
	demandKindsDesc   = metrics.ExtenderDemandKinds.Desc()
	priceRenewalsDesc = metrics.ExtenderPriceRenewals.Desc()
	priceTablesDesc   = metrics.ExtenderPriceTables.Desc()
	priceChangesDesc  = metrics.ExtenderPriceChanges.Desc()
	priceSecondsDesc  = metrics.ExtenderPriceRenewalSeconds.Desc()
	priceAgeDesc      = metrics.ExtenderPriceAge.Desc()
)

// Describe implements prometheus.Collector.
func (*prices) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		demandSeenDesc, demandPodsDesc, demandKindsDesc, priceRenewalsDesc, priceTablesDesc, priceChangesDesc, priceSecondsDesc,
		priceAgeDesc,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector. It waits for no renewal.
func (p *prices) Collect(ch chan<- prometheus.Metric) {
	for _, one := range p.policies {
		show := func(desc *prometheus.Desc, kind prometheus.ValueType, value float64) {
			ch <- prometheus.MustNewConstMetric(desc, kind, value, string(one.resource))
		}
		last := one.last.Load()
		never := last == nil
		if never {
			last = &renewal{}
		}
		show(demandSeenDesc, prometheus.CounterValue, float64(one.seen.Load()))
		show(priceRenewalsDesc, prometheus.CounterValue, float64(last.Renewals))
		show(priceTablesDesc, prometheus.CounterValue, float64(last.Tables))
		show(priceChangesDesc, prometheus.CounterValue, float64(last.Epoch))
		if never {
			continue
		}
		show(demandPodsDesc, prometheus.GaugeValue, last.Pods)
		show(demandKindsDesc, prometheus.GaugeValue, float64(last.Kinds))
		show(priceSecondsDesc, prometheus.GaugeValue, last.took.Seconds())
		show(priceAgeDesc, prometheus.GaugeValue, time.Since(last.at).Seconds())
	}
}
