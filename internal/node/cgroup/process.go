package cgroup

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strconv"
	"syscall"
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
	var buffer [1024]byte // stat has about 350 bytes
	text, err := read(processFile(procRoot, pid, "stat"), buffer[:])
	if err != nil {
		return Process{}, err
	}
	p, err := parseStat(text)
	if err != nil {
		return Process{}, fmt.Errorf("state of process %d: %w", pid, err)
	}
	return p, nil
}

// ReadMembership reads in which groups a process is, from procRoot. Errors are as those
// of ReadProcess.
func ReadMembership(procRoot string, pid int) (Membership, error) {
	var buffer [4096]byte // version 1 has a line of about 200 bytes for each of 12 controllers
	text, err := read(processFile(procRoot, pid, "cgroup"), buffer[:])
	if err != nil {
		return Membership{}, err
	}
	m, err := Parse(string(text))
	if err != nil {
		return Membership{}, fmt.Errorf("process %d: %w", pid, err)
	}
	return m, nil
}

// read reads a small file of the kernel, into a buffer if it fits. It makes half of the
// system calls of os.ReadFile, and a pass over many processes consists of them: the
// kernel writes such files at once, so that less than was asked for is the end.
func read(path string, buffer []byte) ([]byte, error) {
	fd, err := syscall.Open(path, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	for errors.Is(err, syscall.EINTR) {
		fd, err = syscall.Open(path, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	}
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer syscall.Close(fd) //nolint:errcheck // opened for reading
	length := 0
	for {
		n, err := syscall.Read(fd, buffer[length:])
		switch {
		case errors.Is(err, syscall.EINTR):
			continue
		case err != nil:
			return nil, &fs.PathError{Op: "read", Path: path, Err: err}
		}
		length += n
		if length < len(buffer) {
			return buffer[:length], nil
		}
		buffer = append(buffer, make([]byte, len(buffer))...)
	}
}

func processFile(procRoot string, pid int, name string) string {
	return filepath.Join(procRoot, strconv.Itoa(pid), name)
}

// parseStat reads the text of /proc/<pid>/stat. The second field, the name of the
// program in parentheses, may contain everything, such as spaces and parentheses.
func parseStat(text []byte) (Process, error) {
	i := bytes.LastIndexByte(text, ')')
	if i < 0 {
		return Process{}, errors.New("stat has no program name")
	}
	const state, startTime = 3, 22 // numbers of fields, from 1
	p, number := Process{}, 2
	for field := range bytes.FieldsSeq(text[i+1:]) {
		number++
		switch number {
		case state:
			p.Exiting = bytes.ContainsAny(field, "ZXx")
		case startTime:
			start, err := strconv.ParseUint(string(field), 10, 64)
			if err != nil {
				return Process{}, fmt.Errorf("start time in stat: %w", err)
			}
			p.Start = start
			return p, nil
		}
	}
	return Process{}, fmt.Errorf("stat has only %d fields", number)
}
