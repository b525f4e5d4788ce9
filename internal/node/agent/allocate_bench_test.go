package agent

import (
	"fmt"
	"testing"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// BenchmarkAllocate answers kubelet's Allocate for containers of 4 units, without and with the
// CDI device that limits them, whose file exists beforehand.
func BenchmarkAllocate(b *testing.B) {
	ctx := klog.NewContext(b.Context(), logr.Discard())
	for _, limited := range []bool{false, true} {
		b.Run(fmt.Sprintf("limited=%v", limited), func(b *testing.B) {
			m := newLimiting(b, "1")
			m.passes(2)
			if !limited {
				m.world.pool.limit = nil
			}
			for n := 0; b.Loop(); n++ {
				b.StopTimer()
				pod := newPod("trainer", 4)
				pod.UID = types.UID(fmt.Sprint(n))
				m.world.see(m.grantTo(pod, "a", 1))
				m.admitted = append(m.admitted, pod)
				ids, err := m.Prefer(ctx, m.available(), nil, 4)
				if err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
				answer, err := m.Allocate(ctx, ids)
				b.StopTimer()
				if err != nil {
					b.Fatal(err)
				}
				want := 1
				if limited {
					want++
				}
				if len(answer.CdiDevices) != want {
					b.Fatalf("%d CDI devices, want %d", len(answer.CdiDevices), want)
				}
				m.remove(pod)
				if _, err := m.refresh(ctx); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
		})
	}
}
