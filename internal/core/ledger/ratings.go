package ledger

import (
	"cmp"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// ratings remember the verdicts on all nodes of a resource for one ask: pods of one
// kind come in numbers, and between two of them a handful of nodes change. A
// verdict counts as long as its node has the generation of which it was made
// and the policy its epoch.
type ratings struct {
	resource accel.Resource
	// temporary ones are for one Fits, which leaves no trace.
	temporary bool

	mu      sync.Mutex // guards what follows; l.mu nests in it
	ask     place.Ask
	policy  place.Policy
	epoch   uint64
	entries []rated // by the number of a node
	view    place.Node
	buf     []int

	used uint64 // guarded by cache.mu
}

// rated is a verdict and the generation of the node that it was made of.
type rated struct {
	generation uint64
	rating     int64
	code       accel.ReasonCode
	stated     accel.TierSet
}

// public is the verdict without the change of the node that it is of.
func (e *rated) public() Verdict { return Verdict{Code: e.code, Rating: e.rating, Stated: e.stated} }

// maxRated bounds the verdicts that are remembered of all asks together, 24
// bytes each.
const maxRated = 1 << 19

// askKey is an ask by value.
type askKey struct {
	resource    accel.Resource
	policy      string
	units       accel.Units
	least       accel.Units
	devices     int
	cpu, memory int64
	only        string
}

// selectionKey returns a selection by value: lists end with one control
// character and items with another, which no model and no ID contains.
func selectionKey(s *accel.Selection) string {
	if s == nil {
		return ""
	}
	var b strings.Builder
	for _, list := range [][]string{s.UseModels, s.AvoidModels, s.UseIDs, s.AvoidIDs} {
		for _, item := range list {
			b.WriteString(item)
			b.WriteByte(0)
		}
		b.WriteByte(1)
	}
	b.WriteString(string(s.Isolation))
	return b.String()
}

// cache are the ratings that are remembered.
type cache struct {
	mu    sync.Mutex
	byAsk map[askKey]*ratings
	uses  uint64
}

// of returns what is remembered for the ask, made if need be.
func (c *cache) of(ns *nodes, res accel.Resource, a *place.Ask, policy place.Policy) *ratings {
	if !ns.hosts.limited.Load() {
		a.CPU, a.Memory = 0, 0 // there is always enough, so it makes no difference
	}
	key := askKey{
		resource: res, policy: policy.Name(), units: a.Units, least: a.Least, devices: a.Devices, cpu: a.CPU, memory: a.Memory,
		only: selectionKey(a.Only),
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.uses++
	r := c.byAsk[key]
	if r == nil {
		r = &ratings{resource: res, ask: *a, policy: policy}
		c.shrink(max(1, maxRated/max(1, int(ns.widest.Load()))))
		c.byAsk[key] = r
	}
	r.used = c.uses
	return r
}

// shrink makes place for those of one more ask, so that there are at most so many, by
// forgetting the ones that were not used for the longest time. c.mu is held.
func (c *cache) shrink(asks int) {
	for len(c.byAsk) >= asks {
		var oldest askKey
		used := c.uses
		for key, r := range c.byAsk {
			if r.used < used {
				oldest, used = key, r.used
			}
		}
		delete(c.byAsk, oldest)
	}
}

// renew forgets the verdicts of an earlier epoch. r.mu is held.
func (r *ratings) renew() {
	if epoch := r.policy.Epoch(); epoch != r.epoch {
		for i := range r.entries {
			r.entries[i].generation = 0
		}
		r.epoch = epoch
	}
}

// grow makes entries for so many nodes. r.mu is held.
func (r *ratings) grow(nodes int) {
	if more := nodes - len(r.entries); more > 0 {
		r.entries = append(r.entries, make([]rated, more)...)
	}
}

// refreshChunk is how many nodes are rated again before writers and requests get a
// turn: all of them have to be, by a policy that may think for 20 microseconds about
// each.
const refreshChunk = 16

// Refresh renews the ratings of up to so many asks, those that were checked
// last, where the policy's epoch or the node changed. Check would do it as well,
// while a caller waits.
func (l *Ledger) Refresh(asks int) {
	for _, r := range l.ratings.lastUsed(asks) {
		for from := 0; ; from += refreshChunk {
			if !r.refresh(l, from, from+refreshChunk) {
				break
			}
			runtime.Gosched() // also where there is one processor
		}
	}
}

// lastUsed returns ratings, the ones that were used last first.
func (c *cache) lastUsed(n int) []*ratings {
	type use struct {
		of   *ratings
		used uint64
	}
	c.mu.Lock()
	uses := make([]use, 0, len(c.byAsk))
	for _, r := range c.byAsk {
		uses = append(uses, use{r, r.used})
	}
	c.mu.Unlock()
	slices.SortFunc(uses, func(a, b use) int { return cmp.Compare(b.used, a.used) })
	out := make([]*ratings, 0, min(n, len(uses)))
	for _, u := range uses[:cap(out)] {
		out = append(out, u.of)
	}
	return out
}

// refresh renews the ratings of some nodes, by their numbers, and reports
// whether there are more.
func (r *ratings) refresh(l *Ledger, from, to int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.renew()
	l.mu.RLock()
	defer l.mu.RUnlock()
	x := l.state.nodes.byResource[r.resource]
	size := x.size()
	r.grow(size)
	for number := from; number < min(to, size); number++ {
		if x.nodes[number] != nil {
			r.verdict(&l.state, x, number)
		}
	}
	return to < size
}
