//go:build e2e

package installation

import (
	"testing"

	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// TestUninstallDedicatedScheduler: the way for control planes that cannot be touched
// leaves nothing behind either.
func TestUninstallDedicatedScheduler(t *testing.T) {
	ctx := t.Context()
	bare(t, product.NodeLabel, product.EnabledLabel)
	leave := nodeStatus(offeredByTests...)
	before, err := look(ctx, leave)
	if err != nil {
		t.Fatal(err)
	}
	install(t, "scheduler.mode=dedicated", "uninstall.nodeStatus=false", "uninstall.removeLogs=true")
	runPods(t, lab.Pods.New("one", testenv.Container("app", 4)))
	if err := lab.Pods.DeleteAll(ctx); err != nil {
		t.Fatal(err)
	}
	uninstall(t)
	asBefore(t, before, nil, leave)
}
