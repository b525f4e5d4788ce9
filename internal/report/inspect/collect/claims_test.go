package collect

import (
	"bytes"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/report/inspect"
)

// slice is a slice of a node's devices, each "name type amount", with a taint after that.
func slice(node, vendor, index string, devices ...string) *resourceapi.ResourceSlice {
	s := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: node + vendor + index}}
	s.Spec.Driver, s.Spec.NodeName, s.Spec.Pool.Name = vendor+".divvy.dev", &node, node+"/"+vendor
	for _, text := range devices {
		f := strings.Fields(text)
		model := "S60"
		d := resourceapi.Device{Name: f[0], Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			"type": {StringValue: &f[1]}, "model": {StringValue: &model},
		}}
		capacity := resourceapi.QualifiedName("memory")
		if f[1] == "slots" {
			capacity = "slots"
		}
		d.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{capacity: {Value: resource.MustParse(f[2])}}
		if len(f) > 3 {
			key, value, _ := strings.Cut(f[3], "=")
			d.Taints = []resourceapi.DeviceTaint{{Key: key, Value: value, Effect: resourceapi.DeviceTaintEffectNoSchedule}}
		}
		s.Spec.Devices = append(s.Spec.Devices, d)
	}
	return s
}

// claim is an allocated claim of pods, of "vendor device", with "capacity=amount" after that for a part.
func claim(name, node string, pods []string, results ...string) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID("uid-" + name)}}
	for _, pod := range pods {
		c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: pod})
	}
	c.Status.Allocation = &resourceapi.AllocationResult{}
	for _, text := range results {
		f := strings.Fields(text)
		r := resourceapi.DeviceRequestAllocationResult{Driver: f[0] + ".divvy.dev", Pool: node + "/" + f[0], Device: f[1]}
		if len(f) > 2 {
			switch capacity, amount, part := strings.Cut(f[2], "="); {
			case part:
				r.ShareID = new(types.UID("share"))
				r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{
					resourceapi.QualifiedName(capacity): resource.MustParse(amount)}
			case capacity == "admin":
				r.AdminAccess = new(true)
			}
		}
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, r)
	}
	return c
}

func TestClaims(t *testing.T) {
	other := slice("b", "nvidia", "0", "gpu-9 gpu 80Gi")
	other.Spec.Driver = "gpu.nvidia.com"
	objects := []runtime.Object{
		&v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}},
		slice("a", "nvidia", "1", "gpu-2 gpu 80Gi divvy.dev/unhealthy=xid-79", "gpu-3 gpu 80Gi divvy.dev/in-use-by-plugin"),
		slice("a", "nvidia", "0", "gpu-0 gpu 80Gi", "gpu-1 gpu 80Gi"),
		slice("a", "enflame", "0", "gcu-0 gcu 16Gi", "gcu-1-slots slots 4"), slice("c", "enflame", "0"), other,
		claim("two", "a", []string{"p", "q"}, "enflame gcu-0 memory=2Gi"), claim("more", "a", []string{"r"}, "enflame gcu-0 memory=5632Mi"),
		claim("slice", "a", nil, "enflame gcu-1-slots slots=1"),
		claim("gpus", "a", []string{"s"}, "nvidia gpu-0", "nvidia gpu-1"), claim("look", "a", []string{"exporter"}, "nvidia gpu-0 admin"),
		claim("lost", "a", []string{"t"}, "nvidia gpu-7"), claim("elsewhere", "z", []string{"u"}, "nvidia gpu-0"),
		&resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "pending"}},
	}
	var told bytes.Buffer
	q := &question{clients: kube.Clients{Kubernetes: fake.NewClientset(objects...)}, errOut: &told}
	report := inspect.Report{Claims: q.claims(t.Context())}
	if told.Len() > 0 {
		t.Error(told.String())
	}
	var got bytes.Buffer
	if err := inspect.Print(&got, report, inspect.Table); err != nil {
		t.Fatal(err)
	}
	const want = `NODE a: 7 devices for claims
  DEVICE       MODEL  HEALTH              TOTAL     USED  CLAIM       HOLDS  POD
  gcu-0        S60    healthy            16 GiB  7.5 GiB  ns/more   5.5 GiB  r
                                                          ns/two      2 GiB  p, q
  gcu-1-slots  S60    healthy           4 slots  1 slots  ns/slice  1 slots
  gpu-0        S60    healthy            80 GiB   80 GiB  ns/gpus    80 GiB  s
                                                          ns/look     admin  exporter
  gpu-1        S60    healthy            80 GiB   80 GiB  ns/gpus    80 GiB  s
  gpu-2        S60    unhealthy=xid-79   80 GiB    0 GiB  -
  gpu-3        S60    in-use-by-plugin   80 GiB    0 GiB  -
  gpu-7               not published       0 GiB    0 GiB  ns/lost     0 GiB  t
`
	if diff := cmp.Diff(want, got.String()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	q = &question{clients: kube.Clients{Kubernetes: fake.NewClientset()}, errOut: &told}
	if got := q.claims(t.Context()); got != nil {
		t.Errorf("without devices: %v", got)
	}
}

