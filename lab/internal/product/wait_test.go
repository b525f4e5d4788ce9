package product

import (
	"context"
	"errors"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/ptr"
)

func TestDaemonSetReady(t *testing.T) {
	ready := appsv1.DaemonSetStatus{ObservedGeneration: 2, DesiredNumberScheduled: 1, UpdatedNumberScheduled: 1, NumberReady: 1}
	for name, change := range map[string]func(*appsv1.DaemonSetStatus){
		"not seen yet":  func(s *appsv1.DaemonSetStatus) { s.ObservedGeneration = 1 },
		"no node":       func(s *appsv1.DaemonSetStatus) { s.DesiredNumberScheduled = 0 },
		"old pod":       func(s *appsv1.DaemonSetStatus) { s.UpdatedNumberScheduled = 0 },
		"pod not ready": func(s *appsv1.DaemonSetStatus) { s.NumberReady = 0 },
		"":              func(*appsv1.DaemonSetStatus) {},
	} {
		status := ready
		change(&status)
		d := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Generation: 2}, Status: status}
		if err := daemonSetReady(d); (err == nil) != (name == "") {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestDeploymentReady(t *testing.T) {
	ready := appsv1.DeploymentStatus{ObservedGeneration: 2, Replicas: 2, UpdatedReplicas: 2, ReadyReplicas: 2}
	for name, change := range map[string]func(*appsv1.DeploymentStatus){
		"not seen yet":  func(s *appsv1.DeploymentStatus) { s.ObservedGeneration = 1 },
		"old pod":       func(s *appsv1.DeploymentStatus) { s.Replicas = 3 },
		"not updated":   func(s *appsv1.DeploymentStatus) { s.UpdatedReplicas = 1 },
		"pod not ready": func(s *appsv1.DeploymentStatus) { s.ReadyReplicas = 1 },
		"":              func(*appsv1.DeploymentStatus) {},
	} {
		status := ready
		change(&status)
		d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Generation: 2}, Spec: appsv1.DeploymentSpec{Replicas: ptr.To[int32](2)}, Status: status}
		if err := deploymentReady(d); (err == nil) != (name == "") {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestOffered(t *testing.T) {
	const inventory = `{"v":1,"resources":[
		{"resource":"enflame.com/gcu-memory","devices":[{"units":16},{"units":8},{"units":4,"unhealthy":true}]},
		{"resource":"other","devices":[{"units":100}]}]}`
	for name, test := range map[string]struct {
		annotation, allocatable string
		want                    int64
	}{
		"both agree":        {inventory, "24", 24},
		"kubelet is behind": {inventory, "16", 0},
		"nothing offered":   {inventory, "0", 0},
		"no inventory":      {"", "24", 0},
		"garbage":           {"{", "24", 0},
		"no cards":          {`{"v":1}`, "0", 0},
	} {
		node := &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: "n", Annotations: map[string]string{inventoryAnnotation: test.annotation}},
			Status:     corev1.NodeStatus{Allocatable: corev1.ResourceList{Resource: resource.MustParse(test.allocatable)}},
		}
		got, err := offered(t.Context(), fake.NewClientset(node), "n")
		if got != test.want || (err == nil) != (test.want > 0) {
			t.Errorf("%s: %d, %v; want %d", name, got, err, test.want)
		}
	}
}

func TestPoll(t *testing.T) {
	failure := errors.New("not yet")
	calls := 0
	err := poll(t.Context(), time.Minute, func(context.Context) error {
		if calls++; calls < 2 {
			return failure
		}
		return nil
	})
	if err != nil || calls != 2 {
		t.Errorf("%v after %d calls", err, calls)
	}
	if err := poll(t.Context(), time.Millisecond, func(context.Context) error { return failure }); !errors.Is(err, failure) {
		t.Errorf("after the timeout: %v, want the last answer", err)
	}
}
