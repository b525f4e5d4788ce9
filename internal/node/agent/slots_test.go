package agent

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/deviceplugin"
	"github.com/divvy-gpu/divvy/internal/node/podresources"
	"github.com/divvy-gpu/divvy/internal/node/state"
	"github.com/divvy-gpu/divvy/internal/platform/events"
)

const gpu = accel.Resource("nvidia.com/gpu")

// gpuBackend edits any number of devices; it counts the discoveries.
type gpuBackend struct {
	discoveries int
	byMounts    bool
}

func (*gpuBackend) Vendor() string { return "nvidia" }
func (*gpuBackend) Close() error   { return nil }
func (b *gpuBackend) Discover(context.Context) (backend.Found, error) {
	b.discoveries++
	return backend.Found{}, errors.New("not to be asked")
}

func (b *gpuBackend) Edits(ids ...accel.DeviceID) (backend.Edits, error) {
	var names []string
	e := backend.Edits{ReplicaEnv: []string{"REPLICAS"}}
	for _, id := range ids {
		names = append(names, string(id))
		e.DeviceNodes = append(e.DeviceNodes, backend.DeviceNode{Path: "/dev/" + string(id), HostPath: "/host/dev/" + string(id),
			Permissions: "rw"})
		e.CDIDevices = append(e.CDIDevices, backend.CDIDevice{Kind: "nvidia.com/gpu", Name: string(id)})
	}
	e.Env = map[string]string{"DEVICES": strings.Join(names, ",")}
	if b.byMounts {
		e.ByMounts = &backend.ByMounts{Env: map[string]string{"DEVICES": "/var/run/devices"},
			Mounts: []backend.Mount{{Path: "/var/run/devices/" + names[0], HostPath: "/dev/null"}}}
	}
	return e, nil
}

// slotWorld is a pool of slots between a kubelet and an API server that the test
// plays.
type slotWorld struct {
	*pool
	t       *testing.T
	backend *gpuBackend
	units   []deviceplugin.Unit
	listing []podresources.Pod
	down    error
	pods    []*corev1.Pod
	// api is what the API server has where the watch is late.
	api    []*corev1.Pod
	late   bool
	events []string
}

func newSlotWorld(t *testing.T, dir string, r config.Resource) *slotWorld {
	t.Helper()
	w := &slotWorld{t: t, backend: &gpuBackend{}}
	m := newMetrics(prometheus.NewRegistry())
	id := alloc.ID{Resource: gpu, Kind: alloc.Slots}
	w.pool = &pool{
		ID: id, config: alloc.Config{ID: id, Vendor: "nvidia", Cut: cutOf(&r), Chooses: selectorOf(r.Devices).matches},
		inject: injector{ways: []config.Injection{config.InjectDeviceNodes}}, backend: w.backend, store: state.NewStore(dir, id), sink: w,
		records: &records{kubelet: w, pods: w, metrics: m, owner: &owner{}, resources: []accel.Resource{gpu},
			planned: func(*corev1.Pod) *accel.Grant { return nil }},
		metrics: m, changed: func() {}, withdrawn: func() {},
		event: func(kind events.Kind, message string) { w.events = append(w.events, kind.Reason+": "+message) },
	}
	w.load(t.Context())
	var err error
	if w.records.owner.engine, err = alloc.New(w.config); err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *slotWorld) ready() error { return w.status().Problem }
func (w *slotWorld) absent() bool { return w.status().Absent }
func (w *slotWorld) idle() bool   { return w.status().Idle }

// held counts the slots of a device that containers hold.
func (w *slotWorld) held(d accel.DeviceID) int {
	e, done := w.records.owner.use()
	defer done()
	return e.Usage(w.ID).Devices[d]
}

func (w *slotWorld) SetUnits(units []deviceplugin.Unit) error {
	w.units = units
	return nil
}
func (w *slotWorld) Cached() []*corev1.Pod                            { return w.pods }
func (w *slotWorld) Synced() bool                                     { return true }
func (w *slotWorld) List(context.Context) ([]podresources.Pod, error) { return w.listing, w.down }
func (w *slotWorld) Fresh(context.Context) ([]*corev1.Pod, error) {
	if w.late {
		return w.api, nil
	}
	return w.pods, nil
}

