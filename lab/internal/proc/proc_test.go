package proc_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/lab/internal/proc"
)

// sleeper returns a daemon that runs a copy of sleep under a path of its own.
func sleeper(t *testing.T) *proc.Daemon {
	t.Helper()
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(sleep)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	path := filepath.Join(dir, "sleep")
	if err := os.WriteFile(path, data, 0o755); err != nil {
		t.Fatal(err)
	}
	d := &proc.Daemon{Name: "sleeper", Path: path, Args: []string{"60"}, LogDir: dir, PIDDir: dir}
	t.Cleanup(func() {
		if id, running := d.Running(); running {
			if err := id.Signal(syscall.SIGKILL); err != nil {
				t.Error(err)
			}
		}
	})
	return d
}

func TestStartStop(t *testing.T) {
	d := sleeper(t)
	if _, running := d.Running(); running {
		t.Fatal("runs before it was started")
	}
	first := start(t, d)
	if again := start(t, d); again != first {
		t.Errorf("started twice: %v and %v", first, again)
	}
	if session := first.Session(); session != first.PID {
		t.Errorf("process %d is in session %d, want one of its own", first.PID, session)
	}
	if age := time.Since(d.Since()); age < 0 || age > time.Minute {
		t.Errorf("running since %v", d.Since())
	}
	if err := d.Stop(t.Context(), time.Minute); err != nil {
		t.Fatal(err)
	}
	if _, running := d.Running(); running || first.Alive() {
		t.Error("runs after it was stopped")
	}
	if err := d.Stop(t.Context(), time.Minute); err != nil {
		t.Errorf("stopping what does not run: %v", err)
	}
}

func TestFoundWithoutPIDFile(t *testing.T) {
	d := sleeper(t)
	id := start(t, d)
	if err := os.Remove(filepath.Join(d.PIDDir, "sleeper.pid")); err != nil {
		t.Fatal(err)
	}
	if found, running := d.Running(); !running || found != id {
		t.Errorf("found %v, %t; want %v", found, running, id)
	}
	if err := d.Kill(t.Context()); err != nil || id.Alive() {
		t.Errorf("kill: %v, alive %t", err, id.Alive())
	}
}

// A process that got the number of an old one is another process.
func TestNumberUsedAgain(t *testing.T) {
	d := sleeper(t)
	id, err := proc.Lookup(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if !id.Alive() {
		t.Error("this process does not count as alive")
	}
	stale := `{"pid":` + strconv.Itoa(id.PID) + `,"startTicks":1,"boot":"` + id.Boot + `"}`
	if err := os.WriteFile(filepath.Join(d.PIDDir, "sleeper.pid"), []byte(stale), 0o600); err != nil {
		t.Fatal(err)
	}
	if found, running := d.Running(); running {
		t.Errorf("process %v passes as the daemon", found)
	}
	id.Boot = "another boot"
	if id.Alive() {
		t.Error("a process of another boot counts as alive")
	}
}

func TestStaleAfterChange(t *testing.T) {
	d := sleeper(t)
	config := filepath.Join(t.TempDir(), "config")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("a")
	d.ConfigFiles = []string{config}
	if d.Stale() {
		t.Error("stale though it does not run")
	}
	start(t, d)
	if d.Stale() {
		t.Error("stale right after the start")
	}
	write("b")
	if !d.Stale() {
		t.Error("a changed configuration goes unnoticed")
	}
	write("a")
	d.Args = append(d.Args, "1")
	if !d.Stale() {
		t.Error("changed arguments go unnoticed")
	}
}

func TestFailedStart(t *testing.T) {
	d := sleeper(t)
	d.Path += "-missing"
	if err := d.Start(); err == nil || !strings.Contains(err.Error(), "sleeper") {
		t.Errorf("got error %v, want one that names the daemon", err)
	}
}

func TestLogTail(t *testing.T) {
	d := sleeper(t)
	d.Args = []string{"not a number"}
	if err := d.Start(); err != nil && !strings.Contains(err.Error(), "ended at once") {
		t.Fatal(err)
	}
	deadline := time.Now().Add(10 * time.Second)
	for !strings.Contains(d.LogTail(3), "not a number") {
		if time.Now().After(deadline) {
			t.Fatalf("the log ends with %q", d.LogTail(3))
		}
		<-time.After(10 * time.Millisecond)
	}
}

func start(t *testing.T, d *proc.Daemon) proc.ID {
	t.Helper()
	if err := d.Start(); err != nil {
		t.Fatal(err)
	}
	id, running := d.Running()
	if !running {
		t.Fatal("does not run after the start")
	}
	return id
}
