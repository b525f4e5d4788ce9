package proc_test

import (
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/lab/internal/proc"
)

// leaderless makes this program one whose first thread has ended and whose
// others live on.
const leaderless = "PROC_TEST_LEADERLESS"

func init() {
	if os.Getenv(leaderless) == "" {
		return
	}
	// Init functions run in the first thread.
	runtime.LockOSThread()
	go func() {
		<-time.After(time.Minute)
		os.Exit(0)
	}()
	_, _, _ = syscall.Syscall(syscall.SYS_EXIT, 0, 0, 0)
}

// A daemon that was killed is there until its last thread has ended: the
// others may still be in calls that write files.
func TestFirstThreadEndsFirst(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	id, reap := spawn(t, exec.Command(exe))
	deadline := time.Now().Add(10 * time.Second)
	for firstThreadRuns(t, id) {
		if time.Now().After(deadline) {
			t.Fatal("the first thread does not end")
		}
		<-time.After(10 * time.Millisecond)
	}
	if !id.Alive() {
		t.Error("a process of which threads run does not count as alive")
	}
	if got, err := id.Executable(); err != nil || got != exe {
		t.Errorf("it runs %q, %v; want %q", got, err, exe)
	}
	if err := id.End(t.Context(), syscall.SIGKILL, 0); err != nil || id.Alive() {
		t.Errorf("end: %v, alive %t", err, id.Alive())
	}
	reap()
}

// A process that nobody has reaped yet has ended.
func TestZombieHasEnded(t *testing.T) {
	id, reap := spawn(t, exec.Command("sleep", "60"))
	if err := id.End(t.Context(), syscall.SIGKILL, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat("/proc/" + strconv.Itoa(id.PID)); err != nil {
		t.Fatalf("it is no zombie: %v", err)
	}
	if id.Alive() {
		t.Error("a zombie counts as alive")
	}
	if _, err := proc.Lookup(id.PID); err == nil {
		t.Error("a zombie is found")
	}
	for _, other := range proc.All() {
		if other == id {
			t.Error("a zombie is among all that live")
		}
	}
	reap()
}

// spawn starts a child; reap waits for it.
func spawn(t *testing.T, cmd *exec.Cmd) (id proc.ID, reap func()) {
	t.Helper()
	cmd.Env = append(os.Environ(), leaderless+"=1")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	id, err := proc.Lookup(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	return id, func() { _ = cmd.Wait() }
}

func firstThreadRuns(t *testing.T, id proc.ID) bool {
	t.Helper()
	data, err := os.ReadFile("/proc/" + strconv.Itoa(id.PID) + "/stat")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(data), ") ")
	return !strings.HasPrefix(rest, "Z")
}