// turn is what the agent's loop does.
func (w *slotWorld) turn() {
	w.t.Helper()
	if err := w.records.refresh(w.t.Context()); err != nil {
		w.t.Fatal(err)
	}
	w.sync(w.t.Context())
}

// found makes the devices known and lets the loop turn.
func (w *slotWorld) found(devices ...accel.Device) {
	w.t.Helper()
	w.update(w.t.Context(), backend.Found{Devices: devices}, nil)
	w.turn()
}

// holds makes kubelet list a pod that holds the ids.
func (w *slotWorld) gives(name string, ids ...string) {
	w.listing = append(w.listing, podresources.Pod{Namespace: "ns", Name: name, Containers: []podresources.Container{
		{Name: "c", Units: map[accel.Resource][]string{gpu: ids}},
	}})
}

// list is the healthy ids and, after a bar, the unhealthy ones.
func (w *slotWorld) list() string {
	var well, ill []string
	for _, u := range w.units {
		if u.Unhealthy {
			ill = append(ill, u.ID)
		} else {
			well = append(well, u.ID)
		}
	}
	return strings.Join(well, " ") + "|" + strings.Join(ill, " ")
}

func gpuDevice(index int, id string) accel.Device {
	return accel.Device{Index: index, ID: accel.DeviceID(id), Model: "G", MemoryBytes: 40 << 30, NUMANode: index % 2}
}

func sick(d accel.Device) accel.Device {
	d.Health = accel.Health{Unhealthy: true, Reason: "XID 79", Cause: "xid-79"}
	return d
}

var (
	exclusive = config.Resource{Name: string(gpu), Vendor: "nvidia", Mode: config.ModeExclusive, SplitBoards: true}
	fourTimes = config.Resource{Name: string(gpu), Vendor: "nvidia", Mode: config.ModeTimeSlicing, Replicas: 4, SplitBoards: true}
)

