//go:build e2e

package scheduling

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/accel/wire"
	"github.com/divvy-gpu/divvy/lab/internal/controlplane"
	"github.com/divvy-gpu/divvy/lab/internal/simnodes"
)

// The leader is killed five times while 500 pods are scheduled.
const (
	failoverKills   = 5
	failoverPods    = 500
	failoverUnits   = 4
	longestWithout  = 6 * time.Second
	betweenPods     = 100 * time.Millisecond
	kubeletRestarts = 1500 * time.Millisecond // a container that died is back after about that
)

// TestFailover prints the longest time without a bind. The pods fill the cards nearly
// to the last, so a device that two leaders gave away shows, and so does one that
// stays reserved for nobody.
func TestFailover(t *testing.T) {
	w := newWorld(t, simnodes.Group{Count: 16})
	if err := w.nodes.Create(t.Context(), w.client); err != nil {
		t.Fatal(err)
	}
	r := newReplicas(w)
	entry := r.all[0].Entry
	entry.URL = r.service.url
	s, err := w.plane.StartScheduler(t.Context(), programs.Kubernetes, controlplane.SchedulerOptions{Name: "default-scheduler", Extender: &entry, QPS: 5000})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.end(s.Process) })
	binds := w.watchBinds()

	killed := make(chan int, 1) // how often the leader was killed
	created := make(chan int, failoverPods)
	creating, stop := context.WithCancel(t.Context())
	defer stop()
	var work sync.WaitGroup
	defer work.Wait()
	work.Go(func() {
		tick := time.NewTicker(betweenPods)
		defer tick.Stop()
		kills := 0
		for n := range failoverPods {
			// Some pods are made after each kill, and none runs ahead of them.
			for n >= (kills+1)*failoverPods/(failoverKills+1) && kills < failoverKills {
				select {
				case kills = <-killed:
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
	for kill := range failoverKills {
		// In the middle of a burst of pods.
		for n := range created {
			if n >= (2*kill+1)*failoverPods/(failoverKills+1)/2 {
				break
			}
		}
		leader := r.leader()
		if err := leader.Kill(); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		killed <- kill + 1
		time.Sleep(kubeletRestarts)
		r.restart(leader)
		other := r.leader()
		t.Logf("%d: %s was killed; %s led %.1f s later; the next bind came after %.1f s", kill+1, leader.Name(), other.Name(),
			time.Since(began).Seconds(), binds.next(w, began).Seconds())
	}
	w.bound(failoverPods)
	longest, changed := binds.summary()
	t.Logf("failover: %d pods bound under %d kills of the leader, longest time between two binds %.2f s", failoverPods, failoverKills, longest.Seconds())
	if longest > longestWithout {
		t.Errorf("%s went by without a bind, more than %s", longest, longestWithout)
	}
	for _, text := range changed {
		t.Error(text)
	}
	used := w.right()
	if total := sum(used); total != failoverPods*failoverUnits {
		t.Errorf("pods hold %d units, want %d", total, failoverPods*failoverUnits)
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
	follow, err := w.client.CoreV1().Pods(namespace).Watch(ctx, metav1.ListOptions{ResourceVersion: "0"})
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

// next waits for the first bind after a moment and returns how much later it came.
func (b *binds) next(w *world, after time.Time) (later time.Duration) {
	w.Helper()
	w.eventually("another pod is bound", func(context.Context) error {
		b.mu.Lock()
		defer b.mu.Unlock()
		for _, at := range b.times {
			// What was under way when the leader was killed comes at once.
			if later = at.Sub(after); later > 200*time.Millisecond {
				return nil
			}
		}
		return errors.New("none is")
	})
	return later
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

// replicas are two extenders behind a Service.
type replicas struct {
	w       *world
	all     []*controlplane.Extender
	service *service
}

func newReplicas(w *world) *replicas {
	w.Helper()
	r := &replicas{w: w, service: newService(w)}
	for n := range 2 {
		r.all = append(r.all, r.start(fmt.Sprint("extender-", n)))
	}
	r.service.use(r.all)
	return r
}

// start starts a replica as its pod does. Nobody runs the pod; its object is there.
func (r *replicas) start(name string) *controlplane.Extender {
	r.w.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: controlplane.Namespace, Name: name},
		Spec:       corev1.PodSpec{SchedulerName: "nobody", Containers: []corev1.Container{{Name: "extender", Image: "example.com/divvy:1"}}},
	}
	ctx := r.w.Context()
	if err := r.w.plane.Prepare(ctx); err != nil {
		r.w.Fatal(err)
	}
	if _, err := r.w.client.CoreV1().Pods(pod.Namespace).Get(ctx, name, metav1.GetOptions{}); err != nil {
		if _, err := r.w.client.CoreV1().Pods(pod.Namespace).Create(ctx, pod, metav1.CreateOptions{}); err != nil {
			r.w.Fatal(err)
		}
	}
	e, err := r.w.plane.StartExtender(ctx, controlplane.ExtenderOptions{
		Name: name, Program: programs.Control, Resources: []string{resource},
		Args: []string{"--leader-elect", "--leader-elect-namespace=" + controlplane.Namespace},
		Env:  []string{"POD_NAME=" + name, "POD_IP=127.0.0.1"},
	})
	if err != nil {
		r.w.Fatal(err)
	}
	r.w.Cleanup(func() {
		if e.Running() {
			r.w.end(e.Process)
		}
	})
	return e
}

// restart starts a replica that was killed.
func (r *replicas) restart(killed *controlplane.Extender) {
	r.w.Helper()
	for n, e := range r.all {
		if e == killed {
			r.all[n] = r.start(killed.Name())
		}
	}
	r.service.use(r.all)
}

// leader waits until one leads and returns it.
func (r *replicas) leader() (leader *controlplane.Extender) {
	r.w.Helper()
	r.w.eventually("a replica leads", func(ctx context.Context) error {
		for _, e := range r.all {
			if text, err := e.Metrics(ctx); err == nil && strings.Contains(text, "\ndivvy_extender_leader 1\n") {
				leader = e
				return nil
			}
		}
		return errors.New("none does")
	})
	return leader
}

// service stands for a Service: it hands each connection to one of the replicas that
// were ready when it looked last, which is once a second. So some connections go to
// one that is dead.
type service struct {
	url string

	mu       sync.Mutex // guards what follows
	replicas []*controlplane.Extender
	ready    []string // host:port
}

func newService(w *world) *service {
	w.Helper()
	listener, err := new(net.ListenConfig).Listen(w.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		w.Fatal(err)
	}
	s := &service{url: "https://" + listener.Addr().String() + "/gcushare-scheduler"}
	ctx, stop := context.WithCancel(w.Context())
	var running sync.WaitGroup
	running.Go(func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				return
			}
			running.Go(func() { s.hand(ctx, connection) })
		}
	})
	running.Go(func() {
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for {
			s.look(ctx)
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
		}
	})
	w.Cleanup(func() {
		stop()
		if err := listener.Close(); err != nil {
			w.Error(err)
		}
		running.Wait()
	})
	return s
}

// use changes the replicas behind the Service.
func (s *service) use(replicas []*controlplane.Extender) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.replicas = append([]*controlplane.Extender(nil), replicas...)
}

// look asks which replicas are ready.
func (s *service) look(ctx context.Context) {
	s.mu.Lock()
	replicas := s.replicas
	s.mu.Unlock()
	var ready []string
	for _, e := range replicas {
		address, err := url.Parse(e.Entry.URL)
		if err == nil && e.Ready(ctx) == nil {
			ready = append(ready, address.Host)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ready = ready
}

// hand hands a connection on until either side ends it.
func (s *service) hand(ctx context.Context, from net.Conn) {
	defer from.Close() //nolint:errcheck // it may be closed already
	s.mu.Lock()
	ready := s.ready
	s.mu.Unlock()
	if len(ready) == 0 {
		return
	}
	to, err := new(net.Dialer).DialContext(ctx, "tcp", ready[rand.IntN(len(ready))])
	if err != nil {
		return
	}
	defer to.Close()                                                    //nolint:errcheck // it may be closed already
	defer context.AfterFunc(ctx, func() { from.Close(); to.Close() })() //nolint:errcheck // either way it is over
	done := make(chan struct{}, 2)
	for _, way := range [][2]net.Conn{{from, to}, {to, from}} {
		go func() {
			_, _ = io.Copy(way[0], way[1]) // an end is an end
			done <- struct{}{}
		}()
	}
	<-done
	from.Close() //nolint:errcheck // ends the other copy
	to.Close()   //nolint:errcheck // the same
	<-done
}
