//go:build e2e

package installation

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/lab/internal/stage"
)

// podTimeout is how long a pod may take to run.
const podTimeout = time.Minute

// TestInstallAgain installs, runs a pod of the guide, removes, and does it once
// more: what the first installation left on the node is not in the way. The second
// time an administrator wires kube-scheduler.
func TestInstallAgain(t *testing.T) {
	for name, wire := range map[string]func(*testing.T){"by-the-chart": installWired, "by-hand": installAndWire} {
		t.Run(name, func(t *testing.T) {
			wire(t)
			pod := lab.Pod("gcushare-pod-"+name, stage.Container("app", 4))
			if _, err := lab.Create(t.Context(), pod); err != nil {
				t.Fatal(err)
			}
			if err := lab.WaitPhase(t.Context(), podTimeout, corev1.PodRunning, pod.Name); err != nil {
				t.Fatal(err)
			}
		})
	}
}
