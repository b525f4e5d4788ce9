package product

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
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
		if err := daemonSetReady(d, &corev1.Node{}); (err == nil) != (name == "") || errors.Is(err, poll.ErrHopeless) {
			t.Errorf("%q: %v", name, err)
		}
	}
}

// TestNodeWithoutTheLabel: nothing is waited for where a DaemonSet's node lacks its
// labels, and the error names them.
func TestNodeWithoutTheLabel(t *testing.T) {
	affinity := &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
		NodeSelectorTerms: []corev1.NodeSelectorTerm{
			{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "divvy.dev/enabled", Operator: corev1.NodeSelectorOpIn,
				Values: []string{"true"}}}},
			{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "enflame.com/gcushare", Operator: corev1.NodeSelectorOpIn,
				Values: []string{"true"}}}},
		},
	}}}
	for name, test := range map[string]struct {
		pod    corev1.PodSpec
		labels map[string]string
		want   string
	}{
		"no label": {corev1.PodSpec{Affinity: affinity}, nil, "divvy.dev/enabled=true enflame.com/gcushare=true"},
		"another value": {corev1.PodSpec{Affinity: affinity}, map[string]string{"divvy.dev/enabled": "false"},
			"divvy.dev/enabled=true"},
		"one of two": {corev1.PodSpec{Affinity: affinity}, map[string]string{"enflame.com/gcushare": "true"}, ""},
		"no selected label": {corev1.PodSpec{NodeSelector: map[string]string{"nvidia.com/gpu.present": "true"}}, nil,
			"nvidia.com/gpu.present=true"},
		"the selected label": {corev1.PodSpec{NodeSelector: map[string]string{"nvidia.com/gpu.present": "true"}},
			map[string]string{"nvidia.com/gpu.present": "true"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			// As the controller leaves it on such a node: it wants no pod, and is done.
			daemons := &appsv1.DaemonSet{
				ObjectMeta: metav1.ObjectMeta{Name: nodeDaemonSet, Namespace: Namespace, Generation: 1},
				Spec:       appsv1.DaemonSetSpec{Template: corev1.PodTemplateSpec{Spec: test.pod}},
				Status:     appsv1.DaemonSetStatus{ObservedGeneration: 1},
			}
			if test.want == "" {
				daemons.Status = appsv1.DaemonSetStatus{ObservedGeneration: 1, DesiredNumberScheduled: 1, UpdatedNumberScheduled: 1,
					NumberReady: 1}
			}
			client := fake.NewClientset(daemons, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "lab-0", Labels: test.labels}})
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				err := poll.Until(t.Context(), chartTimeout, "the rollout", func(ctx context.Context) error {
					return workloadsReady(ctx, client, "lab-0")
				})
				if waited := time.Since(began); waited > 0 {
					t.Errorf("it took %s", waited)
				}
				if test.want == "" && err != nil || test.want != "" && (err == nil || !strings.Contains(err.Error(), "node lab-0") ||
					!strings.Contains(err.Error(), test.want)) {
					t.Errorf("error %v, want %q in it", err, test.want)
				}
			})
		})
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
		d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Generation: 2}, Spec: appsv1.DeploymentSpec{Replicas: ptr.To[int32](2)},
			Status: status}
		if err := deploymentReady(d); (err == nil) != (name == "") {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestOffered(t *testing.T) {
	const inventory = `{"v":1,"resources":[
		{"resource":"enflame.com/gcu-memory","unit":"1","devices":[
			{"index":0,"id":"a","units":16},{"index":1,"id":"b","units":8},{"index":2,"id":"c","units":4,"unhealthy":true}]},
		{"resource":"nvidia.com/gpu","devices":[{"index":0,"id":"d","units":1},{"index":1,"id":"e","units":1}]},
		{"resource":"iluvatar.com/gpu","devices":[{"index":0,"id":"f","units":1,"unhealthy":true}]}]}`
	for name, test := range map[string]struct {
		annotation, memory, gpus string
		want                     []Offer
	}{
		"all agree":              {inventory, "24", "2", []Offer{{"enflame.com/gcu-memory", 24}, {"nvidia.com/gpu", 2}}},
		"kubelet is behind":      {inventory, "16", "2", nil},
		"one resource is behind": {inventory, "24", "0", nil},
		"nothing offered":        {inventory, "0", "0", nil},
		"no inventory":           {"", "24", "2", nil},
		"garbage":                {"{", "24", "2", nil},
		"no cards":               {`{"v":1}`, "0", "0", nil},
	} {
		node := &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: "n", Annotations: map[string]string{wire.InventoryAnnotation: test.annotation}},
			Status: corev1.NodeStatus{Allocatable: corev1.ResourceList{
				Resource: resource.MustParse(test.memory), "nvidia.com/gpu": resource.MustParse(test.gpus),
			}},
		}
		got, err := offered(t.Context(), fake.NewClientset(node), "n")
		if !slices.Equal(got, test.want) || (err == nil) != (test.want != nil) {
			t.Errorf("%s: %v, %v; want %v", name, got, err, test.want)
		}
	}
}

// The daemon puts the label back while it runs, and goes because of it.
func TestUnlabel(t *testing.T) {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Labels: map[string]string{"a/b": "true", "stays": "x"}}}
	client := fake.NewClientset(node)
	if err := unlabelled(t.Context(), client, "n", "a/b"); err == nil {
		t.Error("no error although the label was there")
	}
	if err := unlabelled(t.Context(), client, "n", "a/b"); err != nil {
		t.Errorf("without label and daemon: %v", err)
	}
	got, err := client.CoreV1().Nodes().Get(t.Context(), "n", metav1.GetOptions{})
	if err != nil || len(got.Labels) != 1 || got.Labels["stays"] != "x" {
		t.Errorf("labels %v, %v; want stays alone", got.Labels, err)
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Name: "p", Namespace: Namespace, Labels: map[string]string{"app.kubernetes.io/name": nodeDaemonSet},
	}}
	if _, err := client.CoreV1().Pods(Namespace).Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := unlabelled(t.Context(), client, "n", "a/b"); err == nil {
		t.Error("no error although the daemon runs")
	}
}
