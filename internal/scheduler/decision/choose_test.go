package decision

import (
	"strconv"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
)

func TestAttemptsAreBounded(t *testing.T) {
	var a attempts
	pod := func(i int) cluster.Pod { return cluster.Pod{Ref: accel.PodRef{UID: strconv.Itoa(i)}} }
	expects := func(string) bool { return true }
	for i := range 3 * maxAttempts {
		a.begin(pod(i), time.Time{}, expects)
		if len(a.pods) > maxAttempts {
			t.Fatalf("%d pods are remembered", len(a.pods))
		}
	}
	if _, noted := a.pod(accel.PodRef{UID: strconv.Itoa(3*maxAttempts - 1)}); !noted {
		t.Error("the last one was forgotten")
	}
}
