package cluster

import (
	"hash/maphash"
	"strconv"

	v1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/core/ledger"
)

var outcomeSeed = maphash.MakeSeed()

// AttemptOf returns what the pod says of the attempts to place it: kube-scheduler
// writes why the last one failed into the condition PodScheduled.
func AttemptOf(pod *v1.Pod) ledger.Attempt {
	var a ledger.Attempt
	a.Version, _ = strconv.ParseUint(pod.ResourceVersion, 10, 64) // 0 where it is no number
	for i := range pod.Status.Conditions {
		if c := &pod.Status.Conditions[i]; c.Type == v1.PodScheduled {
			a.Outcome = maphash.Comparable(outcomeSeed, [3]string{string(c.Status), c.Reason, c.Message})
		}
	}
	return a
}
