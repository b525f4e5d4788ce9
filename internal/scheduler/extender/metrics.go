package extender

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	defs "github.com/divvy-gpu/divvy/internal/platform/metrics"
)

// Values of the label verb.
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

// metrics are what the extender counts. They are always counted, and shown
// when there is a registry. What the hot path counts was looked up by its labels
// at the start.
type metrics struct {
	verbs      map[string]*verbMetrics
	resources  map[accel.Resource]*resourceMetrics
	several    *resourceMetrics
	forwarded  *prometheus.CounterVec // by result
	bindErrors *prometheus.CounterVec // by cause
	panics     prometheus.Counter
	woken      *prometheus.CounterVec // by result
}

// verbMetrics are those of one verb.
type verbMetrics struct {
	ok, failed prometheus.Counter
	duration   prometheus.Observer
	inFlight   prometheus.Gauge
}

// resourceMetrics are the decisions about pods that ask for one resource.
type resourceMetrics struct {
	fits, refused, rated, bound, failed prometheus.Counter
	evicts, spares                      prometheus.Counter
	verdicts                            [codes]prometheus.Counter
	several                             prometheus.Counter
}

func newMetrics(registry prometheus.Registerer, resources []accel.Resource, waiting func() int) (*metrics, error) {
	requests, duration, inFlight := defs.ExtenderRequests.NewCounters(), defs.ExtenderRequestDuration.NewHistograms(),
		defs.ExtenderRequestsInFlight.NewGauges()
	decisions, verdicts := defs.ExtenderDecisions.NewCounters(), defs.ExtenderNodeVerdicts.NewCounters()
	m := &metrics{
		verbs: map[string]*verbMetrics{}, resources: map[accel.Resource]*resourceMetrics{},
		bindErrors: defs.ExtenderBindErrors.NewCounters(), panics: defs.ExtenderPanics.NewCounter(),
		woken: defs.ExtenderWoken.NewCounters(), forwarded: defs.ExtenderForwarded.NewCounters(),
	}
	for _, verb := range []string{verbFilter, verbPreempt, verbPrioritize, verbBind} {
		m.verbs[verb] = &verbMetrics{
			ok: requests.WithLabelValues(verb, "ok"), failed: requests.WithLabelValues(verb, "error"),
			duration: duration.WithLabelValues(verb), inFlight: inFlight.WithLabelValues(verb),
		}
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
	for _, c := range []prometheus.Collector{m.forwarded, requests, duration, inFlight, decisions, verdicts, m.bindErrors, m.panics,
		m.woken, remembered} {
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

func (m *verbMetrics) observe(err error, took time.Duration) {
	if err != nil {
		m.failed.Inc()
	} else {
		m.ok.Inc()
	}
	m.duration.Observe(took.Seconds())
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
