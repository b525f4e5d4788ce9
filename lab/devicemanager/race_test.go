package devicemanager

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// Kubelet notes the units that it is handing out in one set (allocatedDevices)
// and, once the plugin has answered Allocate, in another (podDevices). When a
// pod has ended and somebody asks for the pod resources in between,
// UpdateAllocatedDevices makes the first set anew from the second, and kubelet
// offers the units to the next pod although a container has them.
//
// The test makes kubelet forget, in that way and often, and shows that no unit
// is handed out twice.
func TestKubeletForgetsUnits(t *testing.T) {
	t.Parallel()
	tests := map[string][]shape{
		"one container":      {app(3)},
		"several containers": {app(1, 2)},
		"a sidecar":          {sidecar(1), app(2)},
		"an init container":  {initial(4), app(1)},
	}
	for name, shapes := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := prepareNode(t, "1", vendorsim.GCUs(2, 16<<10))
			n.kubelet.Lists = rate.Inf // what is shown here is not slowed down by it
			n.kubelet.start()
			n.startAgent()
			n.awaitReady()
			random := rand.New(rand.NewPCG(1, 2))
			var hammers sync.WaitGroup
			var stop, pause atomic.Bool
			hammers.Go(func() {
				for !stop.Load() {
					if !pause.Load() {
						n.kubelet.Devices().UpdateAllocatedDevices(n.log) // as every question for the pod resources does
					}
					<-time.After(20 * time.Microsecond)
				}
			})
			defer hammers.Wait()
			defer stop.Store(true)

			var alive []*corev1.Pod
			var admitted, forgot, refused int
			took := time.Millisecond // the last admission
			for i := 0; i < 1000 && (i < 100 || forgot < 10); i++ {
				var ending sync.WaitGroup
				if len(alive) > 5 {
					j := random.IntN(len(alive))
					pod, after := alive[j], time.Duration(random.Int64N(int64(took)))
					alive = append(alive[:j], alive[j+1:]...)
					ending.Go(func() {
						<-time.After(after)
						n.kubelet.finish(pod)
					})
				}
				pod := n.bind(i%2, fmt.Sprintf("pod%d", i), shapes...)
				begin := time.Now()
				err := n.kubelet.add(pod)
				took = time.Since(begin)
				ending.Wait()
				if err != nil {
					refused++
				} else {
					admitted++
					alive = append(alive, pod)
					if err := n.kubelet.run(pod); err != nil {
						t.Fatal(err)
					}
				}
				if n.forgotten(alive) > 0 {
					forgot++
				}
				if _, err := n.disjoint(); err != nil {
					t.Fatalf("after %d pods, of which kubelet forgot units %d times: %v", i+1, forgot, err)
				}
			}
			t.Logf("%d pods admitted, %d refused; after %d of them kubelet took units for free that containers had", admitted, refused,
				forgot)
			if forgot == 0 {
				t.Error("kubelet forgot nothing, so the test showed nothing")
			}
			pause.Store(true)
			n.converged()
		})
	}
}

// forgotten counts the units that containers of the pods hold and that kubelet
// would offer to others.
func (n *node) forgotten(pods []*corev1.Pod) int {
	manager := reflect.ValueOf(n.kubelet.Devices()).Elem()
	mutex := (*sync.Mutex)(manager.FieldByName("mutex").Addr().UnsafePointer())
	held := map[string]types.UID{}
	for _, p := range pods {
		for _, c := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
			for _, id := range n.kubelet.ids(p.UID, c.Name) {
				held[id] = p.UID
			}
		}
	}
	mutex.Lock()
	defer mutex.Unlock()
	allocated := manager.FieldByName("allocatedDevices").MapIndex(reflect.ValueOf(string(gcuMemory)))
	if allocated.IsValid() {
		for _, key := range allocated.MapKeys() {
			delete(held, key.String())
		}
	}
	return len(held)
}
