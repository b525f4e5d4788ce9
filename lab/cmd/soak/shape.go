package main

import (
	"fmt"
	"math/rand/v2"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// cardUnits is the size of each card of the guide's machine.
const cardUnits = 16

// sizes are what pods ask for; small ones are frequent, so that the gaps that
// large ones leave are filled.
var sizes = []int64{1, 1, 2, 2, 2, 3, 3, 4, 4, 4, 5, 6, 7, 8, 8, 10, 12, 16}

// newPod returns a pod of a random shape and size. Its peak is never beyond a
// card.
func newPod(s *testenv.Env, rng *rand.Rand, name string) *corev1.Pod {
	pod := shape(s, rng, name)
	// Without a grace period the API server forgets a deleted pod at once, and
	// kubelet ends it a little later.
	pod.Spec.TerminationGracePeriodSeconds = ptr.To(rng.Int64N(3))
	return pod
}

func shape(s *testenv.Env, rng *rand.Rand, name string) *corev1.Pod {
	size := sizes[rng.IntN(len(sizes))]
	var command []string
	if rng.IntN(6) == 0 {
		command = []string{"sleep", fmt.Sprint(1 + rng.IntN(6))} // ends by itself
	}
	if size < 3 {
		return s.Pods.New(name, testenv.Container("app", size, command...))
	}
	part := 1 + rng.Int64N(size-1)
	switch rng.IntN(6) {
	case 0: // two containers
		return s.Pods.New(name, testenv.Container("first", part, command...), testenv.Container("second", size-part, command...))
	case 1: // an init container that asks for more than what follows
		pod := s.Pods.New(name, testenv.Container("app", part, command...))
		pod.Spec.InitContainers = []corev1.Container{testenv.Container("init", size, "true")}
		return pod
	case 2: // a sidecar
		pod := s.Pods.New(name, testenv.Container("app", size-part, command...))
		pod.Spec.InitContainers = []corev1.Container{testenv.Sidecar("sidecar", part)}
		return pod
	case 3: // all of it: sidecar and init run first, then sidecar and both apps
		pod := s.Pods.New(name, testenv.Container("first", 1, command...), testenv.Container("second", size-2, command...))
		pod.Spec.InitContainers = []corev1.Container{testenv.Sidecar("sidecar", 1), testenv.Container("init", part, "true")}
		return pod
	case 4: // beside one that asks for nothing
		return s.Pods.New(name, testenv.Container("app", size, command...), testenv.Container("helper", 0, command...))
	default:
		return s.Pods.New(name, testenv.Container("app", size, command...))
	}
}
