package mps_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
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
	stuck     chan struct{}
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

func (n *node) Exclusive(id accel.DeviceID) (bool, error) {
	n.wait(id)
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.exclusive[id], n.modeErr
}

func (n *node) SetExclusive(id accel.DeviceID, exclusive bool) error {
	n.wait(id)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.exclusive[id] = exclusive
	return n.modeErr
}

// wait is a call for GPU-a that does not return.
func (n *node) wait(id accel.DeviceID) {
	n.mu.Lock()
	stuck := n.stuck
	n.mu.Unlock()
	if id == "GPU-a" && stuck != nil {
		<-stuck
	}
}

// hang makes calls for GPU-a not return until the result is called.
func (n *node) hang() (end func()) {
	stuck := make(chan struct{})
	n.mu.Lock()
	defer n.mu.Unlock()
	n.stuck = stuck
	return sync.OnceFunc(func() { close(stuck) })
}

func (n *node) isExclusive(id accel.DeviceID) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.exclusive[id]
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
	r, err := mps.ReadReport(n.Dir, n.Now())
	if err != nil {
		n.t.Fatal(err)
	}
	return r
}

// recovers makes passes until a GPU has no problem.
func (n *node) recovers(id accel.DeviceID) {
	n.t.Helper()
	for start := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		p := "there is no report"
		if err := n.Pass(n.t.Context()); err == nil {
			if r, err := mps.ReadReport(n.Dir, time.Now()); err == nil && r.Devices[id] != nil {
				p = r.Devices[id].Problem
			}
		}
		if p == "" {
			return
		}
		if time.Since(start) > 2*time.Minute {
			n.t.Fatalf("%s does not recover: %s", id, p)
		}
	}
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
	n.published("GPU-a", true)
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
	n.published("GPU-a", false)
	n.published("GPU-b", false)
}

// TestServerBeforeClients: a server has the GPU before any container can be created, and one that does
// not start is not tried in each pass, but again.
func TestServerBeforeClients(t *testing.T) {
	n := newNode(t)
	n.wish("GPU-a")
	if s := n.report().Devices["GPU-a"].Servers; len(s) != 1 || s[0].State != "ACTIVE" || len(s[0].Clients) > 0 {
		t.Errorf("servers after the first pass are %+v, want one", s)
	}
	n.ended()

	n = newNode(t)
	n.wish("GPU-a")
	if err := os.MkdirAll(filepath.Dir(mps.PipeDir(n.Dir, "GPU-a")), 0o750); err != nil {
		t.Fatal(err)
	}
	n.simulate("GPU-a", mpssim.State{Refuses: true})
	tidied := false
	n.Tidy = func([]int) error { tidied = true; return nil }
	n.report()
	n.published("GPU-a", true)
	if tidied {
		t.Error("shared memory was tidied while a server may be starting")
	}
	n.simulate("GPU-a", mpssim.State{})
	if s := n.report().Devices["GPU-a"].Servers; len(s) > 0 {
		t.Errorf("servers are %+v: another attempt was made", s)
	}
	n.Now = func() time.Time { return time.Now().Add(time.Hour) }
	if s := n.report().Devices["GPU-a"].Servers; len(s) != 1 {
		t.Errorf("servers are %+v an hour later: no other attempt was made", s)
	}
	n.Now = time.Now
	n.simulate("GPU-a", mpssim.State{Servers: []mpssim.Server{{PID: 7, State: "ACTIVE"}}})
	n.report()
	n.simulate("GPU-a", mpssim.State{})
	if s := n.report().Devices["GPU-a"].Servers; len(s) != 1 || s[0].PID == 7 {
		t.Errorf("servers are %+v after the server has ended, want another one", s)
	}
}

// published checks whether containers of a GPU can be created, and then reach its control daemon.
func (n *node) published(id accel.DeviceID, want bool) {
	n.t.Helper()
	_, err := os.Stat(filepath.Join(mps.PipeDir(n.Dir, id), "control"))
	if _, there := os.Lstat(mps.PipeDir(n.Dir, id)); (there == nil) != want || (err == nil) != want {
		n.t.Errorf("the pipes of %s are there: %t, and the socket: %v; want %t", id, there == nil, err, want)
	}
}

