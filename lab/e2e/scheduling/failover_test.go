//go:build e2e

package scheduling

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/scheduler/leader"
	"github.com/divvy-gpu/divvy/lab/internal/controlplane"
	"github.com/divvy-gpu/divvy/lab/internal/simnodes"
)

// A round ends the leader: the first by force, the second in order, and so on. Two are
// run with all tests, more by "make failover".
const (
	failoverRounds  = 2
	roundsVariable  = "FAILOVER_ROUNDS"
	podsPerRound    = 100
	failoverUnits   = 4
	betweenPods     = 100 * time.Millisecond
	kubeletRestarts = 1500 * time.Millisecond // a container that died is back after about that
	// longestOrderly and beyondLease bound the time without a leader: after an orderly
	// end, and after a death beyond the Lease's duration.
	longestOrderly = time.Second
	beyondLease    = 3 * time.Second
)

// roundsOf is how many rounds were asked for.
func roundsOf(t *testing.T, otherwise int) int {
	t.Helper()
	text := os.Getenv(roundsVariable)
	if text == "" {
		return otherwise
	}
	rounds, err := strconv.Atoi(text)
	if err != nil || rounds < 1 {
		t.Fatalf("%s=%q: want a number of rounds, 1 or more", roundsVariable, text)
	}
	return rounds
}

// TestFailover prints the longest time without a leader and without a bind. The pods
// fill the cards nearly to the last, so a device that two leaders gave away shows, and
// so does one that stays reserved for no pod.
func TestFailover(t *testing.T) {
	rounds := roundsOf(t, failoverRounds)
	pods := (rounds + 1) * podsPerRound
	w := newWorld(t, simnodes.Group{Count: (pods*failoverUnits + 127) / 128})
	if err := w.nodes.Create(t.Context(), w.client); err != nil {
		t.Fatal(err)
	}
	r := newReplicas(w)
	s, err := w.plane.StartScheduler(t.Context(), programs.Kubernetes,
		controlplane.SchedulerOptions{Name: "default-scheduler", Extender: r.entry(), QPS: 5000})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.end(s.Process) })
	binds := w.watchBinds()

	ended := make(chan int, 1) // how many rounds are over
	created := make(chan int, pods)
	creating, stop := context.WithCancel(t.Context())
	defer stop()
	var work sync.WaitGroup
	defer work.Wait()
	work.Go(func() {
		tick := time.NewTicker(betweenPods)
		defer tick.Stop()
		over := 0
		for n := range pods {
			// Some pods are made after each round, and none runs ahead of them.
			for n >= (over+1)*podsPerRound && over < rounds {
				select {
				case over = <-ended:
				case <-creating.Done():
					return
				}
			}
			select {
			case <-tick.C:
			case <-creating.Done():
				return
			}
			pod := w.nodes.Pod(namespace, fmt.Sprintf("pod-%04d", n), failoverUnits)
			if _, err := w.client.CoreV1().Pods(namespace).Create(creating, pod, metav1.CreateOptions{}); err != nil {
				t.Error(err)
				return
			}
			created <- n + 1
		}
	})
	longest := map[bool]time.Duration{} // by whether the end was orderly
	for round := range rounds {
		// In the middle of a burst of pods.
		for n := range created {
			if n >= round*podsPerRound+podsPerRound/2 {
				break
			}
		}
		orderly := round%2 == 1
		leader := r.leader()
		end := leader.Kill
		if orderly {
			end = func() error { return leader.Stop(stopGrace) }
		}
		without := w.followed(leader, []contender{r.all[0], r.all[1]}, end)
		longest[orderly] = max(longest[orderly], without)
		ended <- round + 1
		time.Sleep(kubeletRestarts)
		r.restart(leader)
		t.Logf("%d: %s ended, orderly: %t; another led %.2f s later", round+1, leader.Name(), orderly, without.Seconds())
	}
	w.bound(pods)
	gap, changed := binds.summary()
	t.Logf("failover: %d pods bound under %d changes of the leader; longest time without a leader: %.2f s after an orderly end, %.2f s "+
		"after a death; between two binds: %.2f s",
		pods, rounds, longest[true].Seconds(), longest[false].Seconds(), gap.Seconds())
	if longest[true] > longestOrderly {
		t.Errorf("after an orderly end there was no leader for %s, more than %s", longest[true], longestOrderly)
	}
	if limit := leader.DefaultDuration + beyondLease; longest[false] > limit {
		t.Errorf("after a death there was no leader for %s, more than %s", longest[false], limit)
	}
	for _, text := range changed {
		t.Error(text)
	}
	used := w.right()
	if total := sum(used); total != accel.Units(pods*failoverUnits) {
		t.Errorf("pods hold %d units, want %d", total, pods*failoverUnits)
	}
}

