package claimreview

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/admissionreview"
)

// gpuName is an extended resource, and gpuClass a class that may have it.
const gpuName, gpuClass = "nvidia.com/gpu", "gpu.nvidia.divvy.dev"

// classOfDevices is a class with an extended resource, "" for none, and selectors.
func classOfDevices(name, extended string, selectors ...string) *resourceapi.DeviceClass {
	c := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if extended != "" {
		c.Spec.ExtendedResourceName = &extended
	}
	for _, s := range selectors {
		c.Spec.Selectors = append(c.Spec.Selectors, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: s}})
	}
	return c
}

// nodeOffering is a node with an allocationPath, "" for plugin, whose device plugin has so many devices
// of gpuName, of which some are healthy.
func nodeOffering(name, path string, devices, healthy int64) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if path != "" {
		n.Labels = map[string]string{wire.PathLabel: path}
	}
	n.Status.Capacity = corev1.ResourceList{gpuName: *resource.NewQuantity(devices, resource.DecimalSI)}
	n.Status.Allocatable = corev1.ResourceList{gpuName: *resource.NewQuantity(healthy, resource.DecimalSI)}
	return n
}

// published are so many devices of a vendor on a node.
func published(vendor, node string, devices int) *resourceapi.ResourceSlice {
	s := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: node + "-" + vendor},
		Spec: resourceapi.ResourceSliceSpec{Driver: wire.Driver(vendor), NodeName: &node}}
	for i := range devices {
		s.Spec.Devices = append(s.Spec.Devices, resourceapi.Device{Name: fmt.Sprintf("d-%d", i)})
	}
	return s
}

// bySelector is a client that lists the slices of the driver that is asked for, as the API server does.
func bySelector(objects ...runtime.Object) *fake.Clientset {
	client := fake.NewClientset(objects...)
	client.PrependReactor("list", "resourceslices", func(a clienttesting.Action) (bool, runtime.Object, error) {
		var out resourceapi.ResourceSliceList
		for _, o := range objects {
			s, ok := o.(*resourceapi.ResourceSlice)
			selector := a.(clienttesting.ListAction).GetListRestrictions().Fields
			if driver, _ := selector.RequiresExactMatch(resourceapi.ResourceSliceSelectorDriver); ok && s.Spec.Driver == driver {
				out.Items = append(out.Items, *s)
			}
		}
		return true, &out, nil
	})
	return client
}

