package devicemanager

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

func TestRegister(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		unit  string
		cards []vendorsim.Card
		total int64
		ask   int64
	}{
		"unit 1":                       {unit: "1", cards: vendorsim.GCUs(2, 16<<10), total: 32, ask: 12},
		"unit 0.1":                     {unit: "0.1", cards: vendorsim.GCUs(2, 16<<10), total: 320, ask: 120},
		"8 cards of 32 GB, unit 0.001": {unit: "0.001", cards: vendorsim.GCUs(8, 32<<10), total: 256_000, ask: 4000},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			begin := time.Now()
			n := newNode(t, tt.unit, tt.cards)
			registered := time.Since(begin)
			capacity, allocatable := n.kubelet.capacity()
			if capacity != tt.total || allocatable != tt.total {
				t.Errorf("capacity %d, allocatable %d, want %d", capacity, allocatable, tt.total)
			}
			begin = time.Now()
			pod := n.bind(1, "pod", app(tt.ask))
			n.admit(pod)
			t.Logf("%d units: registered after %v, a pod of %d units admitted in %v",
				tt.total, registered.Round(time.Millisecond), tt.ask, time.Since(begin).Round(time.Millisecond))
			n.on(1, pod)
			if got := n.used(1); got != int(tt.ask) {
				t.Errorf("%d units of card 1 are used, want %d", got, tt.ask)
			}
		})
	}
}

// More units than kubelet's message holds are an error that says what to do,
// not a plugin that kubelet drops.
func TestTooManyUnits(t *testing.T) {
	t.Parallel()
	n := prepareNode(t, "0.001", vendorsim.GCUs(9, 32<<10))
	n.kubelet.start()
	n.startAgent()
	eventually(t, patience, func() error {
		err := n.agent.Ready()
		if err != nil && strings.Contains(err.Error(), "choose a larger memoryUnit") {
			return nil
		}
		return errUnexpected(err)
	})
	if capacity, _ := n.kubelet.capacity(); capacity != 0 {
		t.Errorf("kubelet shows %d units", capacity)
	}
}

// An unhealthy unit takes two bytes more in kubelet's list than a healthy one: with
// two of eight cards unhealthy the list of the finest units does not fit any more.
// Kubelet keeps what containers hold, learns that the rest is gone, and has all of
// it when the cards recover.
//
// The pods hold few units: for each unit that is new to kubelet or changes its
// health, kubelet 1.36 and later goes through all units that containers hold, and
// holds the lock of its device manager meanwhile. With some thousand units held its
// restart takes minutes.
func TestUnhealthyCardsAtTheFinestUnit(t *testing.T) {
	const card, held = 32_000, 8
	n := newNode(t, "0.001", vendorsim.GCUs(8, 32<<10))
	pods := []*corev1.Pod{n.bind(1, "on-sick", app(held)), n.bind(2, "on-well", app(held))}
	n.admit(pods...)
	n.on(1, pods[0])
	n.on(2, pods[1])
	before := n.snapshot(pods)
	sick := func(cards ...int) {
		t.Helper()
		for i := range n.topology.Cards {
			n.topology.Cards[i].Unhealthy = slices.Contains(cards, i)
		}
		n.writeTopology()
	}
	told := func(capacity, allocatable int64) {
		t.Helper()
		eventually(t, patience, func() error {
			if err := n.agent.Ready(); err != nil {
				return err
			}
			if c, a := n.kubelet.capacity(); c != capacity || a != allocatable {
				return fmt.Errorf("kubelet shows %d units, %d allocatable; want %d and %d", c, a, capacity, allocatable)
			}
			return nil
		})
	}
	sick(1)
	told(8*card, 7*card+held) // just short enough
	sick(1, 5)
	told(6*card+held, 6*card+held)
	n.same(before, pods)
	eventually(t, patience, func() error {
		for i, s := range n.inventory().Shares {
			if want := i == 1 || i == 5; s.Health.Unhealthy != want || s.Units != card {
				return fmt.Errorf("the inventory shows card %d as %+v", i, s)
			}
		}
		return nil
	})
	begin := time.Now()
	next := n.bind(1, "next", app(held)) // its card has become unhealthy since
	n.admit(next)
	t.Logf("a pod of %d units admitted in %v", held, time.Since(begin).Round(time.Millisecond))
	if d, err := n.where(next); err != nil || d == n.card(1) || d == n.card(5) {
		t.Errorf("the pod is on %s (%v), an unhealthy card", d, err)
	}
	n.restartKubelet()
	told(6*card+held, 6*card+held)
	n.same(before, pods)
	// More is given back than was held when the list was made.
	n.kubelet.remove(pods[0])
	told(6*card, 6*card)
	sick()
	told(8*card, 8*card)
	last := n.bind(1, "last", app(card))
	n.admit(last)
	n.on(1, last)
}

// divvy-node may be there before kubelet.
func TestAgentBeforeKubelet(t *testing.T) {
	t.Parallel()
	n := prepareNode(t, "1", vendorsim.GCUs(1, 16<<10))
	n.startAgent()
	eventually(t, patience, func() error {
		err := n.agent.Ready()
		if err != nil && strings.Contains(err.Error(), "waiting for kubelet") {
			return nil
		}
		return errUnexpected(err)
	})
	n.kubelet.start()
	n.awaitReady()
	pod := n.bind(0, "pod", app(4))
	n.admit(pod)
	n.on(0, pod)
}
