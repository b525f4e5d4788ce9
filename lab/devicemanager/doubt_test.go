package devicemanager

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// The tests of this file are about moments at which what kubelet and the API
// server tell is late, partial or not to be had.

// A pod of the same name as one that the watch still shows is another pod, with
// a grant of its own.
func TestRecreatedWithTheSameName(t *testing.T) {
	t.Parallel()
	n := newNode(t, "1", vendorsim.GCUs(2, 16<<10))
	for i := range 6 {
		pod := n.bind(i%2, "web-0", app(5))
		n.admit(pod)
		n.on(i%2, pod)
		n.kubelet.remove(pod)
	}
	old := n.bind(0, "web-0", app(5))
	n.admit(old)
	n.on(0, old)
	release := n.api.holdWatches()
	n.kubelet.remove(old)
	next := n.bind(1, "web-0", app(2, 3))
	n.admit(next)
	release()
	// The watch showed the pod of that name, running and confirmed: the agent
	// could not know better, but what it writes must be about the new one.
	if _, err := n.where(next); err != nil {
		t.Fatal(err)
	}
	n.converged()
}

// Several containers of a static pod share a card, although nobody can tell the
// agent that they belong together before kubelet lists the first.
func TestStaticPodOfSeveralContainers(t *testing.T) {
	t.Parallel()
	n := newNode(t, "1", vendorsim.GCUs(3, 16<<10))
	for i := range 3 {
		static := n.pod(fmt.Sprintf("static%d", i), sidecar(1), app(3, 2))
		n.admit(static)
		if _, err := n.where(static); err != nil {
			t.Fatal(err)
		}
	}
}

// A pod of two containers stays on one card although kubelet's pod-resources
// API answers nobody, as when others use up its rate limit.
func TestPodResourcesRefuses(t *testing.T) {
	t.Parallel()
	n := newNode(t, "1", vendorsim.GCUs(2, 16<<10))
	other := n.bind(0, "other", app(6))
	n.admit(other)
	n.on(0, other)
	n.kubelet.RefuseLists.Store(true)
	var pods []*corev1.Pod
	for i, shapes := range [][]shape{{app(3, 3, 5)}, {initial(4), app(3, 3)}, {sidecar(2), app(1)}, {app(2)}} {
		pod := n.bind(1-i%2, fmt.Sprintf("pod%d", i), shapes...)
		pods = append(pods, pod)
		// It may refuse, but not give what it cannot be sure of.
		if err := n.kubelet.add(pod); err != nil {
			t.Logf("pod %s: %v", pod.Name, err)
			continue
		}
		if err := n.kubelet.run(pod); err != nil {
			t.Fatal(err)
		}
		if _, err := n.where(pod); err != nil {
			t.Fatal(err)
		}
	}
	n.kubelet.RefuseLists.Store(false)
	n.converged()
	for _, pod := range pods {
		n.kubelet.remove(pod)
	}
	last := n.bind(1, "last", app(16))
	n.admit(last)
	n.on(1, last)
}

// The memory unit changes once nobody holds units of the old size. That kubelet
// lists nobody just after its own start does not count: it lists the pods that
// it has looked at since.
func TestUnitChange(t *testing.T) {
	t.Parallel()
	n, pods := settled(t)
	before := n.snapshot(pods)
	n.stop()
	n.unit = "0.1"
	n.startAgent()
	waits := func() error {
		if err := n.agent.Ready(); err == nil || !strings.Contains(err.Error(), "memoryUnit stays 1 until") {
			return errUnexpected(err)
		}
		return nil
	}
	eventually(t, patience, waits)
	n.kubelet.stop()
	n.kubelet.boot()
	// Long enough for a turn of the agent's loop, which asks kubelet.
	listed := time.After(3 * time.Second)
	eventually(t, patience, func() error {
		select {
		case <-listed:
			return nil
		default:
			return errUnexpected(nil)
		}
	})
	if c, _ := n.kubelet.capacity(); c != 32 {
		t.Errorf("kubelet shows %d units while pods hold units of 1 GB, want 32", c)
	}
	n.kubelet.readd()
	n.same(before, pods)
	eventually(t, patience, waits)
	for _, pod := range pods {
		n.kubelet.remove(pod)
	}
	eventually(t, patience, func() error {
		if c, _ := n.kubelet.capacity(); c != 320 {
			return fmt.Errorf("kubelet shows %d units, want 320", c)
		}
		return nil
	})
	n.awaitReady()
	next := n.bind(1, "next", app(160))
	n.admit(next)
	n.on(1, next)
}

// So that kubelet, after its restart, takes back a pod whose completed init
// containers keep units of a card that is ill.
func TestKubeletRestartWithCompletedInitContainersOnASickCard(t *testing.T) {
	t.Parallel()
	for _, ill := range []func(*vendorsim.Card){
		func(c *vendorsim.Card) { c.Unhealthy = true },
		func(c *vendorsim.Card) { c.Lost = true },
	} {
		n := newNode(t, "1", vendorsim.GCUs(2, 16<<10))
		pods := []*corev1.Pod{
			n.bind(0, "larger", initial(8), app(3, 2)),
			n.bind(0, "alone", initial(6), app(0)),
			n.bind(1, "other", app(5)),
		}
		n.admit(pods...)
		n.converged()
		before := n.snapshot(pods)
		ill(&n.topology.Cards[0])
		n.writeTopology()
		eventually(t, soon, func() error {
			if !n.inventory().Shares[0].Health.Unhealthy {
				return errUnexpected(nil)
			}
			return nil
		})
		n.kubelet.stop()
		n.kubelet.boot()
		n.awaitReady()
		n.kubelet.readd()
		n.same(before, pods)
	}
}
