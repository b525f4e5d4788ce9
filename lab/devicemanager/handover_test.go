package devicemanager

import (
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/agent"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

var handovers = flag.Int("handovers", 50, "how often divvy-node is replaced under load")

// handOver replaces divvy-node as an upgrade does: what the one leaves goes to the
// other as text. It returns how long kubelet's questions had to wait.
func (n *node) handOver() time.Duration {
	n.t.Helper()
	begin := time.Now()
	left := n.yield()
	old, stop := n.agent, n.stop
	n.metrics = nil // that of another process
	n.startSuccessor(left)
	var sockets map[accel.Resource]string
	eventually(n.t, patience, func() (err error) {
		sockets, err = n.agent.Serving()
		return err
	})
	waited := time.Since(begin)
	if err := old.Pass(sockets); err != nil {
		n.t.Fatal(err)
	}
	if unnoticed := old.Leave(n.t.Context()); len(unnoticed) > 0 {
		n.t.Errorf("kubelet has not noticed the end of %v", unnoticed)
	}
	now := n.stop
	stop()
	n.stop = now
	return waited
}

// yield makes divvy-node decide nothing any more.
func (n *node) yield() agent.Handoff {
	n.t.Helper()
	text, err := json.Marshal(n.agent.Yield())
	if err != nil {
		n.t.Fatal(err)
	}
	n.closeLibraries()
	var left agent.Handoff
	if err := json.Unmarshal(text, &left); err != nil {
		n.t.Fatal(err)
	}
	return left
}

// busy is a node on which pods of all kinds come and go, and none is rejected for
// want of a device.
type busy struct {
	*node
	random   *rand.Rand
	alive    map[accel.Resource][]*corev1.Pod
	admitted atomic.Int64
	slowest  time.Duration
}

func newBusy(t *testing.T) *busy {
	t.Helper()
	chosen := func(r config.Resource, indexes ...int) config.Resource {
		r.Devices = &config.DeviceSelector{Indexes: indexes}
		return r
	}
	n := offer(t, vendorsim.GCUs(6, 16<<10), chosen(memoryUnits, 0, 1), chosen(whole, 2, 3), chosen(sliced(4), 4, 5))
	return &busy{node: n, random: rand.New(rand.NewPCG(*seed, 3)), alive: map[accel.Resource][]*corev1.Pod{}}
}

// next admits one pod and ends those that are too many.
func (b *busy) next(i int) error {
	kind := []accel.Resource{gcuMemory, gcuWhole, gcuShared}[i%3]
	most := map[accel.Resource]int{gcuMemory: 3, gcuWhole: 1, gcuShared: 5}[kind]
	for len(b.alive[kind]) >= most {
		j := b.random.IntN(len(b.alive[kind]))
		b.kubelet.remove(b.alive[kind][j])
		b.alive[kind] = slices.Delete(b.alive[kind], j, j+1)
	}
	var shapes []shape
	switch {
	case kind == gcuMemory:
		shapes = [][]shape{
			{app(4)}, {app(2, 2)}, {initial(4), app(2, 1)}, {initial(2), sidecar(1), app(3)}, {initial(1, 3), app(4)},
		}[b.random.IntN(5)]
	case b.random.IntN(3) == 0:
		shapes = []shape{first(kind, 1), of(kind, 1)}
	default:
		shapes = []shape{of(kind, 1)}
	}
	pod := b.bind(-1, fmt.Sprint("pod", i), shapes...)
	begin := time.Now()
	if err := b.kubelet.add(pod); err != nil {
		return fmt.Errorf("pod %s of %s: %w", pod.Name, kind, err)
	}
	b.slowest = max(b.slowest, time.Since(begin))
	if err := b.kubelet.run(pod); err != nil {
		return err
	}
	b.alive[kind] = append(b.alive[kind], pod)
	b.admitted.Add(1)
	return b.recount()
}

// recount checks that nothing is given out twice, and each pod has what it asked
// for.
func (b *busy) recount() error {
	if _, err := b.disjoint(); err != nil {
		return err
	}
	for _, pod := range b.alive[gcuMemory] {
		if _, err := b.where(pod); err != nil {
			return err
		}
	}
	for _, kind := range []accel.Resource{gcuWhole, gcuShared} {
		owner := map[string]types.UID{}
		for _, pod := range b.alive[kind] {
			for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
				ids := b.kubelet.held(pod.UID, c.Name, kind)
				if len(ids) != 1 {
					return fmt.Errorf("pod %s has %v of %s", pod.Name, ids, kind)
				}
				if other, taken := owner[ids[0]]; taken && other != pod.UID {
					return fmt.Errorf("%s of %s was given to two pods", ids[0], kind)
				}
				owner[ids[0]] = pod.UID
			}
		}
	}
	return nil
}

