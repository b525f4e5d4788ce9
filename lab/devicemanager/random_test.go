package devicemanager

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

var (
	seed       = flag.Uint64("seed", 1, "what the random operations begin with")
	operations = flag.Int("operations", 3000, "how many random operations, over all nodes")
)

// TestRandom does what may happen to a node in a random order: pods of all
// shapes with and without a grant, the watch late, pods that complete and that
// are deleted, kubelet and divvy-node restarting, cards falling ill and coming
// back. At any moment no unit is held twice and no pod is on two cards; after
// each burst the books are right.
func TestRandom(t *testing.T) {
	t.Parallel()
	const nodes = 4
	for i := range uint64(nodes) {
		t.Run(fmt.Sprint("seed ", *seed+i), func(t *testing.T) {
			t.Parallel()
			w := &walk{
				node:   newNode(t, "1", []vendorsim.Card{gcu(0, 16), gcu(1, 16), gcu(2, 32), gcu(3, 24)}),
				random: rand.New(rand.NewPCG(*seed+i, 0)),
				count:  map[string]int{},
			}
			for w.done < *operations/nodes {
				w.burst()
			}
			t.Logf("%d operations: %s", w.done, w)
		})
	}
}

// walk is one node on its random way.
type walk struct {
	*node
	random  *rand.Rand
	done    int
	count   map[string]int
	waiting []*corev1.Pod // bound, not given to kubelet yet
	running []*corev1.Pod
	fullest float64 // the largest use of a card, 1 for all of it
	// release lets a held watch go on, nil when it is not held.
	release func()
	// ill is a card that is not healthy, 0 for none: card 0 never falls ill.
	ill int
}

func (w *walk) String() string {
	var parts []string
	for _, what := range slices.Sorted(maps.Keys(w.count)) {
		parts = append(parts, fmt.Sprintf("%d %s", w.count[what], what))
	}
	return fmt.Sprintf("%s; fullest card %.0f %%", strings.Join(parts, ", "), 100*w.fullest)
}

// burst is some dozens of operations and what must be true after them.
func (w *walk) burst() {
	w.t.Helper()
	for range 25 + w.random.IntN(25) {
		w.done++
		w.operation()
		used, err := w.disjoint()
		if err != nil {
			w.t.Fatalf("operation %d: %v", w.done, err)
		}
		for i := range w.topology.Cards {
			r, _ := w.layout().Range(w.card(i))
			w.fullest = max(w.fullest, float64(used[w.card(i)])/float64(r.Units))
		}
	}
	w.calm()
}

// calm lets everything come to rest and compares the books.
func (w *walk) calm() {
	w.t.Helper()
	if w.release != nil {
		w.release()
		w.release = nil
	}
	w.api.ClearActions()
	w.awaitReady()
	w.converged()
	for _, pod := range w.running {
		if got := w.api.get(pod.UID).Status; got.Phase != corev1.PodRunning {
			w.t.Fatalf("operation %d: pod %s does not run any more: %s: %s", w.done, pod.Name, got.Phase, got.Message)
		}
	}
}

func (w *walk) operation() {
	w.t.Helper()
	switch d := w.random.IntN(100); {
	case d < 34:
		w.bindOne()
	case d < 68:
		w.admitOne()
	case d < 84 || len(w.running) > 25:
		w.endOne()
	case d < 88 && len(w.waiting) > 0:
		w.count["deleted while waiting"]++
		i := w.random.IntN(len(w.waiting))
		w.api.remove(w.waiting[i].UID)
		w.waiting = slices.Delete(w.waiting, i, i+1)
	case d < 92:
		if w.release != nil {
			w.release()
			w.release = nil
		} else {
			w.count["times the watch was held"]++
			w.release = w.api.holdWatches()
		}
	case d < 93:
		w.count["restarts of divvy-node"]++
		w.restartAgent()
		w.awaitReady()
	case d < 94:
		w.count["handovers of divvy-node"]++
		w.handOver()
	case d < 96:
		w.count["restarts of kubelet"]++
		// Pods that were not given to kubelet yet are added, too: it lists all
		// that are bound. Completed init containers want the units back first.
		w.kubelet.stop()
		w.kubelet.boot()
		w.awaitReady()
		w.kubelet.readd()
		w.sort()
	case d < 98:
		w.cardIll()
	default:
		w.count["breaks"]++
		<-time.After(time.Duration(w.random.IntN(200)) * time.Millisecond)
	}
}

