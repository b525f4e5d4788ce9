package alloc

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
)

// Claims is the side of the Engine that serves ResourceClaims: the devices that claims
// may get, and what each claim holds of them. kube-scheduler chooses; the engine
// recounts, and knows what containers hold by units. The same rules of use as the
// Engine's apply.
//
// A chip is held by claims or by containers without claims, and by claims in one form: as
// a device, as a board, as a partition or as slices.
type Claims struct {
	pools *pools
	// parents are those of the partitions that were ever listed, and of those that are
	// recorded in a state file.
	parents map[accel.DeviceID]accel.DeviceID
	vendors map[string]*claimVendor
	held    map[ClaimKey]Claim
	// attested returns what keeps claims apart that share the memory of a card, nil for nothing.
	attested func(vendor string, card sharing.Card) accel.Isolation
	// known is true once it is known which claims hold something.
	known bool
}

// claimVendor is what claims get of a vendor's devices.
type claimVendor struct {
	ways   []Config
	boards *sharing.Boards
	// devices are those of the last discovery that succeeded, and err why the last one
	// failed.
	devices []ClaimDevice
	err     error
	// seen are all devices that were ever discovered, as they were last.
	seen map[accel.DeviceID]accel.Device
}

// ClaimKey names what a ResourceClaim holds of a vendor's devices: each vendor has a driver of
// its own, and each driver prepares its part of the claim.
type ClaimKey struct{ Vendor, UID string }

