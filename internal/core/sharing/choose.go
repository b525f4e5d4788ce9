package sharing

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// Part is a number of units of one device.
type Part struct {
	Device accel.DeviceID
	Units  accel.Units
}

// Waiting is a pod that is bound to this node and still waits for units of a
// resource. Kubelet does not say for which pod it asks, so a question is
// matched with the pods that may be behind it.
type Waiting struct {
	Pod     accel.PodRef
	Request accel.Request
	// Admitting is true when kubelet counts the pod as active. Kubelet takes up
	// one pod, admits it, and takes up the next, so of the pods that wait it is
	// the one that kubelet asks for.
	Admitting bool
	// Later is true when kubelet has not taken the pod up and is admitting one
	// that is not known: the question is not for this pod, but what it was
	// granted is promised to it.
	Later bool
	// Next is the position in Request.Containers of the first container that
	// was not served yet.
	Next int
	// Held are the devices of the containers served already, with the units that
	// the pod has of each; nil for none.
	Held []Part
	// Granted are the devices that the extender chose, nil for none.
	Granted []accel.DeviceID
	// At is when it was granted or, without a grant, created.
	At time.Time
}

// asks returns the units that the next container asks for, 0 when all were
// served.
func (w *Waiting) asks() accel.Units {
	if w.Next >= len(w.Request.Containers) {
		return 0
	}
	return w.Request.Containers[w.Next].Units
}

// devices is how many devices the pod is spread over.
func (w *Waiting) devices() int {
	switch {
	case len(w.Held) > 0:
		return len(w.Held)
	case len(w.Granted) > 0:
		return len(w.Granted)
	}
	return max(1, w.Request.Devices)
}

// share is what the pod needs of each of its devices, at its peak.
func (w *Waiting) share() accel.Units {
	n := accel.Units(w.devices())
	peak := w.Request.Peak()
	return peak/n + min(1, peak%n)
}

// still is what the pod will still take of a device, by what it holds or was
// granted.
func (w *Waiting) still(d accel.DeviceID) accel.Units {
	if len(w.Held) == 0 {
		if slices.Contains(w.Granted, d) {
			return w.share()
		}
		return 0
	}
	for _, p := range w.Held {
		if p.Device == d {
			return max(0, w.share()-p.Units)
		}
	}
	return 0
}

// Choice is the answer to one question of kubelet.
type Choice struct {
	// Parts are the devices, in the order of the pod's grant, with the units of
	// each that the container gets besides those that kubelet wants reused.
	Parts []Part
	// Pod is the position in the waiting pods of the one that the question is
	// taken to be for, -1 when none matches.
	Pod int
}

// ErrNoRoom is the error of a question that no device of the node can answer.
var ErrNoRoom = errors.New("no device of this node has enough free units")

// ErrNotIsolated is the error of a question for a pod that requires a tier of isolation that
// no device of the node has.
var ErrNotIsolated = errors.New("no device of this node is isolated enough")

