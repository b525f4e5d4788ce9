//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
	"github.com/divvy-gpu/divvy/lab/internal/demos"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
)

// efsmiFolder is where the vendor's tools have their program on the node, and drsState what
// the simulated cards keep.
const (
	efsmiFolder = "/usr/local/efsmi/efsmi-1.14.0/bin"
	drsState    = "/usr/local/efsmi/efsmi-1.14.0/lib/drs.state"
)

// TestDRS: instances that an administrator creates are offered and given out while the daemon runs,
// at tier hardware, and their card is in no other resource.
func TestDRS(t *testing.T) {
	ctx := beginMixed(t)
	t.Cleanup(func() {
		// The daemon stops running the program before that is removed.
		ctx := context.WithoutCancel(ctx)
		if err := errors.Join(lab.Pods.DeleteAll(ctx), lab.Divvy.Choose(ctx, &lab.Node, ""), os.RemoveAll(efsmiFolder),
			os.RemoveAll(drsState)); err != nil {
			t.Error(err)
		}
	})
	program, err := vendorsim.BuildEfsmi(ctx, efsmiFolder)
	must(t, err)
	efsmi := func(args string) {
		t.Helper()
		if out, err := exec.CommandContext(ctx, program, strings.Fields(args)...).CombinedOutput(); err != nil {
			t.Fatalf("efsmi %s: %v: %s", args, err, out)
		}
	}
	check := sameDaemon(t)
	choose(t, "drs")
	shows(t, demos.GCU, 2)

	efsmi("-i 1 --drs on")
	offers(t, demos.GCU, 1)
	efsmi("-i 1 --drs --create-instance 0")
	efsmi("-i 1 --drs --create-instance 2")
	small := partOf(t, ctx, 1)
	large := partOf(t, ctx, 3)
	offers(t, small, 1)
	offers(t, large, 1)
	offers(t, demos.GCUMemory, 16)

	isolated := asking("isolated", small, 1)
	isolated.Annotations = map[string]string{wire.IsolationAnnotation: "hardware"}
	start(t, isolated, asking("large", large, 1))
	seen := sights(t, "isolated", "large")
	for name, sight := range seen {
		if env := sight.Env; env["ENFLAME_VISIBLE_DEVICES"] != "1" || !strings.HasPrefix(env["TOPS_VISIBLE_DEVICES"], "DRS-") {
			t.Errorf("pod %s has %v, want card 1 and an instance", name, env)
		}
	}
	if seen["isolated"].Env["TOPS_VISIBLE_DEVICES"] == seen["large"].Env["TOPS_VISIBLE_DEVICES"] {
		t.Error("both pods have the same instance")
	}
	must(t, poll.Until(ctx, settingTimeout, "the instance to state tier hardware", func(ctx context.Context) error {
		all, err := lab.Node.Isolations(ctx, small)
		if err != nil {
			return err
		}
		for _, one := range all {
			if one.Memory == accel.TierHardware && one.Backend == "drs" {
				return nil
			}
		}
		return fmt.Errorf("stated: %v", all)
	}))

	must(t, lab.Pods.DeleteAll(ctx))
	efsmi("-i 1 --drs --destroy-instance 0")
	offers(t, small, 0)
	efsmi("-i 1 --drs --destroy-instance 1")
	efsmi("-i 1 --drs off")
	offers(t, demos.GCU, 2)
	check()
}

// partOf returns the resource of the profile of so many slices that the node has.
func partOf(t *testing.T, ctx context.Context, slices int) (found corev1.ResourceName) {
	t.Helper()
	prefix := fmt.Sprintf("enflame.com/drs-gcu-%dg.", slices)
	must(t, poll.Until(ctx, settingTimeout, prefix+"* to be offered", func(ctx context.Context) error {
		node, err := lab.Node.Get(ctx)
		if err != nil {
			return err
		}
		for name := range node.Status.Capacity {
			if strings.HasPrefix(string(name), prefix) {
				found = name
				return nil
			}
		}
		return errors.New("it is not")
	}))
	return found
}
