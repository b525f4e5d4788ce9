package alloc

import (
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
)

// The model plays a kubelet, an API server, a disk and the hardware around one
// engine, and recounts after every step, from kubelet's records alone, what the
// engine must never get wrong:
//
//   - no id is held by two pods, and no chip is in two uses at a time, nor is one in use
//     as a whole and by a partition of it, be it by pods or by claims;
//   - claims do not hold more of a device than it has;
//   - nothing gets a slot, or its chip in another way, of a pod that was deleted by force and
//     whose containers still run;
//   - what a container holds is on kubelet's list, healthy, and names the same device;
//   - what is certain of a pod's memory is what the pod has;
//   - once all pods have ended, everything that is well can be had again.

var modelSteps = flag.Int("alloc.steps", 0, "steps of TestModel; 0 is 100 000, or 20 000 with -short or -race")

func TestModel(t *testing.T) {
	steps := *modelSteps
	if steps == 0 {
		if steps = 100_000; testing.Short() || raceDetector { // it has one goroutine
			steps = 20_000
		}
	}
	const each = 2_000 // steps of one node's life
	total := tally{}
	for seed := range steps / each {
		m := newModel(uint64(seed))
		for step := range each {
			m.step()
			if m.failure == "" && step%400 == 399 {
				m.allEnds()
			}
			if m.failure != "" {
				t.Fatalf("seed %d, step %d: %s\nthe last steps:\n%s", seed, step, m.failure, strings.Join(m.log[max(0, len(m.log)-60):],
					"\n"))
			}
		}
		for what, n := range m.tally {
			total[what] += n
		}
	}
	t.Logf("%9d steps", steps/each*each)
	for _, what := range slices.Sorted(maps.Keys(total)) {
		t.Logf("%9d %s", total[what], what)
	}
	for _, what := range []string{"containers served", "init containers served", "restarts", "crashes", "states lost", "configurations",
		"strangers", "rejected", "chips cut otherwise", "partitions given", "kubelet restarts", "facts", "chosen by kubelet",
		"times everything was free", "claims held", "claims released", "claims rejected", "claims shared", "claims found again",
		"claims of free devices", "lingering pods", "lingering pods that are stuck"} {
		if total[what] == 0 {
			t.Errorf("the model played no %s", what)
		}
	}
}

type tally map[string]int

// model is the world around the engine.
type model struct {
	rng     *rand.Rand
	now     time.Time
	engine  *Engine
	configs []Config

	// chips is the hardware: all that was ever there; lost chips are not listed.
	chips []accel.Device
	lost  map[accel.DeviceID]bool
	down  error // of the vendor's library
	// cut has the partitions of chips in the mode in which they are cut. They keep
	// their ids, and may have another profile when they come back.
	cut     map[accel.DeviceID][]accel.Device
	parents map[accel.DeviceID]accel.DeviceID

	disk     map[ID][]byte
	full     bool // no file can be written
	lists    map[ID]map[string]bool
	pods     []*modelPod
	watched  []Pod // what the watch has delivered
	serial   int
	serving  *modelPod // the pod that kubelet is in the midst of
	complete bool      // the watch has delivered all pods once since the start
	// recovering is true from the loss of a state until kubelet has listed all pods and
	// the state is saved: what a pool of another configuration gave out is known from
	// the state alone.
	recovering bool
	forgotten  ID // the pool whose state was lost last
	// changes counts the configurations.
	changes int
	// claims are what claims hold in the eyes of kubelet, by UID, and claimsDisk what the
	// disk has of them, nil for nothing. byClaims is true while claims get devices.
	claims     map[string]Claim
	claimsDisk []byte
	byClaims   bool
	// lingering are pods that were deleted by force, that kubelet has forgotten, and whose
	// containers still run, by UID.
	lingering map[string]*modelPod

	failure string
	log     []string
	tally   tally
}

// modelPod is a pod as kubelet and the API server have it.
type modelPod struct {
	Pod
	// stranger is true for one that the API server does not know.
	stranger bool
	// gone is true once the API server has forgotten it.
	gone bool
	// active is true while kubelet counts it; hidden while kubelet does not list it,
	// as it has started and not looked at the pod yet.
	active, hidden bool
	// taken is true once the engine has had a list since the last container was
	// served: that takes less time than a container takes to start.
	taken    bool
	pool     ID
	next     int
	reusable []string
	held     map[string][]string // by container
	uses     []modelUse
	// unasked is true when kubelet chose units by itself, perhaps of several devices.
	unasked bool
	// changes is what the model's was when the pod was created.
	changes int
	// seen is true once the engine has seen kubelet's list with all that the pod has, and the API
	// server's pod, and known once that is saved.
	seen, known bool
}

// modelUse is what one container was given.
type modelUse struct {
	ids   []string
	chips []accel.DeviceID
	// how tells ways of using a chip apart that exclude each other.
	how string
	// device is that of each id.
	device map[string]accel.DeviceID
}