// Claim is what a ResourceClaim holds of the node's devices of a vendor.
type Claim struct {
	Vendor    string `json:"vendor"`
	UID       string `json:"uid"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Pods are the UIDs of the pods of this node that it is reserved for.
	Pods  []string    `json:"pods,omitempty"`
	Parts []ClaimPart `json:"parts"`
	// Prepared is true once containers can reach the devices.
	Prepared bool `json:"prepared,omitempty"`
	// Together is what containers with a request of the claim have in all, by request without its
	// alternative, where it is more than the request's own devices.
	Together map[string][]Portion `json:"together,omitempty"`
}

// Portion is what a container has of a chip.
type Portion struct {
	Chip accel.DeviceID `json:"chip"`
	// Bytes is the part of its memory, 0 for the whole chip and for time slices.
	Bytes int64 `json:"bytes,omitempty"`
}

// ClaimPart is what a claim holds of one device.
type ClaimPart struct {
	// Request is the claim's request that it serves, "request/subrequest" for one of
	// several alternatives.
	Request string `json:"request"`
	// Device is the name of the device, and Share the id of a part of one that claims
	// share.
	Device string `json:"device"`
	Share  string `json:"share,omitempty"`
	// Bytes is the memory, and Slots the time slices that it holds; both 0 for the whole
	// device.
	Bytes int64 `json:"bytes,omitempty"`
	Slots int   `json:"slots,omitempty"`
	// Admin is true for access beside the holders.
	Admin bool `json:"admin,omitempty"`
	// Ill is true if the claim tolerates that the device is unhealthy.
	Ill bool `json:"ill,omitempty"`
	// Type and Card describe the device. Hold fills them in.
	Type string     `json:"type,omitempty"`
	Card StoredCard `json:"card,omitzero"`
}

// Key names the claim.
func (c *Claim) Key() ClaimKey { return ClaimKey{c.Vendor, c.UID} }

// ClaimsState is what a node remembers of claims between restarts.
type ClaimsState struct {
	Claims []Claim `json:"claims,omitempty"`
	// Boards are what sharing.Boards.Known returned, by vendor.
	Boards map[string][]sharing.Board `json:"boards,omitempty"`
	// Partial is true while there may be other claims that hold something: an earlier
	// state was lost, and nothing was recovered since.
	Partial bool `json:"partial,omitempty"`
}

func newClaims(all *pools) *Claims {
	return &Claims{pools: all, parents: map[accel.DeviceID]accel.DeviceID{}, vendors: map[string]*claimVendor{}, held: map[ClaimKey]Claim{},
		known: true}
}

// Serve says which of a vendor's devices claims get, by the ways in which the node's
// resources offer them.
func (c *Claims) Serve(vendor string, ways ...Config) { c.vendor(vendor).ways = ways }

// vendor returns what claims get of a vendor's devices.
func (c *Claims) vendor(name string) *claimVendor {
	v := c.vendors[name]
	if v == nil {
		v = &claimVendor{boards: sharing.NewBoards(nil), seen: map[accel.DeviceID]accel.Device{}}
		c.vendors[name] = v
	}
	return v
}

// Restore takes what was saved, before anything else.
func (c *Claims) Restore(s ClaimsState) {
	for vendor, boards := range s.Boards {
		c.vendor(vendor).boards = sharing.NewBoards(boards)
	}
	for _, one := range s.Claims {
		c.held[one.Key()] = one
		for _, part := range one.Parts {
			if part.Card.Parent != "" {
				c.parents[part.Card.ID] = part.Card.Parent
			}
		}
	}
	c.known = !s.Partial
}

// Recover takes claims that hold devices by the records of others, after what was saved was
// lost: all that there are. They need not fit, and their parts are described once their
// devices are discovered.
func (c *Claims) Recover(found []Claim) {
	for _, claim := range found {
		if _, held := c.held[claim.Key()]; !held {
			claim.Parts = slices.Clone(claim.Parts)
			c.held[claim.Key()] = claim
		}
	}
	c.known = true
	for vendor := range c.vendors {
		c.describe(vendor)
	}
}

// describe finds the devices of recovered parts.
func (c *Claims) describe(vendor string) {
	known, v := accel.VendorNamed(vendor), c.vendor(vendor)
	var all []ClaimDevice // whatever is offered now
	for key, claim := range c.held {
		if known == nil || claim.Vendor != vendor {
			continue
		}
		claim.Parts = slices.Clone(claim.Parts)
		c.held[key] = claim
		for i := range claim.Parts {
			part := &claim.Parts[i]
			if len(part.Card.Chips) > 0 {
				continue
			}
			if all == nil {
				seen := slices.SortedFunc(maps.Values(v.seen), func(a, b accel.Device) int { return cmp.Compare(a.ID, b.ID) })
				all = claimDevices(known, everyWay, seen, sharing.NewBoards(v.boards.Known()))
			}
			if at := slices.IndexFunc(all, func(d ClaimDevice) bool { return d.Name == part.Device }); at >= 0 {
				part.Type, part.Card = all[at].Type, storeCard(all[at].Card)
			}
		}
	}
}

// everyWay has all forms of all devices.
var everyWay = []Config{
	{ID: ID{Kind: Memory}}, {ID: ID{Kind: Slots}},
	{ID: ID{Kind: Slots}, Cut: Cut{SplitBoards: true, Replicas: func(sharing.Card) int { return 2 }}},
	{ID: ID{Kind: Slots}, Cut: Cut{Replicas: func(sharing.Card) int { return 2 }}},
}

// State returns what is to be saved.
func (c *Claims) State() ClaimsState {
	s := ClaimsState{Claims: c.All(), Partial: !c.known}
	for name, v := range c.vendors {
		if boards := v.boards.Known(); len(boards) > 0 {
			if s.Boards == nil {
				s.Boards = map[string][]sharing.Board{}
			}
			s.Boards[name] = boards
		}
	}
	return s
}

// All returns what claims hold, in the order of their UIDs and vendors.
func (c *Claims) All() []Claim {
	out := slices.Collect(maps.Values(c.held))
	slices.SortFunc(out, func(a, b Claim) int { return cmp.Or(cmp.Compare(a.UID, b.UID), cmp.Compare(a.Vendor, b.Vendor)) })
	return out
}

// Get returns what a claim holds, false for nothing.
func (c *Claims) Get(key ClaimKey) (Claim, bool) {
	claim, ok := c.held[key]
	return claim, ok
}

// Discover takes the outcome of a discovery of a vendor's devices. Where it failed, the
// devices of the one before are ill.
func (c *Claims) Discover(vendor string, d Discovery) {
	v := c.vendor(vendor)
	v.err = cmp.Or(d.Err, d.Unreachable)
	for _, one := range d.Devices {
		v.seen[one.ID] = one
		if one.Parent != "" {
			c.parents[one.ID] = one.Parent
		}
	}
	if known := accel.VendorNamed(vendor); known != nil && d.Err == nil {
		v.devices = claimDevices(known, v.ways, d.Devices, v.boards)
		c.describe(vendor)
	}
}

// Devices returns the devices of a vendor that claims get, and those that a claim holds
// although they are not offered any more.
func (c *Claims) Devices(vendor string) []ClaimDevice {
	v := c.vendor(vendor)
	out := slices.Clone(v.devices)
	offered, used := map[string]bool{}, c.used(vendor)
	for i := range out {
		d := &out[i]
		offered[d.Name] = true
		if v.err != nil && !d.Card.Health.Unhealthy {
			d.Card.Health = accel.Health{Unhealthy: true, Reason: v.err.Error(), Cause: accel.CauseUnreachable}
		}
		d.Isolation = c.isolationOf(vendor, d)
		if held := used[d.Name]; d.Slots > 0 {
			d.Used = min(float64(held.Slots)/float64(d.Slots), 1)
		} else if d.Shared && d.Card.MemoryBytes > 0 {
			d.Used = min(float64(held.Bytes)/float64(d.Card.MemoryBytes), 1)
		}
		if r, taken := c.pools.without(nil, c.parents, d.Card.Chips...); taken {
			d.Elsewhere = r
		}
	}
	for _, claim := range c.All() {
		for _, part := range claim.Parts {
			if claim.Vendor != vendor || offered[part.Device] {
				continue
			}
			offered[part.Device] = true
			d := ClaimDevice{Name: part.Device, Type: part.Type, Card: part.Card.card(), Shared: part.Bytes > 0, Rank: len(v.ways)}
			if part.Type == TypeSlots {
				d.Slots = max(part.Slots, 2)
			}
			d.Card.Health = accel.Health{Unhealthy: true, Reason: "the node does not offer the device any more", Cause: accel.CauseLost}
			out = append(out, d)
		}
	}
	return out
}

// used sums up what claims hold of a vendor's devices that they share, by name.
func (c *Claims) used(vendor string) map[string]ClaimPart {
	out := map[string]ClaimPart{}
	for _, claim := range c.held {
		for i := range claim.Parts {
			part := &claim.Parts[i]
			if claim.Vendor != vendor || part.Admin {
				continue
			}
			sum := out[part.Device]
			sum.Bytes, sum.Slots = sum.Bytes+part.Bytes, sum.Slots+part.Slots
			if part.Bytes == 0 && part.Slots == 0 {
				sum.Bytes += part.Card.MemoryBytes // it is held whole
			}
			out[part.Device] = sum
		}
	}
	return out
}

// Attest says how to find out what keeps claims apart that share the memory of a card.
func (c *Claims) Attest(attested func(vendor string, card sharing.Card) accel.Isolation) {
	c.attested = attested
}

// isolationOf is what isolates the claims that hold a device. Those that share its time are not
// isolated, and those that share its memory by counting alone, unless something is attested.
func (c *Claims) isolationOf(vendor string, d *ClaimDevice) accel.Isolation {
	switch {
	case d.Slots > 0 || d.Shared && c.attested == nil:
		return accel.Isolation{}
	case d.Shared:
		return c.attested(vendor, d.Card)
	}
	whole := accel.Isolation{Memory: accel.TierHardware, Compute: accel.TierHardware}
	if v := accel.VendorNamed(vendor); d.Card.Parent != "" && v != nil {
		whole.Backend = v.PartitionBackend
	}
	return whole
}

// Hold records that a claim holds its devices, or returns why it cannot. What was held
// before is returned as it was, with the pods added.
//
// The rejection is in doubt where kubelet may know of a container that has ended, and may pass
// (MayPass) where another claim may be released. Nothing of a rejected claim is recorded.
func (c *Claims) Hold(claim Claim) (Claim, error) {
	before, held := c.held[claim.Key()]
	if held && sameParts(before.Parts, claim.Parts) {
		before.Pods = mergePods(before.Pods, claim.Pods)
		c.held[claim.Key()] = before
		return before, nil
	}
	if held && before.Prepared {
		return Claim{}, Reject(Held, "claim %s/%s was prepared with other devices (%s), and these have not been released", claim.Namespace,
			claim.Name, before.devices())
	}
	if len(claim.Parts) == 0 {
		return Claim{}, Reject(Other, "claim %s/%s has no device of this node", claim.Namespace, claim.Name)
	}
	if !c.known {
		return Claim{}, busyf("it is not known yet which devices other claims hold")
	}
	claim.Parts, claim.Prepared = slices.Clone(claim.Parts), false
	for i := range claim.Parts {
		if err := c.fits(&claim, i); err != nil {
			return Claim{}, err
		}
	}
	c.held[claim.Key()] = claim
	return claim, nil
}

// fits returns why the claim cannot have its part of that position, beside the parts
// before it. It describes the part.
func (c *Claims) fits(claim *Claim, position int) error {
	part := &claim.Parts[position]
	v := c.vendor(claim.Vendor)
	i := slices.IndexFunc(v.devices, func(d ClaimDevice) bool { return d.Name == part.Device })
	if i < 0 {
		return Reject(NotOffered, "claims cannot get device %s: %s", part.Device, cmp.Or(errorText(v.err), "the node does not offer it"))
	}
	d := &v.devices[i]
	part.Type, part.Card = d.Type, storeCard(d.Card)
	if err := d.admits(part); err != nil {
		return err
	}
	if v.err != nil {
		return Reject(NotOffered, "device %s cannot be used: %w", d.Name, v.err)
	}
	if d.Card.Health.Unhealthy && !part.Ill {
		return Reject(NotOffered, "device %s is unhealthy: %s", d.Name, d.Card.Health.Reason)
	}
	if part.Admin {
		return nil
	}
	for _, p := range *c.pools {
		if p.config.Vendor == claim.Vendor && !p.taken.known {
			return unknownf(p.config.Resource)
		}
	}
	if r, taken := c.pools.without(nil, c.parents, d.Card.Chips...); taken {
		return conflictf("device %s is %s", d.Name, givenOutAs(r))
	}
	bytes, slots := part.Bytes, part.Slots
	beside := func(holder *Claim, parts []ClaimPart) error {
		for i := range parts {
			other := &parts[i]
			switch {
			case other.Admin || !c.overlap(part, other):
			case holder.Vendor == claim.Vendor && part.shares(other):
				bytes, slots = bytes+other.Bytes, slots+other.Slots
			default:
				return busyf("device %s is held by claim %s/%s as %s", d.Name, holder.Namespace, holder.Name, other.what())
			}
		}
		return nil
	}
	if err := beside(claim, claim.Parts[:position]); err != nil {
		return err
	}
	for key, other := range c.held {
		if key == claim.Key() {
			continue
		}
		if err := beside(&other, other.Parts); err != nil {
			return err
		}
	}
	switch {
	case bytes > d.Card.MemoryBytes:
		return busyf("device %s has %d bytes of memory, and claims would hold %d", d.Name, d.Card.MemoryBytes, bytes)
	case slots > d.Slots:
		return busyf("device %s has %d time slices, and claims would hold %d", d.Name, d.Slots, slots)
	}
	return nil
}

// shares reports whether two parts are of one device that both leave to each other.
func (p *ClaimPart) shares(other *ClaimPart) bool {
	return p.Device == other.Device && (p.Bytes > 0 && other.Bytes > 0 || p.Slots > 0 && other.Slots > 0)
}

// admits returns why no claim can have such a part of the device.
func (d *ClaimDevice) admits(part *ClaimPart) error {
	switch {
	case part.Bytes < 0 || part.Slots < 0:
		return Reject(Other, "a claim cannot hold %d bytes and %d slots of device %s", part.Bytes, part.Slots, d.Name)
	case part.Slots > 0 && d.Slots == 0:
		return Reject(NotOffered, "device %s is not offered by time slices", d.Name)
	case part.Bytes > 0 && !d.Shared:
		return Reject(NotOffered, "the memory of device %s is not shared", d.Name)
	case part.Bytes > 0 && part.Slots > 0:
		return Reject(Other, "a claim cannot hold both memory and time slices of device %s", d.Name)
	}
	return nil
}

// overlap reports whether two parts are of one chip, or of a partition and its device.
func (c *Claims) overlap(a, b *ClaimPart) bool {
	return slices.ContainsFunc(a.Card.Chips, func(x accel.DeviceID) bool {
		return slices.ContainsFunc(b.Card.Chips, func(y accel.DeviceID) bool {
			return x == y || c.parents[x] == y || c.parents[y] == x
		})
	})
}

// Prepared notes that containers can reach the devices of a claim, and what those with its requests
// have together.
func (c *Claims) Prepared(key ClaimKey, together map[string][]Portion) {
	if claim, ok := c.held[key]; ok {
		claim.Prepared, claim.Together = true, together
		c.held[key] = claim
	}
}

// Release forgets a claim, which may hold nothing.
func (c *Claims) Release(key ClaimKey) { delete(c.held, key) }

// has reports whether a claim holds the chip, what it is a partition of, or a partition of
// it.
func (c *Claims) has(chip accel.DeviceID) bool {
	if len(c.held) == 0 {
		return false
	}
	part := ClaimPart{Card: StoredCard{Chips: []accel.DeviceID{chip}}}
	for _, claim := range c.held {
		for i := range claim.Parts {
			if !claim.Parts[i].Admin && c.overlap(&part, &claim.Parts[i]) {
				return true
			}
		}
	}
	return false
}

// asClaim stands for the resource as which a claim holds a chip.
const asClaim accel.Resource = "a resource claim"

// devices lists the devices of a claim.
func (c *Claim) devices() string {
	names := make([]accel.DeviceID, len(c.Parts))
	for i, part := range c.Parts {
		names[i] = accel.DeviceID(part.Device)
	}
	return join(names)
}

// what says how a part holds its device.
func (p *ClaimPart) what() string {
	switch {
	case p.Bytes > 0:
		return fmt.Sprintf("%s with %d bytes", p.Device, p.Bytes)
	case p.Slots > 0:
		return fmt.Sprintf("%s with %d time slices", p.Device, p.Slots)
	}
	return p.Device
}

// sameParts reports whether two lists of parts are of the same devices, amounts and
// requests.
func sameParts(a, b []ClaimPart) bool {
	return slices.EqualFunc(a, b, func(x, y ClaimPart) bool {
		return x.Request == y.Request && x.Device == y.Device && x.Share == y.Share && x.Bytes == y.Bytes &&
			x.Slots == y.Slots && x.Admin == y.Admin
	})
}

func mergePods(a, b []string) []string {
	out := slices.Concat(a, b)
	slices.Sort(out)
	return slices.Compact(out)
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
