//go:build e2e

package e2e

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/lab/internal/cluster"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// wishing returns a pod with annotations, key and value in turn.
func wishing(pod *corev1.Pod, annotations ...string) *corev1.Pod {
	pod.Annotations = map[string]string{}
	for i := 0; i+1 < len(annotations); i += 2 {
		pod.Annotations[annotations[i]] = annotations[i+1]
	}
	return pod
}

// TestSeveralDevices puts a pod on two cards: all its containers see both, each
// card carries half of it, and that stays so when everything is started anew.
func TestSeveralDevices(t *testing.T) {
	ctx := begin(t, guide)
	first := one("first", 10)
	start(t, first)
	// Its peak is 16, on each card 8: not on card 0, which has 6.
	pair := wishing(lab.Pods.New("pair", testenv.Container("a", 12), testenv.Container("b", 4)), "divvy.dev/devices", "2")
	pair.Spec.InitContainers = []corev1.Container{testenv.Container("init", 8, "true")}
	start(t, pair)
	on := parts(t, "pair")
	pairOn := slices.Sorted(maps.Keys(on))
	if len(pairOn) != 2 || on[0] > 0 || on[pairOn[0]] != 8 || on[pairOn[1]] != 8 {
		t.Fatalf("the pod has the units %v, by card; want 8 on each of two that have room", on)
	}
	text, err := lab.Pods.Exec(ctx, "pair", "b", "sh", "-c", "echo $ENFLAME_VISIBLE_DEVICES; cd /dev; ls -d gcu[0-9]*")
	must(t, err)
	want := []string{fmt.Sprintf("%d,%d", pairOn[0], pairOn[1]), fmt.Sprint("gcu", pairOn[0]), fmt.Sprint("gcu", pairOn[1])}
	if got := strings.Fields(text); !slices.Equal(got, want) {
		t.Errorf("container b sees %q, want %q", got, want)
	}

	table, err := lab.CLI.Kubectl(ctx, "divvy", "inspect", layout.NodeName)
	must(t, err)
	if n := strings.Count(table, "8 of 16"); n != 2 {
		t.Errorf("kubectl divvy inspect shows the pod with 8 of its 16 units on %d cards, want 2:\n%s", n, table)
	}

	before := lives(t)
	for _, restart := range lab.Restarts() {
		if slices.Contains([]string{testenv.NodeDaemon + " killed", testenv.Extender + " deleted", string(cluster.Kubelet) + " restarted"},
			restart.Name) {
			must(t, restart.Do(ctx))
		}
	}
	start(t, one("next", 8))
	wantParts(t, "pair", on)
	wantParts(t, "next", map[int]int64{pairOn[0]: 8}) // the fullest with room
	undisturbed(t, before)

	must(t, lab.Pods.Delete(ctx, "pair"))
	start(t, wishing(one("all", 8*6), "divvy.dev/devices", "8"))
	everywhere := map[int]int64{}
	for card := range 8 {
		everywhere[card] = 6
	}
	wantParts(t, "all", everywhere)
}

// TestDeviceChoice is about annotations that choose cards, and those that are
// wrong.
func TestDeviceChoice(t *testing.T) {
	begin(t, guide)
	books := agree(t)
	uuid := func(card int) string { return books.Cards[card].UUID }
	start(t,
		wishing(one("use", 4), "divvy.dev/use-devices", uuid(5)+", "+uuid(6)),
		wishing(one("avoid", 4), "divvy.dev/avoid-devices", uuid(5)+","+uuid(0)),
		wishing(one("spread", 4), "divvy.dev/placement-policy", "spread"),
	)
	wantParts(t, "use", map[int]int64{5: 4})
	if on := parts(t, "avoid"); len(on) != 1 || on[0]+on[5] > 0 {
		t.Errorf("the pod that avoids cards 0 and 5 has %v", on)
	}
	use, avoid, spread := parts(t, "use"), parts(t, "avoid"), parts(t, "spread")
	for card := range spread {
		if use[card]+avoid[card] > 0 {
			t.Errorf("the pod that is spread shares card %d", card)
		}
	}
	for name, test := range map[string]struct {
		pod  *corev1.Pod
		text string
	}{
		"unequal": {wishing(one("unequal", 5), "divvy.dev/devices", "2"), "annotation divvy.dev/devices: container app requests 5 of " +
			"enflame.com/gcu-memory, which cannot be divided equally among 2 devices; use 4 or 6"},
		"both": {wishing(one("both", 4), "divvy.dev/use-models", "S60", "divvy.dev/avoid-models", "s60"),
			"annotation divvy.dev/avoid-models: model \"S60\" is in divvy.dev/use-models too"},
		"policy": {wishing(one("policy", 4), "divvy.dev/placement-policy", "best"),
			"annotation divvy.dev/placement-policy: \"best\" is not a placement policy"},
		"no model": {wishing(one("no-model", 4), "divvy.dev/use-models", "none-such"), "no device that divvy.dev/use-models allows"},
		"too many": {wishing(one("too-many", 9), "divvy.dev/devices", "9"), "fewer than 9 devices"},
	} {
		t.Run(name, func(t *testing.T) { pending(t, create(t, test.pod)[0], test.text) })
	}
}

// parts are the units that inspect shows of a pod, by card, once all records agree.
func parts(t *testing.T, pod string) map[int]int64 {
	t.Helper()
	on := map[int]int64{}
	for _, device := range agree(t).Inspect.Devices {
		for _, occupant := range device.Pods {
			if occupant.Namespace == namespace && occupant.Name == pod {
				on[device.ID] += occupant.Used
			}
		}
	}
	return on
}

func wantParts(t *testing.T, pod string, want map[int]int64) {
	t.Helper()
	if got := parts(t, pod); !maps.Equal(got, want) {
		t.Fatalf("pod %s has the units %v, by card; want %v", pod, got, want)
	}
}
