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
// more: what the first installation left on the node is not in the way.
func TestInstallAgain(t *testing.T) {
	for _, name := range []string{"first", "second"} {
		t.Run(name, func(t *testing.T) {
			install(t)
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
