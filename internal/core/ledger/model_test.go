package ledger

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// The model is the ledger without any sums: it keeps a flat list of pods and
// recounts everything from it for every answer. TestModel and FuzzLedger drive
// both with the same operations and compare all answers.

var modelSteps = flag.Int("ledger.steps", 0, "steps of TestModel; 0 is a million, or a hundred thousand with -short or -race")

type model struct {
	policy place.Policy
	ttl    time.Duration
	clock  time.Time
	nodes  map[string][]accel.Inventory
	limits map[string][2]int64 // CPU and memory
	pods   []*modelPod
	// charges are by pod UID.
	charges map[string]modelCharge
	// until says when attestations end to count, by node, resource and device.
	until map[modelDevice]time.Time
}

type modelDevice struct {
	node     string
	resource accel.Resource
	id       accel.DeviceID
}

type modelPod struct {
	Holding
	observed bool
	// expected is true until a bind takes over what Expect reserved.
	expected bool
	deadline time.Time
	binds    int
}

type modelCharge struct {
	node string
	left [2]int64
}

// devices are all that the pod holds, the first may be unknown.
func (p *modelPod) devices() []accel.DeviceID { return append([]accel.DeviceID{p.Device}, p.More...) }

// parts divides the pod's units: what cannot be divided goes to the first.
func (p *modelPod) parts() []accel.Units {
	out := make([]accel.Units, len(p.devices()))
	for u := range p.Units {
		out[int(u)%len(out)]++
	}
	return out
}

func (m *model) find(uid string, res accel.Resource) *modelPod {
	for _, p := range m.pods {
		if p.Pod.UID == uid && p.Resource == res {
			return p
		}
	}
	return nil
}

// remove takes pods out, and the charges of those of which nothing is left.
func (m *model) remove(gone func(*modelPod) bool) int {
	before := len(m.pods)
	var uids []string
	m.pods = slices.DeleteFunc(m.pods, func(p *modelPod) bool {
		if !gone(p) {
			return false
		}
		uids = append(uids, p.Pod.UID)
		return true
	})
	for _, uid := range uids {
		if !slices.ContainsFunc(m.pods, func(p *modelPod) bool { return p.Pod.UID == uid }) {
			delete(m.charges, uid)
		}
	}
	return before - len(m.pods)
}

func (m *model) charge(uid, node string, cpu, memory int64) {
	delete(m.charges, uid)
	if cpu > 0 || memory > 0 {
		m.charges[uid] = modelCharge{node, [2]int64{max(cpu, 0), max(memory, 0)}}
	}
}

// left is the CPU and memory of a node that pods other than one leave.
func (m *model) left(node, other string) [2]int64 {
	left, limited := m.limits[node]
	if !limited {
		return [2]int64{place.Unlimited, place.Unlimited}
	}
	for uid, c := range m.charges {
		if c.node == node && uid != other {
			left[0] -= c.left[0]
			left[1] -= c.left[1]
		}
	}
	return left
}

// shares are what the node publishes of the resource.
func (m *model) shares(node string, res accel.Resource) (accel.Inventory, bool) {
	for _, in := range m.nodes[node] {
		if in.Resource == res {
			return in, true
		}
	}
	return accel.Inventory{}, false
}

// publish takes in what a node publishes. An attestation that was published before is not
// newer because something else has changed.
func (m *model) publish(node string, inv []accel.Inventory) {
	for _, in := range inv {
		before, _ := m.shares(node, in.Resource)
		for _, s := range in.Shares {
			if !slices.ContainsFunc(before.Shares, func(b accel.Share) bool { return b.ID == s.ID && b.Isolation == s.Isolation }) {
				from := s.Isolation.Attested
				if from.After(m.clock) {
					from = m.clock
				}
				m.until[modelDevice{node, in.Resource, s.ID}] = from.Add(accel.MaxAttestationAge)
			}
		}
	}
	m.nodes[node] = inv
}

// tier is what counts of the tier that a device states.
func (m *model) tier(node string, res accel.Resource, s *accel.Share) accel.Tier {
	tier := s.Isolation.Memory
	if tier != accel.TierHardware && m.clock.After(m.until[modelDevice{node, res, s.ID}]) {
		return accel.TierNone
	}
	return tier
}