// shapes returns random containers; sizes are such that cards fill up.
func (w *walk) shapes() []shape {
	few := func() int64 { return 1 + w.random.Int64N(5) }
	many := func() []int64 {
		out := make([]int64, 1+w.random.IntN(3))
		for i := range out {
			out[i] = few()
		}
		return out
	}
	switch w.random.IntN(8) {
	case 0:
		return []shape{initial(few()), app(many()...)}
	case 1:
		return []shape{initial(few(), 2*few()), app(few())}
	case 2:
		return []shape{sidecar(few()), app(many()...)}
	case 3:
		return []shape{initial(few()), sidecar(few()), initial(few()), app(many()...)}
	case 4:
		return []shape{app(4)} // many of the same size
	case 5:
		return []shape{app(2, 2)}
	case 6:
		return []shape{app(0, few())}
	}
	return []shape{app(many()...)}
}

// bindOne is what a scheduler does with the extender; one pod in eight came
// around it.
func (w *walk) bindOne() {
	pod := w.pod(fmt.Sprintf("pod%d", w.pods), w.shapes()...)
	if w.random.IntN(8) == 0 {
		w.count["pods by hand"]++
	} else {
		free := map[accel.DeviceID]accel.Units{}
		for _, s := range w.inventory().Shares {
			if !s.Health.Unhealthy {
				free[s.ID] = s.Units
			}
		}
		for _, p := range slices.Concat(w.waiting, w.running) {
			g, err := w.signer.DecodeGrant(string(p.UID), w.api.get(p.UID).Annotations["divvy.dev/grant"])
			if err == nil {
				free[g.Device] -= kube.RequestOf(p, gcuMemory).Peak()
			}
		}
		need := kube.RequestOf(pod, gcuMemory).Peak()
		var fits []accel.DeviceID
		for i := range w.topology.Cards {
			if free[w.card(i)] >= need {
				fits = append(fits, w.card(i))
			}
		}
		if len(fits) == 0 {
			w.count["pods that fit nowhere"]++
			return
		}
		w.count["pods granted"]++
		w.grant(pod, fits[w.random.IntN(len(fits))])
	}
	w.api.create(pod)
	w.waiting = append(w.waiting, pod)
}

// refusals are the texts with which a pod may be refused here.
var refusals = []string{
	"no device of this node has enough free units",
	"requested number of devices unavailable",
}

// admitOne gives kubelet one of the waiting pods, not always the oldest.
func (w *walk) admitOne() {
	w.t.Helper()
	if len(w.waiting) == 0 {
		return
	}
	i := w.random.IntN(min(len(w.waiting), 4))
	pod := w.waiting[i]
	w.waiting = slices.Delete(w.waiting, i, i+1)
	if err := w.kubelet.add(pod); err != nil {
		if !slices.ContainsFunc(refusals, func(s string) bool { return strings.Contains(err.Error(), s) }) {
			w.t.Fatalf("operation %d: pod %s: %v", w.done, pod.Name, err)
		}
		w.count["pods refused"]++
		return
	}
	w.start(pod)
}

func (w *walk) start(pod *corev1.Pod) {
	w.t.Helper()
	w.count["pods run"]++
	if err := w.kubelet.run(pod); err != nil {
		w.t.Fatalf("operation %d: %v", w.done, err)
	}
	if _, err := w.where(pod); err != nil {
		w.t.Fatalf("operation %d: %v", w.done, err)
	}
	w.running = append(w.running, pod)
}

// sort finds out what a starting kubelet made of the pods that waited.
func (w *walk) sort() {
	w.t.Helper()
	waiting := w.waiting
	w.waiting = nil
	for _, pod := range waiting {
		if ended(w.api.get(pod.UID)) {
			w.count["pods refused"]++
			continue
		}
		w.start(pod)
	}
}

func (w *walk) endOne() {
	if len(w.running) == 0 {
		return
	}
	i := w.random.IntN(len(w.running))
	pod := w.running[i]
	w.running = slices.Delete(w.running, i, i+1)
	if w.random.IntN(2) == 0 {
		w.count["pods completed"]++
		w.kubelet.finish(pod)
	} else {
		w.count["pods deleted"]++
		w.kubelet.remove(pod)
	}
}

// cardIll makes a card unhealthy or lost, or puts it right.
func (w *walk) cardIll() {
	w.t.Helper()
	if w.ill > 0 {
		card := &w.topology.Cards[w.ill]
		card.Lost, card.Unhealthy = false, false
		w.writeTopology()
		eventually(w.t, soon, func() error { return w.health(w.ill, true) })
		w.ill = 0
		return
	}
	w.count["cards fell ill"]++
	w.ill = 1 + w.random.IntN(len(w.topology.Cards)-1)
	card := &w.topology.Cards[w.ill]
	card.Unhealthy = w.random.IntN(2) == 0
	card.Lost = !card.Unhealthy
	w.writeTopology()
	eventually(w.t, soon, func() error {
		for _, s := range w.inventory().Shares {
			if s.ID == w.card(w.ill) && s.Health.Unhealthy {
				return nil
			}
		}
		return errors.New("the inventory does not show it")
	})
}
