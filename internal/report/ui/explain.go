package ui

import (
	"context"
	"fmt"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/report/why"
)

const (
	// explainEvery is the least pause between two passes over the pods that wait, and passLimit how
	// long one takes. In a large cluster a pass explains some of the pods, and the next goes on.
	explainEvery = 3 * time.Second
	passLimit    = time.Second
	// snapshotAge is how old the cluster may be that an explanation is made from.
	snapshotAge = 2 * time.Second
	// maxEvents bounds the events of a pod that are read.
	maxEvents = 100
)

// explainer is why on the newest snapshot. mu is held while one pod is explained: it takes up to a
// second of a processor in a large cluster.
type explainer struct {
	mu       sync.Mutex
	why      *why.Explainer
	snapshot *why.Snapshot
	waiting  []*v1.Pod
	objects  uint64 // of the snapshot
	made     time.Time
	// next is the pod at which the next pass goes on, and passed the objects that the last whole
	// pass has seen.
	next   int
	passed uint64
}

// unknownPodError says that there is no such pod.
type unknownPodError struct{ error }

// renew makes the explainer again if the cluster has changed. f.explainer.mu is held.
func (f *Feed) renew() {
	e := &f.explainer
	now := f.cluster.Objects()
	if e.why != nil && (now == e.objects || time.Since(e.made) < snapshotAge) {
		return
	}
	e.objects = now
	e.snapshot, e.waiting = f.cluster.Snapshot()
	e.snapshot.Taken = f.options.Now()
	e.snapshot.Failed = f.missing
	e.why, e.made = why.New(e.snapshot), time.Now()
}

// explainWaiting explains the pods that wait, as many as one pass may.
func (f *Feed) explainWaiting(ctx context.Context) {
	if !f.cluster.Waits() {
		return
	}
	e := &f.explainer
	began := time.Now()
	for ctx.Err() == nil && time.Since(began) < passLimit {
		e.mu.Lock()
		f.renew()
		if e.next == 0 && e.passed == e.objects {
			e.mu.Unlock()
			return
		}
		if e.next >= len(e.waiting) {
			e.next, e.passed = 0, e.objects
			e.mu.Unlock()
			return
		}
		pod := e.waiting[e.next]
		e.next++
		explanation := e.why.Pod(pod)
		e.mu.Unlock()
		f.cluster.SetReason(pod, explanation.Reason())
	}
}

// knows reports whether there is such a pod.
func (f *Feed) knows(namespace, name string) bool {
	f.explainer.mu.Lock()
	defer f.explainer.mu.Unlock()
	f.renew()
	return f.explainer.snapshot.Pod(namespace, name) != nil
}

// explain explains one pod, with its events and the rights of the person.
func (f *Feed) explain(ctx context.Context, namespace, name string) (*why.Explanation, error) {
	if err := f.informers.Synced(); err != nil {
		return nil, fmt.Errorf("the cluster has not been read yet: %w", err)
	}
	if !f.knows(namespace, name) { // before the API server is asked about whatever the name is
		return nil, unknownPodError{fmt.Errorf("namespace %s has no pod %q", namespace, name)}
	}
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	var failed []why.Failure
	events, err := f.options.Client.CoreV1().Events(namespace).List(ctx, metav1.ListOptions{
		FieldSelector: fields.Set{"involvedObject.kind": "Pod", "involvedObject.name": name}.String(), Limit: maxEvents})
	switch {
	case apierrors.IsForbidden(err):
		failed = []why.Failure{{Source: why.SourceEvents, Reason: err.Error()}}
	case err != nil:
		return nil, fmt.Errorf("list the events of pod %s/%s: %w", namespace, name, err)
	}
	mayDelete := kube.MayDeletePods(ctx, f.options.Client, namespace)

	e := &f.explainer
	e.mu.Lock()
	defer e.mu.Unlock()
	f.renew()
	s := e.snapshot
	pod := s.Pod(namespace, name)
	if pod == nil {
		return nil, unknownPodError{fmt.Errorf("namespace %s has no pod %q", namespace, name)}
	}
	before := *s
	defer func() { *s = before }() // for the next pod
	if events != nil {
		s.Events = events.Items
	}
	s.Failed = append(failed, s.Failed...)
	s.MayDelete = mayDelete
	s.Controller = func(kind, namespace, name string) (runtime.Object, error) {
		return kube.Controller(ctx, f.options.Client, kind, namespace, name)
	}
	e.why.Forget() // what the passes found out did not have all of this
	explanation := e.why.Pod(pod)
	return &explanation, nil
}