// used is what pods other than one hold of the device.
func (m *model) used(node string, res accel.Resource, id accel.DeviceID, other *modelPod) accel.Units {
	var sum accel.Units
	for _, p := range m.pods {
		if p == other || p.Node != node || p.Resource != res {
			continue
		}
		if p.Device == id && p.More == nil {
			sum += p.Units
			continue
		}
		for i, d := range p.devices() {
			if d == id {
				sum += p.parts()[i]
			}
		}
	}
	return sum
}

func (m *model) observe(o Holding) {
	m.charge(o.Pod.UID, o.Node, o.CPU, o.Memory)
	p := m.find(o.Pod.UID, o.Resource)
	if p == nil {
		p = &modelPod{Holding: o, observed: true}
		m.pods = append(m.pods, p)
		return
	}
	device, more, confirmed := o.Device, o.More, o.Confirmed
	if p.Node == o.Node && (device == "" || p.Confirmed && !confirmed) {
		device, more, confirmed = p.Device, p.More, p.Confirmed
	}
	p.Holding, p.observed, p.expected = o, true, false
	p.Device, p.More, p.Confirmed = device, more, confirmed && device != ""
}

// modelOption is a device that has room.
type modelOption struct {
	accel.Share
	free accel.Units
}

// choice is what a node has for a request.
type modelChoice struct {
	devices []accel.DeviceID
	code    accel.ReasonCode
	rating  int64
	// largest is the most that any one healthy device has free.
	largest accel.Units
	// stated are the tiers of the devices that the selection allows otherwise, if none meets
	// what it requires.
	stated accel.TierSet
}

// order is 1 where the least free amount is best, -1 where the largest is.
func (m *model) order(req *accel.Request) accel.Units {
	if req.Policy == "spread" || req.Policy == "" && m.policy == place.Spread {
		return -1
	}
	return 1
}

// connected is the score of some devices, as the driver's inventories have it:
// pairs are on one NUMA node, and with the resource's links a and d have a lane.
func connected(in accel.Inventory, of []modelOption) int64 {
	var sum int64
	for i, a := range of {
		for _, b := range of[:i] {
			switch {
			case len(in.Links) == 0 && a.NUMANode == b.NUMANode:
				sum += accel.LinkNode
			case len(in.Links) == 0:
				sum += accel.LinkSystem
			case slices.ContainsFunc(in.Links, func(l accel.Link) bool { return l.A == min(a.ID, b.ID) && l.B == max(a.ID, b.ID) }):
				sum += accel.LinkLane
			}
		}
	}
	return sum
}

// choose is what a pod gets on a node, other being what it has already.
func (m *model) choose(node string, req *accel.Request, other *modelPod, uid string) modelChoice {
	in, known := m.shares(node, req.Resource)
	devices := max(req.Devices, 1)
	units := req.Peak() / accel.Units(devices)
	if req.Peak() <= 0 {
		devices = 0
	}
	if !known {
		if devices == 0 {
			return modelChoice{}
		}
		return modelChoice{code: accel.NodeUnknown, rating: place.NoRating}
	}
	c := modelChoice{rating: place.NoRating}
	var options []modelOption
	allowed, large, stated := 0, 0, accel.TierSet(0)
	for _, s := range in.Shares {
		free := s.Units - s.Withheld - m.used(node, req.Resource, s.ID, other)
		if !s.Health.Unhealthy {
			c.largest = max(c.largest, free)
		}
		if r := req.Selection; r != nil && (slices.Contains(r.AvoidIDs, string(s.ID)) || len(r.UseModels) > 0 &&
			s.Model != r.UseModels[0]) {
			continue
		}
		if tier := m.tier(node, req.Resource, &s); req.Selection != nil && !tier.Meets(req.Selection.Isolation) {
			stated.Add(tier)
			continue
		}
		allowed++
		if s.Units >= units {
			large++
		}
		if !s.Health.Unhealthy && free >= units {
			options = append(options, modelOption{s, free})
		}
	}
	left := m.left(node, uid)
	enough := (req.CPU <= 0 || req.CPU <= left[0]) && (req.Memory <= 0 || req.Memory <= left[1])
	switch {
	case devices == 0 && enough:
		c.rating = 0
		return c
	case devices == 0:
		c.code = accel.NoCapacity
	case allowed == 0 && stated != 0:
		c.code, c.stated = accel.NotIsolated, stated
	case allowed == 0 && len(in.Shares) > 0:
		c.code = accel.NotSelected
	case large == 0:
		c.code = accel.LargerThanDevice
	case large < devices:
		c.code = accel.TooFewDevices
	case len(options) < devices:
		c.code = accel.NoDeviceFits
	case !enough:
		c.code = accel.NoCapacity
	}
	if c.code != accel.Fits {
		return c
	}
	order := m.order(req)
	slices.SortFunc(options, func(a, b modelOption) int {
		return cmp.Or(cmp.Compare(order*a.free, order*b.free), cmp.Compare(a.Index, b.Index))
	})
	best := bestSet(in, options, devices)
	slices.SortFunc(best, func(a, b modelOption) int {
		return cmp.Compare(slices.IndexFunc(in.Shares, func(s accel.Share) bool { return s.ID == a.ID }),
			slices.IndexFunc(in.Shares, func(s accel.Share) bool { return s.ID == b.ID }))
	})
	c.rating = connected(in, best) << 41
	for _, o := range best {
		c.devices = append(c.devices, o.ID)
		c.rating -= int64(order * (o.free - units))
	}
	return c
}

