package sharing

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// SlotID names what kubelet counts of a resource of whole devices or of time
// slices. It is the form that the vendors' device plugins use, so what a
// container was given by them keeps its meaning: "<uuid>" for a device,
// "<uuid>::<n>" for a replica.
type SlotID struct {
	Device accel.DeviceID
	// Replica counts from 0; WholeDevice for a device that is not sliced.
	Replica int
}

// WholeDevice is the Replica of the only slot of an exclusive device.
const WholeDevice = -1

// maxReplica bounds what ParseSlotID accepts.
const maxReplica = 1 << 20

const replicaSeparator = "::"

// String returns the text that ParseSlotID reads.
func (s SlotID) String() string {
	if s.Replica < 0 {
		return string(s.Device)
	}
	return string(s.Device) + replicaSeparator + strconv.Itoa(s.Replica)
}

// ParseSlotID reads a slot id. It accepts only what String writes.
func ParseSlotID(id string) (SlotID, error) {
	device, digits, sliced := cutLast(id, replicaSeparator)
	if device == "" {
		return SlotID{}, fmt.Errorf("slot id %q names no device", id)
	}
	if !sliced {
		return SlotID{Device: accel.DeviceID(id), Replica: WholeDevice}, nil
	}
	n, err := strconv.ParseUint(digits, 10, 31)
	if err != nil || n > maxReplica || strconv.FormatUint(n, 10) != digits {
		return SlotID{}, fmt.Errorf("slot id %q: %q is not the number of a replica", id, digits)
	}
	return SlotID{Device: accel.DeviceID(device), Replica: int(n)}, nil
}

func cutLast(s, sep string) (before, after string, found bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}

// SlotIDs appends the ids of a device's slots to dst, in ascending order: the
// device's own for replicas 0, else that many replicas.
func SlotIDs(dst []string, d accel.DeviceID, replicas int) []string {
	if replicas == 0 {
		return append(dst, string(d))
	}
	for n := range replicas {
		dst = append(dst, SlotID{Device: d, Replica: n}.String())
	}
	return dst
}

// SlotPolicy says which of the devices that are shared by time slices is taken.
type SlotPolicy uint8

// The policies. Distributed is the zero value.
const (
	// Distributed takes the devices of which the fewest slots are held.
	Distributed SlotPolicy = iota
	// Packed takes those of which the most are.
	Packed
)

// SlotDevice is a device as the choice of slots sees it.
type SlotDevice struct {
	ID    accel.DeviceID
	Index int
	// Parent is the device that this one is a partition of, "" for a whole device.
	Parent accel.DeviceID
	// Replicas is how many slots the device has, 0 for one that is given out as
	// a whole.
	Replicas int
	// Unusable says why no new container gets slots of the device, "" when it
	// may: "lost", "given out as nvidia.com/gpu-memory".
	Unusable string
	// Avoid is true for a device that is promised to somebody else: it is
	// taken only when the others do not suffice.
	Avoid bool
}

// has reports whether the device has that replica now.
func (d *SlotDevice) has(replica int) bool {
	if d.Replicas == 0 {
		return replica == WholeDevice
	}
	return replica >= 0 && replica < d.Replicas
}

// SlotQuestion is one question of kubelet: which slots should one container
// get?
type SlotQuestion struct {
	Resource accel.Resource
	// Size is how many slots the container gets, those in Must included.
	Size int
	// Available are the ids of free slots, Must those that have to be among the
	// answer, such as slots of the pod's init containers. Ids of devices that
	// are not known are not chosen.
	Available, Must []string
	// Devices are all devices of the resource, in any order.
	Devices []SlotDevice
	// Links are the connections between them.
	Links  []accel.Link
	Policy SlotPolicy
}

// ErrTooFewSlots is the error of a question for which the node has not enough
// slots that may be given out. Errors that wrap it say how many there are and
// why not more.
var ErrTooFewSlots = errors.New("not enough devices may be given out")

