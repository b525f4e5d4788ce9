//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/divvy-gpu/divvy/lab/internal/product"
)

// TestPodThatWaitsForTheTokenIsTold: a pod of the pool that was made before anybody
// brought the token in says so, and goes on when it comes.
func TestPodThatWaitsForTheTokenIsTold(t *testing.T) {
	// One that no copy of the token was ever brought to.
	ctx, p := poolStage(t, "divvy-e2e-untold")
	must(t, product.ForgetToken(ctx))
	made, err := p.Pods.Create(ctx, example(t, p, "pod.yaml", "waits"))
	must(t, err)
	_, err = p.Pods.WaitEvent(ctx, podTimeout, made[0], "kubectl divvy pool import")
	must(t, err)
	importToken(t, ctx)
	ended(t, p, "waits")
}

// TestNamedConfigurationKeepsTheUnit: a named configuration that would change what
// units mean under a pod is refused as the configuration itself is.
func TestNamedConfigurationKeepsTheUnit(t *testing.T) {
	ctx := begin(t, guide)
	start(t, one("holder", 4))
	maps := lab.Client.CoreV1().ConfigMaps(product.Namespace)
	base, err := maps.Get(ctx, "divvy-node", metav1.GetOptions{})
	must(t, err)
	// As the chart makes it; the daemon of this setting does not read it.
	_, err = maps.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "divvy-node-configs", Labels: base.Labels}},
		metav1.CreateOptions{})
	must(t, err)
	t.Cleanup(func() { must(t, maps.Delete(context.WithoutCancel(ctx), "divvy-node-configs", metav1.DeleteOptions{})) })
	set := func(unit string) error {
		patch, err := json.Marshal(map[string]any{"data": map[string]string{"default": "apiVersion: config.divvy.dev/v1alpha1\nkind: " +
			"NodeConfig\nresources:\n" +
			"- {name: enflame.com/gcu-memory, vendor: enflame, mode: memory, countResource: enflame.com/gcu-count, memoryUnit: \"" + unit +
			"\"}\n"}})
		must(t, err)
		_, err = maps.Patch(ctx, "divvy-node-configs", types.MergePatchType, patch, metav1.PatchOptions{})
		return err
	}
	refusedWith(t, "another unit", set("0.1"), `memoryUnit of enflame.com/gcu-memory cannot change from "1" to "0.1"`)
	must(t, set("1"))
	must(t, lab.Pods.Delete(ctx, "holder"))
	must(t, emptied(ctx))
	must(t, set("0.1"))
}
