package policy

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"
)

// TestDaemonChangesOwnSlices: the devices of another node, and those of another driver, are not
// a daemon's to change.
func TestDaemonChangesOwnSlices(t *testing.T) {
	slice := func(node, driver string) *resourceapi.ResourceSlice {
		s := &resourceapi.ResourceSlice{TypeMeta: metav1.TypeMeta{APIVersion: "resource.k8s.io/v1", Kind: "ResourceSlice"},
			ObjectMeta: metav1.ObjectMeta{GenerateName: "probe-"}}
		s.Spec.Driver = driver
		if node != "" {
			s.Spec.NodeName = &node
		}
		return s
	}
	everywhere := slice("", "nvidia.divvy.dev")
	everywhere.Spec.AllNodes = new(true)
	own, other := slice("a", "nvidia.divvy.dev"), slice("b", "nvidia.divvy.dev")
	bound := map[string][]string{"authentication.kubernetes.io/node-name": {"a"}, "authentication.kubernetes.io/pod-name": {"p"}}
	tests := map[string]struct {
		op       admission.Operation
		old, new *resourceapi.ResourceSlice
		extra    map[string][]string
		allowed  bool
	}{
		"created":                    {admission.Create, nil, own, bound, true},
		"updated":                    {admission.Update, own, own, bound, true},
		"deleted":                    {admission.Delete, own, nil, bound, true},
		"created for another node":   {admission.Create, nil, other, bound, false},
		"updated on another node":    {admission.Update, other, other, bound, false},
		"deleted on another node":    {admission.Delete, other, nil, bound, false},
		"created for all nodes":      {admission.Create, nil, everywhere, bound, false},
		"another vendor of Divvy's":  {admission.Create, nil, slice("a", "iluvatar.divvy.dev"), bound, true},
		"another driver":             {admission.Create, nil, slice("a", "gpu.nvidia.com"), bound, false},
		"deleted of another driver":  {admission.Delete, slice("a", "gpu.nvidia.com"), nil, bound, false},
		"a token that names no node": {admission.Create, nil, own, nil, false},
		"a token of no pod": {admission.Create, nil, own, map[string][]string{
			"authentication.kubernetes.io/node-name": {"a"}}, false},
	}
	policy := load(t, "divvy-node-slices", "--set", "node.allocationPath=dra")
	conditions := validator(t, policy)
	gvk := resourceapi.SchemeGroupVersion.WithKind("ResourceSlice")
	gvr := schema.GroupVersionResource{Group: gvk.Group, Version: gvk.Version, Resource: "resourceslices"}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.Object
			if tt.old != nil {
				before = tt.old
			}
			if tt.new != nil {
				after = tt.new
			}
			who := &user.DefaultInfo{Name: "system:serviceaccount:divvy-system:divvy-node", Extra: tt.extra}
			attributes := admission.NewAttributesRecord(after, before, gvk, "", "s", gvr, "", tt.op, nil, false, who)
			versioned := &admission.VersionedAttributes{Attributes: attributes, VersionedKind: gvk,
				VersionedObject: admission.NewLazyObject(after), VersionedOldObject: admission.NewLazyObject(before)}
			rejected := refusals(t, policy.Spec.Validations, conditions, versioned, gvr, gvk)
			if tt.allowed != (len(rejected) == 0) {
				t.Errorf("allowed %t, want %t; rejected for: %q", len(rejected) == 0, tt.allowed, rejected)
			}
		})
	}
}
