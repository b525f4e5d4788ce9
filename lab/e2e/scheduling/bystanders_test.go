//go:build e2e

package scheduling

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/lab/internal/controlplane"
	"github.com/divvy-gpu/divvy/lab/internal/simnodes"
)

const (
	// bystandersVariable is how many pods are measured for each case: "make bystanders"
	// sets it, with all tests there are few.
	bystandersVariable = "BYSTANDERS"
	fewBystanders      = 150
	// betweenBystanders is the time between two of them, waitingPods how many pods wait
	// for an accelerator meanwhile.
	betweenBystanders = 100 * time.Millisecond
	waitingPods       = 50
	// A bystander may take, at the 99th percentile, as much longer than without Divvy as
	// the larger of these says.
	slowdown   = 1.5
	slowdownBy = 50 * time.Millisecond
	// With few pods, on a machine that runs other tests, some of them decide about a
	// percentile. A pod that waits for the extender to time out still exceeds this, because
	// it also waits for the pods before it.
	fewSlowdown   = 2.0
	fewSlowdownBy = 2 * time.Second
)

// outage is something that happens to the extenders while bystanders are placed.
type outage struct {
	name string
	// strike makes that no replica leads, from now on; nil where one goes on to lead.
	strike func(leader, follower *replica) error
	// writes is how long the API server takes for each write.
	writes time.Duration
	// long is left out where few pods are measured.
	long bool
}

var outages = []outage{
	{name: "the leader is killed", strike: func(leader, follower *replica) error {
		follower.api.cut()
		return leader.Kill()
	}},
	{name: "the network to the leader is cut", strike: func(leader, follower *replica) error {
		follower.api.cut()
		leader.cut()
		return nil
	}},
	{name: "a write takes 1 s", writes: time.Second, long: true},
	{name: "a write takes 2 s", writes: 2 * time.Second, long: true},
	{name: "a write takes 5 s", writes: 5 * time.Second},
}

// TestBystanders measures how long pods wait for their node that request no
// accelerator, while the extender is in trouble and pods that do request one wait for
// it. kube-scheduler asks the extender in the same loop in which it places all pods.
func TestBystanders(t *testing.T) {
	count, factor, allowed, share := fewBystanders, fewSlowdown, fewSlowdownBy, 0.95
	if text := os.Getenv(bystandersVariable); text != "" {
		var err error
		if count, err = strconv.Atoi(text); err != nil || count < 100 {
			t.Fatalf("%s=%q: want a number of pods, 100 or more", bystandersVariable, text)
		}
		factor, allowed, share = slowdown, slowdownBy, 0.99
	}
	var table strings.Builder
	columns := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	p := fmt.Sprintf("p%.0f", 100*share)
	fmt.Fprintf(columns, "case\tpods\twithout Divvy p50\t%s\twith Divvy p50\t%s\tat most\tlongest\ttime without a leader\n", p, p)
	without := map[time.Duration]times{}
	for _, o := range outages {
		if o.long && count == fewBystanders {
			continue
		}
		t.Run(o.name, func(t *testing.T) {
			base, known := without[o.writes]
			if !known {
				base, _ = bystanders(t, o, count, false)
				without[o.writes] = base
			}
			got, leaderless := bystanders(t, o, count, true)
			slow, before := got.at(share), base.at(share)
			limit := max(time.Duration(float64(before)*factor), before+allowed)
			fmt.Fprintf(columns, "%s\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t%.0f %%\n", o.name, len(got), base.at(0.5), before, got.at(0.5), slow,
				limit, got.at(1), 100*leaderless)
			if slow > limit {
				t.Errorf("of the pods that request no accelerator %s waited %s or longer, %s without Divvy: more than %s", p, slow, before,
					limit)
			}
		})
	}
	if err := columns.Flush(); err != nil {
		t.Fatal(err)
	}
	t.Logf("bystanders: time from creation to binding of pods that request no accelerator, while %d pods wait for one\n%s", waitingPods,
		&table)
}

// times are how long pods waited, in ascending order.
type times []time.Duration

// at returns a quantile.
func (t times) at(share float64) time.Duration {
	return t[min(int(share*float64(len(t))), len(t)-1)].Round(100 * time.Microsecond)
}

