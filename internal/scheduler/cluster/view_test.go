package cluster

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	metadatafake "k8s.io/client-go/metadata/fake"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// mixed adds whole GPUs and time slices to what a node publishes, beside its
// memory.
func (f *fixture) mixed(n *metav1.PartialObjectMetadata) *metav1.PartialObjectMetadata {
	f.t.Helper()
	all, err := wire.DecodeInventory(n.Annotations[wire.InventoryAnnotation])
	f.ok(err)
	gpu := func(i int, units accel.Units) accel.Share {
		return accel.Share{Units: units, Device: accel.Device{Index: i, ID: accel.DeviceID(n.Name + "-0"), NUMANode: accel.NoNUMA}}
	}
	all = append(all, accel.Inventory{Resource: "nvidia.com/gpu", Shares: []accel.Share{gpu(0, 1)}},
		accel.Inventory{Resource: "nvidia.com/gpu.shared", Shares: []accel.Share{gpu(1, 4)}})
	n.Annotations[wire.InventoryAnnotation], err = wire.EncodeInventory(all)
	f.ok(err)
	return n
}

// asks makes the pod ask for so many of a resource as well.
func asks(pod *v1.Pod, name string, amount int64) *v1.Pod {
	list := v1.ResourceList{v1.ResourceName(name): *resource.NewQuantity(amount, resource.DecimalSI)}
	pod.Spec.Containers = append(pod.Spec.Containers, v1.Container{Name: name, Resources: v1.ResourceRequirements{Requests: list,
		Limits: list}})
	return pod
}

// Whole devices and time slices are kubelet's business: what a node publishes of
// them, and what pods ask of them, changes nothing in the books of the memory
// that the extender manages, and no problem of the node comes of it.
func TestWholeDevicesAndSlicesAreNotTheBooksBusiness(t *testing.T) {
	f := newFixture(t)
	f.ok(f.books.Nodes().Add(f.mixed(f.node("a", 16, 16))))
	f.ok(f.books.Nodes().Add(f.mixed(f.node("whole-only", 16))))
	f.ok(f.books.Pods().Add(asks(f.grant(boundPod("p", "u1", "4", "a"), testKey, 1), "nvidia.com/gpu", 1)))
	f.ok(f.books.Pods().Add(asks(boundPod("q", "u2", "", "a"), "nvidia.com/gpu.shared", 3)))
	f.want("a: 0 4; whole-only: 0")
	if got := slices.Collect(f.ledger.Nodes("nvidia.com/gpu")); len(got) != 0 {
		t.Errorf("the ledger has %+v", got)
	}
	if problem := f.books.Problem("a"); problem != "" {
		t.Errorf("node a has the problem %q", problem)
	}
	if got := f.books.Size(); got.Granted != 1 || got.Ungranted+got.Waiting != 0 {
		t.Errorf("the books hold %+v", got)
	}
}

func TestLoadView(t *testing.T) {
	f := newFixture(t)
	scheme := metadatafake.NewTestScheme()
	f.ok(metav1.AddMetaToScheme(scheme))
	broken := f.node("broken")
	broken.Annotations = map[string]string{wire.InventoryAnnotation: "{"}
	meta := metadatafake.NewSimpleMetadataClient(scheme, f.mixed(f.node("a", 16, 16)), f.node("none"), broken)

	both := asks(f.grant(boundPod("both", "u1", "4", "a"), testKey, 1), "nvidia.com/gpu", 2)
	both.Annotations[wire.HeldAnnotation] = `{"nvidia.com/gpu":["GPU-2","GPU-1"]}`
	ended := asks(boundPod("ended", "u3", "", "a"), "nvidia.com/gpu", 1)
	ended.Status.Phase = v1.PodSucceeded
	forged := asks(boundPod("forged", "u4", "", "a"), "nvidia.com/gpu", 1)
	forged.Annotations = map[string]string{wire.HeldAnnotation: "garbage"}
	client := fake.NewClientset([]runtime.Object{
		both, ended, forged,
		asks(boundPod("elsewhere", "u5", "", "none"), "nvidia.com/gpu", 1),
		asks(waitingPod("waiting", "u6", ""), "nvidia.com/gpu", 1),
		boundPod("unrelated", "u7", "", "a"),
	}...)
	view, err := LoadView(t.Context(), kube.Clients{Kubernetes: client, Metadata: meta}, f.ledger, f.keys)
	f.ok(err)
	f.want("a: 0 4")
	if len(view.Inventories) != 1 || len(view.Inventories["a"]) != 3 || len(view.Broken) != 1 || view.Broken["broken"] == nil {
		t.Errorf("nodes %+v, broken %v", view.Inventories, view.Broken)
	}
	request := func(pod string, units accel.Units) []accel.Request {
		return []accel.Request{{Pod: pod, Resource: "nvidia.com/gpu", Containers: []accel.ContainerRequest{
			{Name: "nvidia.com/gpu", Kind: accel.AppContainer, Units: units}}}}
	}
	want := []Holder{
		{Pod: accel.PodRef{UID: "u1", Namespace: "team", Name: "both"}, Node: "a", Requests: request("u1", 2),
			Held: map[accel.Resource][]string{"nvidia.com/gpu": {"GPU-1", "GPU-2"}}},
		{Pod: accel.PodRef{UID: "u4", Namespace: "team", Name: "forged"}, Node: "a", Requests: request("u4", 1)},
	}
	for i := range view.Holders {
		view.Holders[i].Created = time.Time{}
	}
	if diff := cmp.Diff(want, view.Holders); diff != "" {
		t.Errorf("holders (-want +got):\n%s", diff)
	}
}
