package ledger

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// TestConcurrentUseNeverOversubscribes has several binders fight for few
// devices while the watch, the clock, the health of devices and readers go on
// beside them. No device may ever be granted beyond its size: neither as the
// ledger shows it nor as the binders count it themselves.
func TestConcurrentUseNeverOversubscribes(t *testing.T) {
	const (
		nodes, devices = 4, 3
		size           = 16
		binders        = 6
	)
	rounds := 3000
	if testing.Short() {
		rounds = 500
	}
	var clock atomic.Int64
	l := New(Options{ReservationTTL: time.Hour, Now: func() time.Time { return time.Unix(0, clock.Add(1)) }})
	names := make([]string, nodes)
	published := func(broken int) []accel.Inventory {
		in := accel.Inventory{Resource: gcu, Unit: "1"}
		for i := range devices {
			s := accel.Share{Units: size, Device: accel.Device{Index: i, ID: accel.DeviceID(fmt.Sprint("card", i))}}
			s.Health.Unhealthy = i == broken
			in.Shares = append(in.Shares, s)
		}
		return []accel.Inventory{in}
	}
	for i := range names {
		names[i] = fmt.Sprint("node", i)
		l.SetNode(names[i], published(-1))
	}

	// held is the binders' own count of what they hold of each device. They
	// add after a grant and subtract before they give back, so it may lag
	// behind the ledger and never be ahead of it.
	var held [nodes][devices]atomic.Int64
	hold := func(node int, g accel.Grant, times int64) (most int64) {
		part := times * int64(g.Units) / int64(1+len(g.More))
		most = held[node][g.Index].Add(part)
		for _, more := range g.More {
			most = max(most, held[node][more.Index].Add(part))
		}
		return most
	}
	var granted, refused atomic.Int64

	stop := make(chan struct{})
	var background, binding sync.WaitGroup
	loop := func(do func(r *rand.Rand), seed uint64) {
		background.Go(func() {
			r := rand.New(rand.NewPCG(seed, 0))
			for {
				select {
				case <-stop:
					return
				default:
					do(r)
				}
			}
		})
	}
	loop(func(r *rand.Rand) { // health and inventories change
		l.SetNode(names[r.IntN(nodes)], published(r.IntN(devices+3)-3))
		l.Expire()
	}, 1)
	loop(func(*rand.Rand) { // inspect
		for n := range l.Nodes(gcu) {
			var used accel.Units
			for _, d := range n.Devices {
				used += d.Used
				if d.Used > d.Units || d.Used < 0 {
					t.Errorf("%s %s: %d of %d used", n.Name, d.ID, d.Used, d.Units)
				}
			}
			if used != n.Used || len(n.Unplaced) > 0 {
				t.Errorf("%s: %d used, %d on its devices, unplaced %v", n.Name, n.Used, used, n.Unplaced)
			}
		}
	}, 2)
	loop(func(r *rand.Rand) { // prices are renewed, and pods without devices come and go
		sum := 0
		for _, n := range l.Each(gcu) {
			sum += len(n.Slots)
		}
		if sum != nodes*devices {
			t.Errorf("%d devices", sum)
		}
		l.Refresh(3)
		l.SetCapacity(names[r.IntN(nodes)], int64(1000+r.IntN(3)), 1000)
		l.Charge(fmt.Sprint("other", r.IntN(5)), names[r.IntN(nodes)], int64(r.IntN(3)), 1)
	}, 5)
	loop(func(r *rand.Rand) { // filter
		out := make([]Verdict, nodes)
		need := accel.Units(1 + r.IntN(size))
		l.Check(asks(need), names, out)
		for i, v := range out {
			if v.Code != accel.Fits && v.Code != accel.NoDeviceFits || (v.Code == accel.Fits) != (v.Rating != place.NoRating) ||
				v.Code == accel.Fits && (v.Rating > 0 || v.Rating < int64(need-size)) {
				t.Errorf("Check of %d on %s: %+v", need, names[i], v)
			}
		}
	}, 3)

	for b := range binders {
		binding.Go(func() {
			r := rand.New(rand.NewPCG(uint64(b), 4))
			type bound struct {
				uid  string
				node int
				g    accel.Grant
			}
			var running []bound
			end := func(i int) {
				p := running[i]
				hold(p.node, p.g, -1)
				l.Forget(p.uid)
				running[i] = running[len(running)-1]
				running = running[:len(running)-1]
			}
			for round := range rounds {
				uid, at := fmt.Sprintf("%d-%d", b, round), r.IntN(nodes)
				req := asks(accel.Units(1 + r.IntN(8)))
				if r.IntN(4) == 0 {
					req = on(2, accel.Units(2+2*r.IntN(8)))
				}
				g, undo, err := l.Reserve(pod(uid), time.Time{}, names[at], req)
				if err != nil {
					if !errors.Is(err, accel.ErrNoFit) {
						t.Errorf("Reserve: %v", err)
					}
					refused.Add(1)
					if len(running) > 0 {
						end(r.IntN(len(running)))
					}
					continue
				}
				granted.Add(1)
				if sum := hold(at, g, 1); sum > size {
					t.Errorf("%s %s: %d of %d granted", names[at], g.Device, sum, size)
				}
				if r.IntN(4) == 0 { // the bind failed
					hold(at, g, -1)
					undo()
					continue
				}
				h := Holding{Pod: pod(uid), Node: names[at], Resource: gcu, Units: g.Units}
				if r.IntN(3) > 0 { // otherwise the annotation is seen later
					h.Device = g.Device
					for _, more := range g.More {
						h.More = append(h.More, more.Device)
					}
				}
				l.Observe(h)
				undo()
				running = append(running, bound{uid, at, g})
			}
			for len(running) > 0 {
				end(0)
			}
		})
	}
	binding.Wait()
	close(stop)
	background.Wait()
	for n := range l.Nodes(gcu) {
		if n.Used != 0 {
			t.Errorf("%s: %d used after all pods ended", n.Name, n.Used)
		}
	}
	if granted.Load() < int64(rounds) || refused.Load() < int64(rounds)/10 {
		t.Errorf("%d granted and %d refused: the devices were not fought for", granted.Load(), refused.Load())
	}
	t.Logf("%d granted, %d refused", granted.Load(), refused.Load())
}
