package devicemanager

import (
	"errors"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// health returns nil when the inventory shows the card at that position so and
// kubelet knows: it counts its free units among the allocatable ones or not.
func (n *node) health(card int, healthy bool) error {
	used, err := n.disjoint()
	if err != nil {
		return err
	}
	var want int64
	for _, s := range n.inventory().Shares {
		if s.ID == n.card(card) && s.Health.Unhealthy == healthy {
			return fmt.Errorf("card %d: the inventory shows %+v", card, s.Health)
		}
		if s.Health.Unhealthy {
			want += int64(used[s.ID])
		} else {
			want += int64(s.Units)
		}
	}
	if _, got := n.kubelet.capacity(); got != want {
		return fmt.Errorf("kubelet shows %d allocatable units, want %d", got, want)
	}
	return nil
}

func TestUnhealthyAndRecovered(t *testing.T) {
	t.Parallel()
	n, pods := settled(t)
	before := n.snapshot(pods)
	set := func(unhealthy bool) {
		n.topology.Cards[1].Unhealthy = unhealthy
		n.writeTopology()
		eventually(t, soon, func() error { return n.health(1, !unhealthy) })
	}
	set(true)
	n.same(before, pods)
	// Granted a moment before the card fell ill: it gets a healthy one.
	moved := n.bind(1, "moved", app(2))
	n.admit(moved)
	n.on(0, moved)
	n.refused(n.bind(1, "nowhere", app(2, 1)), "no device of this node has enough free units")
	// Kubelet restarts meanwhile: running pods stay.
	n.restartKubelet()
	n.awaitReady()
	n.same(before, pods)
	// Units that are given back are not healthy any more.
	n.kubelet.remove(pods[4])
	eventually(t, soon, func() error { return n.health(1, false) })
	set(false)
	next := n.bind(1, "next", app(10))
	n.admit(next)
	n.on(1, next)
	n.same(n.snapshot(pods[:4]), pods[:4])
}

func TestLostCard(t *testing.T) {
	t.Parallel()
	n, pods := settled(t)
	before := n.snapshot(pods)
	for range 2 {
		n.topology.Cards[0].Lost = true
		n.writeTopology()
		eventually(t, soon, func() error { return n.health(0, false) })
		n.same(before, pods)
		n.converged()
		moved := n.bind(0, "moved", app(2, 1))
		n.admit(moved)
		n.on(1, moved)
		n.kubelet.remove(moved)
		n.topology.Cards[0].Lost = false
		n.writeTopology()
		eventually(t, soon, func() error { return n.health(0, true) })
		n.same(before, pods)
		next := n.bind(0, "next", app(4))
		n.admit(next)
		n.on(0, next)
		n.kubelet.remove(next)
	}
}

// TestOneCardHangs: a call about one card does not return. Kubelet hears of it and
// of the health of the others, and pods on these are admitted; also where the
// library answers nothing else meanwhile.
func TestOneCardHangs(t *testing.T) {
	t.Parallel()
	for name, lock := range map[string]bool{"alone": false, "with the library's lock": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, "1", vendorsim.GCUs(3, 16<<10))
			held := n.bind(1, "held", app(4))
			n.admit(held)
			n.converged()
			pods := []*corev1.Pod{held}
			before := n.snapshot(pods)
			n.topology.Cards[1].Calls.Slow = vendorsim.Delays{"EfmlGetDevMem": time.Hour}
			n.topology.Library.OneLock = lock
			n.writeTopology()
			eventually(t, patience, func() error { return n.health(1, false) })
			for _, card := range []int{0, 2} {
				pod := n.bind(card, fmt.Sprint("beside-", card), app(3))
				n.admit(pod)
				n.on(card, pod)
				pods = append(pods, pod)
			}
			if !lock {
				n.topology.Cards[2].Unhealthy = true
				n.writeTopology()
				eventually(t, soon, func() error { return n.health(2, false) })
				n.topology.Cards[2].Unhealthy = false
				n.writeTopology()
				eventually(t, soon, func() error { return n.health(2, true) })
			}
			n.same(before, pods[:1])
			n.topology.Cards[1].Calls.Slow, n.topology.Library.OneLock = nil, false
			n.writeTopology()
			eventually(t, patience, func() error { return n.health(1, true) })
			after := n.bind(1, "after", app(12))
			n.admit(after)
			n.on(1, after)
		})
	}
}

