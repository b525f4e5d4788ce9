//go:build e2e

package e2e

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/lab/internal/demos"
)

// TestHeldAsOther: a pod waits for what is allocated as another resource, and its condition
// and one event say so, as in TestReasonsReachThePod.
func TestHeldAsOther(t *testing.T) {
	ctx := beginMixed(t)
	start(t, asking("whole", demos.GCU, 1), asking("part", demos.GCUMemory, 10))
	waits := create(t, asking("waits", demos.GCUMemory, 8))[0]
	saidOnce(t, ctx, waiting{waits, "HeldAsOther", "HeldAsOther", "are allocated as another resource"})
	must(t, lab.Pods.API.Delete(ctx, "whole", metav1.DeleteOptions{}))
	placed(t, ctx, waits)
}
