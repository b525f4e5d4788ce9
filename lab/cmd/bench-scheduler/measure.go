package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/divvy-gpu/divvy/lab/internal/controlplane"
	"github.com/divvy-gpu/divvy/lab/internal/simnodes"
)

const (
	cardsPerNode = 8
	cardUnits    = 16
	// claimUnits are the GiB of a device for claims, and claimPods how many pods a node may run then:
	// their number must not decide.
	claimUnits, claimPods = 80, 1000
	// schedulerQPS is how many requests to the API server kube-scheduler may send in a
	// second, on both sides; its own default of 50 would be what is measured.
	schedulerQPS = 5000
	resource     = "enflame.com/gcu-memory"
	namespace    = "bench"
	// warmUp are pods that are placed before the time is taken: when the last of them
	// is bound, all programs have read the cluster and have their connections.
	warmUp = 50
	// creators are requests to make pods that are under way at once.
	creators = 16
	// stallAfter is how long no pod may be bound.
	stallAfter = 2 * time.Minute
	// stopGrace is what programs get to end.
	stopGrace = 5 * time.Second
)

// bench is a control plane with nodes.
type bench struct {
	options  options
	programs controlplane.Programs
	plugin   string // the path of divvy-scheduler
	plane    *controlplane.ControlPlane
	client   kubernetes.Interface
	nodes    simnodes.Group
	// controller is that of claims; nil where there are none.
	controller *controlplane.Process
	// plain are pods per second without Divvy, as measured so far.
	plain []float64
}

// prepare makes the nodes, and what pods need.
func (b *bench) prepare(ctx context.Context) (err error) {
	if b.client, err = b.plane.Client(); err != nil {
		return err
	}
	if err := b.nodes.Create(ctx, b.client); err != nil {
		return err
	}
	for _, name := range []string{namespace, filled} {
		space := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if _, err := b.client.CoreV1().Namespaces().Create(ctx, space, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("make namespace %s: %w", name, err)
		}
	}
	if b.options.claims() {
		if err := b.templates(ctx); err != nil {
			return err
		}
	}
	return b.classes(ctx)
}

// phase starts a side, places the scenario's pods, and removes both.
func (b *bench) phase(ctx context.Context, scenario *scenario, side side, round int) (p Phase, err error) {
	if scenario.filled {
		if err := b.fill(ctx); err != nil {
			return p, err
		}
	}
	r, err := b.start(ctx, side, side.fileName(scenario.name, round))
	if err != nil {
		return p, err
	}
	defer func() { err = errors.Join(err, r.stop(), b.empty(ctx, namespace)) }()
	scheduler := r.scheduler

	unmeasured := func() error {
		shapes := []shape{small}
		if scenario.claims {
			shapes = scenario.pods
		}
		if _, err := b.place(ctx, scheduler.Name(), "warm", warmUp, shapes, 0); err != nil {
			return err
		}
		return b.wait(ctx, scheduler.Name(), scenario.waiting)
	}
	if err := unmeasured(); err != nil {
		return p, fmt.Errorf("before the time is taken: %w; the scheduler's log %s ends with:\n%s", err, scheduler.LogPath(),
			scheduler.LogTail(5))
	}
	rate := 0.0
	if scenario.paced {
		rate = median(b.plain) / 2
	}
	start, err := b.look(ctx, &r)
	if err != nil {
		return p, err
	}
	times, err := b.place(ctx, scheduler.Name(), "pod", b.options.pods, scenario.pods, rate)
	if err != nil {
		return p, err
	}
	end, err := b.look(ctx, &r)
	if err != nil {
		return p, err
	}
	p = newPhase(side, round, times)
	p.fill(start, end, r.divvyName)
	switch {
	case scenario.claims:
		p.Packing, err = b.packing(ctx)
	case r.divvy != nil:
		err = b.right(ctx)
	}
	return p, err
}

// place makes pods of these shapes in turn, so many in a second, or as fast as the API server
// takes them where rate is 0, and waits until the last is bound.
func (b *bench) place(ctx context.Context, scheduler, prefix string, count int, shapes []shape, rate float64) (*timeline, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	pods := b.client.CoreV1().Pods(namespace)
	list, err := pods.List(ctx, metav1.ListOptions{Limit: 1})
	if err != nil {
		return nil, fmt.Errorf("list pods: %w", err)
	}
	t := newTimeline(count)
	group, working := errgroup.WithContext(ctx)
	group.Go(func() error {
		defer t.allMade()
		begun := time.Now()
		makers, making := errgroup.WithContext(working)
		makers.SetLimit(creators)
		for i := range count {
			if rate > 0 {
				time.Sleep(time.Until(begun.Add(time.Duration(float64(i) / rate * float64(time.Second)))))
			}
			makers.Go(func() error {
				pod := shapes[i%len(shapes)].pod(&b.nodes, namespace, fmt.Sprintf("%s-%06d", prefix, i))
				pod.Spec.SchedulerName = scheduler
				t.began(pod.Name)
				if _, err := pods.Create(making, pod, metav1.CreateOptions{}); err != nil {
					return fmt.Errorf("make a pod: %w", err)
				}
				return nil
			})
		}
		return makers.Wait()
	})
	group.Go(func() error { return t.follow(working, pods, list.ResourceVersion) })
	return t, group.Wait()
}

