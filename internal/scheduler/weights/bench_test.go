package weights

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/fragmentation"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
)

// BenchmarkRenew is a renewal of prices with pods of 60 kinds on nodes of eight cards:
// as it mostly is, and with tables made anew and the ratings that are remembered of 64
// kinds of pods.
func BenchmarkRenew(b *testing.B) {
	for _, nodes := range []int{1000, 5000} {
		rng := rand.New(rand.NewPCG(1, 2))
		request := func() accel.Request {
			r := asking(gcu, accel.Units(1+rng.IntN(16)))
			r.CPU = int64(1+rng.IntN(4)) * 2000
			return r
		}
		prices := New([]accel.Resource{gcu}, nil, true)
		l := ledger.New(ledger.Options{Policy: prices, CapacityChecked: true})
		names := make([]string, nodes)
		for n := range nodes {
			names[n] = fmt.Sprintf("node-%05d", n)
			inventory := accel.Inventory{Resource: gcu, Unit: "1"}
			for card := range 8 {
				inventory.Shares = append(inventory.Shares,
					accel.Share{Units: 16, Device: accel.Device{Index: card, ID: accel.DeviceID(fmt.Sprint(n, "-", card)),
						NUMANode: accel.NoNUMA}})
			}
			l.SetNode(names[n], []accel.Inventory{inventory})
			l.SetCapacity(names[n], 128_000, 1_000_000)
			for pod := range 4 {
				r := request()
				prices.Learn(r)
				l.Observe(ledger.Holding{
					Pod: accel.PodRef{UID: fmt.Sprint(n, "/", pod)}, Node: names[n], Resource: gcu, Units: r.Peak(), CPU: r.CPU,
					Device: inventory.Shares[rng.IntN(8)].ID,
				})
			}
		}
		prices.renew(b.Context(), l)
		out := make([]ledger.Verdict, nodes)
		for units := range accel.Units(16) {
			for cpu := range int64(4) {
				r := asking(gcu, units+1)
				r.CPU = (cpu + 1) * 2000
				l.Check(r, names, out)
			}
		}
		b.Run(fmt.Sprintf("nodes=%d/prices", nodes), func(b *testing.B) {
			for b.Loop() {
				prices.renew(b.Context(), l)
			}
		})
		b.Run(fmt.Sprintf("nodes=%d/tables", nodes), func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				for range 4 * nodes { // more than a tenth of all: tables are made anew
					prices.Learn(request())
				}
				b.StartTimer()
				prices.renew(b.Context(), l)
			}
		})
		b.Run(fmt.Sprintf("nodes=%d/ratings", nodes), func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				for _, name := range names {
					l.SetCapacity(name, 128_000+rng.Int64N(100), 1_000_000) // every node has changed
				}
				b.StartTimer()
				l.Refresh(fragmentation.RefreshedAsks)
			}
		})
		b.Run(fmt.Sprintf("nodes=%d/learn", nodes), func(b *testing.B) {
			r := request()
			for b.Loop() {
				prices.Learn(r)
			}
		})
	}
}
