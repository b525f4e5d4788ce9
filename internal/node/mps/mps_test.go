package mps_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/limits"
	"github.com/divvy-gpu/divvy/internal/node/mps"
	"github.com/divvy-gpu/divvy/internal/testing/mpssim"
)

// TestMain is the vendor's program when it is called by its name.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == mpssim.Program {
		os.Exit(mpssim.Main(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

// node is a node with a service.
type node struct {
	*mps.Service
	t         *testing.T
	exclusive map[accel.DeviceID]bool
	modeErr   error
	program   string
	mu        sync.Mutex
	logged    []string
}

func newNode(t *testing.T) *node {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// The path of a socket has at most 107 bytes.
	dir, err := os.MkdirTemp("", "mps") //nolint:usetesting // as above
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	n := &node{t: t, exclusive: map[accel.DeviceID]bool{}, program: filepath.Join(dir, mpssim.Program)}
	if err := os.Symlink(self, n.program); err != nil {
		t.Fatal(err)
	}
	tool := func(ctx context.Context, env []string, args ...string) (*exec.Cmd, error) {
		cmd := exec.CommandContext(ctx, n.program, args...)
		cmd.Env = env
		return cmd, nil
	}
	n.Service = &mps.Service{Dir: filepath.Join(dir, "run"), Inside: filepath.Join(dir, "run"), Now: time.Now,
		Prepare: func(string) (mps.Tool, error) { return tool, nil },
		Open:    func(string) (mps.Modes, func(), error) { return n, func() {}, nil },
		Log: func(_ error, text string, id accel.DeviceID) {
			n.mu.Lock()
			defer n.mu.Unlock()
			n.logged = append(n.logged, string(id)+" "+text)
		}}
	return n
}

func (n *node) Exclusive(id accel.DeviceID) (bool, error) { return n.exclusive[id], n.modeErr }

func (n *node) SetExclusive(id accel.DeviceID, exclusive bool) error {
	n.exclusive[id] = exclusive
	return n.modeErr
}

func (n *node) wish(ids ...accel.DeviceID) {
	n.t.Helper()
	if err := mps.WriteWish(n.Dir, mps.Wish{Devices: ids, DriverRoot: "/"}); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) report() mps.Report {
	n.t.Helper()
	if err := n.Pass(n.t.Context()); err != nil {
		n.t.Fatal(err)
	}
	r, err := mps.ReadReport(n.Dir, time.Now())
	if err != nil {
		n.t.Fatal(err)
	}
	return r
}

func (n *node) simulate(id accel.DeviceID, s mpssim.State) {
	n.t.Helper()
	if err := mpssim.SetState(mps.PipeDir(n.Dir, id), s); err != nil {
		n.t.Fatal(err)
	}
}

func TestServiceFollowsTheWish(t *testing.T) {
	n := newNode(t)
	ctx, stop := context.WithCancel(t.Context())
	n.wish("GPU-a", "GPU-b")
	r := n.report()
	if a := r.Devices["GPU-a"]; a == nil || a.Problem != "" || a.Exclusive || !n.exclusive["GPU-a"] {
		t.Errorf("the first pass reports %+v, and the compute mode is exclusive: %t", a, n.exclusive["GPU-a"])
	}
	n.simulate("GPU-a", mpssim.State{Servers: []mpssim.Server{{PID: 7, State: "ACTIVE", Clients: []int{8, 9}}}})
	want := &mps.DeviceReport{Exclusive: true, Servers: []mps.Server{{PID: 7, State: "ACTIVE", Clients: []int{8, 9}}}}
	if diff := cmp.Diff(want, n.report().Devices["GPU-a"]); diff != "" {
		t.Errorf("with a server (-want +got):\n%s", diff)
	}

	n.wish("GPU-b")
	if r := n.report(); r.Devices["GPU-a"] != nil || !n.exclusive["GPU-a"] {
		t.Error("a daemon with clients was stopped")
	}
	n.wish("GPU-a", "GPU-b")
	if diff := cmp.Diff(want, n.report().Devices["GPU-a"]); diff != "" {
		t.Errorf("wanted again (-want +got):\n%s", diff)
	}
	n.wish("GPU-b")
	n.simulate("GPU-a", mpssim.State{})
	n.report()
	if n.exclusive["GPU-a"] || !n.exclusive["GPU-b"] {
		t.Errorf("without clients, the compute modes are %v", n.exclusive)
	}

	stop()
	if err := n.Run(ctx); err != nil || n.exclusive["GPU-b"] {
		t.Errorf("stopped: %v, compute modes are %v", err, n.exclusive)
	}
}

func TestServiceReportsFailures(t *testing.T) {
	n := newNode(t)
	n.wish("GPU-a")
	n.modeErr = errors.New("only root may")
	if p := n.report().Devices["GPU-a"].Problem; p != "read the compute mode: only root may" {
		t.Errorf("problem is %q", p)
	}
	n.modeErr = nil
	if err := os.Rename(n.program, n.program+"x"); err != nil {
		t.Fatal(err)
	}
	if p := n.report().Devices["GPU-a"].Problem; !strings.HasPrefix(p, "start the control daemon of MPS: ") ||
		!strings.Contains(p, "no such file") {
		t.Errorf("problem is %q", p)
	}
	if err := os.WriteFile(n.program, []byte("#!/bin/sh\necho cannot start >&2\nexit 3\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	if p := n.report().Devices["GPU-a"].Problem; p != "start the control daemon of MPS: it has ended (exit status 3): cannot start" {
		t.Errorf("problem is %q", p)
	}
	if err := os.Rename(n.program+"x", n.program); err != nil {
		t.Fatal(err)
	}
	if p := n.report().Devices["GPU-a"].Problem; p != "" {
		t.Errorf("problem is %q", p)
	}
	// Someone else ends the daemon.
	cmd := exec.CommandContext(t.Context(), n.program)
	cmd.Env, cmd.Stdin = []string{"CUDA_MPS_PIPE_DIRECTORY=" + mps.PipeDir(n.Dir, "GPU-a")}, strings.NewReader("quit\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	time.Sleep(100 * time.Millisecond)
	if p := n.report().Devices["GPU-a"].Problem; p != "" || !strings.Contains(strings.Join(n.logged, "\n"), "starting it again") {
		t.Errorf("problem is %q, log is %q", p, n.logged)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := n.Run(ended); err != nil {
		t.Error(err)
	}
}

func TestReportsAreCurrent(t *testing.T) {
	n := newNode(t)
	if _, err := mps.ReadReport(n.Dir, time.Now()); !errors.Is(err, mps.ErrNotRunning) {
		t.Errorf("without a report: %v", err)
	}
	n.wish()
	n.report()
	if _, err := mps.ReadReport(n.Dir, time.Now().Add(time.Minute)); !errors.Is(err, mps.ErrNotRunning) {
		t.Errorf("with one that is old: %v", err)
	}
}

func TestJudge(t *testing.T) {
	with := func(change func(*mps.DeviceReport), strangers []int, processes ...mps.Process) mps.Device {
		r := &mps.DeviceReport{Exclusive: true, Servers: []mps.Server{{PID: 7, State: "ACTIVE", Clients: []int{8}}}}
		change(r)
		return mps.Device{Report: r, Strangers: strangers, Processes: processes}
	}
	same := func(*mps.DeviceReport) {}
	before, stranger := []int{9}, mps.Process{PID: 9, Program: "python"}
	for name, tt := range map[string]struct {
		device    mps.Device
		want      limits.Cause
		strangers int
	}{
		"all is well":              {with(same, before, mps.Process{PID: 7, Program: "x"}, mps.Process{PID: 8, Program: "python"}), "", 0},
		"the driver's own program": {with(same, before, mps.Process{PID: 9, Program: "nvidia-persiste"}), "", 0},
		"a new process":            {with(same, nil, stranger), "", 1},
		"a stranger":               {with(same, before, stranger), limits.CauseProcess, 1},
		"no list":                  {mps.Device{Report: with(same, nil).Report, Unlisted: errors.New("x")}, limits.CauseProcesses, 0},
		"a problem":                {mps.Device{Problem: mps.ErrNotRunning, Report: with(same, nil).Report}, mps.CauseDaemon, 0},
		"no report":                {mps.Device{}, mps.CauseDaemon, 0},
		"no daemon":                {with(func(r *mps.DeviceReport) { r.Problem = "x" }, nil), mps.CauseDaemon, 0},
		"a fault":                  {with(func(r *mps.DeviceReport) { r.Servers[0].State = "FAULT" }, nil), mps.CauseFault, 0},
		"another mode":             {with(func(r *mps.DeviceReport) { r.Exclusive = false }, nil), mps.CauseMode, 0},
	} {
		t.Run(name, func(t *testing.T) {
			losses, strangers := mps.Judge(tt.device)
			var causes []limits.Cause
			for _, l := range losses {
				causes = append(causes, l.Cause)
				if l.Reason == "" {
					t.Errorf("%s has no reason", l.Cause)
				}
			}
			if len(causes) > 1 || len(causes) == 1 && causes[0] != tt.want || len(causes) == 0 && tt.want != "" ||
				len(strangers) != tt.strangers {
				t.Errorf("losses are %q, and strangers are %v; want %q and %d", causes, strangers, tt.want, tt.strangers)
			}
		})
	}
}

func TestPercent(t *testing.T) {
	for _, tt := range []struct {
		bytes, total uint64
		want         int
	}{{1, 1000, 1}, {5, 1000, 1}, {14, 1000, 1}, {15, 1000, 2}, {500, 1000, 50}, {1000, 1000, 100}, {2000, 1000, 100}, {1, 0, 100}} {
		if got := mps.Percent(tt.bytes, tt.total); got != tt.want {
			t.Errorf("Percent(%d, %d) = %d, want %d", tt.bytes, tt.total, got, tt.want)
		}
	}
}
