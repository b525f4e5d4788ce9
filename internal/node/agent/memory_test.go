package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/deviceplugin"
	"github.com/divvy-gpu/divvy/internal/node/podresources"
	"github.com/divvy-gpu/divvy/internal/node/state"
	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

const (
	gcuMemory = accel.Resource("enflame.com/gcu-memory")
	thisNode  = "node-1"
)

// fakeBackend answers Edits; what it discovers is handed to the pool directly.
type fakeBackend struct{}

func (fakeBackend) Vendor() string                                  { return "enflame" }
func (fakeBackend) Discover(context.Context) (backend.Found, error) { return backend.Found{}, nil }
func (fakeBackend) Close() error                                    { return nil }

func (fakeBackend) Edits(ids ...accel.DeviceID) (backend.Edits, error) {
	var e backend.Edits
	var names []string
	for _, id := range ids {
		names = append(names, string(id))
		e.DeviceNodes = append(e.DeviceNodes, backend.DeviceNode{Path: "/dev/" + string(id), HostPath: "/dev/" + string(id),
			Permissions: "rw"})
		e.CDIDevices = append(e.CDIDevices, backend.CDIDevice{Kind: "enflame.com/gcu", Name: string(id)})
	}
	e.Env = map[string]string{"ENFLAME_VISIBLE_DEVICES": strings.Join(names, ",")}
	return e, nil
}

// world is one memory pool between a kubelet and an API server that the test plays.
type world struct {
	*pool
	t   testing.TB
	dir string // of the state
	// units is what kubelet was told last, id to health.
	units []deviceplugin.Unit
	// tooMany makes kubelet's end refuse the list.
	tooMany error
	// maxUnhealthy makes it refuse lists with more unhealthy units, if positive.
	maxUnhealthy int
	// woken counts how often the agent's loop was woken.
	woken int
	// offers counts the lists.
	offers int
	// admitted are the pods that kubelet has taken up.
	admitted []*corev1.Pod
	// others are further pods that kubelet lists.
	others []podresources.Pod
	// cached is what the watch delivered, api what the API server has.
	cached, api []*corev1.Pod
	// held is kubelet's checkpoint: container to ids, by pod.
	held    map[types.UID]map[string][]string
	down    error // of kubelet's pod-resources API
	apiDown error
	events  []string
	signer  *wire.Signer
}

func newWorld(t testing.TB, unit string, set ...func(*alloc.Config)) *world {
	t.Helper()
	return newWorldIn(t, t.TempDir(), unit, set...)
}

// newWorldIn keeps the state in dir.
func newWorldIn(t testing.TB, dir, unit string, set ...func(*alloc.Config)) *world {
	t.Helper()
	u, err := sharing.ParseMemoryUnit(unit)
	if err != nil {
		t.Fatal(err)
	}
	signer, err := wire.NewSigner([]byte("0123456789abcdef0123456789abcdef"))
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, dir: dir, held: map[types.UID]map[string][]string{}, signer: signer}
	m := newMetrics(prometheus.NewRegistry())
	id := alloc.ID{Resource: gcuMemory, Kind: alloc.Memory}
	w.pool = &pool{
		ID: id, config: alloc.Config{ID: id, Vendor: "enflame", Unit: u},
		inject: injector{ways: []config.Injection{config.InjectDeviceNodes}}, backend: fakeBackend{},
		store: state.NewStore(dir, id), sink: w,
		records: &records{kubelet: w, pods: w, metrics: m, owner: &owner{}, resources: []accel.Resource{gcuMemory}},
		metrics: m, changed: func() { w.woken++ }, withdrawn: func() {},
		event: func(kind events.Kind, message string) { w.events = append(w.events, kind.Reason+": "+message) },
	}
	w.records.planned = func(p *corev1.Pod) *accel.Grant {
		g, err := signer.DecodeGrant(string(p.UID), p.Annotations[wire.GrantAnnotation])
		if err != nil || g.Node != thisNode {
			return nil
		}
		return &g
	}
	for _, f := range set {
		f(&w.config)
	}
	w.load(t.Context())
	w.engines()
	return w
}

// engines makes the engine of the world's pool and of others.
func (w *world) engines(others ...alloc.Config) {
	w.t.Helper()
	var err error
	if w.records.owner.engine, err = alloc.New(append(others, w.config)...); err != nil {
		w.t.Fatal(err)
	}
}

