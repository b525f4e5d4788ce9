// Package schedbatch makes a process one that interrupts nobody: when something comes for it
// while all processors are busy, it waits for its turn instead of putting aside whoever
// computes. Where a processor is free it starts at once, and its share of the
// processors stays the same.
//
// It is for a program that is woken thousands of times a second for very little, beside
// those that wake it and that they both depend on. To be put aside in the middle costs
// them more than the little takes.
package schedbatch

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// Enter gives all threads of this process Linux' scheduling policy SCHED_BATCH, see
// sched(7), which needs no privilege. Threads that come later inherit it. A thread that
// has another policy than the usual one keeps it, as somebody chose it.
func Enter() error {
	// A thread that is started meanwhile may inherit the policy of one that was not
	// reached yet, so this ends when there is none left.
	for {
		changed, err := enter()
		if err != nil || !changed {
			return err
		}
	}
}

// enter changes those that are there and reports whether there were any to change.
func enter() (changed bool, err error) {
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return false, fmt.Errorf("threads of this process: %w", err)
	}
	for _, thread := range threads {
		id, err := strconv.Atoi(thread.Name())
		if err != nil {
			return changed, fmt.Errorf("threads of this process: %w", err)
		}
		now, err := unix.SchedGetAttr(id, 0)
		if errors.Is(err, unix.ESRCH) {
			continue // it has ended
		}
		if err != nil {
			return changed, fmt.Errorf("scheduling policy of thread %d: %w", id, err)
		}
		if now.Policy != unix.SCHED_NORMAL {
			continue
		}
		err = unix.SchedSetAttr(id, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_BATCH, Nice: now.Nice}, 0)
		if errors.Is(err, unix.ESRCH) {
			continue
		}
		if err != nil {
			return changed, fmt.Errorf("give thread %d the scheduling policy SCHED_BATCH: %w", id, err)
		}
		changed = true
	}
	return changed, nil
}