// bestSet tries all sets, those of the best devices first: the best connected
// one is taken, and of those the one that leaves the others connected best.
func bestSet(in accel.Inventory, options []modelOption, size int) []modelOption {
	if size == 1 {
		return options[:1:1]
	}
	var best []modelOption
	var bestScore, bestRest int64
	for set := range uint(1) << len(options) {
		// The first of options have the highest bits, and sets come in
		// descending order.
		set = 1<<len(options) - 1 - set
		if bits.OnesCount(set) != size {
			continue
		}
		var in1, rest []modelOption
		for i, o := range options {
			if set>>(len(options)-1-i)&1 == 1 {
				in1 = append(in1, o)
			} else {
				rest = append(rest, o)
			}
		}
		if score, left := connected(in, in1), connected(in, rest); best == nil || score > bestScore || score == bestScore &&
			left > bestRest {
			best, bestScore, bestRest = in1, score, left
		}
	}
	return best
}

// reserve returns the pod, or the kind of the error and for ErrNoFit why and the
// most that was free.
func (m *model) reserve(uid, node string, req *accel.Request) (*modelPod, modelChoice, error) {
	need, devices := req.Peak(), max(req.Devices, 1)
	switch {
	case need <= 0:
		return nil, modelChoice{}, ErrNothingAsked
	case need%accel.Units(devices) != 0:
		return nil, modelChoice{}, ErrIndivisible
	}
	p := m.find(uid, req.Resource)
	_, known := m.shares(node, req.Resource)
	if p != nil && p.expected && !m.keeps(p, node, req) {
		m.remove(func(q *modelPod) bool { return q == p })
		p = nil
	}
	if p != nil {
		located, serves := m.serves(p, req)
		switch {
		case p.Node != node, p.observed && !located:
			return nil, modelChoice{}, ErrHeldElsewhere
		case p.observed:
			return p, modelChoice{}, nil
		case serves:
			p.binds++
			p.expected = false
			p.deadline = m.clock.Add(m.ttl)
			return p, modelChoice{}, nil
		}
	}
	if !known {
		return nil, modelChoice{}, ErrNodeUnknown
	}
	c := m.choose(node, req, p, uid)
	if c.code != accel.Fits {
		return nil, c, accel.ErrNoFit
	}
	if p == nil {
		p = &modelPod{Holding: Holding{Pod: pod(uid), Node: node, Resource: req.Resource}}
		m.pods = append(m.pods, p)
	}
	p.Device, p.More, p.Units = c.devices[0], nil, need
	if devices > 1 {
		p.More = c.devices[1:]
	}
	m.charge(uid, node, req.CPU, req.Memory)
	p.binds++
	p.deadline = m.clock.Add(m.ttl)
	return p, modelChoice{}, nil
}

// serves reports whether all devices of a pod are known on its node, and whether they
// are what the request needs.
func (m *model) serves(p *modelPod, req *accel.Request) (located, serves bool) {
	in, _ := m.shares(p.Node, p.Resource)
	located, serves = true, p.Units == req.Peak() && len(p.devices()) == max(req.Devices, 1)
	for _, d := range p.devices() {
		at := slices.IndexFunc(in.Shares, func(s accel.Share) bool { return s.ID == d })
		if at < 0 {
			return false, false
		}
		s := &in.Shares[at]
		serves = serves && !s.Health.Unhealthy && req.Selection.Allows(s.ID, s.Model, m.tier(p.Node, p.Resource, s))
	}
	return located, serves
}

