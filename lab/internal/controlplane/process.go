package controlplane

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/procfs"

	"github.com/divvy-gpu/divvy/lab/internal/proc"
)

// Process is a child of this program. It is safe for concurrent use.
type Process struct {
	name, log string
	cmd       *exec.Cmd
	ended     chan struct{}

	mu  sync.Mutex
	err error // how it ended
}

// StartProcess starts a program whose output goes to a file, behind what is there.
// It ends with this one, also when this one is killed.
func StartProcess(name, path, log string, env []string, args ...string) (*Process, error) {
	file, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o640)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	defer file.Close() //nolint:errcheck // the child holds its own copy
	cmd := exec.Command(path, args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = file, file
	// A group of its own: an interrupt at the terminal reaches this program alone,
	// which ends the others in their order.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	p := &Process{name: name, log: log, cmd: cmd, ended: make(chan struct{})}
	go func() {
		err := cmd.Wait()
		p.mu.Lock()
		p.err = err
		p.mu.Unlock()
		close(p.ended)
	}()
	return p, nil
}

// Name is the name that the process was started under.
func (p *Process) Name() string { return p.name }

// PID is its number.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// LogPath is the file with its output.
func (p *Process) LogPath() string { return p.log }

// LogTail returns the last lines of its output.
func (p *Process) LogTail(lines int) string { return proc.Tail(p.log, lines) }

// Running reports whether it has not ended.
func (p *Process) Running() bool {
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

// Err says how a process ended that nobody asked to: never nil.
func (p *Process) Err() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err == nil {
		return errors.New("exit status 0")
	}
	return p.err
}

// Stop asks the process to end, waits for it up to grace, and kills it then. One
// that has ended is no error.
func (p *Process) Stop(grace time.Duration) error {
	if err := p.signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case <-p.ended:
		return nil
	case <-time.After(grace):
		return p.Kill()
	}
}

// Kill ends the process at once and waits until it is gone.
func (p *Process) Kill() error {
	if err := p.signal(syscall.SIGKILL); err != nil {
		return err
	}
	<-p.ended
	return nil
}

func (p *Process) signal(signal syscall.Signal) error {
	if err := p.cmd.Process.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("end %s: %w", p.name, err)
	}
	return nil
}

// Usage is what a process has used of the machine.
type Usage struct {
	// CPU is the time that it has computed, in user and kernel mode.
	CPU time.Duration
	// Resident and Peak are its resident memory in bytes: now, and at most so far.
	Resident, Peak int64
	// File is the part of Resident that is pages of files, such as the program itself. The
	// kernel drops them before a memory limit ends a process.
	File int64
}

// Usage returns what the process has used so far.
func (p *Process) Usage() (Usage, error) { return UsageOf(p.PID()) }

// UsageOf returns what the process with this number has used so far.
func UsageOf(pid int) (Usage, error) {
	var stat procfs.ProcStat
	var status procfs.ProcStatus
	process, err := procfs.NewProc(pid)
	if err == nil {
		stat, err = process.Stat()
	}
	if err == nil {
		status, err = process.NewStatus()
	}
	if err != nil {
		return Usage{}, fmt.Errorf("usage of process %d: %w", pid, err)
	}
	return Usage{
		CPU:      time.Duration(stat.CPUTime() * float64(time.Second)),
		Resident: int64(status.VmRSS), Peak: int64(status.VmHWM), File: int64(status.RssFile), //nolint:gosec // no process has 8 EiB
	}, nil
}
