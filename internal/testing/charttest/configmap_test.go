package charttest

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// TestIsolationOfAConfigMapOfOnesOwn: an installation or upgrade, which reads the cluster, is rejected if
// a configuration that the chart does not have needs what only the chart can add.
func TestIsolationOfAConfigMapOfOnesOwn(t *testing.T) {
	const cooperative = "sharedResources[0].name=nvidia.com/gpu-memory,sharedResources[0].vendor=nvidia," +
		"sharedResources[0].isolation=cooperative"
	for name, tt := range map[string]struct {
		entry, values, want string
	}{
		"MPS": {"isolation: cooperative\nkind: NodeConfig", "",
			"in entry gpus of ConfigMap mine, resource nvidia.com/gpu-memory has isolation cooperative"},
		"limits":                      {"isolation: driver\nkind: NodeConfig", "", "has isolation driver"},
		"none":                        {"isolation: none\nkind: NodeConfig", "", ""},
		"MPS that values ask for too": {"isolation: cooperative\nkind: NodeConfig", cooperative, ""},
		"a resource that is text":     {"isolation: none\n- text\nkind: NodeConfig", "", ""},
		"a file of another kind":      {"isolation: cooperative\nkind: Other", "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			text := "apiVersion: config.divvy.dev/v1alpha1\nresources:\n- name: nvidia.com/gpu-memory\n  vendor: nvidia\n  " + tt.entry
			set := []string{"--dry-run=server", "--kube-apiserver", apiServerWith(t, text), "--set", "node.existingConfigMap=mine"}
			if tt.values != "" {
				set = append(set, "--set", tt.values)
			}
			_, err := Render(t.Context(), set...)
			if (err != nil) != (tt.want != "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}
}

// apiServerWith returns the address of an API server that has ConfigMap mine with entry gpus, and no
// other object.
func apiServerWith(t *testing.T, entry string) string {
	t.Helper()
	resources := func(group string, all ...metav1.APIResource) metav1.APIResourceList {
		return metav1.APIResourceList{TypeMeta: metav1.TypeMeta{Kind: "APIResourceList", APIVersion: "v1"}, GroupVersion: group,
			APIResources: all}
	}
	verbs := metav1.Verbs{"get", "list"}
	answers := map[string]any{
		"/api/v1": resources("v1", metav1.APIResource{Name: "configmaps", Kind: "ConfigMap", Namespaced: true, Verbs: verbs},
			metav1.APIResource{Name: "secrets", Kind: "Secret", Namespaced: true, Verbs: verbs},
			metav1.APIResource{Name: "nodes", Kind: "Node", Verbs: verbs}),
		"/apis/apps/v1": resources("apps/v1", metav1.APIResource{Name: "deployments", Kind: "Deployment", Namespaced: true, Verbs: verbs}),
		"/api/v1/nodes": corev1.NodeList{TypeMeta: metav1.TypeMeta{Kind: "NodeList", APIVersion: "v1"}},
		"/api/v1/namespaces/divvy-system/configmaps/mine": corev1.ConfigMap{TypeMeta: metav1.TypeMeta{Kind: "ConfigMap", APIVersion: "v1"},
			ObjectMeta: metav1.ObjectMeta{Name: "mine", Namespace: "divvy-system"}, Data: map[string]string{"gpus": entry}},
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer, ok := answers[r.URL.Path]
		w.Header().Set("Content-Type", "application/json")
		if !ok {
			w.WriteHeader(http.StatusNotFound)
			answer = apierrors.NewNotFound(schema.GroupResource{}, r.URL.Path).Status()
		}
		if err := json.NewEncoder(w).Encode(answer); err != nil {
			t.Error(err)
		}
	}))
	t.Cleanup(server.Close)
	return server.URL
}