// whole is another resource of the world's devices, which are given out as a whole.
var whole = alloc.Config{ID: alloc.ID{Resource: "enflame.com/gcu", Kind: alloc.Slots}, Vendor: "enflame"}

// ready returns why the pool is not offered as configured.
func (w *world) ready() error { return w.status().Problem }

// idsOf returns the units of a device that kubelet was told.
func (w *world) idsOf(d accel.DeviceID) []string {
	var out []string
	for _, u := range w.units {
		if w.deviceOf(u.ID) == d {
			out = append(out, u.ID)
		}
	}
	return out
}

func (w *world) deviceOf(id string) accel.DeviceID {
	e, done := w.records.owner.use()
	defer done()
	d, _ := e.DeviceOf(w.ID, id)
	return d
}

// restart is the daemon's: only the state file survives.
func (w *world) restart(unit string) *world {
	w.t.Helper()
	next := newWorldIn(w.t, w.dir, unit)
	next.cached, next.api, next.admitted, next.held, next.down = w.cached, w.api, w.admitted, w.held, w.down
	return next
}

// refresh is what a turn of the agent's loop does.
func (w *world) refresh(ctx context.Context) ([]fact, error) {
	if err := w.records.refresh(ctx); err != nil {
		return nil, err
	}
	w.sync(ctx)
	return w.facts(ctx), nil
}

// update is what the agent does after a discovery: the pool takes it, and the
// loop turns.
func (w *world) update(ctx context.Context, found backend.Found, err error) {
	w.t.Helper()
	w.pool.update(ctx, found, err)
	if w.down != nil || w.status().Known {
		return
	}
	if _, err := w.refresh(ctx); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) SetUnits(units []deviceplugin.Unit) error {
	w.offers++
	if w.tooMany != nil {
		return w.tooMany
	}
	unhealthy := 0
	for _, u := range units {
		if u.Unhealthy {
			unhealthy++
		}
	}
	if w.maxUnhealthy > 0 && unhealthy > w.maxUnhealthy {
		return &deviceplugin.TooManyUnitsError{Resource: gcuMemory, Units: len(units)}
	}
	w.units = units
	return nil
}

func (w *world) Cached() []*corev1.Pod                        { return slices.Clone(w.cached) }
func (w *world) Synced() bool                                 { return true }
func (w *world) Fresh(context.Context) ([]*corev1.Pod, error) { return w.api, w.apiDown }
func (w *world) List(context.Context) ([]podresources.Pod, error) {
	if w.down != nil {
		return nil, w.down
	}
	var out []podresources.Pod
	for _, p := range w.admitted {
		one := podresources.Pod{Namespace: p.Namespace, Name: p.Name}
		for _, c := range append(sidecars(p), p.Spec.Containers...) {
			one.Containers = append(one.Containers, podresources.Container{
				Name: c.Name, Units: map[accel.Resource][]string{gcuMemory: w.held[p.UID][c.Name]},
			})
		}
		out = append(out, one)
	}
	return append(out, w.others...), nil
}

func sidecars(p *corev1.Pod) []corev1.Container {
	var out []corev1.Container
	for _, c := range p.Spec.InitContainers {
		if c.RestartPolicy != nil {
			out = append(out, c)
		}
	}
	return out
}