const (
	modelVendor = "nvidia"
	modelMemory = accel.Resource("v.example/memory")
	modelGPU    = accel.Resource("v.example/gpu")
	modelShared = accel.Resource("v.example/shared")
	modelSmall  = accel.Resource("v.example/mig-small")
	modelLarge  = accel.Resource("v.example/mig-large")
)

func newModel(seed uint64) *model {
	m := &model{
		rng: rand.New(rand.NewPCG(seed, 7)), now: time.Unix(1e9, 0),
		cut: map[accel.DeviceID][]accel.Device{}, parents: map[accel.DeviceID]accel.DeviceID{},
		lost: map[accel.DeviceID]bool{}, disk: map[ID][]byte{}, lists: map[ID]map[string]bool{}, tally: tally{},
		claims: map[string]Claim{}, lingering: map[string]*modelPod{},
	}
	for i := range 2 + m.rng.IntN(3) {
		m.chips = append(m.chips, accel.Device{Index: i, ID: accel.DeviceID(fmt.Sprint("d", i)), Model: "M",
			MemoryBytes: int64(4+4*m.rng.IntN(2)) << 30, NUMANode: i % 2})
	}
	if m.rng.IntN(2) == 0 { // a board of two chips
		n := len(m.chips)
		for i := range 2 {
			m.chips = append(m.chips, accel.Device{Index: n + i, ID: accel.DeviceID(fmt.Sprint("b", i)), Model: "B", Board: "b0",
				Chip: i, MemoryBytes: 4 << 30, NUMANode: accel.NoNUMA})
		}
	}
	m.configure()
	m.start(nil)
	return m
}

func (m *model) fail(format string, args ...any) {
	if m.failure == "" {
		m.failure = fmt.Sprintf(format, args...)
	}
}

func (m *model) note(format string, args ...any) { m.log = append(m.log, fmt.Sprintf(format, args...)) }

// configure chooses other resources of the node.
func (m *model) configure() {
	m.configs, m.byClaims = nil, m.rng.IntN(3) > 0
	memory := func(r accel.Resource) {
		unit, _ := sharing.ParseMemoryUnit([]string{"1", "1", "0.1"}[m.rng.IntN(3)])
		m.configs = append(m.configs, Config{ID: ID{r, Memory}, Vendor: modelVendor, Unit: unit})
	}
	slots := func(r accel.Resource, replicas int) {
		c := Config{ID: ID{r, Slots}, Vendor: modelVendor,
			Cut: Cut{SplitBoards: m.rng.IntN(2) == 0, Policy: sharing.SlotPolicy(m.rng.IntN(2))}}
		if replicas > 0 {
			c.Cut.Replicas = func(sharing.Card) int { return replicas }
		}
		m.configs = append(m.configs, c)
	}
	if m.rng.IntN(5) > 0 {
		memory(modelMemory)
	}
	switch m.rng.IntN(4) {
	case 0:
		memory(modelGPU) // the name that is otherwise one of whole devices
	case 1, 2:
		slots(modelGPU, 0)
	}
	if m.rng.IntN(3) > 0 || len(m.configs) == 0 {
		slots(modelShared, 2+m.rng.IntN(3))
	}
	single := m.rng.IntN(3) == 0
	if !single && m.rng.IntN(4) > 0 {
		slots(modelSmall, m.rng.IntN(2)*2)
		slots(modelLarge, 0)
	}
	for i := range m.configs {
		except := -1
		if m.rng.IntN(4) == 0 {
			except = m.rng.IntN(len(m.chips))
		}
		id := m.configs[i].ID
		m.configs[i].Chooses = func(c sharing.Card) bool {
			device, _, _ := accel.SplitIndex(c.Index)
			switch {
			case device == except || c.Partitioned:
				return false
			case id.Resource == modelSmall || id.Resource == modelLarge:
				return c.Profile != "" && "v.example/mig-"+c.Profile == string(id.Resource)
			case c.Profile != "":
				return single && id.Kind == Slots
			}
			return true
		}
	}
}