// contender is a replica that may lead.
type contender interface {
	Name() string
	Running() bool
	Leads(ctx context.Context) (bool, error)
}

// leads returns the one that leads, nil for none.
func leads(ctx context.Context, all []contender) contender {
	for _, one := range all {
		if !one.Running() {
			continue
		}
		if leads, err := one.Leads(ctx); err == nil && leads {
			return one
		}
	}
	return nil
}

// followed ends the leader, waits until another replica leads, and returns for how long none did.
func (w *world) followed(leader contender, all []contender, end func() error) time.Duration {
	w.Helper()
	led := time.Now() // when one was seen to lead last
	done := make(chan error, 1)
	go func() { done <- end() }()
	for began := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		switch now := leads(w.Context(), all); {
		case now == leader:
			led = time.Now()
		case now != nil:
			without := time.Since(led)
			if err := <-done; err != nil {
				w.Fatal(err)
			}
			return without
		case time.Since(began) > patience:
			w.Fatal("no replica leads")
		}
	}
}

func sum(used simnodes.Used) (total accel.Units) {
	for _, units := range used {
		total += units
	}
	return total
}

// binds are when pods were seen bound for the first time.
type binds struct {
	mu      sync.Mutex
	times   []time.Time
	where   map[string]string // node and grant, by pod
	changed []string
}

// watchBinds notes binds until the test ends.
func (w *world) watchBinds() *binds {
	w.Helper()
	b := &binds{where: map[string]string{}}
	ctx, stop := context.WithCancel(w.Context())
	pods := w.client.CoreV1().Pods(namespace)
	list, err := pods.List(ctx, metav1.ListOptions{Limit: 1})
	if err != nil {
		w.Fatal(err)
	}
	// The API server ends a watch whose reader falls behind.
	follow, err := watchtools.NewRetryWatcherWithContext(ctx, list.ResourceVersion, &cache.ListWatch{
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) { return pods.Watch(ctx, o) },
	})
	if err != nil {
		w.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for event := range follow.ResultChan() {
			if pod, ok := event.Object.(*corev1.Pod); ok && pod.Spec.NodeName != "" {
				b.note(pod)
			}
		}
	}()
	w.Cleanup(func() { stop(); <-done })
	return b
}

func (b *binds) note(pod *corev1.Pod) {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := pod.Spec.NodeName + " " + pod.Annotations[wire.GrantAnnotation]
	before, known := b.where[pod.Name]
	b.where[pod.Name] = now
	switch {
	case !known:
		b.times = append(b.times, time.Now())
	case before != now:
		b.changed = append(b.changed, fmt.Sprintf("pod %s was placed twice: %s, then %s", pod.Name, before, now))
	}
}

// count is how many pods were seen bound.
func (b *binds) count() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.times)
}

// summary returns the longest time between two binds, and what was placed twice.
func (b *binds) summary() (longest time.Duration, changed []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := 1; i < len(b.times); i++ {
		longest = max(longest, b.times[i].Sub(b.times[i-1]))
	}
	return longest, b.changed
}
