package agent

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/podresources"
	"github.com/divvy-gpu/divvy/internal/node/usage"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// Bounds of what is looked up while kubelet waits for an answer: it admits no
// other pod of the node meanwhile.
const (
	// lookupTimeout bounds all that is asked of kubelet and of the API server for
	// one answer, however often. A pod whose question is rejected has failed, so it
	// leaves time for the list of a node with hundreds of thousands of units whose
	// processors are busy.
	lookupTimeout = 4 * time.Second
	// keptForKubelet is the end of that time, in which only kubelet is asked:
	// without the API server there is an answer, without kubelet's list there is
	// none.
	keptForKubelet = 3 * time.Second
)

// While kubelet waits for an answer that depends on it, it is looked every exitInterval whether
// containers of pods that were deleted by force have exited, for exitTimeout at most: kubelet kills
// them after two seconds, and a busy node takes some more to end them. kubelet admits no pod meanwhile.
const (
	exitInterval = 50 * time.Millisecond
	exitTimeout  = 8 * time.Second
)

// askAgain is the pause before kubelet is asked again that was asked too often:
// it answers all of a node 100 times a second (podresources.DefaultQPS in its
// code), and a burst of pods takes more.
const askAgain = 15 * time.Millisecond

// podSource knows the pods of this node.
type podSource interface {
	// Cached returns what the watch has delivered.
	Cached() []*corev1.Pod
	// Synced reports whether the watch has delivered all pods once.
	Synced() bool
	// Fresh asks the API server.
	Fresh(ctx context.Context) ([]*corev1.Pod, error)
}

// kubeletLister is the part of podresources.Client that is needed here.
type kubeletLister interface {
	List(ctx context.Context) ([]podresources.Pod, error)
}

// records are kubelet's records of who holds what, asked once for all resources
// of the node, and hands them to the engine.
type records struct {
	kubelet kubeletLister
	pods    podSource
	metrics *metrics
	owner   *owner
	// resources are those of the engine's pools; planned returns the allocation that
	// was planned for a pod, nil for none; endings are the pods that are gone before
	// their containers, nil where those are not looked after.
	resources []accel.Resource
	planned   func(*corev1.Pod) *accel.Grant
	endings   *endings
	// claimed returns what the containers of pods have of claims; nil until New has built the
	// claim desk.
	claimed func([]*corev1.Pod) []usage.Container

	// turn is held while kubelet is being answered and while kubelet is asked
	// who holds what. Kubelet forgets units that it is just handing out when
	// it is asked in that moment and a pod has ended since the last time
	// (UpdateAllocatedDevices in its device manager), so the two must not
	// overlap, for none of the resources. It also makes one decision see what
	// the one before has given out, whatever the resource.
	turn sync.Mutex
	mu   sync.Mutex
	// shown are the pods that the watch had delivered before the last list of
	// kubelet was asked for; asked is true once there was a list.
	shown []*corev1.Pod
	asked bool
	// rejected are pods of which a container was rejected: kubelet asks for them no more.
	rejected map[types.UID]bool
}

// listed reports whether kubelet has listed what containers hold.
func (r *records) listed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.asked
}

// before returns pods that the watch had delivered before kubelet made the list
// that the engine knows. Kubelet names pods without their UID, so a list must not
// be held against pods that came later: one of them may have taken the name of a
// pod that the list still shows.
func (r *records) before() []*corev1.Pod {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.shown
}

// question begins the answer to a question of kubelet: it takes turn and bounds
// what is looked up. end is called when the answer is known.
func (r *records) question(ctx context.Context) (_ context.Context, end func()) {
	r.turn.Lock()
	// From now on, not from before the lock: the loop holds it for as long as
	// kubelet takes to give a list, and a question that is rejected is a pod that
	// fails.
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	return ctx, func() {
		cancel()
		r.turn.Unlock()
	}
}

// askAPI asks the API server for the pods of the node and leaves time to ask
// kubelet again.
func (r *records) askAPI(ctx context.Context) ([]*corev1.Pod, error) {
	if deadline, ok := ctx.Deadline(); ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, deadline.Add(-keptForKubelet))
		defer cancel()
	}
	return r.pods.Fresh(ctx)
}