// start makes an engine, as the daemon does: of what is configured, and of what the
// disk has of other pools. left is what a predecessor remembered, nil after a crash.
func (m *model) start(left map[ID][]byte) {
	all := slices.Clone(m.configs)
	for _, r := range []accel.Resource{modelMemory, modelGPU, modelShared, modelSmall, modelLarge} {
		for _, kind := range []Kind{Memory, Slots} {
			id := ID{r, kind}
			if m.disk[id] != nil && !slices.ContainsFunc(m.configs, func(c Config) bool { return c.ID == id }) {
				all = append(all, Config{ID: id, Vendor: modelVendor, Draining: "it is offered no more"})
			}
		}
	}
	for i := range all {
		if data := m.disk[all[i].ID]; data != nil {
			all[i].State = &State{}
			if err := json.Unmarshal(data, all[i].State); err != nil {
				m.fail("state: %v", err)
				return
			}
			if err := all[i].State.Check(); err != nil {
				m.fail("state of %v: %v", all[i].ID, err)
			}
		}
	}
	for id := range m.lists {
		if !slices.ContainsFunc(all, func(c Config) bool { return c.ID == id }) {
			delete(m.lists, id)
		}
	}
	engine, err := New(all...)
	if err != nil {
		m.fail("start: %v", err)
		return
	}
	m.engine, m.complete = engine, false
	m.startClaims()
	for id, data := range left {
		if engine.pools.find(id) == nil {
			continue
		}
		if err := engine.Recall(id, data); err != nil {
			m.fail("recall %v: %v", id, err)
		}
	}
	for _, c := range all {
		if units := engine.Early(c.ID); units != nil {
			m.list(c.ID, units)
		}
	}
	m.discover()
}

// restart ends the engine and starts another one. Kubelet may be in the midst of a
// pod.
func (m *model) restart(crash, reconfigure bool) {
	var left map[ID][]byte
	if m.full || m.recovering {
		m.forgetPods()
	}
	for _, p := range m.pods {
		p.seen = p.known // what was not saved is lost
	}
	if !crash {
		m.now = m.now.Add(RecordedBefore)
		left = map[ID][]byte{}
		for _, p := range m.engine.pools {
			data, err := json.Marshal(m.engine.Memory(p.config.ID))
			if err != nil {
				m.fail("memory: %v", err)
			}
			left[p.config.ID] = data
		}
		m.tally["restarts"]++
	} else {
		m.now = m.now.Add(3 * time.Second)
		m.tally["crashes"]++
	}
	if reconfigure {
		m.configure()
		m.changes++
		m.tally["configurations"]++
	}
	m.note("restart, crash %t, configuration %v", crash, reconfigure)
	m.start(left)
}

func (m *model) discovery() Discovery {
	if m.down != nil {
		return Discovery{Err: m.down}
	}
	var d Discovery
	for _, c := range m.chips {
		if m.lost[c.ID] {
			if m.rng.IntN(2) == 0 {
				d.Faults = append(d.Faults, Fault{ID: c.ID, Err: errors.New("it fell off the bus")})
			}
			continue
		}
		partitions, partitioned := m.cut[c.ID]
		c.Partitioned = partitioned
		d.Devices = append(append(d.Devices, c), partitions...)
	}
	slices.SortFunc(d.Devices, func(a, b accel.Device) int { return cmp.Compare(a.Index, b.Index) })
	return d
}

// repartition cuts a chip into other partitions, or makes it whole again, also while containers use it.
func (m *model) repartition() {
	c := m.chips[m.rng.IntN(len(m.chips))]
	// While it is being found out what claims hold, what a partition was cut from is known from the device alone.
	if c.Board != "" || m.recovering || !m.engine.Claims.known {
		return
	}
	delete(m.cut, c.ID)
	if m.rng.IntN(3) > 0 {
		m.cut[c.ID] = []accel.Device{}
		for n := range 3 {
			if m.rng.IntN(3) == 0 {
				continue
			}
			p := accel.Device{
				Index: accel.PartitionIndex(c.Index, n), ID: accel.DeviceID(fmt.Sprint(c.ID, "-", n)), Model: c.Model, MemoryBytes: 1 << 30,
				NUMANode: c.NUMANode, Parent: c.ID, Profile: []string{"small", "large"}[m.rng.IntN(2)],
			}
			m.cut[c.ID], m.parents[p.ID] = append(m.cut[c.ID], p), c.ID
		}
	}
	m.tally["chips cut otherwise"]++
	m.note("chip %s is cut into %v", c.ID, m.cut[c.ID])
	m.discover()
}

// discover lets all pools know the hardware.
func (m *model) discover() {
	d := m.discovery()
	m.engine.Claims.Discover(modelVendor, d)
	for _, p := range m.engine.pools {
		m.engine.Discover(p.config.ID, d)
		m.sync(p.config.ID)
	}
}

// sync is what the shell does.
func (m *model) sync(id ID) {
	plan := m.engine.Derive(id, m.now)
	var w Written
	if !plan.Settled {
		w.Unsaved = m.save(id, plan.State, plan.Save)
	}
	if offer := m.engine.Offer(id, w); offer.Changed {
		m.list(id, offer.Units)
	}
	m.engine.Settle(id, nil)
}

func (m *model) save(id ID, s State, wanted bool) error {
	if !wanted {
		return nil
	}
	if m.full {
		m.recovering = true
		return errors.New("the disk is full")
	}
	data, err := json.Marshal(s)
	if err != nil {
		m.fail("state: %v", err)
	}
	m.disk[id] = data
	m.engine.Saved(id, s)
	return nil
}

