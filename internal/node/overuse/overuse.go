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

// Episode is the time in which a container uses more memory of a device than its allocation.
type Episode struct {
	Vendor string
	Device accel.DeviceID
	Index  int
	// Container is the last pass's row of the container. If only the pod is known of some
	// process, Container.Container is "" and the amounts are the pod's sums.
	Container wire.ContainerUsage
	// Since is when the overuse began that no pass has interrupted; the zero time while the
	// last pass proved nothing.
	Since time.Time
	// Peak is the most that the container was over its allocation, in bytes.
	Peak uint64
}

// Excess is what the container uses beyond its allocation, in bytes.
func (e Episode) Excess() uint64 {
	used, allocated := *e.Container.UsedBytes, *e.Container.AllocatedBytes
	return used - min(used, allocated)
}

// Pass is one pass of measured use.
type Pass struct {
	Time time.Time
	// Devices are all devices with containers, measured in this pass.
	Devices []wire.DeviceUsage
	// Model returns the model of a device.
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
	// passes is how many in a row have shown overuse, since the time since.
	passes  int
	since   time.Time
	began   bool
	episode Episode
}

// New returns a Watch. allowance is how much memory each process may use for its context,
// in bytes, by vendor. Of other vendors it is the least memory that any process was seen to
// use on a device of the same model; no container is over while that is not known.
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
}

// Look takes in a pass. A container that the pass does not list has ended.
func (w *Watch) Look(p Pass) Changes {
	var changes Changes
	seen := map[key]bool{}
	for _, d := range p.Devices {
		w.learn(d, p.Model(d.Device))
		if !conclusive(d) {
			// Its rows may lack processes, so all that was listed before counts as seen.
			for k, s := range w.suspects {
				if k.device == d.Device {
					seen[k] = true
					s.interrupt()
				}
			}
			continue
		}
		rows, parts := judged(d.Containers)
		for _, row := range parts {
			k := keyOf(d.Device, row)
			if s := w.suspects[k]; s != nil {
				seen[k] = true
				s.interrupt()
			}
		}
		for _, row := range rows {
			k := keyOf(d.Device, row)
			seen[k] = true
			s := w.suspects[k]
			if s == nil {
				s = &suspect{}
				w.suspects[k] = s
			}
			before := s.began
			w.judge(s, d, row, p)
			switch {
			case s.began && !before:
				changes.Began = append(changes.Began, s.episode)
			case before && !s.began:
				changes.Ended = append(changes.Ended, s.episode)
			}
		}
	}
	for k, s := range w.suspects {
		switch {
		case seen[k] && s.began:
			changes.Current = append(changes.Current, s.episode)
		case !seen[k] && s.began:
			s.episode.Container.UsedBytes, s.episode.Container.Processes = new(uint64), 0
			changes.Ended = append(changes.Ended, s.episode)
		}
	}
	maps.DeleteFunc(w.suspects, func(k key, _ *suspect) bool { return !seen[k] })
	for _, list := range [][]Episode{changes.Began, changes.Ended, changes.Current} {
		slices.SortFunc(list, compare)
	}
	return changes
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

// allowed returns what each process of a device may use for its context, false if that is
// not known.
func (w *Watch) allowed(vendor, name string) (uint64, bool) {
	if bytes, configured := w.allowance[vendor]; configured {
		return bytes, true
	}
	bytes, known := w.least[model{vendor, name}]
	return bytes, known
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

// judged returns the rows to judge: the containers, or instead of those of a pod the pod's
// sums if only the pod is known of some process; parts are the containers in such sums.
// Containers whose memory nothing bounds are left out. Rows must be in order of their pods.
func judged(all []wire.ContainerUsage) (rows, parts []wire.ContainerUsage) {
	for len(all) > 0 {
		n := 1
		for n < len(all) && all[n].Namespace == all[0].Namespace && all[n].Pod == all[0].Pod && all[n].PodUID == all[0].PodUID {
			n++
		}
		of := slices.DeleteFunc(slices.Clone(all[:n]), func(c wire.ContainerUsage) bool { return c.Container == "" })
		if len(of) == n {
			rows = append(rows, slices.DeleteFunc(of, unbounded)...)
		} else {
			if pod := podOf(all[:n]); !unbounded(pod) {
				rows = append(rows, pod)
			}
			parts = append(parts, of...)
		}
		all = all[n:]
	}
	return rows, parts
}

func unbounded(c wire.ContainerUsage) bool { return c.AllocatedBytes == nil }

// podOf returns the sums of a pod, nil for those that are not known.
func podOf(rows []wire.ContainerUsage) wire.ContainerUsage {
	pod := wire.ContainerUsage{Namespace: rows[0].Namespace, Pod: rows[0].Pod, PodUID: rows[0].PodUID, Resource: rows[0].Resource,
		AllocatedBytes: new(uint64), UsedBytes: new(uint64)}
	for _, c := range rows {
		pod.Processes += c.Processes
		pod.UsedBytes = sum(pod.UsedBytes, c.UsedBytes)
		if c.Container != "" {
			pod.AllocatedBytes = sum(pod.AllocatedBytes, c.AllocatedBytes)
		}
	}
	return pod
}

// sum returns a+b, nil if one of them is.
func sum(a, b *uint64) *uint64 {
	if a == nil || b == nil {
		return nil
	}
	return new(*a + *b)
}

// judge takes in a row of a conclusive pass.
func (w *Watch) judge(s *suspect, d wire.DeviceUsage, row wire.ContainerUsage, p Pass) {
	allowance, known := w.allowed(d.Vendor, p.Model(d.Device))
	started, running := p.Started(row)
	if !known || row.UsedBytes == nil || !running || p.Time.Sub(started) < settling {
		s.interrupt()
		return
	}
	used, allocated := *row.UsedBytes, *row.AllocatedBytes
	if s.allocated != allocated {
		s.allocated = allocated
		s.interrupt()
	}
	limit := allocated + allowance*uint64(row.Processes) //nolint:gosec // a count
	over := used > limit+max(minTolerance, allocated/toleranceDivisor)
	switch {
	case s.began && used > limit: // without the tolerance, so that an episode has one end
	case over:
	default:
		*s = suspect{allocated: allocated, episode: s.episode}
		s.episode.Container = row // with which it ended
		return
	}
	if s.passes == 0 {
		s.since = p.Time
	}
	s.passes++
	s.began = s.began || s.passes >= passesInARow
	s.episode = Episode{Vendor: d.Vendor, Device: d.Device, Index: d.Index, Container: row, Since: s.since,
		Peak: max(s.episode.Peak, used-allocated)}
}

// interrupt takes in a pass that proves nothing.
func (s *suspect) interrupt() {
	s.passes, s.since, s.episode.Since = 0, time.Time{}, time.Time{}
}
