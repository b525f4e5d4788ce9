package ledger

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/accel/place"
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
	pods   []*modelPod
}

type modelPod struct {
	Holding
	observed bool
	deadline time.Time
	binds    int
}

func (m *model) find(uid string, res accel.Resource) *modelPod {
	for _, p := range m.pods {
		if p.Pod.UID == uid && p.Resource == res {
			return p
		}
	}
	return nil
}

func (m *model) remove(gone func(*modelPod) bool) int {
	before := len(m.pods)
	m.pods = slices.DeleteFunc(m.pods, gone)
	return before - len(m.pods)
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

// used is what pods other than one hold of the device.
func (m *model) used(node string, res accel.Resource, id accel.DeviceID, other *modelPod) accel.Units {
	var sum accel.Units
	for _, p := range m.pods {
		if p != other && p.Node == node && p.Resource == res && p.Device == id {
			sum += p.Units
		}
	}
	return sum
}

func (m *model) observe(o Holding) {
	p := m.find(o.Pod.UID, o.Resource)
	if p == nil {
		p = &modelPod{Holding: o, observed: true}
		m.pods = append(m.pods, p)
		return
	}
	device, confirmed := o.Device, o.Confirmed
	if p.Node == o.Node && (device == "" || p.Confirmed && !confirmed) {
		device, confirmed = p.Device, p.Confirmed
	}
	p.Holding, p.observed = o, true
	p.Device, p.Confirmed = device, confirmed && device != ""
}

// pick is the device that a pod gets, and the most that any has free.
func (m *model) pick(node string, res accel.Resource, need accel.Units, other *modelPod) (accel.DeviceID, accel.Units) {
	type option struct {
		accel.Share
		free accel.Units
	}
	in, _ := m.shares(node, res)
	var options []option
	var largest accel.Units
	for _, s := range in.Shares {
		free := s.Units - m.used(node, res, s.ID, other)
		if s.Health.Unhealthy {
			continue
		}
		largest = max(largest, free)
		if free >= need {
			options = append(options, option{s, free})
		}
	}
	if len(options) == 0 {
		return "", largest
	}
	slices.SortFunc(options, func(a, b option) int {
		byFree := cmp.Compare(a.free, b.free)
		if m.policy == place.Spread {
			byFree = -byFree
		}
		return cmp.Or(byFree, cmp.Compare(a.Index, b.Index))
	})
	return options[0].ID, largest
}

// reserve returns the device, or the kind of the error and for ErrNoFit the
// most that was free.
func (m *model) reserve(uid, node string, res accel.Resource, need accel.Units) (p *modelPod, largest accel.Units, err error) {
	if need <= 0 {
		return nil, 0, ErrNothingAsked
	}
	p = m.find(uid, res)
	in, known := m.shares(node, res)
	if p != nil {
		at := slices.IndexFunc(in.Shares, func(s accel.Share) bool { return s.ID == p.Device })
		switch {
		case p.Node != node, p.observed && at < 0:
			return nil, 0, ErrHeldElsewhere
		case p.observed:
			return p, 0, nil
		case at >= 0 && !in.Shares[at].Health.Unhealthy && p.Units == need:
			p.binds++
			p.deadline = m.clock.Add(m.ttl)
			return p, 0, nil
		}
	}
	if !known {
		return nil, 0, ErrNodeUnknown
	}
	id, largest := m.pick(node, res, need, p)
	if id == "" {
		return nil, largest, accel.ErrNoFit
	}
	if p == nil {
		p = &modelPod{Holding: Holding{Pod: pod(uid), Node: node, Resource: res}}
		m.pods = append(m.pods, p)
	}
	p.Device, p.Units = id, need
	p.binds++
	p.deadline = m.clock.Add(m.ttl)
	return p, 0, nil
}

func (m *model) undo(p *modelPod) {
	if p.observed || !slices.Contains(m.pods, p) {
		return
	}
	if p.binds--; p.binds == 0 {
		m.remove(func(q *modelPod) bool { return q == p })
	}
}

func (m *model) verdict(node string, res accel.Resource, need accel.Units) Verdict {
	in, known := m.shares(node, res)
	if !known {
		if need <= 0 {
			return Verdict{}
		}
		return Verdict{Code: accel.NodeUnknown, Rating: place.NoRating}
	}
	id, _ := m.pick(node, res, need, nil)
	v := Verdict{}
	if need <= 0 {
		return v
	}
	v.Code, v.Rating = accel.LargerThanDevice, place.NoRating
	for _, s := range in.Shares {
		if s.Units >= need {
			v.Code = accel.NoDeviceFits
		}
	}
	for _, s := range in.Shares {
		if s.ID == id {
			v.Code = accel.Fits
			v.Rating = int64(need - (s.Units - m.used(node, res, id, nil)))
			if m.policy == place.Spread {
				v.Rating = -v.Rating
			}
		}
	}
	return v
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
			u.Devices = append(u.Devices, DeviceUsage{Share: s, Used: m.used(node, res, s.ID, nil)})
		}
		for _, p := range m.pods {
			if p.Node != node || p.Resource != res {
				continue
			}
			u.Used += p.Units
			shown := PodUsage{Pod: p.Pod, Units: p.Units, Created: p.Created, Confirmed: p.Confirmed, Device: p.Device}
			at := slices.IndexFunc(u.Devices, func(d DeviceUsage) bool { return d.ID == p.Device })
			if at < 0 {
				u.Unplaced = append(u.Unplaced, shown)
			} else {
				u.Devices[at].Pods = append(u.Devices[at].Pods, shown)
			}
		}
		// All pods of this test are of one age and namespace.
		byName := func(a, b PodUsage) int { return cmp.Compare(a.Pod.Name, b.Pod.Name) }
		slices.SortFunc(u.Unplaced, byName)
		for i := range u.Devices {
			slices.SortFunc(u.Devices[i].Pods, byName)
		}
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
)

