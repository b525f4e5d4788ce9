//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

func TestNodeStatus(t *testing.T) {
	ctx := begin(t, guide)
	node, err := lab.Client.CoreV1().Nodes().Get(ctx, layout.NodeName, metav1.GetOptions{})
	must(t, err)
	for name, list := range map[string]corev1.ResourceList{"capacity": node.Status.Capacity, "allocatable": node.Status.Allocatable} {
		for resource, want := range map[corev1.ResourceName]int64{product.Resource: 128, gcuCount: 8} {
			if got := list[resource]; got.Value() != want {
				t.Errorf("%s of %s is %d, want %d", name, resource, got.Value(), want)
			}
		}
	}
	books := agree(t)
	if len(books.Cards) != 8 {
		t.Fatalf("the node publishes the cards %+v, want 8", books.Cards)
	}
	for i, card := range books.Cards {
		if card.Index != i || card.Units != 16 || !strings.HasPrefix(card.UUID, "GCU-") {
			t.Errorf("card %d is published as %+v, want 16 units and a uuid of the library", i, card)
		}
	}
}

// TestGuide is the scenario of the guide's section 4.1.
func TestGuide(t *testing.T) {
	ctx := begin(t, guide)
	start(t, one("pod-1", 4), one("pod-2", 8), one("pod-3", 12))
	wantCards(t, map[string]int{"pod-1": 0, "pod-2": 0, "pod-3": 1})
	for pod, want := range map[string]string{"pod-1": "gcu0", "pod-2": "gcu0", "pod-3": "gcu1"} {
		text, err := lab.Pods.Exec(ctx, pod, "app", "ls", "/dev")
		must(t, err)
		var got []string
		for _, file := range strings.Fields(text) {
			if strings.HasPrefix(file, "gcu") {
				got = append(got, file)
			}
		}
		if len(got) != 1 || got[0] != want {
			t.Errorf("ls /dev in %s shows the cards %v, want %s alone", pod, got, want)
		}
	}
	pending(t, create(t, one("pod-4", 20))[0], noRoom)
	must(t, lab.Pods.Delete(ctx, "pod-2"))
	wantCards(t, map[string]int{"pod-1": 0, "pod-3": 1})
}

// TestOnlyEvictionHelps tells requests that could fit from those that never
// can: kube-scheduler evicts pods for the first kind only.
func TestOnlyEvictionHelps(t *testing.T) {
	ctx := begin(t, guide)
	start(t, one("holder", 1))
	for _, test := range []struct {
		units                int64
		failed, unresolvable bool
	}{
		{units: 15}, {units: 16}, {units: 17, unresolvable: true}, {units: 1 << 50, unresolvable: true},
	} {
		result := filter(t, ctx, test.units, layout.NodeName)
		if got := len(result.FailedAndUnresolvableNodes) > 0; got != test.unresolvable {
			t.Errorf("%d units: unresolvable is %t, want %t: %+v", test.units, got, test.unresolvable, result)
		}
	}
	var fillers []*corev1.Pod
	for i := range 8 { // one of them joins the holder
		fillers = append(fillers, one(fmt.Sprint("filler-", i), 9))
	}
	createAtOnce(t, fillers)
	running(t, namesOf(fillers)...)
	agree(t)
	result := filter(t, ctx, 16, layout.NodeName)
	if reason := result.FailedNodes[layout.NodeName]; reason != "insufficient GCU Memory in one gcu device" ||
		len(result.FailedAndUnresolvableNodes) > 0 {
		t.Errorf("16 units with no card empty: %+v, want the node in FailedNodes with the documented reason", result)
	}
}

// filterResult is the extender's answer to a filter call.
type filterResult struct {
	NodeNames                               []string
	FailedNodes, FailedAndUnresolvableNodes map[string]string
	Error                                   string
}

