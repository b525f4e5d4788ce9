package admission

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	kubejson "k8s.io/apimachinery/pkg/util/json"

	"github.com/divvy-gpu/divvy/internal/pool"
)

// W27: the patch has what changed and nothing else, so what this program does
// not know stays where it was, even in lists that grow in the middle.
func TestPatchKeepsUnknownFields(t *testing.T) {
	t.Parallel()
	none := corev1.ResourceRequirements{}
	pod := initsOf(guidePod(), container("fetch", none, "fetch"), container("warm", half(), "warm"), sidecar(container("mesh", none)))
	raw, err := json.Marshal(pod)
	if err != nil {
		t.Fatal(err)
	}
	// Every object of the pod has a field of a later Kubernetes version.
	var tree any
	if err := json.Unmarshal(raw, &tree); err != nil {
		t.Fatal(err)
	}
	n := 0
	mark(tree, &n)
	if raw, err = json.Marshal(tree); err != nil {
		t.Fatal(err)
	}
	var decoded corev1.Pod
	if err := kubejson.Unmarshal(raw, &decoded); err != nil {
		t.Fatal(err)
	}
	converted, _ := convert(t, &decoded)
	patch, err := makePatch(&decoded, converted)
	if err != nil {
		t.Fatal(err)
	}
	var after any
	if err := json.Unmarshal(applyPatch(t, raw, patch), &after); err != nil {
		t.Fatal(err)
	}
	if got := marks(after); got != n {
		t.Errorf("%d of %d unknown fields are left:\n%s", got, n, patch)
	}
	spec := after.(map[string]any)["spec"].(map[string]any)
	for _, list := range []string{"containers", "initContainers"} {
		for _, c := range spec[list].([]any) {
			object := c.(map[string]any)
			if want := object["name"] != populateName; (object["fromTheFuture"] == object["name"]) != want {
				t.Errorf("container %v has the unknown field of %v", object["name"], object["fromTheFuture"])
			}
		}
	}
}

// mark puts an unknown field in every object that has a fixed set of fields.
func mark(tree any, n *int) {
	switch tree := tree.(type) {
	case []any:
		for _, v := range tree {
			mark(v, n)
		}
	case map[string]any:
		for key, v := range tree {
			switch key {
			case "annotations", "labels", "limits", "requests":
			default:
				mark(v, n)
			}
		}
		tree["fromTheFuture"] = tree["name"]
		*n++
	}
}

func marks(tree any) int {
	n := 0
	switch tree := tree.(type) {
	case []any:
		for _, v := range tree {
			n += marks(v)
		}
	case map[string]any:
		for key, v := range tree {
			if key == "fromTheFuture" {
				n++
			}
			n += marks(v)
		}
	}
	return n
}

// W23: keys with characters that mean something in a path.
func TestPatchEscapesKeys(t *testing.T) {
	t.Parallel()
	pod := annotated(guidePod(), "a~1b/c~0d", "x", pool.StatusAnnotation, "waiting")
	converted, _ := convert(t, pod)
	if diff := cmp.Diff(converted, patched(t, pod, converted)); diff != "" {
		t.Error(diff)
	}
	patch, err := makePatch(pod, converted)
	if err != nil {
		t.Fatal(err)
	}
	mentions(t, string(patch), `"/metadata/annotations/auto-management~1status"`)
	if strings.Contains(string(patch), `"/metadata/annotations"`) {
		t.Errorf("W4: the patch writes all annotations: %s", patch)
	}
}
