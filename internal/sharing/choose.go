package sharing

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/accel/place"
)

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
	// Held is the device of the containers served already, "" for none.
	Held accel.DeviceID
	// HeldUnits are the units of Held that the pod has so far.
	HeldUnits accel.Units
	// Granted is the device that the extender chose, "" for none.
	Granted accel.DeviceID
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

// outstanding is what the pod still needs of its device.
func (w *Waiting) outstanding() accel.Units { return max(0, w.Request.Peak()-w.HeldUnits) }

// Choice is the answer to one question of kubelet.
type Choice struct {
	Device accel.DeviceID
	// Pod is the position in the waiting pods of the one that the question is
	// taken to be for, -1 when none matches.
	Pod int
}

// ErrNoRoom is the error of a question that no device of the node can answer.
var ErrNoRoom = errors.New("no device of this node has enough free units")

// Choose picks the device whose units the container gets that kubelet asks
// about. slots are the node's devices with the units that no container holds.
// size is what the container asks for in all; must is the device of the
// units that kubelet wants reused and reused their number ("" and 0 for none).
//
// Kubelet admits one pod at a time and serves its containers in order. So, in
// this order: units to be reused name the device; the question is for a pod
// that is being admitted, if one is known; a pod of which some containers were
// served stays on its device; else it is the pod with the oldest grant whose
// first container asks for this many units, and it gets the granted device, or
// the best fit if that has no room any more; else a pod without a grant, or an
// unknown one (a static pod), which gets the best fit beside what was granted
// to others.
//
// When it is not known who is being admitted, two pods whose questions look
// alike may be taken for each other. That cannot take more of a device than it
// has, and the books follow what kubelet reports afterwards.
func Choose(size accel.Units, must accel.DeviceID, reused accel.Units, slots []place.Slot, waiting []Waiting) (Choice, error) {
	p := &plan{slots: slots, waiting: waiting}
	if must != "" {
		return p.reuse(size, size-reused, must)
	}
	order := p.order(size)
	var refusal error
	for _, i := range order {
		if waiting[i].Held == "" {
			continue
		}
		// Being admitted now, or refused by kubelet for another reason a moment
		// ago: then the next candidate may be the one.
		if p.free(waiting[i].Held) >= size {
			return Choice{Device: waiting[i].Held, Pod: i}, nil
		}
		refusal = cmp.Or(refusal, fmt.Errorf("%w: the containers of pod %s share device %s, which has %d of the %d units that the next one asks for",
			ErrNoRoom, waiting[i].Pod, waiting[i].Held, p.free(waiting[i].Held), size))
	}
	for _, i := range order {
		w := &waiting[i]
		if w.Held != "" {
			continue
		}
		// Not less than what is asked for, whatever is known of the pod.
		need := max(w.outstanding(), size)
		if w.Granted != "" && p.usable(w.Granted) && p.free(w.Granted) >= need {
			return Choice{Device: w.Granted, Pod: i}, nil
		}
		if d, ok := p.pick(need, i, place.Binpack); ok {
			return Choice{Device: d, Pod: i}, nil
		}
		refusal = cmp.Or(refusal, p.refuse(w.Pod.String(), need, i))
	}
	if refusal != nil {
		return Choice{}, refusal
	}
	// Nobody known waits for this many: a static pod, whose other containers
	// cannot be foreseen either. The device with the most room serves them best.
	if d, ok := p.pick(size, -1, place.Spread); ok {
		return Choice{Device: d, Pod: -1}, nil
	}
	return Choice{}, p.refuse("a pod that the API server does not know", size, -1)
}

type plan struct {
	slots   []place.Slot
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
			boolCompare(x.Granted == "", y.Granted == ""),
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

func (p *plan) reuse(size, more accel.Units, must accel.DeviceID) (Choice, error) {
	if free := p.free(must); free < more {
		return Choice{}, fmt.Errorf("%w: the init containers of the pod hold units of device %s, which has %d of the %d more that the next container asks for",
			ErrNoRoom, must, free, more)
	}
	// Others may hold units there: one that failed a moment ago, for example.
	pod := -1
	for _, i := range p.order(size) {
		if p.waiting[i].Held == must {
			pod = i
			break
		}
	}
	return Choice{Device: must, Pod: pod}, nil
}

func (p *plan) slot(d accel.DeviceID) (place.Slot, bool) {
	for _, s := range p.slots {
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

func (p *plan) usable(d accel.DeviceID) bool {
	s, ok := p.slot(d)
	return ok && !s.Unhealthy
}

// promised is what other waiting pods than except will still take of d.
func (p *plan) promised(d accel.DeviceID, except int) accel.Units {
	var sum accel.Units
	for i := range p.waiting {
		w := &p.waiting[i]
		if i != except && (w.Held == d || w.Held == "" && w.Granted == d) {
			sum += w.outstanding()
		}
	}
	return sum
}

// pick chooses among the healthy devices by what is free and not promised to
// other waiting pods than except.
func (p *plan) pick(need accel.Units, except int, policy place.Policy) (accel.DeviceID, bool) {
	open := slices.Clone(p.slots)
	for i := range open {
		open[i].Free -= p.promised(open[i].ID, except)
	}
	node := place.Node{Slots: open, CPU: place.Unlimited, Memory: place.Unlimited}
	best, _, ok := policy.Choose(&node, &place.Ask{Units: need, Devices: 1}, nil)
	if !ok {
		return "", false
	}
	return open[best[0]].ID, true
}

// refuse says what there would be for the pod at position except of the waiting
// ones.
func (p *plan) refuse(pod string, need accel.Units, except int) error {
	var largest accel.Units
	for _, s := range p.slots {
		if !s.Unhealthy {
			largest = max(largest, s.Free-p.promised(s.ID, except))
		}
	}
	return fmt.Errorf("%w: %s needs %d units of one device, at most %d are free and not promised to other pods", ErrNoRoom, pod, need, largest)
}
