package devicemanager

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// oneCardPerNUMANode starts a node on which kubelet's topology manager leaves no
// choice for one whole device: kubelet takes it without asking.
func oneCardPerNUMANode(t *testing.T, resources ...config.Resource) *node {
	t.Helper()
	cards := vendorsim.GCUs(2, 16<<10)
	cards[1].NUMA = 1
	n := prepareNode(t, "1", cards)
	n.kubelet.Policy = topologymanager.PolicySingleNumaNode
	n.resources(resources...)
	n.kubelet.start()
	n.startAgent()
	n.awaitOffer()
	return n
}

// stays checks that kubelet goes on showing as much of a resource while the
// daemon looks at everything again.
func (n *node) stays(r accel.Resource, want int64) {
	n.t.Helper()
	deadline := time.Now().Add(3 * time.Second)
	for time.Now().Before(deadline) {
		if _, got := n.kubelet.capacityOf(r); got != want {
			n.t.Fatalf("kubelet shows %d allocatable %s, want %d still", got, r, want)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// Kubelet takes the only aligned device without asking, for the init container
// first and then the same for the app container.
func TestInitContainerOfADeviceThatKubeletChose(t *testing.T) {
	t.Parallel()
	n := oneCardPerNUMANode(t, whole, memoryUnits)
	both := n.start("both", first(gcuWhole, 1), of(gcuWhole, 1))
	if a, b := n.kubelet.held(both.UID, "init0", gcuWhole), n.kubelet.held(both.UID, "app0", gcuWhole); !slices.Equal(b, a) || len(a) != 1 {
		t.Errorf("the init container has %v, the app container %v", a, b)
	}
	n.kubelet.remove(both)
	n.shows(gcuWhole, 2)
	n.shows(gcuMemory, 32)
	// An init container alone keeps its device for as long as the pod runs.
	alone := n.start("alone", first(gcuWhole, 1), app(0))
	n.shows(gcuMemory, 16)
	n.stays(gcuMemory, 16)
	n.kubelet.remove(alone)
	n.shows(gcuMemory, 32)
}

// A static pod is admitted before the API server knows anything of it.
func TestStaticPodWithInitContainer(t *testing.T) {
	t.Parallel()
	n := offer(t, vendorsim.GCUs(2, 16<<10), whole, memoryUnits)
	static := n.pod("static", first(gcuWhole, 1), of(gcuWhole, 1))
	if err := n.kubelet.add(static); err != nil {
		t.Fatal(err)
	}
	n.shows(gcuMemory, 16)
	n.kubelet.remove(static)
	n.shows(gcuMemory, 32)
	alone := n.pod("alone", first(gcuWhole, 1), app(0))
	if err := n.kubelet.add(alone); err != nil {
		t.Fatal(err)
	}
	n.shows(gcuMemory, 16)
	n.stays(gcuMemory, 16)
	n.kubelet.remove(alone)
	n.shows(gcuMemory, 32)
}

// slow is a backend whose first discoveries take long.
type slow struct {
	backend.Backend
	first *atomic.Int64 // how many of them
	takes time.Duration
}

func (s slow) Discover(ctx context.Context) (backend.Found, error) {
	if s.first.Add(-1) >= 0 {
		select {
		case <-ctx.Done():
			return backend.Found{}, ctx.Err()
		case <-time.After(s.takes):
		}
	}
	return s.Backend.Discover(ctx)
}

// The daemon takes over from the vendor's own plugin, or its state was lost,
// while the vendor's library takes its time.
func TestBoardsHeldBeforeTheDaemonKnowsThem(t *testing.T) {
	t.Parallel()
	n := prepareNode(t, "1", vendorsim.GCUs(4, 16<<10))
	n.asBoards()
	grouped := n.wrap
	n.resources(boards, whole)
	n.kubelet.start()
	n.startAgent()
	n.awaitOffer()
	pod := n.start("pod", of(gcuBoard, 1))
	n.shows(gcuWhole, 2)
	n.stop()
	if err := os.RemoveAll(filepath.Join(n.dir, "state")); err != nil {
		t.Fatal(err)
	}
	n.wrap = func(b backend.Backend) backend.Backend {
		first := &atomic.Int64{}
		first.Store(1)
		return slow{grouped(b), first, 4 * time.Second}
	}
	n.startAgent()
	n.awaitOffer()
	n.shows(gcuWhole, 2)
	n.stays(gcuWhole, 2)
	n.start("two", of(gcuWhole, 2))
	n.refused(n.bind(-1, "three", of(gcuWhole, 1)))
	n.kubelet.remove(pod)
	n.shows(gcuWhole, 2+2)
}

// While it is not known whose the units of memory are, no card is given out as a
// whole, not even one that kubelet takes without asking.
func TestNoWholeDeviceWhileMemoryIsUnknown(t *testing.T) {
	t.Parallel()
	n := oneCardPerNUMANode(t, memoryUnits, whole)
	a, b := n.pod("a", app(4)), n.pod("b", app(4))
	for i, pod := range []*corev1.Pod{a, b} { // without a valid grant
		if err := n.kubelet.add(n.grant(pod, n.card(i))); err != nil {
			t.Fatal(err)
		}
	}
	n.shows(gcuWhole, 0)
	n.stop()
	if err := os.Remove(filepath.Join(n.dir, "state", "units-enflame.com_gcu-memory.json")); err != nil {
		t.Fatal(err)
	}
	n.startAgent()
	deadline := time.Now().Add(6 * time.Second)
	for i := 0; time.Now().Before(deadline); i++ {
		pod := n.bind(-1, fmt.Sprint("whole", i), of(gcuWhole, 1))
		if err := n.kubelet.add(pod); err == nil {
			t.Fatalf("pod %s has %v while other pods have memory of both cards", pod.Name, n.kubelet.held(pod.UID, "app0", gcuWhole))
		}
		time.Sleep(100 * time.Millisecond)
	}
}
