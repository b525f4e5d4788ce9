package testenv

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

func TestUnitsAreThePeak(t *testing.T) {
	pods := &Pods{}
	tests := map[string]struct {
		init []corev1.Container
		apps []corev1.Container
		want int64
	}{
		"nothing":           {apps: []corev1.Container{Container("a", 0)}, want: 0},
		"containers add up": {apps: []corev1.Container{Container("a", 4), Container("b", 3)}, want: 7},
		"init containers do not": {init: []corev1.Container{Container("i", 6), Container("j", 5)},
			apps: []corev1.Container{Container("a", 4)}, want: 6},
		"sidecars stay": {init: []corev1.Container{Sidecar("s", 2), Container("i", 6)},
			apps: []corev1.Container{Container("a", 5)}, want: 8},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			pod := pods.New("p", test.apps...)
			pod.Spec.InitContainers = test.init
			if got := Units(pod); got != test.want {
				t.Errorf("%d units, want %d", got, test.want)
			}
		})
	}
}

func TestDescribe(t *testing.T) {
	pod := &corev1.Pod{Status: corev1.PodStatus{
		Phase: corev1.PodPending,
		Conditions: []corev1.PodCondition{
			{Type: corev1.PodReady, Status: corev1.ConditionTrue, Message: "not shown"},
			{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Message: "no card"},
		},
		ContainerStatuses: []corev1.ContainerStatus{
			{Name: "app", State: corev1.ContainerState{
				Waiting: &corev1.ContainerStateWaiting{Reason: "ErrImagePull", Message: "no image"},
			}},
			{Name: "other", State: corev1.ContainerState{
				Terminated: &corev1.ContainerStateTerminated{ExitCode: 137, Reason: "Error"},
			}},
		},
	}}
	pod.Name = "p"
	if got, want := Describe(pod), "pod p is Pending; PodScheduled: no card; app: no image; other: ended with 137, Error"; got != want {
		t.Errorf("described as %q, want %q", got, want)
	}
}

func TestUpgradeArgs(t *testing.T) {
	d := &Divvy{cli: &CLI{Repository: "/repo"}}
	got := d.UpgradeArgs("memoryUnit=0.1", "node.injection=cdi")
	want := []string{
		"upgrade", "divvy", "/repo/charts/divvy", "--namespace", "divvy-system", "--disable-openapi-validation",
		"--reset-then-reuse-values", "--set-string", "memoryUnit=0.1", "--set-string", "node.injection=cdi",
	}
	if !slices.Equal(got, want) {
		t.Errorf("arguments %q, want %q", got, want)
	}
}

func TestContainerPID(t *testing.T) {
	for _, id := range []string{"", "containerd://", "containerd://no-such-container"} {
		if pid, err := ContainerPID(id); err == nil {
			t.Errorf("container %q has the process %d", id, pid)
		}
	}
}
