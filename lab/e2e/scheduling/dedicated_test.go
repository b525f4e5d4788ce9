//go:build e2e

package scheduling

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/lab/internal/controlplane"
	"github.com/divvy-gpu/divvy/lab/internal/simnodes"
)

// dedicatedPod is what a pod of mode dedicated runs: a kube-scheduler that leads or
// waits, and the extender that it asks, which leads or follows.
type dedicatedPod struct {
	extender  *controlplane.Extender
	scheduler *controlplane.Scheduler
}

// ownScheduler is the scheduler of the pods here.
const ownScheduler = "divvy-scheduler"

// dedicated starts such a pod, with the flags of the chart.
func (w *world) dedicated(name, kubeconfig string) dedicatedPod {
	w.Helper()
	ctx := w.Context()
	if err := w.plane.Prepare(ctx); err != nil {
		w.Fatal(err)
	}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: controlplane.Namespace, Name: name},
		Spec: corev1.PodSpec{SchedulerName: "nobody",
			Containers: []corev1.Container{{Name: "extender", Image: "example.com/divvy:1"}}},
	}
	if _, err := w.client.CoreV1().Pods(pod.Namespace).Create(ctx, pod, metav1.CreateOptions{}); err != nil &&
		!apierrors.IsAlreadyExists(err) {
		w.Fatal(err)
	}
	var p dedicatedPod
	var err error
	p.extender, err = w.plane.StartExtender(ctx, controlplane.ExtenderOptions{
		Name: name + "-extender", Program: programs.Control, Resources: []string{resource},
		// A bind has a third of the Lease at least, which is longer than one takes here.
		Args: []string{"--kubeconfig=" + kubeconfig, "--leader-elect", "--leader-elect-namespace=" + controlplane.Namespace,
			"--leader-elect-duration=8s", "--shutdown-delay=5s"},
		Env: []string{"POD_NAME=" + name, "POD_IP=127.0.0.1"},
	})
	if err != nil {
		w.Fatal(err)
	}
	beside := p.extender.Entry
	beside.URL, beside.CA, beside.ClientCert, beside.ClientKey, beside.ServerName = p.extender.Plain, nil, nil, nil, ""
	p.scheduler, err = w.plane.StartScheduler(ctx, programs.Kubernetes, controlplane.SchedulerOptions{
		Name: name + "-scheduler", Extender: &beside, QPS: 5000, Settings: map[string]any{
			"profiles": []any{map[string]any{"schedulerName": ownScheduler}},
			// Those that kube-scheduler's role names. It gives the Lease up when it ends, and the
			// next one looks often.
			"leaderElection": map[string]any{
				"leaderElect": true, "resourceLock": "leases", "resourceNamespace": "kube-system", "resourceName": "kube-scheduler",
				"leaseDuration": "15s", "renewDeadline": "10s", "retryPeriod": "500ms",
			},
		},
	})
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() {
		for _, process := range []*controlplane.Process{p.scheduler.Process, p.extender.Process} {
			if process.Running() {
				w.end(process)
			}
		}
	})
	return p
}

// binding counts binds that are under way, each of which takes a while, some longer than
// others. One that was sent arrives, whatever becomes of its sender, until the deadline
// that came with it.
type binding struct {
	least, most time.Duration
	now         atomic.Int64
}

func (b *binding) wrap(proxy http.Handler) http.Handler {
	return http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/binding") {
			b.now.Add(1)
			defer b.now.Add(-1)
			wait := b.least + rand.N(b.most-b.least)
			limit, err := time.ParseDuration(r.URL.Query().Get("timeout"))
			if err != nil {
				limit = wait
			}
			time.Sleep(min(wait, limit))
			if limit < wait {
				http.Error(out, "the deadline is over", http.StatusGatewayTimeout)
				return
			}
			r = r.WithContext(context.WithoutCancel(r.Context()))
		}
		proxy.ServeHTTP(out, r)
	})
}

// Another kube-scheduler of mode dedicated leads while many binds of the one before are
// under way. No device is beyond its size afterwards, no pod is left out, and none was
// placed twice, whichever extender leads.
func TestDedicatedHandover(t *testing.T) {
	const pods, atOnce = 400, 40
	size := func(pod int) accel.Units { return accel.Units(2 + pod%5) }
	for name, end := range map[string]func(w *world, p dedicatedPod){
		"its pod ends in order": func(w *world, p dedicatedPod) {
			var ending sync.WaitGroup
			ending.Go(func() { w.end(p.scheduler.Process) })
			ending.Go(func() {
				if err := p.extender.Stop(20 * time.Second); err != nil {
					w.Error(err)
				}
			})
			w.Cleanup(ending.Wait)
		},
		"its pod is killed": func(w *world, p dedicatedPod) {
			if err := errors.Join(p.scheduler.Kill(), p.extender.Kill()); err != nil {
				w.Fatal(err)
			}
		},
		"kube-scheduler ends alone": func(w *world, p dedicatedPod) { w.end(p.scheduler.Process) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, simnodes.Group{Count: 15, Cards: 8, Units: 16})
			if err := w.nodes.Create(t.Context(), w.client); err != nil {
				t.Fatal(err)
			}
			slow := &binding{least: time.Second, most: 2500 * time.Millisecond}
			kubeconfig := w.before("slow", slow.wrap)
			first := w.dedicated("first", kubeconfig)
			leader := w.leads("")
			w.dedicated("second", kubeconfig)
			placed := w.watchBinds()
			// Some pods come after the change: the next one gives devices to them while binds of
			// the one before are under way.
			var making sync.WaitGroup
			defer making.Wait()
			making.Go(func() {
				tick := time.NewTicker(10 * time.Millisecond)
				defer tick.Stop()
				for n := range pods {
					<-tick.C
					pod := w.nodes.Pod(namespace, fmt.Sprintf("pod-%04d", n), size(n))
					pod.Spec.SchedulerName = ownScheduler
					if _, err := w.client.CoreV1().Pods(namespace).Create(w.Context(), pod, metav1.CreateOptions{}); err != nil {
						w.Error(err)
						return
					}
				}
			})
			w.eventually("some pods are bound, and binds of others are under way", func(context.Context) error {
				if bound, now := placed.count(), slow.now.Load(); bound < atOnce || now < atOnce {
					return fmt.Errorf("%d are bound, %d binds are under way, want %d of both", bound, now, atOnce)
				}
				return nil
			})
			began := time.Now()
			end(w, first)
			w.leads(leader)
			t.Logf("the second kube-scheduler leads after %.1f s, with %d binds under way", time.Since(began).Seconds(), slow.now.Load())
			want := accel.Units(0)
			for n := range pods {
				want += size(n)
			}
			if held := sum(w.bound(pods)); held != want {
				t.Errorf("pods hold %d units, want %d", held, want)
			}
			if _, changed := placed.summary(); len(changed) > 0 {
				t.Error(changed)
			}
		})
	}
}

// leads waits until a kube-scheduler leads, another one than before, and returns which.
func (w *world) leads(before string) (leader string) {
	w.Helper()
	w.eventually("another kube-scheduler leads", func(ctx context.Context) error {
		lease, err := w.client.CoordinationV1().Leases("kube-system").Get(ctx, "kube-scheduler", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if leader = ptr.Deref(lease.Spec.HolderIdentity, ""); leader == "" || leader == before {
			return fmt.Errorf("%q does", leader)
		}
		return nil
	})
	return leader
}
