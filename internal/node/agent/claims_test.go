package agent

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	k8stesting "k8s.io/client-go/testing"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/limits"
	"github.com/divvy-gpu/divvy/internal/platform/events"
)

// claimingUID is that of the pods with claims.
const claimingUID = "7d9c0b1e-53c8-4b43-9f0e-2a3b9c1d0e0f"

// lateUID is that of a pod that the watch has not delivered.
const lateUID = "1b7e7c52-8a0d-4c1e-9d55-5f0d1c2b3a49"

// claiming is a stage whose node offers its devices to claims.
type claiming struct{ *stage }

func newClaiming(t *testing.T) claiming {
	t.Helper()
	s := newStage(t)
	s.config.AllocationPath = config.PathDRA
	if err := os.MkdirAll(filepath.Join(s.dir, "plugins_registry"), 0o750); err != nil {
		t.Fatal(err)
	}
	serveNoPods(t, filepath.Join(s.dir, "pod-resources", "kubelet.sock"))
	s.vendors["nvidia"].set(nil, gpuDevice(0, "a"), gpuDevice(1, "b"))
	s.vendors["iluvatar"].set(nil, gpuDevice(0, "x"))
	var names atomic.Int64
	s.client.PrependReactor("create", "resourceslices", func(action k8stesting.Action) (bool, runtime.Object, error) {
		create, ok := action.(k8stesting.CreateActionImpl)
		if !ok {
			return false, nil, nil
		}
		if slice, ok := create.Object.(*resourceapi.ResourceSlice); ok && slice.Name == "" {
			slice.Name = slice.GenerateName + strconv.FormatInt(names.Add(1), 10)
		}
		return len(create.CreateOptions.DryRun) > 0, create.Object, nil
	})
	return claiming{s}
}

// noPods is kubelet's pod-resources API without a pod. What is decided waits for its answers.
type noPods struct {
	podresourcesapi.UnimplementedPodResourcesListerServer
}

func (noPods) List(context.Context, *podresourcesapi.ListPodResourcesRequest) (*podresourcesapi.ListPodResourcesResponse, error) {
	return &podresourcesapi.ListPodResourcesResponse{}, nil
}

func serveNoPods(t *testing.T, path string) {
	t.Helper()
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	podresourcesapi.RegisterPodResourcesListerServer(server, noPods{})
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
}

// published lists the devices in slices.
func (s claiming) published() string {
	list, err := s.client.ResourceV1().ResourceSlices().List(s.t.Context(), metav1.ListOptions{})
	if err != nil {
		return err.Error()
	}
	var names []string
	for _, slice := range list.Items {
		for _, d := range slice.Spec.Devices {
			name := d.Name
			for _, taint := range d.Taints {
				name += " " + taint.Key
			}
			names = append(names, name)
		}
	}
	return strings.Join(names, ", ")
}

// allocate makes a pod with a claim of a device.
func (s claiming) allocate(name, device string) {
	s.t.Helper()
	s.allocateResults(name, claimingUID, resultOf("nvidia", device))
}

// resultOf is what kube-scheduler allocates of a device.
func resultOf(vendor, device string) resourceapi.DeviceRequestAllocationResult {
	return resourceapi.DeviceRequestAllocationResult{Request: "r", Driver: vendor + ".divvy.dev", Pool: thisNode + "/" + vendor,
		Device: device}
}

// allocateResults makes a pod with that UID whose container uses a claim.
func (s claiming) allocateResults(name string, uid types.UID, results ...resourceapi.DeviceRequestAllocationResult) {
	s.t.Helper()
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID("uid-" + name)}}
	claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: results}}
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: name, UID: uid}}
	if _, err := s.client.ResourceV1().ResourceClaims("ns").Create(s.t.Context(), claim, metav1.CreateOptions{}); err != nil {
		s.t.Fatal(err)
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: uid}}
	pod.Spec.NodeName, pod.Spec.ResourceClaims = thisNode, []corev1.PodResourceClaim{{Name: "c", ResourceClaimName: &name}}
	pod.Spec.Containers = []corev1.Container{{Name: "main",
		Resources: corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "c"}}}}}
	if _, err := s.client.CoreV1().Pods("ns").Create(s.t.Context(), pod, metav1.CreateOptions{}); err != nil {
		s.t.Fatal(err)
	}
}