// filter asks the extender as kube-scheduler does.
func filter(t *testing.T, ctx context.Context, units int64, nodes ...string) filterResult {
	t.Helper()
	body, err := json.Marshal(map[string]any{"Pod": one("asked", units), "Nodes": nil, "NodeNames": nodes})
	must(t, err)
	status, answer, err := post(ctx, "filter", "application/json", strings.NewReader(string(body)))
	must(t, err)
	var result filterResult
	if err := json.Unmarshal([]byte(answer), &result); err != nil || status != 200 {
		t.Fatalf("filter answered %d %q: %v", status, answer, err)
	}
	return result
}

func TestContainersOfAPodShareACard(t *testing.T) {
	begin(t, guide)
	two := lab.Pods.New("two", testenv.Container("a", 4), testenv.Container("b", 3))
	helped := lab.Pods.New("helped", testenv.Container("helper", 0), testenv.Container("app", 5))
	// The init container alone asks for more than what follows it.
	inits := lab.Pods.New("inits", testenv.Container("app", 2))
	inits.Spec.InitContainers = []corev1.Container{testenv.Container("first", 7, "true"), testenv.Container("second", 10, "true")}
	sidecar := lab.Pods.New("sidecar", testenv.Container("app", 6))
	sidecar.Spec.InitContainers = []corev1.Container{testenv.Sidecar("side", 3)}
	// 1 + 6 while init runs, then 1 + 4 + 3.
	all := lab.Pods.New("all", testenv.Container("a", 4), testenv.Container("b", 3))
	all.Spec.InitContainers = []corev1.Container{testenv.Sidecar("side", 1), testenv.Container("init", 6, "true")}
	// The init container comes before the sidecar: 9, then 2 + 5.
	before := lab.Pods.New("before", testenv.Container("app", 5))
	before.Spec.InitContainers = []corev1.Container{testenv.Container("init", 9, "true"), testenv.Sidecar("side", 2)}

	pods := []*corev1.Pod{two, helped, inits, sidecar, all, before}
	createAtOnce(t, pods)
	running(t, namesOf(pods)...)
	books := agree(t)
	want := map[string]int64{"two": 7, "helped": 5, "inits": 10, "sidecar": 9, "all": 8, "before": 9}
	got := map[string]int64{}
	for _, device := range books.Inspect.Devices {
		for _, occupant := range device.Pods {
			got[occupant.Name] = occupant.Used
		}
	}
	if !maps.Equal(got, want) {
		t.Errorf("inspect counts the pods with %v, want %v", got, want)
	}
}

// TestPodsAtOnce makes equal pods at one time, that fill five cards exactly.
func TestPodsAtOnce(t *testing.T) {
	begin(t, guide)
	var pods []*corev1.Pod
	for i := range 20 {
		pods = append(pods, one(fmt.Sprint("equal-", i), 4))
	}
	createAtOnce(t, pods)
	running(t, namesOf(pods)...)
	perCard := map[int]int{}
	for _, card := range cards(agree(t)) {
		perCard[card]++
	}
	if want := map[int]int{0: 4, 1: 4, 2: 4, 3: 4, 4: 4}; !maps.Equal(perCard, want) {
		t.Errorf("pods per card are %v, want the first five cards full: %v", perCard, want)
	}
}

// TestPodsFasterThanTheWatch makes pods that are bound from the start: kubelet
// hears of them at the same moment as the daemon. Three of 5 units fit a card,
// so 24 fit only if none is put where it does not belong.
func TestPodsFasterThanTheWatch(t *testing.T) {
	begin(t, guide)
	var pods []*corev1.Pod
	for i := range 24 {
		pod := one(fmt.Sprint("bound-", i), 5)
		pod.Spec.NodeName = layout.NodeName
		pods = append(pods, pod)
	}
	createAtOnce(t, pods)
	running(t, namesOf(pods)...)
	perCard := map[int]int{}
	for _, card := range cards(agree(t)) {
		perCard[card]++
	}
	for card := range 8 {
		if perCard[card] != 3 {
			t.Errorf("pods per card are %v, want three on each", perCard)
			break
		}
	}
}