// gone makes a pass and returns the problem of GPU-a, whose pipes containers must not have then.
func (n *node) gone() string {
	n.t.Helper()
	problem := n.report().Devices["GPU-a"].Problem
	n.published("GPU-a", false)
	return problem
}

func (n *node) ended() {
	ctx, cancel := context.WithCancel(n.t.Context())
	cancel()
	if err := n.Run(ctx); err != nil {
		n.t.Error(err)
	}
}

// TestServiceRemovesStalePipes: what a service that was killed has left is not for containers.
func TestServiceRemovesStalePipes(t *testing.T) {
	n := newNode(t)
	if err := os.MkdirAll(filepath.Join(mps.PipeDir(n.Dir, "GPU-a"), "control"), 0o750); err != nil {
		t.Fatal(err)
	}
	n.ended()
	n.published("GPU-a", false)
}

// TestServiceRecovers: a daemon that never answers again is replaced, and one that answers too much
// costs no memory.
func TestServiceRecovers(t *testing.T) {
	n := newNode(t)
	n.wish("GPU-a")
	n.report()
	socket := filepath.Join(mps.PipeDir(n.Dir, "GPU-a"), "control")
	if err := os.Remove(socket); err != nil {
		t.Fatal(err)
	}
	if p := n.gone(); !strings.Contains(p, "Cannot find MPS control daemon") {
		t.Errorf("without the socket the problem is %q", p)
	}
	if p := n.report().Devices["GPU-a"].Problem; p != "" {
		t.Errorf("the daemon was not started again: %s", p)
	}
	n.published("GPU-a", true)

	n.simulate("GPU-a", mpssim.State{Floods: true})
	if p := n.gone(); !strings.Contains(p, "longer than 65536 bytes") || len(p) > 400 {
		t.Errorf("the problem of an endless answer is %q", p)
	}
	n.simulate("GPU-a", mpssim.State{Servers: []mpssim.Server{{PID: 7, State: "ACTIVE", Clients: []int{os.Getpid()}}}})
	n.report()
	n.simulate("GPU-a", mpssim.State{Floods: true})
	for range 4 {
		n.gone()
	}
	if n.logs("is ended to be started again") != 1 {
		t.Errorf("a daemon whose client runs was ended: %q", n.logged)
	}
	n.simulate("GPU-a", mpssim.State{Servers: []mpssim.Server{{PID: 7, State: "ACTIVE", Clients: []int{1 << 30}}}})
	n.report()
	n.simulate("GPU-a", mpssim.State{Floods: true})
	for range 3 {
		n.gone()
	}
	n.simulate("GPU-a", mpssim.State{})
	if p := n.report().Devices["GPU-a"].Problem; p != "" || n.logs("is ended to be started again") != 2 {
		t.Errorf("a daemon without clients was not replaced: %q, %q", p, n.logged)
	}
	n.simulate("GPU-a", mpssim.State{Floods: true})
	n.wish()
	for range 3 {
		n.report()
	}
	if n.exclusive["GPU-a"] {
		t.Error("a daemon that is not wanted and does not answer keeps the compute mode")
	}
	n.ended()
}

func (n *node) logs(text string) (count int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, l := range n.logged {
		if strings.Contains(l, text) {
			count++
		}
	}
	return count
}

// TestServiceWithAStuckDriver: a driver that cannot be opened is reported, and used again later.
func TestServiceWithAStuckDriver(t *testing.T) {
	n := newNode(t)
	n.Wait = 100 * time.Millisecond
	stuck, open := make(chan struct{}), n.Open
	n.Open = func(root string) (mps.Modes, func(), error) {
		<-stuck
		return open(root)
	}
	n.wish("GPU-a")
	for range 2 {
		err := n.Pass(t.Context())
		r, _ := mps.ReadReport(n.Dir, time.Now())
		if d := r.Devices["GPU-a"]; err == nil || d == nil || !strings.Contains(d.Problem, "does not respond") {
			t.Errorf("the driver hangs, and the report is %+v, %v", d, err)
		}
	}
	close(stuck)
	n.Wait = 0
	n.recovers("GPU-a")
	n.ended()
}

