//go:build e2e

package scheduling

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/lab/internal/controlplane"
	"github.com/divvy-gpu/divvy/lab/internal/simnodes"
)

// A thousand pods wait for a card with 6 free units, and each card has 3: nodes have
// the room in sum, so kube-scheduler asks the extender about each pod. Refusing them
// costs the API server nothing but what is said of each pod once. What fits is placed
// meanwhile, and when a card becomes free, one of them gets it.
func TestThousandPending(t *testing.T) {
	const nodes, cards, waiting = 5, 2, 1000
	w := newWorld(t, simnodes.Group{Count: nodes, Cards: cards, Units: 8})
	if err := w.nodes.Create(t.Context(), w.client); err != nil {
		t.Fatal(err)
	}
	e := w.extender()
	w.scheduler("default-scheduler", e)
	w.make("default-scheduler", "holds", nodes*cards, 5)
	w.bound(nodes * cards)
	before := w.requests(e)
	w.make("default-scheduler", "waits", waiting, 6)
	w.eventually("all that wait were refused by the extender", func(context.Context) error {
		refused := 0
		for _, pod := range w.pods() {
			for _, c := range pod.Status.Conditions {
				if c.Type == corev1.PodScheduled && c.Reason == corev1.PodReasonUnschedulable &&
					strings.Contains(c.Message, "insufficient GCU Memory in one gcu device") {
					refused++
				}
			}
		}
		if refused != waiting {
			return fmt.Errorf("%d were", refused)
		}
		return nil
	})
	w.make("default-scheduler", "small", 1, 3)
	w.bound(nodes*cards + 1)
	// One bind, and beside it what a program asks for that has nothing to do: the
	// certificates that it looks at. A reason is an event and a condition.
	asked := w.requests(e) - before
	said, err := counter(t.Context(), e.Metrics, `divvy_extender_pod_reasons_total{result="said"}`)
	if err != nil {
		t.Fatal(err)
	}
	if said > waiting || asked-2*said > 50 {
		t.Errorf("the extender asked the API server %d times on account of %d pods that wait, and said a reason %d times",
			asked, waiting, said)
	}
	events, err := w.client.CoreV1().Events(namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	told := map[string]bool{}
	for _, event := range events.Items {
		by := event.ReportingController + event.Source.Component
		if strings.Contains(by, "scheduler") && !strings.Contains(by, "divvy") {
			continue
		}
		if name := event.InvolvedObject.Name; event.Reason != "NoDeviceFits" || event.Count > 1 || event.Series != nil || told[name] {
			t.Errorf("%s made the event %s on %s: %s", by, event.Reason, name, event.Message)
			break
		}
		told[event.InvolvedObject.Name] = true
	}
	// The small pod is on a card with another; each other pod that holds units has its
	// card alone.
	small, err := w.client.CoreV1().Pods(namespace).Get(t.Context(), "small-0000", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, pod := range w.pods() {
		if strings.HasPrefix(pod.Name, "holds") && pod.Spec.NodeName != small.Spec.NodeName {
			if err := w.client.CoreV1().Pods(namespace).Delete(t.Context(), pod.Name,
				metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}); err != nil {
				t.Fatal(err)
			}
			break
		}
	}
	w.bound(nodes*cards + 1) // one went, one came
	got := 0
	for _, pod := range w.pods() {
		if strings.HasPrefix(pod.Name, "waits") && pod.Spec.NodeName != "" {
			got++
		}
	}
	if got != 1 {
		t.Errorf("%d of those that waited have the room of one", got)
	}
	t.Logf("the extender asked the API server %d times in all", w.requests(e)-before)
}

// requests is how often the extender has asked the API server.
func (w *world) requests(e *controlplane.Extender) int {
	w.Helper()
	text, err := e.Metrics(w.Context())
	if err != nil {
		w.Fatal(err)
	}
	sum := 0.0
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "divvy_api_requests_total{") {
			continue
		}
		_, value, _ := strings.Cut(strings.TrimSpace(line), "} ")
		n, err := strconv.ParseFloat(value, 64)
		if err != nil {
			w.Fatalf("metric %q: %v", line, err)
		}
		sum += n
	}
	return int(sum)
}
