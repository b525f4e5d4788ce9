package gpuoperator

import (
	"context"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
)

// TestFollow plays the labels as the operator sets them, in the order of its sources: the driver
// manager of a release with the client label, and the MIG manager of one without.
func TestFollow(t *testing.T) {
	const client, plugin = deployPrefix + "client", deployPrefix + "device-plugin"
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}}
	api := fake.NewClientset(node, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "b", Labels: map[string]string{migLabel: "pending"}}})
	pause := backend.NewPause(Unknown())
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		Follow(ctx, api, "a", pause)
	}()
	defer func() { cancel(); <-ended }()

	for i, step := range []struct {
		set   map[string]string
		cause string
	}{
		{map[string]string{client: "true", plugin: "true"}, ""},
		{map[string]string{upgradeLabel: "upgrade-required"}, ""},
		{map[string]string{upgradeLabel: "cordon-required"}, CauseDriverUpgrade},
		{map[string]string{upgradeLabel: "drain-required"}, CauseDriverUpgrade},
		{map[string]string{upgradeLabel: "pod-restart-required"}, CauseDriverUpgrade},
		{map[string]string{client: pausedForUpgrade, plugin: pausedForUpgrade}, CauseDriverUpgrade},
		{map[string]string{client: "true", plugin: "true"}, CauseDriverUpgrade},
		{map[string]string{upgradeLabel: "validation-required"}, ""},
		{map[string]string{upgradeLabel: "uncordon-required"}, ""},
		{map[string]string{upgradeLabel: "upgrade-done"}, ""},

		{map[string]string{migLabel: "pending"}, CauseMIGChange},
		{map[string]string{plugin: pausedForMIG}, CauseMIGChange},
		{map[string]string{migLabel: "rebooting"}, CauseMIGChange},
		{map[string]string{plugin: "true"}, CauseMIGChange},
		{map[string]string{migLabel: "success"}, ""},
	} {
		for key, value := range step.set {
			if node.Labels == nil {
				node.Labels = map[string]string{}
			}
			node.Labels[key] = value
		}
		updated, err := api.CoreV1().Nodes().Update(t.Context(), node.DeepCopy(), metav1.UpdateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		node = updated
		var why accel.Health
		for end := time.Now().Add(2 * time.Minute); ; time.Sleep(time.Millisecond) {
			if why, _ = pause.Now(); why == Pause(node.Labels) || time.Now().After(end) {
				break
			}
		}
		if why.Cause != step.cause {
			t.Errorf("step %d, %v: cause is %q, want %q", i, step.set, why.Cause, step.cause)
		}
	}
}
