package dra

import (
	"fmt"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
)

// complete returns the pool and the number of devices of the slices that the API server has. ok is false while
// they are not those of one generation, of which all exist: kube-scheduler allocates nothing of such a pool.
func (p *plane) complete() (pool resourceapi.ResourcePool, devices int, ok bool) {
	p.t.Helper()
	list, err := p.client.ResourceV1().ResourceSlices().List(p.t.Context(), metav1.ListOptions{})
	if err != nil {
		p.t.Fatal(err)
	}
	names := map[string]bool{}
	for i := range list.Items {
		spec := &list.Items[i].Spec
		if i == 0 {
			pool = spec.Pool
		} else if spec.Pool != pool {
			return pool, 0, false
		}
		for j := range spec.Devices {
			names[spec.Devices[j].Name] = true
		}
	}
	return pool, len(names), int64(len(list.Items)) == pool.ResourceSliceCount
}

// TestPoolIsComplete: however many slices the devices need, all are of one generation, and say how many they are.
func TestPoolIsComplete(t *testing.T) {
	discovered := func(n int) (out []accel.Device) {
		for i := range n {
			out = append(out, accel.Device{Index: i, ID: accel.DeviceID(fmt.Sprint("x", i)), MemoryBytes: 16 * gib, NUMANode: accel.NoNUMA})
		}
		return out
	}
	p := newPlane(t, discovered(3)...)
	generation := int64(0)
	for _, tt := range []struct {
		devices int
		slices  int64
	}{{3, 1 + 1}, {65, 3 + 9}, {1, 1 + 1}, {0, 1}, {2, 1 + 1}} {
		p.keeper.mu.Lock()
		p.keeper.engine.Claims.Discover("enflame", alloc.Discovery{Devices: discovered(tt.devices)})
		p.keeper.mu.Unlock()
		p.server.Changed()
		var pool resourceapi.ResourcePool
		p.await(fmt.Sprintf("the pool of %d devices is not complete", tt.devices), func() bool {
			now, devices, ok := p.complete()
			pool = now
			return ok && devices == 2*tt.devices // as a whole, and in slices
		})
		if pool.Name != "node/enflame" || pool.ResourceSliceCount != tt.slices || pool.Generation < generation {
			t.Errorf("%d devices: the slices are of pool %+v, want %d slices, and a generation from %d on", tt.devices, pool, tt.slices,
				generation)
		}
		generation = pool.Generation
	}
}