// TestServiceGoesOn: a driver that does not return for one GPU leaves the others alone, also at the
// end.
func TestServiceGoesOn(t *testing.T) {
	n := newNode(t)
	n.wish("GPU-a", "GPU-b")
	n.report()
	n.Wait = 5 * time.Second // enough for the other GPU on a busy machine
	end := n.hang()
	for range 2 {
		if p := n.gone(); !strings.Contains(p, "does not respond") {
			t.Errorf("the problem of a GPU that hangs is %q", p)
		}
		if p := n.report().Devices["GPU-b"].Problem; p != "" {
			t.Errorf("the other GPU: %s", p)
		}
	}
	end()
	n.recovers("GPU-a")
	n.published("GPU-a", true)
	var left []int
	n.Tidy = func(servers []int) error { left = append(left, servers...); return nil }
	n.simulate("GPU-a", mpssim.State{Servers: []mpssim.Server{{PID: 7, State: "ACTIVE", Clients: []int{8}}}})
	n.report()
	if left != nil {
		t.Error("shared memory was tidied that a client uses")
	}
	n.simulate("GPU-a", mpssim.State{Servers: []mpssim.Server{{PID: 7, State: "ACTIVE"}}})
	if n.report(); !slices.Contains(left, 7) {
		t.Errorf("without clients, servers are %v", left)
	}
	defer n.hang()()
	begun := time.Now()
	if n.ended(); time.Since(begun) > 20*time.Second || n.isExclusive("GPU-b") {
		t.Errorf("the service ended after %v, and the other GPU is exclusive: %t", time.Since(begun), n.isExclusive("GPU-b"))
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
	n.published("GPU-a", false)
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
	if _, err := mps.ReadReport(n.Dir, time.Now().Add(-time.Minute)); !errors.Is(err, mps.ErrNotRunning) {
		t.Errorf("with one from the future: %v", err)
	}
}

func TestJudge(t *testing.T) {
	with := func(change func(*mps.DeviceReport), strangers []int, processes ...limits.Process) mps.Device {
		r := &mps.DeviceReport{Exclusive: true, Servers: []mps.Server{{PID: 7, State: "ACTIVE", Clients: []int{8}}}}
		change(r)
		return mps.Device{Report: r, Strangers: strangers, Processes: processes}
	}
	same := func(*mps.DeviceReport) {}
	before, stranger := []int{9}, limits.Process{PID: 9, Program: "python"}
	first := with(same, nil, stranger)
	first.First = true
	for name, tt := range map[string]struct {
		device    mps.Device
		want      limits.Cause
		strangers int
	}{
		"all is well": {with(same, before, limits.Process{PID: 7, Program: "x"},
			limits.Process{PID: 8, Program: "python"}), "", 0},
		"the driver's own program": {with(same, before, limits.Process{PID: 9, Program: "nvidia-persiste"}), "", 0},
		"a new process":            {with(same, nil, stranger), "", 1},
		"the first pass":           {first, limits.CauseProcess, 1},
		"a pod with such a name": {with(same, before, limits.Process{PID: 9, PodUID: "x", Program: "Xorg"}),
			limits.CauseProcess, 1},
		"a stranger":   {with(same, before, stranger), limits.CauseProcess, 1},
		"no list":      {mps.Device{Report: with(same, nil).Report, Unlisted: errors.New("x")}, limits.CauseProcesses, 0},
		"a problem":    {mps.Device{Problem: mps.ErrNotRunning, Report: with(same, nil).Report}, mps.CauseDaemon, 0},
		"no report":    {mps.Device{}, mps.CauseDaemon, 0},
		"no daemon":    {with(func(r *mps.DeviceReport) { r.Problem = "x" }, nil), mps.CauseDaemon, 0},
		"a fault":      {with(func(r *mps.DeviceReport) { r.Servers[0].State = "FAULT" }, nil), mps.CauseFault, 0},
		"another mode": {with(func(r *mps.DeviceReport) { r.Exclusive = false }, nil), mps.CauseMode, 0},
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
