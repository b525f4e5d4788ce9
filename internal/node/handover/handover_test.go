package handover

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// What a process says in the tests.
const (
	remembered = "what the first remembers"
	sockets    = "where the second serves"
	unnoticed  = "what the second has to renew"
)

var (
	first  = Identity{Group: "divvy-system", ID: "first"}
	second = Identity{Group: "divvy-system", ID: "second"}
	third  = Identity{Group: "divvy-system", ID: "third"}
)

// TestMain plays a process of its own where the environment says so: one side of a
// handover up to a step, at which it says so and waits to be killed.
func TestMain(m *testing.M) {
	side, step, dir := os.Getenv("HANDOVER_SIDE"), os.Getenv("HANDOVER_STEP"), os.Getenv("HANDOVER_DIR")
	if side == "" {
		os.Exit(m.Run())
	}
	at := func(here string) {
		if here == step {
			fmt.Println(here)
			select {}
		}
	}
	if err := map[string]func(string, func(string)) error{"first": playFirst, "second": playSecond}[side](dir, at); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

func playFirst(dir string, at func(string)) error {
	seat, err := Open(dir, first)
	if err != nil {
		return err
	}
	if held, err := seat.Take(); !held {
		return fmt.Errorf("not free: %w", err)
	}
	if err := seat.Listen(context.Background()); err != nil {
		return err
	}
	fmt.Println("listening")
	at("listens")
	request := <-seat.Requests()
	at("was asked")
	if err := request.Pass(remembered); err != nil {
		return err
	}
	at("has passed")
	var got string
	if err := request.Await(context.Background(), &got); err != nil {
		return err
	}
	at("knows")
	return request.Left(unnoticed)
}

func playSecond(dir string, at func(string)) error {
	seat, err := Open(dir, second)
	if err != nil {
		return err
	}
	at("is there")
	predecessor, err := seat.Ask(context.Background())
	if err != nil {
		return err
	}
	at("has the lock")
	var left string
	if err := predecessor.Serving(sockets, &left); err != nil {
		return err
	}
	at("serves")
	return nil
}

// process starts one side as a process of its own and returns once it is at the
// step. kill kills it.
func process(t *testing.T, dir, side, step string) (kill func()) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), "HANDOVER_SIDE="+side, "HANDOVER_STEP="+step, "HANDOVER_DIR="+dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	reached := make(chan string)
	go func() {
		for lines.Scan() {
			reached <- lines.Text()
		}
		close(reached)
	}()
	wait := func(line string) {
		if got := <-reached; got != line {
			t.Errorf("the %s: %q, want %q", side, got, line)
		}
	}
	if side == "first" {
		wait("listening")
	}
	arrived := make(chan struct{})
	go func() {
		defer close(arrived)
		wait(step)
	}()
	return func() {
		<-arrived
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
}

