package usage

import (
	"fmt"
	"sync"

	"github.com/divvy-gpu/divvy/internal/node/cgroup"
)

// finder finds out which containers processes are in, during one pass. It is safe for
// concurrent use.
type finder struct {
	proc, cgroups string
	// before are processes that an earlier pass found in a container, by PID.
	before map[int]member

	mu sync.Mutex
	// found are those of this pass; guarded by mu.
	found map[int]member
}

// Owners returns a function that returns the pods and containers of a process, as
// cgroup.Owners does; an error says that they cannot be known. It is for the processes that a
// library has listed just now.
func Owners(procRoot, cgroupRoot string) func(pid int) ([]cgroup.Owner, error) {
	return (&finder{proc: procRoot, cgroups: cgroupRoot, found: map[int]member{}}).owners()
}

// member is a process in a container. It stays in it while it lives.
type member struct {
	start  uint64 // as cgroup.Process.Start
	owners []cgroup.Owner
}

// owners returns a function that returns the pods and containers of a process, as
// cgroup.Owners does; an error says that they cannot be known. It reads the host's
// control groups at most once, so it is for processes that were listed before now.
func (f *finder) owners() func(pid int) ([]cgroup.Owner, error) {
	members := sync.OnceValues(func() (map[int][]cgroup.Owner, error) { return cgroup.Members(f.cgroups) })
	return func(pid int) ([]cgroup.Owner, error) { return f.find(pid, members) }
}

func (f *finder) find(pid int, members func() (map[int][]cgroup.Owner, error)) ([]cgroup.Owner, error) {
	process, err := cgroup.ReadProcess(f.proc, pid)
	if err != nil {
		return nil, err
	}
	if m, ok := f.before[pid]; ok && m.start == process.Start {
		f.keep(pid, m)
		return m.owners, nil
	}
	membership, err := cgroup.ReadMembership(f.proc, pid)
	if err != nil {
		return nil, err
	}
	owners := membership.Owners
	if membership.Hidden {
		all, err := members()
		if err != nil {
			return nil, err
		}
		owners = all[pid]
	}
	after, err := cgroup.ReadProcess(f.proc, pid)
	switch {
	case err != nil:
		return nil, err
	case after.Start != process.Start:
		return nil, fmt.Errorf("process %d has ended, and another has its PID", pid)
	case len(owners) == 0 && after.Exiting:
		return nil, fmt.Errorf("process %d has exited", pid) // which takes it out of its group
	case len(owners) > 0 && owners[len(owners)-1].Container != "":
		f.keep(pid, member{process.Start, owners})
	}
	return owners, nil
}

// keep notes a process for the next pass.
func (f *finder) keep(pid int, m member) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.found[pid] = m
}

// started returns when a process that this pass found in a container started, as
// cgroup.Process.Start.
func (f *finder) started(pid int) (uint64, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	m, ok := f.found[pid]
	return m.start, ok
}