// Choose picks the devices whose units the container gets that kubelet asks
// about. node has the devices of the node with the units that no container
// holds. size is what the container asks for in all; must are the devices of the
// units that kubelet wants reused, with their numbers, nil for none.
//
// Kubelet admits one pod at a time and serves its containers in order. So, in
// this order: units to be reused name the devices; the question is for a pod
// that is being admitted, if one is known; a pod of which some containers were
// served stays on its devices; else it is the pod with the oldest grant whose
// first container asks for this many units, and it gets the granted devices, or
// the best fit if those have no room any more; else a pod without a grant, or an
// unknown one (a static pod), which gets the best fit beside what was granted
// to others.
//
// Each device of a pod carries the same part of it: a container gets of each what
// brings the pod's parts level.
//
// When it is not known who is being admitted, two pods whose questions look
// alike may be taken for each other. That cannot take more of a device than it
// has, and the ledger follows what kubelet reports afterwards.
func Choose(size accel.Units, must []Part, node place.Node, waiting []Waiting) (Choice, error) {
	p := &plan{node: node, waiting: waiting}
	if len(must) > 0 {
		return p.reuse(size, must)
	}
	order := p.order(size)
	var refusal error
	for _, i := range order {
		if len(waiting[i].Held) == 0 {
			continue
		}
		// Being admitted now, or refused by kubelet for another reason a moment
		// ago: then the next candidate may be the one.
		parts := level(waiting[i].Held, size)
		short := p.lacking(parts)
		if short == nil {
			return Choice{Parts: parts, Pod: i}, nil
		}
		refusal = cmp.Or(refusal, fmt.Errorf("%w: the containers of pod %s share %s, and %s has %d of the %d units that the next one "+
			"asks for there",
			ErrNoRoom, waiting[i].Pod, named(parts), named([]Part{*short}), p.free(short.Device), short.Units))
	}
	for _, i := range order {
		w := &waiting[i]
		if len(w.Held) > 0 {
			continue
		}
		n := w.devices()
		if size%accel.Units(n) != 0 && len(w.Granted) == 0 {
			refusal = cmp.Or(refusal, fmt.Errorf("%w: pod %s asks for %d units on %d devices, which is no equal part for each", ErrNoRoom,
				w.Pod, size, n))
			continue
		}
		// Not less than what is asked for, whatever is known of the pod.
		need := max(w.share(), size/accel.Units(n))
		if len(w.Granted) > 0 && !slices.ContainsFunc(w.Granted, func(d accel.DeviceID) bool {
			return !p.usable(d, w.Request.Selection) || p.free(d) < need
		}) {
			return Choice{Parts: level(none(w.Granted), size), Pod: i}, nil
		}
		if devices := p.pick(place.Ask{Units: need, Devices: n, Only: w.Request.Selection}, i, place.Binpack); devices != nil {
			return Choice{Parts: level(none(devices), size), Pod: i}, nil
		}
		refusal = cmp.Or(refusal, p.refuse(w.Pod.String(), need, n, i, w.Request.Selection))
	}
	if refusal != nil {
		return Choice{}, refusal
	}
	// Nobody known waits for this many: a static pod, whose other containers
	// cannot be foreseen either. The device with the most room serves them best.
	if devices := p.pick(place.Ask{Units: size, Devices: 1}, -1, place.Spread); devices != nil {
		return Choice{Parts: level(none(devices), size), Pod: -1}, nil
	}
	return Choice{}, p.refuse("a pod that the API server does not know", size, 1, -1, nil)
}

// none are the devices with no units of them.
func none(devices []accel.DeviceID) []Part {
	parts := make([]Part, len(devices))
	for i, d := range devices {
		parts[i].Device = d
	}
	return parts
}

// level divides units over the devices so that what the pod has of them is as
// equal as it can be; of equal ones the first gets more. held is what it has so
// far. The answer has the devices in the same order.
func level(held []Part, units accel.Units) []Part {
	parts := make([]Part, len(held))
	order := make([]int, len(held))
	for i, h := range held {
		parts[i].Device, order[i] = h.Device, i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(held[a].Units, held[b].Units) })
	for n := len(order); n > 0; n-- {
		// Those that have more than the level of the n that have least get none.
		total := units
		for _, i := range order[:n] {
			total += held[i].Units
		}
		each, rest := total/accel.Units(n), total%accel.Units(n)
		if n > 1 && held[order[n-1]].Units > each {
			continue
		}
		for k, i := range order[:n] {
			parts[i].Units = each - held[i].Units
			if accel.Units(k) < rest {
				parts[i].Units++
			}
		}
		break
	}
	return parts
}

type plan struct {
	node    place.Node
	waiting []Waiting
}

// order returns the waiting pods whose next container asks for size, granted
// ones first, oldest first; only those being admitted, if there are any.
func (p *plan) order(size accel.Units) []int {
	var out []int
	admitting := false
	for i := range p.waiting {
		w := &p.waiting[i]
		if w.asks() != size || w.Later || admitting && !w.Admitting {
			continue
		}
		if w.Admitting && !admitting {
			admitting, out = true, nil
		}
		out = append(out, i)
	}
	slices.SortFunc(out, func(a, b int) int {
		x, y := &p.waiting[a], &p.waiting[b]
		return cmp.Or(
			boolCompare(len(x.Granted) == 0, len(y.Granted) == 0),
			x.At.Compare(y.At),
			cmp.Compare(x.Pod.UID, y.Pod.UID),
		)
	})
	return out
}

func boolCompare(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}

