package cluster

import (
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	kubetesting "k8s.io/client-go/testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// TestWakeWritesOneAnnotation: one request, through the status, to the pod of that
// UID alone.
func TestWakeWritesOneAnnotation(t *testing.T) {
	client := fake.NewClientset(waitingPod("p", "u", "4"))
	binder := &Binder{client: client}
	if err := binder.Wake(t.Context(), accel.PodRef{UID: "u", Namespace: "team", Name: "p"}); err != nil {
		t.Fatal(err)
	}
	actions := client.Actions()
	if len(actions) != 1 {
		t.Fatalf("%d calls of the API server, want 1: %v", len(actions), actions)
	}
	patch, ok := actions[0].(kubetesting.PatchAction)
	if !ok || patch.GetSubresource() != "status" || patch.GetPatchType() != types.MergePatchType {
		t.Fatalf("call %v, want a merge patch of the status", actions[0])
	}
	var got map[string]map[string]any
	if err := json.Unmarshal(patch.GetPatch(), &got); err != nil {
		t.Fatal(err)
	}
	annotations, _ := got["metadata"]["annotations"].(map[string]any)
	at, _ := annotations[wire.RetryAnnotation].(string)
	if _, err := time.Parse(time.RFC3339Nano, at); err != nil {
		t.Errorf("the annotation's value %q is no time: %v", at, err)
	}
	want := map[string]map[string]any{"metadata": {"uid": "u", "annotations": map[string]any{wire.RetryAnnotation: at}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("patch (-want +got):\n%s", diff)
	}
}

func TestWakeOutcome(t *testing.T) {
	for name, tt := range map[string]struct {
		answer error
		gone   bool
	}{
		"gone":    {apierrors.NewNotFound(podResource, "p"), true},
		"another": {apierrors.NewConflict(podResource, "p", errors.New("the UID in the precondition differs")), true},
		"refused": {apierrors.NewForbidden(podResource, "p", errors.New("no")), false},
		"away":    {errors.New("connection refused"), false},
	} {
		t.Run(name, func(t *testing.T) {
			client := fake.NewClientset()
			client.PrependReactor("patch", "pods", func(kubetesting.Action) (bool, runtime.Object, error) { return true, nil, tt.answer })
			err := (&Binder{client: client}).Wake(t.Context(), accel.PodRef{UID: "u", Namespace: "team", Name: "p"})
			if !errors.Is(err, tt.answer) || errors.Is(err, ErrPodGone) != tt.gone {
				t.Errorf("Wake = %v, gone %t", err, tt.gone)
			}
		})
	}
}