// list makes kubelet know the units of a pool.
func (m *model) list(id ID, units []Unit) {
	list := make(map[string]bool, len(units))
	for _, u := range units {
		if _, twice := list[u.ID]; twice {
			m.fail("%v: id %q is listed twice", id, u.ID)
		}
		list[u.ID] = !u.Unhealthy
	}
	m.lists[id] = list
}

// healthy returns kubelet's healthy ids of a resource.
func (m *model) healthy(r accel.Resource) map[string]bool {
	out := map[string]bool{}
	for _, kind := range []Kind{Memory, Slots} {
		for id, well := range m.lists[ID{r, kind}] {
			if well {
				out[id] = true
			}
		}
	}
	return out
}

// api are the pods of the API server.
func (m *model) api() []Pod {
	var out []Pod
	for _, p := range m.pods {
		if !p.stranger && !p.gone {
			out = append(out, p.Pod)
		}
	}
	return out
}

func (m *model) deliver() { m.watched, m.complete = m.api(), true }

// listed is kubelet's list.
func (m *model) listed() []Listed {
	var out []Listed
	for _, p := range m.pods {
		if !p.active || p.hidden {
			continue
		}
		one := Listed{PodKey: p.Key()}
		for _, c := range p.Requests[0].Containers {
			if c.Kind != accel.InitContainer {
				one.Containers = append(one.Containers, Holding{c.Name, map[accel.Resource][]string{p.pool.Resource: p.held[c.Name]}})
			}
		}
		out = append(out, one)
	}
	return out
}

func (m *model) take(fresh bool, grace time.Duration) {
	v := View{Listed: m.listed(), Pods: slices.Clone(m.watched), Complete: m.complete, Grace: grace, Now: m.now}
	if fresh {
		v.Pods, v.Complete = m.api(), true
	}
	v.Running = m.running(&v)
	m.engine.Take(v)
	for _, p := range m.pods {
		p.taken = true
		p.seen = p.seen || p.active && !p.hidden && p.next == len(p.Requests[0].Containers) &&
			slices.ContainsFunc(v.Pods, func(shown Pod) bool { return shown.UID == p.UID && !shown.Ended })
	}
}

// running are those that have processes of the pods that have slots which kubelet does not list.
func (m *model) running(v *View) map[string]bool {
	out := map[string]bool{}
	for _, uid := range m.engine.Unlisted(v) {
		runs := slices.ContainsFunc(m.pods, func(p *modelPod) bool { return p.UID == uid && p.active && p.Started })
		if runs || m.lingering[uid] != nil {
			out[uid] = true
		}
	}
	return out
}

// forgetPods is for what of the pods of slots the state file has not.
func (m *model) forgetPods() {
	clear(m.lingering)
	for _, p := range m.pods {
		p.seen, p.known = false, false
	}
}

// turn is a turn of the daemon's loop.
func (m *model) turn() {
	m.take(false, Recorded)
	if len(m.lingering) > 0 && m.serving == nil && m.rng.IntN(4) == 0 { // kubelet takes no such time to record what it was given
		m.now = m.now.Add(StuckAfter)
		m.take(false, Recorded)
	}
	if m.complete && !slices.ContainsFunc(m.pods, func(p *modelPod) bool { return p.hidden }) {
		m.recovering = false
	}
	for _, p := range m.engine.pools {
		m.sync(p.config.ID)
		if m.engine.Status(p.config.ID).Drained {
			delete(m.disk, p.config.ID)
		}
		m.recovering = m.recovering || p.config.ID == m.forgotten && !m.engine.Status(p.config.ID).Known
	}
	for _, p := range m.pods {
		p.known = p.known || p.seen && !m.full
	}
}

// step does something at random.
func (m *model) step() {
	m.now = m.now.Add(time.Duration(m.rng.IntN(120)) * time.Millisecond)
	switch n := m.rng.IntN(116); {
	case n >= 106:
		m.claim()
	case n < 45:
		m.serve()
	case n < 57:
		m.turn()
	case n < 67:
		m.deliver()
	case n < 77:
		m.end()
	case n < 83:
		m.begin()
	case n < 88:
		m.hardware()
	case n < 91:
		m.facts()
	case n < 93:
		m.full = m.rng.IntN(3) == 0 && m.disk != nil
		m.note("disk full %t", m.full)
	case n < 95:
		m.kubeletRestarts()
	case n < 97:
		m.unhide()
	case n == 97:
		m.restart(m.mayCrash() && m.rng.IntN(2) == 0, m.serving == nil && !m.recovering && m.rng.IntN(2) == 0)
	case n == 98:
		m.loseState()
	default:
		m.force()
	}
	for uid, p := range m.lingering {
		if m.rng.IntN(150) == 0 {
			m.note("containers of pod %s exit", p.Name)
			delete(m.lingering, uid)
		}
	}
	for _, p := range m.engine.pools {
		if a, ok := p.held.(*slotAccount); ok {
			for _, h := range a.holds {
				if h.stuck {
					m.tally["lingering pods that are stuck"]++
				}
			}
		}
	}
	m.check()
}

