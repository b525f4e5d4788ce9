package history

import (
	"bytes"
	"cmp"
	"hash/maphash"
	"math"
	"slices"
	"sync"
	"time"
)

// Budget is how many bytes a Log keeps at most, all of it included.
const Budget = 8 << 20

const (
	// lastBytes is what last takes, with what the allocator adds.
	lastBytes = 8*lastPods + 32<<10
	lastPods  = 1 << 16
	// headerBytes is what an entry takes beside its own bytes.
	headerBytes = 24
)

// Log keeps entries, the oldest of which go when the budget is used up. It is safe for
// concurrent use. A nil Log keeps nothing.
type Log struct {
	started time.Time

	mu      sync.Mutex // guards what follows
	entries [][]byte   // from first on
	first   int
	bytes   int // of the entries
	dropped uint64
	scratch []byte
	// last are the last decisions about pods that wait: the same question again, or a retry
	// with the same outcome, says nothing new. A pod has the place that the hash of its UID
	// gives it, and loses it to another one with the same.
	last [lastPods]uint64
}

// NewLog returns an empty one of a process that began at that time.
func NewLog(started time.Time) *Log { return &Log{started: started} }

var seed = maphash.MakeSeed()

// Decided keeps a decision, unless it is the last one about the pod again.
func (l *Log) Decided(d *Decision) {
	if l == nil {
		return
	}
	outcome := maphash.Hash{}
	outcome.SetSeed(seed)
	outcome.WriteString(d.Chosen)
	maphash.WriteComparable(&outcome, [3]int64{int64(d.Fits), int64(d.Request.Units), int64(d.Request.Devices)})
	for _, r := range d.Rejected {
		outcome.WriteString(r.Code) // where the pod fits nowhere, each end elsewhere changes the counts
		if d.Fits > 0 {
			maphash.WriteComparable(&outcome, r.Nodes)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	last, pod := l.lastOf(d.Pod.UID)
	sum := pod | outcome.Sum64()&math.MaxUint32
	if *last == sum {
		return
	}
	*last = sum
	l.add(kindDecision, d.archive)
}

// lastOf is the place of a pod in last, and the high half of what is there if it is its own.
func (l *Log) lastOf(uid string) (last *uint64, pod uint64) {
	hash := maphash.String(seed, uid)
	return &l.last[hash%lastPods], hash &^ math.MaxUint32
}

// Bound keeps where a pod was bound.
func (l *Log) Bound(p *Placement) { l.placed(kindBound, p) }

// Ended keeps that a pod does not hold its devices any more.
func (l *Log) Ended(p *Placement) { l.placed(kindEnded, p) }

func (l *Log) placed(kind byte, p *Placement) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.forget(p.Pod.UID)
	l.add(kind, p.archive)
}

// Gone keeps that a pod ended while it waited, if a decision about it is known.
func (l *Log) Gone(podUID string, at time.Time) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.forget(podUID) {
		p := Placement{Pod: Pod{UID: podUID}, At: at}
		l.add(kindEnded, p.archive)
	}
}

// forget forgets the last decision about a pod, false where none is known. l.mu is held.
func (l *Log) forget(podUID string) bool {
	last, pod := l.lastOf(podUID)
	if *last&^math.MaxUint32 != pod {
		return false
	}
	*last = 0
	return true
}

// add keeps an entry. l.mu is held.
func (l *Log) add(kind byte, write func(*archive)) {
	a := archive{b: append(l.scratch[:0], kind)}
	write(&a)
	l.scratch = a.b
	one := slices.Clone(a.b)
	l.entries = append(l.entries, one)
	l.bytes += cap(one)
	for l.first < len(l.entries) && l.bytes+headerBytes*cap(l.entries)+cap(l.scratch) > Budget-lastBytes {
		l.bytes -= cap(l.entries[l.first])
		l.entries[l.first] = nil
		l.first++
		l.dropped++
	}
	if l.first > len(l.entries)/2 {
		kept := copy(l.entries, l.entries[l.first:])
		clear(l.entries[kept:])
		l.entries, l.first = l.entries[:kept], 0
	}
}

// Extent says from when on a Log has what happened.
type Extent struct {
	// Started is when the process began, and Since when the oldest entry was made. Dropped
	// counts entries before that.
	Started time.Time `json:"started"`
	Since   time.Time `json:"since,omitzero"`
	Dropped uint64    `json:"dropped,omitempty"`
}

// raw returns the encoded entries; they are not changed any more.
func (l *Log) raw() (entries [][]byte, dropped uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.entries[l.first:]), l.dropped
}

// Each calls yield with what the Log has, entry by entry, in the order in which it was
// made.
func (l *Log) Each(yield func(Entry) bool) {
	if l == nil {
		return
	}
	entries, _ := l.raw()
	for _, b := range entries {
		if !yield(decode(b)) {
			return
		}
	}
}

// Extent says from when on the log has what happened.
func (l *Log) Extent() Extent {
	if l == nil {
		return Extent{}
	}
	entries, dropped := l.raw()
	r := Extent{Started: l.started.UTC(), Dropped: dropped}
	if len(entries) > 0 {
		first := decode(entries[0])
		r.Since = first.At()
	}
	return r
}

// About returns the last decision about the pod of that name, and where it was bound and
// when it ended since, nil for what is not known.
func (l *Log) About(namespace, name string) (out Entry) {
	if l == nil {
		return out
	}
	entries, _ := l.raw()
	begin := archive{}
	(&Pod{Namespace: namespace, Name: name}).archiveName(&begin)
	uid := ""
	ended := map[string]*Placement{} // by UID: that of a pod of the same name may come late
	defer func() { out.Ended = ended[uid] }()
	for _, b := range slices.Backward(entries) {
		if !bytes.HasPrefix(b[1:], begin.b) {
			continue
		}
		e := decode(b)
		pod := e.Pod()
		if e.Ended != nil {
			ended[pod.UID] = e.Ended
			continue
		}
		if uid = cmp.Or(uid, pod.UID); uid != pod.UID {
			continue
		}
		if e.Decision != nil {
			out.Decision = e.Decision
			return out
		}
		out.Bound = cmp.Or(out.Bound, e.Bound)
	}
	return out
}
