//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/show"
	"github.com/divvy-gpu/divvy/lab/internal/stage"
)

// TestMistakeToldTwiceIsOneEvent: the same bad catalog, after a good one in between,
// makes the events of the webhooks' pods count up and no others.
func TestMistakeToldTwiceIsOneEvent(t *testing.T) {
	ctx, p := poolStage(t, show.PoolNamespace)
	const name, key, bad = "bwki-bitfusion-client-configmap", "bitfusion-client-config.yaml", "clients: nonsense"
	maps := p.Client.CoreV1().ConfigMaps(product.PoolNamespace)
	config, err := maps.Get(ctx, name, metav1.GetOptions{})
	must(t, err)
	good := config.Data[key]
	set := func(ctx context.Context, catalog string) error {
		patch, err := json.Marshal(map[string]any{"data": map[string]string{key: catalog}})
		if err == nil {
			_, err = maps.Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{})
		}
		return err
	}
	// counts waits until each of the webhooks' pods has one event of a reason, with
	// that count.
	counts := func(ctx context.Context, reason string, want int32) error {
		poked := time.Time{}
		return stage.Poll(ctx, webhookTimeout, fmt.Sprintf("%s to be told %d times", reason, want), func(ctx context.Context) error {
			if time.Since(poked) > 5*time.Second {
				poked = time.Now()
				if err := p.PokeWebhook(ctx); err != nil {
					return err
				}
			}
			pods, err := p.WebhookPods(ctx)
			if err != nil {
				return err
			}
			for _, pod := range pods {
				events, err := p.Client.CoreV1().Events(product.PoolNamespace).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=" + pod.Name + ",reason=" + reason})
				switch {
				case err != nil:
					return err
				case len(events.Items) == 0:
					return errors.New(pod.Name + " has none")
				}
				var sum int32
				for _, e := range events.Items {
					sum = max(sum, e.Count)
				}
				if sum < want {
					return fmt.Errorf("%s has it %d times", pod.Name, sum)
				}
			}
			return nil
		})
	}
	t.Cleanup(func() {
		must(t, errors.Join(set(context.WithoutCancel(ctx), good), p.PokeWebhook(context.WithoutCancel(ctx))))
	})
	for i, another := range []string{good + "\n# not the one before\n", good} {
		must(t, set(ctx, bad))
		must(t, counts(ctx, "CatalogRejected", int32(i+1)))
		must(t, set(ctx, another))
		must(t, counts(ctx, "CatalogReloaded", int32(i+1)))
	}
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
	_, err = maps.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "divvy-node-configs", Labels: base.Labels}}, metav1.CreateOptions{})
	must(t, err)
	t.Cleanup(func() { must(t, maps.Delete(context.WithoutCancel(ctx), "divvy-node-configs", metav1.DeleteOptions{})) })
	set := func(unit string) error {
		patch, err := json.Marshal(map[string]any{"data": map[string]string{"default": "apiVersion: config.divvy.dev/v1alpha1\nkind: NodeConfig\nresources:\n" +
			"- {name: enflame.com/gcu-memory, vendor: enflame, mode: memory, countResource: enflame.com/gcu-count, memoryUnit: \"" + unit + "\"}\n"}})
		must(t, err)
		_, err = maps.Patch(ctx, "divvy-node-configs", types.MergePatchType, patch, metav1.PatchOptions{})
		return err
	}
	refusedWith(t, "another unit", set("0.1"), `memoryUnit of enflame.com/gcu-memory cannot change from "1" to "0.1"`)
	must(t, set("1"))
	must(t, lab.Delete(ctx, "holder"))
	must(t, emptied(ctx))
	must(t, set("0.1"))
}
