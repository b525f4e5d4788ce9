package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Process is what the kernel says of a process.
type Process struct {
	// Start is when it started, in clock ticks since the machine did. Two processes with
	// the same PID differ in it.
	Start uint64
	// Exiting is true if it has exited and was not waited for; its group may be gone.
	Exiting bool
}

// ReadProcess reads the state of a process from procRoot, usually /proc. An error
// wraps fs.ErrNotExist or syscall.ESRCH if it does not exist.
func ReadProcess(procRoot string, pid int) (Process, error) {
	text, err := os.ReadFile(processFile(procRoot, pid, "stat"))
	if err != nil {
		return Process{}, err
	}
	p, err := parseStat(string(text))
	if err != nil {
		return Process{}, fmt.Errorf("state of process %d: %w", pid, err)
	}
	return p, nil
}

// ReadMembership reads in which groups a process is, from procRoot. Errors are as those
// of ReadProcess.
func ReadMembership(procRoot string, pid int) (Membership, error) {
	text, err := os.ReadFile(processFile(procRoot, pid, "cgroup"))
	if err != nil {
		return Membership{}, err
	}
	m, err := Parse(string(text))
	if err != nil {
		return Membership{}, fmt.Errorf("process %d: %w", pid, err)
	}
	return m, nil
}

func processFile(procRoot string, pid int, name string) string {
	return filepath.Join(procRoot, strconv.Itoa(pid), name)
}

// parseStat reads the text of /proc/<pid>/stat. The second field, the name of the
// program in parentheses, may contain everything, such as spaces and parentheses.
func parseStat(text string) (Process, error) {
	i := strings.LastIndexByte(text, ')')
	if i < 0 {
		return Process{}, errors.New("stat has no program name")
	}
	const state, startTime = 0, 19 // fields 3 and 22, numbered from 1
	fields := strings.Fields(text[i+1:])
	if len(fields) <= startTime {
		return Process{}, fmt.Errorf("stat has only %d fields after the program name", len(fields))
	}
	start, err := strconv.ParseUint(fields[startTime], 10, 64)
	if err != nil {
		return Process{}, fmt.Errorf("start time in stat: %w", err)
	}
	return Process{Start: start, Exiting: strings.ContainsAny(fields[state], "ZXx")}, nil
}
