package sharing

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// Range is the run of unit numbers that belongs to one device.
type Range struct {
	Device accel.DeviceID `json:"device"`
	// Index is the device's index when it was last seen.
	Index int `json:"index"`
	// Start is the first unit number, Units how many there are.
	Start int64       `json:"start"`
	Units accel.Units `json:"units"`
	// Model, MemoryBytes, NUMANode describe the device while it is away.
	Model       string `json:"model,omitempty"`
	MemoryBytes int64  `json:"memoryBytes"`
	NUMANode    int    `json:"numaNode"`
}

func (r Range) end() int64 { return r.Start + int64(r.Units) }

// Layout says which unit ids belong to which device. Containers keep their ids
// for as long as they run, so a range stays with its device when the device is
// away, when indexes shift and when the daemon restarts; it is given up only
// when its device is gone, nobody holds its units and another device needs
// room. The zero value is empty. Not safe for concurrent changes; a Layout that
// is no longer changed may be read concurrently.
type Layout struct {
	// ranges are sorted by Start and do not overlap.
	ranges []Range
	// byDevice holds positions in ranges.
	byDevice map[accel.DeviceID]int
}

// NewLayout checks ranges that come from outside.
func NewLayout(ranges []Range) (*Layout, error) {
	l := &Layout{ranges: slices.Clone(ranges)}
	l.index()
	for i, r := range l.ranges {
		switch {
		case r.Device == "":
			return nil, fmt.Errorf("range %d has no device", i)
		case r.Units < 0 || r.Start < 0 || int64(r.Units) > maxNumber || r.Start > maxNumber-int64(r.Units):
			return nil, fmt.Errorf("range %d of device %s is out of bounds: start %d, %d units", i, r.Device, r.Start, r.Units)
		case i > 0 && r.Start < l.ranges[i-1].end():
			return nil, fmt.Errorf("ranges of devices %s and %s overlap", l.ranges[i-1].Device, r.Device)
		case l.byDevice[r.Device] != i:
			return nil, fmt.Errorf("device %s has two ranges", r.Device)
		}
	}
	return l, nil
}

// Ranges returns a copy of the ranges in ascending order of Start.
func (l *Layout) Ranges() []Range { return slices.Clone(l.ranges) }

// Range returns the range of a device.
func (l *Layout) Range(d accel.DeviceID) (Range, bool) {
	i, ok := l.byDevice[d]
	if !ok {
		return Range{}, false
	}
	return l.ranges[i], true
}

// Device returns the device that a unit id names.
func (l *Layout) Device(id string) (accel.DeviceID, bool) {
	n, ok := parseID(id)
	if !ok {
		return "", false
	}
	i, found := slices.BinarySearchFunc(l.ranges, n, func(r Range, n int64) int { return cmp.Compare(r.Start, n) })
	if !found {
		i--
	}
	if i < 0 || n >= l.ranges[i].end() {
		return "", false
	}
	return l.ranges[i].Device, true
}

// IDs appends the unit ids of a device to dst, in ascending order of number.
func (l *Layout) IDs(dst []string, d accel.DeviceID) []string {
	r, ok := l.Range(d)
	if !ok {
		return dst
	}
	for n := r.Start; n < r.end(); n++ {
		dst = append(dst, formatID(n))
	}
	return dst
}

// Place returns a layout that has a range for each share. Devices that are
// known keep their range if their units did not change. held says how many
// units of a device containers hold; a device whose number of units changed
// while some are held keeps its old range and is named in the error together
// with what stands in the way. Shares without units get no range.
func (l *Layout) Place(shares []accel.Share, held func(accel.DeviceID) int) (*Layout, error) {
	var kept []Range
	var fresh []accel.Share
	var stuck error
	present := map[accel.DeviceID]bool{}
	for _, s := range shares {
		present[s.ID] = true
		r, known := l.Range(s.ID)
		switch {
		case !known:
		case r.Units == s.Units:
			r.Index, r.Model, r.MemoryBytes, r.NUMANode = s.Index, s.Model, s.MemoryBytes, s.NUMANode
			kept = append(kept, r)
			continue
		case held(s.ID) > 0:
			stuck = fmt.Errorf("device %s would change from %d to %d units while containers hold %d of them", s.ID, r.Units, s.Units,
				held(s.ID))
			kept = append(kept, r)
			continue
		}
		if s.Units > 0 {
			fresh = append(fresh, s)
		}
	}
	var away []Range
	for _, r := range l.ranges {
		if !present[r.Device] {
			away = append(away, r)
		}
	}
	// Ranges of devices that are away stay where they are, unless new devices
	// come: then those that nobody holds make room.
	if len(fresh) > 0 {
		away = slices.DeleteFunc(away, func(r Range) bool { return held(r.Device) == 0 })
	}
	next := &Layout{ranges: append(kept, away...)}
	next.index()
	for _, s := range fresh {
		next.insert(newRange(s, 0))
	}
	if n := len(next.ranges); n > 0 && next.ranges[n-1].end() > maxNumber {
		return l, fmt.Errorf("the devices have %d units together, more than %d; choose a larger memoryUnit", next.ranges[n-1].end(),
			maxNumber)
	}
	return next, stuck
}

