package program

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clienttesting "k8s.io/client-go/testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

func TestPluginPacksDevices(t *testing.T) {
	w := newWorld(t, map[string][]accel.Units{"node-a": {16, 16}, "node-b": {8}})
	// The same as through the extender: the fullest device that has room.
	for _, step := range []struct {
		name  string
		units int64
		want  string
	}{
		{"eight", 8, "node-b-0"}, {"ten", 10, "node-a-0"}, {"six", 6, "node-a-0"}, {"sixteen", 16, "node-a-1"},
	} {
		w.create(pod(step.name, step.units))
		if got := w.placed(step.name); got != step.want {
			t.Errorf("pod %s of %d units is on %s, want %s", step.name, step.units, got, step.want)
		}
	}
	w.create(pod("plain", 0))
	w.placed("plain")
	if value := w.get("plain").Annotations[wire.GrantAnnotation]; value != "" {
		t.Errorf("a pod that asks for nothing has the grant %s", value)
	}
	if w.narrowed != 0 {
		t.Errorf("%d attempts with one node failed", w.narrowed)
	}
}

func TestPluginPlacesOnSeveralDevices(t *testing.T) {
	w := newWorld(t, map[string][]accel.Units{"node-a": {8, 16, 8}})
	w.create(pod("two", 16, func(p *v1.Pod) { p.Annotations = map[string]string{wire.CountAnnotation: "2"} }))
	if got := w.placed("two"); got != "node-a-0+node-a-2" {
		t.Errorf("got %s", got)
	}
}

func TestPluginWakesAPodWhenADeviceIsFree(t *testing.T) {
	w := newWorld(t, map[string][]accel.Units{"node-a": {8, 8}})
	w.create(pod("a", 4), pod("b", 8))
	w.placed("a")
	w.placed("b")
	w.create(pod("c", 6))
	if why := w.waits("c"); !strings.Contains(why, "nsufficient") {
		t.Errorf("pod c waits since %q", why)
	}
	w.delete("a")
	w.placed("c")
}

func TestPluginSaysWhyNoDeviceFits(t *testing.T) {
	w := newWorld(t, map[string][]accel.Units{"node-a": {8, 8}})
	w.create(pod("a", 5), pod("b", 5))
	w.placed("a")
	w.placed("b")
	w.create(pod("c", 6)) // the sum is enough
	if why := w.waits("c"); !strings.Contains(why, "insufficient gcu-memory in one gcu") && !strings.Contains(why, "in one ") {
		t.Errorf("pod c waits since %q", why)
	}
	w.create(pod("larger", 9))
	w.waits("larger")
	w.until("an event says that it never fits", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return strings.Contains(strings.Join(w.told, "\n"), "larger: ")
	})
}

func TestPluginEvictsWhereTheSumFitsAndNoDeviceDoes(t *testing.T) {
	w := newWorld(t, map[string][]accel.Units{"node-a": {8, 8}})
	for _, name := range []string{"a", "b", "c", "d"} { // two on each device
		w.create(pod(name, 4, priority(1)))
		w.placed(name)
	}
	byDevice := map[string]string{}
	for _, name := range []string{"a", "b", "c", "d"} {
		byDevice[w.placed(name)] = name
	}
	if len(byDevice) != 2 {
		t.Fatalf("the pods are on %v", byDevice)
	}
	for _, name := range byDevice {
		w.delete(name)
	}
	w.create(pod("low", 8, priority(1)))
	w.waits("low")
	w.create(pod("high", 8, priority(100)))
	w.placed("high")
	alive := 0
	for _, name := range []string{"a", "b", "c", "d"} {
		if w.get(name) != nil {
			alive++
		}
	}
	if alive != 1 {
		t.Errorf("%d of 2 pods are left, one eviction was enough", alive)
	}
}

func TestPluginEvictsNoPodOfTheSamePriority(t *testing.T) {
	w := newWorld(t, map[string][]accel.Units{"node-a": {8}})
	w.create(pod("a", 8, priority(5)))
	w.placed("a")
	w.create(pod("b", 8, priority(5)))
	w.waits("b")
	if w.get("a") == nil {
		t.Error("pod a was evicted")
	}
}

func TestPluginTriesAllNodesWhereOneDidNotDo(t *testing.T) {
	w := newWorld(t, map[string][]accel.Units{"node-a": {16}, "node-b": {8}})
	w.create(pod("guard", 0, func(p *v1.Pod) {
		p.Spec.NodeSelector = map[string]string{v1.LabelHostname: "node-b"}
		term := v1.PodAffinityTerm{TopologyKey: v1.LabelHostname,
			LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"noisy": "true"}}}
		p.Spec.Affinity = &v1.Affinity{PodAntiAffinity: &v1.PodAntiAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: []v1.PodAffinityTerm{term}}}
	}))
	w.placed("guard")
	// node-b would be best, and only a filter knows of the guard.
	w.create(pod("noisy", 8, func(p *v1.Pod) { p.Labels = map[string]string{"noisy": "true"} }))
	if got := w.placed("noisy"); got != "node-a-0" {
		t.Errorf("got %s", got)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.narrowed != 1 {
		t.Errorf("%d attempts with one node failed, want 1", w.narrowed)
	}
}