// askKubelet is ask of records, or another way to ask.
type askKubelet func(ctx context.Context, grace time.Duration) error

// ask asks kubelet who holds what and tells all resources. What was given to a
// container less than grace ago counts as held although kubelet does not show
// it yet. ctx has a deadline. The caller holds turn.
func (r *records) ask(ctx context.Context, grace time.Duration) error {
	pods, shown, err := r.list(ctx)
	if err != nil {
		return err
	}
	r.take(ctx, pods, r.pods.Cached(), r.pods.Synced(), grace)
	// Last, so that it is never newer than what the engine knows.
	r.mu.Lock()
	r.shown, r.asked = shown, true
	r.mu.Unlock()
	return nil
}

// askFresh is ask when an answer to kubelet hangs on it: the watch may still show
// pods that have ended, whose devices count as held while kubelet does not list
// the pods. The API server knows. The caller holds turn.
func (r *records) askFresh(ctx context.Context, grace time.Duration) error {
	pods, _, err := r.list(ctx)
	if err != nil {
		return err
	}
	// After kubelet's list: what it does not list and has not ended by now keeps
	// what it has.
	fresh, err := r.askAPI(ctx)
	if err != nil {
		return err
	}
	r.take(ctx, pods, fresh, true, grace)
	return nil
}

// askFreshIfPossible is askFresh, or ask where the API server does not answer. The
// caller holds turn.
func (r *records) askFreshIfPossible(ctx context.Context, grace time.Duration) error {
	if r.askFresh(ctx, grace) == nil {
		return nil
	}
	return r.ask(ctx, grace)
}

// answer calls prefer until it answers otherwise than that too little is free or too
// little is known, at most three times, and each time with a better way to ask: kubelet may know that a pod is
// gone before the watch shows it, and may not have kept what was given out last. The
// caller holds turn.
func (r *records) answer(ctx context.Context, vendor string, prefer func(askKubelet) (alloc.Preference, error)) (alloc.Preference, error) {
	answer, err := prefer(r.ask)
	for i := 0; i < 2 && doubtful(err) && (i == 0 || r.settle(ctx, vendor)); i++ {
		again, errAgain := prefer(r.askFreshIfPossible)
		if errAgain != nil && ctx.Err() != nil {
			break // the time is up, and what was found before stands
		}
		answer, err = again, errAgain
	}
	return answer, err
}

// doubtful reports whether a rejection is because too little is free or too little is known.
func doubtful(err error) bool {
	return alloc.InDoubt(err) || err != nil && alloc.ReasonOf(err) == alloc.NoRoom
}

// settle waits until it is certain whether kubelet kept what it was given last:
// a pod may be rejected right after its containers were served, and the next must
// not suffer for that. It is false when there is nothing to wait for.
func (r *records) settle(ctx context.Context, vendor string) bool {
	e, done := r.owner.use()
	last := e.LastGiven(vendor)
	done()
	return time.Since(last) < alloc.RecordedBefore && sleep(ctx, alloc.RecordedBefore)
}

// patiently repeats a question of kubelet that is rejected while containers of pods that were
// deleted by force have devices of the vendor, each time some of them have exited. again is true
// from the second time on. The caller does not hold turn.
func patiently[T any](ctx context.Context, r *records, vendor string, ask func(again bool) (T, error)) (T, error) {
	answer, err := ask(false)
	ctx, cancel := context.WithTimeout(ctx, exitTimeout)
	defer cancel()
	for doubtful(err) && r.someExit(ctx, vendor) {
		answer, err = ask(true)
	}
	return answer, err
}

// someExit waits until the containers of one of these pods have exited. It is false when there
// are none, or ctx ends before.
func (r *records) someExit(ctx context.Context, vendor string) bool {
	e, done := r.owner.use()
	lingering := e.Lingering(vendor)
	done()
	for len(lingering) > 0 && sleep(ctx, exitInterval) {
		if len(r.endings.running(ctx, lingering)) < len(lingering) {
			return true
		}
	}
	return false
}

