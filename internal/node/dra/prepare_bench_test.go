package dra

import (
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"k8s.io/klog/v2"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
)

// BenchmarkPrepare prepares a claim by the driver's socket, beside claims that are held, and reports how long kubelet
// waits at the 99th percentile. What is recorded is not written to a disk; the CDI specification is.
func BenchmarkPrepare(b *testing.B) {
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	for _, held := range []int{0, 30} {
		b.Run(fmt.Sprint("held=", held), func(b *testing.B) {
			p := newPlane(b, gcus()...)
			p.devices(4)
			for i := range held {
				if _, failed := p.prepare(p.allocate(fmt.Sprint("held", i), allocatedPart("gcu-a", "512Mi"))); failed != "" {
					b.Fatal(failed)
				}
			}
			c := p.allocate("c", allocatedPart("gcu-b", "1Gi"))
			claims := []*drapb.Claim{{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}}
			client := drapb.NewDRAPluginClient(p.dial(filepath.Join(p.dir, "plugins/enflame.divvy.dev/dra.sock")))
			var took []time.Duration
			for b.Loop() {
				start := time.Now()
				answer, err := client.NodePrepareResources(b.Context(), &drapb.NodePrepareResourcesRequest{Claims: claims},
					grpc.WaitForReady(true))
				took = append(took, time.Since(start))
				b.StopTimer()
				if err != nil || answer.GetClaims()[string(c.UID)].GetError() != "" {
					b.Fatal(err, answer)
				}
				if failed := p.unprepare(c); failed != "" {
					b.Fatal(failed)
				}
				p.client.ClearActions()
				b.StartTimer()
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)*99/100])/float64(time.Millisecond), "p99-ms")
		})
	}
}
