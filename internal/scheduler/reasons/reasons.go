// Package reasons writes onto a pod why it waits where kube-scheduler's sums hide it: a
// condition of the pod, and one event for each reason. kube-scheduler asks no extender about a
// node on which the sum is too small, so it would say "Insufficient enflame.com/gcu-memory" for
// a request that no device can ever hold.
//
// A Teller does so while this process leads. The condition on the pod is the only memory of
// what was said, so another leader, and the same one after a restart, say nothing again.
package reasons

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/cause"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/platform/metrics"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
)

const (
	// passEvery is how often the pods that wait are looked at.
	passEvery = 2 * time.Second
	// settleAfter is how long a reason must hold before it is said: most pods wait for a
	// moment only.
	settleAfter = 5 * time.Second
	// changeAfter is how long what was said stays while the pod waits, whatever holds by then:
	// pods come and go, and an event for each would be a flood.
	changeAfter = 5 * time.Minute
	// writesAtOnce bounds the pods that are written in a pass: 5 a second.
	writesAtOnce = 10
	// asksAtOnce bounds the different requests that are checked in a pass, each against all
	// nodes. With 5000 nodes of 8 devices one takes 3 ms, so all of it 1 % of a processor.
	asksAtOnce = 4
	// retryAfter is how long a pod that could not be written is left alone, twice as long after
	// each time, and retryMax how long at most.
	retryAfter = time.Minute
	retryMax   = time.Hour
	// writeTimeout bounds one request to the API server.
	writeTimeout = 2 * time.Second
)

// Writer writes the condition; a reason of "" removes it. *cluster.Binder is one.
type Writer interface {
	Say(ctx context.Context, pod accel.PodRef, reason, message string) error
}

// Config is what a Teller needs; all of it but Now is required.
type Config struct {
	// Hindered returns the pods for which something is to be said, or was, and Offering the
	// nodes that publish devices.
	Hindered func() []cluster.Pod
	Offering func() []string
	Ledger   *ledger.Ledger
	Writer   Writer
	// Tell makes an event on a pod, once for each pod and kind, and reports whether it is made.
	Tell func(pod accel.PodRef, kind events.Kind, message string) bool
	// Leading reports whether this process may say something: it leads, and knows all pods.
	Leading func() bool
	// Now is the clock; time.Now when nil.
	Now func() time.Time
}

// Teller says why pods wait. It is a prometheus.Collector of what it wrote.
type Teller struct {
	config  Config
	written *prometheus.CounterVec // by result
	// unsaid are the pods whose reason is not said yet, by UID.
	unsaid map[string]unsaid
	// short is what sums hide of the requests of the last round, by what askOf says, and turn
	// the requests that the present round has not come to.
	short map[string]cause.Shortage
	turn  []string
}

// unsaid is a reason since it was first seen, and how often the pod could not be written, which
// is left alone until then.
type unsaid struct {
	code     cause.Code
	since    time.Time
	failures int
	until    time.Time
	// written is whether the pod was written and the watch does not show that yet, only what it
	// said before.
	written bool
	before  string
}

// Values of the label result.
const (
	resultSaid    = "said"
	resultRemoved = "removed"
	resultGone    = "gone"
	resultFailed  = "failed"
)

// New returns a Teller, which says nothing before Run.
func New(c Config) *Teller {
	if c.Now == nil {
		c.Now = time.Now
	}
	t := &Teller{config: c, written: metrics.ExtenderReasons.NewCounters(), unsaid: map[string]unsaid{}, short: map[string]cause.Shortage{}}
	for _, result := range []string{resultSaid, resultRemoved, resultGone, resultFailed} {
		t.written.WithLabelValues(result)
	}
	return t
}

// Describe implements prometheus.Collector.
func (t *Teller) Describe(ch chan<- *prometheus.Desc) { t.written.Describe(ch) }

// Collect implements prometheus.Collector.
func (t *Teller) Collect(ch chan<- prometheus.Metric) { t.written.Collect(ch) }

// Run says reasons until the context ends. It may be called once.
func (t *Teller) Run(ctx context.Context) {
	ticker := time.NewTicker(passEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			t.pass(ctx)
		}
	}
}

