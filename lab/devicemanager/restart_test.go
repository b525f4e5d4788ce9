package devicemanager

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// settled returns a node with running pods on both of its cards, which keep 12
// units of card 0 and 10 of card 1. None of them has a plain init container.
func settled(t *testing.T) (*node, []*corev1.Pod) {
	t.Helper()
	n := newNode(t, "1", vendorsim.GCUs(2, 16<<10))
	pods := []*corev1.Pod{
		n.bind(0, "one", app(4)),
		n.bind(0, "many", app(2, 3)),
		n.bind(1, "side", sidecar(2), app(4)),
		n.bind(0, "whole", sidecar(1), app(2)),
		n.bind(1, "last", app(2, 2)),
	}
	n.admit(pods...)
	n.converged()
	return n, pods
}

// snapshot is what containers hold, by pod and name.
func (n *node) snapshot(pods []*corev1.Pod) string {
	var b strings.Builder
	for _, p := range pods {
		for _, c := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
			fmt.Fprintf(&b, "%s/%s: %v\n", p.Name, c.Name, n.kubelet.ids(p.UID, c.Name))
		}
	}
	return b.String()
}

// same checks that pods hold what they did and none has failed.
func (n *node) same(before string, pods []*corev1.Pod) {
	n.t.Helper()
	if after := n.snapshot(pods); after != before {
		n.t.Fatalf("the pods held\n%s\nand now\n%s", before, after)
	}
	for _, p := range pods {
		if got := n.api.get(p.UID); got.Status.Phase != corev1.PodRunning {
			n.t.Fatalf("pod %s: %s: %s", p.Name, got.Status.Phase, got.Status.Message)
		}
	}
}

func TestKubeletRestart(t *testing.T) {
	t.Parallel()
	n, pods := settled(t)
	before := n.snapshot(pods)
	for i := range 3 {
		begin := time.Now()
		n.restartKubelet()
		n.awaitReady()
		t.Logf("kubelet has the units again after %v", time.Since(begin).Round(time.Millisecond))
		n.same(before, pods)
		n.converged()
		next := n.bind(1, fmt.Sprintf("next%d", i), app(1, 1))
		n.admit(next)
		n.on(1, next)
		pods = append(pods, next)
		before = n.snapshot(pods)
	}
	n.refused(n.bind(1, "full", app(3, 2)), "no device of this node has enough free units")
}

// Kubelet looks at completed init containers anew after its restart and, since
// they do not run, wants their units registered and healthy by then.
func TestKubeletRestartWithCompletedInitContainers(t *testing.T) {
	t.Parallel()
	n := newNode(t, "1", vendorsim.GCUs(2, 16<<10))
	pods := []*corev1.Pod{
		n.bind(0, "larger", initial(8), app(3, 2)),
		n.bind(1, "smaller", initial(2), app(5)),
		n.bind(1, "alone", initial(6), app(0)),
	}
	n.admit(pods...)
	n.converged()
	before := n.snapshot(pods)
	n.kubelet.stop()
	n.kubelet.boot()
	n.awaitReady()
	n.kubelet.readd()
	n.same(before, pods)
	n.converged()
	// All of the peak is kept, also what no running container uses.
	n.refused(n.bind(0, "too-large", app(9, 1)), "no device of this node has enough free units")
	fits := n.bind(0, "fits", app(8))
	n.admit(fits)
	n.on(0, fits)
}

// The same at once, before anybody has registered: kubelet refuses such pods
// by itself, so the time until the units are there again matters.
func TestKubeletRefusesCompletedInitContainersBeforeRegistration(t *testing.T) {
	t.Parallel()
	n := newNode(t, "1", vendorsim.GCUs(1, 16<<10))
	pod := n.bind(0, "pod", initial(2), app(5))
	n.admit(pod)
	n.converged()
	n.kubelet.stop()
	n.stop()
	n.kubelet.boot()
	n.refused(pod, "no healthy devices present")
}

func TestAgentRestart(t *testing.T) {
	t.Parallel()
	n, pods := settled(t)
	before := n.snapshot(pods)
	for i := range 3 {
		n.restartAgent()
		n.awaitReady()
		n.same(before, pods)
		n.converged()
		next := n.bind(1, fmt.Sprintf("next%d", i), initial(2), app(1))
		n.admit(next)
		n.on(1, next)
		pods = append(pods, next)
		before = n.snapshot(pods)
	}
}

