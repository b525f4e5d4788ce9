package dra

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
)

// keeper keeps claims in an engine, and its state in memory.
type keeper struct {
	mu     sync.Mutex
	engine *alloc.Engine
	saved  alloc.ClaimsState
	// full is why nothing can be saved, nil if it can, and broken why no container can reach
	// a device.
	full, broken error
	// edited counts descriptions, and rejected the claims that were.
	edited, rejected int
	uses             []Use
	// onUses and onEdits are called first by Uses and Edits, without the lock. They may be nil.
	onUses  func(context.Context) error
	onEdits func()
}

// set changes the keeper under its lock.
func (k *keeper) set(change func(*keeper)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	change(k)
}

func (k *keeper) change(undo func()) error {
	if k.full != nil {
		undo()
		return k.full
	}
	k.saved = k.engine.Claims.State()
	return nil
}

func (k *keeper) Hold(_ context.Context, claim alloc.Claim) (alloc.Claim, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	_, before := k.engine.Claims.Get(claim.Key())
	held, err := k.engine.Claims.Hold(claim)
	if err != nil {
		k.rejected++
		return held, err
	}
	return held, k.change(func() {
		if !before {
			k.engine.Claims.Release(claim.Key())
		}
	})
}

func (k *keeper) Prepared(_ context.Context, claims []alloc.Claim) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	for i := range claims {
		k.engine.Claims.Prepared(claims[i].Key(), claims[i].Together)
	}
	return k.change(func() {})
}

