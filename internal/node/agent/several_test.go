package agent

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
)

// threeCards is a pool of cards a, b and c of 16 units.
func threeCards(t *testing.T) *world {
	t.Helper()
	w := newWorld(t, "1")
	w.update(t.Context(), found(card(0, "a", 16), card(1, "b", 16), card(2, "c", 16)), nil)
	return w
}

// onDevices counts the units that kubelet holds for the pod, each once, by device.
func (w *world) onDevices(p *corev1.Pod) string {
	ids := map[string]bool{}
	for _, some := range w.held[p.UID] {
		for _, id := range some {
			ids[id] = true
		}
	}
	n := map[accel.DeviceID]int{}
	for id := range ids {
		n[w.deviceOf(id)]++
	}
	var out []string
	for _, d := range []accel.DeviceID{"a", "b", "c"} {
		if n[d] > 0 {
			out = append(out, fmt.Sprintf("%s:%d", d, n[d]))
		}
	}
	return strings.Join(out, " ")
}

// truth renders what is written into the pods: name=devices.
func truth(facts []fact) string {
	var out []string
	for _, f := range facts {
		var devices []string
		for _, d := range f.devices {
			devices = append(devices, string(d.ID))
		}
		out = append(out, f.pod.Name+"="+strings.Join(devices, ","))
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

func TestSeveralDevices(t *testing.T) {
	w := threeCards(t)
	inv := see(w.pool, (*alloc.Engine).Inventory)
	if !inv.Several {
		t.Error("the inventory does not tell that pods may get several devices")
	}
	p := w.grantTo(newPod("p", 12, 4), "a c", 1)
	one := w.grantTo(newPod("one", 9), "b", 2)
	w.see(p, one)
	got, err := w.admit(p)
	if err != nil || got["c0"] != "a,c" || got["c1"] != "a,c" {
		t.Fatalf("containers see %v, %v; want a,c", got, err)
	}
	if on := w.onDevices(p); on != "a:8 c:8" {
		t.Errorf("units %s, want a:8 c:8", on)
	}
	if got, err := w.admit(one); err != nil || got["c0"] != "b" {
		t.Errorf("the pod of one device sees %v, %v", got, err)
	}
	facts, err := w.refresh(t.Context())
	if err != nil || truth(facts) != "one=b p=a,c" {
		t.Errorf("known: %s, %v", truth(facts), err)
	}

	w = w.restart("1")
	w.update(t.Context(), found(card(0, "a", 16), card(1, "b", 16), card(2, "c", 16)), nil)
	if facts, err := w.refresh(t.Context()); err != nil || truth(facts) != "one=b p=a,c" {
		t.Errorf("known after a restart: %s, %v", truth(facts), err)
	}
	// 8 are left on a and on c, 7 on b.
	next := w.grantTo(newPod("next", 16), "a c", 3)
	w.see(next)
	if got, err := w.admit(next); err != nil || got["c0"] != "a,c" || w.onDevices(next) != "a:8 c:8" {
		t.Errorf("the next sees %v on %s, %v", got, w.onDevices(next), err)
	}
}

// Kubelet takes what it reuses of an init container without a question and without
// a thought of devices: the container gets all devices of the pod nevertheless,
// and none of them carries more than its part.
func TestInitContainersOfSeveralDevices(t *testing.T) {
	for name, sizes := range map[string]struct {
		init []int
		apps []int
		want string
	}{
		"less than before":      {[]int{8}, []int{4}, "a:4 b:4"},
		"less, then more":       {[]int{8}, []int{4, 8}, "a:6 b:6"},
		"several in a row":      {[]int{2, 8, 6}, []int{10, 2, 4}, "a:8 b:8"},
		"more than before":      {[]int{4}, []int{16}, "a:8 b:8"},
		"nothing to be reused":  {nil, []int{6, 2}, "a:4 b:4"},
		"the same amount twice": {[]int{6}, []int{6, 6}, "a:6 b:6"},
	} {
		t.Run(name, func(t *testing.T) {
			w := threeCards(t)
			p := newPod("p", sizes.apps...)
			for i, size := range sizes.init {
				p.Spec.InitContainers = append(p.Spec.InitContainers, container(fmt.Sprint("i", i), size))
			}
			w.see(w.grantTo(p, "a b", 1))
			got, err := w.admit(p)
			if err != nil || len(got) != len(sizes.init)+len(sizes.apps) {
				t.Fatalf("containers see %v, %v", got, err)
			}
			for container, sees := range got {
				if sees != "a,b" {
					t.Errorf("container %s sees %q, want a,b", container, sees)
				}
			}
			if on := w.onDevices(p); on != sizes.want {
				t.Errorf("units %s, want %s", on, sizes.want)
			}
			for restarted := range 2 {
				facts, err := w.refresh(t.Context())
				if err != nil || truth(facts) != "p=a,b" {
					t.Errorf("known after %d restarts: %q, %v", restarted, truth(facts), err)
				}
				w = w.restart("1")
				w.update(t.Context(), found(card(0, "a", 16), card(1, "b", 16), card(2, "c", 16)), nil)
			}
		})
	}
}

// Without a grant the annotation says how many, and the node chooses.
func TestSeveralDevicesWithoutAGrant(t *testing.T) {
	w := newWorld(t, "1")
	f := found(card(0, "a", 16), card(1, "b", 16), card(2, "c", 16))
	f.Links = []accel.Link{{A: "a", B: "b", Score: accel.LinkNode}, {A: "b", B: "c", Score: accel.LinkLane}}
	w.update(t.Context(), f, nil)
	if inv := see(w.pool, (*alloc.Engine).Inventory); !slices.Equal(inv.Links, f.Links) {
		t.Errorf("the inventory has the links %v", inv.Links)
	}
	p := newPod("p", 12)
	p.Annotations[wire.CountAnnotation] = "2"
	w.see(p)
	got, err := w.admit(p)
	if err != nil || len(strings.Split(got["c0"], ",")) != 2 {
		t.Fatalf("it sees %v, %v; want two devices", got, err)
	}
	if facts, err := w.refresh(t.Context()); err != nil || truth(facts) != "p="+got["c0"] {
		t.Errorf("known: %s, %v; it sees %v", truth(facts), err, got)
	}
	odd := newPod("odd", 5)
	odd.Annotations[wire.CountAnnotation] = "2"
	w.see(odd)
	if got, err := w.admit(odd); !errors.Is(err, sharing.ErrNoRoom) || !strings.Contains(err.Error(), "5 units on 2 devices") {
		t.Errorf("5 units on 2 devices: %v, %v", got, err)
	}
	// A user may change it while the pod runs: what the pod has stays true.
	p.Annotations[wire.CountAnnotation] = "3"
	w.grantTo(p, strings.ReplaceAll(got["c0"], ",", " "), 1)
	if facts, err := w.refresh(t.Context()); err != nil || truth(facts) != "p="+got["c0"] {
		t.Errorf("known after a change of the annotation: %s, %v", truth(facts), err)
	}
}

// Kubelet does not ask when it needs all that is left.
func TestKubeletTakesAllThatIsLeft(t *testing.T) {
	w := threeCards(t)
	all := func(d string, n int) []string { return w.idsOf(accel.DeviceID(d))[:n] }
	p := w.grantTo(newPod("p", 16), "a c", 1)
	w.see(p)
	w.admitted = append(w.admitted, p)
	if _, err := w.refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	for name, ids := range map[string][]string{
		"another device":  slices.Concat(all("a", 8), all("b", 8)),
		"unequal parts":   slices.Concat(all("a", 10), all("c", 6)),
		"an unknown unit": slices.Concat(all("a", 15), []string{"!"}),
		"another size":    slices.Concat(all("a", 4), all("c", 4)),
	} {
		if got, err := w.Allocate(t.Context(), ids); err == nil || alloc.ReasonOf(err) != alloc.UnknownID {
			t.Errorf("%s: %v, %v", name, got.GetEnvs(), err)
		}
	}
	got, err := w.Allocate(t.Context(), slices.Concat(all("c", 8), all("a", 8)))
	if err != nil || got.GetEnvs()["ENFLAME_VISIBLE_DEVICES"] != "a,c" || len(got.GetDevices()) != 2 {
		t.Errorf("it sees %v and %v, %v", got.GetEnvs(), got.GetDevices(), err)
	}
}

func TestSeveralDevicesWithoutTheSavedState(t *testing.T) {
	w := threeCards(t)
	first := w.grantTo(newPod("first", 3), "b", 1)
	p := w.grantTo(newPod("p", 12, 4), "a c", 2)
	w.see(first, p)
	for _, pod := range []*corev1.Pod{first, p} {
		if _, err := w.admit(pod); err != nil {
			t.Fatal(err)
		}
	}
	before := w.onDevices(p)
	if err := w.store.Remove(); err != nil {
		t.Fatal(err)
	}
	w = w.restart("1")
	w.update(t.Context(), found(card(0, "a", 16), card(1, "b", 16), card(2, "c", 16)), nil)
	facts, err := w.refresh(t.Context())
	if err != nil || truth(facts) != "first=b p=a,c" || w.onDevices(p) != before || w.onDevices(first) != "b:3" {
		t.Errorf("known: %s on %s and %s, %v", truth(facts), w.onDevices(p), w.onDevices(first), err)
	}
	if err := w.ready(); err != nil {
		t.Error(err)
	}
}

func TestReconcileWritesSeveralDevices(t *testing.T) {
	w := threeCards(t)
	p := w.grantTo(newPod("p", 12), "a c", 1)
	moved := w.grantTo(newPod("moved", 4), "a b", 2)
	w.see(p, moved)
	if _, err := w.admit(p); err != nil {
		t.Fatal(err)
	}
	// b has no room any more.
	w.admitted = append(w.admitted, newPod("big", 16))
	w.held["uid-big"] = map[string][]string{"c0": w.idsOf("b")}
	if got, err := w.admit(moved); err != nil || got["c0"] != "a,c" {
		t.Fatalf("the other pod sees %v, %v; want a,c", got, err)
	}
	c, client := newCorrector(t, w)
	w.events = nil
	if err := reconcileAll(t, c, w); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"p", "moved"} {
		pod, err := client.CoreV1().Pods("ns").Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		g, err := w.signer.DecodeGrant(string(pod.UID), pod.Annotations[wire.GrantAnnotation])
		if err != nil || !g.Confirmed || devicesOf(g) != "devices 0 (a) and 2 (c)" ||
			pod.Annotations["enflame.com/gcu-device-id"] != "0,2" {
			t.Errorf("%s: grant %+v, %v; id %q", name, g, err, pod.Annotations["enflame.com/gcu-device-id"])
		}
	}
	if len(w.events) != 1 || !strings.Contains(w.events[0], "moved GrantCorrected: enflame.com/gcu-memory devices 0 (a) and 0 (b) was "+
		"planned, but kubelet allocated 4 units of enflame.com/gcu-memory devices 0 (a) and 2 (c)") {
		t.Errorf("events %q", w.events)
	}
}
