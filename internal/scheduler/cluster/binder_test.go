package cluster

import (
	"context"
	"errors"
	"net/http"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	kubetesting "k8s.io/client-go/testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

var podResource = schema.GroupResource{Resource: "pods"}

func waitingPod(name, uid, amount string) *v1.Pod {
	pod := podSpec(nil, []v1.Container{container("main", amount)})
	pod.ObjectMeta = metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID(uid), CreationTimestamp: metav1.Unix(1662450043, 0)}
	pod.Status.Phase = v1.PodPending
	return pod
}

func boundPod(name, uid, amount, node string) *v1.Pod {
	pod := waitingPod(name, uid, amount)
	pod.Spec.NodeName = node
	return pod
}

func TestBindIsOneWrite(t *testing.T) {
	client := fake.NewClientset(waitingPod("p", "u", "4"))
	ref := accel.PodRef{UID: "u", Namespace: "team", Name: "p"}
	if err := NewBinder(client, nil, false).Bind(t.Context(), ref, "node-a", map[string]string{"k": "v"}); err != nil {
		t.Fatal(err)
	}
	actions := client.Actions()
	if len(actions) != 1 {
		t.Fatalf("%d calls of the API server, want 1: %v", len(actions), actions)
	}
	create, ok := actions[0].(kubetesting.CreateAction)
	if !ok || create.GetSubresource() != "binding" {
		t.Fatalf("call %v, want the creation of a binding", actions[0])
	}
	want := &v1.Binding{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "p", UID: "u", Annotations: map[string]string{"k": "v"}},
		Target:     v1.ObjectReference{Kind: "Node", Name: "node-a"},
	}
	if diff := cmp.Diff(want, create.GetObject()); diff != "" {
		t.Errorf("binding (-want +got):\n%s", diff)
	}
}

func TestBindOutcome(t *testing.T) {
	conflict := apierrors.NewConflict(podResource, "p", errors.New("already assigned"))
	tests := map[string]struct {
		answer error   // of the bind
		now    *v1.Pod // what the API server has then; nil for none
		getErr error
		is     error // nil: success; errAny: any error but the two below
	}{
		"refused": {answer: apierrors.NewForbidden(podResource, "p", errors.New("no")),
			now: boundPod("p", "u", "4", "node-a"), is: errAny},
		"gone":                    {answer: apierrors.NewNotFound(podResource, "p"), is: ErrPodGone},
		"lost answer, bound here": {answer: errors.New("connection reset"), now: boundPod("p", "u", "4", "node-a")},
		"lost answer, bound elsewhere": {answer: errors.New("connection reset"), now: boundPod("p", "u", "4", "node-b"),
			is: errAny},
		"lost answer, not bound":   {answer: errors.New("connection reset"), now: waitingPod("p", "u", "4"), is: errAny},
		"lost answer, gone by now": {answer: errors.New("connection reset"), is: ErrPodGone},
		"lost answer, another pod by now": {answer: errors.New("connection reset"), now: boundPod("p", "u2", "4", "node-a"),
			is: ErrPodGone},
		"lost answer, API server gone": {answer: errors.New("connection reset"), getErr: errors.New("connection refused"),
			is: ErrOutcomeUnknown},
		"timeout, bound here":                 {answer: apierrors.NewTimeoutError("slow", 1), now: boundPod("p", "u", "4", "node-a")},
		"the repeat of a bind that went well": {answer: conflict, now: boundPod("p", "u", "4", "node-a")},
		"somebody else bound it":              {answer: conflict, now: boundPod("p", "u", "4", "node-b"), is: errAny},
		"being deleted":                       {answer: conflict, now: waitingPod("p", "u", "4"), is: errAny},
		"internal error, but the pod is bound": {answer: apierrors.NewInternalError(errors.New("etcd")),
			now: boundPod("p", "u", "4", "node-a")},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			client := fake.NewClientset()
			client.PrependReactor("create", "pods", func(a kubetesting.Action) (bool, runtime.Object, error) {
				if a.GetSubresource() != "binding" {
					return false, nil, nil
				}
				return true, nil, tt.answer
			})
			client.PrependReactor("get", "pods", func(kubetesting.Action) (bool, runtime.Object, error) {
				if tt.getErr == nil && tt.now == nil {
					return true, nil, apierrors.NewNotFound(podResource, "p")
				}
				return true, tt.now, tt.getErr
			})
			// The caller's time is up: the question must be asked all the same.
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			err := NewBinder(client, nil, false).Bind(ctx, accel.PodRef{UID: "u", Namespace: "team", Name: "p"}, "node-a", nil)
			switch {
			case tt.is == nil && err != nil:
				t.Errorf("error %v", err)
			case errors.Is(tt.is, errAny) && (err == nil || errors.Is(err, ErrPodGone) || errors.Is(err, ErrOutcomeUnknown)):
				t.Errorf("error %v, want one that says that the pod is not bound", err)
			case tt.is != nil && !errors.Is(tt.is, errAny) && !errors.Is(err, tt.is):
				t.Errorf("error %v, want %v", err, tt.is)
			}
			if err != nil && !errors.Is(err, tt.answer) {
				t.Errorf("error %v lost its cause %v", err, tt.answer)
			}
		})
	}
}

var errAny = errors.New("any")

func TestGet(t *testing.T) {
	pod := boundPod("p", "u", "4", "node-a")
	pod.Status.Phase = v1.PodFailed
	deleted, priority := metav1.Unix(1662450044, 0), int32(7)
	pod.DeletionTimestamp, pod.Finalizers = &deleted, []string{"example.com/hold"}
	pod.Spec.Priority, pod.Status.NominatedNodeName = &priority, "node-b"
	client := fake.NewClientset(pod)
	b := NewBinder(client, []accel.Resource{gcuMemory}, false)
	got, err := b.Get(t.Context(), "team", "p")
	if err != nil {
		t.Fatal(err)
	}
	want := Pod{
		Ref: accel.PodRef{UID: "u", Namespace: "team", Name: "p"}, Created: metav1.Unix(1662450043, 0).Time, Node: "node-a", Ended: true,
		Ending: true, Nominated: "node-b",
		Requests: []accel.Request{{Resource: gcuMemory, Pod: "u", Priority: 7,
			Containers: []accel.ContainerRequest{{Name: "main", Kind: accel.AppContainer, Units: 4}}}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if _, err := b.Get(t.Context(), "team", "other"); !errors.Is(err, ErrPodGone) {
		t.Errorf("error %v, want %v", err, ErrPodGone)
	}
	client.PrependReactor("get", "pods", func(kubetesting.Action) (bool, runtime.Object, error) {
		return true, nil, &apierrors.StatusError{ErrStatus: metav1.Status{Code: http.StatusInternalServerError, Message: "etcd"}}
	})
	if _, err := b.Get(t.Context(), "team", "p"); err == nil || errors.Is(err, ErrPodGone) {
		t.Errorf("error %v, want one that is not %v", err, ErrPodGone)
	}
}
