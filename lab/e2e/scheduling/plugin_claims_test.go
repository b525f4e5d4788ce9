//go:build e2e

package scheduling

import (
	"context"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/platform/metrics"
	"github.com/divvy-gpu/divvy/lab/internal/controlplane"
	"github.com/divvy-gpu/divvy/lab/internal/simnodes"
)

const template = "small"

// newClaimWorld starts a control plane whose nodes offer devices to claims, with a template of 2 GiB.
func newClaimWorld(t *testing.T, nodes simnodes.Group) *world {
	t.Helper()
	nodes.Claims = true
	w := newWorld(t, nodes)
	if err := w.nodes.Create(t.Context(), w.client); err != nil {
		t.Fatal(err)
	}
	controller, err := w.plane.StartClaimController()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.end(controller) })
	if _, err := w.client.ResourceV1().ResourceClaimTemplates(namespace).Create(t.Context(), simnodes.Template(namespace, template, "2Gi"),
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	return w
}

// claiming makes pods with claims of the template.
func (w *world) claiming(prefix string, count int) {
	w.Helper()
	w.createAtOnce(plugged, count, func(i int) *corev1.Pod {
		return w.nodes.ClaimPod(namespace, fmt.Sprintf("%s-%04d", prefix, i), template)
	})
}

// claimed waits until so many pods are bound, checks what claims hold, and returns it with the
// nodes of the pods.
func (w *world) claimed(pods int) (held simnodes.Claimed, nodes map[string]int) {
	w.Helper()
	w.eventually(fmt.Sprintf("%d pods are bound", pods), func(context.Context) error {
		nodes = map[string]int{}
		bound := 0
		var waiting corev1.Pod
		for _, pod := range w.pods() {
			if pod.Spec.NodeName == "" {
				waiting = pod
				continue
			}
			bound++
			nodes[pod.Spec.NodeName]++
		}
		if bound != pods {
			return fmt.Errorf("%d are; %s: %v", bound, waiting.Name, waiting.Status.Conditions)
		}
		return nil
	})
	claims, err := w.client.ResourceV1().ResourceClaims(namespace).List(w.Context(), metav1.ListOptions{})
	if err != nil {
		w.Fatal(err)
	}
	if held, err = w.nodes.Claimed(claims.Items); err != nil {
		w.Error(err)
	}
	return held, nodes
}

// narrowedInVain is how many attempts with one node failed.
func (w *world) narrowedInVain(p *controlplane.Plugin) int {
	w.Helper()
	n, err := counter(w.Context(), p.DivvyMetrics, metrics.ExtenderNarrowedFailed.Name)
	if err != nil {
		w.Fatal(err)
	}
	return n
}

// Pods with claims are packed on the fewest devices and nodes, also by a scheduler that has just
// started, and where pods were deleted by force.
func TestPluginPacksClaims(t *testing.T) {
	const cards, units, each = 4, 8, 2
	const perDevice, pods = units / each, 50
	w := newClaimWorld(t, simnodes.Group{Count: 50, Cards: cards, Units: units})
	fewest := func(pods, has int) int { return (pods + has - 1) / has }
	packed := func(pods int) simnodes.Claimed {
		t.Helper()
		held, nodes := w.claimed(pods)
		if len(held) != fewest(pods, perDevice) || len(nodes) != fewest(pods, perDevice*cards) {
			t.Errorf("%d pods are on %d devices of %d nodes; %d and %d have the memory", pods, len(held), len(nodes),
				fewest(pods, perDevice), fewest(pods, perDevice*cards))
		}
		return held
	}
	first := w.plugin("first", "")
	w.claiming("pod", pods)
	held := packed(pods)
	if n := w.narrowedInVain(first); n != 0 {
		t.Errorf("%d attempts with one node failed", n)
	}
	if err := first.Kill(); err != nil {
		t.Fatal(err)
	}

	w.plugin("second", "")
	w.claiming("more", perDevice)
	if after := packed(pods + perDevice); len(after)-len(held) != 1 {
		t.Errorf("%d devices were in use, and %d pods that fill one made it %d", len(held), perDevice, len(after))
	}
	// The pods of a whole node end; where others still are comes first afterwards.
	of, ended := w.pod("pod-0000").Spec.NodeName, 0
	for _, pod := range w.pods() {
		if pod.Spec.NodeName == of {
			w.gone(pod.Name)
			ended++
		}
	}
	left := pods + perDevice - ended
	w.eventually("their claims are free", func(ctx context.Context) error {
		claims, err := w.client.ResourceV1().ResourceClaims(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		allocated := 0
		for i := range claims.Items {
			if claims.Items[i].Status.Allocation != nil {
				allocated++
			}
		}
		if allocated != left {
			return fmt.Errorf("%d are allocated, %d are in use", allocated, left)
		}
		return nil
	})
	w.claiming("again", ended)
	packed(pods + perDevice)
}

// Where something that only filters know is in the way on the node that was named, the pod is tried
// on all nodes at once.
func TestPluginClaimsElsewhere(t *testing.T) {
	w := newClaimWorld(t, simnodes.Group{Count: 3, Cards: 1, Units: 8})
	p := w.plugin("plugin", "")
	guard := on(w.nodes.ClaimPod(namespace, "guard", template), w.nodes.NodeName(1))
	guard.Spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{
		RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{TopologyKey: corev1.LabelHostname,
			LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "shy"}}}}}}
	w.create(plug(guard)...)
	w.isBound("guard")
	shy := w.nodes.ClaimPod(namespace, "shy", template)
	shy.Labels = map[string]string{"app": "shy"}
	w.create(plug(shy)...)
	w.isBound("shy")
	if node := w.pod("shy").Spec.NodeName; node == w.nodes.NodeName(1) {
		t.Errorf("the pod is on %s, whose pod keeps it away", node)
	}
	if n := w.narrowedInVain(p); n != 1 {
		t.Errorf("%d attempts with one node failed, one was expected", n)
	}
	w.claimed(2)
}

// Claims that are not counted are placed as well: alternatives, and two pods with one claim.
func TestPluginClaimsThatAreNotCounted(t *testing.T) {
	w := newClaimWorld(t, simnodes.Group{Count: 3, Cards: 2, Units: 8})
	p := w.plugin("plugin", "")
	claim := &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "shared"}}
	claim.Spec.Devices.Requests = []resourcev1.DeviceRequest{{Name: "any", FirstAvailable: []resourcev1.DeviceSubRequest{
		{Name: "three", DeviceClassName: simnodes.ClaimClass, Count: 3}, {Name: "two", DeviceClassName: simnodes.ClaimClass, Count: 2}}}}
	if _, err := w.client.ResourceV1().ResourceClaims(namespace).Create(t.Context(), claim, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"a", "b"} {
		pod := w.nodes.ClaimPod(namespace, name, "")
		pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "device", ResourceClaimName: ptr.To("shared")}}
		w.create(plug(pod)...)
		w.isBound(name)
	}
	held, nodes := w.claimed(2)
	if len(held) != 2 || len(nodes) != 1 {
		t.Errorf("two pods with one claim are on %v and hold %v, want two devices of one node", nodes, held)
	}
	if n := w.narrowedInVain(p); n != 0 {
		t.Errorf("%d attempts with one node failed", n)
	}
}