func TestNodeNameByHand(t *testing.T) {
	ctx := begin(t, guide)
	scheduled := one("scheduled", 4)
	start(t, scheduled)
	byHand := one("by-hand", 8)
	byHand.Spec.NodeName = layout.NodeName
	start(t, byHand)
	wantCards(t, map[string]int{"scheduled": 0, "by-hand": 0})

	// What no card has is refused by the node itself, with its reason.
	tooLarge := one("too-large", 17)
	tooLarge.Spec.NodeName = layout.NodeName
	create(t, tooLarge)
	must(t, lab.Pods.WaitPhase(ctx, podTimeout, corev1.PodFailed, "too-large"))
	pod, err := lab.Pods.API.Get(ctx, "too-large", metav1.GetOptions{})
	must(t, err)
	if pod.Status.Reason != "UnexpectedAdmissionError" ||
		!strings.Contains(pod.Status.Message, "needs 17 units of one device, at most 16 are free") {
		t.Errorf("%s; want UnexpectedAdmissionError and what the node has", testenv.Describe(pod))
	}
	wantCards(t, map[string]int{"scheduled": 0, "by-hand": 0})

	// The scheduler counts with the pod that it did not place.
	start(t, one("next", 4))
	wantCards(t, map[string]int{"scheduled": 0, "by-hand": 0, "next": 0})
}

// TestInspectCommand is kubectl-divvy with the extender at work.
func TestInspectCommand(t *testing.T) {
	ctx := begin(t, guide)
	start(t, one("shown", 12))
	agree(t)
	for _, args := range [][]string{nil, {layout.NodeName}, {"--output", "wide"}} {
		text, err := lab.CLI.Kubectl(ctx, append([]string{"divvy", "inspect"}, args...)...)
		must(t, err)
		for _, want := range []string{layout.NodeName, "shown", "12", "128"} {
			if !strings.Contains(text, want) {
				t.Errorf("kubectl divvy inspect %v does not show %q:\n%s", args, want, text)
			}
		}
	}
	text, err := lab.CLI.Kubectl(ctx, "divvy", "inspect", "--output", "json")
	must(t, err)
	wantInspectJSON(t, text, "shown", 12)
	if text, err := lab.CLI.Kubectl(ctx, "divvy", "inspect", "no-such-node"); err == nil || !strings.Contains(err.Error(), "no-such-node") {
		t.Errorf("an unknown node: %v, %q; want an error that names it", err, text)
	}
}

// wantInspectJSON checks the fields of the guide.
func wantInspectJSON(t *testing.T, text, pod string, units int64) {
	t.Helper()
	var report struct {
		Nodes []struct {
			Name                            string
			TotalGCU, UsedGCU, AvailableGCU *int64
			Devices                         []struct {
				ID                              *int
				TotalGCU, UsedGCU, AvailableGCU *int64
				Pods                            []struct {
					Name, Namespace, UID, CreateTime string
					UsedGCU                          *int64
				}
			}
		}
	}
	err := json.Unmarshal([]byte(text), &report)
	if err == nil && (len(report.Nodes) != 1 || len(report.Nodes[0].Devices) != 8 || len(report.Nodes[0].Devices[0].Pods) != 1) {
		err = errors.New("want one node with 8 devices, and one pod on the first")
	}
	if err != nil {
		t.Fatalf("inspect's JSON: %v:\n%s", err, text)
	}
	node := report.Nodes[0]
	got := node.Devices[0].Pods[0]
	if node.TotalGCU == nil || *node.TotalGCU != 128 || node.UsedGCU == nil || *node.UsedGCU != units ||
		node.AvailableGCU == nil || *node.AvailableGCU != 128-units || node.Devices[0].ID == nil ||
		got.Name != pod || got.Namespace != namespace || got.UID == "" || got.CreateTime == "" || got.UsedGCU == nil ||
		*got.UsedGCU != units {
		t.Errorf("inspect's JSON does not show %d of 128 units, held by %s on card 0:\n%s", units, pod, text)
	}
}