func (k *keeper) Uses(ctx context.Context, _ ...string) ([]Use, error) {
	k.mu.Lock()
	on := k.onUses
	k.mu.Unlock()
	if on != nil {
		if err := on(ctx); err != nil {
			return nil, err
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.uses, nil
}

func (k *keeper) Sized(string) bool { return false }

func (k *keeper) Release(_ context.Context, key alloc.ClaimKey) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.engine.Claims.Release(key)
	return k.change(func() {})
}

func (k *keeper) Claims(vendor string) []alloc.Claim {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.DeleteFunc(k.engine.Claims.All(), func(c alloc.Claim) bool { return c.Vendor != vendor })
}

func (k *keeper) Devices(vendor string) []alloc.ClaimDevice {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.engine.Claims.Devices(vendor)
}

func (*keeper) Facts(string, []alloc.ClaimDevice) Facts { return Facts{Driver: "1.2.3"} }

func (k *keeper) Edits(_ string, own, all []alloc.Portion) (cdispecs.ContainerEdits, error) {
	k.mu.Lock()
	on := k.onEdits
	k.mu.Unlock()
	if on != nil {
		on()
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.edited++
	var names []string
	var out cdispecs.ContainerEdits
	for _, p := range own {
		out.DeviceNodes = append(out.DeviceNodes, &cdispecs.DeviceNode{Path: "/dev/" + string(p.Chip), HostPath: "/dev/null"})
	}
	for _, p := range all {
		names = append(names, string(p.Chip))
	}
	out.Env = []string{"VISIBLE_DEVICES=" + strings.Join(names, ",")}
	return out, k.broken
}

// plane is a node with a server, its kubelet and its API server.
type plane struct {
	t      testing.TB
	dir    string
	client *fake.Clientset
	keeper *keeper
	server *Server
	stop   func()
	names  atomic.Int64
	// patience and predecessor are options of the servers that are started next.
	patience    time.Duration
	predecessor string
	// drops removes the fields of a slice that the API server does not keep, nil for none, and away is
	// true while it does not answer a probe. A server that was stopped may still list slices.
	drops atomic.Pointer[func(*resourceapi.ResourceSlice)]
	away  atomic.Bool
	// failing has the errors with which the API server answers, by verb and resource ("get nodes").
	failing sync.Map
}

// newPlane returns a plane whose server runs.
func newPlane(t testing.TB, devices ...accel.Device) *plane {
	t.Helper()
	p := newIdlePlane(t, devices...)
	p.start()
	t.Cleanup(func() { p.stop() })
	return p
}

// engineOf returns an engine with what was saved and with devices.
func engineOf(t testing.TB, saved alloc.ClaimsState, devices []accel.Device) *alloc.Engine {
	t.Helper()
	e, err := alloc.New()
	if err != nil {
		t.Fatal(err)
	}
	e.Claims.Restore(saved)
	e.Claims.Serve("enflame", memory, slots)
	e.Claims.Discover("enflame", alloc.Discovery{Devices: devices})
	return e
}

// newIdlePlane returns a plane whose server does not run.
func newIdlePlane(t testing.TB, devices ...accel.Device) *plane {
	t.Helper()
	dir, err := os.MkdirTemp("", "dra") //nolint:usetesting // the path of a socket has to be short
	if err != nil {
		t.Fatal(err)
	}
	p := &plane{t: t, dir: dir, keeper: &keeper{engine: engineOf(t, alloc.ClaimsState{}, devices)}, patience: time.Millisecond,
		client: fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node", UID: "node-uid"}})}
	if err := os.MkdirAll(filepath.Join(dir, "plugins_registry"), 0o750); err != nil {
		t.Fatal(err)
	}
	p.client.PrependReactor("*", "resourceslices", p.store)
	p.client.PrependReactor("*", "*", func(action k8stesting.Action) (bool, runtime.Object, error) {
		err, fails := p.failing.Load(action.GetVerb() + " " + action.GetResource().Resource)
		if !fails {
			return false, nil, nil
		}
		return true, nil, err.(error)
	})
	p.server = NewServer(p.options())
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return p
}

// store does to slices that are written what the API server does.
func (p *plane) store(action k8stesting.Action) (bool, runtime.Object, error) {
	written, ok := action.(interface{ GetObject() runtime.Object })
	if !ok {
		return false, nil, nil
	}
	slice, ok := written.GetObject().(*resourceapi.ResourceSlice)
	if !ok {
		return false, nil, nil
	}
	probe := isProbe(action)
	if probe && p.away.Load() {
		return true, nil, apierrors.NewServiceUnavailable("away")
	}
	if drops := p.drops.Load(); drops != nil {
		(*drops)(slice)
	}
	if slice.Name == "" {
		slice.Name = slice.GenerateName + strconv.FormatInt(p.names.Add(1), 10)
	}
	return probe, slice, nil
}

// isProbe reports whether a request to the API server is a dry run.
func isProbe(action k8stesting.Action) bool {
	create, ok := action.(k8stesting.CreateActionImpl)
	return ok && len(create.CreateOptions.DryRun) > 0
}

func (p *plane) options() Options {
	return Options{Vendor: "enflame", Node: "node", KubeletDir: p.dir, CDIDir: filepath.Join(p.dir, "cdi"), Client: p.client,
		Keeper: p.keeper, Patience: p.patience, Predecessor: p.predecessor}
}

// start starts a server.
func (p *plane) start() {
	p.t.Helper()
	p.server = NewServer(p.options())
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- p.server.Run(ctx) }()
	p.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			p.t.Error(err)
		}
	})
}

// await waits until a condition holds.
func (p *plane) await(what string, is func() bool) {
	p.t.Helper()
	for end := time.Now().Add(30 * time.Second); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			p.t.Fatalf("after 30 s: %s", what)
		}
	}
}

func (p *plane) dial(path string) *grpc.ClientConn {
	p.t.Helper()
	conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// devices are those of the pool that the API server has, once there are so many.
func (p *plane) devices(want int) map[string]resourceapi.Device {
	p.t.Helper()
	var out map[string]resourceapi.Device
	p.await("the devices are not published", func() bool {
		list, err := p.client.ResourceV1().ResourceSlices().List(p.t.Context(), metav1.ListOptions{})
		if err != nil {
			p.t.Fatal(err)
		}
		out = map[string]resourceapi.Device{}
		for _, s := range list.Items {
			for _, d := range s.Spec.Devices {
				out[d.Name] = d
			}
		}
		return len(out) == want
	})
	return out
}

// allocate makes a claim with an allocation.
func (p *plane) allocate(name string, results ...resourceapi.DeviceRequestAllocationResult) *resourceapi.ResourceClaim {
	p.t.Helper()
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID("uid-" + name)}}
	for i := range results {
		results[i].Driver, results[i].Pool = wire.Driver("enflame"), "node/enflame"
	}
	claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: results}}
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "pod", UID: "pod"}}
	if _, err := p.client.ResourceV1().ResourceClaims("ns").Create(p.t.Context(), claim, metav1.CreateOptions{}); err != nil {
		p.t.Fatal(err)
	}
	return claim
}

