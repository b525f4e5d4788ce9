package simulate

import (
	"context"
	"testing"
)

// BenchmarkReplay replays a workload on as many nodes as the public trace has;
// an operation is one pod.
func BenchmarkReplay(b *testing.B) {
	c, w := generated(seeded(1), 1213, 8000)
	for _, kind := range Policies() {
		b.Run(kind.Name, func(b *testing.B) {
			pods := 0
			for b.Loop() {
				curve, err := Replay{Until: 1.3}.Run(context.Background(), c, w, kind, 42)
				if err != nil {
					b.Fatal(err)
				}
				pods += curve.Arrived
			}
			b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(pods), "us/pod")
			b.ReportMetric(0, "ns/op")
		})
	}
}