// list returns kubelet's list and the pods that the watch had delivered before it
// was asked for.
func (r *records) list(ctx context.Context) (listed []podresources.Pod, shown []*corev1.Pod, err error) {
	shown = r.pods.Cached()
	listed, err = r.kubelet.List(ctx)
	for status.Code(err) == codes.ResourceExhausted && sleep(ctx, askAgain) {
		shown = r.pods.Cached()
		listed, err = r.kubelet.List(ctx)
	}
	if err != nil {
		r.metrics.podResourcesErrors.Inc()
	}
	return listed, shown, err
}

// take hands kubelet's list to the engine, with the pods of the API server that it
// is to be held against.
func (r *records) take(ctx context.Context, listed []podresources.Pod, pods []*corev1.Pod, complete bool, grace time.Duration) {
	v := alloc.View{Pods: r.values(pods), Complete: complete, Grace: grace, Now: time.Now()}
	for _, pod := range listed {
		one := alloc.Listed{PodKey: alloc.PodKey{Namespace: pod.Namespace, Name: pod.Name}}
		for _, c := range pod.Containers {
			one.Containers = append(one.Containers, alloc.Holding{Container: c.Name, Units: c.Units})
		}
		v.Listed = append(v.Listed, one)
	}
	if r.endings != nil {
		v.Ending = r.endings.held()
		e, done := r.owner.use()
		unlisted := e.Unlisted(&v)
		done()
		v.Running = r.endings.running(ctx, unlisted)
	}
	e, done := r.owner.use()
	defer done()
	e.Take(v)
}

// values are the pods as the engine reads them.
func (r *records) values(pods []*corev1.Pod) []alloc.Pod {
	out := make([]alloc.Pod, len(pods))
	for i, pod := range pods {
		out[i] = alloc.Pod{
			PodRef:  accel.PodRef{UID: string(pod.UID), Namespace: pod.Namespace, Name: pod.Name},
			Created: pod.CreationTimestamp.Time, Started: started(pod), Ended: terminal(pod), Deleting: pod.DeletionTimestamp != nil,
		}
		// Annotations that cannot be followed count as not there.
		out[i].Requests, _ = kube.RequestsOf(pod, r.resources)
		if len(out[i].Requests) > 0 {
			out[i].Planned = r.planned(pod)
		}
	}
	return out
}

// asking returns the pods that kubelet may ask for: none that was rejected, although it may not
// be shown as failed yet.
func (r *records) asking(pods []*corev1.Pod) []*corev1.Pod {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.rejected) == 0 {
		return pods
	}
	return slices.DeleteFunc(slices.Clone(pods), func(p *corev1.Pod) bool { return r.rejected[p.UID] })
}

// reject notes that kubelet asks for a pod no more. Those that are gone are forgotten.
func (r *records) reject(pod *corev1.Pod) {
	shown := map[types.UID]bool{pod.UID: true}
	for _, p := range r.pods.Cached() {
		shown[p.UID] = true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.rejected == nil {
		r.rejected = map[types.UID]bool{}
	}
	maps.DeleteFunc(r.rejected, func(uid types.UID, _ bool) bool { return !shown[uid] })
	r.rejected[pod.UID] = true
}

// refresh asks kubelet on behalf of the agent's loop.
func (r *records) refresh(ctx context.Context) error {
	ctx, end := r.question(ctx)
	defer end()
	return r.ask(ctx, alloc.Recorded)
}

// seen returns the pods of this node, among them all that kubelet has taken up: when
// those that the watch has delivered are too old for a question of that size, the API
// server is asked.
func (r *records) seen(ctx context.Context, id alloc.ID, size int) []alloc.Pod {
	pods := r.values(r.asking(r.pods.Cached()))
	e, done := r.owner.use()
	late := e.Late(id, size, pods)
	done()
	if !late {
		return pods
	}
	fresh, err := r.askAPI(ctx)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Answering kubelet from what the watch has delivered")
		return pods
	}
	return r.values(r.asking(fresh))
}

func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