// Recover returns a layout in which each id in claims belongs to the device that
// it is listed under, for a node whose state was lost while containers hold
// units. Shares keep the numbers of units that they have. It is an error when
// there is no such layout.
func Recover(shares []accel.Share, claims map[accel.DeviceID][]string) (*Layout, error) {
	type span struct {
		share       accel.Share
		first, last int64
	}
	var held []span
	for d, ids := range claims {
		s := span{first: -1}
		for _, id := range ids {
			n, ok := parseID(id)
			if !ok {
				return nil, fmt.Errorf("unit id %q, which is held of device %s, is none of this program's", id, d)
			}
			if s.first < 0 || n < s.first {
				s.first = n
			}
			s.last = max(s.last, n)
		}
		if len(ids) == 0 {
			continue
		}
		i := slices.IndexFunc(shares, func(s accel.Share) bool { return s.ID == d })
		if i < 0 {
			return nil, fmt.Errorf("containers hold %d units of device %s, which is not there now", len(ids), d)
		}
		s.share = shares[i]
		held = append(held, s)
	}
	slices.SortFunc(held, func(a, b span) int { return cmp.Compare(a.first, b.first) })
	l := &Layout{}
	var end int64
	for _, s := range held {
		// As far down as the units held allow leaves most room for the next.
		start := max(end, s.last+1-int64(s.share.Units), 0)
		if start > s.first {
			return nil, fmt.Errorf("the units held of device %s do not fit its %d units beside those of the others", s.share.ID,
				s.share.Units)
		}
		l.ranges = append(l.ranges, newRange(s.share, start))
		end = start + int64(s.share.Units)
	}
	l.index()
	return l.Place(shares, func(d accel.DeviceID) int { return len(claims[d]) })
}

// Runs cuts unit ids that are held of n devices, the same number of each, into
// what belongs to each device: ids of one device are in one run of numbers. Which
// run is which device's is for the caller to say. It is an error when there is no
// such cut.
func Runs(ids []string, n int) ([][]string, error) {
	if n < 1 || len(ids)%n != 0 {
		return nil, fmt.Errorf("%d units cannot be held of %d devices in equal parts", len(ids), n)
	}
	numbers := make([]int64, len(ids))
	for i, id := range ids {
		number, ok := parseID(id)
		if !ok {
			return nil, fmt.Errorf("unit id %q is none of this program's", id)
		}
		numbers[i] = number
	}
	slices.Sort(numbers)
	runs := make([][]string, n)
	for i, number := range numbers {
		run := i / (len(ids) / n)
		runs[run] = append(runs[run], formatID(number))
	}
	return runs, nil
}

func newRange(s accel.Share, start int64) Range {
	return Range{Device: s.ID, Index: s.Index, Start: start, Units: s.Units, Model: s.Model, MemoryBytes: s.MemoryBytes,
		NUMANode: s.NUMANode}
}

// insert puts r into the first gap that is large enough.
func (l *Layout) insert(r Range) {
	for _, other := range l.ranges {
		if r.end() <= other.Start {
			break
		}
		r.Start = other.end()
	}
	l.ranges = append(l.ranges, r)
	l.index()
}

func (l *Layout) index() {
	slices.SortStableFunc(l.ranges, func(a, b Range) int { return cmp.Compare(a.Start, b.Start) })
	l.byDevice = make(map[accel.DeviceID]int, len(l.ranges))
	for i, r := range l.ranges {
		l.byDevice[r.Device] = i
	}
}
