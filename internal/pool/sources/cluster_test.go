package sources

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
)

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

// node returns a node that is ready, with these allocatable quantities.
func node(name string, allocatable map[corev1.ResourceName]string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	n.Status.Conditions = []corev1.NodeCondition{
		{Type: corev1.NodeMemoryPressure, Status: corev1.ConditionFalse}, {Type: corev1.NodeReady, Status: corev1.ConditionTrue},
	}
	n.Status.Allocatable = corev1.ResourceList{}
	for resourceName, text := range allocatable {
		n.Status.Allocatable[resourceName] = resource.MustParse(text)
	}
	return n
}

func quota(namespace, name string, hard map[corev1.ResourceName]string) *corev1.ResourceQuota {
	q := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	q.Spec.Hard = corev1.ResourceList{}
	for resourceName, text := range hard {
		q.Spec.Hard[resourceName] = resource.MustParse(text)
	}
	return q
}

// Defect V2: the original listed all nodes for each pod, and counted resources of
// nodes that take no pods.
func TestLargestAllocatableIsOfNodesThatTakePods(t *testing.T) {
	small := node("small", map[corev1.ResourceName]string{"cpu": "1500m", "bitfusion.io/gpu": "100", "gone.example/x": "0"})
	notReady := node("not-ready", map[corev1.ResourceName]string{"bitfusion.io/gpu": "1000", "a.example/x": "1"})
	notReady.Status.Conditions[1].Status = corev1.ConditionUnknown
	cordoned := node("cordoned", map[corev1.ResourceName]string{"bitfusion.io/gpu": "1000"})
	cordoned.Spec.Unschedulable = true
	bare := node("bare", map[corev1.ResourceName]string{"memory": "1Ki"})
	bare.Status.Conditions = nil

	c := NewCluster(nil)
	for _, n := range []*corev1.Node{notReady, cordoned, bare} {
		if err := c.nodes.Add(n); err != nil {
			t.Fatal(err)
		}
	}
	if got := c.LargestAllocatable(); got != nil {
		t.Errorf("no node takes pods: %v, want nil, which says that nothing is known", got)
	}
	check := func(what string, want amounts) {
		t.Helper()
		if diff := cmp.Diff(want, c.LargestAllocatable()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}
	apply := func(change func(any) error, n *corev1.Node) {
		t.Helper()
		if err := change(n); err != nil {
			t.Fatal(err)
		}
	}
	apply(c.nodes.Add, small)
	check("the one that takes pods; zero is none", amounts{"cpu": 1500, "bitfusion.io/gpu": 100})
	notReady.Status.Conditions[1].Status = corev1.ConditionTrue
	apply(c.nodes.Update, notReady)
	check("one became ready; the largest of each", amounts{"cpu": 1500, "bitfusion.io/gpu": 1000, "a.example/x": 1})
	small = small.DeepCopy()
	small.Status.Allocatable["bitfusion.io/gpu"] = resource.MustParse("2k")
	apply(c.nodes.Update, small)
	check("one has more", amounts{"cpu": 1500, "bitfusion.io/gpu": 2000, "a.example/x": 1})
	apply(c.nodes.Delete, notReady)
	check("one is gone", amounts{"cpu": 1500, "bitfusion.io/gpu": 2000})

	before := c.nodes.version.Load()
	small.Status.Conditions[1].LastHeartbeatTime = metav1.Now()
	apply(c.nodes.Update, small)
	if c.nodes.version.Load() != before {
		t.Error("a heartbeat counts as a change")
	}
	got := c.LargestAllocatable()
	got["cpu"] = 1
	check("what was returned is the caller's", amounts{"cpu": 1500, "bitfusion.io/gpu": 2000})
	if err := c.nodes.Replace([]any{bare}, ""); err != nil {
		t.Fatal(err)
	}
	if got := c.LargestAllocatable(); got != nil {
		t.Errorf("after a list without them: %v", got)
	}
	if err := c.nodes.Add(&corev1.Pod{}); err == nil {
		t.Error("a pod was taken for a node")
	}
}

func TestQuotaLimits(t *testing.T) {
	c := NewCluster(nil)
	scoped := quota("team", "scoped", map[corev1.ResourceName]string{"requests.bitfusion.io/gpu": "1"})
	scoped.Spec.Scopes = []corev1.ResourceQuotaScope{corev1.ResourceQuotaScopeBestEffort}
	selected := quota("team", "selected", map[corev1.ResourceName]string{"requests.bitfusion.io/gpu": "1"})
	selected.Spec.ScopeSelector = &corev1.ScopeSelector{}
	first := quota("team", "first", map[corev1.ResourceName]string{"requests.bitfusion.io/gpu": "100", "pods": "3"})
	for _, q := range []*corev1.ResourceQuota{
		scoped, selected, first,
		quota("team", "none", map[corev1.ResourceName]string{"requests.bitfusion.io/gpu": "0"}),
		quota("team", "another", map[corev1.ResourceName]string{"requests.cpu": "100", "bitfusion.io/gpu": "7"}),
		quota("other", "first", map[corev1.ResourceName]string{"requests.bitfusion.io/gpu": "1k"}),
	} {
		if err := c.quotas.Add(q); err != nil {
			t.Fatal(err)
		}
	}
	for namespace, want := range map[string]map[string]int64{"team": {"first": 100, "none": 0}, "other": {"first": 1000}, "empty": nil} {
		if diff := cmp.Diff(want, c.QuotaLimits(namespace)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", namespace, diff)
		}
	}
	first = first.DeepCopy()
	delete(first.Spec.Hard, "requests.bitfusion.io/gpu")
	if err := c.quotas.Update(first); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]int64{"none": 0}, c.QuotaLimits("team")); diff != "" {
		t.Errorf("a quota without the key (-want +got):\n%s", diff)
	}
}

func TestClusterFollowsTheAPIServer(t *testing.T) {
	client := fake.NewClientset(node("a", map[corev1.ResourceName]string{"bitfusion.io/gpu": "1000"}))
	refused := errors.New("not here")
	c := NewCluster(func(string, []string) error { return refused })
	if err := c.Ready(); err == nil {
		t.Error("ready before anything was read")
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { c.Run(ctx, client) })
	eventually(t, "it is ready", func() bool { return c.Ready() == nil })
	if got := c.LargestAllocatable()["bitfusion.io/gpu"]; got != 1000 {
		t.Errorf("%d units", got)
	}
	if _, err := client.CoreV1().ResourceQuotas("team").Create(t.Context(),
		quota("team", "q", map[corev1.ResourceName]string{"requests.bitfusion.io/gpu": "100"}), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := client.CoreV1().Nodes().Delete(t.Context(), "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the changes arrive", func() bool { return c.QuotaLimits("team")["q"] == 100 && c.LargestAllocatable() == nil })
	if err := c.CredentialsAllowed("team", nil); !errors.Is(err, refused) {
		t.Errorf("error %v", err)
	}
	cancel()
	running.Wait()
}
