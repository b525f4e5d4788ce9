package agent

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
)

// Static pods: nothing is known of the API server, kubelet lists other pods.
func TestStaticPodOfTwoContainersStaysOnOneCard(t *testing.T) {
	mixed := 0
	for range 30 {
		w := newWorld(t, "1")
		w.update(t.Context(), found(card(0, "a", 16), card(1, "b", 16)), nil)
		for _, name := range []string{"etcd", "apiserver", "web"} {
			w.admitted = append(w.admitted, newPod(name))
		}
		devices, err := w.admit(newPod("static", 4, 4))
		if err != nil {
			t.Fatal(err)
		}
		if devices["c0"] != devices["c1"] {
			mixed++
		}
	}
	if mixed > 0 {
		t.Errorf("%d of 30 pods hold units of two cards", mixed)
	}
}

// What the pod holds is not known in full: no slice may go out of range.
func TestPreferNeverPanics(t *testing.T) {
	w := newWorld(t, "1")
	w.update(t.Context(), found(card(0, "a", 16)), nil)
	p := newPod("p", 8)
	p.Spec.InitContainers = []corev1.Container{container("init", 8)}
	w.see(w.grantTo(p, "a", 1))
	if err := w.recall([]byte(`{"inits":{"` + string(p.UID) + `":{"next":1,"units":8}}}`)); err != nil { // as of a device that is not known
		t.Fatal(err)
	}
	big := newPod("big", 12)
	w.admitted = append(w.admitted, p, big)
	w.held[big.UID] = map[string][]string{"c0": w.idsOf("a")[:12]}
	if _, err := w.Prefer(t.Context(), w.available(), nil, 8); err == nil {
		t.Error("8 units given of 4")
	}
	if _, err := w.Prefer(t.Context(), w.available(), w.idsOf("a")[12:16], 2); err == nil {
		t.Error("2 units with 4 among them")
	}
}

// Two pods whose init containers use one card; kubelet asks for the second.
func TestReuseIsOfThePodBeingAdmitted(t *testing.T) {
	mk := func(name string, admitting bool) sharing.Waiting {
		return sharing.Waiting{
			Pod: accel.PodRef{UID: name, Name: name}, Admitting: admitting, Next: 1, Held: []sharing.Part{{Device: "a", Units: 2}},
			Request: accel.Request{Containers: []accel.ContainerRequest{{Name: "i", Units: 2}, {Name: "j", Units: 3},
				{Name: "c", Kind: accel.AppContainer, Units: 3}}},
		}
	}
	node := place.Node{Slots: []place.Slot{{ID: "a", Total: 16, Free: 16}}, CPU: place.Unlimited, Memory: place.Unlimited}
	got, err := sharing.Choose(3, []sharing.Part{{Device: "a", Units: 2}}, node, []sharing.Waiting{mk("failed", false), mk("now", true)})
	if err != nil || got.Pod != 1 {
		t.Errorf("taken to be for %d (%v), want 1, the one being admitted", got.Pod, err)
	}
}
