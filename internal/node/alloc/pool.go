package alloc

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
)

// pool is one way in which a resource gives out devices.
type pool struct {
	config Config
	// others are all pools of the node, this one too.
	others *pools
	// claims are what ResourceClaims hold.
	claims *Claims
	ids    scheme
	held   account
	pick   chooser
	// found is the last discovery, and looked is true once there was one.
	found  Discovery
	looked bool
	// index is the vendor's number of each chip when it was last listed.
	index map[accel.DeviceID]int
	// items are what is offered, and what is away and was offered by this process
	// or is held.
	items []item
	// listed are the devices that this process offered.
	listed  map[accel.DeviceID]bool
	taken   taken
	written Written
	// attested is what was found to isolate the devices of a pool of memory.
	attested map[accel.DeviceID]accel.Isolation
	// problem is why the pool is not offered as configured; deriving is the same
	// between Derive and Settle.
	problem, deriving error
	// keep is true when kubelet keeps what it has.
	keep bool
	// early is true once kubelet knows the units of Early.
	early bool
	// stored is true once there is a saved state.
	stored bool
}

// item is a device that a pool gives out.
type item struct {
	sharing.Card
	// units is how many it has in all.
	units accel.Units
	// replicas is how many slices it has; 0 for one that is given out as a whole,
	// and for units of memory.
	replicas int
}

// scheme is how a pool forms its ids and keeps which device an id is of.
type scheme interface {
	// arrange makes the pool's items. keep is true when that is not possible yet,
	// because of the problem.
	arrange(now time.Time) (keep bool, problem error)
	// persist is what is to be saved, and saved notes what is.
	persist() State
	saved(State)
	// isSaved reports whether the state that was saved last says what the ids of
	// the item are: after a restart they could be another's.
	isSaved(*item) bool
	// early returns what the saved state describes.
	early() []Unit
	// idsOf returns the ids of an item, which are valid until the next call.
	idsOf(*item) []string
	deviceOf(id string) (accel.DeviceID, bool)
	// unchanged reports whether kubelet knows the units that are to be offered;
	// reoffer makes it false the next time.
	unchanged() bool
	reoffer()
	// known reports whether the ids that containers hold have their devices.
	known() bool
}

// account is how a pool knows which of its ids containers hold.
type account interface {
	// take takes kubelet's list.
	take(*View)
	// isHeld reports whether a container holds the id or has just got it. certain
	// reports whether that is known of all ids of the item.
	isHeld(id string) bool
	certain(*item) bool
	// free returns the ids of an item that new containers may get, nil for all that
	// are not held.
	free(*item) map[string]bool
	// strays returns the ids that containers hold and that are not listed.
	strays(listed map[string]bool) []Unit
	// conflict returns which of the pool's own ids stand in the way of an item, as
	// the item was another one when they were given out.
	conflict(*item) string
	// chips returns the chips that containers hold, false while that is not known.
	chips() (map[accel.DeviceID]bool, bool)
	holders(chip accel.DeviceID) []PodKey
	usage() Usage
	// idle reports whether it is certain that no container holds anything.
	idle() bool
	// ready returns why new pods cannot be served although nothing is wrong.
	ready() error
	// active reports whether kubelet has taken the pod up, by its last list. lacks reports
	// whether a container of the pod that gets so many ids was not served.
	active(PodKey) bool
	lacks(pod *Pod, size accel.Units) bool
}

// chooser is how a pool chooses devices for a container.
type chooser interface {
	// late reports whether the pods are too old for a question of that size.
	late(size accel.Units, pods []Pod) bool
	prefer(*Question) (Preference, error)
	// allocate changes nothing that counts before give.
	allocate(ids []string, pods []Pod, again bool) (Allocation, error)
	give(*Allocation, time.Time)
	// memory is what a successor must know, for JSON; recall restores it.
	memory() any
	recall([]byte) error
}

func newPool(c Config, others *pools, claims *Claims) *pool {
	if c.State != nil {
		for _, card := range c.State.Cards {
			if card.Parent != "" {
				claims.parents[card.ID] = card.Parent
			}
		}
	}
	return &pool{
		config: c, others: others, claims: claims, stored: c.State != nil,
		listed: map[accel.DeviceID]bool{}, index: map[accel.DeviceID]int{},
		taken: taken{given: map[accel.DeviceID]time.Time{}},
	}
}

