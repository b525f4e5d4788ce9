package devicemanager

import (
	"errors"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clienttesting "k8s.io/client-go/testing"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// A pod of two resources of memory does not make divvy-node write without end.
func TestPodOfTwoMemoryResources(t *testing.T) {
	t.Parallel()
	low, high := memoryUnits, memoryUnits
	low.Devices = &config.DeviceSelector{Indexes: []int{0}}
	high.Name, high.Devices = "example.com/other-memory", &config.DeviceSelector{Indexes: []int{1}}
	n := offer(t, vendorsim.GCUs(2, 16<<10), low, high)
	pod := n.start("pod", asking(map[accel.Resource]int64{gcuMemory: 4, "example.com/other-memory": 4}))
	time.Sleep(3 * time.Second)
	before := n.api.get(pod.UID).ResourceVersion
	time.Sleep(3 * time.Second)
	if after := n.api.get(pod.UID).ResourceVersion; after != before {
		t.Errorf("the pod is still written: resource version %s, then %s", before, after)
	}
}

// A policy of the cluster that refuses what is written for people only, the
// node's labels and divvy.dev/held, does not make the node unready.
func TestRefusedLabelsLeaveTheNodeReady(t *testing.T) {
	t.Parallel()
	n := prepareNode(t, "1", vendorsim.GCUs(2, 16<<10))
	for _, resource := range []string{"nodes", "pods"} {
		n.api.PrependReactor("patch", resource, func(action clienttesting.Action) (bool, runtime.Object, error) {
			p, ok := action.(clienttesting.PatchAction)
			if !ok || !strings.Contains(string(p.GetPatch()), `"labels"`) && !strings.Contains(string(p.GetPatch()), wire.HeldAnnotation) {
				return false, nil, nil
			}
			return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: resource}, p.GetName(), errors.New("policy"))
		})
	}
	n.resources(whole, memoryUnits)
	n.kubelet.start()
	n.startAgent()
	n.awaitOffer()
	n.start("pod", of(gcuWhole, 1))
	n.shows(gcuMemory, 16)
	time.Sleep(3 * time.Second)
	if err := n.agent.Ready(); err != nil {
		t.Errorf("the node is not ready: %v", err)
	}
}
