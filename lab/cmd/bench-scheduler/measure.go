package main

import (
	"context"
	"errors"
	"fmt"
	"os"
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
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/lab/internal/controlplane"
	"github.com/divvy-gpu/divvy/lab/internal/simnodes"
)

// side is one of those that are compared.
type side string

const (
	without side = "without"
	with    side = "with"
	// before is with Divvy as of an earlier commit.
	before side = "before"
)

// Names of programs where there are several by name.
const (
	extenderName = "divvy-extender"
	benchName    = "this program"
)

const (
	cardsPerNode = 8
	cardUnits    = 16
	podUnits     = 4
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
	plane    *controlplane.ControlPlane
	client   kubernetes.Interface
	nodes    simnodes.Group
}

func newBench(ctx context.Context, o options, programs controlplane.Programs, plane *controlplane.ControlPlane, size int) (*bench, error) {
	client, err := plane.Client()
	if err != nil {
		return nil, err
	}
	b := &bench{
		options: o, programs: programs, plane: plane, client: client,
		nodes: simnodes.Group{Count: size, Cards: cardsPerNode, Units: cardUnits, Resource: resource},
	}
	if err := b.nodes.Create(ctx, client); err != nil {
		return nil, err
	}
	space := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
	if _, err := client.CoreV1().Namespaces().Create(ctx, space, metav1.CreateOptions{}); err != nil {
		return nil, fmt.Errorf("make namespace %s: %w", namespace, err)
	}
	return b, nil
}

// phase starts a scheduler, places pods, and removes both.
func (b *bench) phase(ctx context.Context, side side, round int) (p Phase, err error) {
	name := fmt.Sprintf("%s-%d", side, round)
	o := controlplane.SchedulerOptions{Name: name, QPS: schedulerQPS, Settings: b.options.schedulerSettings(name)}
	var extender *controlplane.Extender
	if side != without {
		program := b.programs.Control
		if side == before {
			program = b.options.before
		}
		extender, err = b.plane.StartExtender(ctx, controlplane.ExtenderOptions{
			Name: "extender-" + name, Program: program, Resources: []string{resource},
			Args: append([]string{"--metrics-devices=false"}, b.options.extender...),
		})
		if err != nil {
			return p, err
		}
		defer func() { err = errors.Join(err, extender.Stop(stopGrace)) }()
		o.Extender = &extender.Entry
	}
	scheduler, err := b.plane.StartScheduler(ctx, b.programs.Kubernetes, o)
	if err != nil {
		return p, err
	}
	defer func() { err = errors.Join(err, scheduler.Stop(stopGrace), b.empty(ctx)) }()

	if _, err := b.place(ctx, scheduler.Name(), "warm", warmUp); err != nil {
		return p, fmt.Errorf("before the time is taken: %w; the scheduler's log %s ends with:\n%s", err, scheduler.LogPath(),
			scheduler.LogTail(5))
	}
	start, err := b.look(ctx, scheduler, extender)
	if err != nil {
		return p, err
	}
	times, err := b.place(ctx, scheduler.Name(), "pod", b.options.pods)
	if err != nil {
		return p, err
	}
	end, err := b.look(ctx, scheduler, extender)
	if err != nil {
		return p, err
	}
	p = newPhase(side, round, times)
	p.fill(start, end)
	if side != without {
		err = b.right(ctx)
	}
	return p, err
}

// schedulerSettings are fields of the configuration of the scheduler that pods request
// by this name.
func (o options) schedulerSettings(name string) map[string]any {
	if !o.batching {
		return nil
	}
	return map[string]any{"profiles": []any{map[string]any{
		"schedulerName": name,
		"pluginConfig": []any{map[string]any{"name": "PodTopologySpread", "args": map[string]any{
			"apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "PodTopologySpreadArgs", "defaultingType": "List",
		}}},
	}}}
}

// place makes pods as fast as the API server takes them and waits until the last
// is bound.
func (b *bench) place(ctx context.Context, scheduler, prefix string, count int) (*timeline, error) {
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
		makers, making := errgroup.WithContext(working)
		makers.SetLimit(creators)
		for i := range count {
			makers.Go(func() error {
				pod := b.nodes.Pod(namespace, fmt.Sprintf("%s-%06d", prefix, i), podUnits)
				pod.Spec.SchedulerName = scheduler
				t.began(pod.Name)
				if _, err := pods.Create(making, pod, metav1.CreateOptions{}); err != nil {
					return fmt.Errorf("make a pod: %w", err)
				}
				return nil
			})
		}
		defer t.allMade()
		return makers.Wait()
	})
	group.Go(func() error { return t.follow(working, pods, list.ResourceVersion) })
	return t, group.Wait()
}

// right checks that each pod holds what it asks for, on a device of its node, and no
// device is given to more pods than have room on it.
func (b *bench) right(ctx context.Context) error {
	path, err := b.plane.GrantKey()
	if err != nil {
		return err
	}
	key, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("read the key of grants: %w", err)
	}
	pods, err := b.client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list pods: %w", err)
	}
	if _, err := b.nodes.Used(pods.Items, key); err != nil {
		return fmt.Errorf("pods are placed wrongly: %w", err)
	}
	return nil
}

// empty deletes all pods at once, as nobody runs them.
func (b *bench) empty(ctx context.Context) error {
	pods := b.client.CoreV1().Pods(namespace)
	if err := pods.DeleteCollection(ctx, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}, metav1.ListOptions{}); err != nil {
		return fmt.Errorf("delete pods: %w", err)
	}
	left, err := pods.List(ctx, metav1.ListOptions{Limit: 1})
	if err == nil && len(left.Items) > 0 {
		err = errors.New("some are left")
	}
	if err != nil {
		return fmt.Errorf("delete pods: %w", err)
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
	extender  samples // nil without one
}

// look reads the programs' metrics and what they used.
func (b *bench) look(ctx context.Context, scheduler *controlplane.Scheduler, extender *controlplane.Extender) (s sight, err error) {
	pids := map[string]int{
		"etcd": b.plane.Etcd.PID(), "kube-apiserver": b.plane.APIServer.PID(), "kube-scheduler": scheduler.PID(), benchName: os.Getpid(),
	}
	raw, err := b.client.Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	if err != nil {
		return s, fmt.Errorf("metrics of the API server: %w", err)
	}
	if s.server, err = parseSamples(string(raw)); err != nil {
		return s, fmt.Errorf("metrics of the API server: %w", err)
	}
	text, err := scheduler.Metrics(ctx)
	if err != nil {
		return s, err
	}
	if s.scheduler, err = parseSamples(text); err != nil {
		return s, fmt.Errorf("metrics of kube-scheduler: %w", err)
	}
	if extender != nil {
		pids[extenderName] = extender.PID()
		if text, err = extender.Metrics(ctx); err != nil {
			return s, err
		}
		if s.extender, err = parseSamples(text); err != nil {
			return s, fmt.Errorf("metrics of the extender: %w", err)
		}
	}
	s.at = time.Now()
	if s.machine, err = busyNow(); err != nil {
		return s, err
	}
	s.usage = map[string]controlplane.Usage{}
	for name, pid := range pids {
		if s.usage[name], err = controlplane.UsageOf(pid); err != nil {
			return s, err
		}
	}
	return s, nil
}
