//go:build e2e

package scheduling

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/lab/internal/controlplane"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/simnodes"
)

// competitor is a divvy-scheduler on a machine of its own.
type competitor struct {
	*controlplane.Plugin
	api *cable // to the API server, which can be cut; may be nil
}

// compete starts a replica as its pod does, with a cable or a kubeconfig, of the newest minor
// unless another is given.
func (w *world) compete(name, kubeconfig string, of ...minor) *competitor {
	w.Helper()
	if err := w.plane.Prepare(w.Context()); err != nil {
		w.Fatal(err)
	}
	pods := w.client.CoreV1().Pods(controlplane.Namespace)
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: controlplane.Namespace, Name: name},
		// As every replica that runs it is on a node.
		Spec: corev1.PodSpec{NodeName: w.nodes.NodeName(0),
			Containers: []corev1.Container{{Name: "scheduler", Image: "example.com/divvy:1"}}},
	}
	if _, err := pods.Create(w.Context(), pod, metav1.CreateOptions{}); err != nil {
		w.Fatal(err)
	}
	var api *cable
	if kubeconfig == "" {
		api, kubeconfig = w.cableToServer(name)
	}
	program := newest
	if len(of) > 0 {
		program = of[0]
	}
	return &competitor{w.startPlugin(pluginOptions{name: name, program: program, pod: name, kubeconfig: kubeconfig}), api}
}

// ends are the ways in which a leader ends; each round of TestPluginFailover has the next one.
var ends = []struct {
	name  string
	clean bool
	end   func(*competitor) error
}{
	{"SIGKILL", false, func(c *competitor) error { return c.Kill() }},
	{"SIGTERM", true, func(c *competitor) error { return c.Stop(stopGrace) }},
	{"Lease lost", false, func(c *competitor) error { c.api.cut(); return nil }},
}

// The leader ends in the middle of a burst of pods, with binds under way. The pods fill the devices
// to the last unit: a device that two leaders gave away shows, and so does one that stays reserved
// for no pod. A scheduler without Divvy goes on placing other pods meanwhile.
func TestPluginFailover(t *testing.T) {
	const devices, units, each, burst = 4, 8, 2, 48
	rounds := roundsOf(t, len(ends))
	w := newWorld(t, simnodes.Group{Count: rounds * burst * each / (devices * units), Cards: devices, Units: units})
	if err := w.nodes.Create(t.Context(), w.client); err != nil {
		t.Fatal(err)
	}
	replicas := []*competitor{w.compete("scheduler-0", ""), w.compete("scheduler-1", "")}
	contenders := func() (all []contender) {
		for _, r := range replicas {
			all = append(all, r)
		}
		return all
	}
	other, err := w.plane.StartScheduler(t.Context(), programs.Kubernetes, controlplane.SchedulerOptions{Name: "default-scheduler"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.end(other.Process) })
	binds := w.watchBinds()
	longest := map[bool]time.Duration{} // by whether the end was clean
	var slowest time.Duration
	for round := range rounds {
		kind := ends[round%len(ends)]
		var leader *competitor
		w.eventually("a replica leads", func(ctx context.Context) error {
			var ok bool
			if leader, ok = leads(ctx, contenders()).(*competitor); !ok {
				return errors.New("none does")
			}
			return nil
		})
		before := binds.count()
		w.make(plugged, fmt.Sprintf("pod-%d", round), burst, each)
		w.eventually("some pods are bound", func(context.Context) error {
			if n := binds.count() - before; n < burst/4 {
				return fmt.Errorf("%d are", n)
			}
			return nil
		})
		bystanders := make(chan error, 1)
		var took time.Duration
		without := w.followed(leader, contenders(), func() error {
			err := kind.end(leader)
			go func() {
				began := time.Now()
				err := w.placesOthers(fmt.Sprintf("other-%d", round))
				took = time.Since(began)
				bystanders <- err
			}()
			return err
		})
		if err := <-bystanders; err != nil {
			t.Fatal(err)
		}
		slowest = max(slowest, took)
		longest[kind.clean] = max(longest[kind.clean], without)
		t.Logf("%d: %s ended, %s; another led %.2f s later", round+1, leader.Name(), kind.name, without.Seconds())
		w.eventually(leader.Name()+" ends", func(context.Context) error {
			if leader.Running() {
				return errors.New("it runs")
			}
			return nil
		})
		if kind.clean && strings.Contains(leader.LogTail(200), "Could not bind") {
			t.Errorf("%s gave binds up that were under way:\n%s", leader.Name(), leader.LogTail(20))
		}
		w.bound((round + 1) * burst)
		for i, r := range replicas {
			if r == leader {
				replicas[i] = w.compete(fmt.Sprintf("scheduler-%d", round+2), "")
			}
		}
	}
	gap, changed := binds.summary()
	t.Logf("failover: %d pods bound under %d changes of the leader; longest time without a leader: %.2f s after an orderly end, %.2f s "+
		"otherwise, with a Lease of %s; between two binds: %.2f s; pods of another scheduler were bound within %.2f s", rounds*burst,
		rounds, longest[true].Seconds(), longest[false].Seconds(), controlplane.PluginLease, gap.Seconds(), slowest.Seconds())
	if longest[true] > longestOrderly {
		t.Errorf("after an orderly end there was no leader for %s, more than %s", longest[true], longestOrderly)
	}
	if limit := controlplane.PluginLease + beyondLease; longest[false] > limit {
		t.Errorf("after another end there was no leader for %s, more than %s", longest[false], limit)
	}
	for _, text := range changed {
		t.Error(text)
	}
	if total := sum(w.right()); total != accel.Units(rounds*burst*each) {
		t.Errorf("pods hold %d units, want %d", total, rounds*burst*each)
	}
}

// placesOthers makes pods of default-scheduler that request no device, and waits until they are bound.
func (w *world) placesOthers(prefix string) error {
	const count = 5
	pods := w.client.CoreV1().Pods(metav1.NamespaceDefault)
	for n := range count {
		pod := w.nodes.Pod(metav1.NamespaceDefault, fmt.Sprintf("%s-%d", prefix, n), 0)
		delete(pod.Spec.Containers[0].Resources.Requests, resource)
		delete(pod.Spec.Containers[0].Resources.Limits, resource)
		if _, err := pods.Create(w.Context(), pod, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	return poll.Until(w.Context(), patience, "pods without devices are bound", func(ctx context.Context) error {
		list, err := pods.List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName="})
		if err == nil && len(list.Items) > 0 {
			err = fmt.Errorf("%d are not", len(list.Items))
		}
		return err
	})
}