// ChooseSlots answers a question of kubelet, with ids in ascending order of the
// devices' Index and then replica. The order of the question's lists does not
// matter.
//
// Slots of devices to be avoided are taken last of all. Of partitions that are equally
// good, those are taken first whose parent has the fewest slots held (with Packed the
// most). Beyond that, of whole
// devices it takes the ones that are connected best (place.Connected). Of time
// slices it takes as many different devices as there are, first those of which
// the fewest slots are held (with Packed the most), among equals those that are
// connected best with each other and with those chosen already, then those with
// the lowest Index; only when all devices serve the container does it take a
// second slot of one.
func ChooseSlots(q SlotQuestion) ([]string, error) {
	c, err := newChooser(q)
	if err != nil {
		return nil, err
	}
	for _, avoid := range []bool{false, true} {
		for c.need > 0 {
			tier := c.tier(avoid)
			if len(tier) == 0 {
				break
			}
			if err := c.take(tier); err != nil {
				return nil, err
			}
		}
	}
	if c.need > 0 {
		return nil, c.refuse()
	}
	return c.answer(), nil
}

// chooser is the state of one choice. Devices go by their position in devices,
// which is sorted by Index.
type chooser struct {
	q       SlotQuestion
	devices []SlotDevice
	graph   *place.Graph
	// free are the replicas that may still be taken, ascending; picked those
	// that were chosen; held is how many slots others hold.
	free, picked [][]int
	held         []int
	// need is how many slots are still to be chosen.
	need int
	// strangers is how many available ids name no known device or replica.
	strangers int
}

func newChooser(q SlotQuestion) (*chooser, error) {
	c := &chooser{q: q, devices: slices.Clone(q.Devices), need: q.Size - len(q.Must)}
	if q.Size < 1 {
		return nil, fmt.Errorf("%s: %d devices asked for", q.Resource, q.Size)
	}
	if c.need < 0 {
		return nil, fmt.Errorf("%s: %d devices asked for and %d to be reused", q.Resource, q.Size, len(q.Must))
	}
	slices.SortFunc(c.devices, func(a, b SlotDevice) int { return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.ID, b.ID)) })
	ids := make([]accel.DeviceID, len(c.devices))
	for i, d := range c.devices {
		ids[i] = d.ID
	}
	c.graph = place.NewGraph(ids, q.Links)
	c.free, c.picked = make([][]int, len(ids)), make([][]int, len(ids))
	c.held = make([]int, len(ids))
	must := map[string]bool{}
	for _, id := range q.Must {
		// A replica beyond the present number is one from before a change of the
		// configuration, and the pod's all the same.
		i, replica, ok := c.find(id)
		if !ok {
			return nil, fmt.Errorf("%s: %q, which is to be reused, is none of its devices", q.Resource, id)
		}
		if must[id] {
			return nil, fmt.Errorf("%s: %q is to be reused twice", q.Resource, id)
		}
		must[id] = true
		c.picked[i] = append(c.picked[i], replica)
	}
	for _, id := range q.Available {
		if must[id] {
			continue
		}
		i, replica, ok := c.find(id)
		if !ok || !c.devices[i].has(replica) {
			c.strangers++
			continue
		}
		c.free[i] = append(c.free[i], replica)
	}
	for i, d := range c.devices {
		slices.Sort(c.free[i])
		c.free[i] = slices.Compact(c.free[i])
		c.held[i] = max(0, max(d.Replicas, 1)-len(c.free[i])-len(c.picked[i]))
	}
	return c, nil
}

// find returns the device's position and the replica that a slot id names.
func (c *chooser) find(id string) (device, replica int, ok bool) {
	s, err := ParseSlotID(id)
	if err != nil {
		return 0, 0, false
	}
	device, ok = c.graph.Position(s.Device)
	return device, s.Replica, ok
}

