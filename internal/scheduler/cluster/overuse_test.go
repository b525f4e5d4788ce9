package cluster

import (
	"cmp"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// TestOveruseLists: of both forms of a node, and only where they are asked for.
func TestOveruseLists(t *testing.T) {
	for _, keep := range []bool{false, true} {
		f := newFixture(t)
		f.books.config.KeepOveruse = keep
		read := Overuse{State: f.books, Ledger: f.ledger}
		want := func(lists map[string]string) {
			t.Helper()
			if !keep {
				lists = map[string]string{}
			}
			if diff := gocmp.Diff(lists, read.Lists()); diff != "" {
				t.Errorf("kept is %t (-want +got):\n%s", keep, diff)
			}
		}
		metadata := f.node("a", 16)
		whole := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "b"}}
		f.ok(f.books.Nodes().Replace([]any{metadata, whole}, ""))
		want(map[string]string{})
		for _, text := range []string{"1", "2"} { // the inventory stays the same
			metadata.Annotations[wire.OveruseAnnotation] = text
			whole.Annotations = map[string]string{wire.OveruseAnnotation: text}
			f.ok(f.books.Nodes().Update(metadata))
			f.ok(f.books.Nodes().Update(whole))
			want(map[string]string{"a": text, "b": text})
		}
		delete(metadata.Annotations, wire.OveruseAnnotation)
		f.ok(f.books.Nodes().Update(metadata))
		want(map[string]string{"b": "2"})
		f.ok(f.books.Nodes().Delete(whole))
		want(map[string]string{})
	}
}

// TestOverusePod: a node can accuse only pods of its own that hold the device.
func TestOverusePod(t *testing.T) {
	priority := int32(7)
	for name, tt := range map[string]struct {
		change func(*v1.Pod)
		// node, uid and so on are what the list says, if not what is right.
		node, uid, pod string
		resource       accel.Resource
		device         accel.DeviceID
		want           OverusingPod
		not            bool
	}{
		"runs": {want: OverusingPod{Priority: 7}},
		"a static pod": {
			change: func(p *v1.Pod) { p.Annotations[v1.MirrorPodAnnotationKey] = "x" },
			want:   OverusingPod{Priority: 7, Static: true},
		},
		"has no priority":         {change: func(p *v1.Pod) { p.Spec.Priority = nil }},
		"has ended":               {change: func(p *v1.Pod) { p.Status.Phase = v1.PodFailed }, not: true},
		"is being deleted":        {change: func(p *v1.Pod) { p.DeletionTimestamp = &metav1.Time{} }, not: true},
		"is on another node":      {node: "b", device: "b-0", not: true},
		"holds another device":    {device: "a-0", not: true},
		"holds another resource":  {resource: "nvidia.com/gpu-memory", not: true},
		"has another UID":         {uid: "other", not: true},
		"has another name":        {pod: "q", not: true},
		"has no valid allocation": {change: func(p *v1.Pod) { p.Annotations[wire.GrantAnnotation] = "forged" }, not: true},
		"requests nothing":        {change: func(p *v1.Pod) { p.Spec.Containers[0].Resources = v1.ResourceRequirements{} }, not: true},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.ok(f.books.Nodes().Replace([]any{f.node("a", 16, 16), f.node("b", 16)}, ""))
			pod := f.grant(boundPod("p", "u", "4", "a"), testKey, 1)
			pod.Spec.Priority = &priority
			if tt.change != nil {
				tt.change(pod)
			}
			f.ok(f.books.Pods().Replace([]any{pod}, ""))
			got, ok := Overuse{State: f.books, Ledger: f.ledger}.Pod(cmp.Or(tt.node, "a"),
				accel.PodRef{UID: cmp.Or(tt.uid, "u"), Namespace: pod.Namespace, Name: cmp.Or(tt.pod, "p")},
				cmp.Or(tt.resource, gcuMemory), cmp.Or(tt.device, "a-1"))
			if ok == tt.not || got != tt.want {
				t.Errorf("%+v, %t", got, ok)
			}
		})
	}
}
