package devicemanager

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// gated is a backend whose discovery waits for the gate.
type gated struct {
	backend.Backend
	gate chan struct{}
}

func (g gated) Discover(ctx context.Context) (backend.Found, error) {
	select {
	case <-g.gate:
		return g.Backend.Discover(ctx)
	case <-ctx.Done():
		return backend.Found{}, ctx.Err()
	}
}

// restartGated restarts divvy-node with a library that answers once open is called.
func (n *node) restartGated() (open func()) {
	n.t.Helper()
	gate := make(chan struct{})
	n.stop()
	n.wrap = func(b backend.Backend) backend.Backend { return gated{b, gate} }
	n.startAgent()
	n.wrap = nil
	return func() { close(gate) }
}

// TestRegisteredBeforeTheDiscovery: after a crash kubelet has the units again before
// the vendor's library has answered, and a pod that arrives waits for it.
func TestRegisteredBeforeTheDiscovery(t *testing.T) {
	t.Parallel()
	n := offer(t, vendorsim.GCUs(4, 16<<10), memoryUnits, whole)
	memory, device := n.start("memory", of(gcuMemory, 4)), n.start("device", of(gcuWhole, 1))
	before := n.snapshot([]*corev1.Pod{memory})
	open := n.restartGated()
	eventually(t, patience, func() error {
		_, units := n.kubelet.capacity()
		_, devices := n.kubelet.capacityOf(gcuWhole)
		if units != 64 || devices != 4 {
			return fmt.Errorf("kubelet has %d units and %d devices", units, devices)
		}
		return nil
	})
	if err := n.agent.Ready(); err == nil {
		t.Error("it is ready without knowing its devices")
	}
	admitted := make(chan error, 1)
	late := n.bind(-1, "late", of(gcuWhole, 1))
	go func() { admitted <- n.kubelet.add(late) }()
	select {
	case err := <-admitted:
		t.Fatalf("a pod was admitted before the devices were known: %v", err)
	case <-time.After(200 * time.Millisecond):
	}
	open()
	if err := <-admitted; err != nil {
		t.Fatal(err)
	}
	n.awaitOffer()
	n.same(before, []*corev1.Pod{memory})
	held := n.kubelet.held(device.UID, "app0", gcuWhole)
	if got := n.kubelet.held(late.UID, "app0", gcuWhole); len(got) != 1 || got[0] == held[0] {
		t.Errorf("the pod that waited has %v, the other one %v", got, held)
	}
}

// TestDevicesGoneWhileTheDaemonWasDown: what the state file describes and the library
// does not list is offered no longer than it takes to find out.
func TestDevicesGoneWhileTheDaemonWasDown(t *testing.T) {
	t.Parallel()
	n := offer(t, vendorsim.GCUs(2, 16<<10), memoryUnits, sliced(2))
	n.stop()
	n.setCards()
	n.startAgent()
	eventually(t, patience, func() error {
		_, units := n.kubelet.capacity()
		_, slices := n.kubelet.capacityOf(gcuShared)
		if units+slices > 0 {
			return fmt.Errorf("kubelet has %d units and %d slices", units, slices)
		}
		return nil
	})
}

// TestLibraryBreaksWhileTheDaemonWasDown: a pod that arrives is rejected with the
// reason, and what runs keeps its units.
func TestLibraryBreaksWhileTheDaemonWasDown(t *testing.T) {
	t.Parallel()
	n := newNode(t, "1", vendorsim.GCUs(2, 16<<10))
	pod := n.bind(0, "pod", app(4))
	n.admit(pod)
	n.converged()
	before := n.snapshot([]*corev1.Pod{pod})
	n.stop()
	n.wrap = func(b backend.Backend) backend.Backend { return broken{b} }
	n.startAgent()
	n.wrap = nil
	eventually(t, patience, func() error {
		if _, units := n.kubelet.capacity(); units != 4 {
			return fmt.Errorf("kubelet has %d units, a pod holds 4", units)
		}
		return nil
	})
	if err := n.kubelet.add(n.bind(1, "late", app(2))); err == nil || !strings.Contains(err.Error(), "UnexpectedAdmissionError") &&
		!strings.Contains(err.Error(), "Insufficient") && !strings.Contains(err.Error(), "OutOf") {
		t.Errorf("a pod without a device: %v", err)
	}
	n.same(before, []*corev1.Pod{pod})
}

type broken struct{ backend.Backend }

func (broken) Discover(context.Context) (backend.Found, error) {
	return backend.Found{}, errors.New("the driver is broken")
}