const modelPods = 28

func newDriver(t testing.TB, policy place.Policy, next func(int) int) *driver {
	t.Helper()
	w := newWorld(t, Options{Policy: policy, ReservationTTL: time.Minute})
	return &driver{
		world: w, next: next, count: make(map[string]int),
		m: &model{policy: policy, ttl: time.Minute, clock: w.clock, nodes: make(map[string][]accel.Inventory)},
	}
}

func pickOf[T any](d *driver, of []T) T { return of[d.next(len(of))] }

func (d *driver) step() {
	res := modelResources[d.next(4)/3]
	node := pickOf(d, modelNodes)
	uid := fmt.Sprintf("p%02d", d.next(modelPods))
	switch op := d.next(32); {
	case op < 11:
		d.reserve(uid, node, res, accel.Units(d.next(20)-1))
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
			switch d.next(4) {
			case 0:
				o.Device = ""
			case 1:
				o.Device = pickOf(d, modelDevices)
			}
			o.Confirmed = d.next(2) == 0
			d.observe(o)
		}
	case op < 23: // the watch shows anything
		d.observe(Holding{
			Pod: pod(uid), Node: node, Resource: res, Units: accel.Units(1 + d.next(18)),
			Device: pickOf(d, modelDevices), Confirmed: d.next(2) == 0,
		})
	case op < 27:
		d.Forget(uid)
		d.count["forgotten"] += d.m.remove(func(p *modelPod) bool { return p.Pod.UID == uid })
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
	default:
		d.DeleteNode(node)
		delete(d.m.nodes, node)
	}
}

func (d *driver) observe(o Holding) {
	if p := d.m.find(o.Pod.UID, o.Resource); p != nil && !p.observed {
		d.count["confirmed"]++
	}
	d.Observe(o)
	o.Confirmed = o.Confirmed && o.Device != ""
	d.m.observe(o)
}

func (d *driver) reserve(uid, node string, res accel.Resource, need accel.Units) {
	req := asks(need)
	req.Resource = res
	g, undo, err := d.Reserve(pod(uid), time.Time{}, node, req)
	p, largest, wantErr := d.m.reserve(uid, node, res, need)
	if (err == nil) != (wantErr == nil) || !errors.Is(err, wantErr) {
		d.t.Fatalf("Reserve %d on %s for %s: error %v, model %v", need, node, uid, err, wantErr)
	}
	if nf := (*accel.NoFitError)(nil); errors.As(err, &nf) && nf.Largest != largest {
		d.t.Fatalf("Reserve: %v, model has %d free at most", err, largest)
	}
	if err == nil {
		if g.Device != p.Device || g.Node != node || g.Units != p.Units || g.Confirmed != p.Confirmed || g.Resource != res {
			d.t.Fatalf("Reserve = %+v, model %+v", g, p)
		}
		d.count["granted"]++
	} else {
		d.count["refused"]++
	}
	u := modelUndo{fn: undo, done: new(bool)}
	if err == nil && !p.observed {
		u.p = p
	}
	d.undos = append(d.undos, u)
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
			switch d.next(4) {
			case 0:
				s.Health.Unhealthy = !s.Health.Unhealthy
			case 1:
				s.Units = accel.Units(d.next(18))
			case 2:
				inv[i].Shares = slices.Delete(inv[i].Shares, at, at+1)
			}
		}
	} else {
		inv = nil
		for _, res := range modelResources[:1+d.next(2)] {
			in := accel.Inventory{Resource: res, Unit: "1", Shares: []accel.Share{}}
			for i, id := range modelDevices[1 : 2+d.next(len(modelDevices)-1)] {
				in.Shares = append(in.Shares, accel.Share{Units: accel.Units(8 + d.next(10)), Device: accel.Device{Index: i, ID: id}})
			}
			inv = append(inv, in)
		}
	}
	d.m.nodes[node] = inv
	d.SetNode(node, inv)
}

// compareVerdicts asks both for one request on all nodes.
func (d *driver) compareVerdicts() {
	res, need := pickOf(d, modelResources), accel.Units(d.next(20)-1)
	var out [5]Verdict
	req := asks(need)
	req.Resource = res
	d.Check(req, modelNodes, out[:])
	for i, node := range modelNodes {
		want := d.m.verdict(node, res, need)
		if out[i] != want {
			d.t.Fatalf("Check of %d %s on %s = %+v, model %+v", need, res, node, out[i], want)
		}
		if want.Code == accel.Fits {
			d.count["fits"]++
		}
	}
}

// compareBooks compares everything.
func (d *driver) compareBooks() {
	d.check()
	for _, res := range modelResources {
		if got, want := d.Nodes(res), d.m.usage(res); !reflect.DeepEqual(got, want) {
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
			for _, what := range []string{"granted", "refused", "undo", "confirmed", "forgotten", "expired", "fits"} {
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