// delete deletes a claim at the API server.
func (p *plane) delete(claim *resourceapi.ResourceClaim) {
	p.t.Helper()
	if err := p.client.ResourceV1().ResourceClaims(claim.Namespace).Delete(p.t.Context(), claim.Name, metav1.DeleteOptions{}); err != nil {
		p.t.Fatal(err)
	}
}

func allocatedPart(device, memory string) resourceapi.DeviceRequestAllocationResult {
	r := result(amount("memory", memory))
	r.Device = device
	return r
}

func allocatedSlots(device, slots string) resourceapi.DeviceRequestAllocationResult {
	r := result(amount("slots", slots))
	r.Device = device
	return r
}

// allocatedWhole is a device of which no other claim gets a part.
func allocatedWhole(device string) resourceapi.DeviceRequestAllocationResult {
	return result(func(r *allocated) { r.Device = device })
}

func (p *plane) prepare(claim *resourceapi.ResourceClaim, more ...*resourceapi.ResourceClaim) ([]*drapb.Device, string) {
	p.t.Helper()
	answer, err := p.ask(p.t.Context(), append(more, claim)...)
	if err != nil {
		p.t.Fatal(err)
	}
	one := answer.GetClaims()[string(claim.UID)]
	return one.GetDevices(), one.GetError()
}

// ask calls the server to prepare claims.
func (p *plane) ask(ctx context.Context, claims ...*resourceapi.ResourceClaim) (*drapb.NodePrepareResourcesResponse, error) {
	p.t.Helper()
	client := drapb.NewDRAPluginClient(p.dial(filepath.Join(p.dir, "plugins/enflame.divvy.dev/dra.sock")))
	request := &drapb.NodePrepareResourcesRequest{}
	for _, c := range claims {
		request.Claims = append(request.Claims, &drapb.Claim{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)})
	}
	return client.NodePrepareResources(ctx, request, grpc.WaitForReady(true))
}

func (p *plane) unprepare(claim *resourceapi.ResourceClaim) string {
	p.t.Helper()
	client := drapb.NewDRAPluginClient(p.dial(filepath.Join(p.dir, "plugins/enflame.divvy.dev/dra.sock")))
	answer, err := client.NodeUnprepareResources(p.t.Context(), &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{
		{Namespace: claim.Namespace, Name: claim.Name, Uid: string(claim.UID)}}}, grpc.WaitForReady(true))
	if err != nil {
		p.t.Fatal(err)
	}
	return answer.GetClaims()[string(claim.UID)].GetError()
}

// spec is the CDI specification of a claim, nil for none.
func (p *plane) spec(claim *resourceapi.ResourceClaim) *cdi.Spec {
	spec, err := cdi.ReadSpec(filepath.Join(p.dir, "cdi", "divvy-claim-enflame-"+string(claim.UID)+".json"), 0)
	if err != nil {
		return nil
	}
	return spec
}

func gcus() []accel.Device {
	return []accel.Device{{Index: 0, ID: "a", Model: "S60", MemoryBytes: 16 * gib, NUMANode: accel.NoNUMA},
		{Index: 1, ID: "b", Model: "S60", MemoryBytes: 16 * gib, NUMANode: accel.NoNUMA}}
}