func TestAllReplicasOfADeviceChangeTogether(t *testing.T) {
	w := newSlotWorld(t, t.TempDir(), fourTimes)
	w.found(gpuDevice(0, "a"), gpuDevice(1, "b"))
	if got, want := w.list(), "a::0 a::1 a::2 a::3 b::0 b::1 b::2 b::3|"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	w.found(gpuDevice(0, "a"), sick(gpuDevice(1, "b")))
	if got, want := w.list(), "a::0 a::1 a::2 a::3|b::0 b::1 b::2 b::3"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	in := see(w.pool, (*alloc.Engine).Inventory)
	if in.Unit != "" || len(in.Shares) != 2 || in.Shares[1].Units != 4 || in.Shares[1].Health.Reason != "XID 79" {
		t.Errorf("the inventory is %+v", in)
	}
	w.found(gpuDevice(0, "a"), gpuDevice(1, "b"))
	if got, want := w.list(), "a::0 a::1 a::2 a::3 b::0 b::1 b::2 b::3|"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// A pod that was deleted by force has its device until its containers have exited, also after a restart of
// the daemon. Other pods get another device, or wait; if that takes too long, the error says why.
func TestDeviceOfAPodThatWasDeletedByForce(t *testing.T) {
	dir, root := t.TempDir(), t.TempDir()
	processes := func(n string) {
		put(t, root, map[string]string{"cgroup.controllers": "", "kubepods/pod" + goneUID + "/cgroup.events": "populated " + n + "\n"})
	}
	boot := func() *slotWorld {
		w := newSlotWorld(t, dir, exclusive)
		w.records.endings = newEndings(root)
		return w
	}
	processes("1")
	w := boot()
	pod := newPod("p")
	pod.UID, pod.Status.Phase = goneUID, corev1.PodRunning
	w.pods = []*corev1.Pod{pod}
	w.gives("p", "a")
	w.found(gpuDevice(0, "a"), gpuDevice(1, "b"))

	w = boot()
	w.found(gpuDevice(0, "a"), gpuDevice(1, "b"))
	if got := w.held("a"); got != 1 {
		t.Fatalf("%d containers have the device while its pod's run, want 1", got)
	}
	if ids, err := w.Prefer(t.Context(), []string{"a", "b"}, nil, 1); err != nil || !slices.Equal(ids, []string{"b"}) {
		t.Errorf("%v is preferred (%v), want the device that is free", ids, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*exitInterval)
	defer cancel()
	if _, err := w.Allocate(ctx, []string{"a"}); err == nil ||
		!strings.Contains(err.Error(), "held by containers of deleted pod ns/p, which have not exited") {
		t.Errorf("the device is given out, or not for the right reason: %v", err)
	}

	var exited atomic.Bool
	time.AfterFunc(4*exitInterval, func() {
		exited.Store(true)
		processes("0")
	})
	if _, err := w.Prefer(t.Context(), []string{"a"}, nil, 1); err != nil || !exited.Load() {
		t.Errorf("the device is preferred before its containers have exited, or not after (%v)", err)
	}
	if _, err := w.Allocate(t.Context(), []string{"a"}); err != nil {
		t.Error(err)
	}
}

func TestOneLostDeviceLeavesTheOthers(t *testing.T) {
	w := newSlotWorld(t, t.TempDir(), exclusive)
	w.found(gpuDevice(0, "a"), gpuDevice(1, "b"), gpuDevice(2, "c"))
	w.gives("p", "b")
	w.turn()
	w.update(t.Context(), backend.Found{Devices: []accel.Device{gpuDevice(0, "a"), gpuDevice(1, "c")},
		Faults: []backend.Fault{{Index: 2, ID: "b", Err: errors.New("GPU is lost")}}}, nil)
	if got, want := w.list(), "a c b|"; got != want {
		t.Errorf("while a container holds it: %s, want %s", got, want)
	}
	s := see(w.pool, (*alloc.Engine).Inventory).Shares
	if len(s) != 3 || s[2].ID != "b" || s[2].Health.Reason != "GPU is lost" || s[2].Index != 2 {
		t.Errorf("the inventory is %+v", s)
	}
	got, err := w.Prefer(t.Context(), []string{"a", "c"}, nil, 2)
	if err != nil || !slices.Equal(got, []string{"a", "c"}) {
		t.Errorf("%v, %v", got, err)
	}
	w.listing = nil
	w.turn()
	if got, want := w.list(), "a c|b"; got != want {
		t.Errorf("once it is given back: %s, want %s", got, want)
	}
}

func TestSwappedDeviceIsAnnounced(t *testing.T) {
	w := newSlotWorld(t, t.TempDir(), exclusive)
	w.found(gpuDevice(0, "a"), gpuDevice(1, "b"))
	w.found(gpuDevice(0, "a"), gpuDevice(1, "new"))
	if got, want := w.list(), "a new|"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// The answer depends on what is free, not on the order in which it is told.
func TestPreferenceIsDeterministicAndAsksNoLibrary(t *testing.T) {
	w := newSlotWorld(t, t.TempDir(), exclusive)
	var devices []accel.Device
	var all []string
	for i := range 8 {
		id := fmt.Sprint("g", i)
		devices, all = append(devices, gpuDevice(i, id)), append(all, id)
	}
	links := []accel.Link{{A: "g2", B: "g5", Score: 160}, {A: "g5", B: "g7", Score: 160}, {A: "g2", B: "g7", Score: 110}}
	w.update(t.Context(), backend.Found{Devices: devices, Links: links}, nil)
	w.turn()
	for range 20 {
		rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		for _, tt := range []struct {
			must []string
			size int
			want []string
		}{
			{nil, 1, []string{"g0"}},
			{nil, 2, []string{"g2", "g5"}},
			{[]string{"g7"}, 2, []string{"g5", "g7"}},
			{nil, 3, []string{"g2", "g5", "g7"}},
			{nil, 8, []string{"g0", "g1", "g2", "g3", "g4", "g5", "g6", "g7"}},
		} {
			got, err := w.Prefer(t.Context(), all, tt.must, tt.size)
			if err != nil || !slices.Equal(got, tt.want) {
				t.Fatalf("%d with %v: %v, %v; want %v", tt.size, tt.must, got, err, tt.want)
			}
		}
	}
	if w.backend.discoveries != 0 {
		t.Errorf("the vendor's library was asked %d times", w.backend.discoveries)
	}
}

func TestPreferRefuses(t *testing.T) {
	w := newSlotWorld(t, t.TempDir(), exclusive)
	w.found(gpuDevice(0, "a"), gpuDevice(1, "b"), sick(gpuDevice(2, "c")))
	w.gives("p", "b")
	for name, tt := range map[string]struct {
		available, must []string
		size            int
		want            string
	}{
		"fewer than asked for": {[]string{"a", "b", "c"}, nil, 2,
			"2 devices asked for, 1 of 3 may be given out: 1 XID 79, 1 held by containers"},
		"none at all":                 {nil, nil, 1, "0 of 3 may be given out"},
		"a required id of nobody's":   {[]string{"a"}, []string{"x"}, 2, `"x", which is to be reused, is none of its devices`},
		"more required than is asked": {[]string{"a", "b"}, []string{"a", "b"}, 1, "1 devices asked for and 2 to be reused"},
	} {
		if got, err := w.Prefer(t.Context(), tt.available, tt.must, tt.size); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, %v; want an error with %q", name, got, err, tt.want)
		}
	}
	w.down = errors.New("no kubelet")
	if got, err := w.Prefer(t.Context(), []string{"a"}, nil, 1); err == nil {
		t.Errorf("%v without kubelet's list", got)
	}
}

func TestAllocateIsSortedAndNamesWhatItRefuses(t *testing.T) {
	w := newSlotWorld(t, t.TempDir(), fourTimes)
	w.found(gpuDevice(0, "b"), gpuDevice(1, "a"))
	got, err := w.Allocate(t.Context(), []string{"a::1", "b::0", "a::0"})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]string{"DEVICES": "b,a", "REPLICAS": "b::0,a::0,a::1"}, got.GetEnvs()); diff != "" {
		t.Errorf("environment (-want +got):\n%s", diff)
	}
	if len(got.GetDevices()) != 2 || got.GetDevices()[0].GetContainerPath() != "/dev/b" {
		t.Errorf("device nodes %v, want those of each device once, in their order", got.GetDevices())
	}
	_, err = w.Allocate(t.Context(), []string{"a::2", "x::0"})
	if err == nil || !strings.Contains(err.Error(), `invalid allocation request for "nvidia.com/gpu": unknown device: x::0`) {
		t.Errorf("an unknown id: %v", err)
	}
	if _, err := w.Allocate(t.Context(), nil); err == nil {
		t.Error("no ids were given out")
	}
}

