//go:build e2e

package installation

import (
	"flag"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/lab/internal/demos"
)

// begun is when the tests began; what accounts did before is not looked at.
var begun = time.Now()

// ifBindIsFirst is a right that only chance uses here: a pod is read when its bind comes
// before the watch has shown the pod. The other package's tests cause that.
const ifBindIsFirst = "divvy-system/divvy-scheduler by ClusterRole divvy-extender: get pods was never used"

// TestZRightsAreUsed: what the accounts may do that are there in some ways of
// installing alone, or while Divvy is taken away, they did in the tests before, and
// nothing that any of them asked for was refused. Go runs the tests of a package in
// the order of its files; this one is the last.
func TestZRightsAreUsed(t *testing.T) {
	complete := flag.Lookup("test.run").Value.String() == "" && flag.Lookup("test.skip").Value.String() == ""
	if !complete {
		t.Log("not all tests ran, so unused rights cannot be told")
	}
	values := func(name string) string { return filepath.Join(lab.CLI.Repository, "lab", "values", name) }
	err := lab.Rights(t.Context(), begun, complete,
		[]string{"divvy-system/divvy-schedconf", "divvy-system/divvy-scheduler", "divvy-system/divvy-uninstall"},
		[]string{"--set", "uninstall.removeLogs=true,extender.leaderElection=true"},
		[]string{"--set", "uninstall.nodeStatus=true", "--values", values(demos.MixedValues), "--values", values(demos.PoolValues)},
		[]string{"--set", "scheduler.mode=dedicated"})
	if err != nil {
		for line := range strings.SplitSeq(err.Error(), "\n") {
			if line != ifBindIsFirst {
				t.Error(line)
			}
		}
	}
	// Those of the other package's tests, for refusals alone.
	if err := lab.Rights(t.Context(), begun, false, []string{"divvy-system/divvy-node", "divvy-system/divvy-extender",
		"bwki/bitfusion-webhook-deployment"}); err != nil {
		t.Error(err)
	}
}
