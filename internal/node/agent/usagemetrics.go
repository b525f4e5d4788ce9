package agent

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/overuse"
	defs "github.com/divvy-gpu/divvy/internal/platform/metrics"
)

// usageMetrics show the last report of measured use. It is safe for concurrent use.
type usageMetrics struct {
	level    config.UsageMetrics
	errors   *prometheus.CounterVec
	duration *prometheus.HistogramVec

	mu sync.Mutex
	// shown are replaced as a whole, so that a scrape sees one report and nothing of what
	// has ended.
	shown *usageGauges
}

// newUsageMetrics registers the metrics with those of the agent.
func newUsageMetrics(m *metrics, level config.UsageMetrics) *usageMetrics {
	u := &usageMetrics{level: level, errors: defs.NodeUsageErrors.NewCounters(), duration: defs.NodeUsagePassDuration.NewHistograms(),
		shown: newUsageGauges()}
	m.register(u.errors)
	m.register(u.duration)
	m.register(u)
	return u
}

// show replaces what is shown by a report, which may be empty, and the episodes of overuse.
func (u *usageMetrics) show(r wire.UsageReport, over []overuse.Episode) {
	g := newUsageGauges()
	for _, e := range over {
		g.addOveruse(e, u.level)
	}
	for _, d := range r.Devices {
		g.add(d, u.level)
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.shown = g
}

// Describe implements prometheus.Collector.
func (u *usageMetrics) Describe(to chan<- *prometheus.Desc) {
	u.gauges().each(func(v *prometheus.GaugeVec) { v.Describe(to) })
}

// Collect implements prometheus.Collector.
func (u *usageMetrics) Collect(to chan<- prometheus.Metric) {
	u.gauges().each(func(v *prometheus.GaugeVec) { v.Collect(to) })
}

func (u *usageMetrics) gauges() *usageGauges {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.shown
}

// usageGauges are the gauges of one report.
type usageGauges struct {
	container, namespace     amounts
	deviceUsed, unattributed *prometheus.GaugeVec
	// containerOver and namespaceOver are those of containers that use more than their
	// allocation.
	containerOver, namespaceOver *prometheus.GaugeVec
}

// amounts are the gauges of containers, or of namespaces.
type amounts struct{ used, allocated, utilization *prometheus.GaugeVec }

func newUsageGauges() *usageGauges {
	return &usageGauges{
		container: amounts{defs.NodeContainerMemoryUsed.NewGauges(), defs.NodeContainerMemoryAllocated.NewGauges(),
			defs.NodeContainerUtilization.NewGauges()},
		namespace: amounts{defs.NodeNamespaceMemoryUsed.NewGauges(), defs.NodeNamespaceMemoryAllocated.NewGauges(),
			defs.NodeNamespaceUtilization.NewGauges()},
		deviceUsed: defs.NodeDeviceMemoryUsed.NewGauges(), unattributed: defs.NodeDeviceMemoryUnattributed.NewGauges(),
		containerOver: defs.NodeContainerOveruse.NewGauges(), namespaceOver: defs.NodeNamespaceOveruse.NewGauges(),
	}
}

func (g *usageGauges) each(do func(*prometheus.GaugeVec)) {
	for _, v := range []*prometheus.GaugeVec{g.container.used, g.container.allocated, g.container.utilization,
		g.namespace.used, g.namespace.allocated, g.namespace.utilization, g.deviceUsed, g.unattributed,
		g.containerOver, g.namespaceOver} {
		do(v)
	}
}

// add adds a device. What is not known of it has no series.
func (g *usageGauges) add(d wire.DeviceUsage, level config.UsageMetrics) {
	if d.Problem != "" {
		return
	}
	device, index := string(d.Device), accel.IndexText(d.Index)
	g.deviceUsed.WithLabelValues(d.Vendor, device, index).Set(float64(d.UsedBytes))
	for kind, bytes := range map[string]uint64{"system": d.SystemBytes, "foreign": d.ForeignBytes, "unknown": d.UnknownBytes} {
		g.unattributed.WithLabelValues(d.Vendor, device, index, kind).Set(float64(bytes))
	}
	switch level {
	case config.UsageMetricsContainer:
		for _, c := range d.Containers {
			g.container.set(amountOf(c), string(c.Resource), device, index, c.Namespace, c.Pod, c.Container)
		}
	case config.UsageMetricsNamespace:
		type key struct{ resource, namespace string }
		parts := map[key][]wire.ContainerUsage{}
		for _, c := range d.Containers {
			k := key{string(c.Resource), c.Namespace}
			parts[k] = append(parts[k], c)
		}
		for k, some := range parts {
			g.namespace.set(amountOf(some...), k.resource, device, index, k.namespace)
		}
	case config.UsageMetricsNone:
	}
}

// addOveruse adds a container that uses more than its allocation.
func (g *usageGauges) addOveruse(e overuse.Episode, level config.UsageMetrics) {
	c, device, index := e.Container, string(e.Device), accel.IndexText(e.Index)
	switch level {
	case config.UsageMetricsContainer:
		g.containerOver.WithLabelValues(string(c.Resource), device, index, c.Namespace, c.Pod, c.Container).Set(1)
	case config.UsageMetricsNamespace:
		g.namespaceOver.WithLabelValues(string(c.Resource), device, index, c.Namespace).Inc()
	case config.UsageMetricsNone:
	}
}

// amount is what containers have of a device; nil for what is not known.
type amount struct {
	used, allocated, utilization *float64
}

// amountOf sums up what containers have. A sum is known if it is of each of them: processes of
// which only the pod is known hold nothing themselves, and where there is no process, nothing
// uses compute time.
func amountOf(all ...wire.ContainerUsage) amount {
	sum := func(of func(wire.ContainerUsage) *float64, counts func(wire.ContainerUsage) bool) (out *float64) {
		for _, c := range all {
			switch value := of(c); {
			case !counts(c):
			case value == nil:
				return nil
			case out == nil:
				out = value
			default:
				out = new(*out + *value)
			}
		}
		return out
	}
	return amount{
		used:      sum(func(c wire.ContainerUsage) *float64 { return float(c.UsedBytes) }, func(wire.ContainerUsage) bool { return true }),
		allocated: sum(func(c wire.ContainerUsage) *float64 { return float(c.AllocatedBytes) }, holds),
		utilization: sum(func(c wire.ContainerUsage) *float64 { return c.Utilization },
			func(c wire.ContainerUsage) bool { return c.Processes > 0 || c.Utilization != nil }),
	}
}

// holds reports whether the container is known, and so what it holds.
func holds(c wire.ContainerUsage) bool { return c.Container != "" }

// set shows an amount.
func (g amounts) set(a amount, labels ...string) {
	for _, one := range []struct {
		to    *prometheus.GaugeVec
		value *float64
	}{{g.used, a.used}, {g.allocated, a.allocated}, {g.utilization, a.utilization}} {
		if one.value != nil {
			one.to.WithLabelValues(labels...).Set(*one.value)
		}
	}
}

func float(n *uint64) *float64 {
	if n == nil {
		return nil
	}
	return new(float64(*n))
}
