package decision

import (
	"cmp"
	"hash/maphash"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// kube-scheduler asks again about a pod that was rejected when something happens in
// the cluster, and after five minutes at the latest. What happens may reach it
// before it reaches the ledger, and it asks about a part of a large cluster's
// nodes at a time. So a pod could wait for minutes with room free.
const (
	// wakeEvery is how often the extender looks whether there is room for pods
	// that wait.
	wakeEvery = 500 * time.Millisecond
	// wakeAfter is how long kube-scheduler is given to ask by itself.
	wakeAfter = 2 * time.Second
	// wakeBackoff is the time to the second time that a pod is woken for the same
	// room; it doubles each time, up to maxWakeBackoff.
	wakeBackoff    = 4 * time.Second
	maxWakeBackoff = 5 * time.Minute
	// wakeAtOnce bounds the pods woken in a turn, and so the requests to the API
	// server: 20 a second.
	wakeAtOnce = 10
	// asksAtOnce bounds the different asks that are checked in a turn, each
	// against all nodes.
	asksAtOnce = 16
	// wakeInVain is how many pods that ask for the same are woken for some room
	// without one that fits, before the others of them are woken more slowly: rules of
	// their own keep them off the nodes with room. The time between two turns of
	// theirs grows by wakeAfter each time as many more were, up to wakePause.
	wakeInVain = 2 * wakeAtOnce
	wakePause  = 30 * time.Second
	// maxWaiting bounds the pods remembered, at about 300 bytes each, and as many
	// different asks at 1500; pods beyond wait for kube-scheduler.
	maxWaiting = 20_000
	// pruneAtOnce bounds the pods of which it is looked in a turn whether they still
	// wait, and pruneAfter is how long after kube-scheduler asked: the watch has shown
	// them by then.
	pruneAtOnce = 256
	pruneAfter  = 30 * time.Second
	// forgetWaiting is how long a pod is remembered that is not asked about: twice
	// as long as kube-scheduler takes at most.
	forgetWaiting = 10 * time.Minute
	// wakeTimeout bounds one request to the API server.
	wakeTimeout = 2 * time.Second
)

// waiting are the pods that were rejected and not asked about since. It is safe for
// concurrent use, and its answers to filter do not depend on how many there are.
type waiting struct {
	limit int
	now   func() time.Time

	mu sync.Mutex // guards what follows
	// asks are the groups of pods that ask for the same, by accel.Request.Key.
	asks map[string]*waitingAsk
	// pods says which group a pod is in, by UID.
	pods map[string]*waitingAsk
	// turn are the keys of asks that the present round has not come to yet.
	turn []string
}

// waitingAsk are pods that ask for the same.
type waitingAsk struct {
	key     string
	request accel.Request
	pods    map[string]*waitingPod // by UID
	// roomOn are the nodes that had room when this was looked at last.
	roomOn nodeSet
	// inVain counts the pods woken since room came or one of them fitted, and next is
	// when some may be woken again.
	inVain int
	next   time.Time
	// freed is ledger.Counts.Freed when a pod was woken last because others may give way.
	freed uint64
}

// waitingPod is one pod that waits.
type waitingPod struct {
	ref accel.PodRef
	// since is when it was first rejected, asked when kube-scheduler asked last.
	since, asked time.Time
	// woken counts how often it was woken for the room that there is, and next is
	// when it may be woken again.
	woken int
	next  time.Time
	// looked counts how often room was looked for in its name.
	looked int
}

func (p *waitingPod) due(now time.Time) bool {
	return now.Sub(p.asked) >= wakeAfter && !now.Before(p.next)
}

func (p *waitingPod) wake(now time.Time) accel.PodRef {
	p.next = now.Add(min(wakeBackoff<<min(p.woken, 16), maxWakeBackoff))
	p.woken++
	return p.ref
}

// nodeSet is a set of nodes in 1 KB, however many there are. It may take a node for
// another; then a pod is woken later than it could be.
type nodeSet [1024]byte

var nodeSeed = maphash.MakeSeed()

func (s *nodeSet) place(node string) (*byte, byte) {
	h := maphash.String(nodeSeed, node) % (8 * uint64(len(s)))
	return &s[h/8], 1 << (h % 8)
}

func (s *nodeSet) has(node string) bool {
	in, bit := s.place(node)
	return *in&bit != 0
}

func (s *nodeSet) add(node string) {
	in, bit := s.place(node)
	*in |= bit
}

func newWaiting(limit int, now func() time.Time) *waiting {
	return &waiting{limit: limit, now: now, asks: map[string]*waitingAsk{}, pods: map[string]*waitingAsk{}}
}

func (w *waiting) size() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.pods)
}

func (w *waiting) has(uid string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.pods[uid] != nil
}

// refused remembers a pod that fits nowhere.
func (w *waiting) refused(pod accel.PodRef, request accel.Request) {
	request.Pod = "" // many pods ask for the same
	key := request.Key()
	now := w.now()
	w.mu.Lock()
	defer w.mu.Unlock()
	ask := w.pods[pod.UID]
	if ask != nil && ask.key == key {
		ask.pods[pod.UID].asked = now
		return
	}
	w.drop(pod.UID)
	if len(w.pods) >= w.limit {
		return
	}
	ask = w.asks[key]
	if ask == nil {
		ask = &waitingAsk{key: key, request: request, pods: map[string]*waitingPod{}}
		w.asks[key] = ask
	}
	pod.Namespace, pod.Name = strings.Clone(pod.Namespace), strings.Clone(pod.Name)
	ask.pods[pod.UID] = &waitingPod{ref: pod, since: now, asked: now}
	w.pods[pod.UID] = ask
}