// TestPrepare: a container gets the devices of a claim, once, until it is released.
func TestPrepare(t *testing.T) {
	p := newPlane(t, gcus()...)
	p.devices(4)
	claim := p.allocate("c", allocatedPart("gcu-a", "10Gi"), allocatedPart("gcu-b", "1Gi"))
	devices, failed := p.prepare(claim)
	if failed != "" {
		t.Fatal(failed)
	}
	id := "enflame.divvy.dev/claim=uid-c-r"
	if len(devices) != 2 || !slices.Equal(devices[0].GetCdiDeviceIds(), []string{id}) || len(devices[1].GetCdiDeviceIds()) > 0 ||
		devices[1].GetDeviceName() != "gcu-b" || devices[0].GetPoolName() != "node/enflame" || devices[0].GetShareId() != "share" {
		t.Errorf("kubelet is told %v", devices)
	}
	spec := p.spec(claim)
	if spec == nil || len(spec.Devices) != 1 || len(spec.Devices[0].ContainerEdits.DeviceNodes) != 2 ||
		!slices.Equal(spec.Devices[0].ContainerEdits.Env, []string{"VISIBLE_DEVICES=a,b"}) {
		t.Errorf("the specification is %+v", spec)
	}
	again, failed := p.prepare(claim)
	if diff := cmp.Diff(devices, again, cmp.Comparer(func(a, b *drapb.Device) bool { return a.String() == b.String() })); diff != "" ||
		failed != "" {
		t.Errorf("the second time: %s %s", failed, diff)
	}
	if p.keeper.edited != 1 {
		t.Errorf("the claim was described %d times", p.keeper.edited)
	}
	other := p.allocate("d", allocatedPart("gcu-a", "7Gi"))
	if _, failed := p.prepare(other); !strings.Contains(failed, "device gcu-a has 17179869184 bytes of memory, and claims would hold") {
		t.Errorf("more than there is: %q", failed)
	}
	for range 2 {
		if failed := p.unprepare(claim); failed != "" {
			t.Error(failed)
		}
	}
	if p.spec(claim) != nil || len(p.keeper.saved.Claims) > 0 {
		t.Errorf("after its release: %+v, %+v", p.spec(claim), p.keeper.saved)
	}
	if _, failed := p.prepare(other); failed != "" {
		t.Errorf("after the release of the other claim: %s", failed)
	}
}

// TestTimeSlices: claims share the time of a device, and a container gets all devices of which its claim
// has time slices.
func TestTimeSlices(t *testing.T) {
	p := newPlane(t, gcus()...)
	p.devices(4)
	claim := p.allocate("c", allocatedSlots("gcu-a-slots", "1"), allocatedSlots("gcu-b-slots", "2"))
	devices, failed := p.prepare(claim)
	if failed != "" {
		t.Fatal(failed)
	}
	id := "enflame.divvy.dev/claim=uid-c-r"
	if len(devices) != 2 || devices[0].GetDeviceName() != "gcu-a-slots" || devices[1].GetDeviceName() != "gcu-b-slots" ||
		!slices.Equal(devices[0].GetCdiDeviceIds(), []string{id}) || devices[1].GetShareId() != "share" {
		t.Errorf("kubelet is told %v", devices)
	}
	spec := p.spec(claim)
	if spec == nil || len(spec.Devices) != 1 || len(spec.Devices[0].ContainerEdits.DeviceNodes) != 2 ||
		!slices.Equal(spec.Devices[0].ContainerEdits.Env, []string{"VISIBLE_DEVICES=a,b"}) {
		t.Errorf("the specification is %+v", spec)
	}
	if parts := p.keeper.saved.Claims[0].Parts; parts[0].Slots != 1 || parts[1].Slots != 2 || parts[0].Bytes+parts[1].Bytes != 0 {
		t.Errorf("recorded is %+v", parts)
	}
	rest := p.allocate("rest", allocatedSlots("gcu-a-slots", "3"))
	if _, failed := p.prepare(rest); failed != "" {
		t.Errorf("the time slices that are left: %s", failed)
	}
	if got := p.spec(rest); got == nil || !slices.Equal(got.Devices[0].ContainerEdits.Env, []string{"VISIBLE_DEVICES=a"}) {
		t.Errorf("the specification of the other claim is %+v", got)
	}
	another := p.allocate("another", allocatedSlots("gcu-a-slots", "1"))
	if _, failed := p.prepare(another); !strings.Contains(failed, "device gcu-a-slots has 4 time slices, and claims would hold 5") {
		t.Errorf("more than there are: %q", failed)
	}
	if failed := p.unprepare(claim); failed != "" {
		t.Fatal(failed)
	}
	if _, failed := p.prepare(another); failed != "" || p.spec(claim) != nil {
		t.Errorf("after the release: %s, %+v", failed, p.spec(claim))
	}
}

