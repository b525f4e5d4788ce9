package devicemanager

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// mixed is a node on its random way that offers the same chips as a whole, as
// boards, by time slices and by memory.
type mixed struct {
	*node
	random  *rand.Rand
	running []*corev1.Pod
	offered []config.Resource
	count   map[string]int
	n       int
}

// TestMixedResources creates and ends pods of all kinds, while divvy-node,
// kubelet, cards and the configuration come and go. At no moment is a chip given
// out in two ways, and no running pod fails.
func TestMixedResources(t *testing.T) {
	t.Parallel()
	for i := range uint64(4) {
		t.Run(fmt.Sprint("seed ", *seed+i), func(t *testing.T) {
			t.Parallel()
			cards := vendorsim.GCUs(6, 16<<10)
			for j := range cards {
				cards[j].NUMA = j / 2 % 2
			}
			n := prepareNode(t, "1", cards)
			n.asBoards()
			n.kubelet.Policy = []string{
				topologymanager.PolicyNone, topologymanager.PolicySingleNumaNode, topologymanager.PolicyBestEffort,
				topologymanager.PolicyRestricted,
			}[i]
			m := &mixed{node: n, random: rand.New(rand.NewPCG(*seed+i, 1)), count: map[string]int{}}
			m.offered = []config.Resource{memoryUnits, whole, boards, sliced(3)}
			n.resources(m.offered...)
			n.kubelet.start()
			n.startAgent()
			n.awaitOffer()
			for range 120 {
				m.step()
				if err := m.apart(); err != nil {
					t.Fatal(err)
				}
				m.alive()
			}
			// Everything can be had again.
			for _, pod := range m.running {
				n.kubelet.remove(pod)
			}
			m.well()
			n.reload(memoryUnits, whole, boards, sliced(3))
			n.shows(gcuWhole, 6)
			n.shows(gcuBoard, 3)
			n.shows(gcuShared, 18)
			n.shows(gcuMemory, 96)
			t.Log(m.count)
		})
	}
}

func (m *mixed) step() {
	m.t.Helper()
	m.n++
	switch d := m.random.IntN(100); {
	case d < 60 && len(m.running) < 14:
		m.begin()
	case d < 88:
		if len(m.running) > 0 {
			i := m.random.IntN(len(m.running))
			m.kubelet.remove(m.running[i])
			m.running = slices.Delete(m.running, i, i+1)
		}
	case d < 90:
		m.count["restarts of divvy-node"]++
		m.restartAgent()
		m.awaitOffer()
	case d < 91:
		m.count["handovers of divvy-node"]++
		m.handOver()
	case d < 94:
		m.count["restarts of kubelet"]++
		m.kubelet.stop()
		m.kubelet.boot()
		m.awaitOffer()
		m.awaitHeld(m.running)
		m.kubelet.readd()
	case d < 97:
		m.count["changes of health"]++
		i := m.random.IntN(len(m.topology.Cards))
		m.topology.Cards[i].Lost = !m.topology.Cards[i].Lost && m.random.IntN(2) == 0
		m.writeTopology()
	default:
		m.count["reloads"]++
		m.offered = []config.Resource{memoryUnits, whole, boards, sliced(1 + m.random.IntN(4))}
		drop := m.random.IntN(len(m.offered) + 1)
		if drop < len(m.offered) {
			m.offered = slices.Delete(m.offered, drop, drop+1)
		}
		m.reload(m.offered...)
	}
}

// begin creates a pod of some kind. Kubelet may refuse it.
func (m *mixed) begin() {
	m.t.Helper()
	kind := []accel.Resource{gcuMemory, gcuWhole, gcuBoard, gcuShared}[m.random.IntN(4)]
	amount := int64(1)
	if kind == gcuMemory {
		amount = 1 + m.random.Int64N(6)
	} else if m.random.IntN(4) == 0 {
		amount = 2
	}
	shapes := []shape{of(kind, amount)}
	if m.random.IntN(3) == 0 {
		shapes = append(shapes, first(kind, amount))
	}
	card := -1
	if kind == gcuMemory && len(m.inventory().Shares) > 0 {
		card = m.random.IntN(len(m.topology.Cards))
	}
	if other := []accel.Resource{gcuMemory, gcuWhole, gcuBoard, gcuShared}[m.random.IntN(4)]; other != kind && m.random.IntN(8) == 0 {
		shapes = append(shapes, of(other, 1))
	}
	var pod *corev1.Pod
	static := m.random.IntN(8) == 0
	if static { // the API server hears of it after kubelet
		m.count["static pods"]++
		pod = m.pod(fmt.Sprint("pod", m.n), shapes...)
	} else {
		pod = m.bind(card, fmt.Sprint("pod", m.n), shapes...)
	}
	if err := m.kubelet.add(pod); err != nil {
		m.count["refused "+string(kind)]++
		if strings.Contains(err.Error(), "held by another container") {
			m.t.Fatalf("step %d: pod %s: %v", m.n, pod.Name, err)
		}
		m.api.remove(pod.UID)
		return
	}
	if static {
		m.api.create(pod)
	}
	if err := m.kubelet.run(pod); err != nil {
		m.t.Fatal(err)
	}
	m.count[string(kind)]++
	m.running = append(m.running, pod)
}

// alive checks that no pod that runs was failed.
func (m *mixed) alive() {
	m.t.Helper()
	for _, pod := range m.running {
		if got := m.api.get(pod.UID).Status; got.Phase != corev1.PodRunning {
			m.t.Fatalf("step %d: pod %s does not run any more: %s", m.n, pod.Name, got.Message)
		}
	}
}

func (m *mixed) well() {
	for i := range m.topology.Cards {
		m.topology.Cards[i].Lost = false
	}
	m.writeTopology()
}

// apart checks that each chip is given out in one way at most: to one container
// as a whole or as part of a board, or by time slices, or by memory.
func (m *mixed) apart() error {
	index := map[accel.DeviceID]int{}
	for i := range m.topology.Cards {
		index[m.card(i)] = i
	}
	as := map[int]string{} // chip -> how, or which pod for whole devices
	take := func(chip int, how, pod string) error {
		if other, taken := as[chip]; taken && other != how {
			return fmt.Errorf("step %d: chip %d of pod %s is given out as %s and as %s", m.n, chip, pod, other, how)
		}
		as[chip] = how
		return nil
	}
	layout := m.layout()
	for _, pod := range m.kubelet.GetActivePods() {
		for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
			for _, id := range m.kubelet.held(pod.UID, c.Name, gcuMemory) {
				d, _ := layout.Device(id)
				if err := take(index[d], "memory", pod.Name); err != nil {
					return err
				}
			}
			for _, id := range m.kubelet.held(pod.UID, c.Name, gcuShared) {
				if err := take(index[slotDevice(id)], "time slices", pod.Name); err != nil {
					return err
				}
			}
			for _, id := range m.kubelet.held(pod.UID, c.Name, gcuWhole) {
				if err := take(index[slotDevice(id)], "a whole of "+pod.Name, pod.Name); err != nil {
					return err
				}
			}
			for _, id := range m.kubelet.held(pod.UID, c.Name, gcuBoard) {
				for chip := range 2 {
					if err := take(index[slotDevice(id)]+chip, "a board of "+pod.Name, pod.Name); err != nil {
						return err
					}
				}
			}
		}
	}
	return nil
}
