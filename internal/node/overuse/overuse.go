// Package overuse decides which containers use more memory of a device than their
// allocation, from pass to pass of measured use. It accuses no container on the strength of
// one pass, nor of a pass that proves nothing.
package overuse

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

const (
	// passesInARow is how many passes in a row must show overuse before it counts.
	passesInARow = 4
	// settling is how long after its start a container is not judged.
	settling = time.Minute
	// minTolerance is the least that a container may use beside its allocation: libraries
	// round up, and sample parts of a device at different moments.
	minTolerance = 64 << 20
	// toleranceDivisor makes a larger tolerance for larger allocations: 2 %.
	toleranceDivisor = 50
	// excessDivisor is which part of a device's used memory the sum of the processes may
	// exceed it by, 5 %: memory that processes share counts for each of them.
	excessDivisor = 20
)

// maxMeasuredAllowance bounds the allowance that is not configured: contexts have hundreds
// of MiB. Without it, the smallest process of a model would never be found.
const maxMeasuredAllowance = 1 << 30

// Episode is the time in which a container uses more memory of a device than its allocation.
type Episode struct {
	Vendor string
	Device accel.DeviceID
	Index  int
	// Container is the last pass's row of the container. If Container.Container is "", the
	// amounts are the sums of the pod: only the pod is known of some process.
	Container wire.ContainerUsage
	// Since is when the overuse began that no pass has interrupted; the zero time while the
	// last pass proved nothing.
	Since time.Time
	// Peak is the most that the container was over its allocation in the episode, in bytes.
	Peak uint64
	// Assured is true if the context allowance is configured. A measured one is good enough
	// for a report, not for more: processes of other pods have a part in it.
	Assured bool
}

// Pass is one pass of measured use.
type Pass struct {
	Time time.Time
	// Devices are all devices with containers, measured in this pass.
	Devices []wire.DeviceUsage
	// Model returns the model of a device; processes on devices of the same model have
	// contexts of about the same size.
	Model func(accel.DeviceID) string
	// Started returns when the container of a row started to run, false if that is not
	// known. For a row of a pod, it is the last start of any of its containers.
	Started func(wire.ContainerUsage) (time.Time, bool)
}

// Watch follows the containers over passes. It is not safe for concurrent use.
type Watch struct {
	// allowance is what each process may use for its context, in bytes, by vendor.
	allowance map[string]uint64
	// least is the least that a process was seen to use, by vendor and model, for the
	// vendors without an allowance.
	least    map[model]uint64
	suspects map[key]*suspect
}

type model struct{ vendor, name string }

// key is a container, or a pod if container is "", on a device.
type key struct {
	device                         accel.DeviceID
	namespace, pod, uid, container string
}

// suspect is what is known of a container.
type suspect struct {
	allocated uint64
	started   time.Time
	// passes is how many in a row have shown overuse, since the time since.
	passes  int
	since   time.Time
	began   bool
	episode Episode
}

// New returns a Watch. allowance is how much memory each process may use for its context,
// in bytes, by vendor. Of other vendors it is the least memory that any process was seen to
// use on a device of the same model, at most 1 GiB; no container is over while that is not
// known.
func New(allowance map[string]uint64) *Watch {
	return &Watch{allowance: allowance, least: map[model]uint64{}, suspects: map[key]*suspect{}}
}

// Changes is what a pass has shown. All lists are in ascending order of device and names.
type Changes struct {
	// Ended are those of containers that are within their allocation again, or that have
	// ended and use nothing.
	Began, Ended []Episode
	// Current are the episodes that go on, those that began among them.
	Current []Episode
	// Conclusive is true if the pass proves something about a device, or there is none.
	Conclusive bool
}