// TestHolderIsNamed: the error of a Prepare says which claim has the device.
func TestHolderIsNamed(t *testing.T) {
	p := newPlane(t, gcus()...)
	p.devices(4)
	for name, tt := range map[string]struct {
		held, wanted resourceapi.DeviceRequestAllocationResult
		want         string
	}{
		"whole, beside whole": {allocatedWhole("gcu-a"), allocatedWhole("gcu-a"),
			"claim ns/wanted: device gcu-a is held by claim ns/held as gcu-a"},
		"memory, beside whole": {allocatedWhole("gcu-a"), allocatedPart("gcu-a", "1Gi"),
			"claim ns/wanted: device gcu-a is held by claim ns/held as gcu-a"},
		"whole, beside memory": {allocatedPart("gcu-a", "1Gi"), allocatedWhole("gcu-a"),
			"claim ns/wanted: device gcu-a is held by claim ns/held as gcu-a with 1073741824 bytes"},
		"memory, beside time slices": {allocatedSlots("gcu-a-slots", "2"), allocatedPart("gcu-a", "1Gi"),
			"claim ns/wanted: device gcu-a is held by claim ns/held as gcu-a-slots with 2 time slices"},
	} {
		held, wanted := p.allocate("held", tt.held), p.allocate("wanted", tt.wanted)
		if _, failed := p.prepare(held); failed != "" {
			t.Errorf("%s: %s", name, failed)
		}
		if _, failed := p.prepare(wanted); failed != tt.want {
			t.Errorf("%s: %q, want %q", name, failed, tt.want)
		}
		if failed := p.unprepare(held); failed != "" {
			t.Errorf("%s: %s", name, failed)
		}
		p.delete(held)
		p.delete(wanted)
	}
}

