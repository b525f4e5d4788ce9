package why

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"mvdan.cc/sh/v3/shell"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// cloneOf is a deep copy of a snapshot.
func cloneOf(s *Snapshot) *Snapshot {
	c := *s
	c.Nodes, c.Pods = make([]v1.Node, len(s.Nodes)), make([]v1.Pod, len(s.Pods))
	for i := range s.Nodes {
		s.Nodes[i].DeepCopyInto(&c.Nodes[i])
	}
	for i := range s.Pods {
		s.Pods[i].DeepCopyInto(&c.Pods[i])
	}
	return &c
}

// carryOut applies a change to a copy of the cluster, by its commands as they are printed.
func carryOut(t *testing.T, s *Snapshot, c *Change) *Snapshot {
	t.Helper()
	s = cloneOf(s)
	switch c.Kind {
	case ChangeWait:
		s.Pods = slices.DeleteFunc(s.Pods, func(p v1.Pod) bool { return p.DeletionTimestamp != nil })
	case ChangeMoreNodes:
		more := *nodeNamed(s, strings.TrimPrefix(c.Text, "add a node like ")).DeepCopy()
		more.Name, more.Spec.Unschedulable = "more", false
		s.Nodes = append(s.Nodes, more)
	default:
		if len(c.Commands) == 0 {
			t.Fatalf("%+v has no commands", c)
		}
		files := map[string][]byte{}
		for _, command := range c.Commands {
			carryOutCommand(t, s, files, command)
		}
	}
	return s
}

// applyPatches applies the patches of a change to a copy of the cluster; false for one that
// consists of more.
func applyPatches(t *testing.T, s *Snapshot, c *Change) (*Snapshot, bool) {
	t.Helper()
	if len(c.Patch) == 0 || len(c.Patch) != len(c.Commands) {
		return nil, false
	}
	s = cloneOf(s)
	for _, one := range c.Patch {
		kind, name, _ := strings.Cut(one.Object, "/")
		switch kind {
		case "node":
			patched(t, &one, nodeNamed(s, name))
		case "pod":
			patched(t, &one, s.Pod(one.Namespace, name))
		default:
			t.Fatalf("the test does not know the object of %+v", one)
		}
	}
	return s, true
}

// patched applies a patch to an object.
func patched[T any](t *testing.T, p *Patch, of *T) {
	t.Helper()
	before, err := json.Marshal(of)
	if err != nil {
		t.Fatal(err)
	}
	var after []byte
	switch p.Type {
	case patchMerge:
		after, err = jsonpatch.MergePatch(before, p.Patch)
	case patchJSON:
		var ops jsonpatch.Patch
		if ops, err = jsonpatch.DecodePatch(p.Patch); err == nil {
			after, err = ops.Apply(before)
		}
	default:
		t.Fatalf("the test does not know the type of %+v", p)
	}
	var fresh T
	if err == nil {
		err = json.Unmarshal(after, &fresh)
	}
	if err != nil {
		t.Fatalf("%+v: %v", p, err)
	}
	*of = fresh
}

func nodeNamed(s *Snapshot, name string) *v1.Node {
	return &s.Nodes[slices.IndexFunc(s.Nodes, func(n v1.Node) bool { return n.Name == name })]
}

