package cluster

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// TestSayWritesOneCondition, leaves others as they are, and removes it.
func TestSayWritesOneCondition(t *testing.T) {
	pod := waitingPod("p", "u", "4")
	pod.Status.Conditions = []v1.PodCondition{{Type: v1.PodScheduled, Status: v1.ConditionFalse, Reason: v1.PodReasonUnschedulable,
		Message: "0/3 nodes are available: 3 Insufficient enflame.com/gcu-memory."}}
	before := pod.Status.DeepCopy()
	client := fake.NewClientset(pod)
	binder := NewBinder(client, []accel.Resource{"enflame.com/gcu-memory"}, false)
	ref := accel.PodRef{UID: "u", Namespace: pod.Namespace, Name: "p"}
	get := func() (*v1.Pod, Pod) {
		t.Helper()
		now, err := client.CoreV1().Pods(pod.Namespace).Get(t.Context(), "p", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return now, podOf(now, binder.resources, false)
	}
	if _, p := get(); !p.Said.Short || p.Said.Reason != "" {
		t.Errorf("before: %+v", p)
	}
	if err := binder.Say(t.Context(), ref, "NoDeviceFits", "no device has 4 units free"); err != nil {
		t.Fatal(err)
	}
	now, p := get()
	if len(now.Status.Conditions) != 2 || p.Said.Reason != "NoDeviceFits" || p.Said.At.IsZero() || !p.Said.Short {
		t.Errorf("said: %+v, %+v", now.Status, p)
	}
	if err := binder.Say(t.Context(), ref, "", ""); err != nil {
		t.Fatal(err)
	}
	now, p = get()
	if diff := cmp.Diff(*before, now.Status); diff != "" || p.Said.Reason != "" {
		t.Errorf("removed (-want +got):\n%s", diff)
	}
	ref.Name = "q"
	if err := binder.Say(t.Context(), ref, "NoDeviceFits", ""); err == nil {
		t.Error("said of a pod that is not")
	}
}

// TestOtherSchedulersPods are not explained by what kube-scheduler would mean.
func TestOtherSchedulersPods(t *testing.T) {
	for scheduler, want := range map[string]bool{"default-scheduler": true, "divvy-scheduler": true, "": true, "koord-scheduler": false,
		"volcano": false} {
		pod := waitingPod("p", "u", "4")
		pod.Spec.SchedulerName = scheduler
		pod.Status.Conditions = []v1.PodCondition{{Type: v1.PodScheduled, Status: v1.ConditionFalse, Reason: v1.PodReasonUnschedulable,
			Message: "0/3 nodes are available: 3 Insufficient enflame.com/gcu-memory."}}
		if got := podOf(pod, []accel.Resource{"enflame.com/gcu-memory"}, false); got.Said.Short != want {
			t.Errorf("%q: short is %t", scheduler, got.Said.Short)
		}
	}
}

// TestShort: only kube-scheduler's own messages about devices count.
func TestShort(t *testing.T) {
	for message, want := range map[string]bool{
		"0/3 nodes are available: 3 Insufficient enflame.com/gcu-memory.":            true,
		"0/3 nodes are available: 3 insufficient GCU Memory in one gcu device.":      true,
		"0/2 nodes are available: 2 isolation driver required, device states none.":  true,
		"0/3 nodes are available: 3 Insufficient cpu.":                               false,
		"0/3 nodes are available: 3 node(s) had untolerated taint(s).":               false,
		"0/3 nodes are available: 3 Insufficient nvidia.com/gpu-memory, 1 too much.": false,
		"": false,
	} {
		pod := waitingPod("p", "u", "4")
		pod.Status.Conditions = []v1.PodCondition{{Type: v1.PodScheduled, Status: v1.ConditionFalse, Reason: v1.PodReasonUnschedulable,
			Message: message}}
		if got := podOf(pod, []accel.Resource{"enflame.com/gcu-memory"}, false); got.Said.Short != want {
			t.Errorf("%q: short is %t", message, got.Said.Short)
		}
		pod.Spec.NodeName = "n"
		if got := podOf(pod, []accel.Resource{"enflame.com/gcu-memory"}, false); got.Said.Short {
			t.Errorf("%q: a pod with a node is short", message)
		}
	}
}