func TestAllocateGivesNothingTwice(t *testing.T) {
	w := newSlotWorld(t, t.TempDir(), exclusive)
	w.found(gpuDevice(0, "a"))
	w.gives("p", "a")
	w.turn()
	if _, err := w.Allocate(t.Context(), []string{"a"}); err == nil || !strings.Contains(err.Error(), "held by another container") {
		t.Errorf("kubelet wants to give it out twice: %v", err)
	}
	// It was given back since, and kubelet did not ask for a preference.
	w.listing = nil
	if _, err := w.Allocate(t.Context(), []string{"a"}); err != nil {
		t.Errorf("it was given back: %v", err)
	}
}

// Kubelet gives out what a pod had that has just ended, and the watch still shows
// that pod as running.
func TestAllocateWhileTheWatchIsLate(t *testing.T) {
	w := newSlotWorld(t, t.TempDir(), exclusive)
	w.found(gpuDevice(0, "a"))
	p := newPod("p")
	p.Spec.Containers = []corev1.Container{containerAsking("c", gpu, 1)}
	p.Status.Phase = corev1.PodRunning
	w.pods = []*corev1.Pod{p}
	w.gives("p", "a")
	w.turn()
	w.listing = nil
	w.late, w.api = true, w.pods // it runs: kubelet has started and does not list all pods yet
	if _, err := w.Allocate(t.Context(), []string{"a"}); err == nil || !strings.Contains(err.Error(), "held by another container") {
		t.Errorf("the pod runs by the API server's word: %v", err)
	}
	w.api = nil
	if _, err := w.Allocate(t.Context(), []string{"a"}); err != nil {
		t.Errorf("the API server knows that it is gone: %v", err)
	}
}

func TestPreferWhileTheWatchIsLate(t *testing.T) {
	w := newSlotWorld(t, t.TempDir(), exclusive)
	w.found(gpuDevice(0, "a"), gpuDevice(1, "b"))
	p := newPod("p")
	p.Spec.Containers = []corev1.Container{containerAsking("c", gpu, 1)}
	p.Status.Phase = corev1.PodRunning
	w.pods = []*corev1.Pod{p}
	w.gives("p", "a")
	w.turn()
	w.listing = nil
	w.late, w.api = true, w.pods
	both := []string{"a", "b"}
	if got, err := w.Prefer(t.Context(), both, nil, 2); err == nil || !strings.Contains(err.Error(), "1 held by containers") {
		t.Errorf("the pod runs by the API server's word: %v, %v", got, err)
	}
	w.api = nil
	if got, err := w.Prefer(t.Context(), both, nil, 2); err != nil || !slices.Equal(got, both) {
		t.Errorf("the API server knows that it is gone: %v, %v", got, err)
	}
}