// discover takes the outcome of a discovery.
func (p *pool) discover(d Discovery) {
	p.found, p.looked = d, true
	for _, one := range d.Devices {
		p.index[one.ID] = one.Index
		if one.Parent != "" {
			p.claims.parents[one.ID] = one.Parent
		}
	}
}

// owns reports whether an id is one of the pool's.
func (p *pool) owns(id string) bool {
	_, ok := p.ids.deviceOf(id)
	return ok
}

// foreign reports whether an id is another pool's of the same resource.
func (p *pool) foreign(id string) bool {
	return slices.ContainsFunc(*p.others, func(o *pool) bool {
		return o != p && o.config.Resource == p.config.Resource && o.owns(id)
	})
}

// chosen returns those of the cards that the configuration gives to the pool.
func (p *pool) chosen(cards []sharing.Card) []sharing.Card {
	if p.config.Chooses == nil {
		return cards
	}
	return slices.DeleteFunc(cards, func(c sharing.Card) bool { return !p.config.Chooses(c) })
}

// takeChips lets the other pools know which chips are given out.
func (p *pool) takeChips(grace time.Duration, now time.Time) {
	if held, known := p.held.chips(); known {
		p.taken.set(held, grace, now)
	}
}

// derive makes items, and returns what has to be written before they are offered.
func (p *pool) derive(now time.Time) Plan {
	p.keep = false
	draining := p.config.Draining != ""
	if !p.looked && !draining {
		p.deriving, p.keep = errors.New("device discovery has not completed"), true
		return Plan{Settled: true}
	}
	if !draining {
		p.deriving = p.trouble()
	} else {
		p.deriving = nil
	}
	keep, problem := p.ids.arrange(now)
	if problem != nil {
		p.deriving = problem
	}
	if keep {
		p.keep = true
		return Plan{Settled: true}
	}
	if p.deriving == nil && !draining && len(p.found.Devices) > 0 && len(p.items) == 0 {
		p.deriving = fmt.Errorf("the configuration chooses none of the %d %s devices for it", len(p.found.Devices), p.config.Vendor)
	}
	plan := Plan{Describe: p.devices()}
	plan.State, plan.Save = p.persist()
	return plan
}

// trouble is what is wrong with the discovery.
func (p *pool) trouble() error {
	switch {
	case p.found.Err != nil:
		return p.found.Err
	case len(p.found.Devices) == 0 && len(p.found.Faults) == 0:
		return fmt.Errorf("the vendor's library reports no %s device", p.config.Vendor)
	}
	return p.found.Unreachable
}

// persist returns what is to be saved, false when nothing has to be.
func (p *pool) persist() (State, bool) {
	s := p.ids.persist()
	s.Vendor = p.config.Vendor
	if p.config.Draining != "" && p.held.idle() {
		return s, false // the file is about to be removed
	}
	nothing := len(s.Ranges)+len(s.Cards)+len(s.Boards)+len(s.Held) == 0
	return s, !nothing || p.stored
}

// offer returns the units after derive.
func (p *pool) offer(w Written) Offer {
	if p.keep {
		return Offer{}
	}
	p.written = w
	p.deriving = w.problem(p.deriving)
	strays := p.held.strays(nil)
	if len(p.items) == 0 && len(strays) == 0 && len(p.listed) == 0 && p.config.Draining == "" {
		return Offer{Units: []Unit{}, Changed: p.early}
	}
	for _, it := range p.items {
		p.listed[it.ID] = true
	}
	if p.ids.unchanged() {
		return Offer{}
	}
	return Offer{Units: p.units(), Changed: true}
}

// settle takes what became of an offer.
func (p *pool) settle(rejected error) Report {
	if rejected != nil {
		p.deriving = rejected
		p.ids.reoffer()
	}
	r := Report{Before: p.problem, Now: p.deriving, Absent: p.absent()}
	p.problem = p.deriving
	return r
}

// units lists what kubelet is told: all ids of all items, and those that
// containers hold of what is not offered any more. What a container holds stays
// healthy whatever becomes of its device: kubelet, when it restarts, fails a
// running pod otherwise. No new pod can get it, as the engine answers which ids a
// container gets.
func (p *pool) units() []Unit {
	var total accel.Units
	for i := range p.items {
		total += p.items[i].units
	}
	out := make([]Unit, 0, min(total, 1<<20))
	listed := map[string]bool{}
	for i := range p.items {
		it := &p.items[i]
		usable, certain := p.unusable(it) == "", p.held.certain(it)
		var free map[string]bool
		if usable {
			free = p.held.free(it)
		}
		for _, id := range p.ids.idsOf(it) {
			u := Unit{ID: id, NUMANodes: it.NUMANodes}
			if certain && (!usable || free != nil && !free[id]) && !p.held.isHeld(id) {
				if p.config.Draining != "" {
					continue
				}
				u.Unhealthy = true
			}
			if p.config.Kind == Slots {
				listed[id] = true
			}
			out = append(out, u)
		}
	}
	return append(out, p.held.strays(listed)...)
}