// pass looks at all pods once.
func (t *Teller) pass(ctx context.Context) {
	if !t.config.Leading() {
		clear(t.unsaid)
		clear(t.short)
		return
	}
	pods := t.config.Hindered()
	t.look(pods)
	now := t.config.Now()
	left := writesAtOnce
	all := make(map[string]unsaid, len(pods))
	// A pod that could not be written comes after the others, and what is to go before what is
	// to be said; of these the one that waits longest is first.
	slices.SortFunc(pods, func(a, b cluster.Pod) int {
		x, y := t.unsaid[a.Ref.UID], t.unsaid[b.Ref.UID]
		return cmp.Or(cmp.Compare(x.failures, y.failures), cmp.Compare(bound(&b), bound(&a)), x.since.Compare(y.since),
			a.Created.Compare(b.Created), cmp.Compare(a.Ref.UID, b.Ref.UID))
	})
	for i := range pods {
		p := &pods[i]
		u := t.unsaid[p.Ref.UID]
		if u.written && p.Said.Reason != u.before {
			u = unsaid{}
		}
		code, known := t.causeOf(p)
		switch {
		case !known:
			all[p.Ref.UID] = u
			continue
		case code.Reason() == p.Said.Reason:
			continue
		}
		if u.since.IsZero() || u.code != code {
			u.code, u.since = code, now
		}
		if left > 0 && !now.Before(u.until) && due(p, code, now.Sub(u.since), now) {
			left--
			switch err := t.say(ctx, p, code); {
			case errors.Is(err, errLater):
				left = 0
			case err != nil:
				u.until = now.Add(min(retryAfter<<min(u.failures, 10), retryMax))
				u.failures++
				if !cluster.Refused(err) {
					left = 0 // the API server is not there for now
				}
			default:
				// Each write makes kube-scheduler look at the pod again, so a watch that lags
				// must not lead to the same one in every pass.
				u = unsaid{code: code, since: u.since, until: now.Add(changeAfter), written: true, before: p.Said.Reason}
			}
		}
		all[p.Ref.UID] = u
	}
	t.unsaid = all
}

// bound is 1 for a pod that has a node.
func bound(p *cluster.Pod) int {
	if p.Node != "" {
		return 1
	}
	return 0
}

// due reports whether a cause of a pod, which has held for a while, is to be said by now.
func due(p *cluster.Pod, code cause.Code, held time.Duration, now time.Time) bool {
	switch {
	case p.Node != "":
		return true // what was said goes
	case p.Said.Reason == "":
		return code != "" && held >= settleAfter
	}
	return held >= settleAfter && now.Sub(p.Said.At) >= changeAfter
}

// waits reports whether it is to be said why a pod waits. A pod that has a place, and waits for
// others to leave it, does not wait for what sums hide.
func waits(p *cluster.Pod) bool {
	return p.Said.Short && p.Node == "" && p.Nominated == "" && !p.Ending && len(p.Requests) == 1 && p.Mistake == nil
}

// causeOf returns the cause of a pod, and whether it is known by now.
func (t *Teller) causeOf(p *cluster.Pod) (code cause.Code, known bool) {
	if !waits(p) {
		return "", true
	}
	short, known := t.short[askOf(p)]
	return short.Code(p.Said.Message), known
}

// look finds what sums hide of some requests, each once in a round.
func (t *Teller) look(pods []cluster.Pod) {
	asks := map[string]accel.Request{}
	for i := range pods {
		if p := &pods[i]; waits(p) {
			asks[askOf(p)] = p.Requests[0]
		}
	}
	maps.DeleteFunc(t.short, func(ask string, _ cause.Shortage) bool { return asks[ask].Resource == "" })
	if len(asks) == 0 {
		return
	}
	if len(t.turn) == 0 {
		t.turn = slices.Sorted(maps.Keys(asks))
	}
	nodes := t.config.Offering()
	for _, ask := range t.turn[:min(asksAtOnce, len(t.turn))] {
		t.turn = t.turn[1:]
		if request := asks[ask]; request.Resource != "" {
			t.short[ask] = cause.Of(t.config.Ledger, request, nodes)
		}
	}
}

// askOf is the same for pods whose requests have the same cause.
func askOf(p *cluster.Pod) string {
	r := p.Requests[0]
	r.CPU, r.Memory = 0, 0 // no sum hides these, see cause.Of
	return r.Key()
}

// kinds are the events of causes.
var kinds = map[cause.Code]events.Kind{
	cause.LargerThanDevice:   events.NeverFits,
	cause.IsolationNotStated: events.IsolationNotStated,
	cause.HeldAsOther:        events.HeldAsOther,
	cause.NoDeviceFits:       events.NoDeviceFits,
}

// errLater says that no event can be made now.
var errLater = errors.New("too many events")

// say makes the event and writes a cause onto the pod. The event is first: a pod that has the
// condition gets no second event.
func (t *Teller) say(ctx context.Context, p *cluster.Pod, code cause.Code) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	message, result := "", resultRemoved
	if code != "" {
		message, result = cause.Sentence(code, &p.Requests[0]), resultSaid
		if !t.config.Tell(p.Ref, kinds[code], message) {
			return errLater
		}
	}
	err := t.config.Writer.Say(ctx, p.Ref, code.Reason(), message)
	switch {
	case errors.Is(err, cluster.ErrPodGone):
		result = resultGone
	case err != nil:
		result = resultFailed
		klog.FromContext(ctx).Error(err, "Could not write why a pod waits", "pod", p.Ref.String())
	}
	t.written.WithLabelValues(result).Inc()
	return err
}
