package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// TookTheLead is the condition of a pod that CatchUp sets.
const TookTheLead v1.PodConditionType = "divvy.dev/TookTheLead"

// lookEvery is how often CatchUp looks how far the state is.
const lookEvery = 5 * time.Millisecond

// seen reports whether the state has every change of pods up to that version.
func (s *State) seen(version string) (bool, error) {
	r := s.reflector.Load()
	if r == nil || !s.Synced() {
		return false, nil
	}
	// Before the first list is complete it is "", and in between it may be anything
	// that is older.
	last := r.LastSyncResourceVersion()
	if last == "" || last == "0" {
		return false, nil
	}
	order, err := resourceversion.CompareResourceVersion(last, version)
	if err != nil {
		return false, fmt.Errorf("versions of the pods: %w", err)
	}
	return order >= 0, nil
}

// CatchUp returns nil when the state has everything that was written to any pod
// before it was called. It is proven by a write: the API server numbers all changes of
// pods one after the other, so whoever has seen that write has seen what came before,
// whatever the watch and the API server's caches lag behind. The write is the condition
// TookTheLead on the pod that is named, which must be among those that are followed.
func (s *State) CatchUp(ctx context.Context, clients kube.Clients, namespace, name string) error {
	synced := func(context.Context) (bool, error) { return s.Synced(), nil }
	if err := wait.PollUntilContextCancel(ctx, lookEvery, true, synced); err != nil {
		return fmt.Errorf("wait for the ledger to be read: %w", err)
	}
	now := time.Now().UTC()
	patch, err := json.Marshal(map[string]any{"status": map[string]any{"conditions": []v1.PodCondition{{
		Type: TookTheLead, Status: v1.ConditionTrue, LastTransitionTime: metav1.NewTime(now), Reason: "GotTheLease",
		// The time makes it another one every time; a patch that changes nothing is no write.
		Message: "All pods bound before this are known to " + now.Format(time.RFC3339Nano),
	}}}})
	if err != nil {
		return fmt.Errorf("catch up: %w", err)
	}
	pod, err := clients.Kubernetes.CoreV1().Pods(namespace).Patch(ctx, name, types.StrategicMergePatchType, patch, metav1.PatchOptions{},
		"status")
	if err != nil {
		return fmt.Errorf("write the condition %s of pod %s/%s: %w", TookTheLead, namespace, name, err)
	}
	seen := func(context.Context) (bool, error) { return s.seen(pod.ResourceVersion) }
	if err := wait.PollUntilContextCancel(ctx, lookEvery, true, seen); err != nil {
		return fmt.Errorf("wait until the watch delivers the change of pod %s/%s: %w", namespace, name, err)
	}
	return nil
}
