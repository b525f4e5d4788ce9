package simnodes

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

func TestUsed(t *testing.T) {
	key := []byte(strings.Repeat("k", wire.MinKeyBytes))
	signer, err := wire.NewSigner(key)
	if err != nil {
		t.Fatal(err)
	}
	g := Group{Count: 2, Cards: 2, Units: 8}
	// bound returns a pod that asks for units and holds granted ones of a card.
	bound := func(name, node string, asks, granted accel.Units, at int, device accel.DeviceID) corev1.Pod {
		t.Helper()
		pod := g.Pod("team", name, asks)
		pod.UID, pod.Spec.NodeName = types.UID("uid-"+name), node
		value, err := signer.EncodeGrant(string(pod.UID), accel.Grant{
			Resource: "enflame.com/gcu-memory", Node: g.NodeName(at), Device: device, DeviceUnits: 8, Units: granted, At: time.Unix(1, 0),
		})
		if err != nil {
			t.Fatal(err)
		}
		pod.Annotations = map[string]string{wire.GrantAnnotation: value}
		return *pod
	}
	waiting := *g.Pod("team", "waiting", 4)
	first, second := g.DeviceID(0, 0), g.DeviceID(1, 1)
	stranger := bound("stranger", g.NodeName(0), 4, 4, 0, first)
	stranger.UID = "another"
	tests := map[string]struct {
		pods []corev1.Pod
		used Used
		err  string
	}{
		"as it should be": {pods: []corev1.Pod{waiting, bound("a", g.NodeName(0), 4, 4, 0, first),
			bound("b", g.NodeName(0), 4, 4, 0, first), bound("c", g.NodeName(1), 8, 8, 1, second)}, used: Used{first: 8, second: 8}},
		"too much": {pods: []corev1.Pod{bound("a", g.NodeName(0), 4, 4, 0, first), bound("b", g.NodeName(0), 5, 5, 0, first)},
			err: "has 8 units, and pods hold 9"},
		"another node":     {pods: []corev1.Pod{bound("a", g.NodeName(1), 4, 4, 0, first)}, err: "its grant for sim-00000"},
		"another amount":   {pods: []corev1.Pod{bound("a", g.NodeName(0), 4, 3, 0, first)}, err: "asks for 4 units, its grant is for 3"},
		"another's device": {pods: []corev1.Pod{bound("a", g.NodeName(0), 4, 4, 0, second)}, err: "node sim-00000 has no device"},
		"another pod's":    {pods: []corev1.Pod{stranger}, err: "pod stranger"},
		"bound without one": {pods: []corev1.Pod{func() corev1.Pod {
			p := *g.Pod("team", "x",
				1)
			p.Spec.NodeName = g.NodeName(0)
			return p
		}()}, err: "pod x"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			used, err := g.Used(test.pods, key)
			if test.err != "" {
				if err == nil || !strings.Contains(err.Error(), test.err) {
					t.Fatalf("error %v, want one with %q", err, test.err)
				}
				return
			}
			if err != nil || len(used) != len(test.used) {
				t.Fatalf("used %v, %v; want %v", used, err, test.used)
			}
			for device, units := range test.used {
				if used[device] != units {
					t.Errorf("device %s: %d units, want %d", device, used[device], units)
				}
			}
		})
	}
	if _, err := g.Used(nil, []byte("short")); err == nil {
		t.Error("a key that is too short was taken")
	}
}
