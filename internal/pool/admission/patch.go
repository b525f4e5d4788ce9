package admission

import (
	"encoding/json"
	"fmt"
	"slices"

	"gomodules.xyz/jsonpatch/v2"
	corev1 "k8s.io/api/core/v1"
)

// move is an operation that the patch library has no type for.
type move struct {
	Op   string `json:"op"`
	From string `json:"from"`
	Path string `json:"path"`
}

const initContainersPath = "/spec/initContainers"

// makePatch returns the JSON patch that makes converted of pod. It only has what
// Mutate changed, both pods being as decoded here, so fields that this program
// does not know stay as they are.
func makePatch(pod, converted *corev1.Pod) ([]byte, error) {
	// The library compares lists by index. An element that came to stand before
	// others is therefore put in its place first: otherwise it would be written
	// over the next one, which would leave its unknown fields there.
	ops, aligned := alignInitContainers(pod, converted)
	before, err := json.Marshal(aligned)
	if err != nil {
		return nil, fmt.Errorf("encode the pod: %w", err)
	}
	after, err := json.Marshal(converted)
	if err != nil {
		return nil, fmt.Errorf("encode the converted pod: %w", err)
	}
	changes, err := jsonpatch.CreatePatch(before, after)
	if err != nil {
		return nil, fmt.Errorf("compare the pods: %w", err)
	}
	for i := range changes {
		ops = append(ops, &changes[i])
	}
	patch, err := json.Marshal(ops)
	if err != nil {
		return nil, fmt.Errorf("encode the patch: %w", err)
	}
	return patch, nil
}

// alignInitContainers returns the operations that bring the init container of
// Mutate to its place, and the pod after them.
func alignInitContainers(pod, converted *corev1.Pod) (ops []any, aligned *corev1.Pod) {
	isPopulate := func(c corev1.Container) bool { return c.Name == populateName }
	from := slices.IndexFunc(pod.Spec.InitContainers, isPopulate)
	to := slices.IndexFunc(converted.Spec.InitContainers, isPopulate)
	if to < 0 || from == to {
		return nil, pod
	}
	shallow := *pod
	aligned = &shallow
	aligned.Spec.InitContainers = slices.Clone(pod.Spec.InitContainers)
	place := func(i int) string { return fmt.Sprintf("%s/%d", initContainersPath, i) }
	switch populate := converted.Spec.InitContainers[to]; {
	case from >= 0:
		ops = []any{move{Op: "move", From: place(from), Path: place(to)}}
		populate = pod.Spec.InitContainers[from]
		aligned.Spec.InitContainers = slices.Insert(slices.Delete(aligned.Spec.InitContainers, from, from+1), to, populate)
	case len(pod.Spec.InitContainers) == 0:
		return nil, pod // the whole list is new
	default:
		ops = []any{&jsonpatch.Operation{Operation: "add", Path: place(to), Value: populate}}
		aligned.Spec.InitContainers = slices.Insert(aligned.Spec.InitContainers, to, populate)
	}
	return ops, aligned
}