// Look takes in a pass. A container that the pass does not list has ended.
func (w *Watch) Look(p Pass) Changes {
	changes := Changes{Conclusive: len(p.Devices) == 0}
	seen := map[key]bool{}
	for _, d := range p.Devices {
		w.learn(d, p.Model(d.Device))
		if !conclusive(d) {
			w.interrupt(d, seen)
			continue
		}
		changes.Conclusive = true
		for _, of := range byPod(d.Containers) {
			w.lookAtPod(d, of, p, seen, &changes)
		}
	}
	for k, s := range w.suspects {
		switch {
		case !s.began:
		case seen[k]:
			changes.Current = append(changes.Current, s.episode)
		default:
			s.episode.Container.UsedBytes, s.episode.Container.Processes = new(uint64), 0
			changes.Ended = append(changes.Ended, s.episode)
		}
	}
	maps.DeleteFunc(w.suspects, func(k key, s *suspect) bool { return !seen[k] || k.container == "" && s.passes == 0 && !s.began })
	for _, list := range [][]Episode{changes.Began, changes.Ended, changes.Current} {
		slices.SortFunc(list, compare)
	}
	return changes
}

// interrupt takes in a device of which the pass proves nothing. Rows of which only the pod
// is known are missing if the device could not be measured.
func (w *Watch) interrupt(d wire.DeviceUsage, seen map[key]bool) {
	for k, s := range w.suspects {
		listed := k.device == d.Device && slices.ContainsFunc(d.Containers, func(c wire.ContainerUsage) bool {
			return k == keyOf(d.Device, c) || k.container == "" && k.namespace == c.Namespace && k.pod == c.Pod && k.uid == c.PodUID
		})
		if listed {
			seen[k] = true
			s.interrupt()
		}
	}
}

// lookAtPod judges the rows of one pod on a device.
func (w *Watch) lookAtPod(d wire.DeviceUsage, of []wire.ContainerUsage, p Pass, seen map[key]bool, changes *Changes) {
	// rest is what the processes use of which only the pod is known, which may be any container's.
	rest, all, accused := new(uint64), true, false
	for _, row := range of {
		if row.Container == "" {
			rest, all = wire.SumKnown(rest, row.UsedBytes), false
		}
	}
	for _, row := range of {
		if row.Container != "" && row.AllocatedBytes != nil {
			accused = w.judge(d, row, rest, p, seen, changes) || accused
		}
	}
	pod := podOf(of)
	k := keyOf(d.Device, pod)
	_, suspected := w.suspects[k]
	switch {
	case accused:
		delete(w.suspects, k) // the same memory
	case pod.AllocatedBytes != nil && (!all || suspected):
		w.judge(d, pod, new(uint64), p, seen, changes)
	}
}

// judge takes in a row of a conclusive pass, and reports whether its container is in an
// episode. rest is what the container may use besides, nil if that is not known.
func (w *Watch) judge(d wire.DeviceUsage, row wire.ContainerUsage, rest *uint64, p Pass, seen map[key]bool, changes *Changes) bool {
	k := keyOf(d.Device, row)
	seen[k] = true
	s := w.suspects[k]
	if s == nil {
		s = &suspect{}
		w.suspects[k] = s
	}
	before := s.began
	allowance, assured, known := w.allowed(d.Vendor, p.Model(d.Device))
	started, running := p.Started(row)
	if known && row.UsedBytes != nil {
		limit := *row.AllocatedBytes + allowance*uint64(row.Processes) //nolint:gosec // a count
		s.look(row, limit, rest, started, running, p.Time)
	} else {
		s.interrupt()
	}
	s.episode.Vendor, s.episode.Device, s.episode.Index, s.episode.Assured = d.Vendor, d.Device, d.Index, assured
	switch {
	case s.began && !before:
		changes.Began = append(changes.Began, s.episode)
	case before && !s.began:
		changes.Ended = append(changes.Ended, s.episode)
	}
	return s.began
}

func keyOf(device accel.DeviceID, row wire.ContainerUsage) key {
	return key{device, row.Namespace, row.Pod, row.PodUID, row.Container}
}

func compare(a, b Episode) int {
	return cmp.Or(cmp.Compare(a.Vendor, b.Vendor), cmp.Compare(a.Index, b.Index), cmp.Compare(a.Device, b.Device),
		cmp.Compare(a.Container.Namespace, b.Container.Namespace), cmp.Compare(a.Container.Pod, b.Container.Pod),
		cmp.Compare(a.Container.Container, b.Container.Container), cmp.Compare(a.Container.PodUID, b.Container.PodUID))
}

