package simulate

import (
	"fmt"
	"iter"
	"math/rand"
	"slices"
	"strconv"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/fragmentation"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// resource is what the devices of a simulation are given out as.
const resource accel.Resource = "simulated"

// world is the cluster during a run: a ledger as the extender has it, and the
// choice between nodes, which is kube-scheduler's part.
type world struct {
	books *ledger.Ledger
	// placer places pods in place of the ledger; nil where that does.
	placer Placer
	// names are the nodes in the order in which they win ties.
	names []string
	// ties is nil where the first of equally rated nodes is taken.
	ties *rand.Rand
	// sample is nil where the policy sees all nodes.
	sample *sample
	// placed counts the pods that were placed: the UID of each is its number.
	placed    int
	allocated accel.Units

	// only are the nodes for the next pod, nil for all.
	only []string

	verdicts []ledger.Verdict
	requests map[place.Ask]*accel.Request
}

func newWorld(c *Cluster, order []int, p place.Policy, ties *rand.Rand, sampled bool) *world {
	// Reservations are not confirmed by anybody, so no time passes for them.
	w := &world{
		books: ledger.New(ledger.Options{Policy: p, Now: func() time.Time { return time.Time{} }}),
		names: make([]string, len(order)), ties: ties,
		verdicts: make([]ledger.Verdict, len(order)), requests: map[place.Ask]*accel.Request{},
	}
	for at, i := range order {
		n := &c.Nodes[i]
		w.names[at] = n.Name
		w.books.SetNode(n.Name, []accel.Inventory{{Resource: resource, Shares: n.Devices, Links: n.Links, Several: true}})
		if n.CPU != place.Unlimited || n.Memory != place.Unlimited {
			w.books.SetCapacity(n.Name, n.CPU, n.Memory)
		}
	}
	if sampled {
		w.sample = newSample(c, order)
	}
	return w
}

// request is what the ledger is asked with for an ask.
func (w *world) request(a *place.Ask) *accel.Request {
	r := w.requests[*a]
	if r == nil {
		r = &accel.Request{Resource: resource, Devices: a.Devices, CPU: a.CPU, Memory: a.Memory, Selection: a.Only}
		if a.Devices > 0 {
			r.Containers = []accel.ContainerRequest{{Kind: accel.AppContainer, Units: a.Units * accel.Units(a.Devices)}}
		}
		w.requests[*a] = r
	}
	return r
}

// choose returns the position of the node for a pod, -1 where it fits nowhere. Where
// kube-scheduler has not found a node that will do among those it looked at, it tries
// the pod again later, with the nodes that come next; so does this, until all were
// looked at once.
func (w *world) choose(a *place.Ask) int {
	r := w.request(a)
	if w.only != nil {
		at := w.best(r, w.only)
		if at >= 0 {
			at = slices.Index(w.names, w.only[at])
		}
		return at
	}
	if w.sample == nil {
		return w.best(r, w.names)
	}
	for rest := len(w.names); rest > 0; {
		rest -= w.sample.search(w.names, a, rest)
		if at := w.best(r, w.sample.names); at >= 0 {
			return w.sample.positions[at]
		}
	}
	return -1
}

// best returns the position among the names of the node with the best rating, -1
// where the pod fits on none of them.
func (w *world) best(r *accel.Request, names []string) int {
	verdicts := w.verdicts[:len(names)]
	w.books.Check(*r, names, verdicts)
	best, rating, equal := -1, int64(0), 0
	for i := range verdicts {
		v := &verdicts[i]
		switch {
		case v.Code != accel.Fits:
		case best < 0 || v.Rating > rating:
			best, rating, equal = i, v.Rating, 1
		case v.Rating == rating:
			equal++
		}
	}
	if w.ties == nil || equal <= 1 {
		return best
	}
	for skip := w.ties.Intn(equal); ; best++ {
		if v := &verdicts[best]; v.Code != accel.Fits || v.Rating != rating {
			continue
		}
		if skip == 0 {
			return best
		}
		skip--
	}
}

// placement is a pod that was placed.
type placement struct {
	uid   string
	at    int // the node's position
	takes sums
	// devices are those that it got; nil for a pod without.
	devices []accel.DeviceID
}

// place puts a pod on the best node, false where it fits nowhere. Its error is
// one of the program: the ledger refuses what it has just found to fit.
func (w *world) place(a *place.Ask) (placement, bool, error) {
	if w.placer != nil {
		return w.placeBy(w.placer, a)
	}
	best := w.choose(a)
	if best < 0 {
		return placement{}, false, nil
	}
	w.placed++
	p := placement{uid: strconv.Itoa(w.placed), at: best, takes: sumsOf(a)}
	if a.Devices == 0 {
		w.books.Charge(p.uid, w.names[best], a.CPU, a.Memory)
	} else {
		grant, _, err := w.books.Reserve(accel.PodRef{UID: p.uid}, time.Time{}, w.names[best], *w.request(a))
		if err != nil {
			return placement{}, false, fmt.Errorf("place a pod that fits: %w", err)
		}
		p.devices = grant.Devices()
	}
	w.allocated += p.takes.units
	if w.sample != nil {
		w.sample.take(best, p.takes)
	}
	return p, true, nil
}

func (w *world) placeBy(placer Placer, a *place.Ask) (placement, bool, error) {
	p := placement{uid: strconv.Itoa(w.placed + 1), takes: sumsOf(a)}
	ok, err := placer.Place(p.uid, w.names, a)
	if !ok || err != nil {
		return placement{}, false, err
	}
	w.placed++
	w.allocated += p.takes.units
	return p, true, nil
}

func (w *world) remove(p placement) {
	if w.placer != nil {
		w.placer.Remove(p.uid)
	} else {
		w.books.Forget(p.uid)
	}
	w.allocated -= p.takes.units
	if w.sample != nil {
		w.sample.give(p.at, p.takes)
	}
}

// run is a world in which pods arrive.
type run struct {
	*world
	policy place.Policy
	clock  func() time.Duration // nil where decisions are not timed
}

// newRun makes a run of a policy. Where that is of its kind, ties decides between equals.
func newRun(c *Cluster, w *Workload, kind PolicyKind, rng, ties *rand.Rand, sampled bool, clock func() time.Duration) *run {
	if !kind.RandomTies {
		ties = nil
	}
	policy := kind.New(c, w)
	r := &run{world: newWorld(c, nodeOrder(rng, len(c.Nodes)), policy, ties, sampled), policy: policy, clock: clock}
	if kind.Placer != nil {
		r.placer = kind.Placer(c, policy)
	}
	return r
}

// arrive places the i-th pod, as place does, and returns how long that took.
func (r *run) arrive(i int, a *place.Ask) (p placement, took time.Duration, ok bool, err error) {
	r.renew(i)
	if r.clock == nil {
		p, ok, err = r.place(a)
	} else {
		began := r.clock()
		p, ok, err = r.place(a)
		took = r.clock() - began
	}
	if ok {
		r.learn(a)
	}
	return p, took, ok, err
}

// renew renews the weights of a policy that has some, before the i-th pod is placed.
func (r *run) renew(i int) {
	p, renews := r.policy.(interface {
		Renew(nodes iter.Seq2[string, *place.Node])
	})
	if !renews || i%fragmentation.RenewAfter != 0 && (i >= fragmentation.RenewAfter || i%fragmentation.RenewFirst != 0) {
		return
	}
	if r.placer != nil {
		p.Renew(r.placer.Nodes())
		return
	}
	p.Renew(r.books.Each(resource))
	if r.clock != nil {
		// What the renewal made invalid is rated again beside it, as in the extender, and
		// not by the next decisions. It changes no decision.
		r.books.Refresh(fragmentation.RefreshedAsks)
	}
}

// learn tells a policy that learns of a pod that was placed: like the extender, of no other.
func (r *run) learn(a *place.Ask) {
	if p, learns := r.policy.(interface{ Observe(a *place.Ask) }); learns {
		p.Observe(a)
	}
}