// dial connects to a socket of a driver as kubelet does. It waits for the socket: a connection that
// failed is tried again after a second.
func (s claiming) dial(path string) *grpc.ClientConn {
	s.t.Helper()
	path = filepath.Join(s.dir, path)
	eventually(s.t, "the driver listens", func() bool {
		conn, err := net.Dial("unix", path)
		return err == nil && conn.Close() == nil
	})
	conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func (s claiming) driver() drapb.DRAPluginClient {
	s.t.Helper()
	return drapb.NewDRAPluginClient(s.dial("plugins/nvidia.divvy.dev/dra.sock"))
}

// register registers the drivers.
func (s claiming) register() {
	s.t.Helper()
	for _, vendor := range []string{"nvidia", "iluvatar"} {
		client := registerapi.NewRegistrationClient(s.dial("plugins_registry/" + vendor + ".divvy.dev-reg.sock"))
		if _, err := client.NotifyRegistrationStatus(s.t.Context(), &registerapi.RegistrationStatus{PluginRegistered: true}); err != nil {
			s.t.Fatal(err)
		}
	}
}

// prepare and unprepare return the errors that kubelet gets.
func (s claiming) prepare(name string) string {
	s.t.Helper()
	answer, err := s.driver().NodePrepareResources(s.t.Context(), &drapb.NodePrepareResourcesRequest{
		Claims: []*drapb.Claim{{Namespace: "ns", Name: name, Uid: "uid-" + name}}}, grpc.WaitForReady(true))
	if err != nil {
		s.t.Fatal(err)
	}
	return answer.GetClaims()["uid-"+name].GetError()
}

func (s claiming) unprepare(name string) string {
	s.t.Helper()
	answer, err := s.driver().NodeUnprepareResources(s.t.Context(), &drapb.NodeUnprepareResourcesRequest{
		Claims: []*drapb.Claim{{Namespace: "ns", Name: name, Uid: "uid-" + name}}}, grpc.WaitForReady(true))
	if err != nil {
		s.t.Fatal(err)
	}
	return answer.GetClaims()["uid-"+name].GetError()
}

// rejected returns why a claim cannot hold a device.
func (s claiming) rejected(a *Agent, device string) string {
	s.t.Helper()
	claim := alloc.Claim{Vendor: "nvidia", UID: "uid-two", Namespace: "ns", Name: "two",
		Parts: []alloc.ClaimPart{{Request: "r", Device: device}}}
	_, err := a.claims.Hold(s.t.Context(), claim)
	if err == nil {
		return ""
	}
	return err.Error()
}

// TestClaims: a node on the path of claims offers what its resources choose to claims and
// nothing to kubelet, and remembers what claims hold.
func TestClaims(t *testing.T) {
	s := newClaiming(t)
	a, stop := s.play()
	eventually(t, "devices are published", func() bool { return strings.Count(s.published(), ",") == 2 })
	if len(a.offerings) > 0 {
		t.Errorf("kubelet is offered %d resources", len(a.offerings))
	}
	s.allocate("one", "gpu-a")
	if failed := s.prepare("one"); failed != "" {
		t.Fatal(failed)
	}
	spec, err := cdi.ReadSpec(filepath.Join(s.config.CDIDir, "divvy-claim-nvidia-uid-one.json"), 0)
	if err != nil || len(spec.Devices) != 1 || len(spec.Devices[0].ContainerEdits.DeviceNodes) == 0 {
		t.Errorf("the specification is %+v: %v", spec, err)
	}
	if err := a.claims.ready(); err == nil || !strings.Contains(err.Error(), "driver nvidia.divvy.dev is not registered with kubelet yet") {
		t.Errorf("ready before kubelet knows the drivers: %v", err)
	}
	s.register()
	eventually(t, "it is ready", func() bool { return a.claims.ready() == nil })
	// One that cannot be prepared is known at once.
	s.allocate("none", "gpu-none")
	if failed := s.prepare("none"); !strings.Contains(failed, "claims cannot get device gpu-none: the node does not offer it") {
		t.Errorf("a device that is not offered: %q", failed)
	}
	eventually(t, "the pod has an event", func() bool {
		list, err := s.client.CoreV1().Events("ns").List(t.Context(), metav1.ListOptions{})
		return err == nil && slices.ContainsFunc(list.Items, func(e corev1.Event) bool {
			return e.Reason == events.ClaimNotPrepared.Reason && e.InvolvedObject.Name == "none" && strings.Contains(e.Message, "gpu-none")
		})
	})
	for result, want := range map[string]float64{preparedWell: 1, string(alloc.NotOffered): 1} {
		if got := testutil.ToFloat64(a.claims.reports.prepared.WithLabelValues("nvidia", result)); got != want {
			t.Errorf("%v are counted as %s, want %v", got, result, want)
		}
	}
	if err := s.client.CoreV1().Pods("ns").Delete(t.Context(), "none", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	stop()

	a, _ = s.play()
	eventually(t, "the devices are found", func() bool { return len(a.claims.Claims("nvidia")) == 1 && claimable(a) })
	if why := s.rejected(a, "gpu-a"); !strings.Contains(why, "device gpu-a is held by claim ns/one as gpu-a") {
		t.Errorf("after a restart the device is given out again: %q", why)
	}
}

// claimable reports whether the devices are discovered.
func claimable(a *Agent) bool {
	devices := a.claims.Devices("nvidia")
	return len(devices) == 2 && !devices[0].Card.Health.Unhealthy
}

// TestClaimsStayWithTheirPath: what a claim holds is not given to kubelet after the node has
// moved back.
func TestClaimsStayWithTheirPath(t *testing.T) {
	s := newClaiming(t)
	_, stop := s.play()
	eventually(t, "devices are published", func() bool { return strings.Count(s.published(), ",") == 2 })
	s.allocate("one", "gpu-a")
	if failed := s.prepare("one"); failed != "" {
		t.Fatal(failed)
	}
	stop()
	s.config.AllocationPath = config.PathPlugin
	a, _ := s.play()
	eventually(t, "the device that a claim holds is withdrawn", func() bool {
		for _, r := range a.offerings {
			if r.name != "nvidia.com/gpu" {
				continue
			}
			for _, share := range see(r.parts[0], (*alloc.Engine).Inventory).Shares {
				if share.ID == "a" {
					return share.Health.Reason == "given out as a resource claim"
				}
			}
		}
		return false
	})
	eventually(t, "kube-scheduler can allocate no device", func() bool { return s.published() == "gpu-a divvy.dev/unhealthy" })
	if failed := s.unprepare("one"); failed != "" {
		t.Errorf("the claim is not released: %s", failed)
	}
	eventually(t, "no device is published", func() bool { return s.published() == "" })
	eventually(t, "the device is offered again", func() bool {
		for _, r := range a.offerings {
			for _, share := range see(r.parts[0], (*alloc.Engine).Inventory).Shares {
				if share.Health.Unhealthy {
					return false
				}
			}
		}
		return true
	})
}

// TestPathSwitchedDuringPrepare: a claim that waits for its device while the node moves to the other
// path gets nothing there, and its device when the node has moved back.
func TestPathSwitchedDuringPrepare(t *testing.T) {
	s := newClaiming(t)
	asked := make(chan struct{})
	var once sync.Once
	s.client.PrependReactor("get", "resourceclaims", func(action k8stesting.Action) (bool, runtime.Object, error) {
		if get, ok := action.(k8stesting.GetAction); ok && get.GetName() == "two" {
			once.Do(func() { close(asked) })
		}
		return false, nil, nil
	})
	_, stop := s.play()
	eventually(t, "devices are published", func() bool { return strings.Count(s.published(), ",") == 2 })
	s.allocate("one", "gpu-a")
	if failed := s.prepare("one"); failed != "" {
		t.Fatal(failed)
	}
	s.allocate("two", "gpu-a")
	driver := s.driver()
	answered := make(chan string)
	go func() {
		answer, err := driver.NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{
			Claims: []*drapb.Claim{{Namespace: "ns", Name: "two", Uid: "uid-two"}}})
		answered <- answer.GetClaims()["uid-two"].GetError() + fmt.Sprint(err)
	}()
	<-asked
	stop()
	if got := <-answered; got == "<nil>" {
		t.Error("two claims were prepared with one device")
	}

	s.config.AllocationPath = config.PathPlugin
	a, stop := s.play()
	holders := func() string {
		var names []string
		for _, c := range a.claims.Claims("nvidia") {
			names = append(names, fmt.Sprint(c.Name, " ", c.Prepared))
		}
		return strings.Join(names, ", ")
	}
	if got := holders(); got != "one true" {
		t.Errorf("after the move claims hold devices: %s", got)
	}
	if failed := s.unprepare("one"); failed != "" {
		t.Errorf("the claim is not released: %s", failed)
	}
	if failed := s.prepare("two"); !strings.Contains(failed, "claims cannot get device gpu-a") || holders() != "" {
		t.Errorf("on the other path: %q, held by %s", failed, holders())
	}
	eventually(t, "kubelet gets the device", func() bool {
		shares := see(a.offerings[0].parts[0], (*alloc.Engine).Inventory).Shares
		return len(shares) == 2 && !shares[0].Health.Unhealthy
	})
	stop()

	s.config.AllocationPath = config.PathDRA
	a, _ = s.play()
	eventually(t, "devices are published again", func() bool { return strings.Count(s.published(), ",") == 2 && claimable(a) })
	eventually(t, "the claim is prepared", func() bool { return s.prepare("two") == "" })
	if got := holders(); got != "two true" {
		t.Errorf("after the move back claims hold devices: %s", got)
	}
}

// TestBothPaths: a node that divides its devices offers each by one path.
func TestBothPaths(t *testing.T) {
	s := newClaiming(t)
	s.config.AllocationPath = config.PathBoth
	s.config.Resources = []config.Resource{
		{Name: "nvidia.com/gpu", Vendor: "nvidia", Mode: config.ModeExclusive, Devices: &config.DeviceSelector{Indexes: []int{1}}},
		// Whatever it chooses, it does not get what claims do.
		{Name: "nvidia.com/gpu-memory", Vendor: "nvidia", Mode: config.ModeMemory, MemoryUnit: "1"},
		{Name: "v.example/claims", Vendor: "nvidia", Mode: config.ModeMemory, MemoryUnit: "1", AllocationPath: config.PathDRA,
			Devices: &config.DeviceSelector{Indexes: []int{0}}},
	}
	a, _ := s.play()
	eventually(t, "the device of the claims is published", func() bool { return s.published() == "gpu-a" })
	offered := func() string {
		var out []string
		for _, r := range a.offerings {
			for _, share := range see(r.parts[0], (*alloc.Engine).Inventory).Shares {
				out = append(out, fmt.Sprint(r.name, " ", share.ID))
			}
		}
		return strings.Join(out, ", ")
	}
	eventually(t, "the others are offered", func() bool { return offered() == "nvidia.com/gpu b, nvidia.com/gpu-memory b" })
	eventually(t, "the node says so", func() bool { return s.labels()["divvy.dev/allocation-path"] == "both" })
	eventually(t, "the node reports the driver", func() bool {
		node, err := s.client.CoreV1().Nodes().Get(t.Context(), thisNode, metav1.GetOptions{})
		if err != nil {
			return false
		}
		drivers, err := wire.DecodeClaimDrivers(node.Annotations[wire.ClaimDriversAnnotation])
		return err == nil && len(drivers) == 1 && drivers[0].Driver == "nvidia.divvy.dev"
	})
	// A container that requests units of the other devices beside its claim would find one of them alone.
	s.allocate("one", "gpu-a")
	pods := s.client.CoreV1().Pods("ns")
	pod, err := pods.Get(t.Context(), "one", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	pod.Spec.Containers = []corev1.Container{{Name: "c", Resources: corev1.ResourceRequirements{
		Limits: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}, Claims: []corev1.ResourceClaim{{Name: "c"}}}}}
	if _, err := pods.Update(t.Context(), pod, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a pod with both is rejected", func() bool {
		return strings.Contains(s.prepare("one"), "container c of pod ns/one requests nvidia.com/gpu and uses all requests of claim one")
	})
	if held := a.claims.Claims("nvidia"); len(held) > 0 {
		t.Errorf("it holds %+v", held)
	}
	// One whose extended resource kube-scheduler has turned into the claim has no units.
	if pod, err = pods.Get(t.Context(), "one", metav1.GetOptions{}); err != nil {
		t.Fatal(err)
	}
	pod.Spec.Containers[0].Resources.Claims, pod.Spec.ResourceClaims = nil, nil
	pod.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{ResourceClaimName: "one",
		RequestMappings: []corev1.ContainerExtendedResourceRequest{{ContainerName: "c", ResourceName: "nvidia.com/gpu", RequestName: "r"}}}
	if _, err := pods.Update(t.Context(), pod, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a pod with a claim for its extended resource is prepared", func() bool { return s.prepare("one") == "" })
}

// TestLimitedClaims: claims that share the memory of a device whose resource has isolation driver get
// limits by the hook, and the device states the tier once a pass has proven it.
func TestLimitedClaims(t *testing.T) {
	s := newClaiming(t)
	s.config.Resources[1].Isolation = config.IsolationDriver
	s.config.Resources[1].Devices = &config.DeviceSelector{IDs: []string{"a"}}
	a, _ := s.play()
	eventually(t, "the devices are found", func() bool { return claimable(a) })
	portion := func(chip accel.DeviceID, bytes int64) []alloc.Portion {
		return []alloc.Portion{{Chip: chip, Bytes: bytes}}
	}
	hooks := func(own, all []alloc.Portion) string {
		t.Helper()
		edits, err := a.claims.Edits("nvidia", own, all)
		if err != nil {
			return err.Error()
		}
		var out []string
		for _, h := range edits.Hooks {
			out = append(out, strings.Join(h.Args[2:4], " "))
		}
		return strings.Join(out, ", ")
	}
	if got := hooks(portion("a", 3<<30), portion("a", 3<<30)); got != "" {
		t.Errorf("limits by a hook that is not installed: %s", got)
	}
	a.cdi.limits.offer("nvidia", "/hook", "dmem")
	a.claims.limits.desk.contexts = map[string]int{"nvidia": 300}
	tests := map[string]struct {
		own, all []alloc.Portion
		want     string
	}{
		"a part":               {portion("a", 3<<30), portion("a", 3<<30), "--device=a --hard-mib=3072"},
		"two parts":            {portion("a", 3<<30), portion("a", 4<<30), "--device=a --hard-mib=4096"},
		"beside another one":   {portion("a", 3<<30), append(portion("a", 3<<30), portion("b", 0)...), "--device=a --hard-mib=3072"},
		"whole":                {portion("a", 0), portion("a", 0), "--device=a --max"},
		"no limit for device":  {portion("b", 3<<30), portion("b", 3<<30), ""},
		"smaller than context": {portion("a", 300<<20), portion("a", 300<<20), "the limit of 300 MiB of device a would leave no memory"},
	}
	for name, tt := range tests {
		if got := hooks(tt.own, tt.all); !strings.HasPrefix(got, tt.want) || (got == "") != (tt.want == "") {
			t.Errorf("%s: got %q, want %q", name, got, tt.want)
		}
	}
	tier := func() string {
		devices := a.claims.Devices("nvidia")
		return devices[0].Isolation.Memory.String() + " " + devices[1].Isolation.Memory.String()
	}
	if got := tier(); got != "none hardware" {
		t.Errorf("before a pass: %s", got)
	}
	a.cdi.limits.set(map[accel.DeviceID]limits.Status{"a": {Attested: time.Unix(1000, 0)}, "b": {Attested: time.Unix(1000, 0)}}, time.Now())
	if got := tier(); got != "driver hardware" {
		t.Errorf("after a pass: %s", got)
	}
	if !a.claims.Sized("nvidia") || a.claims.Sized("iluvatar") || !a.claims.limits.chip("nvidia", "a") ||
		a.claims.limits.chip("nvidia", "b") {
		t.Error("not the devices of the resource with limits")
	}
}

// TestContainersOfClaims: what measuring and limits know of claims.
func TestContainersOfClaims(t *testing.T) {
	s := newClaiming(t)
	a, _ := s.play()
	eventually(t, "the devices are found", func() bool { return claimable(a) })
	claim := func(name string, parts ...alloc.ClaimPart) {
		t.Helper()
		c, err := a.claims.Hold(t.Context(), alloc.Claim{Vendor: "nvidia", UID: "uid-" + name, Namespace: "ns", Name: name, Parts: parts})
		if err == nil {
			err = a.claims.Prepared(t.Context(), []alloc.Claim{c})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	claim("one", alloc.ClaimPart{Request: "r", Device: "gpu-a", Bytes: 3 << 30},
		alloc.ClaimPart{Request: "s", Device: "gpu-a", Bytes: 1 << 30})
	claim("two", alloc.ClaimPart{Request: "r", Device: "gpu-b", Admin: true})
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: claimingUID}}
	one, two := "one", "two"
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "x", ResourceClaimName: &one}, {Name: "y", ResourceClaimName: &two}}
	container := func(name string, claims ...corev1.ResourceClaim) corev1.Container {
		return corev1.Container{Name: name, Resources: corev1.ResourceRequirements{Claims: claims}}
	}
	pod.Spec.InitContainers = []corev1.Container{container("init", corev1.ResourceClaim{Name: "x"})}
	pod.Spec.Containers = []corev1.Container{container("all", corev1.ResourceClaim{Name: "x"}, corev1.ResourceClaim{Name: "y"}),
		container("part", corev1.ResourceClaim{Name: "x", Request: "s"}), container("none")}
	held := func() string {
		var out []string
		for _, c := range heldBy(a.records, nil, []*corev1.Pod{pod}) {
			out = append(out, fmt.Sprintf("%s %s %s %d", c.Name, c.Resource, c.Device, c.Bytes>>30))
		}
		return strings.Join(out, ", ")
	}
	want := "all nvidia.divvy.dev a 4, part nvidia.divvy.dev a 1"
	if got := held(); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	pod.Status.InitContainerStatuses = []corev1.ContainerStatus{{Name: "init", State: corev1.ContainerState{
		Running: &corev1.ContainerStateRunning{}}}}
	if got, want := held(), "init nvidia.divvy.dev a 4, "+want; got != want {
		t.Errorf("while an init container runs: got %s, want %s", got, want)
	}
	pod.Status.Phase = corev1.PodSucceeded
	if got := held(); got != "" {
		t.Errorf("of a pod that has ended: %s", got)
	}
}

