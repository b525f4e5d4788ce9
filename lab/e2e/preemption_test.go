//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// Priorities of the tests' pods. A pod of none has 0.
const (
	highPriority = "divvy-e2e-high"
	midPriority  = "divvy-e2e-mid"
)

// priorities makes the classes for one test.
func priorities(t *testing.T) {
	t.Helper()
	classes := lab.Client.SchedulingV1().PriorityClasses()
	for name, value := range map[string]int32{highPriority: 1000, midPriority: 500} {
		class := &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Value: value, Description: "for tests"}
		if _, err := classes.Create(t.Context(), class, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := classes.Delete(context.WithoutCancel(t.Context()), name, metav1.DeleteOptions{}); err != nil {
				t.Error(err)
			}
		})
	}
}

func of(class string, pod *corev1.Pod) *corev1.Pod {
	pod.Spec.PriorityClassName = class
	return pod
}

// others are pods of high priority, which nobody may evict.
func others(t *testing.T, name string, n int, units int64) []string {
	t.Helper()
	var pods []*corev1.Pod
	for i := range n {
		pods = append(pods, of(highPriority, one(fmt.Sprintf("rest-%s-%d", name, i), units)))
	}
	createAtOnce(t, pods)
	running(t, namesOf(pods)...)
	return namesOf(pods)
}

// left are the pods of the tests that nobody has begun to delete, without those of
// others.
func left(ctx context.Context, t *testing.T) []string {
	t.Helper()
	list, err := lab.Client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	must(t, err)
	var names []string
	for _, pod := range list.Items {
		if pod.DeletionTimestamp == nil && !strings.HasPrefix(pod.Name, "rest-") {
			names = append(names, pod.Name)
		}
	}
	slices.Sort(names)
	return names
}

func wantLeft(ctx context.Context, t *testing.T, want ...string) {
	t.Helper()
	slices.Sort(want)
	if got := left(ctx, t); !slices.Equal(got, want) {
		t.Errorf("left are %v, want %v", got, want)
	}
}

// TestPreemptionEvictsThePodThatFreesACard: one card holds a pod of 8 and one of 4
// that nobody may evict, the other four of 4. For 12 more, the sum over the cards
// asks for two of the small ones, which frees no card; Divvy has the one pod of 8
// evicted, which does.
func TestPreemptionEvictsThePodThatFreesACard(t *testing.T) {
	ctx := begin(t, guide)
	priorities(t)
	others(t, "whole", 6, 16)
	// The large one is of higher priority than the small ones, so kube-scheduler
	// by itself would spare it.
	start(t, of(midPriority, one("large", 8)), of(highPriority, one("beside", 4)), one("block", 4))
	start(t, one("small-1", 4), one("small-2", 4), one("small-3", 4), one("small-4", 4))
	must(t, lab.Pods.Delete(ctx, "block"))
	on := cards(agree(t))
	if on["small-1"] == on["large"] || on["small-1"] != on["small-4"] || on["beside"] != on["large"] {
		t.Fatalf("the pods are on the cards %v", on)
	}

	create(t, of(highPriority, one("urgent", 12)))
	running(t, "urgent")
	wantLeft(ctx, t, "beside", "small-1", "small-2", "small-3", "small-4", "urgent")
	if got := cards(agree(t))["urgent"]; got != on["large"] {
		t.Errorf("the pod runs on card %d, want %d, which was freed for it", got, on["large"])
	}
}

// TestPreemptionEvictsNobodyInVain: enough could be evicted in sum, but of no card.
func TestPreemptionEvictsNobodyInVain(t *testing.T) {
	ctx := begin(t, guide)
	priorities(t)
	others(t, "whole", 6, 16)
	// Each card has 6 that nobody may evict and 8 that may: 10 can be free on
	// either, 20 in sum.
	start(t, of(highPriority, one("kept-1", 6)), one("low-1", 8), of(highPriority, one("block", 2)))
	start(t, of(highPriority, one("kept-2", 6)), one("low-2", 8))
	must(t, lab.Pods.Delete(ctx, "block"))
	on := cards(agree(t))
	if on["low-1"] == on["low-2"] || on["kept-1"] != on["low-1"] || on["kept-2"] != on["low-2"] {
		t.Fatalf("the pods are on the cards %v", on)
	}
	before := lives(t)
	urgent := create(t, of(highPriority, one("urgent", 12)))[0]
	// This is what kube-scheduler says when the extender left it no node.
	pending(t, urgent, "no candidate node for preemption")
	wantLeft(ctx, t, "kept-1", "low-1", "kept-2", "low-2", "urgent")
	now, err := lab.Pods.API.Get(ctx, "urgent", metav1.GetOptions{})
	must(t, err)
	if now.Status.NominatedNodeName != "" {
		t.Errorf("it is nominated to %s", now.Status.NominatedNodeName)
	}
	undisturbed(t, before)

	// Once a card can be freed, one is.
	must(t, lab.Pods.Delete(ctx, "kept-2"))
	running(t, "urgent")
	wantLeft(ctx, t, "kept-1", "low-1", "urgent")
}

// TestFreedMemoryIsKept: while the victim takes its time to end, nobody of lower
// priority gets the rest of its card, which is to be free for another.
func TestFreedMemoryIsKept(t *testing.T) {
	ctx := begin(t, guide)
	priorities(t)
	others(t, "whole", 4, 16)
	others(t, "part", 3, 12)
	pieces := others(t, "piece", 3, 4)
	slow := one("slow", 8, "sh", "-c", "trap 'until [ -e /end ]; do sleep 0.2; done; exit 0' TERM; while :; do sleep 0.2; done")
	slow.Spec.TerminationGracePeriodSeconds = ptr.To(int64(podTimeout.Seconds()))
	start(t, slow)
	card := cards(agree(t))["slow"]
	create(t, of(highPriority, one("urgent", 12)))
	must(t, poll.Until(ctx, podTimeout, "the pod to be evicted", func(ctx context.Context) error {
		pod, err := lab.Pods.API.Get(ctx, "slow", metav1.GetOptions{})
		if err == nil && pod.DeletionTimestamp == nil {
			err = errors.New(testenv.Describe(pod))
		}
		return err
	}))
	// Now 8 units are free on that card and 4 on each of three: 20, of which
	// kube-scheduler keeps 12. Only the extender knows on which card.
	must(t, lab.Pods.Delete(ctx, pieces...))
	eager := create(t, one("eager", 6))[0]
	pending(t, eager, noRoom)
	if pod, err := lab.Pods.API.Get(ctx, "slow", metav1.GetOptions{}); err != nil {
		t.Fatalf("the victim ended before the other pod was refused: %v", err)
	} else if pod.Spec.NodeName == "" {
		t.Fatal(testenv.Describe(pod))
	}
	_, err := lab.Pods.Exec(ctx, "slow", "app", "touch", "/end")
	must(t, err)
	running(t, "urgent")
	if got := cards(agree(t))["urgent"]; got != card {
		t.Errorf("the pod runs on card %d, want %d, which was freed for it", got, card)
	}
	wantLeft(ctx, t, "eager", "urgent")
}
