//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/core/history"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/product"
)

// waitsBecause returns the pod's condition that says why it waits, nil for none.
func waitsBecause(ctx context.Context, pod *corev1.Pod) (*corev1.PodCondition, error) {
	now, err := lab.Pods.API.Get(ctx, pod.Name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	for i := range now.Status.Conditions {
		if c := &now.Status.Conditions[i]; c.Type == cluster.Waits {
			return c, nil
		}
	}
	return nil, nil //nolint:nilnil // documented
}

// toldOf counts the extender's events on a pod, by reason.
func toldOf(ctx context.Context, pod *corev1.Pod) (map[string]int, error) {
	list, err := lab.Client.CoreV1().Events(pod.Namespace).List(ctx, metav1.ListOptions{
		FieldSelector: "involvedObject.uid=" + string(pod.UID) + ",source=divvy-extender"})
	if err != nil {
		return nil, err
	}
	out := map[string]int{}
	for i := range list.Items {
		out[list.Items[i].Reason] += int(max(list.Items[i].Count, 1))
	}
	return out, nil
}

// waiting is a pod that is to wait and what is said of it.
type waiting struct {
	pod                    *corev1.Pod
	reason, event, message string
}

// saidOnce waits until a condition of each pod says why it waits, and checks that one event
// of each says it, however often the pod is tried.
func saidOnce(t *testing.T, ctx context.Context, all ...waiting) {
	t.Helper()
	for _, w := range all {
		must(t, poll.Until(ctx, time.Minute, "the condition of pod "+w.pod.Name, func(ctx context.Context) error {
			c, err := waitsBecause(ctx, w.pod)
			if err == nil && (c == nil || c.Reason != w.reason || !strings.Contains(c.Message, w.message)) {
				err = fmt.Errorf("it is %+v, want %s: %s", c, w.reason, w.message)
			}
			return err
		}))
	}
	for i := range 3 { // each makes kube-scheduler try again
		for _, w := range all {
			_, err := lab.CLI.Kubectl(ctx, "annotate", "pod", "-n", w.pod.Namespace, w.pod.Name, "--overwrite",
				fmt.Sprintf("test/retry=%d", i))
			must(t, err)
		}
		time.Sleep(3 * time.Second)
	}
	for _, w := range all {
		told, err := toldOf(ctx, w.pod)
		must(t, err)
		if len(told) != 1 || told[w.event] != 1 {
			t.Errorf("pod %s: events %v, want %s once", w.pod.Name, told, w.event)
		}
	}
}

// placed waits until a pod that waited runs, and its condition is gone.
func placed(t *testing.T, ctx context.Context, pod *corev1.Pod) {
	t.Helper()
	running(t, pod.Name)
	must(t, poll.Until(ctx, 30*time.Second, "the condition to go", func(ctx context.Context) error {
		c, err := waitsBecause(ctx, pod)
		if err == nil && c != nil {
			err = errors.New("it is still there")
		}
		return err
	}))
}

// TestReasonsReachThePod: where kube-scheduler's sums hide why a pod waits, a condition of the
// pod and one event say it, however often the pod is tried, and the condition goes when the
// pod is placed. TestHeldAsOther is the same on cards of several vendors.
func TestReasonsReachThePod(t *testing.T) {
	ctx := begin(t, guide)
	var parts []*corev1.Pod
	for i := range 8 {
		parts = append(parts, one(fmt.Sprint("part-", i), 9))
	}
	createAtOnce(t, parts)
	running(t, namesOf(parts)...)
	hardware := one("tier-that-no-node-states", 4)
	hardware.Annotations = map[string]string{"divvy.dev/isolation": "hardware"}
	pods := create(t, one("larger-than-any-device", 20), one("more-than-the-node-has", 200), hardware, one("scattered", 16))
	scattered := pods[3]
	saidOnce(t, ctx,
		waiting{pods[0], "LargerThanDevice", "NeverFits", "20 units of enflame.com/gcu-memory are more than any device has"},
		// Of this one kube-scheduler asks no extender.
		waiting{pods[1], "LargerThanDevice", "NeverFits", "200 units of enflame.com/gcu-memory are more than any device has"},
		waiting{pods[2], "IsolationNotStated", "IsolationNotStated", "isolation hardware required"},
		waiting{scattered, "NoDeviceFits", "NoDeviceFits", "no device has 16 units of enflame.com/gcu-memory free"})
	must(t, lab.Pods.API.Delete(ctx, "part-3", metav1.DeleteOptions{}))
	placed(t, ctx, scattered)
}

// TestExplain: a pod that was placed is explained with what the policy gave, one without
// a decision is not, and the decisions are exported and replayed by another policy.
func TestExplain(t *testing.T) {
	ctx := begin(t, guide)
	start(t, one("first", 9), one("second", 4))
	text, err := lab.CLI.Kubectl(ctx, "divvy", "explain", "-n", namespace, "second", "-o", "json")
	must(t, err)
	var e history.Explanation
	must(t, json.Unmarshal([]byte(text), &e))
	if e.Policy != "binpack" || e.Fits != 1 || e.Bound == nil || len(e.Ratings) != 1 || len(e.Ratings[0].Devices) != 8 {
		t.Fatalf("explained: %s", text)
	}
	// Binpack: the card of the first pod leaves 3 units, an empty one 12.
	r := &e.Ratings[0]
	if r.Rating != -3 || history.Sum(r.Terms) != -3 {
		t.Errorf("rated %d by %+v", r.Rating, r.Terms)
	}
	for i, d := range r.Devices {
		if full := d.Free == 7; full != d.Chosen || full != (e.Bound.Devices[0].Index == d.Index) || !full && history.Sum(d.Terms) != -12 {
			t.Errorf("device %d: %+v; bound to %+v", i, d, e.Bound.Devices)
		}
	}
	text, err = lab.CLI.Kubectl(ctx, "divvy", "explain", "-n", namespace, "second")
	must(t, err)
	t.Log(text)
	if !strings.Contains(text, "POLICY    binpack") || !strings.Contains(text, "chosen") {
		t.Errorf("shown: %s", text)
	}
	if text, err := lab.CLI.Kubectl(ctx, "divvy", "explain", "-n", namespace, "absent"); err == nil ||
		!strings.Contains(err.Error()+text, "no decision about pod") {
		t.Errorf("of a pod that is not: %v %s", err, text)
	}

	file := filepath.Join(t.TempDir(), "decisions.json")
	_, err = lab.CLI.Kubectl(ctx, "divvy", "explain", "--export", file)
	must(t, err)
	text, err = lab.CLI.Kubectl(ctx, "divvy", "simulate", "--replay", file, "--policy", "binpack,spread",
		"--resource", string(product.Resource))
	must(t, err)
	t.Log(text)
	if !strings.Contains(text, "spread") {
		t.Errorf("replayed: %s", text)
	}
}
