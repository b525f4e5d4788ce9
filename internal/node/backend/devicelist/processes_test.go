package devicelist

import (
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/node/backend"
)

func TestProcessesOfSeveralLists(t *testing.T) {
	p := Processes{}
	for _, add := range []struct {
		pid    uint32
		memory *uint64
	}{
		{9, new(uint64(5))}, {7, nil}, {9, new(uint64(8))}, {9, new(uint64(2))}, {9, nil}, {7, new(uint64(0))}, {0, new(uint64(1))},
		{4, nil}, {4, nil},
	} {
		p.Add(add.pid, add.memory)
	}
	want := []backend.Process{{PID: 4}, {PID: 7, Memory: new(uint64(0))}, {PID: 9, Memory: new(uint64(8))}}
	if diff := cmp.Diff(want, p.Sorted()); diff != "" {
		t.Errorf("processes (-want +got):\n%s", diff)
	}
}

func TestMemoryThatCannotBe(t *testing.T) {
	for bytes, known := range map[uint64]bool{0: true, 10: true, 11: false, math.MaxUint64: false} {
		got := MemoryUpTo(10, bytes)
		if (got != nil) != known || known && *got != bytes {
			t.Errorf("MemoryUpTo(10, %d) = %v", bytes, got)
		}
	}
}
