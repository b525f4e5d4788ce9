//go:build e2e

package installation

import (
	"context"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// TestReplacedScheduler installs divvy-scheduler in the place of kube-scheduler: it holds
// kube-scheduler's Lease, and places pods of either kind that name no scheduler. The end of install
// compares the manifest with that from before.
func TestReplacedScheduler(t *testing.T) {
	ctx := t.Context()
	install(t, "scheduler.mode=replace")
	runPod(t, lab.Pods.New("gcushare-pod-1", testenv.Container("app", 4)))
	wantScheduler(t, "gcushare-pod-1", corev1.DefaultSchedulerName)
	if got, err := lab.Pods.API.Get(ctx, "gcushare-pod-1", metav1.GetOptions{}); err != nil || got.Annotations["divvy.dev/grant"] == "" {
		t.Errorf("the pod has no grant: %v", err)
	}
	runPod(t, lab.Pods.New("plain", testenv.Container("app", 0)))
	lease, err := lab.Client.CoordinationV1().Leases(metav1.NamespaceSystem).Get(ctx, "kube-scheduler", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if holder := lease.Spec.HolderIdentity; holder == nil || !strings.HasPrefix(*holder, "kube-scheduler-") {
		t.Errorf("the Lease is held by %v, want the static pod", holder)
	}
	if out, err := schedconf(ctx, "status"); err != nil || !strings.Contains(out, "/divvy-scheduler-1.37:") {
		t.Errorf("schedconf status: %v\n%s", err, out)
	}
	if err := poll.Until(ctx, podTimeout, "the doctor to find nothing", func(ctx context.Context) error {
		_, err := lab.CLI.Kubectl(ctx, "divvy", "doctor", "--settle", "0")
		return err
	}); err != nil {
		t.Error(err)
	}
}
