//go:build e2e

package e2e

import (
	"flag"
	"os"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/lab/internal/rbacaudit"
)

// begun is when the tests began; what accounts did before is not looked at.
var begun = time.Now()

// TestZRightsAreUsed: what Divvy's accounts may do, they did in the tests before,
// and nothing that they asked for was refused. Go runs the tests of a package in
// the order of its files; this one is the last.
func TestZRightsAreUsed(t *testing.T) {
	t.Attr("second-try", "no") // by itself it would see no test before it
	// Those of "make test-long" use no rights that the others do not.
	complete := flag.Lookup("test.run").Value.String() == "" && flag.Lookup("test.skip").Value.String() == os.Getenv("LONG")
	if lab.FoundDivvy() {
		// Certificates, for one, were written then.
		complete = false
		t.Log("Divvy was installed before the tests, so unused rights cannot be told")
	} else if !complete {
		t.Log("not all tests ran, so unused rights cannot be told")
	}
	must(t, lab.Rights(t.Context(), begun, complete,
		[]string{"divvy-system/divvy-node", "divvy-system/divvy-extender", "bwki/bitfusion-webhook-deployment"},
		// The extender wakes a pod that kube-scheduler has not looked at again by itself;
		// scheduling.TestBooksThatLag sees to it.
		[]rbacaudit.Use{{Account: "divvy-system/divvy-extender", Verb: "patch", Resource: "pods/status", Namespace: lab.Pods.Namespace}},
		// With a cluster of one node before it, helm makes one extender, which elects nobody.
		[]string{"--set", "pool.enabled=true,extender.replicas=1,node.allocationPath=dra"}))
}