// reuse answers where kubelet gives the container units that init containers of
// its pod have.
func (p *plan) reuse(size accel.Units, must []Part) (Choice, error) {
	more := size
	for _, m := range must {
		more -= m.Units
	}
	held, pod := must, -1
	for _, i := range p.order(size) {
		// Others may hold units there: one that failed a moment ago, for example.
		if has(p.waiting[i].Held, must) {
			held, pod = p.waiting[i].Held, i
			break
		}
	}
	parts := level(held, max(more, 0))
	if short := p.lacking(parts); short != nil {
		return Choice{}, fmt.Errorf("%w: the init containers of the pod hold units of %s, which has %d of the %d more that the next "+
			"container asks for",
			ErrNoRoom, named([]Part{*short}), p.free(short.Device), short.Units)
	}
	return Choice{Parts: parts, Pod: pod}, nil
}

// has reports whether all devices of some are among those of all.
func has(all, some []Part) bool {
	for _, s := range some {
		if !slices.ContainsFunc(all, func(a Part) bool { return a.Device == s.Device }) {
			return false
		}
	}
	return true
}

// lacking returns the first part for which its device has no room, nil when all
// have.
func (p *plan) lacking(parts []Part) *Part {
	for i := range parts {
		if p.free(parts[i].Device) < parts[i].Units {
			return &parts[i]
		}
	}
	return nil
}

// named is the devices of the parts, for people.
func named(parts []Part) string {
	text := "device"
	if len(parts) > 1 {
		text += "s"
	}
	for i, p := range parts {
		switch {
		case i == 0:
			text += " "
		case i == len(parts)-1:
			text += " and "
		default:
			text += ", "
		}
		text += string(p.Device)
	}
	return text
}

func (p *plan) slot(d accel.DeviceID) (place.Slot, bool) {
	for _, s := range p.node.Slots {
		if s.ID == d {
			return s, true
		}
	}
	return place.Slot{}, false
}

func (p *plan) free(d accel.DeviceID) accel.Units {
	s, _ := p.slot(d)
	return s.Free
}

// usable reports whether a device that was granted still serves a pod of that selection.
func (p *plan) usable(d accel.DeviceID, only *accel.Selection) bool {
	s, ok := p.slot(d)
	return ok && !s.Unhealthy && only.Isolates(s.Tier)
}

// promised is what other waiting pods than except will still take of d.
func (p *plan) promised(d accel.DeviceID, except int) accel.Units {
	var sum accel.Units
	for i := range p.waiting {
		if i != except {
			sum += p.waiting[i].still(d)
		}
	}
	return sum
}

// pick chooses among the healthy devices by what is free and not promised to
// other waiting pods than except; nil when too few have room.
func (p *plan) pick(ask place.Ask, except int, policy place.Policy) []accel.DeviceID {
	open := p.node
	open.Slots = slices.Clone(p.node.Slots)
	for i := range open.Slots {
		open.Slots[i].Free -= p.promised(open.Slots[i].ID, except)
	}
	best, _, ok := policy.Choose(&open, &ask, nil)
	if !ok {
		return nil
	}
	devices := make([]accel.DeviceID, len(best))
	for i, at := range best {
		devices[i] = open.Slots[at].ID
	}
	return devices
}

// refuse says what there would be for the pod at position except of the waiting
// ones, which needs so many units on each of some devices that the selection allows.
func (p *plan) refuse(pod string, need accel.Units, devices, except int, only *accel.Selection) error {
	var largest accel.Units
	var stated accel.TierSet
	isolated := false
	for _, s := range p.node.Slots {
		isolated = isolated || only.Isolates(s.Tier)
		stated.Add(s.Tier)
		if !s.Unhealthy {
			largest = max(largest, s.Free-p.promised(s.ID, except))
		}
	}
	if !isolated && only != nil && stated != 0 {
		return fmt.Errorf("%w: pod %s: %s", ErrNotIsolated, pod, accel.WhyNotIsolated(only.Isolation, stated))
	}
	where := "one device"
	if devices > 1 {
		where = fmt.Sprintf("each of %d devices", devices)
	}
	return fmt.Errorf("%w: %s needs %d units of %s, at most %d are free and not promised to other pods", ErrNoRoom, pod, need, where,
		largest)
}
