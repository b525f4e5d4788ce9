package extender

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/accel/ledger"
	"github.com/divvy-gpu/divvy/internal/metrics"
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
		nodesDesc, podsDesc, readyDesc, leaderDesc, reservationsDesc, expectedDesc, nodeUnitsDesc, nodeUsedDesc, unitBytesDesc, namespaceUsedDesc,
		deviceUnitsDesc, deviceUsedDesc, deviceFreeDesc,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c booksCollector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(desc *prometheus.Desc, value float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
	}
	size := c.size()
	gauge(nodesDesc, float64(size.Nodes-size.BadNodes), "good")
	gauge(nodesDesc, float64(size.BadNodes), "broken")
	gauge(podsDesc, float64(size.Waiting), "waiting")
	gauge(podsDesc, float64(size.Granted), "granted")
	gauge(podsDesc, float64(size.Ungranted), "ungranted")
	gauge(readyDesc, metrics.Bool(c.ready()))
	gauge(leaderDesc, metrics.Bool(c.leading()))
	gauge(reservationsDesc, float64(c.ledger.Reservations()))
	gauge(expectedDesc, float64(c.ledger.Expected()))
	for _, resource := range c.resources {
		for _, node := range c.ledger.Nodes(resource) {
			c.node(gauge, string(resource), &node)
		}
	}
}

// node shows one node.
func (c booksCollector) node(gauge func(*prometheus.Desc, float64, ...string), resource string, node *ledger.NodeUsage) {
	gauge(nodeUnitsDesc, float64(node.Total), node.Name, resource)
	gauge(nodeUsedDesc, float64(node.Used), node.Name, resource)
	// A unit is written as a decimal number of GB: 0.1.
	if gb, err := strconv.ParseFloat(node.Unit, 64); err == nil {
		gauge(unitBytesDesc, gb*(1<<30), node.Name, resource)
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
		labels := []string{node.Name, resource, string(device.ID), strconv.Itoa(device.Index)}
		gauge(deviceUnitsDesc, float64(device.Units), labels...)
		gauge(deviceUsedDesc, float64(device.Used), labels...)
		gauge(deviceFreeDesc, float64(free), labels...)
	}
	for namespace, units := range namespaces {
		gauge(namespaceUsedDesc, float64(units), namespace, node.Name, resource)
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
		demandSeenDesc, demandPodsDesc, demandKindsDesc, priceRenewalsDesc, priceTablesDesc, priceChangesDesc, priceSecondsDesc, priceAgeDesc,
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
