package alloc

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
)

var (
	memoryID = ID{"v.example/memory", Memory}
	sharedID = ID{"v.example/shared", Slots}
	start    = time.Unix(1e9, 0)
)

// unit is a memory unit of that many GB.
func unit(t *testing.T, text string) sharing.MemoryUnit {
	t.Helper()
	u, err := sharing.ParseMemoryUnit(text)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// node is an engine with its disk.
type node struct {
	*Engine
	t     *testing.T
	disk  map[ID]State
	full  bool
	lists map[ID]map[string]bool // id to health
	now   time.Time
}

// boot makes an engine of the pools, with what the disk has and the devices d0 and d1
// of four units.
func boot(t *testing.T, before *node, pools ...Config) *node {
	t.Helper()
	n := &node{t: t, disk: map[ID]State{}, lists: map[ID]map[string]bool{}, now: start}
	if before != nil {
		n.disk, n.now, n.full = before.disk, before.now, before.full
	}
	for i := range pools {
		if pools[i].Vendor == "" {
			pools[i].Vendor = "v"
		}
		if s, ok := n.disk[pools[i].ID]; ok {
			pools[i].State = &s
		}
	}
	var err error
	if n.Engine, err = New(pools...); err != nil {
		t.Fatal(err)
	}
	for _, p := range pools {
		n.Discover(p.ID, Discovery{Devices: devices("d0", "d1")})
	}
	n.sync()
	return n
}

func devices(ids ...string) []accel.Device {
	var out []accel.Device
	for i, id := range ids {
		out = append(out, accel.Device{ID: accel.DeviceID(id), Index: i, MemoryBytes: 4 << 30, NUMANode: accel.NoNUMA})
	}
	return out
}

func (n *node) sync() {
	for _, p := range n.pools {
		id := p.config.ID
		plan := n.Derive(id, n.now)
		var w Written
		if plan.Save && n.full {
			w.Unsaved = errors.New("the disk is full")
		} else if plan.Save {
			n.disk[id] = plan.State
			n.Saved(id, plan.State)
		}
		if offer := n.Offer(id, w); offer.Changed {
			n.lists[id] = map[string]bool{}
			for _, u := range offer.Units {
				n.lists[id][u.ID] = !u.Unhealthy
			}
		}
		n.Settle(id, nil)
	}
}

// turn takes kubelet's list and offers what follows.
func (n *node) turn(listed []Listed, pods ...Pod) {
	n.Take(View{Listed: listed, Pods: pods, Complete: true, Grace: Recorded, Now: n.now})
	n.sync()
}

// give makes a container get ids that kubelet has settled on.
func (n *node) give(id ID, ids []string, pods ...Pod) Allocation {
	n.t.Helper()
	a, err := n.Allocate(id, ids, pods, false)
	if err != nil {
		n.t.Fatal(err)
	}
	if a.Give(n.now) && !n.full {
		s, _ := n.State(id)
		n.disk[id] = s
		n.Saved(id, s)
	}
	return a
}

// prefer asks for size ids of all that are healthy.
func (n *node) prefer(id ID, size int, pods ...Pod) []string {
	n.t.Helper()
	var available []string
	for one, well := range n.lists[id] {
		if well {
			available = append(available, one)
		}
	}
	slices.Sort(available)
	p, err := n.Prefer(id, Question{Available: available, Size: size, Pods: pods, Now: n.now})
	if err != nil {
		n.t.Fatal(err)
	}
	return p.IDs
}

// list is the healthy ids of a pool.
func (n *node) list(id ID) string {
	var out []string
	for one, well := range n.lists[id] {
		if well {
			out = append(out, one)
		}
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

// pod requests units by container, those that begin with "i" are plain init
// containers; planned are its devices.
func pod(name string, id ID, planned string, containers ...string) Pod {
	p := Pod{PodRef: accel.PodRef{UID: "u-" + name, Namespace: "ns", Name: name}, Created: start}
	r := accel.Request{Resource: id.Resource}
	for _, c := range containers {
		one := accel.ContainerRequest{Kind: accel.AppContainer}
		if _, err := fmt.Sscanf(c, "%2s=%d", &one.Name, &one.Units); err != nil {
			panic(err)
		}
		if strings.HasPrefix(c, "i") {
			one.Kind = accel.InitContainer
		}
		r.Containers = append(r.Containers, one)
	}
	for i, d := range strings.Fields(planned) {
		if i == 0 {
			p.Planned = &accel.Grant{Resource: id.Resource, Device: accel.DeviceID(d), At: start}
		} else {
			p.Planned.More = append(p.Planned.More, accel.GrantedDevice{Device: accel.DeviceID(d)})
			r.Devices = i + 1
		}
	}
	p.Requests = []accel.Request{r}
	return p
}

// listed is a pod on kubelet's list; held are ids by container.
func listed(p Pod, id ID, held map[string][]string) Listed {
	l := Listed{PodKey: p.Key()}
	for _, c := range slices.Sorted(maps.Keys(held)) {
		l.Containers = append(l.Containers, Holding{c, map[accel.Resource][]string{id.Resource: held[c]}})
	}
	return l
}

// A plain init container has units that kubelet does not list. A change of the
// configuration must not take them from kubelet's list, nor change their size.
func TestUnitsOfInitContainersOutliveAConfiguration(t *testing.T) {
	for name, next := range map[string]Config{
		"the device is taken out": {ID: memoryID, Unit: unit(t, "1"), Chooses: func(c sharing.Card) bool { return c.ID != "d1" }},
		"another unit":            {ID: memoryID, Unit: unit(t, "0.1")},
		"not offered any more":    {ID: memoryID, Draining: "gone"},
	} {
		t.Run(name, func(t *testing.T) {
			n := boot(t, nil, Config{ID: memoryID, Unit: unit(t, "1")})
			p := pod("p", memoryID, "d1", "i0=2", "c0=1")
			active := []Listed{listed(p, memoryID, nil)}
			n.turn(active, p)
			ids := n.prefer(memoryID, 2, p)
			n.give(memoryID, ids, p)
			remembered, err := json.Marshal(n.Memory(memoryID))
			if err != nil {
				t.Fatal(err)
			}
			n.now = n.now.Add(time.Minute) // the init container takes its time
			n = boot(t, n, next)
			if err := n.Recall(memoryID, remembered); err != nil {
				t.Fatal(err)
			}
			n.turn(active, p)
			for _, id := range ids {
				if d, _ := n.DeviceOf(memoryID, id); d != "d1" || !n.lists[memoryID][id] {
					t.Errorf("unit %q is of %q, healthy units are %s", id, d, n.list(memoryID))
				}
			}
		})
	}
}

// Just after its start kubelet lists some pods only. What the others have, perhaps on
// another device than was planned, stays theirs.
func TestNothingIsFreeWhileAPodIsNotListed(t *testing.T) {
	n := boot(t, nil, Config{ID: memoryID, Unit: unit(t, "1")}, Config{ID: sharedID})
	p := pod("p", memoryID, "d0", "c0=2")
	p.Started = true
	n.turn(nil)
	of := map[accel.DeviceID][]string{}
	for id := range n.lists[memoryID] {
		d, _ := n.DeviceOf(memoryID, id)
		of[d] = append(of[d], id)
	}
	holds := []Listed{listed(p, memoryID, map[string][]string{"c0": of["d1"][:2]})}
	n.turn(holds, p)
	if got := n.list(sharedID); got != "d0" {
		t.Fatalf("whole devices are %q, want d0", got)
	}
	n.now = n.now.Add(time.Minute)
	n.turn(nil, p)
	if got := n.list(sharedID); got != "" {
		t.Errorf("whole devices are %q while the pod is not listed", got)
	}
	// A daemon that starts now knows less still.
	n = boot(t, n, Config{ID: memoryID, Unit: unit(t, "1")}, Config{ID: sharedID})
	n.turn(nil, p)
	if _, err := n.Prefer(sharedID, Question{Available: []string{"d0"}, Size: 1}); !InDoubt(err) {
		t.Errorf("a device was preferred: %v", err)
	}
	n.turn(holds, p)
	if got := n.list(sharedID); got != "d0" {
		t.Errorf("whole devices are %q once the pod is listed, want d0", got)
	}
}

// Kubelet dropped the allocation of a pod's first container while it admitted the pod. The
// other container gets the same device, and so does the first one when kubelet requests it again.
func TestForgottenContainerKeepsItsPodTogether(t *testing.T) {
	n := boot(t, nil, Config{ID: memoryID, Unit: unit(t, "1")})
	p, other := pod("p", memoryID, "d0", "c0=1", "c1=2"), pod("other", memoryID, "d0", "c0=1")
	n.turn([]Listed{listed(other, memoryID, nil)}, other)
	beside := listed(other, memoryID, map[string][]string{"c0": n.give(memoryID, n.prefer(memoryID, 1, other), other).IDs})
	other.Started = true // d1 has more room now
	on := func(size int, listed ...Listed) []string {
		t.Helper()
		n.turn(append(listed, beside), p, other)
		a := n.give(memoryID, n.prefer(memoryID, size, p, other), p, other)
		if !slices.Equal(a.Devices, []accel.DeviceID{"d0"}) {
			t.Fatalf("the container of %d units is on %v, want d0", size, a.Devices)
		}
		return a.IDs
	}
	on(1, listed(p, memoryID, nil))
	second := on(2, listed(p, memoryID, nil))
	n.now = n.now.Add(time.Minute) // an image was pulled
	on(1, listed(p, memoryID, map[string][]string{"c1": second}))
}

// Kubelet has just started and admits a pod again that is being deleted. It gets the device that
// its record names, but another pod that waits is not taken for it.
func TestReadmittedPodKeepsItsDevice(t *testing.T) {
	n := boot(t, nil, Config{ID: memoryID, Unit: unit(t, "1")})
	before, held := pod("before", memoryID, "d0", "c0=1"), pod("held", memoryID, "d0", "c0=1")
	n.turn([]Listed{listed(held, memoryID, nil)}, held)
	ids := n.give(memoryID, n.prefer(memoryID, 1, held), held).IDs // d1 has more room now
	before.Planned.Confirmed, before.Started, before.Deleting = true, true, true
	held.Planned.Confirmed, held.Started = true, true
	next := pod("next", memoryID, "d1", "c0=1")
	beside := []Listed{listed(held, memoryID, map[string][]string{"c0": ids}), listed(before, memoryID, nil)}
	for want, one := range map[accel.DeviceID][]Listed{"d0": beside, "d1": append(beside, listed(next, memoryID, nil))} {
		n.turn(one, before, held, next)
		for _, id := range n.prefer(memoryID, 1, before, held, next) {
			if d, _ := n.DeviceOf(memoryID, id); d != want {
				t.Errorf("kubelet's list is %v: unit %q is of %q, want %q", one, id, d, want)
			}
		}
	}
}

// A pod has ended whose init container had the units that another pod's has now. What
// was planned for the one is not the other's.
func TestReuseIsNotOfAPodThatEnded(t *testing.T) {
	for range 20 { // the order of records is random
		n := boot(t, nil, Config{ID: memoryID, Unit: unit(t, "1")})
		gone := pod("gone", memoryID, "d0 d1", "i0=4", "c0=2")
		n.turn([]Listed{listed(gone, memoryID, nil)}, gone)
		n.give(memoryID, n.prefer(memoryID, 4, gone), gone)
		next := pod("next", memoryID, "d0", "i0=2", "c0=2")
		n.turn([]Listed{listed(next, memoryID, nil)}, next)
		ids := n.prefer(memoryID, 2, next)
		n.give(memoryID, ids, next)
		if a := n.give(memoryID, ids, next); !slices.Equal(a.Devices, []accel.DeviceID{"d0"}) {
			t.Fatalf("the container reaches %v, want d0", a.Devices)
		}
	}
}

// Kubelet chose a slot by itself that it had given to the init container of a pod just
// before, which has ended since.
func TestSlotOfKubeletsChoiceIsOfThePodThatIsThere(t *testing.T) {
	n := boot(t, nil, Config{ID: sharedID})
	gone := pod("gone", sharedID, "", "i0=1", "c0=1")
	n.turn([]Listed{listed(gone, sharedID, nil)}, gone)
	ids := n.prefer(sharedID, 1, gone)
	n.give(sharedID, ids, gone)
	next := pod("next", sharedID, "", "i0=1", "c0=1")
	n.give(sharedID, ids, gone) // the watch is late
	for range 2 {
		n.now = n.now.Add(time.Minute)
		n.turn([]Listed{listed(next, sharedID, nil)}, next)
		if c := n.Usage(sharedID).Devices["d0"]; c != 1 {
			t.Fatalf("%d slots of d0 are held, want that of the pod that kubelet admits", c)
		}
	}
	n.turn(nil)
	if !n.Status(sharedID).Idle {
		t.Error("the slot is held after the pod has gone")
	}
}

// Kubelet frees the slots of a pod that is deleted by force at once.
func TestSlotsOfPodsWhoseContainersStillRun(t *testing.T) {
	shared := Config{ID: sharedID, Cut: Cut{Replicas: func(sharing.Card) int { return 2 }}}
	for name, tt := range map[string]struct {
		pool  Config
		p     Pod
		slot  string
		stuck string // what is healthy once the slot is stuck
		why   string // of the device then
	}{
		"whole device": {Config{ID: sharedID}, pod("p", sharedID, "", "c0=1"), "d0", "d1",
			"held by containers of deleted pod ns/p, which have not exited"},
		"time slice": {shared, pod("p", sharedID, "", "c0=1"), "d0::0", "d0::1 d1::0 d1::1", ""},
		"init container": {Config{ID: sharedID}, pod("p", sharedID, "", "i0=1"), "d0", "d1",
			"held by containers of deleted pod ns/p, which have not exited"},
	} {
		t.Run(name, func(t *testing.T) {
			n := boot(t, nil, tt.pool)
			have := []Listed{listed(tt.p, sharedID, map[string][]string{"c0": {tt.slot}})}
			if hasInits(tt.p.Requests[0]) {
				have = []Listed{listed(tt.p, sharedID, nil)} // kubelet lists none of theirs
			}
			n.turn(have, tt.p)
			n.give(sharedID, n.prefer(sharedID, 1, tt.p), tt.p)
			tt.p.Started = true
			n.turn(have, tt.p)

			// It is gone, or is called ended, and its containers run.
			runs := func(pods ...Pod) {
				v := View{Pods: pods, Complete: true, Grace: Recorded, Now: n.now}
				if got := n.Unlisted(&v); !slices.Equal(got, []string{tt.p.UID}) {
					t.Fatalf("it is to be looked for %q, want the pod that kubelet does not list", got)
				}
				v.Running = map[string]bool{tt.p.UID: true}
				n.Take(v)
				n.sync()
			}
			n.now = n.now.Add(2 * Recorded)
			tt.p.Ended = true
			runs(tt.p)
			n = boot(t, n, tt.pool) // the daemon is restarted
			runs()
			if got := n.Lingering("v"); !slices.Equal(got, []string{tt.p.UID}) {
				t.Errorf("%q has slots that kubelet does not list, want the pod", got)
			}
			if _, err := n.Allocate(sharedID, []string{tt.slot}, nil, false); !InDoubt(err) ||
				!strings.Contains(err.Error(), "deleted pod ns/p") {
				t.Errorf("the slot is given out again: %v", err)
			}
			if !n.lists[sharedID][tt.slot] {
				t.Error("the slot is unhealthy at once: a pod that comes next would fail instead of waiting")
			}

			n.now = n.now.Add(StuckAfter)
			runs()
			if got := n.list(sharedID); got != tt.stuck {
				t.Errorf("%q is healthy while the containers are stuck, want %q", got, tt.stuck)
			}
			if got := n.Inventory(sharedID).Shares[0].Health.Reason; got != tt.why {
				t.Errorf("the device is unhealthy for %q, want %q", got, tt.why)
			}

			n.turn(nil)
			if !n.Status(sharedID).Idle || len(n.Lingering("v")) > 0 || !n.lists[sharedID][tt.slot] {
				t.Errorf("the slot is not free when the containers have exited: %+v", n.lists[sharedID])
			}
		})
	}
}

// The init containers of a pod had more slots than its app containers, which have all
// of theirs: kubelet's next question is not for that pod.
func TestAPodThatWasServedDoesNotHideAnother(t *testing.T) {
	n := boot(t, nil, Config{ID: sharedID})
	p := pod("p", sharedID, "", "i0=2", "c0=1")
	static := pod("static", sharedID, "", "i0=1", "c0=0")
	holds := listed(p, sharedID, map[string][]string{"c0": {"d0"}})
	n.turn([]Listed{holds, listed(static, sharedID, nil)}, p)
	n.give(sharedID, n.prefer(sharedID, 1, p), p)
	n.now = n.now.Add(time.Minute)
	n.turn([]Listed{holds, listed(static, sharedID, nil)}, p)
	if n.Usage(sharedID).Devices["d1"] != 1 {
		t.Error("what the init container of a static pod has counts as free")
	}
}

// What a full disk could not keep is told to the successor.
func TestHandoverWithAFullDisk(t *testing.T) {
	n := boot(t, nil, Config{ID: sharedID})
	p := pod("p", sharedID, "", "c0=1")
	n.turn(nil, p)
	n.full = true
	n.give(sharedID, []string{"d1"}, p)
	n.turn([]Listed{listed(p, sharedID, map[string][]string{"c0": {"d1"}})}, p)
	remembered, err := json.Marshal(n.Memory(sharedID))
	if err != nil {
		t.Fatal(err)
	}
	n = boot(t, n, Config{ID: sharedID})
	if err := n.Recall(sharedID, remembered); err != nil {
		t.Fatal(err)
	}
	n.Discover(sharedID, Discovery{Devices: devices("d0")}) // d1 is lost
	n.sync()
	if got := n.list(sharedID); got != "d0 d1" {
		t.Errorf("healthy are %q, want what the container holds as well", got)
	}
}

// A state that was saved before kubelet told what containers hold is not the whole
// truth.
func TestStateOfBeforeKubeletWasAsked(t *testing.T) {
	n := boot(t, nil, Config{ID: sharedID}, Config{ID: memoryID, Unit: unit(t, "1")})
	if !n.disk[sharedID].Partial {
		t.Fatal("the state does not say that it is not complete")
	}
	n = boot(t, n, Config{ID: sharedID}, Config{ID: memoryID, Unit: unit(t, "1")})
	if err := n.Status(sharedID).Problem; !errors.Is(err, ErrNotAsked) {
		t.Errorf("after a restart: %v", err)
	}
	n.turn(nil)
	if n.disk[sharedID].Partial || n.Status(sharedID).Problem != nil {
		t.Errorf("once kubelet was asked: %+v, %v", n.disk[sharedID], n.Status(sharedID).Problem)
	}
}

// Kubelet may take units without a question: a device that another resource has, or may
// have, is not given out, whatever is planned.
func TestAllocateLooksAtOtherResources(t *testing.T) {
	n := boot(t, nil, Config{ID: memoryID, Unit: unit(t, "1")}, Config{ID: sharedID})
	holder := pod("holder", sharedID, "", "c0=1")
	p := pod("p", memoryID, "d1", "i0=1", "c0=1")
	active := listed(p, memoryID, nil)
	n.turn(nil)
	delete(n.disk, sharedID)
	n = boot(t, n, Config{ID: memoryID, Unit: unit(t, "1")}, Config{ID: sharedID})
	if _, err := n.Allocate(memoryID, []string{"4"}, nil, false); !InDoubt(err) {
		t.Errorf("before kubelet was asked what is held of the other: %v", err)
	}
	n.turn([]Listed{active, listed(holder, sharedID, map[string][]string{"c0": {"d1"}})}, p, holder)
	if _, err := n.Allocate(memoryID, []string{"4"}, []Pod{p, holder}, false); ReasonOf(err) != Held {
		t.Errorf("units of a device that is given out as a whole: %v", err)
	}
}

// TestMemoryOfBefore: what a predecessor of the release before remembers is read.
func TestMemoryOfBefore(t *testing.T) {
	n := boot(t, nil, Config{ID: memoryID, Unit: unit(t, "1")}, Config{ID: sharedID})
	units := `{"inits":{"u":{"request":{"Resource":"v.example/memory","Containers":[{"Name":"i","Kind":0,"Units":2},{"Name":"c","Kind":2,` +
		`"Units":2}],` +
		`"Devices":0,"CPU":0,"Memory":0,"Selection":null,"Policy":"","Pod":"u","Priority":0},"next":1,"devices":["d1"],"units":2,` +
		`"ids":{"d1":["4","5"]},"at":"2001-09-09T01:46:40Z"}},"asked":{"stranger":true,"request":{"Resource":"","Containers":null,` +
		`"Devices":0,` +
		`"CPU":0,"Memory":0,"Selection":null,"Policy":"","Pod":"","Priority":0},"container":0,"devices":["d0"],"ids":["1"]},` +
		`"strangers":["ns/static/"],"strangerDevice":"d0","given":{"4":{"device":"d1","at":"2001-09-09T01:46:40Z"}}}`
	slots := `{"admitting":["ns/p/u"],"preferred":["d0"],"given":{"d1":{"chips":["d1"],"inits":["ns/p/u"],"unasked":true,` +
		`"at":"2001-09-09T01:46:40Z"}}}`
	for id, text := range map[ID]string{memoryID: units, sharedID: slots} {
		if err := n.Recall(id, []byte(text)); err != nil {
			t.Fatal(err)
		}
		data, err := json.Marshal(n.Memory(id))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(text, string(data)); diff != "" {
			t.Errorf("%v, told again (-want +got):\n%s", id, diff)
		}
		for _, bad := range []string{"", "[]", `{"asked":{"uid":"u","container":7,"ids":["1"]}}`,
			`{"asked":{"stranger":true,"ids":["1"]}}`} {
			if id == memoryID && n.Recall(id, []byte(bad)) == nil {
				t.Errorf("%s is believed", bad)
			}
		}
	}
}