func TestOwnCDISpec(t *testing.T) {
	spec := func(kind string) []byte {
		return []byte("cdiVersion: 0.5.0\nkind: " + kind + "\ndevices: [{name: a, containerEdits: {env: [A=b]}}]\n")
	}
	tests := map[string]struct {
		name, kind string
		want       bool
	}{
		"of a resource":           {"divvy-nvidia.com-gpu.yaml", "nvidia.com/gpu", true},
		"of a claim":              {"divvy-claim-nvidia-uid.json", "nvidia.divvy.dev/claim", true},
		"of a claim, half a file": {"divvy-claim-nvidia-uid.json.new", "nvidia.divvy.dev/claim", true},
		"of another vendor":       {"divvy-claim-nvidia-uid.json", "enflame.divvy.dev/claim", false},
		"of another kind":         {"divvy-claim-nvidia-uid.json", "nvidia.com/gpu", false},
		"of another name":         {"nvidia.yaml", "nvidia.divvy.dev/claim", false},
	}
	for name, tt := range tests {
		if got := OwnCDISpec(tt.name, spec(tt.kind)); got != tt.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

// TestAbandonedClaims: a claim that kubelet does not release is released once no pod uses it,
// at the second look. A look at which a call fails counts for nothing.
func TestAbandonedClaims(t *testing.T) {
	const never = -1
	tests := map[string]struct {
		pod, claim bool   // whether they are deleted
		runs       bool   // whether a container of the pod runs
		fails      string // what the API server does not answer about at the second look
		want       int    // the look at which it is released
	}{
		"all is there":                   {false, false, false, "", never},
		"the claim is gone":              {false, true, false, "", never},
		"the pod is gone":                {true, false, false, "", 1},
		"both are gone":                  {true, true, false, "", 1},
		"both are gone and it runs":      {true, true, true, "", never},
		"the pod is gone and it runs":    {true, false, true, "", never},
		"the claim is gone, a pod runs":  {false, true, true, "", never},
		"the pod is gone, pods fail":     {true, false, false, "pods", 3},
		"the pod is gone, claims fail":   {true, false, false, "resourceclaims", 3},
		"both are gone, claims fail":     {true, true, false, "resourceclaims", 3},
		"all is there, and claims fail":  {false, false, false, "resourceclaims", never},
		"all is there, and pods fail":    {false, false, false, "pods", never},
		"the claim is gone, claims fail": {false, true, false, "resourceclaims", never},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			s := newClaiming(t)
			var failing atomic.Bool
			s.client.PrependReactor("*", tt.fails, func(action k8stesting.Action) (bool, runtime.Object, error) {
				reads := action.GetVerb() == "get" || action.GetVerb() == "list"
				return failing.Load() && reads, nil, apierrors.NewServiceUnavailable("restarting")
			})
			a, stop := s.play()
			eventually(t, "the devices are found", func() bool { return claimable(a) })
			s.allocate("one", "gpu-a")
			if failed := s.prepare("one"); failed != "" {
				t.Fatal(failed)
			}
			a.claims.cgroups = t.TempDir()
			populated := "0"
			if tt.runs {
				populated = "1"
			}
			put(t, a.claims.cgroups, map[string]string{"cgroup.controllers": "",
				"kubepods/pod" + claimingUID + "/cgroup.events": "populated " + populated + "\n"})
			ctx := t.Context()
			if tt.pod {
				if err := s.client.CoreV1().Pods("ns").Delete(ctx, "one", metav1.DeleteOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			if tt.claim {
				if err := s.client.ResourceV1().ResourceClaims("ns").Delete(ctx, "one", metav1.DeleteOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			for look := range 4 {
				fails := look == 1 && tt.fails != ""
				failing.Store(fails)
				if err := a.claims.collect(ctx); (err != nil) != fails {
					t.Fatalf("look %d: %v", look, err)
				}
				if released := len(a.claims.Claims("nvidia")) == 0; released != (tt.want != never && look >= tt.want) {
					t.Errorf("at look %d it is released: %t", look, released)
				}
			}
			stop()
		})
	}
}

// TestPodsThatTheWatchLacks: the API server is asked for the pods of a claim that the watch has not
// delivered, and for none otherwise.
func TestPodsThatTheWatchLacks(t *testing.T) {
	s := newClaiming(t)
	s.client.PrependWatchReactor("pods", func(k8stesting.Action) (bool, watch.Interface, error) {
		return true, watch.NewFake(), nil // it delivers nothing
	})
	var lists atomic.Int64
	var failing atomic.Bool
	s.client.PrependReactor("list", "pods", func(k8stesting.Action) (bool, runtime.Object, error) {
		lists.Add(1)
		return failing.Load(), nil, apierrors.NewServiceUnavailable("restarting")
	})
	s.allocateResults("seen", claimingUID)
	a, _ := s.play()
	eventually(t, "the devices are found", func() bool { return claimable(a) && a.pods.Synced() })
	s.allocateResults("late", lateUID, resultOf("nvidia", "gpu-a"))
	uses := func(pods ...string) string {
		all, err := a.claims.Uses(t.Context(), pods...)
		if err != nil {
			return err.Error()
		}
		var out []string
		for _, use := range all {
			out = append(out, use.Pod+" "+use.Requests[0].Claim)
		}
		slices.Sort(out)
		return strings.Join(out, ", ")
	}
	tests := []struct {
		name   string
		fails  bool
		pods   []string
		want   string
		listed int64
	}{
		{"one that was delivered", false, []string{claimingUID}, "seen seen", 0},
		{"no pod in particular", false, nil, "seen seen", 0},
		{"one that was not delivered", false, []string{lateUID}, "late late, seen seen", 1},
		{"both", false, []string{claimingUID, lateUID}, "late late, seen seen", 1},
		{"one of another node", false, []string{"elsewhere"}, "none of the pods that it is reserved for is bound to this node", 1},
		{"beside one of another node", false, []string{lateUID, "elsewhere"}, "late late, seen seen", 1},
		{"one that was delivered, without the API server", true, []string{claimingUID}, "seen seen", 0},
		{"one that was not, without the API server", true, []string{lateUID}, "list the node's pods: restarting", 1},
	}
	for _, tt := range tests {
		before := lists.Load()
		failing.Store(tt.fails)
		if got := uses(tt.pods...); got != tt.want || lists.Load()-before != tt.listed {
			t.Errorf("%s: %q after %d requests, want %q after %d", tt.name, got, lists.Load()-before, tt.want, tt.listed)
		}
	}
	failing.Store(false)
	if failed := s.prepare("late"); failed != "" {
		t.Errorf("the claim of a pod that was not delivered: %s", failed)
	}
	s.allocateResults("gone", "elsewhere", resultOf("nvidia", "gpu-b"))
	if err := s.client.CoreV1().Pods("ns").Delete(t.Context(), "gone", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if failed := s.prepare("gone"); !strings.Contains(failed, "none of the pods that it is reserved for is bound to this node") {
		t.Errorf("the claim of a pod that is gone: %q", failed)
	}
	if held := a.claims.Claims("nvidia"); len(held) != 1 || held[0].Name != "late" {
		t.Errorf("claims hold %+v", held)
	}
	if len(a.pods.Cached()) != 1 {
		t.Error("the watch has delivered the pod")
	}
}