// hidden reports whether some pods hold ids that kubelet does not list.
func (m *model) unlisted(kind Kind) bool {
	return slices.ContainsFunc(m.pods, func(p *modelPod) bool {
		if !p.active || p.pool.Kind != kind {
			return false
		}
		listed := map[string]bool{}
		for _, c := range p.Requests[0].Containers {
			if c.Kind != accel.InitContainer {
				for _, id := range p.held[c.Name] {
					listed[id] = true
				}
			}
		}
		for _, u := range p.uses {
			if slices.ContainsFunc(u.ids, func(id string) bool { return !listed[id] }) {
				return true
			}
		}
		return false
	})
}

// mayCrash is false while an init container has memory that only the daemon knows
// of: then nothing else tells on which device it is.
func (m *model) mayCrash() bool { return !m.unlisted(Memory) && !m.recovering }

// loseState starts without the state of a pool that is configured, as it was when the
// pods got what they have: an id may mean a chip or its board.
func (m *model) loseState() {
	if m.serving != nil || len(m.configs) == 0 || m.recovering || m.unlisted(Memory) || m.unlisted(Slots) ||
		slices.ContainsFunc(m.pods, func(p *modelPod) bool { return p.hidden || p.active && (p.unasked || p.changes != m.changes) }) {
		return
	}
	// Whose a partition was that does not exist any more is known from the state alone.
	there := map[accel.DeviceID]bool{}
	for _, d := range m.discovery().Devices {
		there[d.ID] = true
	}
	for _, p := range m.pods {
		for _, u := range p.uses {
			if p.active && slices.ContainsFunc(u.chips, func(c accel.DeviceID) bool { return m.parents[c] != "" && !there[c] }) {
				return
			}
		}
	}
	// What the pods hold was written into them: their allocations are what is left.
	m.deliver()
	m.facts()
	m.forgetPods()
	id := m.configs[m.rng.IntN(len(m.configs))].ID
	delete(m.disk, id)
	m.tally["states lost"]++
	m.note("the state of %v is lost", id)
	m.deliver()
	m.recovering, m.forgotten = true, id
	for _, p := range m.pods {
		for i := range p.uses {
			if len(p.uses[i].chips) > 1 {
				p.uses[i].device = nil // which of its units are of which device does not matter
			}
		}
	}
	m.restart(true, false)
}

// hardware changes something of the devices.
func (m *model) hardware() {
	c := &m.chips[m.rng.IntN(len(m.chips))]
	switch m.rng.IntN(9) {
	case 6, 7, 8:
		m.repartition()
		return
	case 0:
		m.lost[c.ID] = !m.lost[c.ID]
	case 1, 2:
		c.Health = accel.Health{}
		if m.rng.IntN(2) == 0 {
			c.Health = accel.Health{Unhealthy: true, Reason: "ECC"}
		}
	case 3:
		if m.down = nil; m.rng.IntN(3) == 0 {
			m.down = errors.New("the driver is away")
		}
	default:
		clear(m.lost)
		m.down = nil
	}
	m.note("hardware: %s %+v, lost %v, down %v", c.ID, c.Health, m.lost, m.down)
	m.discover()
}

// kubeletRestarts makes kubelet forget to list pods that run, until it has looked at
// them again.
func (m *model) kubeletRestarts() {
	if m.serving != nil {
		return
	}
	m.deliver()
	for _, p := range m.pods {
		p.hidden = p.active && p.Started && !p.gone && !p.stranger && m.rng.IntN(2) == 0
	}
	m.tally["kubelet restarts"]++
	m.note("kubelet restarts")
}

func (m *model) unhide() {
	for _, p := range m.pods {
		if p.hidden {
			p.hidden = false
			return
		}
	}
}

// begin makes containers of a pod run.
func (m *model) begin() {
	for _, p := range m.pods {
		if p.active && p.taken && p.next == len(p.Requests[0].Containers) && !p.Started {
			p.Started = true
			m.note("pod %s runs", p.Name)
			return
		}
	}
}

// end ends a pod that is not being admitted, or lets the API server forget those that
// have ended.
func (m *model) end() {
	var active []*modelPod
	for _, p := range m.pods {
		if p.active && p != m.serving {
			active = append(active, p)
		}
	}
	if len(active) == 0 || m.rng.IntN(8) == 0 {
		m.pods = slices.DeleteFunc(m.pods, func(p *modelPod) bool { return !p.active && p != m.serving })
		return
	}
	m.ends(active[m.rng.IntN(len(active))])
}