// bystanders runs one side of a case.
func bystanders(t *testing.T, o outage, count int, divvy bool) (got times, leaderless float64) {
	t.Helper()
	w := newWorld(t, simnodes.Group{Count: 100, Units: 128})
	if err := w.nodes.Create(t.Context(), w.client); err != nil {
		t.Fatal(err)
	}
	options := controlplane.SchedulerOptions{Name: "default-scheduler"}
	var r *replicas
	if divvy {
		if o.writes > 0 {
			r = newReplicas(w, "--kubeconfig="+w.slowWrites("slow-extender", o.writes))
		} else {
			r = newReplicas(w)
		}
		r.leader()
		options.Extender = r.entry()
	}
	if o.writes > 0 {
		options.Kubeconfig = w.slowWrites("slow-scheduler", o.writes)
	}
	s, err := w.plane.StartScheduler(t.Context(), programs.Kubernetes, options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.end(s.Process) })

	if !divvy {
		return w.measure(count), 0
	}
	ctx, stop := context.WithCancel(t.Context())
	var beside sync.WaitGroup
	beside.Go(func() { w.keepWaiting(ctx) })
	leader := r.leader()
	if o.strike != nil {
		if err := o.strike(leader, r.other(leader)); err != nil {
			t.Fatal(err)
		}
	}
	var watched, without int
	beside.Go(func() {
		for ; ctx.Err() == nil; watched++ {
			// One that was cut off does not know for a while that it must not lead.
			if now := r.leading(ctx); now == nil || o.strike != nil && now == leader {
				without++
			}
			time.Sleep(100 * time.Millisecond)
		}
	})
	got = w.measure(count)
	stop()
	beside.Wait()
	if o.strike == nil {
		for _, one := range r.all {
			if terms := w.terms(one); terms > 1 {
				t.Errorf("%s began to lead %d times, where the API server is slow and not away", one.Name(), terms)
			}
		}
		if bound := w.boundWaiting(); bound == 0 {
			t.Error("no pod that requests an accelerator was bound")
		}
	}
	return got, float64(without) / float64(watched)
}

// measure creates pods that request nothing of Divvy's, and returns how long each of
// them waited for its node.
func (w *world) measure(count int) times {
	w.Helper()
	const prefix = "bystander-"
	pods := w.client.CoreV1().Pods(namespace)
	ctx, stop := context.WithTimeout(w.Context(), time.Duration(count)*betweenBystanders+patience)
	defer stop()
	follow, err := pods.Watch(ctx, metav1.ListOptions{LabelSelector: "bystander"})
	if err != nil {
		w.Fatal(err)
	}
	defer follow.Stop()
	created := make(chan map[string]time.Time, 1)
	go func() {
		at := map[string]time.Time{}
		defer func() { created <- at }()
		tick := time.NewTicker(betweenBystanders)
		defer tick.Stop()
		for n := range count {
			<-tick.C
			pod := w.nodes.Pod(namespace, fmt.Sprintf("%s%05d", prefix, n), 0)
			pod.Labels = map[string]string{"bystander": "true"}
			// kube-scheduler asks the extender about a request of 0 as well.
			delete(pod.Spec.Containers[0].Resources.Requests, resource)
			delete(pod.Spec.Containers[0].Resources.Limits, resource)
			now := time.Now()
			if _, err := pods.Create(ctx, pod, metav1.CreateOptions{}); err != nil {
				w.Errorf("pod %d: %v", n, err)
				return
			}
			at[pod.Name] = now
		}
	}()
	bound := map[string]time.Time{}
	for event := range follow.ResultChan() {
		if pod, ok := event.Object.(*corev1.Pod); ok && pod.Spec.NodeName != "" {
			if _, seen := bound[pod.Name]; !seen {
				bound[pod.Name] = time.Now()
			}
		}
		if len(bound) == count {
			break
		}
	}
	at := <-created
	var out times
	for name, when := range at {
		if since, ok := bound[name]; ok {
			out = append(out, since.Sub(when))
		}
	}
	if len(out) != count {
		w.Fatalf("%d of %d pods that request no accelerator were bound", len(out), count)
	}
	slices.Sort(out)
	return out
}

// keepWaiting makes as many pods that request an accelerator as are missing to
// waitingPods, until ctx ends.
func (w *world) keepWaiting(ctx context.Context) {
	for made := 0; ctx.Err() == nil; {
		list, err := w.client.CoreV1().Pods(namespace).List(ctx,
			metav1.ListOptions{LabelSelector: "waits", ResourceVersion: "0", FieldSelector: "spec.nodeName="})
		for n := 0; err == nil && n < waitingPods-len(list.Items); n++ {
			pod := w.nodes.Pod(namespace, fmt.Sprintf("waits-%05d", made), 1)
			pod.Labels = map[string]string{"waits": "true"}
			_, err = w.client.CoreV1().Pods(namespace).Create(ctx, pod, metav1.CreateOptions{})
			made++
		}
		if err != nil && ctx.Err() == nil {
			w.Errorf("pods that wait: %v", err)
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(250 * time.Millisecond):
		}
	}
}

// boundWaiting counts the pods of keepWaiting that were bound.
func (w *world) boundWaiting() (bound int) {
	for _, pod := range w.pods() {
		if pod.Labels["waits"] != "" && pod.Spec.NodeName != "" {
			bound++
		}
	}
	return bound
}

// terms is how often a replica began to lead.
func (w *world) terms(r *replica) int {
	w.Helper()
	terms, err := counter(w.Context(), r.Extender.Metrics, "divvy_extender_terms_total")
	if err != nil {
		w.Fatal(err)
	}
	return terms
}

// slowWrites starts a proxy before the API server that keeps each write back, and
// returns the path of a kubeconfig file for it.
func (w *world) slowWrites(name string, wait time.Duration) string {
	w.Helper()
	return w.before(name, func(proxy http.Handler) http.Handler {
		return http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
			if r.Method != http.MethodGet {
				select {
				case <-time.After(wait):
				case <-r.Context().Done():
				}
			}
			proxy.ServeHTTP(out, r)
		})
	})
}