// unusable returns why no new container gets something of the item, "" when it may.
func (p *pool) unusable(it *item) string {
	if it.Health.Unhealthy {
		return it.Health.Reason
	}
	if why := p.withheld(it); why != "" {
		return why
	}
	if r, taken := p.others.elsewhere(p, it.Chips...); taken {
		return givenOutAs(r)
	}
	return p.held.conflict(it)
}

// withheld returns what could not be written that new containers would need of the
// item, "" when nothing is missing.
func (p *pool) withheld(it *item) string {
	if p.written.Unsaved != nil && !p.ids.isSaved(it) {
		return p.written.Unsaved.Error()
	}
	for _, c := range it.Chips {
		if err := p.written.Unspecified[c]; err != nil {
			return err.Error()
		}
	}
	return ""
}

// health is that of the item, as new containers see it.
func (p *pool) health(it *item) accel.Health {
	if why := p.unusable(it); why != "" && !it.Health.Unhealthy {
		return accel.Health{Unhealthy: true, Reason: why}
	}
	return it.Health
}

// inventory is what the node publishes of the pool.
func (p *pool) inventory() accel.Inventory {
	out := accel.Inventory{Resource: p.config.Resource}
	if r, ok := p.ids.(*ranges); ok {
		out.Unit, out.Links, out.Several = r.unit.String(), p.found.Links, true
	}
	for i := range p.items {
		it := &p.items[i]
		if least := p.config.LeastBytes; least > 0 {
			out.Least = max(out.Least, p.config.Unit.Holding(least, it.MemoryBytes))
		}
		share := accel.Share{Device: it.Device, Units: it.units, Isolation: isolationOf(p, it)}
		share.Health = p.health(it)
		if len(it.Chips) > 1 {
			share.Chips = len(it.Chips)
		}
		out.Shares = append(out.Shares, share)
	}
	return out
}

// devices returns the chips of all items as they are, also while containers hold them.
func (p *pool) devices() []accel.Device {
	here := map[accel.DeviceID]accel.Device{}
	switch {
	case p.config.Draining == "":
		for _, d := range p.found.Devices {
			here[d.ID] = d
		}
	case p.config.Kind == Slots:
		return nil
	}
	var out []accel.Device
	for _, it := range p.items {
		for _, id := range it.Chips {
			d, ok := here[id]
			if !ok {
				d = it.Device
				d.ID = id
				if last, seen := p.index[id]; seen {
					d.Index = last
				}
				if len(it.Chips) > 1 {
					d.Health = accel.Health{Unhealthy: true, Cause: accel.CauseLost, Reason: p.whyAway(id)}
				}
			}
			out = append(out, d)
		}
	}
	return out
}

// whyAway is the reason of a device of these chips that is not offered as it was.
func (p *pool) whyAway(chips ...accel.DeviceID) string {
	switch {
	case p.config.Draining != "":
		return p.config.Draining
	case p.found.Err != nil:
		return p.found.Err.Error()
	case p.here(chips[0]):
		return fmt.Sprintf("the configuration does not give it to %s", p.config.Resource)
	}
	for _, f := range p.found.Faults {
		if f.ID != "" && slices.Contains(chips, f.ID) && f.Err != nil {
			return f.Err.Error()
		}
	}
	if parent := p.claims.parents[chips[0]]; parent != "" && p.here(parent) {
		return "the partition does not exist any more"
	}
	return "the vendor's library does not list the device any more"
}

// here reports whether the vendor's library lists the chip.
func (p *pool) here(chip accel.DeviceID) bool {
	return slices.ContainsFunc(p.found.Devices, func(d accel.Device) bool { return d.ID == chip })
}

// faulty reports whether the vendor's library counts the chip and cannot describe it.
func (p *pool) faulty(chip accel.DeviceID) bool {
	return slices.ContainsFunc(p.found.Faults, func(f Fault) bool { return f.ID == chip })
}