// ends ends a pod: kubelet frees what it has at once.
func (m *model) ends(p *modelPod) {
	m.note("pod %s ends", p.Name)
	if p.gone && p.known && p.pool.Kind == Slots && m.rng.IntN(3) > 0 {
		m.note("containers of pod %s run", p.Name)
		m.lingering[p.UID] = p
		m.tally["lingering pods"]++
	}
	p.active, p.hidden = false, false
	p.Ended, p.Started = true, true
	if m.rng.IntN(2) == 0 {
		p.gone = true
	}
	m.pods = slices.DeleteFunc(m.pods, func(o *modelPod) bool { return !o.active && (o.gone || o.stranger) })
}

// force deletes a pod from the API server while kubelet has it.
func (m *model) force() {
	for _, p := range m.pods {
		inits := hasInits(p.Requests[0])
		if p.active && p != m.serving && !p.stranger && !inits && !p.hidden && m.rng.IntN(3) == 0 {
			p.gone = true
			m.note("pod %s is deleted by force", p.Name)
			return
		}
	}
}

// create makes a pod that kubelet takes up.
func (m *model) create() *modelPod {
	id := m.configs[m.rng.IntN(len(m.configs))].ID
	m.serial++
	p := &modelPod{pool: id, changes: m.changes, active: true, held: map[string][]string{}, stranger: m.rng.IntN(8) == 0}
	p.PodRef = accel.PodRef{UID: fmt.Sprint("u", m.serial), Namespace: "ns", Name: fmt.Sprint("p", m.serial)}
	p.Created = m.now
	r := accel.Request{Resource: id.Resource, Pod: p.UID}
	several := id.Kind == Memory && m.rng.IntN(4) == 0
	amount := func() accel.Units {
		n := 1 + m.rng.IntN(3)
		if id.Kind == Memory && m.engine.Inventory(id).Unit == "0.1" {
			n *= 10
		}
		if several {
			n *= 2
		}
		return accel.Units(n)
	}
	inits := m.rng.IntN(3)
	if p.stranger && id.Kind == Memory {
		inits = 0 // of which only the daemon would know
	}
	for i := range inits {
		kind := accel.InitContainer
		if m.rng.IntN(3) == 0 {
			kind = accel.SidecarContainer
		}
		r.Containers = append(r.Containers, accel.ContainerRequest{Name: fmt.Sprint("i", i), Kind: kind, Units: amount()})
	}
	for i := range 1 + m.rng.IntN(2) {
		r.Containers = append(r.Containers, accel.ContainerRequest{Name: fmt.Sprint("c", i), Kind: accel.AppContainer, Units: amount()})
	}
	if several {
		r.Devices = 2
	}
	p.Requests = []accel.Request{r}
	if id.Kind == Memory && (m.rng.IntN(8) > 0 || inits > 0 || several) {
		p.Planned = m.plan(id, &r)
	}
	if p.stranger {
		m.tally["strangers"]++
	}
	m.pods = append(m.pods, p)
	m.note("pod %s is new: %v %+v, planned %+v, unknown to the API server %t", p.Name, id, r.Containers, p.Planned, p.stranger)
	return p
}

// plan chooses devices as the scheduler would, not always wisely.
func (m *model) plan(id ID, r *accel.Request) *accel.Grant {
	shares := slices.Clone(m.engine.Inventory(id).Shares)
	m.rng.Shuffle(len(shares), func(i, j int) { shares[i], shares[j] = shares[j], shares[i] })
	n := max(1, r.Devices)
	if len(shares) < n {
		return nil
	}
	g := &accel.Grant{Resource: id.Resource, Device: shares[0].ID, Units: r.Peak(), At: m.now}
	for _, s := range shares[1:n] {
		g.More = append(g.More, accel.GrantedDevice{Device: s.ID})
	}
	return g
}

// serve lets kubelet serve the next container of the pod that it admits, or take up
// another pod.
func (m *model) serve() {
	p := m.serving
	if p == nil {
		if len(m.configs) == 0 || len(m.pods) > 12 {
			return
		}
		p = m.create()
		m.serving = p
		if m.rng.IntN(3) > 0 {
			m.deliver()
		}
		return
	}
	c := p.Requests[0].Containers[p.next]
	err := m.admit(p, c)
	if err != nil {
		m.tally["rejected"]++
		m.note("pod %s is rejected: %v", p.Name, err)
		m.serving = nil
		m.ends(p)
		return
	}
	m.tally["containers served"]++
	if c.Kind == accel.InitContainer {
		m.tally["init containers served"]++
	}
	if p.next++; p.next == len(p.Requests[0].Containers) {
		m.serving = nil
	}
}