// fitted takes a pod out that fits somewhere now.
func (w *waiting) fitted(uid string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if ask := w.pods[uid]; ask != nil {
		ask.inVain, ask.next = 0, time.Time{}
	}
	w.drop(uid)
}

func (w *waiting) forget(uid string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.drop(uid)
}

// drop is forget for a caller that holds mu.
func (w *waiting) drop(uid string) {
	ask := w.pods[uid]
	if ask == nil {
		return
	}
	delete(w.pods, uid)
	delete(ask.pods, uid)
	if len(ask.pods) == 0 {
		delete(w.asks, ask.key)
	}
}

// some returns the next asks to look at, each once in a round, those of the highest
// priority first.
func (w *waiting) some(most int) []*waitingAsk {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.turn) == 0 {
		for key := range w.asks {
			w.turn = append(w.turn, key)
		}
		slices.SortFunc(w.turn, func(a, b string) int {
			return cmp.Or(cmp.Compare(w.asks[b].request.Priority, w.asks[a].request.Priority), cmp.Compare(a, b))
		})
	}
	var out []*waitingAsk
	for len(w.turn) > 0 && len(out) < most {
		if ask := w.asks[w.turn[0]]; ask != nil {
			out = append(out, ask)
		}
		w.turn = w.turn[1:]
	}
	return out
}

// head is the request of the pod of an ask for which room is looked for next: room
// may be kept for one of them, who made others give way.
func (w *waiting) head(ask *waitingAsk) accel.Request {
	w.mu.Lock()
	defer w.mu.Unlock()
	request := ask.request
	var head *waitingPod
	for uid, pod := range ask.pods {
		if head == nil || cmp.Or(cmp.Compare(pod.looked, head.looked), pod.since.Compare(head.since), cmp.Compare(uid, request.Pod)) < 0 {
			head, request.Pod = pod, uid
		}
	}
	if head != nil {
		head.looked++
	}
	return request
}

// due returns the pods to wake of an ask, given the nodes with room for it: not
// more than nodes, those first that were woken least and wait longest.
func (w *waiting) due(ask *waitingAsk, room []string, most int) []accel.PodRef {
	now := w.now()
	w.mu.Lock()
	defer w.mu.Unlock()
	came := slices.ContainsFunc(room, func(node string) bool { return !ask.roomOn.has(node) })
	ask.roomOn = nodeSet{}
	for _, node := range room {
		ask.roomOn.add(node)
	}
	if came {
		ask.inVain, ask.next = 0, time.Time{}
	}
	most = min(most, len(room))
	if now.Before(ask.next) {
		most = 0
	}
	// The few that are first among thousands, in order.
	due := make([]*waitingPod, 0, most+1)
	for uid, pod := range ask.pods {
		if now.Sub(pod.asked) > forgetWaiting {
			w.drop(uid)
			continue
		}
		if came {
			pod.woken, pod.next = 0, time.Time{}
		}
		if most > 0 && pod.due(now) {
			at, _ := slices.BinarySearchFunc(due, pod, before)
			due = slices.Insert(due, at, pod)
			due = due[:min(len(due), most)]
		}
	}
	out := make([]accel.PodRef, len(due))
	for i, pod := range due {
		out[i] = pod.wake(now)
	}
	if ask.inVain += len(due); len(due) > 0 {
		ask.next = now.Add(min(time.Duration(ask.inVain/wakeInVain)*wakeAfter, wakePause))
	}
	return out
}

// evictor returns the pod of an ask to wake although there is no room for it: units
// came free since, so that there may be room now if others give way. kube-scheduler
// asks which when it sees a pod end, before the ledger may know that its containers
// did, and then not again for minutes. A pod of lowest, the least priority of any that
// holds some of the resource, cannot evict any.
func (w *waiting) evictor(ask *waitingAsk, freed uint64, lowest int32) []accel.PodRef {
	now := w.now()
	w.mu.Lock()
	defer w.mu.Unlock()
	if ask.request.Priority <= lowest || ask.freed == freed {
		return nil
	}
	var first *waitingPod
	for _, pod := range ask.pods {
		if pod.due(now) && (first == nil || before(pod, first) < 0) {
			first = pod
		}
	}
	if first == nil {
		return nil // it is looked at again
	}
	ask.freed = freed
	return []accel.PodRef{first.wake(now)}
}

// before orders pods of one ask: who was woken least and waits longest is first.
func before(a, b *waitingPod) int {
	return cmp.Or(cmp.Compare(a.woken, b.woken), a.since.Compare(b.since), cmp.Compare(a.ref.UID, b.ref.UID))
}

// quiet returns some pods, of the many each time others, of which kube-scheduler has
// not asked lately.
func (w *waiting) quiet(most int) []accel.PodRef {
	now := w.now()
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []accel.PodRef
	looked := 0
	for uid, ask := range w.pods { // in an order that differs each time
		if looked++; looked > most {
			break
		}
		if pod := ask.pods[uid]; now.Sub(pod.asked) >= pruneAfter {
			out = append(out, pod.ref)
		}
	}
	return out
}
