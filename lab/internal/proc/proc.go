// Package proc starts programs that outlive the command that started them, and
// finds, watches and ends them later. A process is known by its pid together
// with its start time and the boot it belongs to, so a number used again by the
// system is never taken for the old process.
package proc

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// Daemon describes one background program.
type Daemon struct {
	// Name names the program in messages, its log NAME.log and NAME.pid.
	Name string
	// Path is the absolute path of the program. No other daemon shares it: a
	// process that runs it is this daemon even when its pid file is gone.
	Path string
	Args []string
	// Env is added to the environment of the caller.
	Env []string
	// ConfigFiles are read at the start only: when one of them changed, the
	// running daemon is Stale.
	ConfigFiles []string
	// LogDir and PIDDir are existing folders.
	LogDir, PIDDir string
}

// ID identifies a process beyond its number.
type ID struct {
	PID int `json:"pid"`
	// StartTicks is the start time in clock ticks since boot.
	StartTicks uint64 `json:"startTicks"`
	// Boot is the kernel's id of this boot.
	Boot string `json:"boot"`
}

// pidFile is what is stored about a started daemon.
type pidFile struct {
	ID
	// Spec is the digest of how the daemon was started.
	Spec    string    `json:"spec"`
	Started time.Time `json:"started"`
}

// maxLogSize is the size in bytes above which a log is set aside at a start.
const maxLogSize = 64 << 20

// LogPath is the file that receives what the daemon prints.
func (d *Daemon) LogPath() string { return filepath.Join(d.LogDir, d.Name+".log") }

func (d *Daemon) pidPath() string { return filepath.Join(d.PIDDir, d.Name+".pid") }

// Running returns the daemon's process.
func (d *Daemon) Running() (ID, bool) {
	if stored, err := d.readPIDFile(); err == nil && stored.Alive() {
		return stored.ID, true
	}
	// No pid file: the command that started it may have died before it wrote one.
	for _, id := range All() {
		if exe, err := id.Executable(); err == nil && exe == d.Path {
			return id, true
		}
	}
	return ID{}, false
}

// Stale reports whether the daemon runs, but was started in another way than
// it would be now.
func (d *Daemon) Stale() bool {
	stored, err := d.readPIDFile()
	if err != nil || !stored.Alive() {
		_, running := d.Running()
		return running
	}
	spec, err := d.spec()
	return err != nil || spec != stored.Spec
}

// Since returns when the daemon was started, the zero time when unknown.
func (d *Daemon) Since() time.Time {
	stored, err := d.readPIDFile()
	if err != nil || !stored.Alive() {
		return time.Time{}
	}
	return stored.Started
}

// Start starts the daemon in a session of its own with its output in LogPath.
// It does nothing when the daemon runs.
func (d *Daemon) Start() error {
	if _, running := d.Running(); running {
		return nil
	}
	spec, err := d.spec()
	if err != nil {
		return err
	}
	log, err := d.openLog()
	if err != nil {
		return err
	}
	defer log.Close() //nolint:errcheck // the daemon holds its own copy
	cmd := exec.Command(d.Path, d.Args...)
	cmd.Env = append(os.Environ(), d.Env...)
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", d.Name, err)
	}
	id, idErr := Lookup(cmd.Process.Pid)
	// Reap it if it ends while this program still runs; or else it stays as a
	// zombie until then.
	go cmd.Wait() //nolint:errcheck // how it ended is in its log
	if idErr != nil {
		return fmt.Errorf("%s ended at once; the end of %s:\n%s", d.Name, d.LogPath(), d.LogTail(10))
	}
	data, err := json.Marshal(pidFile{ID: id, Spec: spec, Started: time.Now().UTC().Truncate(time.Second)})
	if err != nil {
		return fmt.Errorf("encode the pid file of %s: %w", d.Name, err)
	}
	temporary := d.pidPath() + ".tmp"
	if err := errors.Join(os.WriteFile(temporary, append(data, '\n'), 0o644), os.Rename(temporary, d.pidPath())); err != nil {
		return fmt.Errorf("write the pid file of %s: %w", d.Name, err)
	}
	return nil
}

// Stop asks the daemon to end, waits up to grace for it, and kills it then.
func (d *Daemon) Stop(ctx context.Context, grace time.Duration) error {
	return d.end(ctx, syscall.SIGTERM, grace)
}

// Kill ends the daemon with SIGKILL.
func (d *Daemon) Kill(ctx context.Context) error {
	return d.end(ctx, syscall.SIGKILL, 0)
}

func (d *Daemon) end(ctx context.Context, first syscall.Signal, grace time.Duration) error {
	for {
		id, running := d.Running()
		if !running {
			break
		}
		if err := id.End(ctx, first, grace); err != nil {
			return fmt.Errorf("stop %s: %w", d.Name, err)
		}
	}
	if err := os.Remove(d.pidPath()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the pid file of %s: %w", d.Name, err)
	}
	return nil
}

// LogTail returns the last lines of the daemon's log, as Tail does.
func (d *Daemon) LogTail(lines int) string { return Tail(d.LogPath(), lines) }

// Tail returns the last lines of a file, as far as they are within its last 16 KiB, or
// why it cannot be read.
func Tail(path string, lines int) string {
	file, err := os.Open(path)
	if err != nil {
		return err.Error()
	}
	defer file.Close() //nolint:errcheck // only read
	const window = 16 << 10
	info, err := file.Stat()
	if err != nil {
		return err.Error()
	}
	buffer := make([]byte, min(window, info.Size()))
	if _, err := file.ReadAt(buffer, info.Size()-int64(len(buffer))); err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimRight(string(buffer), "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

func (d *Daemon) openLog() (*os.File, error) {
	if info, err := os.Stat(d.LogPath()); err == nil && info.Size() > maxLogSize {
		if err := os.Rename(d.LogPath(), d.LogPath()+".1"); err != nil {
			return nil, fmt.Errorf("set the log of %s aside: %w", d.Name, err)
		}
	}
	file, err := os.OpenFile(d.LogPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o640)
	if err != nil {
		return nil, fmt.Errorf("open the log of %s: %w", d.Name, err)
	}
	return file, nil
}

func (d *Daemon) readPIDFile() (pidFile, error) {
	var stored pidFile
	data, err := os.ReadFile(d.pidPath())
	if err != nil {
		return stored, err
	}
	if err := json.Unmarshal(data, &stored); err != nil {
		return stored, fmt.Errorf("%s: %w", d.pidPath(), err)
	}
	return stored, nil
}

func (d *Daemon) spec() (string, error) {
	h := sha256.New()
	fmt.Fprintf(h, "%q %q %q\n", d.Path, d.Args, d.Env)
	for _, path := range d.ConfigFiles {
		data, err := os.ReadFile(path)
		if err != nil {
			return "", fmt.Errorf("read the configuration of %s: %w", d.Name, err)
		}
		fmt.Fprintf(h, "%q %d\n%s", path, len(data), data)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