// admit is kubelet's devicesToAllocate with the shell's questions.
func (m *model) admit(p *modelPod, c accel.ContainerRequest) error {
	size := int(c.Units)
	ids := slices.Clone(p.reusable[:min(size, len(p.reusable))])
	if len(ids) < size {
		var available []string
		taken := m.holders()
		for id := range m.healthy(p.pool.Resource) {
			if taken[p.pool.Resource][id] == nil {
				available = append(available, id)
			}
		}
		slices.Sort(available)
		if len(available) < size-len(ids) {
			return errors.New("kubelet has too few")
		}
		if m.rng.IntN(12) == 0 { // with a topology manager, for example
			m.rng.Shuffle(len(available), func(i, j int) { available[i], available[j] = available[j], available[i] })
			ids = append(ids, available[:size-len(ids)]...)
			m.tally["chosen by kubelet"]++
			p.unasked = p.pool.Kind == Memory
		} else {
			chosen, err := m.prefer(p.pool, append(available, ids...), ids, size)
			if err != nil {
				return err
			}
			for _, id := range chosen {
				if !slices.Contains(available, id) && !slices.Contains(ids, id) {
					m.fail("%v: %q was preferred, and kubelet does not have it", p.pool, id)
				}
			}
			if len(chosen) != size || len(slices.Compact(slices.Sorted(slices.Values(chosen)))) != size {
				m.fail("%v: %d ids were preferred of %d: %v", p.pool, len(chosen), size, chosen)
			}
			ids = chosen
		}
	}
	a, err := m.allocate(p.pool, ids)
	if err != nil {
		return err
	}
	if a.Give(m.now) {
		s, wanted := m.engine.State(p.pool)
		_ = m.save(p.pool, s, wanted)
	}
	m.note("pod %s container %s gets %v on %v", p.Name, c.Name, ids, a.Devices)
	if m.parents[a.Devices[0]] != "" {
		m.tally["partitions given"]++
	}
	p.taken = false
	m.use(p, c, ids, a.Devices)
	return nil
}

// use notes what a container was given.
func (m *model) use(p *modelPod, c accel.ContainerRequest, ids []string, chips []accel.DeviceID) {
	u := modelUse{ids: ids, chips: chips, device: map[string]accel.DeviceID{}, how: string(p.pool.Resource) + " by memory"}
	for _, id := range ids {
		u.device[id], _ = m.engine.DeviceOf(p.pool, id)
	}
	if p.pool.Kind == Slots {
		u.how = string(p.pool.Resource) + " in slices"
		if s, _ := sharing.ParseSlotID(ids[0]); s.Replica == sharing.WholeDevice {
			u.how = "whole " + p.Name
		}
	}
	p.uses = append(p.uses, u)
	p.held[c.Name] = ids
	if c.Kind == accel.InitContainer {
		p.reusable = slices.Compact(slices.Sorted(slices.Values(append(p.reusable, ids...))))
	} else {
		p.reusable = slices.DeleteFunc(p.reusable, func(id string) bool { return slices.Contains(ids, id) })
	}
}

// prefer is the shell's: it asks kubelet and, where that is too little, again.
func (m *model) prefer(id ID, available, must []string, size int) ([]string, error) {
	var last error
	for attempt := range 3 {
		if err := m.engine.Admissible(id, size); err != nil {
			return nil, err
		}
		m.take(attempt > 0, RecordedBefore)
		q := Question{Available: available, Must: must, Size: size, Pods: slices.Clone(m.watched), Now: m.now}
		if m.engine.Late(id, size, q.Pods) {
			q.Pods = m.api()
		}
		answer, err := m.engine.Prefer(id, q)
		if err == nil {
			return answer.IDs, nil
		}
		if last = err; ReasonOf(err) != NoRoom && !InDoubt(err) {
			break
		}
		if attempt == 1 {
			m.now = m.now.Add(RecordedBefore)
		}
	}
	return nil, last
}

// allocate is the shell's.
func (m *model) allocate(id ID, ids []string) (Allocation, error) {
	a, err := m.engine.Allocate(id, ids, slices.Clone(m.watched), false)
	for attempt := range 3 {
		if !InDoubt(err) {
			break
		}
		if attempt == 2 {
			m.now = m.now.Add(RecordedBefore)
		}
		m.take(attempt > 0, RecordedBefore)
		a, err = m.engine.Allocate(id, ids, slices.Clone(m.watched), true)
	}
	return a, err
}

// holders returns the pods that hold ids, by resource and id, by kubelet's records.
func (m *model) holders() map[accel.Resource]map[string]*modelPod {
	out := map[accel.Resource]map[string]*modelPod{}
	for _, p := range m.pods {
		if !p.active {
			continue
		}
		if out[p.pool.Resource] == nil {
			out[p.pool.Resource] = map[string]*modelPod{}
		}
		for _, u := range p.uses {
			for _, id := range u.ids {
				if other := out[p.pool.Resource][id]; other != nil && other != p {
					m.fail("%q of %s is held by %s and %s", id, p.pool.Resource, other.Name, p.Name)
				}
				out[p.pool.Resource][id] = p
			}
		}
	}
	return out
}

