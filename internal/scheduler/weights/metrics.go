package weights

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/divvy-gpu/divvy/internal/platform/metrics"
)

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
func (*Policy) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		demandSeenDesc, demandPodsDesc, demandKindsDesc, priceRenewalsDesc, priceTablesDesc, priceChangesDesc, priceSecondsDesc,
		priceAgeDesc,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector. It waits for no renewal.
func (p *Policy) Collect(ch chan<- prometheus.Metric) {
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