// admit does what kubelet's device manager does for a new pod (devicesToAllocate
// in pkg/kubelet/cm/devicemanager) and returns the pod's device by container.
func (w *world) admit(p *corev1.Pod) (map[string]string, error) {
	w.t.Helper()
	w.admitted = append(w.admitted, p)
	w.held[p.UID] = map[string][]string{}
	devices := map[string]string{}
	var reusable []string
	serve := func(c *corev1.Container, plainInit bool) error {
		q, asks := c.Resources.Limits[corev1.ResourceName(gcuMemory)]
		if !asks {
			return nil
		}
		size := int(q.Value())
		reused := reusable[:min(size, len(reusable))]
		ids := slices.Clone(reused)
		if len(ids) < size {
			var err error
			if ids, err = w.Prefer(w.t.Context(), append(w.available(), ids...), slices.Clone(ids), size); err != nil {
				return err
			}
			if len(ids) != size {
				return fmt.Errorf("%d ids preferred of %d", len(ids), size)
			}
		}
		answer, err := w.Allocate(w.t.Context(), ids)
		if err != nil {
			return err
		}
		w.held[p.UID][c.Name] = ids
		devices[c.Name] = answer.GetEnvs()["ENFLAME_VISIBLE_DEVICES"]
		if plainInit {
			reusable = slices.Compact(slices.Sorted(slices.Values(append(reusable, ids...))))
		} else {
			reusable = slices.DeleteFunc(reusable, func(id string) bool { return slices.Contains(ids, id) })
		}
		return nil
	}
	for i := range p.Spec.InitContainers {
		c := &p.Spec.InitContainers[i]
		if err := serve(c, c.RestartPolicy == nil); err != nil {
			w.remove(p)
			return nil, err
		}
	}
	for i := range p.Spec.Containers {
		if err := serve(&p.Spec.Containers[i], false); err != nil {
			w.remove(p)
			return nil, err
		}
	}
	return devices, nil
}

func (w *world) remove(p *corev1.Pod) {
	delete(w.held, p.UID)
	gone := func(q *corev1.Pod) bool { return q.UID == p.UID }
	w.admitted = slices.DeleteFunc(w.admitted, gone)
	w.cached = slices.DeleteFunc(w.cached, gone)
	w.api = slices.DeleteFunc(w.api, gone)
}

func (w *world) available() []string {
	inUse := map[string]bool{}
	for _, containers := range w.held {
		for _, ids := range containers {
			for _, id := range ids {
				inUse[id] = true
			}
		}
	}
	var out []string
	for _, u := range w.units {
		if !u.Unhealthy && !inUse[u.ID] {
			out = append(out, u.ID)
		}
	}
	return out
}

// counts returns healthy/all units by device.
func (w *world) counts() map[string]string {
	healthy, all := map[string]int{}, map[string]int{}
	for _, u := range w.units {
		d := w.deviceOf(u.ID)
		all[string(d)]++
		if !u.Unhealthy {
			healthy[string(d)]++
		}
	}
	out := map[string]string{}
	for d, n := range all {
		out[d] = fmt.Sprintf("%d/%d", healthy[d], n)
	}
	return out
}

// see delivers pods to the API server and the watch.
func (w *world) see(pods ...*corev1.Pod) {
	w.api = append(w.api, pods...)
	w.cached = append(w.cached, pods...)
}

func card(index int, id string, gb int) accel.Device {
	return accel.Device{Index: index, ID: accel.DeviceID(id), MemoryBytes: int64(gb) << 30, NUMANode: accel.NoNUMA}
}

func found(devices ...accel.Device) backend.Found { return backend.Found{Devices: devices} }

// newPod returns a pending pod with one app container per size.
func newPod(name string, sizes ...int) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID("uid-" + name),
		Annotations: map[string]string{}}}
	p.Status.Phase = corev1.PodPending
	for i, s := range sizes {
		p.Spec.Containers = append(p.Spec.Containers, container(fmt.Sprint("c", i), s))
	}
	return p
}

func container(name string, size int) corev1.Container { return containerAsking(name, gcuMemory, size) }

func containerAsking(name string, r accel.Resource, size int) corev1.Container {
	q := *resource.NewQuantity(int64(size), resource.DecimalSI)
	return corev1.Container{Name: name, Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{corev1.ResourceName(r): q}}}
}

// grantTo signs a grant as the extender does, of one device or of several that
// are separated by spaces.
func (w *world) grantTo(p *corev1.Pod, device string, at int) *corev1.Pod {
	w.t.Helper()
	devices := strings.Fields(device)
	g := accel.Grant{
		Resource: gcuMemory, Node: thisNode, Device: accel.DeviceID(devices[0]), DeviceUnits: 16,
		Units: max(1, kube.RequestOf(p, gcuMemory).Peak()), At: time.Unix(int64(1000+at), 0),
	}
	for _, d := range devices[1:] {
		g.More = append(g.More, accel.GrantedDevice{Device: accel.DeviceID(d), DeviceUnits: 16})
	}
	text, err := w.signer.EncodeGrant(string(p.UID), g)
	if err != nil {
		w.t.Fatal(err)
	}
	p.Annotations[wire.GrantAnnotation] = text
	return p
}

