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

// TestExtenderWritesOwnTemplates: the extender may write the templates of pods that had units of
// memory, and no others.
func TestExtenderWritesOwnTemplates(t *testing.T) {
	template := func(name, label, class string, edit func(*resourceapi.DeviceClaim)) *resourceapi.ResourceClaimTemplate {
		out := &resourceapi.ResourceClaimTemplate{
			TypeMeta:   metav1.TypeMeta{APIVersion: "resource.k8s.io/v1", Kind: "ResourceClaimTemplate"},
			ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, Labels: map[string]string{"divvy.dev/memory-units": label}},
		}
		out.Spec.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "memory", Exactly: &resourceapi.ExactDeviceRequest{
			DeviceClassName: class}}}
		if edit != nil {
			edit(&out.Spec.Spec.Devices)
		}
		return out
	}
	const class = "gcu.enflame.divvy.dev"
	edited := func(edit func(*resourceapi.DeviceClaim)) *resourceapi.ResourceClaimTemplate {
		return template("divvy-memory-1", "claims", class, edit)
	}
	own := template("divvy-memory-1", "claims", class, nil)
	tests := map[string]struct {
		op       admission.Operation
		template *resourceapi.ResourceClaimTemplate
		allowed  bool
	}{
		"created":                            {admission.Create, own, true},
		"deleted":                            {admission.Delete, own, true},
		"created with another name":          {admission.Create, template("x", "claims", class, nil), false},
		"created without the label":          {admission.Create, template("divvy-memory-1", "", class, nil), false},
		"created for another driver's class": {admission.Create, template("divvy-memory-1", "claims", "gpu.nvidia.com", nil), false},
		"created with administrators' access": {admission.Create, edited(func(d *resourceapi.DeviceClaim) {
			d.Requests[0].Exactly.AdminAccess = new(true)
		}), false},
		"created with parameters": {admission.Create, edited(func(d *resourceapi.DeviceClaim) {
			d.Config = []resourceapi.DeviceClaimConfiguration{{}}
		}), false},
		"created with alternatives": {admission.Create, edited(func(d *resourceapi.DeviceClaim) {
			d.Requests[0] = resourceapi.DeviceRequest{Name: "m", FirstAvailable: []resourceapi.DeviceSubRequest{{DeviceClassName: class}}}
		}), false},
		"a user's deleted": {admission.Delete, template("mine", "", class, nil), false},
	}
	policy := load(t, "divvy-extender-templates", "--set", "node.allocationPath=dra,claims.admission.enabled=true")
	conditions := validator(t, policy)
	gvk := resourceapi.SchemeGroupVersion.WithKind("ResourceClaimTemplate")
	gvr := schema.GroupVersionResource{Group: gvk.Group, Version: gvk.Version, Resource: "resourceclaimtemplates"}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.Object = nil, tt.template
			if tt.op == admission.Delete {
				before, after = tt.template, nil
			}
			who := &user.DefaultInfo{Name: extenderAccount}
			attributes := admission.NewAttributesRecord(after, before, gvk, "team", tt.template.Name, gvr, "", tt.op, nil, false, who)
			versioned := &admission.VersionedAttributes{Attributes: attributes, VersionedKind: gvk,
				VersionedObject: admission.NewLazyObject(after), VersionedOldObject: admission.NewLazyObject(before)}
			rejected := refusals(t, policy.Spec.Validations, conditions, versioned, gvr, gvk)
			if tt.allowed != (len(rejected) == 0) {
				t.Errorf("allowed %t, want %t; rejected for: %q", len(rejected) == 0, tt.allowed, rejected)
			}
		})
	}
}