// carryOutCommand carries out one command. files are those that commands wrote before.
func carryOutCommand(t *testing.T, s *Snapshot, files map[string][]byte, command string) {
	t.Helper()
	command, file, _ := strings.Cut(command, " > ")
	words, err := shell.Fields(command, nil)
	if err != nil {
		t.Fatalf("%s: %v", command, err)
	}
	wrong := func() { t.Fatalf("the test does not know the command %q", command) }
	verb, rest := words[1], words[2:]
	namespace := ""
	if i := slices.Index(rest, "-n"); i >= 0 {
		namespace = rest[i+1]
		rest = slices.Delete(rest, i, i+2)
	}
	overwrite := slices.Contains(rest, "--overwrite")
	rest = slices.DeleteFunc(rest, func(w string) bool { return w == "--overwrite" })
	pod := func() *v1.Pod {
		p := s.Pod(namespace, rest[1])
		if rest[0] != "pod" || p == nil {
			wrong()
		}
		return p
	}
	switch verb {
	case "uncordon":
		n := nodeNamed(s, rest[0])
		n.Spec.Unschedulable = false
	case "label":
		for _, pair := range rest[2:] {
			key, value, _ := strings.Cut(pair, "=")
			if n := nodeNamed(s, rest[1]); n.Labels[key] == "" && !overwrite {
				n.Labels[key] = value
			} else {
				t.Fatalf("%q overwrites a label", command)
			}
		}
	case "taint":
		n := nodeNamed(s, rest[1])
		before := len(n.Spec.Taints)
		n.Spec.Taints = slices.DeleteFunc(n.Spec.Taints, func(t v1.Taint) bool { return taintText(&t)+"-" == rest[2] })
		if len(n.Spec.Taints) == before {
			t.Fatalf("%q removes no taint", command)
		}
	case "annotate":
		p := pod()
		for _, pair := range rest[2:] {
			if key, value, set := strings.Cut(pair, "="); set {
				annotate(p, key, value)
			} else {
				delete(p.Annotations, strings.TrimSuffix(key, "-"))
			}
		}
	case "patch":
		p := pod()
		if dry := slices.Contains(words, "--dry-run=client"); dry != (file != "") {
			wrong()
		}
		patch, err := jsonpatch.DecodePatch([]byte(rest[slices.Index(rest, "-p")+1]))
		if err != nil {
			t.Fatalf("%s: %v", command, err)
		}
		before, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		after, err := patch.Apply(before)
		if err != nil {
			t.Fatalf("%s: %v", command, err)
		}
		if file != "" {
			files[file] = after
			return
		}
		*p = v1.Pod{}
		if err := json.Unmarshal(after, p); err != nil {
			t.Fatal(err)
		}
	case "replace":
		var p v1.Pod
		if err := json.Unmarshal(files[rest[slices.Index(rest, "-f")+1]], &p); err != nil || !slices.Contains(rest, "--force") {
			t.Fatalf("%q: %v", command, err)
		}
		*s.Pod(p.Namespace, p.Name) = p
	case "delete":
		p := pod()
		s.Pods = slices.DeleteFunc(s.Pods, func(o v1.Pod) bool { return o.UID == p.UID })
	default:
		wrong()
	}
}

// naive decides whether a pod fits on any node, without the code that is tested.
func naive(s *Snapshot, p *v1.Pod) bool {
	return slices.ContainsFunc(s.Nodes, func(n v1.Node) bool { return naiveOn(s, p, &n) })
}

func naiveOn(s *Snapshot, p *v1.Pod, n *v1.Node) bool {
	if n.Spec.Unschedulable {
		return false
	}
	for _, t := range n.Spec.Taints {
		if !slices.ContainsFunc(p.Spec.Tolerations, func(o v1.Toleration) bool { return o.Key == t.Key && o.Value == t.Value }) {
			return false
		}
	}
	for k, v := range p.Spec.NodeSelector {
		if n.Labels[k] != v {
			return false
		}
	}
	asked := func(p *v1.Pod, name v1.ResourceName) int64 {
		q := p.Spec.Containers[0].Resources.Requests[name]
		return q.MilliValue()
	}
	var held []*v1.Pod
	for i := range s.Pods {
		if o := &s.Pods[i]; o.Spec.NodeName == n.Name && o.Status.Phase == v1.PodRunning {
			held = append(held, o)
		}
	}
	if q := n.Status.Allocatable[v1.ResourcePods]; int64(len(held)) >= q.Value() {
		return false
	}
	for _, name := range []v1.ResourceName{v1.ResourceCPU, memory} {
		q := n.Status.Allocatable[name]
		free := q.MilliValue()
		for _, o := range held {
			free -= asked(o, name)
		}
		if asked(p, name) > free {
			return false
		}
	}
	units, k := asked(p, memory)/1000, 1
	if text := p.Annotations[wire.CountAnnotation]; text != "" {
		if _, err := fmt.Sscan(text, &k); err != nil || k < 1 || units%int64(k) != 0 {
			return false
		}
	}
	all, err := wire.DecodeInventory(n.Annotations[wire.InventoryAnnotation])
	if err != nil {
		return false
	}
	free := map[accel.DeviceID]int64{}
	for _, o := range held {
		g, err := wire.DecodeGrantUnverified(o.Annotations[wire.GrantAnnotation])
		if err != nil {
			continue
		}
		for _, id := range g.Devices() {
			free[id] -= int64(g.Units) / int64(len(g.More)+1)
		}
	}
	fit := 0
	for _, d := range all[0].Shares {
		avoided := slices.Contains(strings.Split(p.Annotations[wire.AvoidModelsAnnotation], ","), d.Model) ||
			p.Annotations[wire.UseModelsAnnotation] != "" && p.Annotations[wire.UseModelsAnnotation] != d.Model
		if !d.Health.Unhealthy && !avoided && free[d.ID]+int64(d.Units-d.Withheld) >= units/int64(k) {
			fit++
		}
	}
	return fit >= k
}

func setUnits(p *v1.Pod, units int64) {
	r := &p.Spec.Containers[0].Resources
	r.Requests[memory] = *resource.NewQuantity(units, resource.DecimalSI)
	r.Limits[memory] = *resource.NewQuantity(units, resource.DecimalSI)
}