func TestMemoryOffersUnits(t *testing.T) {
	w := newWorld(t, "0.1")
	w.update(t.Context(), found(card(0, "a", 16), card(1, "b", 32)), nil)
	if diff := cmp.Diff(map[string]string{"a": "160/160", "b": "320/320"}, w.counts()); diff != "" {
		t.Errorf("units (-want +got):\n%s", diff)
	}
	if err := w.ready(); err != nil {
		t.Error(err)
	}
	inv := see(w.pool, (*alloc.Engine).Inventory)
	if inv.Unit != "0.1" || len(inv.Shares) != 2 || inv.Shares[1].Units != 320 {
		t.Errorf("inventory is %+v", inv)
	}
}

func TestMemoryWaitsForTheDriver(t *testing.T) {
	w := newWorld(t, "1")
	w.update(t.Context(), backend.Found{}, &backend.UnavailableError{Vendor: "enflame", Err: errors.New("libefml.so not found")})
	if w.units != nil {
		t.Error("units were offered without a device")
	}
	if err := w.ready(); err == nil || !strings.Contains(err.Error(), "libefml.so not found") {
		t.Errorf("readiness says %v", err)
	}
	w.update(t.Context(), found(card(0, "a", 16)), nil)
	if got := w.counts()["a"]; got != "16/16" || w.ready() != nil {
		t.Errorf("units %s, ready %v", got, w.ready())
	}
}

func TestMemoryKeepsUnitsOfADeviceThatGoesAway(t *testing.T) {
	w := newWorld(t, "1")
	w.update(t.Context(), found(card(0, "a", 16), card(1, "b", 16)), nil)
	p := newPod("p", 4)
	w.see(w.grantTo(p, "b", 1))
	if _, err := w.admit(p); err != nil {
		t.Fatal(err)
	}
	if _, err := w.refresh(t.Context()); err != nil {
		t.Fatal(err)
	}

	w.update(t.Context(), found(card(0, "a", 16)), nil) // b is lost
	if diff := cmp.Diff(map[string]string{"a": "16/16", "b": "4/16"}, w.counts()); diff != "" {
		t.Errorf("a lost card under a pod (-want +got):\n%s", diff)
	}
	if s := see(w.pool, (*alloc.Engine).Inventory).Shares[1]; s.ID != "b" || !s.Health.Unhealthy || s.Index != 1 {
		t.Errorf("the lost card is published as %+v", s)
	}

	w = w.restart("1") // while the card is away, and before kubelet answers
	w.down = errors.New("no kubelet")
	w.update(t.Context(), found(card(0, "a", 16)), nil)
	if diff := cmp.Diff(map[string]string{"a": "16/16", "b": "16/16"}, w.counts()); diff != "" {
		t.Errorf("after a restart, holders unknown (-want +got):\n%s", diff)
	}
	w.down = nil
	if _, err := w.refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]string{"a": "16/16", "b": "4/16"}, w.counts()); diff != "" {
		t.Errorf("after a restart (-want +got):\n%s", diff)
	}

	w.remove(p)
	if _, err := w.refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := w.counts()["b"]; got != "0/16" {
		t.Errorf("units given back on a lost card: %s, want 0/16", got)
	}
	w.update(t.Context(), found(card(0, "a", 16), card(1, "b", 16)), nil)
	if diff := cmp.Diff(map[string]string{"a": "16/16", "b": "16/16"}, w.counts()); diff != "" {
		t.Errorf("after recovery (-want +got):\n%s", diff)
	}
}