// status is how the pool is.
func (p *pool) status() Status {
	s := Status{Known: p.looked && p.ids.known(), Absent: p.absent(), Idle: p.held.idle()}
	s.Drained = s.Idle && p.config.Draining != ""
	for _, d := range p.found.Devices {
		if p.config.Chooses == nil || p.config.Chooses(sharing.Split([]accel.Device{d})[0]) {
			s.Present++
		}
	}
	switch {
	case p.config.Draining != "":
	case !p.looked:
		s.Problem = fmt.Errorf("%s: device discovery has not completed", p.config.Resource)
	case p.problem != nil:
		s.Problem = fmt.Errorf("%s: %w", p.config.Resource, p.problem)
	case p.held.ready() != nil:
		s.Problem = fmt.Errorf("%s: %w", p.config.Resource, p.held.ready())
	}
	return s
}

// absent reports whether the node has nothing that the pool could be made of. That is not
// known of devices that cannot be described, or that may not be offered as they are set up.
func (p *pool) absent() bool {
	unsure := p.found.Err != nil && len(p.found.Devices) > 0 ||
		slices.ContainsFunc(p.found.Faults, func(f Fault) bool { return !f.NotOffered })
	return p.looked && !unsure && len(p.items) == 0 && len(p.held.strays(nil)) == 0
}

// admissible returns why a container that requests so many units is rejected
// whatever is free.
func (p *pool) admissible(size int) error {
	if p.config.Draining != "" {
		return Reject(NotOffered, "%s: what containers hold of it is served until they end, and new containers get none", p.config.Draining)
	}
	if p.config.Cut.Single && size > 1 {
		return Reject(TooMany, "invalid request: maximum request size for shared resources is 1; found %d", size)
	}
	return nil
}

// share returns a device as it is, also while containers hold it.
func (p *pool) share(id accel.DeviceID) (accel.Share, bool) {
	for i := range p.items {
		if it := &p.items[i]; it.ID == id {
			return accel.Share{Device: it.Device, Units: it.units}, true
		}
	}
	return accel.Share{}, false
}

// byIndex returns the devices in the order of their indexes, in which containers
// see them.
func (p *pool) byIndex(devices []accel.DeviceID) []accel.DeviceID {
	index := map[accel.DeviceID]int{}
	for i := range p.items {
		index[p.items[i].ID] = p.items[i].Index
	}
	out := slices.Clone(devices)
	slices.SortStableFunc(out, func(a, b accel.DeviceID) int { return cmp.Compare(index[a], index[b]) })
	return out
}

// givenOutAs is the reason of a device that is withdrawn.
func givenOutAs(r accel.Resource) string { return accel.ReasonGivenOut + string(r) }

// apart gives each of the items that are away an index that no other item has: the
// library may have given theirs to another device. present are the others.
func apart(present, away []item) []item {
	taken := map[int]bool{}
	for _, it := range present {
		taken[it.Index] = true
	}
	for _, it := range away {
		for taken[it.Index] {
			it.Index++
		}
		taken[it.Index] = true
		present = append(present, it)
	}
	slices.SortFunc(present, func(a, b item) int { return cmp.Compare(a.Index, b.Index) })
	return present
}

// problem adds to another problem of the pool, or nil, what could not be written.
func (w *Written) problem(other error) error {
	all := []error{other}
	if w.Unsaved != nil {
		all = append(all, fmt.Errorf("devices that were added since the state was saved take no pods: %w", w.Unsaved))
	}
	for _, err := range w.Unspecified {
		all = append(all, err)
	}
	all = slices.DeleteFunc(all, func(err error) bool { return err == nil })
	// Devices of one file have one reason. The order is that of the text, since a
	// problem with another text is reported again.
	slices.SortFunc(all, func(a, b error) int { return cmp.Compare(a.Error(), b.Error()) })
	all = slices.CompactFunc(all, func(a, b error) bool { return a.Error() == b.Error() })
	switch len(all) {
	case 0:
		return nil
	case 1:
		return all[0]
	}
	return problems(all)
}

// problems are several errors, in one line.
type problems []error

func (p problems) Error() string {
	texts := make([]string, len(p))
	for i, err := range p {
		texts[i] = err.Error()
	}
	return strings.Join(texts, "; ")
}

// Unwrap makes errors.Is and errors.As look at all of them.
func (p problems) Unwrap() []error { return p }
