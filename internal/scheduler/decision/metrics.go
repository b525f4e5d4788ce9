package decision

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	defs "github.com/divvy-gpu/divvy/internal/platform/metrics"
)

// Values of the label verb, as the extender names them.
const (
	verbFilter     = "filter"
	verbPreempt    = "preempt"
	verbPrioritize = "prioritize"
	verbBind       = "bind"
)

// Values of the label resource where a pod asks for none of those that are managed,
// or for several.
const (
	resourceNone    = "none"
	resourceSeveral = "several"
)

// Values of the label result of the pods that were woken.
const (
	wokenOK     = "ok"
	wokenGone   = "gone"
	wokenFailed = "failed"
)

// verdictSeveral is the verdict on nodes that were rejected because the pod asks
// for several resources.
const verdictSeveral = "severalResources"

// codes are the verdicts that filter may give a node, by their label.
const codes = accel.Unservable + 1

// metrics are what a Decider counts. They are always counted, and shown
// when there is a registry. What the hot path counts was looked up by its labels
// at the start.
type metrics struct {
	resources  map[accel.Resource]*resourceMetrics
	several    *resourceMetrics
	bindErrors *prometheus.CounterVec // by cause
	woken      *prometheus.CounterVec // by result
}

// resourceMetrics are the decisions about pods that ask for one resource.
type resourceMetrics struct {
	fits, refused, rated, bound, failed prometheus.Counter
	evicts, spares                      prometheus.Counter
	verdicts                            [codes]prometheus.Counter
	several                             prometheus.Counter
}

func newMetrics(registry prometheus.Registerer, resources []accel.Resource, waiting func() int) (*metrics, error) {
	decisions, verdicts := defs.ExtenderDecisions.NewCounters(), defs.ExtenderNodeVerdicts.NewCounters()
	m := &metrics{
		resources:  map[accel.Resource]*resourceMetrics{},
		bindErrors: defs.ExtenderBindErrors.NewCounters(), woken: defs.ExtenderWoken.NewCounters(),
	}
	of := func(resource string) *resourceMetrics {
		with := func(verb, result string) prometheus.Counter { return decisions.WithLabelValues(verb, resource, result) }
		return &resourceMetrics{
			fits: with(verbFilter, "fits"), refused: with(verbFilter, "refused"), evicts: with(verbPreempt, "evicts"),
			spares: with(verbPreempt, "spares"), rated: with(verbPrioritize, "rated"), bound: with(verbBind, "bound"),
			failed: with(verbBind, "failed"),
		}
	}
	for _, r := range resources {
		one := of(string(r))
		for code := range codes {
			one.verdicts[code] = verdicts.WithLabelValues(string(r), codeName(code))
		}
		m.resources[r] = one
	}
	none := of(resourceNone)
	none.verdicts[accel.Fits] = verdicts.WithLabelValues(resourceNone, codeName(accel.Fits))
	m.resources[resourceNone] = none
	m.several = of(resourceSeveral)
	m.several.several = verdicts.WithLabelValues(resourceSeveral, verdictSeveral)
	for _, cause := range bindCauses {
		m.bindErrors.WithLabelValues(cause.label) // so that it is there before it happens
	}
	m.bindErrors.WithLabelValues(otherCause)
	for _, result := range []string{wokenOK, wokenGone, wokenFailed} {
		m.woken.WithLabelValues(result)
	}
	remembered := defs.ExtenderWaiting.NewGaugeFunc(nil, func() float64 { return float64(waiting()) })
	if registry == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{decisions, verdicts, m.bindErrors, m.woken, remembered} {
		if err := registry.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func (m *metrics) of(requests []accel.Request) *resourceMetrics {
	if len(requests) > 1 {
		return m.several
	}
	if len(requests) == 1 {
		if one := m.resources[requests[0].Resource]; one != nil {
			return one
		}
	}
	return m.resources[resourceNone]
}

func (m *resourceMetrics) filtered(fit int, counts *[codes]int) {
	if fit > 0 {
		m.fits.Inc()
	} else {
		m.refused.Inc()
	}
	for code, n := range counts {
		if n > 0 {
			m.verdicts[code].Add(float64(n))
		}
	}
}

// binds counts a bind.
func (m *metrics) binds(requests []accel.Request, err error) {
	if err == nil {
		m.of(requests).bound.Inc()
		return
	}
	m.of(requests).failed.Inc()
	m.bindErrors.WithLabelValues(bindCause(err)).Inc()
}