// tier returns the positions of the devices that are equally good, but for
// their connections, for the next slots, ascending.
func (c *chooser) tier(avoid bool) []int {
	var best []int
	for i := range c.devices {
		if len(c.free[i]) == 0 || c.devices[i].Unusable != "" || c.devices[i].Avoid != avoid {
			continue
		}
		order := -1
		if len(best) > 0 {
			order = c.compare(i, best[0])
		}
		switch {
		case order < 0:
			best = append(best[:0], i)
		case order == 0:
			best = append(best, i)
		}
	}
	return best
}

// compare is negative when the next slot is better taken of the device at
// position a than of the one at b.
func (c *chooser) compare(a, b int) int {
	load := cmp.Compare(c.held[a], c.held[b])
	if c.q.Policy == Packed {
		load = -load
	}
	return cmp.Or(cmp.Compare(len(c.picked[a]), len(c.picked[b])), load, c.compareParents(a, b))
}

// compareParents compares the devices that two partitions are cut from, by how many
// slots of all their partitions are taken.
func (c *chooser) compareParents(a, b int) int {
	if c.devices[a].Parent == "" || c.devices[b].Parent == "" {
		return 0
	}
	taken := map[accel.DeviceID]int{}
	for i, d := range c.devices {
		taken[d.Parent] += c.held[i] + len(c.picked[i])
	}
	load := cmp.Compare(taken[c.devices[a].Parent], taken[c.devices[b].Parent])
	if c.q.Policy == Packed {
		load = -load
	}
	return load
}

// take takes a slot of each device in the tier or, when they are more than
// needed, of those that are connected best.
func (c *chooser) take(tier []int) error {
	if c.devices[tier[0]].Parent != "" {
		tier = tier[:1] // each one changes which parent is the best for the next
	}
	if len(tier) > c.need {
		if len(c.picked[tier[0]]) > 0 {
			// All of them serve the container already.
			tier = tier[:c.need]
		} else {
			var with []int
			for i := range c.picked {
				if len(c.picked[i]) > 0 {
					with = append(with, i)
				}
			}
			chosen, err := place.Connected(c.graph, tier, with, len(with)+c.need)
			if err != nil {
				return fmt.Errorf("%s: %w", c.q.Resource, err)
			}
			tier = slices.DeleteFunc(chosen, func(i int) bool { return len(c.picked[i]) > 0 })
		}
	}
	for _, i := range tier {
		c.picked[i] = append(c.picked[i], c.free[i][0])
		c.free[i] = c.free[i][1:]
		c.need--
	}
	return nil
}

func (c *chooser) answer() []string {
	out := make([]string, 0, c.q.Size)
	for i, replicas := range c.picked {
		slices.Sort(replicas)
		for _, r := range replicas {
			out = append(out, SlotID{Device: c.devices[i].ID, Replica: r}.String())
		}
	}
	return out
}

// refuse says how many slots there are for the container and why not more.
func (c *chooser) refuse() error {
	what := "devices"
	if len(c.devices) > 0 && c.devices[0].Replicas > 0 {
		what = "replicas"
	}
	why := map[string]int{}
	total := 0
	for i, d := range c.devices {
		total += max(d.Replicas, 1)
		if n := c.held[i]; n > 0 {
			why["held by containers"] += n
		}
		if n := len(c.free[i]); n > 0 { // only of devices that are not usable
			why[d.Unusable] += n
		}
	}
	text := fmt.Sprintf("%s: %d %s asked for, %d of %d may be given out", c.q.Resource, c.q.Size, what, c.q.Size-c.need, total)
	sep := ": "
	for _, reason := range slices.Sorted(maps.Keys(why)) {
		text += fmt.Sprintf("%s%d %s", sep, why[reason], reason)
		sep = ", "
	}
	if c.strangers > 0 {
		text += fmt.Sprintf("%s%d that kubelet offers are not known", sep, c.strangers)
	}
	return fmt.Errorf("%s: %w", text, ErrTooFewSlots)
}
