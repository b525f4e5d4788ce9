package eviction

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/platform/metrics"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
)

const (
	// passEvery is how often the lists are looked at.
	passEvery = 5 * time.Second
	// evictTimeout bounds a call of the API server. client-go repeats a call by itself while
	// a budget is being processed.
	evictTimeout = 5 * time.Second
	// passTimeout bounds a pass: with an API server that is slow to evict, the lists are old
	// after that.
	passTimeout = 20 * time.Second
)

// Cluster is what the decision needs of the cluster. cluster.Overuse is one.
type Cluster interface {
	Lists() map[string]string
	Pod(node string, ref accel.PodRef, resource accel.Resource, device accel.DeviceID) (cluster.OverusingPod, bool)
}

// Config is what an Evictor needs; all fields but Now are required.
type Config struct {
	Settings Settings
	Client   kubernetes.Interface
	Cluster  Cluster
	// Leading reports whether this process may evict: it leads, and knows all pods.
	Leading func() bool
	// Tell makes an event on a pod, once for a key.
	Tell func(pod accel.PodRef, kind events.Kind, key, message string)
	// Now is the clock; time.Now when nil. It must be monotonic.
	Now func() time.Time
}

// Evictor evicts pods that use more memory of a device than their allocation. It is a
// prometheus.Collector of what became of such pods.
type Evictor struct {
	config   Config
	history  *History
	outcomes *prometheus.CounterVec
}

// New returns an Evictor, which evicts nothing before Run.
func New(c Config) *Evictor {
	if c.Now == nil {
		c.Now = time.Now
	}
	e := &Evictor{config: c, history: NewHistory(), outcomes: metrics.ExtenderEvictions.NewCounters()}
	for _, outcome := range []Outcome{Evicted, Exempt, RateLimit, Budget, SeveralBudgets, Gone, Failed} {
		e.outcomes.WithLabelValues(string(outcome))
	}
	return e
}

// Describe implements prometheus.Collector.
func (e *Evictor) Describe(ch chan<- *prometheus.Desc) { e.outcomes.Describe(ch) }

// Collect implements prometheus.Collector.
func (e *Evictor) Collect(ch chan<- prometheus.Metric) { e.outcomes.Collect(ch) }

// Run evicts until the context ends. It may be called once.
func (e *Evictor) Run(ctx context.Context) {
	ticker := time.NewTicker(passEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			e.pass(ctx)
		}
	}
}

// pass looks at all lists once.
func (e *Evictor) pass(ctx context.Context) {
	if !e.config.Leading() {
		e.history.Restart()
		return
	}
	began, lists := e.config.Now(), e.config.Cluster.Lists()
	for node, err := range e.history.See(began, lists) {
		klog.FromContext(ctx).Error(err, "Ignoring the node's list of memory overuse", "node", node)
	}
	for _, node := range e.history.Nodes() {
		candidates, past := e.history.Candidates(node)
		for i := range candidates {
			c := &candidates[i]
			c.OverusingPod, c.Confirmed = e.config.Cluster.Pod(node, c.Pod, c.Resource, c.Device)
		}
		for _, v := range Decide(e.config.Now(), candidates, past, e.config.Settings) {
			if v.Outcome == Evicted {
				if ctx.Err() != nil || !e.config.Leading() || e.config.Now().Sub(began) >= passTimeout {
					return
				}
				if e.config.Cluster.Lists()[node] != lists[node] {
					break // it was written meanwhile
				}
				v.Outcome, v.Why = e.evict(ctx, v.Pod)
			}
			e.record(ctx, node, v)
		}
	}
}

// evict calls the Eviction API, and returns what became of the pod and, where it is not
// evicted, why. The pod's own grace period applies.
func (e *Evictor) evict(ctx context.Context, pod accel.PodRef) (Outcome, string) {
	ctx, cancel := context.WithTimeout(ctx, evictTimeout)
	defer cancel()
	uid := types.UID(pod.UID)
	err := e.config.Client.PolicyV1().Evictions(pod.Namespace).Evict(ctx, &policyv1.Eviction{
		ObjectMeta:    metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name},
		DeleteOptions: &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}},
	})
	return outcomeOf(err)
}

// outcomeOf reads the answer of the Eviction API. A budget is named as the cause, mostly with
// code 429, which an overloaded API server answers as well.
func outcomeOf(err error) (outcome Outcome, why string) {
	cause, budget := apierrors.StatusCause(err, policyv1.DisruptionBudgetCause)
	switch {
	case err == nil:
		return Evicted, ""
	case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		return Gone, "it no longer exists"
	case budget:
		return Budget, "its PodDisruptionBudget does not allow it: " + cause.Message
	case severalBudgets(err):
		return SeveralBudgets, "it has several PodDisruptionBudgets, and the Eviction API evicts no such pod"
	}
	return Failed, err.Error()
}

// severalBudgets reports whether the API server rejects the eviction because of more than one
// budget. Its answer has no reason, unlike other answers with that code.
func severalBudgets(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return false
	}
	s := status.Status()
	return s.Code == http.StatusInternalServerError && s.Reason == metav1.StatusReasonUnknown &&
		strings.Contains(s.Message, "PodDisruptionBudget")
}

// record notes an outcome, and reports it: attempts each time, and to the pod's owner once
// in an episode.
func (e *Evictor) record(ctx context.Context, node string, v Verdict) {
	first := e.history.Record(e.config.Now(), node, &v.Overuse, v.Outcome)
	attempted := v.Outcome != Exempt && v.Outcome != RateLimit
	if first || attempted {
		e.outcomes.WithLabelValues(string(v.Outcome)).Inc()
	}
	log := klog.FromContext(ctx).WithValues("pod", v.Pod.String(), "node", node, "device", v.Device, "resource", v.Resource,
		"usedBytes", v.UsedBytes, "allocatedBytes", v.AllocatedBytes, "since", v.Since)
	// Without Since: the recorder repeats no event for a while, however often a library fails.
	key := fmt.Sprintf("%s %s %s", v.Outcome, v.Container, v.Device)
	switch {
	case v.Outcome == Evicted:
		log.Info("Evicted a pod that uses more memory of a device than its allocation")
		e.config.Tell(v.Pod, events.MemoryOveruseEvicted, key, uses(&v.Overuse)+
			"; the pod is evicted. Request more memory, or limit what the program uses.")
	case v.Outcome == Gone:
	case first:
		log.Info("Not evicting a pod that uses more memory of a device than its allocation", "reason", v.Why)
		e.config.Tell(v.Pod, events.MemoryOveruseNotEvicted, key, uses(&v.Overuse)+"; the pod is not evicted, because "+v.Why+".")
	}
}

// uses says what the list says, for people.
func uses(o *wire.Overuse) string {
	who := "The pod"
	if o.Container != "" {
		who = "Container " + o.Container
	}
	return fmt.Sprintf("%s uses %d MiB of device %s; its allocation of %s is %d MiB, since %s", who, o.UsedBytes>>20, o.Device,
		o.Resource, o.AllocatedBytes>>20, o.Since.UTC().Format(time.RFC3339))
}