// TestContainersWithSeveral: a container that has several requests and claims finds all of its devices
// in the variable, and a pod for which that is not possible is rejected as a whole.
func TestContainersWithSeveral(t *testing.T) {
	p := newPlane(t, append(gcus(), accel.Device{Index: 2, ID: "c", Model: "S60", MemoryBytes: 16 * gib, NUMANode: accel.NoNUMA})...)
	p.devices(6)
	uses := func(all ...Use) { p.keeper.set(func(k *keeper) { k.uses = all }) }
	variables := func(claims ...*resourceapi.ResourceClaim) string {
		var out []string
		for _, claim := range claims {
			if spec := p.spec(claim); spec != nil {
				for _, d := range spec.Devices {
					out = append(out, d.Name+" "+strings.Join(d.ContainerEdits.Env, " "))
				}
			}
		}
		return strings.Join(out, "; ")
	}
	one, two := p.allocate("one", allocatedPart("gcu-a", "1Gi")), p.allocate("two", allocatedPart("gcu-b", "1Gi"))
	uses(useOf("p", "c", "one", "two"))
	if _, failed := p.prepare(one, two); failed != "" {
		t.Fatal(failed)
	}
	both := "uid-one-r VISIBLE_DEVICES=a,b; uid-two-r VISIBLE_DEVICES=a,b"
	if got := variables(one, two); got != both {
		t.Errorf("got %s, want %s", got, both)
	}
	// Another pod uses one of them beside a third one.
	three := p.allocate("three", allocatedPart("gcu-c", "1Gi"))
	uses(useOf("p", "c", "one", "two"), useOf("q", "c", "one", "three"))
	if _, failed := p.prepare(three); !strings.Contains(failed, "container c of pod ns/q uses all requests of claim one and") {
		t.Errorf("it is not rejected: %q", failed)
	}
	if held := p.keeper.Claims("enflame"); len(held) != 2 || p.spec(three) != nil {
		t.Errorf("something of the claim that was rejected is left: %+v", held)
	}
	if got := variables(one, two); got != both {
		t.Errorf("after the rejection: %s", got)
	}
	// The next server knows it.
	p.stop()
	if err := os.RemoveAll(filepath.Join(p.dir, "cdi")); err != nil {
		t.Fatal(err)
	}
	p.start()
	p.server.Redescribe()
	p.await("the specifications are not restored", func() bool { return variables(one, two) == both })
	// Once the first pod has ended, the other one can have both.
	uses(useOf("q", "c", "one", "three"))
	if failed := p.unprepare(two); failed != "" {
		t.Fatal(failed)
	}
	if got, want := variables(one), "uid-one-r VISIBLE_DEVICES=a"; got != want {
		t.Errorf("after the release of the other claim: %s, want %s", got, want)
	}
	p.keeper.mu.Lock()
	p.keeper.broken = errors.New("no device node")
	p.keeper.mu.Unlock()
	if _, failed := p.prepare(three); !strings.Contains(failed, "request r: no device node") {
		t.Errorf("got %q", failed)
	}
	p.keeper.mu.Lock()
	p.keeper.broken = nil
	p.keeper.mu.Unlock()
	if _, failed := p.prepare(three); failed != "" {
		t.Fatal(failed)
	}
	if got, want := variables(one, three), "uid-one-r VISIBLE_DEVICES=a,c; uid-three-r VISIBLE_DEVICES=a,c"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	// A pod that kubelet does not ask for is reported.
	var told []string
	p.server.writer.misused = func(u Use, err error) { told = append(told, u.name()+": "+err.Error()) }
	uses(useOf("q", "c", "one", "three"), useOf("late", "c", "one"))
	if err := p.server.writer.settle(t.Context()); err != nil || len(told) != 1 || !strings.Contains(told[0], "pod ns/late: container c") {
		t.Errorf("reported are %q: %v", told, err)
	}
}

