package agent

import (
	"context"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
)

// TestNumberOfDevicesGoesWithItsResource: kubelet never takes off a resource that
// was written into the node's status.
func TestNumberOfDevicesGoesWithItsResource(t *testing.T) {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: thisNode}}
	// Of the operator, who patched it in, and of another device plugin.
	node.Status.Capacity = corev1.ResourceList{"a.com/dongle": resource.MustParse("4"), "b.com/count": resource.MustParse("7")}
	node.Status.Allocatable = node.Status.Capacity.DeepCopy()
	client := fake.NewClientset(node)
	shown := func(name string) counts {
		return counts{devices: map[string]int{name: 2}, named: map[string]bool{name: true}}
	}
	for _, step := range []struct {
		what   string
		counts counts
		want   map[string]string
	}{
		{"the number is shown", shown("c.com/count"), map[string]string{"c.com/count": "2/2", "listed": "c.com/count"}},
		{"another name", shown("c.com/cards"), map[string]string{"c.com/cards": "2/2", "listed": "c.com/cards"}},
		{"it is kubelet's now", counts{served: map[string]bool{"c.com/cards": true}}, map[string]string{"c.com/cards": "2/2"}},
		{"the first name again", shown("c.com/count"),
			map[string]string{"c.com/count": "2/2", "c.com/cards": "2/2", "listed": "c.com/count"}},
		{"none", counts{}, map[string]string{"c.com/cards": "2/2"}},
	} {
		step.want["a.com/dongle"], step.want["b.com/count"] = "4/4", "7/7"
		ctx, cancel := context.WithCancel(t.Context())
		p := newPublisher(client, thisNode, newMetrics(prometheus.NewRegistry()), func() {}) // the daemon starts anew
		var watching sync.WaitGroup
		watching.Go(func() { p.Run(ctx) })
		waitForWatch(t, client, p)
		eventually(t, step.what, func() bool {
			if err := p.publish(ctx, nil, step.counts); err != nil {
				t.Fatal(err)
			}
			return cmp.Equal(step.want, shownBy(t, client))
		})
		cancel()
		watching.Wait()
	}
}

// shownBy is what the node shows: capacity and allocatable of each resource, and
// the annotation that lists the numbers that were written.
func shownBy(t *testing.T, client *fake.Clientset) map[string]string {
	t.Helper()
	node, err := client.CoreV1().Nodes().Get(t.Context(), thisNode, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	if list, ok := node.Annotations[countsAnnotation]; ok {
		out["listed"] = list
	}
	for name, q := range node.Status.Capacity {
		allocatable := node.Status.Allocatable[name]
		out[string(name)] = q.String() + "/" + allocatable.String()
	}
	for name := range node.Status.Allocatable {
		if _, ok := node.Status.Capacity[name]; !ok {
			t.Errorf("%s is allocatable and has no capacity", name)
		}
	}
	return out
}

// What is not known yet is no reason to take a number away.
func TestNumberOfDevicesStaysUntilTheyWereLookedFor(t *testing.T) {
	named := counts{devices: map[string]int{}, named: map[string]bool{"a.com/n": true}}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{countsAnnotation: "a.com/n,b.com/n"}}}
	node.Status.Allocatable = corev1.ResourceList{"a.com/n": resource.MustParse("1"), "b.com/n": resource.MustParse("1"),
		"c.com/n": resource.MustParse("1")}
	ours, gone := named.of(node)
	if diff := cmp.Diff([]string{"a.com/n", "b.com/n"}, ours); diff != "" {
		t.Errorf("listed (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"b.com/n"}, gone); diff != "" {
		t.Errorf("taken off (-want +got):\n%s", diff)
	}
}
