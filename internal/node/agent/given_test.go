package agent

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// A card fails right after units of it were given out. Kubelet has started anew
// in between and lists nothing, and the watch does not show the pod yet: its
// units stay healthy, or kubelet would fail the pod.
func TestUnitsGivenJustNowStayHealthy(t *testing.T) {
	w := newWorld(t, "1")
	w.update(t.Context(), found(card(0, "a", 16), card(1, "b", 16)), nil)
	p := w.grantTo(newPod("p", 5), "b", 1)
	w.api = append(w.api, p)
	if _, err := w.admit(p); err != nil {
		t.Fatal(err)
	}
	w.admitted = nil // kubelet has started
	if _, err := w.refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.update(t.Context(), found(card(0, "a", 16)), nil)
	if diff := cmp.Diff(map[string]string{"a": "16/16", "b": "5/16"}, w.counts()); diff != "" {
		t.Errorf("healthy units (-want +got):\n%s", diff)
	}
	// Kubelet has listed them since: its word counts from then on.
	w.admitted = append(w.admitted, p)
	w.cached = append(w.cached, p)
	if _, err := w.refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.remove(p)
	if _, err := w.refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]string{"a": "16/16", "b": "0/16"}, w.counts()); diff != "" {
		t.Errorf("healthy units after the pod (-want +got):\n%s", diff)
	}
}

// The size of units does not change between the answer to kubelet and what
// kubelet makes of it.
func TestUnitStaysWhileKubeletTakesUnits(t *testing.T) {
	w := newWorld(t, "1")
	w.update(t.Context(), found(card(0, "a", 16)), nil)
	old := newPod("old", 4)
	w.see(old)
	if _, err := w.admit(old); err != nil {
		t.Fatal(err)
	}
	w = w.restart("0.1")
	if _, err := w.refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.update(t.Context(), found(card(0, "a", 16)), nil)
	if len(w.units) != 16 {
		t.Fatalf("%d units while a pod holds some of the old size, want 16", len(w.units))
	}
	ids, err := w.Prefer(t.Context(), w.available(), nil, 5)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Allocate(t.Context(), ids); err != nil {
		t.Fatal(err)
	}
	w.remove(old)
	if _, err := w.refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(w.units) != 16 {
		t.Errorf("%d units when kubelet has not recorded yet what it got, want 16", len(w.units))
	}
}
