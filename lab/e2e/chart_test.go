//go:build e2e

package e2e

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// chartValues are ways to render the chart, with each of its parts in one of them.
var chartValues = map[string][]string{
	"defaults": nil,
	"mixed and pool": {"--values", "examples/values/mixed.yaml", "--values", "examples/values/pool.yaml",
		"--set-json", `sharedResources=[{"name":"nvidia.com/gpu-memory","vendor":"nvidia"}]`},
	"pool alone":   {"--values", "examples/values/pool.yaml"},
	"GPU operator": {"--values", "examples/values/gpu-operator.yaml"},
	"dedicated":    {"--set", "scheduler.mode=dedicated,networkPolicy.enabled=true"},
	"everything": {
		"--set", "pool.enabled=true,networkPolicy.enabled=true,extender.replicas=2,extender.hostNetwork=false,node.ixConfigMap=ix-config," +
			"networkPolicy.apiServer.cidrs={10.0.0.0/8},networkPolicy.kubeScheduler={10.0.0.0/8}",
		"--set", "node.configs.a.logLevel=debug,image.pullSecrets[0].name=login,node.runtimeClassName=nvidia",
		"--set-json", `networkPolicy.prometheus=[{"namespaceSelector":{"matchLabels":{"a":"b"}}}]`,
	},
}

// TestAPIServerAcceptsTheChart: every object of the chart, hooks among them, is one
// that the API server takes without a warning. Nothing is changed by it.
func TestAPIServerAcceptsTheChart(t *testing.T) {
	ctx := begin(t, guide)
	var group errgroup.Group
	group.SetLimit(3)
	for name, args := range chartValues {
		args = slices.Clone(args)
		for i, arg := range args {
			if strings.HasPrefix(arg, "examples/") {
				args[i] = filepath.Join(lab.CLI.Repository, arg)
			}
		}
		group.Go(func() error {
			text, err := lab.Divvy.Render(ctx, args...)
			if err != nil {
				return err
			}
			said, err := lab.CLI.Command(ctx, text, lab.Cluster.Program("kubectl"), "apply", "--server-side", "--force-conflicts",
				"--field-manager=e2e",
				"--dry-run=server", "--validate=strict", "--warnings-as-errors", "--filename=-")
			if err != nil {
				t.Errorf("%s: %v", name, err)
				return nil
			}
			objects := 0
			for document := range strings.SplitSeq(text, "\n---\n") {
				if strings.Contains("\n"+document, "\nkind: ") {
					objects++
				}
			}
			if accepted := strings.Count(said, "(server dry run)"); accepted != objects || objects < 8 {
				t.Errorf("%s: the API server took %d of %d objects:\n%s", name, accepted, objects, said)
			}
			return nil
		})
	}
	must(t, group.Wait())
	policies, err := lab.Client.AdmissionregistrationV1().ValidatingAdmissionPolicies().List(ctx,
		metav1.ListOptions{LabelSelector: "app.kubernetes.io/part-of=divvy"})
	must(t, err)
	if len(policies.Items) != 6 {
		t.Errorf("%d admission policies are installed, want 6", len(policies.Items))
	}
	for _, p := range policies.Items {
		if p.Status.TypeChecking == nil || len(p.Status.TypeChecking.ExpressionWarnings) > 0 {
			t.Errorf("the API server doubts policy %s: %+v", p.Name, p.Status.TypeChecking)
		}
	}
}