func TestMemoryGivesALostCardAnIndexOfItsOwn(t *testing.T) {
	w := newWorld(t, "1")
	w.update(t.Context(), found(card(0, "a", 16), card(1, "b", 16), card(2, "c", 16)), nil)
	w.update(t.Context(), found(card(0, "a", 16), card(1, "c", 16)), nil) // b lost, c moved up
	var got []string
	for _, s := range see(w.pool, (*alloc.Engine).Inventory).Shares {
		got = append(got, fmt.Sprint(s.Index, s.ID))
	}
	if diff := cmp.Diff([]string{"0a", "1c", "2b"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestMemoryChangesTheMemoryUnitOnlyWhenNobodyHoldsUnits(t *testing.T) {
	w := newWorld(t, "1")
	w.update(t.Context(), found(card(0, "a", 16)), nil)
	p := newPod("p", 4)
	w.see(w.grantTo(p, "a", 1))
	if _, err := w.admit(p); err != nil {
		t.Fatal(err)
	}
	w = w.restart("0.1")
	w.update(t.Context(), found(card(0, "a", 16)), nil)
	if _, err := w.refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := w.counts()["a"]; got != "16/16" || see(w.pool, (*alloc.Engine).Inventory).Unit != "1" {
		t.Errorf("units %s of %s GB while a pod holds some", got, see(w.pool, (*alloc.Engine).Inventory).Unit)
	}
	if err := w.ready(); err == nil || !strings.Contains(err.Error(), "memoryUnit stays 1 until the pods that hold such units are gone, "+
		"then becomes 0.1: ns/p") {
		t.Errorf("readiness says %v", err)
	}
	w.remove(p)
	if _, err := w.refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := w.counts()["a"]; got != "160/160" || see(w.pool, (*alloc.Engine).Inventory).Unit != "0.1" || w.ready() != nil {
		t.Errorf("afterwards units %s of %s GB, ready: %v", got, see(w.pool, (*alloc.Engine).Inventory).Unit, w.ready())
	}
}

func TestMemorySaysWhatIsWrongWithItsDevices(t *testing.T) {
	tests := map[string]struct {
		unit    string
		found   backend.Found
		tooMany error
		want    string
	}{
		"smaller than a unit": {"1", found(accel.Device{ID: "a", MemoryBytes: 1 << 20}), nil,
			"device a has 1048576 bytes of memory, less than one unit of 1 GB"},
		"no devices": {"1", found(), nil, "the vendor's library reports no enflame device"},
		"too many units": {"0.001", found(card(0, "a", 32)), &deviceplugin.TooManyUnitsError{Resource: gcuMemory, Units: 9,
			Bytes: 9}, "choose a larger memoryUnit"},
		"more than can be counted": {"0.001", found(accel.Device{ID: "a", MemoryBytes: 1 << 62}), nil, "choose a larger memoryUnit"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, tt.unit)
			w.tooMany = tt.tooMany
			w.update(t.Context(), tt.found, nil)
			if err := w.ready(); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("readiness says %v, want %q", err, tt.want)
			}
		})
	}
}