// keeps reports whether what is expected of a pod is still there for it.
func (m *model) keeps(p *modelPod, node string, req *accel.Request) bool {
	if _, serves := m.serves(p, req); p.Node != node || !serves {
		return false
	}
	in, _ := m.shares(node, p.Resource)
	for _, s := range in.Shares {
		if slices.Contains(p.devices(), s.ID) && m.used(node, p.Resource, s.ID, nil) > s.Units-s.Withheld {
			return false
		}
	}
	return true
}

func (m *model) expect(uid, node string, req *accel.Request) bool {
	if n := accel.Units(max(req.Devices, 1)); req.Peak() <= 0 || req.Peak()%n != 0 {
		return false
	}
	p := m.find(uid, req.Resource)
	if p != nil && !p.expected {
		return p.Node == node
	}
	if p != nil && !m.keeps(p, node, req) {
		m.remove(func(q *modelPod) bool { return q == p })
		p = nil
	}
	if p == nil {
		c := m.choose(node, req, nil, uid)
		if c.code != accel.Fits {
			return false
		}
		p = &modelPod{Holding: Holding{Pod: pod(uid), Node: node, Resource: req.Resource, Device: c.devices[0], Units: req.Peak()}}
		if len(c.devices) > 1 {
			p.More = c.devices[1:]
		}
		m.pods = append(m.pods, p)
		m.charge(uid, node, req.CPU, req.Memory)
	}
	p.expected, p.deadline = true, m.clock.Add(modelBindDelay)
	return true
}

func (m *model) undo(p *modelPod) {
	if p.observed || !slices.Contains(m.pods, p) {
		return
	}
	if p.binds--; p.binds == 0 {
		m.remove(func(q *modelPod) bool { return q == p })
	}
}

func (m *model) verdict(node string, req *accel.Request) Verdict {
	if n := accel.Units(max(req.Devices, 1)); req.Peak() > 0 && req.Peak()%n != 0 {
		return Verdict{Code: accel.Unservable, Rating: place.NoRating}
	}
	p := m.find(req.Pod, req.Resource)
	if p == nil || p.observed || p.Node != node {
		c := m.choose(node, req, nil, "")
		return Verdict{Code: c.code, Rating: c.rating, Stated: c.stated}
	}
	c := m.choose(node, req, p, req.Pod)
	return Verdict{Code: c.code, Rating: c.rating, Stated: c.stated}
}

