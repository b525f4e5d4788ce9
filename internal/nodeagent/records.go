package nodeagent

import (
	"context"
	"errors"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/podresources"
)

// Bounds of what is looked up while kubelet waits for an answer: it admits no
// other pod of the node meanwhile.
const (
	// lookupTimeout bounds all that is asked of kubelet and of the API server for
	// one answer, however often.
	lookupTimeout = time.Second
	// keptForKubelet is the end of that time, in which only kubelet is asked:
	// without the API server there is an answer, without kubelet's list there is
	// none.
	keptForKubelet = 400 * time.Millisecond
)

// askAgain is the pause before kubelet is asked again that was asked too often:
// it answers all of a node 100 times a second (podresources.DefaultQPS in its
// code), and a burst of pods takes more.
const askAgain = 15 * time.Millisecond

// How long something that was given to a container counts as held although
// kubelet does not list it.
const (
	// recorded is the time that kubelet may take from the answer of Allocate to
	// its records.
	recorded = time.Second
	// recordedBefore is the same where kubelet asks the next question: it has
	// recorded what it was answered before, but for containers that are given
	// their devices anew beside the admission of pods.
	recordedBefore = 100 * time.Millisecond
)

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
// of the node.
type records struct {
	kubelet kubeletLister
	pods    podSource
	metrics *metrics

	// turn is held while kubelet is being answered and while kubelet is asked
	// who holds what. Kubelet forgets units that it is just handing out when
	// it is asked in that moment and a pod has ended since the last time
	// (UpdateAllocatedDevices in its device manager), so the two must not
	// overlap, for none of the resources. It also makes one decision see what
	// the one before has given out, whatever the resource.
	turn sync.Mutex
	// parts take each list that kubelet gives. It does not change once the first
	// question was asked.
	parts []part
	// fresh is what the API server said in place of what the watch has delivered,
	// while parts take a list; nil otherwise. Guarded by turn.
	fresh podSource

	mu sync.Mutex
	// shown are the pods that the watch had delivered before the last list of
	// kubelet was asked for.
	shown []*corev1.Pod
}

// before returns pods that the watch had delivered before kubelet made the list
// that the parts know. Kubelet names pods without their UID, so a list must not
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
	r.give(pods, grace)
	// Last, so that it is never newer than what the parts know.
	r.mu.Lock()
	r.shown = shown
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
	r.fresh = freshPods{fresh}
	defer func() { r.fresh = nil }()
	r.give(pods, grace)
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

// answer calls prefer until it answers otherwise than with the error full, at most
// three times, and each time with a better way to ask: kubelet may know that a pod is
// gone before the watch shows it, and may not have kept what the tenant gave out last.
// The caller holds turn.
func (r *records) answer(ctx context.Context, t *tenant, full error, prefer func(askKubelet) ([]string, error)) ([]string, error) {
	ids, err := prefer(r.ask)
	for i := 0; i < 2 && errors.Is(err, full) && (i == 0 || t.settle(ctx)); i++ {
		again, errAgain := prefer(r.askFreshIfPossible)
		if errAgain != nil && ctx.Err() != nil {
			break // the time is up, and what was found before stands
		}
		ids, err = again, errAgain
	}
	return ids, err
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

// give hands kubelet's list to all parts.
func (r *records) give(pods []podresources.Pod, grace time.Duration) {
	for _, p := range r.parts {
		p.take(pods, grace)
	}
}

// around returns the pods of the API server that a list of kubelet is to be held
// against. The caller is a part that takes the list.
func (r *records) around() podSource {
	if r.fresh != nil {
		return r.fresh
	}
	return r.pods
}

// freshPods are the pods as the API server knows them now.
type freshPods struct{ pods []*corev1.Pod }

func (f freshPods) Cached() []*corev1.Pod                        { return f.pods }
func (f freshPods) Synced() bool                                 { return true }
func (f freshPods) Fresh(context.Context) ([]*corev1.Pod, error) { return f.pods, nil }

// refresh asks kubelet on behalf of the agent's loop.
func (r *records) refresh(ctx context.Context) error {
	ctx, end := r.question(ctx)
	defer end()
	return r.ask(ctx, recorded)
}

// seen returns the pods of this node, among them all that kubelet has taken up:
// when the watch has not delivered one of those yet, or late says so, the API
// server is asked.
func (r *records) seen(ctx context.Context, active map[podKey]bool, late func([]*corev1.Pod) bool) []*corev1.Pod {
	pods := r.pods.Cached()
	known := make(map[podKey]bool, len(pods))
	for _, pod := range pods {
		known[podKey{pod.Namespace, pod.Name}] = true
	}
	ask := late(pods)
	for key := range active {
		ask = ask || !known[key]
	}
	if !ask {
		return pods
	}
	fresh, err := r.askAPI(ctx)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Answering kubelet from what the watch has delivered")
		return pods
	}
	return fresh
}

// errNotAsked is why nothing is known yet of what containers hold.
var errNotAsked = errors.New("kubelet was not asked yet who holds what")

func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
