package devicelist

import (
	"cmp"
	"maps"
	"slices"

	"github.com/divvy-gpu/divvy/internal/node/backend"
)

// Processes are those that use a device, by their PID.
type Processes map[int]backend.Process

// Add adds a process that uses so much memory, nil if that is not known. Of a process that
// the library lists several times, as one that computes and draws, the largest amount
// counts: each is all that the process uses. A PID of 0 is no process.
func (p Processes) Add(pid uint32, memory *uint64) {
	if pid == 0 {
		return
	}
	one := backend.Process{PID: int(pid), Memory: memory}
	if had := p[one.PID].Memory; memory == nil || had != nil && *had > *memory {
		one.Memory = had
	}
	p[one.PID] = one
}

// Sorted returns the processes in ascending order of PID, as backend.Measured has them.
func (p Processes) Sorted() []backend.Process {
	return slices.SortedFunc(maps.Values(p), func(a, b backend.Process) int { return cmp.Compare(a.PID, b.PID) })
}

// MemoryUpTo returns the amount of memory that a library gives for a process, nil if it is
// more than the device has: with all ones libraries say that they do not know it.
func MemoryUpTo(total, bytes uint64) *uint64 {
	if bytes > total {
		return nil
	}
	return &bytes
}