// check recounts.
func (m *model) check() {
	holders := m.holders()
	inUse := map[accel.DeviceID]bool{}
	for _, p := range m.pods {
		for _, u := range p.uses {
			for _, chip := range u.chips {
				inUse[chip] = inUse[chip] || p.active
			}
		}
	}
	how := map[accel.DeviceID]string{}
	for _, p := range m.lingering {
		for _, u := range p.uses {
			for _, chip := range u.chips {
				inUse[chip], how[chip] = true, u.how
			}
			for _, id := range u.ids {
				if other := holders[p.pool.Resource][id]; other != nil {
					m.fail("%q of %v is held by pod %s while containers of pod %s run with it", id, p.pool, other.Name, p.Name)
				}
			}
		}
	}
	m.checkClaims(inUse, how)
	for _, p := range m.pods {
		if !p.active {
			continue
		}
		for _, u := range p.uses {
			for _, chip := range u.chips {
				if how[chip] != "" && how[chip] != u.how {
					m.fail("chip %s is used as %s and as %s", chip, how[chip], u.how)
				}
				how[chip] = u.how
			}
			for _, id := range u.ids {
				if list, known := m.lists[p.pool]; known && !list[id] && !(m.recovering && p.pool == m.forgotten) {
					_, there := list[id]
					m.fail("%q of %v is held by pod %s, and on kubelet's list %t and healthy false", id, p.pool, p.Name, there)
				}
				// Before the layout is found again nothing is known of the id.
				if d, known := m.engine.DeviceOf(p.pool, id); known && u.device != nil && d != u.device[id] {
					m.fail("%q of %v was of device %s and is now of %s", id, p.pool, u.device[id], d)
				}
			}
		}
	}
}

// facts compares what is written into the pods with what they have, and writes it.
func (m *model) facts() {
	for _, p := range m.engine.pools {
		c := p.config
		if c.Kind != Memory {
			continue
		}
		m.take(false, Recorded)
		shown := slices.Clone(m.watched)
		for _, f := range m.engine.Facts(c.ID, shown, m.api(), m.now).Pods {
			var got []accel.DeviceID
			for _, d := range f.Devices {
				got = append(got, d.ID)
			}
			slices.Sort(got)
			for _, p := range m.pods {
				if p.UID != shown[f.Pod].UID || !p.active || p.unasked {
					continue
				}
				var want []accel.DeviceID
				for _, u := range p.uses {
					want = union(want, u.chips)
				}
				if !slices.Equal(got, want) {
					m.fail("pod %s is said to have %v and has %v", p.Name, got, want)
					return
				}
				m.tally["facts"]++
				g := &accel.Grant{Resource: c.Resource, Device: want[0], Units: p.Requests[0].Peak(), At: cmp.Or(p.Created, m.now),
					Confirmed: true}
				for _, d := range want[1:] {
					g.More = append(g.More, accel.GrantedDevice{Device: d})
				}
				p.Planned = g
			}
		}
	}
}

// allEnds ends all pods and expects that everything is free afterwards.
func (m *model) allEnds() {
	m.note("all pods end")
	m.serving = nil
	for _, p := range slices.Clone(m.pods) {
		m.ends(p)
	}
	clear(m.lingering)
	m.endClaims()
	clear(m.lost)
	m.down, m.full = nil, false
	for i := range m.chips {
		m.chips[i].Health = accel.Health{}
	}
	m.deliver()
	m.now = m.now.Add(2 * time.Minute)
	m.discover()
	m.facts()
	for range 3 {
		m.turn()
	}
	for _, p := range m.engine.pools {
		status := m.engine.Status(p.config.ID)
		if !status.Idle || p.config.Draining != "" && !status.Drained || p.config.Draining == "" && status.Problem != nil &&
			!status.Absent {
			m.fail("%v is not free: %+v, draining %q, taken %+v", p.config.ID, status, p.config.Draining, p.taken)
		}
	}
	for _, p := range m.engine.pools {
		if p.config.Draining == "" {
			m.expectAll(p.config)
		}
	}
	m.expectClaims()
	m.tally["times everything was free"]++
}

// expectAll expects all units of all devices of a pool on kubelet's list, healthy.
func (m *model) expectAll(c Config) {
	want := 0
	chips := m.discovery().Devices
	cards := sharing.Split(chips)
	if c.Kind == Slots && !c.Cut.SplitBoards {
		cards = sharing.NewBoards(nil).Group(chips)
	}
	for _, card := range cards {
		switch {
		case c.Chooses != nil && !c.Chooses(card):
		case c.Kind == Memory:
			want += int(c.Unit.Units(card.MemoryBytes))
		case c.Cut.Replicas == nil:
			want++
		default:
			want += c.Cut.Replicas(card)
		}
	}
	if want == 0 && m.engine.Status(c.ID).Absent {
		return // nothing is offered, and kubelet may have the list of a process before
	}
	got := 0
	for _, well := range m.lists[c.ID] {
		if well {
			got++
		}
	}
	if got != want {
		m.fail("%v offers %d units while no pod holds any, want %d: %+v", c.ID, got, want, m.engine.Inventory(c.ID).Shares)
	}
}