// TestClaimsOfUnits: claims that pods have in place of units are shown with the units.
func TestClaimsOfUnits(t *testing.T) {
	pod := func(name, annotation string) *v1.Pod {
		return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID("uid-" + name),
			Labels:      map[string]string{wire.UnitsLabel: wire.UnitsAsClaims},
			Annotations: map[string]string{wire.UnitsAnnotation: annotation}}}
	}
	made := func(name, pod string) *resourceapi.ResourceClaim {
		c := claim(name, "a", []string{pod}, "enflame gcu-0 memory=2Gi")
		c.Annotations = map[string]string{kube.PodClaimAnnotation: "units"}
		c.OwnerReferences = []metav1.OwnerReference{
			{APIVersion: "v1", Kind: "Pod", Name: pod, UID: types.UID("uid-" + pod), Controller: new(true)},
		}
		return c
	}
	const resource = `"resource":"enflame.com/gcu-memory","unit":"1","claim":"units","template":"divvy-memory-1","devices":{}`
	var told bytes.Buffer
	q := &question{errOut: &told, clients: kube.Clients{Kubernetes: fake.NewClientset(
		slice("a", "enflame", "0", "gcu-0 gcu 16Gi", "gcu-1 gcu 16Gi"),
		pod("p", `[{`+resource+`,"containers":[{"name":"init","units":1,"request":"r"},{"name":"main","units":2,"request":"r"}]}]`),
		pod("broken", "{"), made("of-p", "p"), made("of-broken", "broken"),
		claim("other", "a", []string{"p"}, "enflame gcu-0 memory=1Gi"))}}
	report := inspect.Report{Claims: q.claims(t.Context())}
	var got bytes.Buffer
	if err := inspect.Print(&got, report, inspect.Table); err != nil {
		t.Fatal(err)
	}
	const want = `NODE a: 2 devices for claims
  DEVICE  MODEL  HEALTH    TOTAL   USED  CLAIM         HOLDS  POD     IN PLACE OF UNITS
  gcu-0   S60    healthy  16 GiB  5 GiB  ns/of-broken  2 GiB  broken
                                         ns/of-p       2 GiB  p       enflame.com/gcu-memory: init 1, main 2
                                         ns/other      1 GiB  p
  gcu-1   S60    healthy  16 GiB  0 GiB  -
`
	if diff := cmp.Diff(want, got.String()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if !strings.HasPrefix(told.String(), "Pod ns/broken: annotation divvy.dev/units-as-claims: ") {
		t.Errorf("it says %q", told.String())
	}
	got.Reset()
	err := inspect.PrintDetails(&got, report, inspect.JSON)
	if err != nil || !strings.Contains(strings.Join(strings.Fields(got.String()), ""),
		`"units":{"resource":"enflame.com/gcu-memory","unit":"1","containers":[{"name":"init","units":1,"request":"r"},`) {
		t.Errorf("%v\n%s", err, got.String())
	}
}