// shortDir is a folder for a socket, whose path has 107 characters at most.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "ho") //nolint:usetesting // its path is too long
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func open(t *testing.T, dir string, who Identity) *Seat {
	t.Helper()
	s, err := Open(dir, who)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// holder returns a seat that has the lock and listens.
func holder(t *testing.T, dir string) *Seat {
	t.Helper()
	s := open(t, dir, first)
	if !takes(t, s) {
		t.Fatal("the lock is not free")
	}
	if err := s.Listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s
}

func takes(t *testing.T, s *Seat) bool {
	t.Helper()
	held, err := s.Take()
	if err != nil {
		t.Fatal(err)
	}
	return held
}

// asks asks in the background.
func asks(t *testing.T, s *Seat) <-chan result {
	t.Helper()
	out := make(chan result, 1)
	go func() {
		p, err := s.Ask(t.Context())
		out <- result{p, err}
	}()
	return out
}

type result struct {
	*Predecessor
	err error
}

func TestLockIsOfOneProcess(t *testing.T) {
	dir := shortDir(t)
	a, b := open(t, dir, first), open(t, dir, second)
	if !takes(t, a) || takes(t, b) {
		t.Fatal("two processes have the lock, or none")
	}
	if _, err := b.Ask(t.Context()); !errors.Is(err, ErrSilent) {
		t.Errorf("one that does not listen: %v", err)
	}
	a.Close()
	if !takes(t, b) {
		t.Error("no process has it, and it is not free")
	}
}

func TestHandover(t *testing.T) {
	dir := shortDir(t)
	a, b, other := holder(t, dir), open(t, dir, second), open(t, dir, third)
	asked := asks(t, b)
	request := <-a.Requests()
	if request.From != second {
		t.Errorf("asked by %v", request.From)
	}
	if err := request.Pass(remembered); err != nil {
		t.Fatal(err)
	}
	got := <-asked
	if got.err != nil || string(got.Content) != `"`+remembered+`"` {
		t.Fatalf("%s, %v", got.Content, got.err)
	}
	if takes(t, other) {
		t.Fatal("the lock was free in between")
	}
	left := make(chan string, 1)
	go func() {
		var text string
		if err := got.Serving(sockets, &text); err != nil {
			text = err.Error()
		}
		left <- text
	}()
	var where string
	if err := request.Await(t.Context(), &where); err != nil || where != sockets {
		t.Fatalf("%q, %v", where, err)
	}
	if err := request.Left(unnoticed); err != nil {
		t.Fatal(err)
	}
	if text := <-left; text != unnoticed {
		t.Errorf("the second got %q", text)
	}
	a.Close()
	if takes(t, other) {
		t.Fatal("the lock is free once the first has closed it")
	}
	if err := b.Listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	// The first is started once more: it does not take back what it passed on.
	again := open(t, dir, first)
	if _, err := again.Ask(t.Context()); !errors.Is(err, ErrRetired) {
		t.Errorf("it asks again: %v", err)
	}
	asked = asks(t, other)
	request = <-b.Requests()
	request.Close()
	if got := <-asked; got.err == nil {
		t.Error("it took over from one that hung up")
	}
	b.Close()
	if !takes(t, again) {
		t.Error("it is not free once all have ended")
	}
}

func TestRejectedRequests(t *testing.T) {
	tests := map[string]struct {
		who  Identity
		want string
	}{
		"of another group":       {Identity{Group: "another", ID: "x"}, `it belongs to "divvy-system"`},
		"of no group":            {Identity{ID: "x"}, "this one belongs to no group"},
		"of the same identity":   {first, "it has the same identity"},
		"of an unknown protocol": {Identity{Group: "divvy-system", ID: "x"}, "version 99"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			dir := shortDir(t)
			a := holder(t, dir)
			var err error
			if strings.Contains(tt.want, "version") {
				conn, dialErr := net.DialUnix("unix", nil, &net.UnixAddr{Name: filepath.Join(dir, SocketName), Net: "unix"})
				if dialErr != nil {
					t.Fatal(dialErr)
				}
				defer conn.Close() //nolint:errcheck // of a test
				if sendErr := send(conn, message{Version: 99, From: tt.who}, nil); sendErr != nil {
					t.Fatal(sendErr)
				}
				m, receiveErr := receive(conn)
				err = errors.Join(receiveErr, &RejectedError{m.Rejected})
			} else {
				_, err = open(t, dir, tt.who).Ask(t.Context())
			}
			var rejected *RejectedError
			if !errors.As(err, &rejected) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %q", err, tt.want)
			}
			if takes(t, open(t, dir, third)) || !takes(t, a) {
				t.Error("the lock has moved")
			}
		})
	}
}

