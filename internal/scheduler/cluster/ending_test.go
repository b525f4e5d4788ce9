package cluster

import (
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// with sets the states of the pod's containers.
func with(pod *v1.Pod, phase v1.PodPhase, states ...v1.ContainerState) *v1.Pod {
	pod.Status.Phase, pod.Status.ContainerStatuses = phase, nil
	for _, s := range states {
		pod.Status.ContainerStatuses = append(pod.Status.ContainerStatuses, v1.ContainerStatus{State: s})
	}
	return pod
}

// graced sets the pod's grace period, in seconds.
func graced(pod *v1.Pod, seconds int64) *v1.Pod {
	pod.Spec.TerminationGracePeriodSeconds = &seconds
	return pod
}

var (
	stateRuns  = v1.ContainerState{Running: &v1.ContainerStateRunning{}}
	stateWaits = v1.ContainerState{Waiting: &v1.ContainerStateWaiting{Reason: "ContainerCreating"}}
	stateEnded = v1.ContainerState{Terminated: &v1.ContainerStateTerminated{}}
)

func TestMayRun(t *testing.T) {
	sidecar := with(boundPod("p", "u", "4", "n"), v1.PodRunning, stateEnded)
	sidecar.Status.InitContainerStatuses = []v1.ContainerStatus{{State: stateRuns}}
	for name, tt := range map[string]struct {
		pod  *v1.Pod
		want bool
	}{
		"runs":                           {with(boundPod("p", "u", "4", "n"), v1.PodRunning, stateRuns), true},
		"one of two runs":                {with(boundPod("p", "u", "4", "n"), v1.PodRunning, stateEnded, stateRuns), true},
		"is being made":                  {with(boundPod("p", "u", "4", "n"), v1.PodPending, stateWaits), true},
		"a sidecar runs":                 {sidecar, true},
		"kubelet has not looked at it":   {boundPod("p", "u", "4", "n"), false},
		"all have ended":                 {with(boundPod("p", "u", "4", "n"), v1.PodRunning, stateEnded), false},
		"has failed":                     {with(boundPod("p", "u", "4", "n"), v1.PodFailed, stateEnded), false},
		"was refused":                    {with(boundPod("p", "u", "4", "n"), v1.PodFailed), false},
		"failed before it was started":   {with(boundPod("p", "u", "4", "n"), v1.PodFailed, stateEnded, stateWaits), false},
		"somebody else says that it has": {with(boundPod("p", "u", "4", "n"), v1.PodFailed, stateRuns), true},
	} {
		if got := kube.MayRun(tt.pod); got != tt.want {
			t.Errorf("%s: MayRun = %t", name, got)
		}
	}
}

// ending makes the node list a pod as gone before its containers.
func (f *fixture) ending(node *metav1.PartialObjectMetadata, uid string, devices ...accel.DeviceID) *metav1.PartialObjectMetadata {
	f.t.Helper()
	node = node.DeepCopy()
	value, err := wire.EncodeEnding([]wire.Ending{{
		Pod: accel.PodRef{UID: uid, Namespace: "team", Name: "p"}, Resource: gcuMemory, Units: 4, Devices: devices,
	}})
	f.ok(err)
	node.Annotations[wire.EndingAnnotation] = value
	return node
}

// TestMemoryIsFreeWhenContainersAre: not when the pod's object is gone.
func TestMemoryIsFreeWhenContainersAre(t *testing.T) {
	const held, free = "a: 0 4", "a: 0 0"
	running := func(f *fixture) *v1.Pod {
		return with(f.grant(boundPod("p", "u", "4", "a"), testKey, 1), v1.PodRunning, stateRuns)
	}
	for name, tt := range map[string]func(f *fixture, node *metav1.PartialObjectMetadata, pass func(time.Duration)){
		"kubelet ends it": func(f *fixture, _ *metav1.PartialObjectMetadata, _ func(time.Duration)) {
			pod := running(f)
			pod.DeletionTimestamp = &metav1.Time{}
			f.ok(f.books.Pods().Update(pod))
			f.want(held)
			f.ok(f.books.Pods().Update(with(running(f), v1.PodFailed, stateEnded)))
			f.want(free)
			f.ok(f.books.Pods().Delete(with(running(f), v1.PodFailed, stateEnded)))
			f.want(free)
		},
		"an older kubelet lets it go": func(f *fixture, _ *metav1.PartialObjectMetadata, _ func(time.Duration)) {
			f.ok(f.books.Pods().Delete(with(running(f), v1.PodRunning, stateEnded)))
			f.want(free)
		},
		"deleted by force, and the node says nothing": func(f *fixture, _ *metav1.PartialObjectMetadata, pass func(time.Duration)) {
			f.ok(f.books.Pods().Delete(running(f)))
			pass(30*time.Second + endingGrace - time.Second)
			f.want(held)
			pass(time.Second)
			f.want(free)
		},
		"deleted by force with a long grace period, and the node says nothing": func(f *fixture, _ *metav1.PartialObjectMetadata,
			pass func(time.Duration)) {
			f.ok(f.books.Pods().Update(graced(running(f), 300)))
			f.ok(f.books.Pods().Delete(graced(running(f), 300)))
			pass(300 * time.Second)
			f.want(held)
			pass(endingGrace)
			f.want(free)
		},
		"deleted by force with a grace period of years, and the node says nothing": func(f *fixture, _ *metav1.PartialObjectMetadata,
			pass func(time.Duration)) {
			f.ok(f.books.Pods().Delete(graced(running(f), 1<<40)))
			pass(maxGrace)
			f.want(held)
			pass(endingGrace)
			f.want(free)
		},
		"deleted by force without a grace period, and the node says nothing": func(f *fixture, _ *metav1.PartialObjectMetadata,
			pass func(time.Duration)) {
			f.ok(f.books.Pods().Delete(graced(running(f), 0)))
			pass(endingGrace - time.Second)
			f.want(held)
			pass(time.Second)
			f.want(free)
		},
		"deleted gracefully, with a long grace period": func(f *fixture, _ *metav1.PartialObjectMetadata, pass func(time.Duration)) {
			pod := graced(running(f), 3600)
			pod.DeletionTimestamp = &metav1.Time{Time: time.Unix(4600, 0)}
			f.ok(f.books.Pods().Update(pod))
			pass(time.Hour)
			f.want(held)
			f.ok(f.books.Pods().Delete(with(graced(running(f), 3600), v1.PodRunning, stateEnded)))
			f.want(free)
		},
		"deleted by force before it was started": func(f *fixture, _ *metav1.PartialObjectMetadata, _ func(time.Duration)) {
			f.ok(f.books.Pods().Delete(f.grant(boundPod("p", "u", "4", "a"), testKey, 1)))
			f.want(free)
		},
		"deleted by force while the daemon was away, which comes back and lists it no more": func(f *fixture,
			node *metav1.PartialObjectMetadata, pass func(time.Duration)) {
			f.ok(f.books.Pods().Delete(running(f)))
			pass(10 * time.Second)
			changed := node.DeepCopy()
			changed.Annotations["daemon"] = "back"
			f.ok(f.books.Nodes().Update(changed))
			f.want(held) // nothing says that its containers are gone
			pass(30 * time.Second)
			f.want(free)
		},
		"deleted by force, and its containers take their time": func(f *fixture, node *metav1.PartialObjectMetadata,
			pass func(time.Duration)) {
			f.ok(f.books.Pods().Delete(running(f)))
			f.ok(f.books.Nodes().Update(f.ending(node, "u", "a-1")))
			pass(time.Hour)
			f.want(held)
			f.ok(f.books.Nodes().Update(node))
			f.want(free)
		},
		"the node says so first": func(f *fixture, node *metav1.PartialObjectMetadata, pass func(time.Duration)) {
			f.ok(f.books.Nodes().Update(f.ending(node, "u", "a-1")))
			f.ok(f.books.Pods().Delete(running(f)))
			pass(time.Hour)
			f.want(held)
			f.ok(f.books.Nodes().Update(node))
			f.want(free)
		},
		"the node says so late": func(f *fixture, node *metav1.PartialObjectMetadata, pass func(time.Duration)) {
			f.ok(f.books.Pods().Delete(running(f)))
			pass(time.Minute)
			f.want(free)
			f.ok(f.books.Nodes().Update(f.ending(node, "u", "a-1")))
			f.want(held)
		},
		"another of its name comes": func(f *fixture, node *metav1.PartialObjectMetadata, pass func(time.Duration)) {
			next := f.grant(boundPod("p", "v", "4", "a"), testKey, 0)
			f.ok(f.books.Pods().Update(next))
			f.want("a: 4 4")
			f.ok(f.books.Nodes().Update(f.ending(node, "u", "a-1")))
			pass(time.Hour)
			f.want("a: 4 4")
			f.ok(f.books.Nodes().Update(node))
			f.want("a: 4 0")
			if pod, ok := f.books.Pod("team", "p"); !ok || pod.Ref.UID != "v" {
				t.Errorf("the books have %+v", pod)
			}
		},
		"somebody else calls it ended": func(f *fixture, node *metav1.PartialObjectMetadata, _ func(time.Duration)) {
			f.ok(f.books.Pods().Update(with(running(f), v1.PodFailed, stateRuns)))
			f.want(held)
			f.ok(f.books.Nodes().Update(f.ending(node, "u", "a-1")))
			f.ok(f.books.Pods().Delete(with(running(f), v1.PodFailed, stateRuns)))
			f.want(held)
			f.ok(f.books.Nodes().Update(node))
			f.want(free)
		},
		"somebody else calls it ended, then kubelet": func(f *fixture, _ *metav1.PartialObjectMetadata, _ func(time.Duration)) {
			f.ok(f.books.Pods().Update(with(running(f), v1.PodFailed, stateRuns)))
			f.want(held)
			f.ok(f.books.Pods().Update(with(running(f), v1.PodFailed, stateEnded)))
			f.want(free)
		},
		"its end was missed": func(f *fixture, _ *metav1.PartialObjectMetadata, pass func(time.Duration)) {
			f.ok(f.books.Pods().Replace(nil, ""))
			f.want(held)
			pass(unseenGrace)
			f.want(free)
		},
		"it was not gone": func(f *fixture, _ *metav1.PartialObjectMetadata, pass func(time.Duration)) {
			f.ok(f.books.Pods().Delete(running(f)))
			f.ok(f.books.Pods().Update(running(f)))
			pass(time.Hour)
			f.want(held)
		},
		"its node leaves the cluster": func(f *fixture, node *metav1.PartialObjectMetadata, _ func(time.Duration)) {
			f.ok(f.books.Nodes().Update(f.ending(node, "u", "a-1")))
			f.ok(f.books.Pods().Delete(running(f)))
			f.ok(f.books.Nodes().Delete(node))
			f.ok(f.books.Nodes().Update(node))
			f.want(free)
		},
		"the list is broken": func(f *fixture, node *metav1.PartialObjectMetadata, pass func(time.Duration)) {
			f.ok(f.books.Nodes().Update(f.ending(node, "u", "a-1")))
			f.ok(f.books.Pods().Delete(running(f)))
			broken := node.DeepCopy()
			broken.Annotations[wire.EndingAnnotation] = "{"
			f.ok(f.books.Nodes().Update(broken))
			pass(time.Hour)
			f.want(held)
		},
		"the extender starts meanwhile": func(f *fixture, node *metav1.PartialObjectMetadata, pass func(time.Duration)) {
			again := newFixture(t)
			again.ok(again.books.Nodes().Replace([]any{again.ending(node, "u", "a-1")}, ""))
			again.ok(again.books.Pods().Replace(nil, ""))
			again.books.Settle()
			again.want(held)
			again.ok(again.books.Nodes().Update(node))
			again.want(free)
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			clock := time.Unix(1000, 0)
			f.books.config.Now = func() time.Time { return clock }
			node := f.node("a", 16, 16)
			f.ok(f.books.Nodes().Replace([]any{node}, ""))
			f.ok(f.books.Pods().Replace([]any{running(f)}, ""))
			f.want(held)
			tt(f, node, func(d time.Duration) { clock = clock.Add(d); f.books.Settle() })
		})
	}
}
