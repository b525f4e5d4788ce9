package testenv

import (
	"maps"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

func TestSight(t *testing.T) {
	got := sight("PATH=/bin\nNVIDIA_VISIBLE_DEVICES=GPU-1,GPU-2\nIX_REPLICA_DEVICES=a::0\nHOME=/" +
		"\nnull\nnvidiactl\nnvidia1\nnvidia0\nitrctl\nfull\n")
	want := map[string]string{"NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-2", "IX_REPLICA_DEVICES": "a::0"}
	if !maps.Equal(got.Env, want) || !slices.Equal(got.Nodes, []string{"itrctl", "nvidia0", "nvidia1", "nvidiactl"}) {
		t.Errorf("a container with four nodes and two variables: %+v", got)
	}
}

func TestUsesCards(t *testing.T) {
	for resource, want := range map[corev1.ResourceName]bool{
		"enflame.com/gcu-memory": true, "nvidia.com/gpu.shared": true, "iluvatar.com/gpu": true, "cpu": false,
		"example.com/nvidia.com": false,
	} {
		pod := &corev1.Pod{Spec: corev1.PodSpec{InitContainers: []corev1.Container{Asking("a", resource, 1)}}}
		if got := usesCards(pod); got != want {
			t.Errorf("a pod that asks for %s uses cards: %t, want %t", resource, got, want)
		}
	}
}
