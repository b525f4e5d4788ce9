package proc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

var bootID = sync.OnceValue(func() string {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
})

// Lookup returns the identity of a living process.
func Lookup(pid int) (ID, error) {
	stat, err := readStat(pid)
	if err != nil {
		return ID{}, err
	}
	// The first thread of a killed process may be a zombie while others still
	// end; until the last has, the process keeps its sockets.
	if stat.state == 'X' || stat.state == 'Z' && len(threads(pid)) <= 1 {
		return ID{}, fmt.Errorf("process %d has ended", pid)
	}
	return ID{PID: pid, StartTicks: stat.startTicks, Boot: bootID()}, nil
}

// threads returns the folders of the threads of a process that are not reaped
// yet.
func threads(pid int) []string {
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return nil
	}
	var dirs []string
	for _, entry := range entries {
		dirs = append(dirs, fmt.Sprintf("/proc/%d/task/%s", pid, entry.Name()))
	}
	return dirs
}

// All returns every living process of the machine, without kernel threads'
// executables being known. Processes that end meanwhile are left out.
func All() []ID {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var all []ID
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		if id, err := Lookup(pid); err == nil {
			all = append(all, id)
		}
	}
	return all
}

// Alive reports whether this very process still runs; a zombie does not.
func (id ID) Alive() bool {
	now, err := Lookup(id.PID)
	return err == nil && now == id
}

// Executable returns the path of the program, also after the file was replaced.
func (id ID) Executable() (string, error) {
	exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", id.PID))
	if err != nil {
		// While a process dies its first thread may have let go of the program
		// before the others have.
		for _, thread := range threads(id.PID) {
			if exe, err := os.Readlink(thread + "/exe"); err == nil {
				return strings.TrimSuffix(exe, " (deleted)"), nil
			}
		}
	}
	return strings.TrimSuffix(exe, " (deleted)"), err
}

// Session returns the session of the process: the number of the process that
// began it, which is a Daemon itself for all that it started, whoever their
// parent is by now. It is 0 for a process that has ended.
func (id ID) Session() int {
	stat, err := readStat(id.PID)
	if err != nil || stat.startTicks != id.StartTicks {
		return 0
	}
	return stat.session
}

// CommandLine returns the arguments of the process, its name first.
func (id ID) CommandLine() []string {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", id.PID))
	if err != nil || len(data) == 0 {
		return nil
	}
	return strings.Split(strings.TrimRight(string(data), "\x00"), "\x00")
}

// Cgroups returns the paths of the control groups that the process is in.
func (id ID) Cgroups() []string {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", id.PID))
	if err != nil {
		return nil
	}
	var paths []string
	for line := range strings.Lines(string(data)) {
		if parts := strings.SplitN(strings.TrimSpace(line), ":", 3); len(parts) == 3 {
			paths = append(paths, parts[2])
		}
	}
	return paths
}

// Signal sends a signal; a process that is gone is no error.
func (id ID) Signal(signal syscall.Signal) error {
	if !id.Alive() {
		return nil
	}
	if err := syscall.Kill(id.PID, signal); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("signal process %d: %w", id.PID, err)
	}
	return nil
}

// killWait is how long a process may take to go after SIGKILL: one in an
// uninterruptible call goes only when that returns.
const killWait = 20 * time.Second

// End sends first, waits up to grace for the process to end, sends SIGKILL then
// and waits again.
func (id ID) End(ctx context.Context, first syscall.Signal, grace time.Duration) error {
	if first != syscall.SIGKILL {
		if err := id.Signal(first); err != nil {
			return err
		}
		if id.wait(ctx, grace) {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	if err := id.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	if !id.wait(ctx, killWait) {
		return fmt.Errorf("process %d did not end: %w", id.PID, errors.Join(ctx.Err(), context.DeadlineExceeded))
	}
	return nil
}

func (id ID) wait(ctx context.Context, limit time.Duration) bool {
	deadline := time.Now().Add(limit)
	for id.Alive() {
		if ctx.Err() != nil || time.Now().After(deadline) {
			return !id.Alive()
		}
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond):
		}
	}
	return true
}

// stat is what is needed of /proc/PID/stat.
type stat struct {
	state      byte
	session    int
	startTicks uint64
}

// readStat reads /proc/PID/stat. The program's name in it may hold blanks and
// parentheses, so fields are counted behind the last one.
func readStat(pid int) (stat, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return stat{}, err
	}
	return parseStat(string(data))
}

func parseStat(text string) (stat, error) {
	end := strings.LastIndexByte(text, ')')
	if end < 0 {
		return stat{}, errors.New("unexpected form of a process's stat file")
	}
	// The state is field 3 and the first one here.
	fields := strings.Fields(text[end+1:])
	const sessionField, startField = 6 - 3, 22 - 3
	if len(fields) <= startField {
		return stat{}, errors.New("unexpected form of a process's stat file")
	}
	session, err := strconv.Atoi(fields[sessionField])
	if err != nil {
		return stat{}, fmt.Errorf("session of a process: %w", err)
	}
	startTicks, err := strconv.ParseUint(fields[startField], 10, 64)
	if err != nil {
		return stat{}, fmt.Errorf("start time of a process: %w", err)
	}
	return stat{state: fields[0][0], session: session, startTicks: startTicks}, nil
}