// TestHandoverUnderLoad replaces divvy-node again and again while pods with memory,
// whole devices and time slices come as fast as kubelet admits them: none is
// rejected, nothing is given out twice, and the inventory stays as it was.
func TestHandoverUnderLoad(t *testing.T) {
	t.Parallel()
	b := newBusy(t)
	before := b.inventory()
	var load sync.WaitGroup
	var stop atomic.Bool
	var failed atomic.Int64
	load.Go(func() {
		for i := 0; !stop.Load(); i++ {
			if err := b.next(i); err != nil {
				failed.Add(1)
				t.Error(err)
				return
			}
		}
	})
	var longest time.Duration
	for range *handovers {
		seen := b.admitted.Load()
		longest = max(longest, b.handOver())
		eventually(t, patience, func() error {
			if failed.Load() == 0 && b.admitted.Load() < seen+3 {
				return fmt.Errorf("no pod of each kind was admitted since")
			}
			return nil
		})
		if failed.Load() > 0 {
			break
		}
	}
	stop.Store(true)
	load.Wait()
	t.Logf("%d handovers, %d pods admitted, %d rejected; kubelet's questions waited %v at most, an admission took %v at most",
		*handovers, b.admitted.Load(), failed.Load(), longest.Round(time.Millisecond), b.slowest.Round(time.Millisecond))
	if t.Failed() {
		return
	}
	b.awaitOffer()
	b.converged()
	if after := b.inventory(); !reflect.DeepEqual(after, before) {
		t.Errorf("the inventory was %+v and is %+v", before, after)
	}
}

// A pod whose containers are served by two divvy-nodes, one after the other, is on
// one device all the same: what the first was asked goes with the node.
func TestHandoverInTheMiddleOfAPod(t *testing.T) {
	t.Parallel()
	shapes := map[string][]shape{
		"app containers":    {app(2, 2, 3)},
		"an init container": {initial(4), app(3, 3)},
		"a sidecar":         {sidecar(2), initial(3), app(2, 4)},
		"two equal inits":   {initial(3, 3), app(3, 3)},
	}
	for name, shapes := range shapes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, "1", vendorsim.GCUs(2, 16<<10))
			// Without a grant everything would go to card 0, which is fuller.
			other := n.bind(0, "other", app(5))
			n.admit(other)
			n.on(0, other)
			pod := n.bind(1, "pod", shapes...)
			containers := len(pod.Spec.InitContainers) + len(pod.Spec.Containers)
			for stopAt := 1; stopAt < containers; stopAt++ {
				n.admitUntil(pod, stopAt)
				n.handOver()
				n.admit(pod)
				n.on(1, pod)
				n.kubelet.remove(pod)
				pod = n.bind(1, "pod", shapes...)
			}
		})
	}
}

// What was given to a container a moment ago is the container's for the successor
// too, also where kubelet lists it nowhere: plain init containers.
func TestHandoverKeepsWhatWasJustGiven(t *testing.T) {
	t.Parallel()
	n := offer(t, vendorsim.GCUs(2, 16<<10), config.Resource{Name: string(gcuWhole), Vendor: "enflame", Mode: config.ModeExclusive,
		SplitBoards: true})
	held := n.bind(-1, "held", first(gcuWhole, 1), of(gcuWhole, 1))
	n.admitUntil(held, 1)
	n.handOver()
	other := n.start("other", of(gcuWhole, 1))
	n.admit(held)
	one, two := n.kubelet.held(held.UID, "app0", gcuWhole), n.kubelet.held(other.UID, "app0", gcuWhole)
	if len(one) != 1 || len(two) != 1 || one[0] == two[0] {
		t.Errorf("the pods have %v and %v", one, two)
	}
}

// A successor that ends before it serves leaves the node to the one before, which
// serves on without a pod that is rejected.
func TestHandoverThatIsGivenUp(t *testing.T) {
	t.Parallel()
	b := newBusy(t)
	for i := range 6 {
		if err := b.next(i); err != nil {
			t.Fatal(err)
		}
	}
	left := b.yield()
	old, stopOld := b.agent, b.stop
	admitted := make(chan error, 1)
	go func() { admitted <- b.next(6) }() // waits for an answer
	b.metrics = nil
	b.startSuccessor(left)
	b.stop() // it dies
	b.metrics = nil
	b.startSuccessor(left) // the one before, again
	var sockets map[accel.Resource]string
	eventually(t, patience, func() (err error) {
		sockets, err = b.agent.Serving()
		return err
	})
	if err := old.Pass(sockets); err != nil {
		t.Fatal(err)
	}
	old.Leave(t.Context())
	now := b.stop
	stopOld()
	b.stop = now
	if err := <-admitted; err != nil {
		t.Errorf("the pod that came in between: %v", err)
	}
	for i := range 6 {
		if err := b.next(7 + i); err != nil {
			t.Fatal(err)
		}
	}
	b.converged()
}

// A resource that the new configuration drops gives out nothing.
func TestHandoverToAnotherConfiguration(t *testing.T) {
	t.Parallel()
	n := offer(t, vendorsim.GCUs(2, 16<<10), whole, memoryUnits)
	pod := n.start("pod", of(gcuWhole, 1))
	n.resources(memoryUnits)
	n.handOver()
	n.awaitOffer()
	if got := n.api.get(pod.UID).Status; got.Phase != corev1.PodRunning {
		t.Errorf("the pod does not run any more: %s", got.Message)
	}
	err := n.kubelet.add(n.bind(-1, "late", of(gcuWhole, 1)))
	if err == nil || !strings.Contains(err.Error(), string(gcuWhole)) {
		t.Errorf("a pod for the resource that is gone: %v", err)
	}
}
