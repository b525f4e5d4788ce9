package testenv

import (
	"path/filepath"
	"testing"

	"k8s.io/client-go/kubernetes/fake"

	"github.com/divvy-gpu/divvy/internal/pool"
)

// The pods of the examples can be read, and say what the guide says.
func TestExamplePods(t *testing.T) {
	repository, err := filepath.Abs("../../..")
	if err != nil {
		t.Fatal(err)
	}
	here := &Env{Client: fake.NewClientset(), CLI: CLI{Repository: repository}, Pods: Pods{Namespace: "here"}}
	pods := here.In("there").Pods
	for file, mode := range map[string]string{"pod.yaml": "all", "pod-memory.yaml": "all", "pod-filter.yaml": "all",
		"multi-container.yaml": "all", "injection.yaml": "injection"} {
		pod, err := pods.Example("bitfusion/" + file)
		if err != nil {
			t.Error(err)
			continue
		}
		if pod.Namespace != "there" || pod.Annotations[pool.ModeAnnotation] != mode || pod.Annotations[pool.VersionAnnotation] != "450" ||
			!pool.Asks(pod.Spec.Containers[0].Resources) {
			t.Errorf("%s: in %s with %v, asks %t", file, pod.Namespace, pod.Annotations, pool.Asks(pod.Spec.Containers[0].Resources))
		}
	}
	if _, err := pods.Example("bitfusion/quota.yaml"); err == nil {
		t.Error("a quota was read as a pod")
	}
}
