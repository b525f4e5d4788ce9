package agent

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/cgroup"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// unknownFor is how long a pod is taken to run whose control group cannot be looked
// at: kubelet ends the containers of a pod without a word of its own after 30 s.
const unknownFor = time.Minute

// endingInterval is how often the containers of such pods are looked after.
const endingInterval = 500 * time.Millisecond

// endings knows the pods whose containers run although the API server does not have
// them any more, or says that they have ended: those that were deleted by force,
// and those of which somebody else than kubelet said so. Kubelet itself frees their
// devices at once, and neither lists nor tells them; their control groups tell.
//
// Each pod that went while its containers may have run is published once, also when
// they have ended since: the extender waits for that word. Only the agent's loop
// calls turn.
type endings struct {
	// cgroups is the folder of the host's control groups.
	cgroups string
	now     func() time.Time

	mu   sync.Mutex
	went []*corev1.Pod // since the last turn; guarded by mu
	// devices are those that such pods hold, by resource; guarded by mu.
	devices map[accel.Resource][]accel.DeviceID

	// settled are the pods, by UID, that the API server calls ended and whose
	// containers were looked after already.
	settled map[string]bool
	// pods are by UID. restored is true once those of an earlier run are among them.
	pods     map[string]*endingPod
	restored bool
}

// endingPod is one such pod.
type endingPod struct {
	holds []wire.Ending
	since time.Time
	// published is true once the API server has it.
	published bool
}

func newEndings(cgroups string) *endings {
	return &endings{cgroups: cgroups, now: time.Now, settled: map[string]bool{}, pods: map[string]*endingPod{}}
}

// gone takes a pod that the API server does not have any more.
func (e *endings) gone(object any) {
	pod, ok := object.(*corev1.Pod)
	if !ok || pod.Spec.NodeName == "" || !kube.MayRun(pod) {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.went = append(e.went, pod)
}

// held returns the devices that such pods have, by resource. The map is replaced,
// never changed.
func (e *endings) held() map[accel.Resource][]accel.DeviceID {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.devices
}

// turn returns what is to be published. holds says what a pod has; before is what is
// published now, and alive are the pods of the API server.
func (e *endings) turn(ctx context.Context, before string, alive []*corev1.Pod, holds func(*corev1.Pod) []wire.Ending) []wire.Ending {
	now := e.now()
	e.restore(ctx, before, now)
	e.mu.Lock()
	went := e.went
	e.went = nil
	e.mu.Unlock()
	lives, settled := make(map[string]bool, len(alive)), map[string]bool{}
	for _, pod := range alive {
		uid := string(pod.UID)
		switch {
		case !terminal(pod):
			lives[uid] = true
		case kube.MayRun(pod):
			if !e.settled[uid] {
				went = append(went, pod)
			}
			settled[uid] = true
		}
	}
	e.settled = settled
	for _, pod := range went {
		if uid := string(pod.UID); e.pods[uid] == nil {
			if h := holds(pod); len(h) > 0 {
				e.pods[uid] = &endingPod{holds: h, since: now}
				klog.FromContext(ctx).Info("A pod was deleted before its containers exited; keeping its allocation until they exit",
					"pod", klog.KObj(pod))
			}
		}
	}
	e.drop(ctx, lives, now)
	return e.list()
}

// restore takes over what an earlier run of the program published.
func (e *endings) restore(ctx context.Context, before string, now time.Time) {
	if e.restored {
		return
	}
	e.restored = true
	listed, err := wire.DecodeEnding(before)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Could not parse the list of ending pods on the node; writing it again")
		return
	}
	for _, one := range listed {
		pod := e.pods[one.Pod.UID]
		if pod == nil {
			pod = &endingPod{since: now, published: true}
			e.pods[one.Pod.UID] = pod
		}
		pod.holds = append(pod.holds, one)
	}
}

// drop takes out the pods whose containers have ended and that were published.
func (e *endings) drop(ctx context.Context, lives map[string]bool, now time.Time) {
	if len(e.pods) == 0 {
		return
	}
	uids := make([]string, 0, len(e.pods))
	for uid := range e.pods {
		uids = append(uids, uid)
	}
	running, err := e.look(ctx, uids)
	for uid, pod := range e.pods {
		runs := running[uid] || err != nil && now.Sub(pod.since) < unknownFor
		if lives[uid] || !runs && pod.published {
			delete(e.pods, uid)
		}
	}
}

// look returns which of the pods, by UID, have processes.
func (e *endings) look(ctx context.Context, uids []string) (map[string]bool, error) {
	running, err := cgroup.RunningPods(e.cgroups, uids)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Could not determine whether the containers of deleted pods have exited", "pods", len(uids))
	}
	return running, err
}

// running returns those of the pods, by UID, that have processes; none where control groups
// cannot be read. It is safe for concurrent use.
func (e *endings) running(ctx context.Context, uids []string) map[string]bool {
	if len(uids) == 0 {
		return nil
	}
	running, _ := e.look(ctx, uids) // it is logged
	maps.DeleteFunc(running, func(_ string, runs bool) bool { return !runs })
	return running
}

// list is what is to be published, and notes the devices.
func (e *endings) list() []wire.Ending {
	var out []wire.Ending
	devices := map[accel.Resource][]accel.DeviceID{}
	for _, pod := range e.pods {
		out = append(out, pod.holds...)
		for _, h := range pod.holds {
			devices[h.Resource] = append(devices[h.Resource], h.Devices...)
		}
	}
	slices.SortFunc(out, func(a, b wire.Ending) int { return strings.Compare(a.Pod.UID, b.Pod.UID) })
	e.mu.Lock()
	defer e.mu.Unlock()
	e.devices = devices
	return out[:min(len(out), wire.MaxEnding)]
}

// told notes that all is published.
func (e *endings) told() {
	for _, pod := range e.pods {
		pod.published = true
	}
}

// waits reports whether there is something to look at again.
func (e *endings) waits() bool { return len(e.pods) > 0 }

// endingOf returns what a pod, for which an allocation was planned perhaps, holds of the memory
// resources.
func (all offerings) endingOf(pod *corev1.Pod, planned *accel.Grant) []wire.Ending {
	var out []wire.Ending
	for _, r := range all {
		if r.parts[0].Kind != alloc.Memory {
			continue
		}
		request := kube.RequestOf(pod, r.name)
		units := request.Peak()
		if units <= 0 {
			continue
		}
		one := wire.Ending{
			Pod:      accel.PodRef{UID: string(pod.UID), Namespace: pod.Namespace, Name: pod.Name},
			Resource: r.name, Units: min(units, accel.MaxUnits),
		}
		if planned != nil && planned.Resource == r.name {
			one.Devices = planned.Devices()
		}
		out = append(out, one)
	}
	return out
}

// publishEnding writes which pods are gone before their containers.
func (a *Agent) publishEnding(ctx context.Context) error {
	node, err := a.publisher.current()
	if err != nil {
		return err
	}
	if !a.pods.Synced() {
		return nil
	}
	before := node.Annotations[wire.EndingAnnotation]
	holds := func(pod *corev1.Pod) []wire.Ending { return a.offerings.endingOf(pod, a.planned(pod)) }
	value, err := wire.EncodeEnding(a.endings.turn(ctx, before, a.pods.Cached(), holds))
	if err != nil {
		return err
	}
	if value != before {
		if err := a.publisher.annotate(ctx, wire.EndingAnnotation, value); err != nil {
			return err
		}
	}
	a.endings.told()
	if a.endings.waits() {
		time.AfterFunc(endingInterval, a.signals.wake.raise)
	}
	return nil
}