// TestQuarantineOutlivesRestarts of divvy-node and kubelet: a card with a fatal error
// is well again, and takes no pods.
func TestQuarantineOutlivesRestarts(t *testing.T) {
	t.Parallel()
	n := prepareNode(t, "1", vendorsim.GCUs(2, 16<<10))
	n.configure = func(c *config.NodeConfig) {
		v := c.Vendors["enflame"]
		v.Health.NeverRecover = []string{"library"}
		c.Vendors["enflame"] = v
	}
	n.kubelet.start()
	n.startAgent()
	n.awaitReady()
	held := n.bind(1, "held", app(4))
	n.admit(held)
	n.converged()
	before := n.snapshot([]*corev1.Pod{held})
	for _, unhealthy := range []bool{true, false} {
		n.topology.Cards[1].Unhealthy = unhealthy
		n.writeTopology()
		eventually(t, soon, func() error { return n.health(1, false) })
	}
	for i, restart := range []func(){n.restartAgent, n.restartKubelet, n.restartAgent} {
		restart()
		n.awaitReady()
		eventually(t, soon, func() error { return n.health(1, false) })
		n.same(before, []*corev1.Pod{held})
		moved := n.bind(1, fmt.Sprint("moved-", i), app(2))
		n.admit(moved)
		n.on(0, moved)
	}
}

func TestDriverAbsentAndBack(t *testing.T) {
	t.Parallel()
	n, pods := settled(t)
	before := n.snapshot(pods)
	for _, state := range []vendorsim.DriverState{vendorsim.DriverAbsent, vendorsim.DriverBroken} {
		n.topology.Driver.State = state
		n.writeTopology()
		for card := range n.topology.Cards {
			eventually(t, soon, func() error { return n.health(card, false) })
		}
		n.same(before, pods)
		if err := n.kubelet.add(n.bind(0, "refused-"+string(state), app(3, 1))); err == nil {
			t.Errorf("driver %s: a pod was admitted", state)
		}
		n.topology.Driver.State = vendorsim.DriverLoaded
		n.writeTopology()
		for card := range n.topology.Cards {
			eventually(t, soon, func() error { return n.health(card, true) })
		}
		n.same(before, pods)
		next := n.bind(0, "next-"+string(state), app(2))
		n.admit(next)
		n.on(0, next)
		pods = append(pods, next)
		before = n.snapshot(pods)
	}
}

// A node whose driver is loaded late.
func TestDriverComesLate(t *testing.T) {
	t.Parallel()
	n := prepareNode(t, "1", vendorsim.GCUs(1, 16<<10))
	n.topology.Driver.State = vendorsim.DriverAbsent
	n.writeTopology()
	n.kubelet.start()
	n.startAgent()
	eventually(t, soon, func() error {
		if err := n.agent.Ready(); err == nil {
			return errUnexpected(err)
		}
		if c, _ := n.kubelet.capacity(); c != 0 {
			return fmt.Errorf("%d units", c)
		}
		return nil
	})
	n.topology.Driver.State = vendorsim.DriverLoaded
	n.writeTopology()
	// Until the driver is noticed, nothing is what is offered, and all is well.
	eventually(t, patience, func() error {
		if c, _ := n.kubelet.capacity(); c == 0 {
			return errors.New("kubelet has no units")
		}
		return nil
	})
	n.awaitReady()
	pod := n.bind(0, "pod", app(16))
	n.admit(pod)
	n.on(0, pod)
}

// The index of a card is that of the driver and shifts when a card is taken
// out; the units stay with the card.
func TestIndexShifts(t *testing.T) {
	t.Parallel()
	n := newNode(t, "1", vendorsim.GCUs(3, 16<<10))
	pods := []*corev1.Pod{n.bind(1, "b", app(4)), n.bind(2, "c", app(5))}
	n.admit(pods...)
	n.converged()
	held := n.snapshot(pods)
	all := n.topology.Cards
	n.setCards(all[1], all[2])
	eventually(t, soon, func() error {
		for _, s := range n.inventory().Shares {
			if s.ID == n.card(1) && s.Index == 1 && !s.Health.Unhealthy {
				return nil
			}
		}
		return fmt.Errorf("inventory: %+v", n.inventory().Shares)
	})
	n.same(held, pods)
	next := n.bind(1, "next", app(11))
	n.admit(next)
	d, err := n.where(next)
	if err != nil || d != n.card(1) {
		t.Fatalf("the pod is on %s (%v), want %s", d, err, n.card(1))
	}
	if used := n.used(1); used != 16 {
		t.Errorf("%d units of the card are used, want 16", used)
	}
}