// A pod got a slot of kubelet's own choice and ended before kubelet listed it. A
// pod with init containers, which was suspected then, has all of its own by now.
func TestASlotIsNotKeptForAPodThatHasItsOwn(t *testing.T) {
	w := newSlotWorld(t, t.TempDir(), fourTimes)
	w.found(gpuDevice(0, "a"))
	if _, err := w.Allocate(t.Context(), []string{"a::1"}); err != nil {
		t.Fatal(err)
	}
	p := newPod("p")
	p.Spec.InitContainers = []corev1.Container{containerAsking("i", gpu, 1)}
	p.Spec.Containers = []corev1.Container{containerAsking("c", gpu, 1)}
	w.pods = []*corev1.Pod{p}
	w.gives("p")
	ids, err := w.Prefer(t.Context(), []string{"a::0", "a::2"}, nil, 1)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // its init container, then the other one
		if _, err := w.Allocate(t.Context(), ids); err != nil {
			t.Fatal(err)
		}
	}
	p.Status.Phase = corev1.PodRunning
	w.listing = nil
	w.gives("p", ids...)
	time.Sleep(alloc.RecordedBefore) // it counts as held for that long
	if _, err := w.Allocate(t.Context(), []string{"a::1"}); err != nil {
		t.Errorf("nobody has it: %v", err)
	}
	if _, err := w.Allocate(t.Context(), ids); err == nil {
		t.Error("what the pod has was given out again")
	}
}