// TestPodsReadBeforeAPrepare: a list of pods that was read before a Prepare lacks the pod of the claim, which
// must not count as used by no container.
func TestPodsReadBeforeAPrepare(t *testing.T) {
	p := newPlane(t, gcus()...)
	p.devices(4)
	set := func(uses ...Use) { p.keeper.set(func(k *keeper) { k.uses = uses }) }
	one, two := p.allocate("one", allocatedPart("gcu-a", "1Gi")), p.allocate("two", allocatedPart("gcu-b", "1Gi"))
	use := useOf("p", "c", "one", "two")
	use.PodUID = one.Status.ReservedFor[0].Name
	set(use)
	if _, failed := p.prepare(one, two); failed != "" {
		t.Fatal(failed)
	}
	set()
	check := func(when, want string) {
		t.Helper()
		if err := p.server.writer.settle(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := p.variable(one); got != want {
			t.Errorf("%s: %s, want %s", when, got, want)
		}
	}
	check("when others have read the pods before", "VISIBLE_DEVICES=a,b")
	if failed := p.unprepare(two); failed != "" {
		t.Fatal(failed)
	}
	check("when the other claim is released", "VISIBLE_DEVICES=a")
}

// TestPrepareWaits: a claim gets a device whose holder leaves meanwhile.
func TestPrepareWaits(t *testing.T) {
	p := newPlane(t, gcus()...)
	p.devices(4)
	p.server.o.Patience = time.Minute
	first := p.allocate("c", allocatedPart("gcu-a", "10Gi"))
	if _, failed := p.prepare(first); failed != "" {
		t.Fatal(failed)
	}
	second := p.allocate("d", allocatedPart("gcu-a", "10Gi"))
	ended := make(chan error, 1)
	go func() {
		_, err := p.server.prepare(context.Background(), second)
		ended <- err
	}()
	p.await("the second claim does not wait", func() bool {
		p.keeper.mu.Lock()
		defer p.keeper.mu.Unlock()
		return p.keeper.rejected > 0
	})
	if failed := p.unprepare(first); failed != "" {
		t.Fatal(failed)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestPrepareFails: nothing is left of a claim that cannot be prepared.
func TestPrepareFails(t *testing.T) {
	tests := map[string]struct {
		breaks func(*plane)
		want   string
	}{
		"state that cannot be saved": {
			func(p *plane) { p.keeper.full = errors.New("no space left on device") }, "no space left on device"},
		"a device without its nodes": {
			func(p *plane) { p.keeper.broken = errors.New("no device node") }, "claim ns/c: request r: no device node"},
		"a folder that is a file": {func(p *plane) { _ = os.WriteFile(filepath.Join(p.dir, "cdi"), nil, 0o600) }, "claim ns/c: mkdir"},
		"claims that are not known": {func(p *plane) { p.keeper.engine.Claims.Restore(alloc.ClaimsState{Partial: true}) },
			"it is not known yet which devices other claims hold"},
		"an unhealthy device":         {func(p *plane) { p.breakDevices() }, "device gcu-a is unhealthy: ECC"},
		"nothing, to see that it can": {func(*plane) {}, ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			p := newPlane(t, gcus()...)
			p.devices(4)
			p.keeper.mu.Lock()
			tt.breaks(p)
			p.keeper.mu.Unlock()
			claim := p.allocate("c", allocatedPart("gcu-a", "10Gi"))
			_, failed := p.prepare(claim)
			if !strings.Contains(failed, tt.want) || (failed == "") != (tt.want == "") {
				t.Errorf("got %q, want %q", failed, tt.want)
			}
			held := p.keeper.Claims("enflame")
			if (len(held) == 0 && p.spec(claim) == nil) != (tt.want != "") {
				t.Errorf("it holds %+v, with the specification %+v", held, p.spec(claim))
			}
		})
	}
}

// breakDevices makes the first device unhealthy.
func (p *plane) breakDevices() {
	devices := gcus()
	devices[0].Health = accel.Health{Unhealthy: true, Reason: "ECC", Cause: "ecc"}
	p.keeper.engine.Claims.Discover("enflame", alloc.Discovery{Devices: devices})
}

// TestDelayedPrepare: a Prepare that arrives after the claim was released does not revive it.
func TestDelayedPrepare(t *testing.T) {
	p := newPlane(t, gcus()...)
	p.devices(4)
	claim := p.allocate("c", allocatedPart("gcu-a", "10Gi"))
	if _, failed := p.prepare(claim); failed != "" {
		t.Fatal(failed)
	}
	if failed := p.unprepare(claim); failed != "" {
		t.Fatal(failed)
	}
	// The helper has read the claim before its release, the server reads it again.
	free := claim.DeepCopy()
	free.Status.ReservedFor = nil
	if _, err := p.client.ResourceV1().ResourceClaims("ns").Update(t.Context(), free, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := p.server.prepare(t.Context(), claim); err == nil || !strings.Contains(err.Error(), "was released, and no pod uses it") {
		t.Errorf("got %v", err)
	}
	// Another pod may use it again.
	if _, err := p.client.ResourceV1().ResourceClaims("ns").Update(t.Context(), claim, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, failed := p.prepare(claim); failed != "" {
		t.Error(failed)
	}
}

// TestServerRestart: the next server gives the same answers and restores lost files.
func TestServerRestart(t *testing.T) {
	p := newPlane(t, gcus()...)
	p.devices(4)
	claim := p.allocate("c", allocatedPart("gcu-a", "10Gi"))
	before, failed := p.prepare(claim)
	if failed != "" {
		t.Fatal(failed)
	}
	p.stop()
	if err := os.RemoveAll(filepath.Join(p.dir, "cdi")); err != nil {
		t.Fatal(err)
	}
	stray := filepath.Join(p.dir, "cdi", "divvy-claim-enflame-gone.json")
	if err := errors.Join(os.MkdirAll(filepath.Dir(stray), 0o750), os.WriteFile(stray, []byte("{}"), 0o600)); err != nil {
		t.Fatal(err)
	}
	p.start()
	p.server.Redescribe()
	p.await("the specification is not restored", func() bool { return p.spec(claim) != nil })
	p.await("the file of a claim that is gone is not removed", func() bool {
		_, err := os.Stat(stray)
		return errors.Is(err, os.ErrNotExist)
	})
	after, failed := p.prepare(claim)
	if failed != "" || len(after) != 1 || after[0].String() != before[0].String() {
		t.Errorf("after the restart: %v, %s", after, failed)
	}
}

// TestPublishedAgain: when kubelet has registered the driver again, slices that it has
// deleted are back at once.
func TestPublishedAgain(t *testing.T) {
	p := newPlane(t, gcus()...)
	p.devices(4)
	published := p.client.ResourceV1().ResourceSlices()
	list, err := published.List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, one := range list.Items {
		if err := published.Delete(t.Context(), one.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	p.devices(0)
	register := registerapi.NewRegistrationClient(p.dial(filepath.Join(p.dir, "plugins_registry/enflame.divvy.dev-reg.sock")))
	info, err := register.GetInfo(t.Context(), &registerapi.InfoRequest{}, grpc.WaitForReady(true))
	if err != nil || info.GetType() != registerapi.DRAPlugin || info.GetName() != "enflame.divvy.dev" {
		t.Fatalf("%v, %v", info, err)
	}
	if _, err := register.NotifyRegistrationStatus(t.Context(), &registerapi.RegistrationStatus{PluginRegistered: true}); err != nil {
		t.Fatal(err)
	}
	p.devices(4)
}

// withoutCounters drops counters from a slice.
func withoutCounters(s *resourceapi.ResourceSlice) {
	s.Spec.SharedCounters = nil
	for i := range s.Spec.Devices {
		s.Spec.Devices[i].ConsumesCounters = nil
	}
}

// TestGates: what the API server drops is noticed before it matters, and when another one
// drops more.
func TestGates(t *testing.T) {
	p := newPlane(t, gcus()...)
	if d := p.devices(4)["gcu-a"]; len(d.ConsumesCounters) != 1 {
		t.Errorf("overlapping devices without counters: %+v", d)
	}
	p.server.HandleError(t.Context(), &resourceslice.DroppedFieldsError{PoolName: "node/enflame",
		DesiredSlice: p.server.gates.sample(), ActualSlice: func() *resourceapi.ResourceSlice {
			s := p.server.gates.sample()
			withoutCounters(s)
			return s
		}()}, "publish")
	p.devices(2)
	p.reports(wire.ClaimDriver{GatesOff: []string{gateCounters}, LeftOut: []string{"gcu-a-slots", "gcu-b-slots"}})
	p.stop()

	drop := withoutCounters
	p.drops.Store(&drop)
	p.start()
	if d := p.devices(2)["gcu-a"]; d.Name == "" || len(d.ConsumesCounters) != 0 {
		t.Errorf("got %+v", d)
	}
	p.reports(wire.ClaimDriver{GatesOff: []string{gateCounters}, LeftOut: []string{"gcu-a-slots", "gcu-b-slots"}})
	p.stop()

	p.drops.Store(nil)
	p.away.Store(true)
	p.start()
	if d := p.devices(2)["gcu-a"]; d.Name == "" || len(d.ConsumesCounters) != 0 {
		t.Errorf("while that is not known: %+v", d)
	}
	p.reports(wire.ClaimDriver{Problem: "the API server did not answer which fields of ResourceSlices it keeps, and one form of each " +
		"device is published", LeftOut: []string{"gcu-a-slots", "gcu-b-slots"}})
}

// reports waits until the server reports what is published like this.
func (p *plane) reports(want wire.ClaimDriver) {
	p.t.Helper()
	want.Driver = "enflame.divvy.dev"
	p.await("the report", func() bool {
		got := p.server.Report()
		if got.Problem != "" && strings.Contains(got.Problem, "not registered") {
			got.Problem = want.Problem // no kubelet is there
		}
		return cmp.Diff(want, got) == ""
	})
}