// TestSuccessorDies kills the second at each step: before it says that it serves,
// the first goes on and can be asked again, and no third process gets the lock.
func TestSuccessorDies(t *testing.T) {
	for _, step := range []string{"is there", "has the lock"} {
		t.Run(step, func(t *testing.T) {
			dir := shortDir(t)
			a, other := holder(t, dir), open(t, dir, third)
			kill := process(t, dir, "second", step)
			if step != "is there" {
				request := <-a.Requests()
				if err := request.Pass(remembered); err != nil {
					t.Fatal(err)
				}
				kill()
				var where string
				if err := request.Await(t.Context(), &where); err == nil {
					t.Fatalf("it serves at %q", where)
				}
				request.Close()
				if err := a.Listen(t.Context()); err != nil {
					t.Fatal(err)
				}
			} else {
				kill()
			}
			if takes(t, other) {
				t.Fatal("another one got the lock")
			}
			asked := asks(t, other)
			request := <-a.Requests()
			if err := request.Pass(remembered); err != nil {
				t.Fatal(err)
			}
			if got := <-asked; got.err != nil {
				t.Errorf("the next that asks: %v", got.err)
			}
		})
	}
	t.Run("serves", func(t *testing.T) {
		dir := shortDir(t)
		a, other := holder(t, dir), open(t, dir, third)
		kill := process(t, dir, "second", "serves")
		request := <-a.Requests()
		var where string
		if err := errors.Join(request.Pass(remembered), request.Await(t.Context(), &where), request.Left(unnoticed)); err != nil {
			t.Fatal(err)
		}
		a.Close()
		kill()
		if !takes(t, other) {
			t.Error("the lock is not free")
		}
	})
}

// TestPredecessorDies kills the first at each step: from the moment it has passed
// the lock on, the second has it; before, the lock is free for all.
func TestPredecessorDies(t *testing.T) {
	for _, step := range []string{"listens", "was asked", "has passed", "knows"} {
		t.Run(step, func(t *testing.T) {
			dir := shortDir(t)
			kill := process(t, dir, "first", step)
			b := open(t, dir, second)
			if step == "listens" {
				kill()
				if _, err := b.Ask(t.Context()); !errors.Is(err, ErrSilent) {
					t.Errorf("asked a dead one: %v", err)
				}
				if !takes(t, b) {
					t.Error("the lock is not free")
				}
				return
			}
			asked := asks(t, b)
			if step == "was asked" {
				kill()
				if got := <-asked; got.err == nil {
					t.Fatal("a dead one passed it on")
				}
				if !takes(t, b) {
					t.Error("the lock is not free")
				}
				return
			}
			got := <-asked
			if got.err != nil {
				t.Fatal(got.err)
			}
			if step == "has passed" {
				kill()
			} else {
				go kill() // once it knows
			}
			var left string
			if err := got.Serving(sockets, &left); err == nil {
				t.Errorf("a dead one says %q", left)
			}
			if takes(t, open(t, dir, third)) || !takes(t, b) {
				t.Error("the second does not have the lock alone")
			}
		})
	}
}

