package why

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// TestAlike: pods of one controller that are alike get the answer that each gets alone, by one
// search.
func TestAlike(t *testing.T) {
	for seed := range int64(60) {
		b := randomCluster(t, seed)
		first := b.Snapshot.Pod("team-a", "train").DeepCopy()
		kind := []string{"ReplicaSet", "StatefulSet", "Job"}[seed%3]
		ownedBy(first, kind, "train")
		first.OwnerReferences[0].UID = "owner"
		first.Labels = map[string]string{"pod-template-hash": "5f"}
		if kind == "StatefulSet" {
			first.Labels = map[string]string{"controller-revision-hash": "5f"}
		}
		b.Pods = b.Pods[:len(b.Pods)-1]
		const alike = 3
		for i := range alike {
			p := first.DeepCopy()
			p.Name, p.UID = fmt.Sprint("train-", i), p.UID+"-x"
			b.Pods = append(b.Pods, *p)
		}
		annotate(&b.Pods[len(b.Pods)-1], wire.CountAnnotation, "2") // not like the others
		together := New(&b.Snapshot)
		for _, p := range b.Snapshot.Waiting("team-a") {
			alone, got := New(&b.Snapshot).Pod(p), together.Pod(p)
			if diff := cmp.Diff(alone, got, cmpopts.IgnoreUnexported(Change{})); diff != "" {
				t.Fatalf("seed %d, pod %s (-alone +together):\n%s", seed, p.Name, diff)
			}
		}
		want := 2
		if n := b.Snapshot.Pod("team-a", "train-0"); n.Annotations[wire.CountAnnotation] == "2" {
			want = 1
		}
		if len(together.explained) != want {
			t.Errorf("seed %d: %d searches, want %d", seed, len(together.explained), want)
		}
	}
}

// TestRenamed: a pod is renamed where a command is about it, and nowhere else.
func TestRenamed(t *testing.T) {
	c := Change{Commands: []string{
		"kubectl set resources -n a statefulset/a-0 -c a-0 --requests=a-0=1",
		"kubectl delete pod -n a a-0",
		"kubectl delete pod -n b a-0",
		"kubectl patch pod -n a a-0 --dry-run=client > a-0.json",
	}, Patch: []Patch{{Object: "pod/a-0", Namespace: "a"}, {Object: "pod/a-0", Namespace: "b"}, {Object: "node/a-0"}}}
	want := []string{
		"kubectl set resources -n a statefulset/a-0 -c a-0 --requests=a-0=1",
		"kubectl delete pod -n a a-1",
		"kubectl delete pod -n b a-0",
		"kubectl patch pod -n a a-1 --dry-run=client > a-1.json",
	}
	got := c.renamed("a", "a-0", "a-1")
	if diff := cmp.Diff(want, got.Commands); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]Patch{{Object: "pod/a-1", Namespace: "a"}, {Object: "pod/a-0", Namespace: "b"}, {Object: "node/a-0"}},
		got.Patch); diff != "" {
		t.Error(diff)
	}
}

// TestPatch: the template of a controller is patched by the name of its container.
func TestPatch(t *testing.T) {
	b := newBuilder(t)
	goldenCases[NoDeviceFits].make(b)
	e := explainTrain(b, nil)
	c := changeOf(t, &e, ChangeRequest)
	const want = `{"spec":{"template":{"spec":{"containers":[{"name":"main","resources":{"limits":{"enflame.com/gcu-memory":"16"},` +
		`"requests":{"enflame.com/gcu-memory":"16"}}}]}}}}`
	if len(c.Patch) != 1 || c.Patch[0].Object != "statefulset/train" || c.Patch[0].Type != patchStrategic ||
		string(c.Patch[0].Patch) != want {
		t.Errorf("%+v", c.Patch)
	}
	// A pod that is created again is no patch.
	b = newBuilder(t)
	goldenCases[LargerThanDevice].make(b)
	b.Pods[0].OwnerReferences = nil
	b.Pods[0].Annotations = map[string]string{wire.UseModelsAnnotation: "S60"}
	e = explainTrain(b, nil)
	if c := changeOf(t, &e, ChangeRequest); len(c.Commands) == 0 || len(c.Patch) > 0 {
		t.Errorf("%+v", c)
	}
}
