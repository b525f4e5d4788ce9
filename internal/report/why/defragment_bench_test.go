package why

import (
	"math/rand"
	"testing"
)

// BenchmarkAdmit looks for moves for ten pods that wait, in a cluster of 500 nodes with up to
// 8 devices. There are none, so that each search goes on to its bounds.
func BenchmarkAdmit(b *testing.B) {
	cluster, _ := crowded(b, rand.New(rand.NewSource(1)), 500, 8, 6000, 10)
	b.ReportAllocs()
	moves := 0
	for b.Loop() {
		p := New(&cluster.Snapshot).Admit()
		moves = len(p.Moves)
	}
	b.ReportMetric(float64(moves), "moves")
}