func TestPluginLooksAtTaintsAndSelectorsFirst(t *testing.T) {
	w := newWorld(t, map[string][]accel.Units{"node-a": {16}, "node-b": {8}})
	w.create(pod("selects", 8, func(p *v1.Pod) { p.Spec.NodeSelector = map[string]string{v1.LabelHostname: "node-a"} }))
	if got := w.placed("selects"); got != "node-a-0" {
		t.Errorf("got %s", got)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.narrowed != 0 {
		t.Errorf("%d attempts with one node failed, want none", w.narrowed)
	}
}

func TestPluginRejectsWhatCannotBeFollowed(t *testing.T) {
	w := newWorld(t, map[string][]accel.Units{"node-a": {16}})
	w.create(pod("mistaken", 8, func(p *v1.Pod) { p.Annotations = map[string]string{wire.CountAnnotation: "many"} }))
	if why := w.waits("mistaken"); !strings.Contains(why, wire.CountAnnotation) {
		t.Errorf("it waits since %q", why)
	}
	// Its own annotations put it right.
	p := w.get("mistaken")
	p.Annotations[wire.CountAnnotation] = "1"
	if _, err := w.server.Client(nil).CoreV1().Pods("team").Update(t.Context(), p, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	w.placed("mistaken")
}

var errLostAnswer = errors.New("the connection was reset")

func TestPluginBindsOnceWhateverBecomesOfAnswers(t *testing.T) {
	for _, written := range []bool{true, false} {
		t.Run(fmt.Sprintf("written=%t", written), func(t *testing.T) {
			w := newWorld(t, map[string][]accel.Units{"node-a": {8}})
			w.mu.Lock()
			gets := 0
			tried := false
			w.refuses = func(action clienttesting.Action) error {
				switch {
				case action.Matches("create", "pods") && action.GetSubresource() == "binding" && !tried:
					tried = true
					if written {
						create, ok := action.(clienttesting.CreateAction)
						if !ok {
							return errLostAnswer
						}
						binding, ok := create.GetObject().(*v1.Binding)
						if !ok {
							return errLostAnswer
						}
						go func() { // it arrives, and its answer does not
							_ = w.server.Client(nil).CoreV1().Pods("team").Bind(t.Context(), binding, metav1.CreateOptions{})
						}()
					}
					return errLostAnswer
				case action.Matches("get", "pods") && tried && gets < 3:
					gets++
					return errLostAnswer
				}
				return nil
			}
			w.mu.Unlock()
			w.create(pod("a", 8))
			if got := w.placed("a"); got != "node-a-0" {
				t.Errorf("got %s", got)
			}
			w.until("nothing is reserved any more", func() bool { return w.ledger.Counts().Reservations == 0 })
			if twice := w.boundTwice(); len(twice) > 0 {
				t.Errorf("bound twice: %v", twice)
			}
			w.create(pod("b", 8))
			w.waits("b")
			w.delete("a")
			w.placed("b")
		})
	}
}

func TestPluginFinishesABindWhenItEnds(t *testing.T) {
	w := newWorld(t, map[string][]accel.Units{"node-a": {8}})
	var ended, after error
	w.mu.Lock()
	w.leads = func(ctx context.Context) {
		ended = ctx.Err()
		w.stop()
		after = ctx.Err()
	}
	w.mu.Unlock()
	w.create(pod("a", 8))
	w.placed("a")
	w.mu.Lock()
	defer w.mu.Unlock()
	if ended != nil || after != nil {
		t.Errorf("before the end: %v, after it: %v; want neither", ended, after)
	}
}

func TestPluginLeaksNothing(t *testing.T) {
	w := newWorld(t, map[string][]accel.Units{"node-a": {8, 8, 8, 8}, "node-b": {8, 8, 8, 8}})
	for round := range 3 {
		var names []string
		for i := range 16 {
			names = append(names, fmt.Sprintf("p%d-%d", round, i))
			w.create(pod(names[i], 4))
		}
		for _, name := range names {
			w.placed(name)
		}
		used := map[string]accel.Units{}
		for u := range w.ledger.Nodes(memory) {
			for _, d := range u.Devices {
				used[string(d.ID)] = d.Used
				if d.Used > d.Units {
					t.Fatalf("device %s: %d of %d units", d.ID, d.Used, d.Units)
				}
			}
		}
		for _, name := range names {
			w.delete(name)
		}
		w.until("all is free", func() bool {
			for u := range w.ledger.Nodes(memory) {
				if u.Used != 0 {
					return false
				}
			}
			return true
		})
	}
	if c := w.ledger.Counts(); c.Reservations != 0 || c.Nominations != 0 {
		t.Errorf("left: %+v", c)
	}
}
