package cluster

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/platform/metrics"
)

// Collector exports the cluster state when it is scraped, so that nothing is counted between two
// scrapes and nothing remains of what is gone.
type Collector struct {
	Size      func() Size
	Ledger    *ledger.Ledger
	Resources []accel.Resource
	// Devices exports each device; if false, nodes alone.
	Devices bool
	// Ready and Leading are those of the extender.
	Ready, Leading func() bool
}

var (
	nodesDesc         = metrics.ExtenderBooksNodes.Desc()
	podsDesc          = metrics.ExtenderBooksPods.Desc()
	readyDesc         = metrics.ExtenderReady.Desc()
	leaderDesc        = metrics.ExtenderLeader.Desc()
	reservationsDesc  = metrics.ExtenderReservations.Desc()
	oldestHeldDesc    = metrics.ExtenderOldestHeld.Desc()
	expectedDesc      = metrics.ExtenderExpected.Desc()
	nodeUnitsDesc     = metrics.ExtenderNodeUnits.Desc()
	nodeUsedDesc      = metrics.ExtenderNodeUnitsUsed.Desc()
	unitBytesDesc     = metrics.ExtenderNodeUnitBytes.Desc()
	namespaceUsedDesc = metrics.ExtenderNamespaceUnitsUsed.Desc()
	deviceUnitsDesc   = metrics.ExtenderDeviceUnits.Desc()
	deviceUsedDesc    = metrics.ExtenderDeviceUnitsUsed.Desc()
	deviceFreeDesc    = metrics.ExtenderDeviceUnitsFree.Desc()
	withheldDesc      = metrics.ExtenderDeviceUnitsWithheld.Desc()
)

// Describe implements prometheus.Collector.
func (Collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		nodesDesc, podsDesc, readyDesc, leaderDesc, reservationsDesc, oldestHeldDesc, expectedDesc, nodeUnitsDesc, nodeUsedDesc,
		unitBytesDesc, namespaceUsedDesc,
		deviceUnitsDesc, deviceUsedDesc, deviceFreeDesc, withheldDesc,
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
func (c Collector) Collect(out chan<- prometheus.Metric) {
	ch := gauges(out)
	size := c.Size()
	ch.send(nodesDesc, float64(size.Nodes-size.BadNodes), "good")
	ch.send(nodesDesc, float64(size.BadNodes), "broken")
	ch.send(podsDesc, float64(size.Waiting), "waiting")
	ch.send(podsDesc, float64(size.Granted), "granted")
	ch.send(podsDesc, float64(size.Ungranted), "ungranted")
	ch.send(readyDesc, metrics.Bool(c.Ready()))
	ch.send(leaderDesc, metrics.Bool(c.Leading()))
	counts := c.Ledger.Counts()
	ch.send(reservationsDesc, float64(counts.Reservations))
	ch.send(expectedDesc, float64(counts.Expected))
	held := time.Duration(0)
	if !counts.HeldSince.IsZero() {
		held = time.Since(counts.HeldSince)
	}
	ch.send(oldestHeldDesc, held.Seconds())
	for _, resource := range c.Resources {
		for node := range c.Ledger.Nodes(resource) {
			c.node(ch, string(resource), &node)
		}
	}
}

func (c Collector) node(ch gauges, resource string, node *ledger.NodeUsage) {
	ch.send(nodeUnitsDesc, float64(node.Total), node.Name, resource)
	ch.send(nodeUsedDesc, float64(node.Used), node.Name, resource)
	memory := make([]int64, len(node.Devices))
	for i := range node.Devices {
		memory[i] = node.Devices[i].MemoryBytes
	}
	if bytes, ok := accel.UnitBytes(node.Unit, memory); ok {
		ch.send(unitBytesDesc, bytes, node.Name, resource)
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
		if !c.Devices {
			continue
		}
		free := max(device.Units-device.Withheld-device.Used, 0)
		if device.Health.Unhealthy {
			free = 0
		}
		labels := prometheus.MakeLabelPairs(deviceUnitsDesc, []string{node.Name, resource, string(device.ID), strconv.Itoa(device.Index)})
		ch <- deviceGauge{deviceUnitsDesc, labels, float64(device.Units)}
		ch <- deviceGauge{deviceUsedDesc, labels, float64(device.Used)}
		ch <- deviceGauge{deviceFreeDesc, labels, float64(free)}
		if device.Withheld > 0 {
			ch <- deviceGauge{withheldDesc, labels, float64(device.Withheld)}
		}
	}
	for namespace, units := range namespaces {
		ch.send(namespaceUsedDesc, float64(units), namespace, node.Name, resource)
	}
}
