//go:build e2e

package installation

import (
	"strings"
	"testing"

	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// TestUninstallDedicatedScheduler: the way for control planes that cannot be touched
// leaves nothing behind either; and meanwhile a change of memoryUnit under pods is
// refused, as with the cluster's own scheduler.
func TestUninstallDedicatedScheduler(t *testing.T) {
	ctx := t.Context()
	bare(t, product.NodeLabel, product.EnabledLabel)
	leave := nodeStatus(offeredByTests...)
	before, err := look(ctx, leave)
	if err != nil {
		t.Fatal(err)
	}
	install(t, "scheduler.mode=dedicated", "uninstall.nodeStatus=false", "uninstall.removeLogs=true", "node.configs.another.logLevel=debug")
	runPods(t, lab.Pods.New("one", testenv.Container("app", 4)))
	text, err := lab.CLI.Helm(ctx, lab.Divvy.UpgradeArgs("memoryUnit=0.1")...)
	if err == nil || !strings.Contains(err.Error(), `cannot change from "1" to "0.1"`) {
		t.Errorf("another memoryUnit under a pod: %v: %s", err, text)
	}
	if text, err := lab.CLI.Helm(ctx, lab.Divvy.UpgradeArgs("node.configs.another.logLevel=info")...); err != nil {
		t.Errorf("another level of the log under a pod: %v: %s", err, text)
	}
	if err := lab.Pods.DeleteAll(ctx); err != nil {
		t.Fatal(err)
	}
	uninstall(t)
	asBefore(t, before, nil, leave)
}