func TestClasses(t *testing.T) {
	class := classOfDevices(gpuClass, gpuName)
	own := classOfDevices("fast", gpuName, "device.driver == 'nvidia.divvy.dev'")
	tests := map[string]struct {
		class   *resourceapi.DeviceClass
		before  *resourceapi.DeviceClass // nil for a class that is created
		cluster []runtime.Object
		result  string
		said    string // in whole for a warning
	}{
		"no extended resource": {classOfDevices(gpuClass, ""), nil, []runtime.Object{nodeOffering("a", "", 8, 8)},
			admissionreview.Allowed, ""},
		"no node offers it": {class, nil, []runtime.Object{nodeOffering("a", "dra", 0, 0), published("nvidia", "a", 8)},
			admissionreview.Allowed, ""},
		"offered on nodes that have not moved": {class, nil, []runtime.Object{nodeOffering("b", "", 8, 8), nodeOffering("a", "", 8, 8),
			nodeOffering("c", "dra", 0, 0), published("nvidia", "c", 8)}, admissionreview.Allowed,
			"the device plugin of each of 2 nodes, such as a, offers nvidia.com/gpu: pods that request it get its devices there, and " +
				"claims of class gpu.nvidia.divvy.dev on other nodes, until these nodes have allocationPath=dra"},
		"offered on a node that moves": {class, nil, []runtime.Object{nodeOffering("a", "dra", 1, 1), published("nvidia", "a", 8)},
			admissionreview.Allowed, "the device plugin of node a offers nvidia.com/gpu: pods that request it get its devices there, and " +
				"claims of class gpu.nvidia.divvy.dev on other nodes, until these nodes have allocationPath=dra"},
		"offered beside devices of the class": {class, nil, []runtime.Object{nodeOffering("a", "both", 4, 4), published("nvidia", "a", 4)},
			admissionreview.Denied, `spec.extendedResourceName: Invalid value: "nvidia.com/gpu": the device plugin of node a offers it ` +
				`beside devices for claims of class gpu.nvidia.divvy.dev, and pods that request it get none of these; ` +
				`set allocationPath=dra`},
		"on several nodes": {class, nil, []runtime.Object{nodeOffering("c", "both", 4, 4), published("nvidia", "c", 4),
			nodeOffering("b", "both", 4, 4), published("nvidia", "b", 4), nodeOffering("a", "", 4, 4)}, admissionreview.Denied,
			"the device plugin of each of 2 nodes, such as b, offers it beside"},
		"unhealthy for now": {class, nil, []runtime.Object{nodeOffering("a", "both", 4, 0), published("nvidia", "a", 4)},
			admissionreview.Denied, "the device plugin of node a offers it beside"},
		"beside devices of another vendor": {class, nil, []runtime.Object{nodeOffering("a", "both", 4, 4), published("enflame", "a", 4)},
			admissionreview.Allowed, "the device plugin of node a offers nvidia.com/gpu: pods"},
		"beside a driver without devices": {class, nil, []runtime.Object{nodeOffering("a", "both", 4, 4), published("nvidia", "a", 0)},
			admissionreview.Allowed, "the device plugin of node a offers nvidia.com/gpu: pods"},
		"a class of another name": {own, nil, []runtime.Object{nodeOffering("a", "both", 4, 4), published("nvidia", "a", 4)},
			admissionreview.Denied, "beside devices for claims of class fast"},
		"another driver's class": {classOfDevices("gpu.nvidia.com", gpuName, "device.driver == 'gpu.nvidia.com'"), nil,
			[]runtime.Object{nodeOffering("a", "both", 4, 4), published("nvidia", "a", 4)}, admissionreview.Allowed, ""},
		"units of memory": {classOfDevices("gcu.enflame.divvy.dev", string(gcu)), nil, nil, admissionreview.Denied,
			`spec.extendedResourceName: Invalid value: "enflame.com/gcu-memory": it counts units of memory, and a claim of class ` +
				`gcu.enflame.divvy.dev for it would count devices; use another name`},
		"it had the name before": {class, classOfDevices(gpuClass, gpuName, "true"), []runtime.Object{nodeOffering("a", "both", 4, 4),
			published("nvidia", "a", 4)}, admissionreview.Allowed, ""},
		"it gets the name": {class, classOfDevices(gpuClass, ""), []runtime.Object{nodeOffering("a", "both", 4, 4),
			published("nvidia", "a", 4)}, admissionreview.Denied, "the device plugin of node a offers it beside"},
		"it had another name": {class, classOfDevices(gpuClass, "a.example/b"), []runtime.Object{nodeOffering("a", "both", 4, 4),
			published("nvidia", "a", 4)}, admissionreview.Denied, "the device plugin of node a offers it beside"},
		"it loses the name": {classOfDevices(gpuClass, ""), class, []runtime.Object{nodeOffering("a", "both", 4, 4),
			published("nvidia", "a", 4)}, admissionreview.Allowed, ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			client := bySelector(tt.cluster...)
			request := create(t, classesResource, tt.class)
			if tt.before != nil {
				request.Operation, request.OldObject = admissionv1.Update, create(t, classesResource, tt.before).Object
			}
			for _, dryRun := range []bool{false, true} {
				request.DryRun = &dryRun
				response, result := New(client, testUnits(t), func() bool { return true }).Validate(t.Context(), request)
				if result != tt.result || response.UID != "u" || response.Allowed != (result == admissionreview.Allowed) {
					t.Errorf("%s, %+v; want %s", result, response, tt.result)
				}
				if got := said(response); !strings.Contains(got, tt.said) || tt.said == "" && got != "" {
					t.Errorf("it says %q, want %q", got, tt.said)
				}
			}
			for _, a := range client.Actions() {
				if a.GetVerb() != "list" {
					t.Errorf("a review does %s of %s", a.GetVerb(), a.GetResource().Resource)
				}
			}
			for _, edit := range []func(*admissionv1.AdmissionRequest){
				func(r *admissionv1.AdmissionRequest) { r.Operation = admissionv1.Delete },
				func(r *admissionv1.AdmissionRequest) { r.SubResource = "status" },
			} {
				other := request.DeepCopy()
				edit(other)
				response, result := New(client, testUnits(t), nil).Validate(t.Context(), other)
				if result != admissionreview.Allowed || said(response) != "" {
					t.Errorf("of what is neither created nor updated: %s, %q", result, said(response))
				}
			}
		})
	}
}

// What nodes offer cannot be read: the class is allowed, and its author is warned.
func TestClassesUnread(t *testing.T) {
	for _, kind := range []string{"nodes", "resourceslices"} {
		client := bySelector(nodeOffering("a", "both", 4, 4), published("nvidia", "a", 4))
		client.PrependReactor("list", kind, func(clienttesting.Action) (bool, runtime.Object, error) {
			return true, nil, errors.New("no route")
		})
		r := New(client, testUnits(t), func() bool { return true })
		response, result := r.Validate(t.Context(), create(t, classesResource, classOfDevices(gpuClass, gpuName)))
		if said := said(response); result != admissionreview.Error || !response.Allowed ||
			!strings.Contains(said, "could not read which nodes offer nvidia.com/gpu: ") || !strings.Contains(said, "no route") {
			t.Errorf("%s cannot be read: %s, %q", kind, result, said)
		}
		// Units are known without reading.
		response, result = r.Validate(t.Context(), create(t, classesResource, classOfDevices(gpuClass, string(gpu))))
		if result != admissionreview.Denied {
			t.Errorf("%s cannot be read, units: %s, %q", kind, result, said(response))
		}
	}
	r := New(bySelector(), testUnits(t), func() bool { return true })
	for name, request := range map[string]*admissionv1.AdmissionRequest{
		"no class":        create(t, classesResource, []int{1}),
		"no class before": create(t, classesResource, classOfDevices(gpuClass, gpuName)),
	} {
		if name == "no class before" {
			request.Operation, request.OldObject.Raw = admissionv1.Update, []byte("[1]")
		}
		if response, result := r.Validate(t.Context(), request); result != admissionreview.Bad || response.Allowed {
			t.Errorf("%s: %s, %+v", name, result, response)
		}
	}
}