// Both at once, in both orders.
func TestBothRestart(t *testing.T) {
	t.Parallel()
	n, pods := settled(t)
	before := n.snapshot(pods)
	n.kubelet.stop()
	n.stop()
	n.startAgent()
	n.kubelet.start()
	n.awaitReady()
	n.same(before, pods)
	n.converged()
	n.stop()
	n.kubelet.stop()
	n.kubelet.start()
	n.startAgent()
	n.awaitReady()
	n.same(before, pods)
	n.converged()
	next := n.bind(1, "next", app(3, 3))
	n.admit(next)
	n.on(1, next)
}

// A pod whose containers are served by two lives of divvy-node is on one card
// all the same, or fails.
func TestRestartInTheMiddleOfAPod(t *testing.T) {
	t.Parallel()
	shapes := map[string][]shape{
		"app containers":    {app(2, 2, 3)},
		"an init container": {initial(4), app(3, 3)},
		"a sidecar":         {sidecar(2), initial(3), app(2, 4)},
		"two equal inits":   {initial(3, 3), app(3, 3)},
	}
	for name, shapes := range shapes {
		for _, who := range []string{"divvy-node", "kubelet", "both"} {
			t.Run(name+", "+who, func(t *testing.T) {
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
					if who != "kubelet" {
						n.stop()
					}
					if who != "divvy-node" {
						n.kubelet.stop()
						n.kubelet.boot()
					}
					if who != "kubelet" {
						n.startAgent()
					}
					n.awaitReady()
					if who != "divvy-node" {
						n.kubelet.readd()
					} else if err := n.kubelet.add(pod); err != nil {
						t.Fatalf("stopped after %d containers: %v", stopAt, err)
					}
					if err := n.kubelet.run(pod); err != nil {
						t.Fatal(err)
					}
					n.on(1, pod)
					n.kubelet.remove(pod)
					pod = n.bind(1, "pod", shapes...)
				}
			})
		}
	}
}

// admitUntil is the part of an admission up to some container.
func (n *node) admitUntil(pod *corev1.Pod, containers int) {
	n.t.Helper()
	if err := n.kubelet.AddPart(pod, containers); err != nil {
		n.t.Fatal(err)
	}
}

// A card is lost while divvy-node is away, then kubelet restarts: the pods on
// it keep running and keep their units, and nobody else gets them.
func TestRestartWithoutACard(t *testing.T) {
	t.Parallel()
	n, pods := settled(t)
	before := n.snapshot(pods)
	n.stop()
	n.topology.Cards[0].Lost = true
	n.writeTopology()
	n.startAgent()
	eventually(t, soon, func() error { return n.health(0, false) })
	n.same(before, pods)
	n.restartKubelet()
	n.awaitReady()
	n.same(before, pods)
	next := n.bind(-1, "next", app(2))
	n.admit(next)
	n.on(1, next)
	n.refused(n.bind(0, "on-lost", app(4, 1)), "no device of this node has enough free units")
	n.topology.Cards[0].Lost = false
	n.writeTopology()
	eventually(t, soon, func() error { return n.health(0, true) })
	n.same(before, pods)
	last := n.bind(0, "last0", app(4))
	n.admit(last)
	n.on(0, last)
}

// A state file that was damaged does not stop the node; with nobody running the
// layout is simply made anew.
func TestDamagedState(t *testing.T) {
	t.Parallel()
	n := newNode(t, "1", vendorsim.GCUs(2, 16<<10))
	n.stop()
	path := n.dir + "/state/units-enflame.com_gcu-memory.json"
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	n.startAgent()
	n.awaitReady()
	pod := n.bind(1, "pod", app(16))
	n.admit(pod)
	n.on(1, pod)
}

// Kubelet keeps for good what divvy-node wrote into the node's status by itself.
func TestNumberOfDevicesGoesWithTheConfiguration(t *testing.T) {
	t.Parallel()
	named := memoryUnits
	named.CountResource = "enflame.com/gcu-count"
	n := offer(t, vendorsim.GCUs(2, 16<<10), named)
	shown := func(want string) {
		t.Helper()
		eventually(t, soon, func() error {
			node, err := n.api.CoreV1().Nodes().Get(t.Context(), thisNode, metav1.GetOptions{})
			if err != nil {
				return err
			}
			got := ""
			for _, list := range []corev1.ResourceList{node.Status.Capacity, node.Status.Allocatable} {
				for name, q := range list {
					got += fmt.Sprintf("%s=%v ", name, q.String())
				}
			}
			if got != want {
				return fmt.Errorf("the node shows %q, want %q", got, want)
			}
			return nil
		})
	}
	shown("enflame.com/gcu-count=2 enflame.com/gcu-count=2 ")
	n.reload(memoryUnits)
	shown("")
	n.reload(named)
	shown("enflame.com/gcu-count=2 enflame.com/gcu-count=2 ")
	n.reload(whole)
	shown("")
}
