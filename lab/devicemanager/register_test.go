package devicemanager

import (
	"strings"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/vendorsim"
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
