package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/util/flowcontrol"
	testingclock "k8s.io/utils/clock/testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

func writeFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// newCorrector returns a corrector whose API server has the world's pods, with
// the world's key.
func newCorrector(t *testing.T, w *world) (*corrector, *fake.Clientset) {
	t.Helper()
	client := fake.NewClientset()
	for _, p := range w.api {
		if _, err := client.CoreV1().Pods(p.Namespace).Create(t.Context(), p, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	key := filepath.Join(t.TempDir(), "key")
	writeFile(t, key, "0123456789abcdef0123456789abcdef")
	client.ClearActions()
	m := newMetrics(prometheus.NewRegistry())
	return &corrector{node: thisNode, pods: newPodWriter(client, m, w.tellPod), keys: kube.NewKeyring(key), metrics: m, event: w.tellPod,
		written: cache.NewExpiring()}, client
}

// tellPod notes an event on a pod.
func (w *world) tellPod(pod *corev1.Pod, kind events.Kind, message string) {
	w.events = append(w.events, fmt.Sprintf("%s %s: %s", pod.Name, kind.Reason, message))
}

// reconcileAll is what a turn of the agent's loop does for the world's pool.
func reconcileAll(t *testing.T, c *corrector, w *world) error {
	t.Helper()
	if _, err := w.refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	return c.reconcile(t.Context(), w.pool)
}

func patches(client *fake.Clientset) int {
	n := 0
	for _, a := range client.Actions() {
		if _, ok := a.(clienttesting.PatchAction); ok {
			n++
		}
	}
	return n
}

func TestReconcileWritesWhatPodsHold(t *testing.T) {
	w := newWorld(t, "1")
	w.update(t.Context(), found(card(0, "a", 16), card(1, "b", 16)), nil)
	granted := w.grantTo(newPod("granted", 4), "b", 1)
	byHand := newPod("by-hand", 2, 2)
	byHand.Annotations["enflame.com/gcu-device-id"] = "7"
	byHand.Annotations["enflame.com/gcu-device-memory-request"] = "0"
	forged := newPod("forged", 8)
	forged.Annotations[wire.GrantAnnotation] = granted.Annotations[wire.GrantAnnotation]
	waiting := w.grantTo(newPod("waiting", 1), "a", 9)
	done := w.grantTo(newPod("done", 4), "a", 1)
	done.Status.Phase = corev1.PodSucceeded
	other := newPod("other")
	w.see(granted, byHand, forged, waiting, done, other)
	for _, p := range []*corev1.Pod{granted, byHand, forged} {
		if _, err := w.admit(p); err != nil {
			t.Fatal(err)
		}
	}
	c, client := newCorrector(t, w)
	w.events = nil
	if err := reconcileAll(t, c, w); err != nil {
		t.Fatal(err)
	}
	// The watch shows the pods as they were for a moment.
	written := patches(client)
	if err := reconcileAll(t, c, w); err != nil {
		t.Fatal(err)
	}
	if n := patches(client); n != written {
		t.Errorf("%d writes of what was written just before", n-written)
	}

	got := map[string]string{}
	list, err := client.CoreV1().Pods("ns").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	w.api, w.cached = nil, nil
	for i := range list.Items {
		p := &list.Items[i]
		w.see(p)
		for i, q := range w.admitted {
			if q.UID == p.UID {
				w.admitted[i] = p
			}
		}
		g, err := w.signer.DecodeGrant(string(p.UID), p.Annotations[wire.GrantAnnotation])
		if err != nil {
			got[p.Name] = "no grant"
			continue
		}
		got[p.Name] = strings.Join([]string{
			string(g.Device), p.Annotations["enflame.com/gcu-device-id"], p.Annotations["enflame.com/gcu-device-memory"],
			p.Annotations["enflame.com/gcu-device-memory-request"], p.Annotations["enflame.com/gcu-device-assigned"],
		}, " ")
	}
	want := map[string]string{
		"granted": "b 1 16 4 true",
		"by-hand": "b 1 16 4 true",
		"forged":  "b 1 16 8 true",
		"waiting": "a    ", // as the extender left it
		"done":    "a    ",
		"other":   "no grant",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("device, and annotations id, memory, memory-request, assigned (-want +got):\n%s", diff)
	}

	// What was wrong is counted, and told to the pods.
	count := func(kind string) float64 {
		return testutil.ToFloat64(c.metrics.corrections.WithLabelValues(string(gcuMemory), kind))
	}
	counted := map[string]float64{
		grantMissing: count(grantMissing), grantInvalid: count(grantInvalid), grantMoved: count(grantMoved),
		"confirmed": testutil.ToFloat64(c.metrics.confirmations.WithLabelValues(string(gcuMemory))),
	}
	if diff := cmp.Diff(map[string]float64{grantMissing: 1, grantInvalid: 1, grantMoved: 0, "confirmed": 1}, counted); diff != "" {
		t.Errorf("corrections (-want +got):\n%s", diff)
	}
	slices.Sort(w.events)
	if diff := cmp.Diff([]string{
		"by-hand GrantMissing: the pod was not placed by divvy-extender; kubelet allocated 4 units of enflame.com/gcu-memory device 1 (b)",
		"forged GrantInvalid: the pod's planned allocation is not valid on this node; kubelet allocated 8 units of " +
			"enflame.com/gcu-memory device 1 (b)",
	}, w.events); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	w.events = nil

	client.ClearActions()
	if err := reconcileAll(t, c, w); err != nil {
		t.Fatal(err)
	}
	if len(w.events) > 0 {
		t.Errorf("told again: %q", w.events)
	}
	if n := patches(client); n != 0 {
		t.Errorf("a second turn wrote %d times, want calm", n)
	}

	// What a user writes afterwards is put right.
	for _, p := range w.cached {
		if p.Name == "granted" {
			p.Annotations["enflame.com/gcu-device-memory-request"] = "0"
		}
	}
	if err := reconcileAll(t, c, w); err != nil {
		t.Fatal(err)
	}
	if n := patches(client); n != 1 {
		t.Errorf("%d writes after a user changed an annotation, want 1", n)
	}
}

// TestRejectedWrites: what is rejected is reported on its pod, once, and tried
// again less and less often; the other pods are written, and the node goes on.
func TestRejectedWrites(t *testing.T) {
	gone := errors.New("connection refused")
	pods := schema.GroupResource{Resource: "pods"}
	for name, tt := range map[string]struct {
		err error
		// rejected is true for an answer that is about the pod.
		rejected bool
	}{
		"no room for annotations": {apierrors.NewInvalid(schema.GroupKind{Kind: "Pod"}, "bad", field.ErrorList{
			field.TooLong(field.NewPath("metadata", "annotations"), "", 262144),
		}), true},
		"an object that is too large": {apierrors.NewRequestEntityTooLargeError("limit is 3145728"), true},
		"an admission policy": {apierrors.NewForbidden(pods,
			"bad", errors.New("ValidatingAdmissionPolicy 'no' denied request")), true},
		"a webhook that says bad request":  {apierrors.NewBadRequest("admission webhook denied the request"), true},
		"a webhook that cannot be reached": {apierrors.NewInternalError(errors.New("failed calling webhook")), true},
		"a busy API server":                {apierrors.NewTooManyRequests("later", 1), false},
		"an API server that restarts":      {apierrors.NewServiceUnavailable("restarting"), false},
		"no API server":                    {gone, false},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, "1")
			w.update(t.Context(), found(card(0, "a", 16)), nil)
			for _, one := range []string{"bad", "good"} {
				p := newPod(one, 4)
				w.see(p)
				if _, err := w.admit(p); err != nil {
					t.Fatal(err)
				}
			}
			c, client := newCorrector(t, w)
			clock := testingclock.NewFakeClock(time.Now())
			c.pods.rejected = flowcontrol.NewFakeBackOff(rejectedPause, rejectedPauseMax, clock)
			attempts, answer := 0, tt.err
			client.PrependReactor("patch", "pods", func(action clienttesting.Action) (bool, runtime.Object, error) {
				if patch, ok := action.(clienttesting.PatchAction); ok && patch.GetName() == "bad" {
					attempts++
					return answer != nil, nil, answer
				}
				return false, nil, nil
			})
			w.events = nil
			const turns = 60
			for turn := range turns {
				if err := reconcileAll(t, c, w); (err == nil) != tt.rejected {
					t.Fatalf("turn %d: %v", turn, err)
				}
				clock.Step(reconcileInterval)
			}
			told := 0
			for _, e := range w.events {
				if strings.HasPrefix(e, "bad GrantNotWritten: the allocation of the pod cannot be written into its annotations") {
					told++
				}
			}
			if want := map[bool]int{true: 1}[tt.rejected]; told != want {
				t.Errorf("reported %d times, want %d: %q", told, want, w.events)
			}
			if tt.rejected != (attempts < turns/5) {
				t.Errorf("tried %d times in %d turns", attempts, turns)
			}
			if got, err := client.CoreV1().Pods("ns").Get(t.Context(), "good", metav1.GetOptions{}); err != nil ||
				got.Annotations[wire.GrantAnnotation] == "" {
				t.Errorf("the other pod was not written: %v", err)
			}
			// The reason is gone.
			answer = nil
			clock.Step(rejectedPauseMax)
			if err := reconcileAll(t, c, w); err != nil {
				t.Error(err)
			}
			if got, err := client.CoreV1().Pods("ns").Get(t.Context(), "bad", metav1.GetOptions{}); err != nil ||
				got.Annotations[wire.GrantAnnotation] == "" {
				t.Errorf("the pod was not written afterwards: %v", err)
			}
		})
	}
}

