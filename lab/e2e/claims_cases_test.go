//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
	"github.com/divvy-gpu/divvy/lab/internal/cluster"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// claims creates a ResourceClaim of these requests for each name, whose devices have an attribute in
// common, "" for none.
func claims(t *testing.T, together resourceapi.FullyQualifiedName, request resourceapi.ExactDeviceRequest, names ...string) {
	t.Helper()
	for _, name := range names {
		claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: name}}
		claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "devices", Exactly: &request}}
		if together != "" {
			claim.Spec.Devices.Constraints = []resourceapi.DeviceConstraint{{MatchAttribute: &together}}
		}
		_, err := lab.Client.ResourceV1().ResourceClaims(namespace).Create(t.Context(), claim, metav1.CreateOptions{})
		must(t, err)
	}
}

// TestClaimCases: requests that the examples do not have, in containers, and what happens to pods with
// claims when parts of the node are away or forget.
func TestClaimCases(t *testing.T) {
	ctx := beginClaims(t)

	// Both GPUs, which are linked; all GCUs, in parts; a chip, which an init container has before.
	claims(t, "nvidia.divvy.dev/linkGroup", resourceapi.ExactDeviceRequest{DeviceClassName: testenv.ClassGPU, Count: 2}, "linked")
	every := testenv.MemoryRequest(testenv.ClassGCU, "2Gi")
	every.AllocationMode = resourceapi.DeviceAllocationModeAll
	claims(t, "", every, "every")
	claims(t, "", testenv.MemoryRequest(testenv.ClassChip, "2Gi"), "chip")
	inits := lab.Pods.Claiming("inits", "chip")
	check := testenv.Container("check", 0, "sh", "-c", `test -n "$IX_VISIBLE_DEVICES" && test -e /dev/itrctl`)
	check.Resources.Claims = inits.Spec.Containers[0].Resources.Claims
	inits.Spec.InitContainers = []corev1.Container{check}
	all := lab.Pods.Claiming("every", "every")
	const away = "divvy-e2e-away"
	all.Spec.Containers[0].Command = []string{"sh", "-c", "trap 'exit 0' TERM; sleep infinity & wait", away}
	start(t, lab.Pods.Claiming("linked", "linked"), all, inits)
	seen := sights(t, "linked", "every", "inits")
	if got := seen["linked"].Env["NVIDIA_VISIBLE_DEVICES"]; got != uuidsOf(t, vendorsim.NVIDIA) {
		t.Errorf("the pod of both GPUs has %s, want %s", got, uuidsOf(t, vendorsim.NVIDIA))
	}
	if got := strings.Join(seen["every"].Nodes, " "); got != "gcu0 gcu1" {
		t.Errorf("the pod of all GCUs has %s, want both", got)
	}

	// The daemon is away when a pod with a claim is deleted: kubelet keeps the pod until it is back.
	alive := lives(t)
	delete(alive, "every/app")
	stopDaemon(t, ctx)
	must(t, lab.Client.CoreV1().Pods(namespace).Delete(ctx, "every", metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](1)}))
	must(t, poll.Until(ctx, podTimeout, "the container of the deleted pod to exit", func(context.Context) error {
		if n := processes(t, away); n > 0 {
			return fmt.Errorf("%d processes run", n)
		}
		return nil
	}))
	if _, err := lab.Pods.API.Get(ctx, "every", metav1.GetOptions{}); err != nil {
		t.Errorf("the pod is gone while nothing has released its claim: %v", err)
	}
	startDaemon(t, ctx)
	must(t, lab.Pods.WaitGone(ctx, "every"))
	undisturbed(t, alive)

	forcedWithClaims(t, ctx)
	withoutRecord(t, ctx)
}

// forcedWithClaims deletes a pod of a whole GPU by force, with its claim. Who waits for the GPU has it
// allocated at once, and its containers start when those of the pod before have exited.
func forcedWithClaims(t *testing.T, ctx context.Context) {
	t.Helper()
	must(t, lab.Pods.Delete(ctx, "linked"))
	const mark = "divvy-e2e-forced-claim"
	claims(t, "", resourceapi.ExactDeviceRequest{DeviceClassName: testenv.ClassGPU}, "other", "slow", "next")
	must(t, lab.Client.ResourceV1().ResourceClaims(namespace).Delete(ctx, "linked", metav1.DeleteOptions{}))
	slow := lab.Pods.Claiming("slow", "slow")
	slow.Spec.Containers[0].Command = []string{"sh", "-c", "trap 'sleep 20; exit 0' TERM; while :; do sleep 0.2; done", mark}
	start(t, lab.Pods.Claiming("other", "other"), slow)
	gpu := sights(t, "slow")["slow"].Env["NVIDIA_VISIBLE_DEVICES"]
	if processes(t, mark) == 0 {
		t.Fatal("the container's process is not found")
	}
	next := create(t, lab.Pods.Claiming("next", "next"))[0]
	pending(t, next, "cannot allocate all claims")

	must(t, lab.Client.CoreV1().Pods(namespace).Delete(ctx, "slow", metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}))
	must(t, lab.Client.ResourceV1().ResourceClaims(namespace).Delete(ctx, "slow", metav1.DeleteOptions{}))
	takesOver(t, ctx, "next", mark, gpu)
}

// withoutRecord takes kubelet's own record of claims away: pods run on, and what they have is released
// when they are deleted.
func withoutRecord(t *testing.T, ctx context.Context) {
	t.Helper()
	alive, seen := lives(t), sights(t, "other", "next", "inits")
	must(t, lab.Cluster.Stop(ctx, cluster.Kubelet))
	must(t, errors.Join(os.Remove("/var/lib/kubelet/dra_manager_state"), lab.Cluster.Start(ctx, cluster.Kubelet)))
	slicesPublished(t, republishTimeout, nil)
	undisturbed(t, alive)
	if now := sights(t, "other", "next", "inits"); !reflect.DeepEqual(now, seen) {
		t.Errorf("after kubelet lost its record of claims, pods see %v, saw %v", now, seen)
	}
	must(t, lab.Pods.Delete(ctx, "other", "next", "inits"))
	must(t, released(ctx))
}