// learn notes the least memory of a process.
func (w *Watch) learn(d wire.DeviceUsage, name string) {
	if d.Problem != "" || d.LeastProcessBytes == nil {
		return
	}
	m := model{d.Vendor, name}
	if before, known := w.least[m]; !known || *d.LeastProcessBytes < before {
		w.least[m] = *d.LeastProcessBytes
	}
}

// allowed returns what each process of a device may use for its context, whether that is
// configured, and whether it is known.
func (w *Watch) allowed(vendor, name string) (bytes uint64, configured, known bool) {
	if bytes, configured = w.allowance[vendor]; configured {
		return bytes, true, true
	}
	bytes, known = w.least[model{vendor, name}]
	return min(bytes, maxMeasuredAllowance), false, known
}

// conclusive reports whether the pass proves anything about a device.
func conclusive(d wire.DeviceUsage) bool {
	if d.Problem != "" {
		return false
	}
	sum := d.SystemBytes + d.ForeignBytes
	for _, c := range d.Containers {
		if c.UsedBytes != nil {
			sum += *c.UsedBytes
		}
	}
	return sum <= d.UsedBytes+d.UsedBytes/excessDivisor
}

// byPod returns the rows of each pod. Rows must be in order of their pods.
func byPod(rows []wire.ContainerUsage) (out [][]wire.ContainerUsage) {
	for len(rows) > 0 {
		n := 1
		for n < len(rows) && rows[n].Namespace == rows[0].Namespace && rows[n].Pod == rows[0].Pod && rows[n].PodUID == rows[0].PodUID {
			n++
		}
		out, rows = append(out, rows[:n]), rows[n:]
	}
	return out
}

// podOf returns the sums of a pod, nil for those that are not known.
func podOf(rows []wire.ContainerUsage) wire.ContainerUsage {
	pod := wire.ContainerUsage{Namespace: rows[0].Namespace, Pod: rows[0].Pod, PodUID: rows[0].PodUID, Resource: rows[0].Resource,
		AllocatedBytes: new(uint64), UsedBytes: new(uint64)}
	for _, c := range rows {
		pod.Processes += c.Processes
		pod.UsedBytes = wire.SumKnown(pod.UsedBytes, c.UsedBytes)
		if c.Container != "" {
			pod.AllocatedBytes = wire.SumKnown(pod.AllocatedBytes, c.AllocatedBytes)
		}
	}
	return pod
}

// look takes in a row whose use is known, and what its container may use: its allocation and
// the context allowance. A use within that ends an episode whether the container runs or not;
// the guards are for those above it.
func (s *suspect) look(row wire.ContainerUsage, limit uint64, rest *uint64, started time.Time, running bool, now time.Time) {
	used, allocated := *row.UsedBytes, *row.AllocatedBytes
	if running && !s.started.Equal(started) {
		if !s.started.IsZero() { // another run of the container; the last one uses nothing
			row.UsedBytes = new(uint64)
			s.end(row)
		}
		s.started = started
	}
	if s.allocated != allocated {
		s.allocated = allocated
		s.interrupt()
	}
	switch {
	case s.began && used > limit: // without the tolerance, so that an episode has one end
	case used > limit+max(minTolerance, allocated/toleranceDivisor):
	case rest != nil && used+*rest <= limit:
		s.end(row)
		return
	default:
		s.interrupt()
		return
	}
	if !running || now.Sub(started) < settling {
		s.interrupt()
		return
	}
	if s.passes == 0 {
		s.since = now
		if !s.began {
			s.episode.Peak = 0
		}
	}
	s.passes++
	s.began = s.began || s.passes >= passesInARow
	s.episode.Container, s.episode.Since, s.episode.Peak = row, s.since, max(s.episode.Peak, used-allocated)
}

// end takes in a row with which an episode has ended, if there was one.
func (s *suspect) end(row wire.ContainerUsage) {
	s.interrupt()
	s.began, s.episode.Container = false, row
}

// interrupt takes in a pass that proves nothing.
func (s *suspect) interrupt() {
	s.passes, s.since, s.episode.Since = 0, time.Time{}, time.Time{}
}
