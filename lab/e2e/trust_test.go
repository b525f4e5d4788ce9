//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/stage"
)

const grantAnnotation = "divvy.dev/grant"

// forged are annotations of a user who wants card 7 for nothing.
func forged(grant string) map[string]string {
	return map[string]string{
		"enflame.com/gcu-device-id":             "7",
		"enflame.com/gcu-device-memory":         "999",
		"enflame.com/gcu-device-memory-request": "0",
		"enflame.com/gcu-device-assigned":       "true",
		"enflame.com/gcu-device-assign-time":    "1",
		grantAnnotation:                         grant,
	}
}

// TestForgedAnnotations: users who write what Divvy writes gain nothing by it.
func TestForgedAnnotations(t *testing.T) {
	ctx := begin(t, guide)
	start(t, one("honest", 4))
	books := agree(t)
	honest, err := lab.Get(ctx, "honest")
	must(t, err)
	unsigned, err := json.Marshal(map[string]any{
		"v": 1, "resource": product.Resource, "node": lab.Cluster.NodeName(), "device": books.Cards[7].UUID, "index": 7,
		"deviceUnits": 16, "units": 1, "at": time.Now().UTC(), "confirmed": true, "mac": strings.Repeat("A", 43),
	})
	must(t, err)
	grants := map[string]string{
		"unsigned": string(unsigned),
		"stolen":   honest.Annotations[grantAnnotation],
		"garbage":  "{\x00",
		"huge":     strings.Repeat("x", 100<<10),
	}

	t.Run("before the pod is bound", func(t *testing.T) {
		want := map[string]int{"honest": 0}
		for name, grant := range grants {
			pod := one(name, 3)
			pod.Annotations = forged(grant)
			create(t, pod)
			want[name] = 0
		}
		running(t, "unsigned", "stolen", "garbage", "huge")
		wantCards(t, want)
		must(t, lab.Delete(ctx, "unsigned", "stolen", "garbage", "huge"))
	})
	t.Run("with the node named", func(t *testing.T) {
		want := map[string]int{"honest": 0}
		for name, grant := range grants {
			pod := one(name, 3)
			pod.Annotations = forged(grant)
			pod.Spec.NodeName = lab.Cluster.NodeName()
			create(t, pod)
			want[name] = 0
		}
		running(t, "unsigned", "stolen", "garbage", "huge")
		wantCards(t, want)
		must(t, lab.Delete(ctx, "unsigned", "stolen", "garbage", "huge"))
	})
	t.Run("on a running pod", func(t *testing.T) {
		start(t, one("patched", 12))
		wantCards(t, map[string]int{"honest": 0, "patched": 0})
		alive := lives(t)
		for name, grant := range grants {
			patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": forged(grant)}})
			must(t, err)
			_, err = lab.Client.CoreV1().Pods(namespace).Patch(ctx, "patched", types.MergePatchType, patch, metav1.PatchOptions{})
			must(t, err)
			// At no moment does the card look emptier than it is.
			for until := time.Now().Add(time.Second); time.Now().Before(until); {
				node, err := auditor.Inspect(ctx)
				must(t, err)
				if len(node.Devices) == 0 || node.Devices[0].Used != 16 {
					t.Fatalf("with a grant that is %s, inspect shows %s; want card 0 full", name, uses(node))
				}
			}
			wantCards(t, map[string]int{"honest": 0, "patched": 0})
		}
		undisturbed(t, alive)
	})
	t.Run("taken away", func(t *testing.T) {
		remove := map[string]any{}
		for key := range forged("") {
			remove[key] = nil
		}
		patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": remove}})
		must(t, err)
		_, err = lab.Client.CoreV1().Pods(namespace).Patch(ctx, "patched", types.MergePatchType, patch, metav1.PatchOptions{})
		must(t, err)
		wantCards(t, map[string]int{"honest": 0, "patched": 0})
	})
}

// TestGrantKeyChanges replaces the key that grants are signed with.
func TestGrantKeyChanges(t *testing.T) {
	ctx := begin(t, guide)
	start(t, one("before", 4))
	agree(t)
	alive := lives(t)
	since := map[string]int{nodeLog: logSize(t, nodeLog), extenderLog: logSize(t, extenderLog)}

	key := fmt.Sprintf("%064d", time.Now().UnixNano())
	patch, err := json.Marshal(map[string]any{"stringData": map[string]string{"key": key}})
	must(t, err)
	_, err = lab.Client.CoreV1().Secrets(product.Namespace).Patch(ctx, "divvy-grant-key", types.MergePatchType, patch, metav1.PatchOptions{})
	must(t, err)
	// Kubelet updates what it has mounted about once a minute, or when the pod
	// changes.
	for _, part := range []string{stage.NodeDaemon, stage.Extender} {
		must(t, lab.Poke(ctx, part))
	}
	for log, size := range since {
		must(t, stage.Poll(ctx, 2*settingTimeout, log+" to tell of a new key", func(context.Context) error {
			data, err := os.ReadFile(log)
			if err == nil && !strings.Contains(string(data[min(size, len(data)):]), "new grant key") {
				err = errors.New("it does not yet")
			}
			return err
		}))
	}
	wantCards(t, map[string]int{"before": 0})
	start(t, one("after", 8))
	wantCards(t, map[string]int{"before": 0, "after": 0})

	// An extender that never saw the old key knows the pods all the same.
	must(t, lab.DeleteDivvyPods(ctx, stage.Extender))
	must(t, lab.WaitDivvy(ctx, settingTimeout))
	wantCards(t, map[string]int{"before": 0, "after": 0})
	undisturbed(t, alive)
}