// right checks that each pod holds what it asks for, on a device of its node, and no
// device is given to more pods than have room on it.
func (b *bench) right(ctx context.Context) error {
	key, err := b.key()
	if err != nil {
		return err
	}
	pods, err := b.client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list pods: %w", err)
	}
	if _, err := b.nodes.Used(pods.Items, key); err != nil {
		return fmt.Errorf("pods are placed wrongly: %w", err)
	}
	return nil
}

// timeline is when pods were asked for and seen bound. It is safe for concurrent use.
type timeline struct {
	mu     sync.Mutex
	asked  map[string]time.Time // by the pod's name
	bound  map[string]time.Time
	made   time.Time // when the last creation was answered
	wanted int
}

func newTimeline(count int) *timeline {
	return &timeline{asked: make(map[string]time.Time, count), bound: make(map[string]time.Time, count), wanted: count}
}

func (t *timeline) began(pod string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.asked[pod] = time.Now()
}

func (t *timeline) allMade() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.made = time.Now()
}

// saw notes that a pod is bound and reports whether it was the last.
func (t *timeline) saw(pod string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, known := t.asked[pod]; known {
		if _, again := t.bound[pod]; !again {
			t.bound[pod] = time.Now()
		}
	}
	return len(t.bound) == t.wanted
}

// onlyBound selects pods that are bound.
var onlyBound = fields.OneTermNotEqualSelector("spec.nodeName", "").String()

// follow watches pods from a version on, and returns when all are bound, or none was
// for long. The API server ends a watch whose reader falls behind for a moment, as on
// a machine where all that is measured competes for the processor; it is taken up
// where it ended.
func (t *timeline) follow(ctx context.Context, pods corev1client.PodInterface, version string) error {
	stalled := time.NewTimer(stallAfter)
	defer stalled.Stop()
	for {
		bound, err := pods.Watch(ctx, metav1.ListOptions{ResourceVersion: version, FieldSelector: onlyBound, AllowWatchBookmarks: true})
		if err != nil {
			return fmt.Errorf("watch pods: %w", err)
		}
		done, err := t.read(ctx, bound, stalled, &version)
		bound.Stop()
		if done || err != nil {
			return err
		}
	}
}

// read notes what a watch delivers until it ends, all pods are bound, or none was for
// long. version becomes that of the last object.
func (t *timeline) read(ctx context.Context, bound watch.Interface, stalled *time.Timer, version *string) (done bool, err error) {
	for {
		select {
		case <-ctx.Done():
			return false, context.Cause(ctx)
		case <-stalled.C:
			return false, fmt.Errorf("no pod was bound for %s, and %d are still waiting", stallAfter, t.waiting())
		case event, open := <-bound.ResultChan():
			if !open {
				return false, nil
			}
			switch object := event.Object.(type) {
			case *corev1.Pod:
				*version = object.ResourceVersion
				if event.Type == watch.Bookmark {
					continue
				}
				if t.saw(object.Name) {
					return true, nil
				}
				stalled.Reset(stallAfter)
			case *metav1.Status:
				return false, fmt.Errorf("watch pods: %s", object.Message)
			}
		}
	}
}

func (t *timeline) waiting() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.wanted - len(t.bound)
}

// latencies returns the time from creation to bind of each pod, in order, and those from
// the first creation to the last bind and to the answer of the last creation.
func (t *timeline) latencies() (each []time.Duration, whole, creation time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var first, last time.Time
	for pod, asked := range t.asked {
		if first.IsZero() || asked.Before(first) {
			first = asked
		}
		if bound, ok := t.bound[pod]; ok {
			each = append(each, bound.Sub(asked))
			if bound.After(last) {
				last = bound
			}
		}
	}
	slices.Sort(each)
	return each, last.Sub(first), t.made.Sub(first)
}

// sight is what the programs have done and used up to one moment.
type sight struct {
	at        time.Time
	machine   busy
	usage     map[string]controlplane.Usage // by program
	server    samples                       // of the API server
	scheduler samples
	divvy     samples // nil without Divvy
}

// look reads the programs' metrics and what they used.
func (b *bench) look(ctx context.Context, r *running) (s sight, err error) {
	server := func(ctx context.Context) (string, error) {
		raw, err := b.client.Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
		return string(raw), err
	}
	for _, of := range []struct {
		name string
		read func(context.Context) (string, error)
		into *samples
	}{{"the API server", server, &s.server}, {"kube-scheduler", r.scheduler.Metrics, &s.scheduler}, {"Divvy", r.divvy, &s.divvy}} {
		if of.read == nil {
			continue
		}
		text, err := of.read(ctx)
		if err == nil {
			*of.into, err = parseSamples(text)
		}
		if err != nil {
			return s, fmt.Errorf("metrics of %s: %w", of.name, err)
		}
	}
	s.at = time.Now()
	if s.machine, err = busyNow(); err != nil {
		return s, err
	}
	s.usage = map[string]controlplane.Usage{}
	for name, pid := range r.pids {
		if s.usage[name], err = controlplane.UsageOf(pid); err != nil {
			return s, err
		}
	}
	return s, nil
}
