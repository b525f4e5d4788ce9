// Package heaptarget keeps the memory of a process even: however many objects it follows,
// its heap grows to one size before it is collected, instead of to twice what is in
// use. A program that answers within a millisecond is collected less often so, and
// its memory does not tell how full the cluster is.
package heaptarget

import (
	"context"
	"math"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

const (
	// lookEvery is how often the limit is set anew.
	lookEvery = time.Second
	// growth is how far, in percent of what is in use, a heap may grow that is far
	// below the budget: a small cluster needs no large process.
	growth = 400
	// leastRoom is what there is at least between two collections, in bytes, and
	// roomPart the part of what is in use that there is when it is more.
	leastRoom = 24 << 20
	roomPart  = 8
)

// Keep lets the Go runtime have budget bytes of memory, and more only where what is
// in use leaves too little room beside it. It returns when the context ends, or at
// once where the environment variables GOGC or GOMEMLIMIT say what is wanted. One
// goroutine of a process may call it.
func Keep(ctx context.Context, budget int64) {
	if os.Getenv("GOGC") != "" || os.Getenv("GOMEMLIMIT") != "" {
		return
	}
	percent, limit := debug.SetGCPercent(growth), debug.SetMemoryLimit(budget)
	defer func() {
		debug.SetGCPercent(percent)
		debug.SetMemoryLimit(limit)
	}()
	ticker := time.NewTicker(lookEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			debug.SetMemoryLimit(limitFor(budget, read()))
		}
	}
}

// usage is what the runtime says, in bytes: live is what the last collection left,
// heap what objects take now, and all what it has from the system.
type usage struct{ live, heap, all uint64 }

func read() usage {
	samples := []metrics.Sample{
		{Name: "/gc/heap/live:bytes"}, {Name: "/memory/classes/heap/objects:bytes"},
		{Name: "/memory/classes/heap/unused:bytes"}, {Name: "/memory/classes/heap/free:bytes"},
		{Name: "/memory/classes/heap/released:bytes"}, {Name: "/memory/classes/total:bytes"},
	}
	metrics.Read(samples)
	value := func(i int) uint64 {
		if samples[i].Value.Kind() != metrics.KindUint64 {
			return 0 // a runtime that does not know it
		}
		return samples[i].Value.Uint64()
	}
	return usage{live: value(0), heap: value(1) + value(2) + value(3), all: value(5) - min(value(4), value(5))}
}

// limitFor is the limit of the runtime's memory: what is in use, the room beside it,
// and what is no heap at all, such as stacks; the budget where that is more.
func limitFor(budget int64, u usage) int64 {
	other := u.all - min(u.heap, u.all)
	sum := u.live + max(leastRoom, u.live/roomPart) + other
	return max(budget, int64(min(sum, math.MaxInt64)))
}