func TestReconcileFollowsInitContainersThatKubeletDoesNotList(t *testing.T) {
	w := newWorld(t, "1")
	w.update(t.Context(), found(card(0, "a", 16), card(1, "b", 16)), nil)
	p := newPod("p")
	p.Spec.InitContainers = []corev1.Container{container("i", 4)}
	p.Spec.Containers = []corev1.Container{{Name: "c"}}
	w.see(w.grantTo(p, "b", 1))
	if _, err := w.admit(p); err != nil {
		t.Fatal(err)
	}
	facts, err := w.refresh(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(facts) != 1 || facts[0].devices[0].ID != "b" {
		t.Errorf("known of the pod: %+v, want device b", facts)
	}
}

func TestReconcileLeavesNamesThatKubeletListsTwice(t *testing.T) {
	w := newWorld(t, "1")
	w.update(t.Context(), found(card(0, "a", 16), card(1, "b", 16)), nil)
	old := w.grantTo(newPod("web-0", 4), "a", 1)
	w.see(old)
	if _, err := w.admit(old); err != nil {
		t.Fatal(err)
	}
	// Deleted by force and created again by its StatefulSet, while kubelet still
	// ends the old one.
	young := newPod("web-0", 4)
	young.UID = "uid-young"
	w.api, w.cached = nil, nil
	w.see(w.grantTo(young, "b", 2))
	if _, err := w.admit(young); err != nil {
		t.Fatal(err)
	}
	if facts, err := w.refresh(t.Context()); err != nil || len(facts) != 0 {
		t.Errorf("known while two have the name: %v, %v", facts, err)
	}
	w.remove(old)
	facts, err := w.refresh(t.Context())
	if err != nil || len(facts) != 1 || facts[0].pod.UID != young.UID || facts[0].devices[0].ID != "b" {
		t.Errorf("known afterwards: %v, %v", facts, err)
	}
}

func TestPublishWritesWhatDiffers(t *testing.T) {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: thisNode}}
	client := fake.NewClientset(node)
	ctx, cancel := context.WithCancel(t.Context())
	p := newPublisher(client, thisNode, newMetrics(prometheus.NewRegistry()), func() {})
	var watching sync.WaitGroup
	defer watching.Wait()
	defer cancel()
	watching.Go(func() { p.Run(ctx) })
	waitForWatch(t, client, p)
	inventory := []accel.Inventory{{Resource: gcuMemory, Unit: "1", Shares: []accel.Share{{Device: card(0, "a", 16), Units: 16}}}}
	shown := counts{devices: map[string]int{"enflame.com/gcu-count": 1}, named: map[string]bool{"enflame.com/gcu-count": true}}

	publishUntilCalm := func(want int) {
		t.Helper()
		client.ClearActions()
		for range 200 {
			before := patches(client)
			if err := p.publish(ctx, inventory, shown); err != nil {
				t.Fatal(err)
			}
			if patches(client) == before {
				break
			}
			waitForWatch(t, client, p)
		}
		if n := patches(client); n != want {
			t.Errorf("%d writes, want %d", n, want)
		}
	}
	publishUntilCalm(2)
	got, err := client.CoreV1().Nodes().Get(ctx, thisNode, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	back, err := wire.DecodeInventory(got.Annotations[wire.InventoryAnnotation])
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(inventory, back); diff != "" {
		t.Errorf("published (-want +got):\n%s", diff)
	}
	count := got.Status.Capacity["enflame.com/gcu-count"]
	if count.Value() != 1 {
		t.Errorf("gcu-count is %v", count)
	}

	// Kubelet sets what it does not know to zero when it registers anew.
	got.Status.Capacity["enflame.com/gcu-count"] = resource.MustParse("0")
	if _, err := client.CoreV1().Nodes().UpdateStatus(ctx, got, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	waitForWatch(t, client, p)
	publishUntilCalm(1)

	// What does not change is decoded once.
	first, _ := p.before(gcuMemory)
	if again, ok := p.before(gcuMemory); !ok || &again.Shares[0] != &first.Shares[0] {
		t.Error("an inventory that has not changed is decoded again")
	}
	inventory[0].Shares[0].Units = 8
	publishUntilCalm(1)
	if now, _ := p.before(gcuMemory); now.Shares[0].Units != 8 {
		t.Errorf("the inventory is that of before: %+v", now)
	}
}

// waitForWatch returns once the publisher sees the node as it is.
func waitForWatch(t *testing.T, client *fake.Clientset, p *publisher) {
	t.Helper()
	eventually(t, "the watch delivers the node", func() bool {
		want, err := client.CoreV1().Nodes().Get(t.Context(), thisNode, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		got, err := p.current()
		return err == nil && got.Annotations[wire.InventoryAnnotation] == want.Annotations[wire.InventoryAnnotation] &&
			got.Annotations[countsAnnotation] == want.Annotations[countsAnnotation] &&
			cmp.Equal(got.Status.Capacity, want.Status.Capacity)
	})
}

// A pod takes the name of one that kubelet listed a moment ago: what the old one
// held is not the new one's.
func TestReconcileLeavesPodsThatCameAfterTheList(t *testing.T) {
	w := newWorld(t, "1")
	w.update(t.Context(), found(card(0, "a", 16), card(1, "b", 16)), nil)
	old := w.grantTo(newPod("web-0", 4), "a", 1)
	w.see(old)
	if _, err := w.admit(old); err != nil {
		t.Fatal(err)
	}
	if err := w.records.refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.remove(old)
	young := newPod("web-0", 4)
	young.UID = "uid-young"
	w.see(w.grantTo(young, "b", 2))
	for _, f := range w.facts(t.Context()) {
		if f.pod.UID == young.UID {
			t.Errorf("the new pod is said to hold %s, which was the old one's", f.devices[0].ID)
		}
	}
}