func TestChipsAndBoards(t *testing.T) {
	chip := func(index int, id, board string, position int) accel.Device {
		d := gpuDevice(index, id)
		d.Board, d.Chip = board, position
		return d
	}
	four := []accel.Device{chip(0, "m", "m", 0), chip(1, "s", "m", 1), chip(2, "t", "m", 2), gpuDevice(3, "alone")}
	r := exclusive
	r.SplitBoards = false
	w := newSlotWorld(t, t.TempDir(), r)
	w.found(four...)
	if got, want := w.list(), "m alone|"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	got, err := w.Allocate(t.Context(), []string{"m"})
	if err != nil || got.GetEnvs()["DEVICES"] != "m,s,t" {
		t.Errorf("a board gives %v, %v; want all of its chips", got.GetEnvs(), err)
	}
	if nodes := w.units[0].NUMANodes; !slices.Equal(nodes, []int{0, 1}) {
		t.Errorf("the board is near the NUMA nodes %v, want those of all its chips", nodes)
	}
	// A chip of the other board state: the whole board is out.
	w = newSlotWorld(t, t.TempDir(), r)
	w.found(four...)
	w.found(four[0], sick(four[1]), four[2], four[3])
	if got, want := w.list(), "alone|m"; got != want {
		t.Errorf("with a chip that is ill: %s, want %s", got, want)
	}
	w.found(four[0], four[2], four[3])
	if got, want := w.list(), "alone|m"; got != want {
		t.Errorf("with a chip that is away: %s, want %s", got, want)
	}
	for _, d := range see(w.pool, (*alloc.Engine).Devices) {
		if d.ID == "s" && (d.Index != 1 || !d.Health.Unhealthy) {
			t.Errorf("the chip that is away is told of as %+v, want number 1, unhealthy", d)
		}
	}
	w.found(four...)
	if got, want := w.list(), "m alone|"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestSelectorsAndReplicaRules(t *testing.T) {
	r := fourTimes
	r.Devices = &config.DeviceSelector{Except: &config.DeviceSelector{Indexes: []int{2}}}
	r.ReplicasFor = []config.ReplicaRule{{Devices: config.DeviceSelector{IDs: []string{"b"}}, Replicas: 2}}
	w := newSlotWorld(t, t.TempDir(), r)
	w.found(gpuDevice(0, "a"), gpuDevice(1, "b"), gpuDevice(2, "c"))
	if got, want := w.list(), "a::0 a::1 a::2 a::3 b::0 b::1|"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// The vendor's own plugin gave a container a device before: its ids are the same.
func TestIDsOfTheVendorsPluginKeepTheirMeaning(t *testing.T) {
	w := newSlotWorld(t, t.TempDir(), fourTimes)
	w.gives("p", "a::2", "a::7", "b")
	w.found(gpuDevice(0, "a"), gpuDevice(1, "b"))
	// Of a, one replica of four is held and one beyond; b is held as a whole.
	if got, want := w.list(), "a::0 a::1 a::2 a::7 b|a::3 b::0 b::1 b::2 b::3"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestSlotsWaitForTheDriver(t *testing.T) {
	dir := t.TempDir()
	w := newSlotWorld(t, dir, exclusive)
	w.update(t.Context(), backend.Found{}, &backend.UnavailableError{Vendor: "nvidia", Err: errors.New("no libnvidia-ml.so.1")})
	if err := w.ready(); w.units != nil || err == nil || !strings.Contains(err.Error(), "no libnvidia-ml.so.1") || !w.absent() {
		t.Errorf("%d units, ready: %v", len(w.units), err)
	}
	w.found(gpuDevice(0, "a"), gpuDevice(1, "b"))
	if err := w.ready(); err != nil || w.list() != "a b|" {
		t.Errorf("%s, ready: %v", w.list(), err)
	}
	w.gives("p", "a")
	w.turn()
	// After a restart, before the driver is back: what is held stays listed.
	listing := w.listing
	w = newSlotWorld(t, dir, exclusive)
	w.listing = listing
	w.update(t.Context(), backend.Found{}, errors.New("the driver is not loaded"))
	if got, want := w.list(), "a|"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if _, err := w.Prefer(t.Context(), []string{"a"}, nil, 1); err == nil {
		t.Error("a device was given out without a driver")
	}
}

func TestSlotsStartWithADamagedState(t *testing.T) {
	dir := t.TempDir()
	w := newSlotWorld(t, dir, exclusive)
	w.found(gpuDevice(0, "a"), gpuDevice(1, "b"))
	path, err := w.store.Quarantine() // tells where it is
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, strings.TrimSuffix(path, ".damaged"), "{")
	listing := w.listing
	w = newSlotWorld(t, dir, exclusive)
	w.listing = listing
	w.gives("p", "b")
	w.update(t.Context(), backend.Found{Devices: []accel.Device{gpuDevice(0, "a"), sick(gpuDevice(1, "b"))}}, nil)
	if got, want := w.list(), "a b|"; got != want {
		t.Errorf("before kubelet told who holds what: %s, want %s: one that is held must not turn unhealthy", got, want)
	}
	w.turn()
	if got, want := w.list(), "a b|"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	w.listing = nil
	w.turn()
	if got, want := w.list(), "a|b"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestInjection(t *testing.T) {
	all := []config.Injection{config.InjectEnvironment, config.InjectDeviceNodes, config.InjectVolumeMounts, config.InjectCDI,
		config.InjectCDIAnnotations}
	for _, way := range append([]config.Injection{""}, all...) {
		ways := []config.Injection{way}
		if way == "" {
			ways = all
		}
		c := config.NodeConfig{Injection: config.InjectEnvironment, Vendors: map[string]config.Vendor{"nvidia": {Injection: ways}}}
		in, err := newInjector(&c, "nvidia", gpu)
		if err != nil {
			t.Fatal(err)
		}
		e, err := (&gpuBackend{byMounts: true}).Edits("a", "b")
		if err != nil {
			t.Fatal(err)
		}
		got := in.answer(e, []string{"a::0", "b::1"})
		has := func(w config.Injection) bool { return slices.Contains(ways, w) }
		want := map[string]string{"DEVICES": "a,b", "REPLICAS": "a::0,b::1"}
		if has(config.InjectVolumeMounts) {
			want["DEVICES"] = "/var/run/devices"
		}
		if diff := cmp.Diff(want, got.GetEnvs()); diff != "" {
			t.Errorf("%v (-want +got):\n%s", ways, diff)
		}
		if (len(got.GetDevices()) == 2) != has(config.InjectDeviceNodes) || (len(got.GetMounts()) == 1) != has(config.InjectVolumeMounts) ||
			(len(got.GetCdiDevices()) == 2) != has(config.InjectCDI) ||
			(got.GetAnnotations()["cdi.k8s.io/divvy_nvidia.com_gpu"] == "nvidia.com/gpu=a,nvidia.com/gpu=b") !=
				has(config.InjectCDIAnnotations) {
			t.Errorf("%v: %v", ways, got)
		}
	}
}

func TestInjectionThatTheVendorDoesNotHaveIsRefusedInTime(t *testing.T) {
	w := newSlotWorld(t, t.TempDir(), exclusive)
	w.inject = injector{ways: []config.Injection{config.InjectVolumeMounts}}
	w.found(gpuDevice(0, "a"))
	if err := w.ready(); err == nil || !strings.Contains(err.Error(), `injection "volumeMounts" is not possible for nvidia devices`) {
		t.Errorf("readiness says %v", err)
	}
	if !slices.ContainsFunc(w.events, func(e string) bool { return strings.HasPrefix(e, "ResourceNotOffered") }) {
		t.Errorf("no event tells of it: %q", w.events)
	}
}

// A pod whose init containers hold a device is remembered over a restart, as
// kubelet does not list that.
func TestInitContainersAreRemembered(t *testing.T) {
	dir := t.TempDir()
	w := newSlotWorld(t, dir, exclusive)
	w.found(gpuDevice(0, "a"), gpuDevice(1, "b"))
	p := &corev1.Pod{}
	p.Namespace, p.Name, p.UID = "ns", "p", types.UID("u")
	p.Status.Phase = corev1.PodPending
	p.Spec.InitContainers = []corev1.Container{containerAsking("i", gpu, 1)}
	p.Spec.Containers = []corev1.Container{{Name: "c"}}
	w.pods = []*corev1.Pod{p}
	w.listing = []podresources.Pod{{Namespace: "ns", Name: "p", Containers: []podresources.Container{{Name: "c"}}}}
	ids, err := w.Prefer(t.Context(), []string{"a", "b"}, nil, 1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Allocate(t.Context(), ids); err != nil {
		t.Fatal(err)
	}
	listing, pods := w.listing, w.pods
	w = newSlotWorld(t, dir, exclusive)
	w.listing, w.pods = listing, pods
	w.found(gpuDevice(0, "a"), gpuDevice(1, "b"))
	if w.held("a") != 1 {
		t.Error("nobody knows that the init container holds the device")
	}
	w.listing, w.pods = nil, nil
	w.turn()
	if w.held("a") != 0 || !w.idle() {
		t.Error("the device is still held after the pod has gone")
	}
}

func TestSelectorThatChoosesNothingSaysSo(t *testing.T) {
	r := exclusive
	r.Devices = &config.DeviceSelector{Models: []string{"none like this"}}
	w := newSlotWorld(t, t.TempDir(), r)
	w.found(gpuDevice(0, "a"), gpuDevice(1, "b"))
	if err := w.ready(); err == nil || !strings.Contains(err.Error(), "chooses none of the 2 nvidia devices") || !w.absent() {
		t.Errorf("readiness says %v", err)
	}
}

// A container that gets all devices of the node is told of them as one that gets
// some of them: all chips, under the host's names.
func TestRequestForAllDevicesIsAnsweredAsAnyOther(t *testing.T) {
	chip := func(index int, id, board string, position int) accel.Device {
		d := gpuDevice(index, id)
		d.Board, d.Chip = board, position
		return d
	}
	r := exclusive
	r.SplitBoards = false
	w := newSlotWorld(t, t.TempDir(), r)
	w.found(chip(4, "m", "m", 0), chip(5, "s", "m", 1), gpuDevice(7, "alone"))
	ids, err := w.Prefer(t.Context(), []string{"alone", "m"}, nil, 2)
	if err != nil {
		t.Fatal(err)
	}
	got, err := w.Allocate(t.Context(), ids)
	if err != nil {
		t.Fatal(err)
	}
	var paths []string
	for _, d := range got.GetDevices() {
		paths = append(paths, d.GetHostPath()+" "+d.GetContainerPath())
	}
	want := []string{"/host/dev/m /dev/m", "/host/dev/s /dev/s", "/host/dev/alone /dev/alone"}
	if diff := cmp.Diff(want, paths); diff != "" || got.GetEnvs()["DEVICES"] != "m,s,alone" || got.GetEnvs()["REPLICAS"] != "m,alone" {
		t.Errorf("environment %v, device nodes (-want +got):\n%s", got.GetEnvs(), diff)
	}
}