func TestAwaitEndsWithItsContext(t *testing.T) {
	dir := shortDir(t)
	a, b := holder(t, dir), open(t, dir, second)
	asked := asks(t, b)
	request := <-a.Requests()
	if err := request.Pass(remembered); err != nil {
		t.Fatal(err)
	}
	if got := <-asked; got.err != nil {
		t.Fatal(got.err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	var where string
	if err := request.Await(ctx, &where); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("waited: %v", err)
	}
}

// TestTwoAskAtOnce: one takes over, the other one asks the next time.
func TestTwoAskAtOnce(t *testing.T) {
	dir := shortDir(t)
	a := holder(t, dir)
	results := make(chan result, 2)
	for _, who := range []Identity{second, third} {
		asked := asks(t, open(t, dir, who))
		go func() { results <- <-asked }()
	}
	request := <-a.Requests()
	if err := request.Pass(remembered); err != nil {
		t.Fatal(err)
	}
	taken := 0
	for range 2 {
		if got := <-results; got.err == nil {
			taken++
		}
	}
	if taken != 1 {
		t.Errorf("%d have taken over", taken)
	}
}

func TestLongState(t *testing.T) {
	dir := shortDir(t)
	a, b := holder(t, dir), open(t, dir, second)
	asked := asks(t, b)
	request := <-a.Requests()
	long := strings.Repeat("x", 3<<20)
	if err := request.Pass(long); err != nil {
		t.Fatal(err)
	}
	if got := <-asked; got.err != nil || len(got.Content) != len(long)+2 {
		t.Errorf("%d bytes, %v", len(got.Content), got.err)
	}
}

func TestLockOfAFile(t *testing.T) {
	dir := shortDir(t)
	a := holder(t, dir)
	f, err := os.OpenFile(filepath.Join(dir, LockName), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // of a test
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := Lock(ctx, f); !errors.Is(err, ErrTaken) {
		t.Errorf("while another one has it: %v", err)
	}
	a.Close()
	if err := Lock(t.Context(), f); err != nil {
		t.Errorf("once it is free: %v", err)
	}
}

// A lock or a socket that was removed is made again: another process would take the node
// beside this one, or wait for its end.
func TestKeep(t *testing.T) {
	dir := shortDir(t)
	a := holder(t, dir)
	for _, name := range []string{LockName, SocketName} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
		if err := a.Keep(t.Context()); err != nil {
			t.Fatal(err)
		}
		b := open(t, dir, second)
		if takes(t, b) {
			t.Fatalf("the lock was free after %s was removed", name)
		}
		asked := asks(t, b)
		request := <-a.Requests()
		request.Close()
		<-asked
		b.Close()
	}
	if err := os.Remove(filepath.Join(dir, LockName)); err != nil {
		t.Fatal(err)
	}
	b := open(t, dir, second)
	if !takes(t, b) {
		t.Fatal("the lock of a new file is not free")
	}
	if err := a.Keep(t.Context()); !errors.Is(err, ErrTaken) {
		t.Errorf("two have a lock: %v", err)
	}
}

// A lock file that cannot be written does not end a handover: the predecessor would
// decide again beside its successor.
func TestHandoverWithoutWriting(t *testing.T) {
	dir := shortDir(t)
	a, b := open(t, dir, first), open(t, dir, second)
	readOnly, err := os.Open(a.file.Name())
	if err != nil {
		t.Fatal(err)
	}
	if err := a.file.Close(); err != nil {
		t.Fatal(err)
	}
	a.file = readOnly
	if !takes(t, a) {
		t.Fatal("the lock was free, and was not taken")
	}
	if err := a.Listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	asked := asks(t, b)
	request := <-a.Requests()
	if err := request.Pass(remembered); err != nil {
		t.Fatal(err)
	}
	got := <-asked
	if got.err != nil {
		t.Fatal(got.err)
	}
	var text string
	served := make(chan error, 1)
	go func() { served <- got.Serving(sockets, &text) }()
	var where string
	if err := request.Await(t.Context(), &where); err != nil || where != sockets {
		t.Fatalf("%q, %v", where, err)
	}
	if err := request.Left(unnoticed); err != nil {
		t.Fatal(err)
	}
	if err := <-served; err == nil || !strings.Contains(err.Error(), "note the predecessor") || text != unnoticed {
		t.Errorf("the second got %q, %v", text, err)
	}
}

// A disk that has become read-only does not keep the next process from the lock.
func TestLockOnReadOnlyDisk(t *testing.T) {
	dir := t.TempDir()
	take := func() (*Seat, bool) {
		t.Helper()
		s, err := Open(dir, Identity{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(s.Close)
		held, err := s.Take()
		if err != nil {
			t.Fatal(err)
		}
		return s, held
	}
	first, _ := take()
	first.Close()
	if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
		t.Skip("mounting takes root: ", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	if err := unix.Mount("", dir, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	if _, held := take(); !held {
		t.Fatal("the lock was free, and was not taken")
	}
	if _, held := take(); held {
		t.Error("two have the lock")
	}
}
