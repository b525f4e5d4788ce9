//go:build e2e

package installation

import (
	"errors"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/lab/internal/demos"
)

// begun is when the tests began; what accounts did before is not looked at.
var begun = time.Now()

// ifBindIsFirst begins what is said of a right that only chance uses here, in no namespace
// or in one: a pod is read when its bind comes before the watch has shown the pod. The
// other package's tests cause that.
const ifBindIsFirst = "divvy-system/divvy-scheduler by ClusterRole divvy-extender: get pods was "

// TestZRightsAreUsed: what the accounts may do that are there in some ways of
// installing alone, they did in the tests before, and nothing that any of them asked
// for was rejected. Go runs the tests of a package in the order of its files; these
// are the last.
func TestZRightsAreUsed(t *testing.T) {
	complete, _ := allRan()
	rightsAreUsed(t, complete, []string{"divvy-system/divvy-schedconf", "divvy-system/divvy-scheduler"},
		[]string{"--set", "extender.leaderElection=true"},
		[]string{"--set", "scheduler.mode=dedicated"})
}

// TestUninstallRightsAreUsed: what the account may do that removes Divvy, it did in
// the tests of that.
func TestUninstallRightsAreUsed(t *testing.T) {
	complete, long := allRan()
	values := func(name string) string { return filepath.Join(lab.CLI.Repository, "lab", "values", name) }
	rendered := [][]string{{"--set", "uninstall.removeLogs=true"}}
	if long {
		rendered = append(rendered, []string{"--set", "scheduler.mode=dedicated"},
			[]string{"--set", "uninstall.nodeStatus=true", "--values", values(demos.MixedValues), "--values", values(demos.PoolValues)})
	}
	rightsAreUsed(t, complete, []string{"divvy-system/divvy-uninstall"}, rendered...)
}

// allRan reports whether all tests of this package run, and whether those of "make
// test-long" are among them, which alone remove a pool, the dedicated scheduler and
// entries of the node's status.
func allRan() (complete, long bool) {
	skip := flag.Lookup("test.skip").Value.String()
	complete = flag.Lookup("test.run").Value.String() == "" && (skip == "" || skip == os.Getenv("LONG"))
	return complete, complete && skip == ""
}

// rightsAreUsed reports the rights of these accounts that were not used, if all tests
// ran that use them, and the requests of any account of Divvy that were rejected.
func rightsAreUsed(t *testing.T, complete bool, accounts []string, rendered ...[]string) {
	t.Helper()
	t.Attr("second-try", "no") // by itself it would see no test before it
	if !complete {
		t.Log("not all tests ran, so unused rights cannot be told")
	}
	others := slices.DeleteFunc([]string{"divvy-system/divvy-node", "divvy-system/divvy-extender", "divvy-system/divvy-schedconf",
		"divvy-system/divvy-scheduler", "divvy-system/divvy-uninstall", "bwki/bitfusion-webhook-deployment"},
		func(account string) bool { return slices.Contains(accounts, account) })
	err := errors.Join(lab.Rights(t.Context(), begun, complete, accounts, nil, rendered...),
		lab.Rights(t.Context(), begun, false, others, nil))
	if err == nil {
		return
	}
	for line := range strings.SplitSeq(err.Error(), "\n") {
		if !strings.HasPrefix(line, ifBindIsFirst) {
			t.Error(line)
		}
	}
}
