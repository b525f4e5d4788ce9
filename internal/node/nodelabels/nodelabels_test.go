package nodelabels

import (
	"encoding/json"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
)

func found(driver string, models ...string) backend.Found {
	f := backend.Found{Driver: driver}
	for i, m := range models {
		f.Devices = append(f.Devices, accel.Device{Index: i, ID: accel.DeviceID(m), Model: m, MemoryBytes: int64(len(m)) << 30})
	}
	return f
}

func TestWanted(t *testing.T) {
	nvidia := Vendor{Name: "nvidia", Found: found("550.54.15", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
		Labels: map[string]string{"nvidia.com/gpu.product": "NVIDIA A100-SXM4-80GB", "nvidia.com/gpu.count": "2"}}
	nvidia.Tiers = []accel.Tier{accel.TierHardware, accel.TierDriver}
	enflame := Vendor{Name: "enflame", Found: found("", "S60"), Tiers: []accel.Tier{accel.TierNone}}
	nothing := Vendor{Name: "iluvatar", Found: backend.Found{Driver: "4.2.0", Faults: []backend.Fault{{Err: errors.New("x")}}},
		Labels: map[string]string{"iluvatar.com/gpu.present": "true"}}
	divvy := map[string]string{
		"divvy.dev/nvidia.present": "true", "divvy.dev/nvidia.count": "2", "divvy.dev/nvidia.model": "NVIDIA-A100-SXM4-80GB",
		"divvy.dev/nvidia.memory": "21504", "divvy.dev/nvidia.driver": "550.54.15",
		"divvy.dev/enflame.present": "true", "divvy.dev/enflame.count": "1", "divvy.dev/enflame.model": "S60",
		"divvy.dev/enflame.memory": "3072", "divvy.dev/enflame.isolation": "none", "divvy.dev/nvidia.isolation": "driver",
	}
	all := maps.Clone(divvy)
	all["nvidia.com/gpu.product"], all["nvidia.com/gpu.count"] = "NVIDIA-A100-SXM4-80GB", "2"
	for policy, want := range map[v1alpha1.LabelPolicy]map[string]string{
		v1alpha1.LabelAll: all, v1alpha1.LabelDivvy: divvy, v1alpha1.LabelNone: {},
	} {
		if diff := cmp.Diff(want, Wanted([]Vendor{nvidia, enflame, nothing}, policy)); diff != "" {
			t.Errorf("%s: %s", policy, diff)
		}
	}
}

// NVIDIA 20: labels of a node with different devices flip between them.
func TestLabelsOfMixedNodesDoNotFlip(t *testing.T) {
	f := found("", "T4", "A100", "A100", "T4", "L4")
	r := rand.New(rand.NewPCG(20, 0))
	for range 50 {
		r.Shuffle(len(f.Devices), func(i, j int) { f.Devices[i], f.Devices[j] = f.Devices[j], f.Devices[i] })
		if got := Wanted([]Vendor{{Name: "nvidia", Found: f}}, v1alpha1.LabelDivvy); got["divvy.dev/nvidia.model"] != "T4" ||
			got["divvy.dev/nvidia.memory"] != "2048" {
			t.Fatalf("got %v", got)
		}
	}
	f.Devices = append(f.Devices, accel.Device{Index: 9, Model: "A100", MemoryBytes: 4 << 30})
	if got := Wanted([]Vendor{{Name: "nvidia", Found: f}}, v1alpha1.LabelDivvy)["divvy.dev/nvidia.model"]; got != "A100" {
		t.Errorf("the most frequent is A100, got %s", got)
	}
}

func TestKeysAreValid(t *testing.T) {
	for _, vendor := range []string{"nvidia", "iluvatar", "enflame"} {
		for key := range Wanted([]Vendor{{Name: vendor, Found: found("1", "m")}}, v1alpha1.LabelDivvy) {
			if errs := validation.IsQualifiedName(key); len(errs) > 0 {
				t.Errorf("%s: %v", key, errs)
			}
		}
	}
	if errs := validation.IsQualifiedName(OwnedAnnotation); len(errs) > 0 {
		t.Error(errs)
	}
}

func TestMerge(t *testing.T) {
	type labels = map[string]string
	for name, tt := range map[string]struct {
		current   labels
		owned     string
		wanted    labels
		set       labels
		remove    []string
		newOwned  string
		conflicts []string
	}{
		"the first time": {wanted: labels{"b": "2", "a": "1"}, set: labels{"a": "1", "b": "2"}, newOwned: "a,b"},
		"nothing to do":  {current: labels{"a": "1", "x": "y"}, owned: "a", wanted: labels{"a": "1"}, newOwned: "a"},
		"another value":  {current: labels{"a": "1"}, owned: "a", wanted: labels{"a": "2"}, set: labels{"a": "2"}, newOwned: "a"},
		"no longer true": {current: labels{"a": "1", "b": "2"}, owned: "a,b", wanted: labels{"a": "1"}, remove: []string{"b"},
			newOwned: "a"},
		"all gone":         {current: labels{"a": "1", "b": "2", "x": "y"}, owned: "a,b", remove: []string{"a", "b"}},
		"taken away by us": {owned: "a,b", wanted: labels{"a": "1"}, set: labels{"a": "1"}, newOwned: "a"},
		"somebody else's": {current: labels{"a": "9"}, wanted: labels{"a": "1", "b": "2"}, set: labels{"b": "2"}, newOwned: "b",
			conflicts: []string{`label a=9 was set by another client and is kept; divvy-node would set "1"`}},
		"somebody else's, the same":              {current: labels{"a": "1"}, wanted: labels{"a": "1"}},
		"theirs stays when it is no longer true": {current: labels{"a": "1"}, wanted: labels{}},
		"an annotation that names a label of Kubernetes": {current: labels{"kubernetes.io/hostname": "n",
			"node.kubernetes.io/instance-type": "x"},
			owned: "kubernetes.io/hostname,node.kubernetes.io/instance-type"},
		"an annotation of blanks": {current: labels{"a": "1"}, owned: ",,a,", wanted: labels{"a": "1"}, newOwned: "a"},
		"never one of Kubernetes": {wanted: labels{"kubernetes.io/arch": "x", "foo.k8s.io/x": "y"}},
	} {
		t.Run(name, func(t *testing.T) {
			c := Merge(tt.current, tt.owned, tt.wanted)
			var conflicts []string
			for _, x := range c.Conflicts {
				conflicts = append(conflicts, x.String())
			}
			if tt.set == nil {
				tt.set = labels{}
			}
			if diff := cmp.Diff([]any{tt.set, tt.remove, tt.newOwned, tt.conflicts},
				[]any{c.Set, c.Remove, c.Owned, conflicts}); diff != "" {
				t.Fatal(diff)
			}
			// The patch applied, nothing is left to do.
			after := maps.Clone(tt.current)
			if after == nil {
				after = labels{}
			}
			maps.Copy(after, c.Set)
			for _, key := range c.Remove {
				delete(after, key)
			}
			if again := Merge(after, c.Owned, tt.wanted); !again.Empty() {
				t.Errorf("the second time there is %+v", again)
			}
			if c.Empty() != (len(tt.set)+len(tt.remove) == 0 && tt.newOwned == tt.owned) {
				t.Errorf("Empty is %t", c.Empty())
			}
		})
	}
}

func TestPatch(t *testing.T) {
	c := Merge(map[string]string{"old": "1"}, "old", map[string]string{"new": "2"})
	got, err := c.Patch()
	want := `{"metadata":{"annotations":{"divvy.dev/labels":"new"},"labels":{"new":"2","old":null}}}`
	if err != nil || string(got) != want {
		t.Errorf("got %s, %v; want %s", got, err, want)
	}
	got, err = Merge(map[string]string{"old": "1"}, "old", nil).Patch()
	if want = `{"metadata":{"annotations":{"divvy.dev/labels":null},"labels":{"old":null}}}`; err != nil || string(got) != want ||
		!json.Valid(got) {
		t.Errorf("got %s, %v; want %s", got, err, want)
	}
	if !slices.Equal(c.Remove, []string{"old"}) {
		t.Errorf("removes %v", c.Remove)
	}
}