func (m *model) usage(res accel.Resource) []NodeUsage {
	out := []NodeUsage{}
	for node := range m.nodes {
		in, known := m.shares(node, res)
		if !known {
			continue
		}
		u := NodeUsage{Name: node, Unit: in.Unit, Devices: []DeviceUsage{}}
		for _, s := range in.Shares {
			u.Total += s.Units
			if m.tier(node, res, &s) != s.Isolation.Memory {
				s.Isolation = accel.Isolation{}
			}
			u.Devices = append(u.Devices, DeviceUsage{Share: s, Used: m.used(node, res, s.ID, nil)})
		}
		for _, p := range m.pods {
			if p.Node != node || p.Resource != res {
				continue
			}
			u.Used += p.Units
			for i, id := range p.devices() {
				shown := PodUsage{Pod: p.Pod, Units: p.parts()[i], Created: p.Created, Confirmed: p.Confirmed, Gone: p.Gone, Device: id}
				at := slices.IndexFunc(u.Devices, func(d DeviceUsage) bool { return d.ID == id })
				if at < 0 {
					u.Unplaced = append(u.Unplaced, shown)
				} else {
					u.Devices[at].Pods = append(u.Devices[at].Pods, shown)
				}
			}
		}
		// All pods of this test are of one age and namespace.
		byName := func(a, b PodUsage) int {
			return cmp.Or(cmp.Compare(a.Pod.Name, b.Pod.Name), cmp.Compare(a.Device, b.Device))
		}
		for i := range u.Devices {
			d := &u.Devices[i]
			slices.SortFunc(d.Pods, byName)
			for d.Used > d.Units {
				last := -1
				for k, p := range d.Pods {
					if p.Gone || !p.Confirmed && (last < 0 || !d.Pods[last].Gone) {
						last = k
					}
				}
				if last < 0 {
					break
				}
				u.Unplaced = append(u.Unplaced, d.Pods[last])
				d.Used -= d.Pods[last].Units
				d.Pods = slices.Delete(d.Pods, last, last+1)
			}
		}
		slices.SortFunc(u.Unplaced, byName)
		out = append(out, u)
	}
	slices.SortFunc(out, func(a, b NodeUsage) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// driver plays random operations on a ledger and its model.
type driver struct {
	*world
	m    *model
	next func(n int) int // a number below n
	// undos are those not called yet, and some that were: they may be called
	// at any time, and more than once.
	undos []modelUndo
	count map[string]int // how often what happened
}

type modelUndo struct {
	fn   func()
	p    *modelPod // nil where there is nothing to undo
	done *bool
}

var (
	modelResources = []accel.Resource{gcu, "example.com/chips"}
	modelNodes     = []string{"n0", "n1", "n2", "n3", "n4"}
	modelDevices   = []accel.DeviceID{"", "a", "b", "c", "d", "e"}
	modelModels    = []string{"S60", "S90"}
	modelTiers     = []accel.Tier{accel.TierNone, accel.TierCooperative, accel.TierDriver, accel.TierHardware}
)

const (
	modelPods      = 28
	modelBindDelay = 5 * time.Minute
)

func newDriver(t testing.TB, policy place.Policy, next func(int) int) *driver {
	t.Helper()
	w := newWorld(t, Options{Policy: policy, ReservationTTL: time.Minute, MaxBindDelay: modelBindDelay})
	return &driver{
		world: w, next: next, count: make(map[string]int),
		m: &model{
			policy: policy, ttl: time.Minute, clock: w.clock,
			nodes: make(map[string][]accel.Inventory), limits: make(map[string][2]int64), charges: make(map[string]modelCharge),
			until: make(map[modelDevice]time.Time),
		},
	}
}

func pickOf[T any](d *driver, of []T) T { return of[d.next(len(of))] }

// request asks for up to three devices, now and then for some of them only.
func (d *driver) request(res accel.Resource) accel.Request {
	req := asks(accel.Units(d.next(20) - 1))
	req.Resource = res
	switch d.next(8) {
	case 0:
		req.Devices = 2
	case 1:
		req.Devices = 3
	case 2:
		req.Devices = 1
	}
	switch d.next(12) {
	case 0:
		req.Selection = &accel.Selection{AvoidIDs: []string{string(pickOf(d, modelDevices[1:]))}}
	case 1:
		req.Selection = &accel.Selection{UseModels: []string{pickOf(d, modelModels)}}
	case 2, 3:
		req.Selection = &accel.Selection{Isolation: pickOf(d, modelTiers[1:])}
	case 4:
		req.Selection = &accel.Selection{AvoidIDs: []string{string(pickOf(d, modelDevices[1:]))}, Isolation: pickOf(d, modelTiers[1:])}
	}
	if d.next(3) == 0 {
		req.CPU, req.Memory = int64(d.next(6)-1), int64(d.next(4))
	}
	if d.next(4) == 0 {
		req.Policy = pickOf(d, []string{"binpack", "spread"})
	}
	return req
}

func (d *driver) step() {
	res := modelResources[d.next(4)/3]
	node := pickOf(d, modelNodes)
	uid := fmt.Sprintf("p%02d", d.next(modelPods))
	switch op := d.next(40); {
	case op < 11:
		d.reserve(uid, node, d.request(res))
	case op < 16 && len(d.undos) > 0:
		i := d.next(len(d.undos))
		u := d.undos[i]
		u.fn()
		if u.p != nil && !*u.done {
			d.m.undo(u.p)
			*u.done = true
			d.count["undo"]++
		}
		if len(d.undos) > 20 {
			d.undos = slices.Delete(d.undos, i, i+1)
		}
	case op < 21: // the watch shows what was reserved
		if p := d.m.find(uid, res); p != nil {
			o := p.Holding
			o.CPU, o.Memory = d.m.charges[uid].left[0], d.m.charges[uid].left[1]
			switch d.next(4) {
			case 0:
				o.Device, o.More = "", nil
			case 1:
				o.Device = pickOf(d, modelDevices)
			}
			o.Confirmed = d.next(2) == 0
			d.observe(o)
		}
	case op < 23: // the watch shows anything
		o := Holding{
			Pod: pod(uid), Node: node, Resource: res, Units: accel.Units(1 + d.next(18)),
			Device: pickOf(d, modelDevices), Confirmed: d.next(2) == 0, CPU: int64(d.next(4)),
		}
		if d.next(3) == 0 {
			o.More = []accel.DeviceID{pickOf(d, modelDevices[1:])}
		}
		d.observe(o)
	case op < 27:
		d.Forget(uid)
		d.count["forgotten"] += d.m.remove(func(p *modelPod) bool { return p.Pod.UID == uid })
		delete(d.m.charges, uid)
	case op == 27:
		d.clock = d.clock.Add(time.Duration(d.next(40)) * time.Second)
		d.m.clock = d.clock
		got := d.Expire()
		want := d.m.remove(func(p *modelPod) bool { return !p.observed && !d.clock.Before(p.deadline) })
		if got != want {
			d.t.Fatalf("Expire = %d, model %d", got, want)
		}
		d.count["expired"] += got
	case op < 31:
		d.setNode(node)
	case op == 31:
		d.DeleteNode(node)
		delete(d.m.nodes, node)
		delete(d.m.limits, node)
	case op == 32:
		cpu, memory := int64(d.next(20)), int64(d.next(12))
		d.SetCapacity(node, cpu, memory)
		d.m.limits[node] = [2]int64{cpu, memory}
	case op == 33, op == 38:
		if p := d.m.find(uid, res); p != nil && d.next(2) == 0 {
			node = p.Node // what is asked again
		}
		req := d.request(res)
		got, want := d.Expect(Expected{Pod: pod(uid), Request: req}, node), d.m.expect(uid, node, &req)
		d.Unbound(uid, "", Attempt{})
		if got != want {
			d.t.Fatalf("Expect %+v on %s for %s = %t, model %t", req, node, uid, got, want)
		}
		if got {
			d.count["expected"]++
		}
	case op == 34: // a bind of what is expected
		if i := slices.IndexFunc(d.m.pods, func(p *modelPod) bool { return p.expected }); i >= 0 {
			p := d.m.pods[i]
			req := asks(p.Units)
			req.Resource, req.Devices = p.Resource, len(p.devices())
			d.reserve(p.Pod.UID, p.Node, req)
			d.count["expected and reserved"]++
		}
	case op == 35:
		uid = d.among(uid, func(p *modelPod) bool { return p.expected })
		if d.Withdraw(uid) {
			d.count["withdrawn"]++
		}
		d.m.remove(func(p *modelPod) bool { return p.Pod.UID == uid && p.expected })
	case op == 36:
		uid = d.among(uid, func(p *modelPod) bool { return !p.observed && !p.expected })
		age := time.Duration(d.next(60)) * time.Second
		released := d.Release(uid, age)
		n := d.m.remove(func(p *modelPod) bool {
			return p.Pod.UID == uid && !p.observed && !p.expected && d.clock.Sub(p.deadline.Add(-d.m.ttl)) >= age
		})
		if released != (n > 0) {
			d.t.Fatalf("Release %s after %s = %t, model %d", uid, age, released, n)
		}
		d.count["released"] += n
	default: // a pod that asks for no device
		uid = "x" + uid
		cpu, memory := int64(d.next(5)), int64(d.next(3))
		d.Charge(uid, node, cpu, memory)
		d.m.charge(uid, node, cpu, memory)
	}
}

// among is the pod, or now and then one of those of that kind.
func (d *driver) among(uid string, of func(*modelPod) bool) string {
	if i := slices.IndexFunc(d.m.pods, of); i >= 0 && d.next(4) > 0 {
		return d.m.pods[i].Pod.UID
	}
	return uid
}

func (d *driver) observe(o Holding) {
	if p := d.m.find(o.Pod.UID, o.Resource); p != nil && !p.observed {
		d.count["confirmed"]++
	}
	d.Observe(o)
	if o.Device == "" {
		o.More, o.Confirmed = nil, false
	}
	d.m.observe(o)
}

func (d *driver) reserve(uid, node string, req accel.Request) {
	held := d.m.find(uid, req.Resource) != nil
	g, undo, err := d.Reserve(pod(uid), time.Time{}, node, req)
	p, c, wantErr := d.m.reserve(uid, node, &req)
	if (err == nil) != (wantErr == nil) || !errors.Is(err, wantErr) {
		d.t.Fatalf("Reserve %+v on %s for %s: error %v, model %v", req, node, uid, err, wantErr)
	}
	if nf := (*accel.NoFitError)(nil); errors.As(err, &nf) && (nf.Largest != c.largest || nf.Code != c.code || nf.Stated != c.stated) {
		d.t.Fatalf("Reserve %+v: %v, code %d; model has %d free at most, code %d", req, err, nf.Code, c.largest, c.code)
	}
	if err == nil {
		devices := []accel.DeviceID{g.Device}
		for _, more := range g.More {
			devices = append(devices, more.Device)
		}
		if !slices.Equal(devices, p.devices()) || g.Node != node || g.Units != p.Units || g.Confirmed != p.Confirmed ||
			g.Resource != req.Resource {
			d.t.Fatalf("Reserve = %+v, model %+v", g, p)
		}
		d.count["granted"]++
		if len(devices) > 1 {
			d.count["granted several"]++
		}
		if !held {
			d.unwithheld(p, req)
			d.isolated(p, req)
		}
	} else {
		d.count["refused"]++
	}
	u := modelUndo{fn: undo, done: new(bool)}
	if err == nil && !p.observed {
		u.p = p
	}
	d.undos = append(d.undos, u)
}

// unwithheld checks that a pod that was just placed left its devices what they withhold.
func (d *driver) unwithheld(p *modelPod, req accel.Request) {
	in, _ := d.m.shares(p.Node, req.Resource)
	for _, s := range in.Shares {
		if !slices.Contains(p.devices(), s.ID) {
			continue
		}
		if used := d.m.used(p.Node, req.Resource, s.ID, nil); used > s.Units-s.Withheld {
			d.t.Fatalf("Reserve %+v on %s: %d units of device %s are used, which has %d and withholds %d", req, p.Node, used, s.ID, s.Units,
				s.Withheld)
		}
		if s.Withheld > 0 {
			d.count["granted beside withheld"]++
		}
	}
}

// isolated checks that a pod that was just placed is on devices that have the tier that it
// requires, by an attestation that is young enough.
func (d *driver) isolated(p *modelPod, req accel.Request) {
	if req.Selection == nil || req.Selection.Isolation == accel.TierNone {
		return
	}
	in, _ := d.m.shares(p.Node, req.Resource)
	for _, s := range in.Shares {
		if !slices.Contains(p.devices(), s.ID) {
			continue
		}
		stated := s.Isolation.Memory
		if stated != accel.TierHardware && d.clock.Sub(s.Isolation.Attested) > accel.MaxAttestationAge {
			stated = accel.TierNone
		}
		if !stated.Meets(req.Selection.Isolation) {
			d.t.Fatalf("Reserve %+v on %s: device %s is at tier %v at %v", req, p.Node, s.ID, s.Isolation, d.clock)
		}
		d.count["granted isolated"]++
	}
}

// isolation is one of any tier, attested a while ago, or in the future by a clock that is
// ahead.
func (d *driver) isolation() accel.Isolation {
	i := accel.Isolation{Memory: pickOf(d, modelTiers)}
	if i.Memory == accel.TierCooperative || i.Memory == accel.TierDriver {
		i.Attested = d.clock.Add(time.Duration(10-d.next(80)) * time.Second)
	}
	return i
}

// setNode changes one thing about a node, or publishes it anew.
func (d *driver) setNode(node string) {
	inv := slices.Clone(d.m.nodes[node])
	if len(inv) > 0 && d.next(3) > 0 {
		i := d.next(len(inv))
		inv[i].Shares = slices.Clone(inv[i].Shares)
		if n := len(inv[i].Shares); n > 0 {
			at := d.next(n)
			s := &inv[i].Shares[at]
			switch d.next(8) {
			case 5:
				s.Isolation = d.isolation()
			case 6:
				if !s.Isolation.Attested.IsZero() {
					s.Isolation.Attested = d.clock.Truncate(time.Second)
				}
			case 0:
				s.Health.Unhealthy = !s.Health.Unhealthy
			case 1:
				s.Units = accel.Units(d.next(18))
				s.Withheld = min(s.Withheld, s.Units)
			case 2:
				s.Withheld = accel.Units(d.next(int(s.Units) + 1))
			case 3:
				s.Withheld = 0
			case 4:
				inv[i].Shares = slices.Delete(inv[i].Shares, at, at+1)
			}
		}
	} else {
		inv = nil
		for _, res := range modelResources[:1+d.next(2)] {
			in := accel.Inventory{Resource: res, Unit: "1", Shares: []accel.Share{}}
			for i, id := range modelDevices[1 : 2+d.next(len(modelDevices)-1)] {
				in.Shares = append(in.Shares, accel.Share{
					Units: accel.Units(8 + d.next(10)), Withheld: accel.Units(max(d.next(8)-4, 0)),
					Device:    accel.Device{Index: i, ID: id, Model: pickOf(d, modelModels), NUMANode: i / 2},
					Isolation: d.isolation(),
				})
			}
			if d.next(3) == 0 {
				in.Links = []accel.Link{{A: "a", B: "d", Score: accel.LinkLane}}
			}
			inv = append(inv, in)
		}
	}
	d.m.publish(node, inv)
	d.SetNode(node, inv)
}

// compareVerdicts asks both for one request on all nodes.
func (d *driver) compareVerdicts() {
	req := d.request(pickOf(d, modelResources))
	if d.next(2) == 0 {
		req.Pod = fmt.Sprintf("p%02d", d.next(modelPods))
	}
	var out [5]Verdict
	d.Check(req, modelNodes, out[:])
	for i, node := range modelNodes {
		want := d.m.verdict(node, &req)
		if out[i] != want {
			d.t.Fatalf("Check of %+v on %s = %+v, model %+v", req, node, out[i], want)
		}
		d.count[codeNames[want.Code]]++
	}
	// Fits says the same without ratings, and leaves no trace.
	remembered := len(d.ratings.byAsk)
	d.Fits(req, modelNodes, out[:])
	for i, node := range modelNodes {
		want := d.m.verdict(node, &req)
		if want.Code == accel.Fits {
			want.Rating = 0
		}
		if out[i] != want {
			d.t.Fatalf("Fits of %+v on %s = %+v, model %+v", req, node, out[i], want)
		}
	}
	if len(d.ratings.byAsk) != remembered {
		d.t.Fatalf("Fits of %+v is remembered", req)
	}
}

var codeNames = map[accel.ReasonCode]string{
	accel.Fits: "fits", accel.NodeUnknown: "node unknown", accel.NoDeviceFits: "no device fits",
	accel.LargerThanDevice: "larger than device",
	accel.TooFewDevices:    "too few devices", accel.NotSelected: "not selected", accel.NoCapacity: "no capacity",
	accel.NotIsolated: "not isolated",
	accel.Unservable:  "unservable",
}

// compareBooks compares everything.
func (d *driver) compareBooks() {
	d.check()
	for _, res := range modelResources {
		if got, want := slices.AppendSeq([]NodeUsage{}, d.Nodes(res)), d.m.usage(res); !reflect.DeepEqual(got, want) {
			d.t.Fatalf("books of %s\n got %+v\nwant %+v", res, got, want)
		}
	}
}

func TestModel(t *testing.T) {
	steps := *modelSteps
	if steps == 0 {
		steps = 1_000_000
		if testing.Short() || raceDetector { // it has one goroutine
			steps = 100_000
		}
	}
	for _, policy := range []place.Policy{place.Binpack, place.Spread} {
		t.Run(policy.Name(), func(t *testing.T) {
			d := newDriver(t, policy, rand.New(rand.NewPCG(2, uint64(len(policy.Name())))).IntN)
			for i := range steps / 2 {
				d.step()
				d.compareVerdicts()
				if i%64 == 0 {
					d.compareBooks()
				}
			}
			d.compareBooks()
			t.Logf("%d steps: %v", steps/2, d.count)
			// A test in which nothing happens would pass as well.
			for _, what := range []string{
				"granted", "granted several", "granted beside withheld", "granted isolated", "refused", "undo",
				"confirmed", "forgotten", "expired", "expected",
				"expected and reserved", "withdrawn", "released",
				"fits", "node unknown", "no device fits", "larger than device", "too few devices", "not selected", "not isolated",
				"no capacity",
				"unservable",
			} {
				if d.count[what] < steps/1000 {
					t.Errorf("%q happened %d times only", what, d.count[what])
				}
			}
		})
	}
}

// FuzzLedger looks for a sequence of operations after which the sums that the
// ledger keeps differ from a recount.
func FuzzLedger(f *testing.F) {
	r := rand.New(rand.NewPCG(1, 1))
	for _, size := range []int{0, 40, 200, 800} {
		data := make([]byte, size)
		for i := range data {
			data[i] = byte(r.IntN(256))
		}
		f.Add(data, size == 200)
	}
	f.Fuzz(func(t *testing.T, data []byte, spread bool) {
		policy := place.Binpack
		if spread {
			policy = place.Spread
		}
		d := newDriver(t, policy, func(n int) int {
			if len(data) == 0 {
				return 0
			}
			b := int(data[0])
			data = data[1:]
			return b % n
		})
		for _, node := range modelNodes {
			d.setNode(node)
		}
		for i := 0; i < 200 && len(data) > 0; i++ {
			d.step()
			d.compareVerdicts()
			if i%8 == 0 {
				d.compareBooks()
			}
		}
		d.compareBooks()
	})
}