func TestMemoryTellsKubeletOfChangesOnly(t *testing.T) {
	w := newWorld(t, "1")
	w.update(t.Context(), found(card(0, "a", 16)), nil)
	for range 3 {
		if _, err := w.refresh(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	before := w.woken
	if _, err := w.refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	if w.woken != before {
		t.Error("a turn of the loop wakes the loop: it would never rest")
	}
	if w.offers != 1 {
		t.Errorf("kubelet was told %d times of the same units", w.offers)
	}
	w.tooMany = &deviceplugin.TooManyUnitsError{Resource: gcuMemory}
	w.update(t.Context(), found(card(0, "a", 16), card(1, "b", 16)), nil)
	for range 3 {
		if _, err := w.refresh(t.Context()); err != nil {
			t.Fatal(err)
		}
		if w.ready() == nil {
			t.Error("ready though kubelet would not take the units")
		}
	}
}

func TestMemoryLeavesOutUnhealthyUnitsThatMakeTheListTooLong(t *testing.T) {
	w := newWorld(t, "1")
	w.update(t.Context(), found(card(0, "a", 16), card(1, "b", 16)), nil)
	p := newPod("p", 4)
	w.see(w.grantTo(p, "b", 1))
	if _, err := w.admit(p); err != nil {
		t.Fatal(err)
	}
	if _, err := w.refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.maxUnhealthy = 3
	w.update(t.Context(), found(card(0, "a", 16)), nil)
	if diff := cmp.Diff(map[string]string{"a": "16/16", "b": "4/4"}, w.counts()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestMemoryServesPods(t *testing.T) {
	always := corev1.ContainerRestartPolicyAlways
	initContainer := func(p *corev1.Pod, name string, size int, sidecar bool) *corev1.Pod {
		c := container(name, size)
		if sidecar {
			c.RestartPolicy = &always
		}
		p.Spec.InitContainers = append(p.Spec.InitContainers, c)
		return p
	}
	tests := map[string]struct {
		cards   []accel.Device
		pods    func(w *world) []*corev1.Pod // in the order of admission
		unseen  bool                         // by the watch
		lost    bool                         // the API server does not answer either
		want    []map[string]string          // device by container, nil for a refusal
		refused string
	}{
		"two pods of one size, admitted in the other order than granted": {
			pods: func(w *world) []*corev1.Pod {
				return []*corev1.Pod{w.grantTo(newPod("late", 4), "b", 2), w.grantTo(newPod("early", 4), "a", 1)}
			},
			want: []map[string]string{{"c0": "b"}, {"c0": "a"}},
		},
		"all containers of a pod on one card": {
			pods: func(w *world) []*corev1.Pod {
				return []*corev1.Pod{w.grantTo(newPod("p", 4, 8, 4), "b", 1)}
			},
			want: []map[string]string{{"c0": "b", "c1": "b", "c2": "b"}},
		},
		"pods of equal containers stay apart": {
			pods: func(w *world) []*corev1.Pod {
				return []*corev1.Pod{w.grantTo(newPod("p", 4, 4), "a", 1), w.grantTo(newPod("q", 4, 4), "b", 2),
					w.grantTo(newPod("r", 4), "a", 3)}
			},
			want: []map[string]string{{"c0": "a", "c1": "a"}, {"c0": "b", "c1": "b"}, {"c0": "a"}},
		},
		"an init container's units are used again": {
			pods: func(w *world) []*corev1.Pod {
				return []*corev1.Pod{
					w.grantTo(initContainer(initContainer(newPod("p", 6, 10), "i0", 4, false), "i1", 8, false), "b", 1),
					w.grantTo(newPod("q", 16), "a", 2),
				}
			},
			want: []map[string]string{{"i0": "b", "i1": "b", "c0": "b", "c1": "b"}, {"c0": "a"}},
		},
		"a sidecar's are not": {
			pods: func(w *world) []*corev1.Pod {
				return []*corev1.Pod{
					w.grantTo(initContainer(initContainer(newPod("p", 8), "side", 4, true), "i", 8, false), "b", 1),
					w.grantTo(newPod("q", 4), "b", 2),
				}
			},
			want: []map[string]string{{"side": "b", "i": "b", "c0": "b"}, {"c0": "b"}},
		},
		"the watch has not delivered them": {
			unseen: true,
			pods: func(w *world) []*corev1.Pod {
				return []*corev1.Pod{w.grantTo(newPod("p", 4), "b", 1), w.grantTo(newPod("q", 4), "a", 2)}
			},
			want: []map[string]string{{"c0": "b"}, {"c0": "a"}},
		},
		"nobody knows them": {
			unseen: true, lost: true,
			pods: func(*world) []*corev1.Pod { return []*corev1.Pod{newPod("p", 4), newPod("q", 16), newPod("r", 16)} },
			want: []map[string]string{{"c0": "a"}, {"c0": "b"}, nil}, refused: "needs 16 units of one device, at most 12 are free",
		},
		"without a grant: the best fit": {
			pods: func(w *world) []*corev1.Pod {
				return []*corev1.Pod{w.grantTo(newPod("p", 4), "b", 1), newPod("byhand", 12)}
			},
			want: []map[string]string{{"c0": "b"}, {"c0": "b"}},
		},
		"a grant that somebody else signed is no grant": {
			pods: func(w *world) []*corev1.Pod {
				forged := newPod("forged", 4)
				forged.Annotations[wire.GrantAnnotation] = w.grantTo(newPod("p", 4), "b", 1).Annotations[wire.GrantAnnotation]
				forged.Annotations["enflame.com/gcu-device-id"] = "1"
				return []*corev1.Pod{forged}
			},
			want: []map[string]string{{"c0": "a"}},
		},
		"larger than a card": {
			pods:    func(*world) []*corev1.Pod { return []*corev1.Pod{newPod("p", 20)} },
			want:    []map[string]string{nil},
			refused: "ns/p needs 20 units of one device, at most 16 are free",
		},
		"larger than a card in sum": {
			pods:    func(*world) []*corev1.Pod { return []*corev1.Pod{newPod("p", 10, 10)} },
			want:    []map[string]string{nil},
			refused: "ns/p needs 20 units",
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, "1")
			w.update(t.Context(), found(card(0, "a", 16), card(1, "b", 16)), nil)
			pods := tt.pods(w)
			w.api = slices.Clone(pods)
			if !tt.unseen {
				w.cached = slices.Clone(pods)
			}
			if tt.lost {
				w.apiDown = errors.New("no API server")
			}
			for i, p := range slices.Clone(pods) {
				got, err := w.admit(p)
				if tt.want[i] == nil {
					if err == nil || !strings.Contains(err.Error(), tt.refused) {
						t.Errorf("pod %s: got %v, %v; want a refusal with %q", p.Name, got, err, tt.refused)
					}
					continue
				}
				if err != nil {
					t.Fatalf("pod %s: %v", p.Name, err)
				}
				if diff := cmp.Diff(tt.want[i], got); diff != "" {
					t.Errorf("pod %s (-want +got):\n%s", p.Name, diff)
				}
			}
		})
	}
}

func TestMemoryLooksUpAPodThatTookAnothersName(t *testing.T) {
	w := newWorld(t, "1")
	w.update(t.Context(), found(card(0, "a", 16), card(1, "b", 16)), nil)
	// The watch still shows a pod of this name that waited for something else.
	w.cached = []*corev1.Pod{newPod("p", 3)}
	young := newPod("p", 6, 6)
	young.UID = "uid-young"
	w.api = []*corev1.Pod{w.grantTo(young, "b", 1)}
	got, err := w.admit(young)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]string{"c0": "b", "c1": "b"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestMemoryNeverHandsOutUnitsTwice(t *testing.T) {
	w := newWorld(t, "1")
	w.update(t.Context(), found(card(0, "a", 16)), nil)
	p, q := newPod("p", 4), newPod("q", 4)
	w.see(w.grantTo(p, "a", 1), w.grantTo(q, "a", 2))
	if _, err := w.admit(p); err != nil {
		t.Fatal(err)
	}
	// Kubelet forgot that p's units are taken (see records.turn) and offers all.
	w.admitted = append(w.admitted, q)
	all := w.idsOf("a")
	got, err := w.Prefer(t.Context(), all, nil, 4)
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range got {
		if slices.Contains(w.held[p.UID]["c0"], id) {
			t.Errorf("unit %q is held by p and was preferred for q", id)
		}
	}
}

func TestMemoryAllocateRefusesMixedAndUnknownUnits(t *testing.T) {
	w := newWorld(t, "1")
	w.update(t.Context(), found(card(0, "a", 16), card(1, "b", 16)), nil)
	a, b := w.idsOf("a")[0], w.idsOf("b")[0]
	for name, tt := range map[string]struct {
		ids  []string
		want string
	}{
		"two devices": {[]string{a, b}, "kubelet chose units of the devices a, b for one container"},
		"unknown":     {[]string{a, "zzz"}, `unit id "zzz" belongs to no device`},
		"none":        {nil, "no units"},
	} {
		if got, err := w.Allocate(t.Context(), tt.ids); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}

func TestMemoryInjects(t *testing.T) {
	for mode, want := range map[config.Injection]string{
		config.InjectEnvironment: "devices 0, cdi 0",
		config.InjectDeviceNodes: "devices 1, cdi 0",
		config.InjectCDI:         "devices 0, cdi 1",
	} {
		w := newWorld(t, "1")
		w.inject = injector{ways: []config.Injection{mode}}
		w.update(t.Context(), found(card(0, "a", 16)), nil)
		got, err := w.Allocate(t.Context(), w.idsOf("a")[:2])
		if err != nil {
			t.Fatal(err)
		}
		if s := fmt.Sprintf("devices %d, cdi %d", len(got.GetDevices()), len(got.GetCdiDevices())); s != want ||
			got.GetEnvs()["ENFLAME_VISIBLE_DEVICES"] != "a" {
			t.Errorf("%s: %s, want %s; environment %v", mode, s, want, got.GetEnvs())
		}
	}
}

// TestPoolFindsItsLayoutAgain loses the state of cards that were not laid out
// in the order of their indexes, under a pod: its units stay those of its card.
func TestMemoryFindsItsLayoutAgain(t *testing.T) {
	w := newWorld(t, "1")
	w.update(t.Context(), found(card(0, "b", 16)), nil)
	w.update(t.Context(), found(card(0, "a", 8), card(1, "b", 16)), nil) // a came later
	p := newPod("p", 4)
	w.see(w.grantTo(p, "b", 1))
	if _, err := w.admit(p); err != nil {
		t.Fatal(err)
	}
	if _, err := w.store.Quarantine(); err != nil {
		t.Fatal(err)
	}
	grant := p.Annotations[wire.GrantAnnotation]
	delete(p.Annotations, wire.GrantAnnotation)
	w = w.restart("1")
	w.update(t.Context(), found(card(0, "a", 8), card(1, "b", 16)), nil)
	if err := w.ready(); w.units != nil || err == nil ||
		!strings.Contains(err.Error(), "the device of pod ns/p, which holds units, is unknown") {
		t.Errorf("without a grant: %d units offered, readiness says %v", len(w.units), err)
	}

	p.Annotations[wire.GrantAnnotation] = grant
	w = w.restart("1")
	w.down = errors.New("no kubelet")
	w.update(t.Context(), found(card(0, "a", 8), card(1, "b", 16)), nil)
	if w.units != nil {
		t.Error("units were offered before kubelet told which are held")
	}
	w.down = nil
	facts, err := w.refresh(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(facts) != 1 || facts[0].devices[0].ID != "b" {
		t.Errorf("known of the pod: %+v, want device b", facts)
	}
	if diff := cmp.Diff(map[string]string{"a": "8/8", "b": "16/16"}, w.counts()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestMemoryStartsWithADamagedState(t *testing.T) {
	w := newWorld(t, "1")
	w.update(t.Context(), found(card(0, "a", 16)), nil)
	path, err := w.store.Quarantine() // tells where it is
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, strings.TrimSuffix(path, ".damaged"), "{")
	w = w.restart("1")
	w.update(t.Context(), found(card(0, "a", 16)), nil)
	if got := w.counts()["a"]; got != "16/16" {
		t.Errorf("units %s, want 16/16", got)
	}
}

// A card that is given out as a whole is withdrawn from memory for as long as
// that lasts, so its units must not be told again with every turn of the loop.
func TestMemoryWithdrawsADeviceOnce(t *testing.T) {
	w := newWorld(t, "1")
	w.engines(whole)
	w.records.owner.engine.Discover(whole.ID, alloc.Discovery{Devices: found(card(0, "a", 16), card(1, "b", 16)).Devices})
	w.update(t.Context(), found(card(0, "a", 16), card(1, "b", 16)), nil)
	w.others = []podresources.Pod{{Namespace: "ns", Name: "other", Containers: []podresources.Container{
		{Name: "c", Units: map[accel.Resource][]string{whole.Resource: {"b"}}},
	}}}
	if _, err := w.refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	p := newPod("p", 4)
	w.see(w.grantTo(p, "b", 1))
	devices, err := w.admit(p)
	if err != nil || devices["c0"] != "a" {
		t.Fatalf("%v, %v; want device a, the other is withdrawn", devices, err)
	}
	for range 3 {
		if _, err := w.refresh(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff(map[string]string{"a": "16/16", "b": "0/16"}, w.counts()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if w.offers != 2 {
		t.Errorf("kubelet was told %d times, want 2", w.offers)
	}
	if s := see(w.pool, (*alloc.Engine).Inventory).Shares[1]; s.Health.Reason != "given out as enflame.com/gcu" {
		t.Errorf("the inventory shows %+v", s.Health)
	}
	for _, d := range see(w.pool, (*alloc.Engine).Devices) {
		if d.Health.Unhealthy {
			t.Errorf("a device that is withdrawn is not ill, but: %+v", d)
		}
	}
	if _, err := w.Allocate(t.Context(), w.idsOf("b")[:2]); err == nil || !strings.Contains(err.Error(), "given out as enflame.com/gcu") {
		t.Errorf("memory of a withdrawn device was given out: %v", err)
	}
	w.others = nil
	if _, err := w.refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]string{"a": "16/16", "b": "16/16"}, w.counts()); diff != "" {
		t.Errorf("once it is free (-want +got):\n%s", diff)
	}
}
