package leader

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/testing/kubetest"
)

func TestMain(m *testing.M) {
	klog.SetLoggerWithOptions(logr.Discard(), klog.ContextualLogger(true))
	os.Exit(m.Run())
}

// replica takes part in an election until it is stopped.
type replica struct {
	*Elector
	t        *testing.T
	duration time.Duration
	shared   bool
	stop     context.CancelFunc
	done     chan struct{}

	mu sync.Mutex
	// away refuses what it asks of the API server; late is how long each of its requests
	// takes to arrive.
	away bool
	late time.Duration
}

var errAway = errors.New("the API server is away")

func (r *replica) before(clienttesting.Action) error {
	r.mu.Lock()
	late := r.late
	r.mu.Unlock()
	time.Sleep(late)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.away {
		return errAway
	}
	return nil
}

func (r *replica) set(change func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change()
}

func newServer(t *testing.T) *kubetest.Server {
	t.Helper()
	server, err := kubetest.New()
	if err != nil {
		t.Fatal(err)
	}
	return server
}

// short is the duration of most tests' Leases.
const short = 3 * time.Second

func join(t *testing.T, server *kubetest.Server, name string, catchUp func(context.Context) error) *replica {
	t.Helper()
	return joinFor(t, server, short, name, catchUp)
}

// joinFor is join for a Lease of that duration.
func joinFor(t *testing.T, server *kubetest.Server, duration time.Duration, name string, catchUp func(context.Context) error) *replica {
	t.Helper()
	r := &replica{t: t, duration: duration, done: make(chan struct{})}
	r.start(server.Client(r.before), name, catchUp)
	return r
}

// start lets the replica take part in the election, until the test ends or r.stop is
// called.
func (r *replica) start(client kubernetes.Interface, name string, catchUp func(context.Context) error) {
	t := r.t
	t.Helper()
	var err error
	r.Elector, err = New(Config{Client: client, Namespace: "divvy-system", Name: "divvy-extender", Pod: name,
		Address: name + ":1", Duration: r.duration, CatchUp: catchUp, Shared: r.shared})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r.stop = cancel
	go func() {
		defer close(r.done)
		if err := r.Run(ctx); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}()
	t.Cleanup(func() { cancel(); <-r.done })
}

// after waits until the replica leads and returns how long that took.
func (r *replica) after(limit time.Duration) time.Duration {
	r.t.Helper()
	began := time.Now()
	for !r.Leading() {
		if time.Since(began) > limit {
			r.t.Fatalf("it does not lead after %s", limit)
		}
		time.Sleep(time.Millisecond)
	}
	return time.Since(began)
}

// losesLease cuts the replica off from the API server, and deletes the Lease.
func (r *replica) losesLease(server *kubetest.Server) {
	r.t.Helper()
	r.set(func() { r.away = true })
	if err := server.Client(nil).CoordinationV1().Leases("divvy-system").Delete(r.t.Context(),
		"divvy-extender", metav1.DeleteOptions{}); err != nil {
		r.t.Fatal(err)
	}
}

// leadsAlone waits until the replica does not lead any more; the other must not before.
func (r *replica) leadsAlone(other *replica) {
	r.t.Helper()
	for r.Leading() {
		if other.Leading() {
			r.t.Fatal("two lead after the Lease was deleted")
		}
		time.Sleep(time.Millisecond)
	}
}

// Somebody who deletes the Lease, which uninstalling does, must not make two leaders.
func TestTheFirstLeaseIsMadeWhenNobodyCanHaveHadOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newServer(t)
		a := join(t, server, "a", nil)
		if took := a.after(10 * time.Second); took < short {
			t.Errorf("it leads after %s, when the holder of a Lease that was deleted could still act", took)
		}
		b := join(t, server, "b", nil)
		time.Sleep(time.Second)
		a.losesLease(server)
		for range 5000 {
			if a.Leading() && b.Leading() {
				t.Fatal("two lead after the Lease was deleted")
			}
			time.Sleep(time.Millisecond)
		}
		b.after(time.Second)
	})
}

// Who made the Lease anew hands it to nobody while it may not lead itself: the next
// one would not know that the holder of the one that was deleted may still act.
func TestALeaseThatWasMadeAnewIsNotGivenUpTooSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newServer(t)
		a := join(t, server, "a", nil)
		a.after(10 * time.Second)
		b := join(t, server, "b", nil)
		time.Sleep(time.Second)
		a.losesLease(server)
		for holds := false; !holds; holds, _ = b.holds() {
			time.Sleep(time.Millisecond)
		}
		b.stop()
		<-b.done
		if !a.Leading() {
			t.Fatal("the holder of the Lease that was deleted knows of it too soon for this test")
		}
		c := join(t, server, "c", nil)
		a.leadsAlone(c)
		c.after(10 * time.Second)
	})
}

// A replica that made the Lease anew, and was not told so, waits as well.
func TestTheAnswerThatALeaseWasMadeIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newServer(t)
		a := join(t, server, "a", nil)
		a.after(10 * time.Second)
		leases := server.Client(nil).CoordinationV1().Leases("divvy-system")
		var lost atomic.Bool
		client := server.Client(nil)
		client.PrependReactor("create", "leases", func(action clienttesting.Action) (bool, runtime.Object, error) {
			if !lost.CompareAndSwap(false, true) {
				return false, nil, nil
			}
			lease := action.(clienttesting.CreateAction).GetObject().(*coordinationv1.Lease)
			if _, err := leases.Create(t.Context(), lease, metav1.CreateOptions{}); err != nil {
				return true, nil, err
			}
			return true, nil, errors.New("connection reset")
		})
		b := &replica{t: t, duration: short, done: make(chan struct{})}
		b.start(client, "b", nil)
		time.Sleep(time.Second)
		a.losesLease(server)
		a.leadsAlone(b)
		b.after(10 * time.Second)
		if !lost.Load() {
			t.Error("no answer was lost")
		}
	})
}

// A leader that dies is followed within the Lease's duration and 3 s.
func TestAnotherLeadsSoonAfterTheLeaderDied(t *testing.T) {
	for _, duration := range []time.Duration{short, DefaultDuration} {
		t.Run(duration.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				server := newServer(t)
				a := joinFor(t, server, duration, "a", nil)
				a.after(2 * duration)
				longest := time.Duration(0)
				for n := range 20 {
					b := joinFor(t, server, duration, fmt.Sprint("b", n), nil)
					time.Sleep(time.Duration(1000+37*n) * time.Millisecond)
					if !a.Leading() || b.Leading() {
						t.Fatal("the second to come leads")
					}
					if address, _ := b.Leader(); address != a.config.Address {
						t.Fatalf("it takes %q for the leader, not %q", address, a.config.Address)
					}
					a.set(func() { a.away = true })
					longest = max(longest, b.after(duration+3*time.Second))
					a.stop()
					a = b
				}
				t.Logf("longest time without a leader: %s", longest)
			})
		})
	}
}

// A replica that ends in order hands over within a second, however long the Lease.
func TestALeaseIsGivenUpInOrder(t *testing.T) {
	for _, duration := range []time.Duration{short, DefaultDuration, MaxDuration} {
		t.Run(duration.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				server := newServer(t)
				a := joinFor(t, server, duration, "a", nil)
				a.after(2 * duration)
				b := joinFor(t, server, duration, "b", nil)
				time.Sleep(time.Second)
				a.stop()
				<-a.done
				if took := b.after(2 * duration); took > time.Second {
					t.Errorf("another leads only after %s", took)
				}
			})
		})
	}
}

func TestALeaderThatCannotRenewStopsInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newServer(t)
		a := join(t, server, "a", nil)
		a.after(10 * time.Second)
		if until, err := a.Until(t.Context()); err != nil || time.Until(until) < time.Second {
			t.Errorf("it may act until %s, %v", until, err)
		}
		a.set(func() { a.away = true })
		time.Sleep(2 * time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		if _, err := a.Until(ctx); !errors.Is(err, ErrNotRenewed) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("shortly before the end Until returns %v", err)
		}
		time.Sleep(time.Second)
		if _, err := a.Until(t.Context()); a.Leading() || !errors.Is(err, ErrNotLeading) {
			t.Errorf("it leads for longer than its Lease; Until returns %v", err)
		}
		a.set(func() { a.away = false })
		a.after(2 * time.Second) // the Lease still names it
		if a.Terms() != 2 {
			t.Errorf("it began to lead %d times, want 2", a.Terms())
		}
	})
}

// A control plane whose writes take seconds is slow, not away: kube-scheduler keeps its
// own Lease there, and what is bound is written before the leader's time is over.
func TestSlowWrites(t *testing.T) {
	for _, late := range []time.Duration{time.Second, 2 * time.Second, 5 * time.Second} {
		t.Run(late.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				server := newServer(t)
				a := joinFor(t, server, DefaultDuration, "a", nil)
				a.after(2 * DefaultDuration)
				b := joinFor(t, server, DefaultDuration, "b", nil)
				a.set(func() { a.late = late })
				b.set(func() { b.late = late })
				// kube-scheduler waits 10 s for a bind.
				const patience = 9 * time.Second
				for began := time.Now(); time.Since(began) < 2*time.Minute; time.Sleep(130 * time.Millisecond) {
					ctx, cancel := context.WithTimeout(t.Context(), patience-late)
					until, err := a.Until(ctx)
					cancel()
					if err != nil {
						t.Fatalf("after %s no write can be made: %v", time.Since(began), err)
					}
					if time.Until(until) < late {
						t.Fatalf("after %s a write may take %s", time.Since(began), time.Until(until))
					}
				}
				if a.Terms() != 1 || b.Terms() != 0 {
					t.Errorf("the lead changed: %d terms of the first, %d of the second", a.Terms(), b.Terms())
				}
			})
		})
	}
}

func TestUntilWaitsForARenewal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newServer(t)
		a := join(t, server, "a", nil)
		a.after(10 * time.Second)
		a.set(func() { a.away = true })
		time.Sleep(2 * time.Second)
		time.AfterFunc(100*time.Millisecond, func() { a.set(func() { a.away = false }) })
		began := time.Now()
		until, err := a.Until(t.Context())
		if err != nil || time.Until(until) < time.Second || time.Since(began) < 100*time.Millisecond {
			t.Errorf("after %s it may act for %s, %v", time.Since(began), time.Until(until), err)
		}
	})
}

// A wall clock that is set forward stands for a machine that was suspended.
func TestTheClockThatSaysMoreCounts(t *testing.T) {
	then := time.Now()
	for name, now := range map[string]time.Time{
		"both":                then.Add(5 * time.Second),
		"the monotonic clock": time.Now().Add(5 * time.Second),
		"the wall clock":      then.Round(0).Add(5 * time.Second),
	} {
		if got := since(then, now); got < 5*time.Second {
			t.Errorf("%s: %s have gone by", name, got)
		}
	}
}

func TestItLeadsWhenItHasCaughtUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newServer(t)
		goOn := make(chan error)
		catchUp := func(ctx context.Context) error {
			select {
			case err := <-goOn:
				return err
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		a := join(t, server, "a", catchUp)
		time.Sleep(8 * time.Second)
		if a.Leading() {
			t.Fatal("it leads before it has caught up")
		}
		b := join(t, server, "b", nil)
		goOn <- errors.New("the books are broken")
		b.after(6 * time.Second)
		if a.Leading() {
			t.Error("who cannot catch up leads")
		}
		b.set(func() { b.away = true })
		time.Sleep(5 * time.Second)
		goOn <- nil
		a.after(time.Second)
		if b.Leading() {
			t.Error("two lead")
		}
	})
}

func TestACatchUpThatHangsLetsAnotherTry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newServer(t)
		join(t, server, "a", func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
		time.Sleep(5 * time.Second)
		b := join(t, server, "b", nil)
		b.after(catchUpTimeout + 6*time.Second)
	})
}

// Whatever happens to their connections, only one leads at a time, and what one may
// do until a deadline is over before another leads.
func TestOneLeadsAtATime(t *testing.T) {
	for seed := range uint64(3) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 6))
			server := newServer(t)
			replicas := make([]*replica, 3)
			for n := range replicas {
				replicas[n] = join(t, server, fmt.Sprint("r", n), nil)
			}
			client := server.Client(nil)
			var acting *replica // may act until
			var until time.Time
			terms := 0
			for range 12_000 {
				time.Sleep(time.Duration(rng.IntN(60)) * time.Millisecond)
				r := replicas[rng.IntN(len(replicas))]
				switch rng.IntN(60) {
				case 0:
					r.set(func() { r.away = !r.away })
				case 1:
					r.set(func() { r.late = time.Duration(rng.IntN(1500)) * time.Millisecond })
				case 2:
					r.set(func() { r.away, r.late = false, 0 })
				case 3:
					if rng.IntN(40) == 0 {
						err := client.CoordinationV1().Leases("divvy-system").Delete(t.Context(), "divvy-extender", metav1.DeleteOptions{})
						if err != nil && !strings.Contains(err.Error(), "not found") {
							t.Fatal(err)
						}
					}
				}
				leaders := 0
				for _, r := range replicas {
					if !r.Leading() {
						continue
					}
					leaders++
					if acting != r && time.Now().Before(until) {
						t.Fatalf("%s leads while %s may act for another %s", r.identity, acting.identity, time.Until(until))
					}
					now, cancel := context.WithDeadline(t.Context(), time.Now())
					if end, err := r.Until(now); err == nil {
						if acting != r {
							terms++
						}
						acting, until = r, end
					}
					cancel()
				}
				if leaders > 1 {
					t.Fatalf("%d lead at once", leaders)
				}
			}
			t.Logf("seed %d: %d terms", seed, terms)
			if terms < 5 {
				t.Errorf("seed %d: the lead changed %d times only", seed, terms)
			}
			for _, r := range replicas {
				r.set(func() { r.away, r.late = false, 0 })
			}
			time.Sleep(8 * time.Second)
			if !replicas[0].Leading() && !replicas[1].Leading() && !replicas[2].Leading() {
				t.Error("nobody leads in the end")
			}
		})
	}
}

// A Lease of an earlier release, whose holder is a pod's name alone.
func TestALeaseOfAnotherKindIsHeeded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		holder, seconds := "divvy-extender-abc", int32(15)
		server, err := kubetest.New(&coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Namespace: "divvy-system", Name: "divvy-extender"},
			Spec:       coordinationv1.LeaseSpec{HolderIdentity: &holder, LeaseDurationSeconds: &seconds},
		})
		if err != nil {
			t.Fatal(err)
		}
		a := join(t, server, "a", nil)
		time.Sleep(time.Second)
		if address, _ := a.Leader(); address != "" {
			t.Errorf("it takes %q for the leader's address", address)
		}
		if took := a.after(30 * time.Second); took < 13*time.Second {
			t.Errorf("it leads after %s, within the other's 15 s", took)
		}
	})
}

// kube-scheduler releases the Lease while its writes are under way; a replica of this package does
// not.
func TestASharedLeaseIsTakenFromAnotherProgram(t *testing.T) {
	lease := func(holder string, seconds int32) *coordinationv1.Lease {
		return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "divvy-system", Name: "divvy-extender"},
			Spec: coordinationv1.LeaseSpec{HolderIdentity: &holder, LeaseDurationSeconds: &seconds, RenewTime: &metav1.MicroTime{}}}
	}
	for name, tc := range map[string]struct {
		shared, released bool
		holder           string
		atLeast          time.Duration
	}{
		"released by kube-scheduler":  {shared: true, released: true, holder: "cp-1_8d0cf2a7-6b1f-4a53-a6a9-0f2d5a6d3c11", atLeast: short},
		"of a holder with underscore": {shared: true, released: true, holder: "c_p_8d0cf2a7-6b1f-4a53-a6a9-0f2d5a6d3c11", atLeast: short},
		"released before it started":  {shared: true, atLeast: short},
		"released by a replica":       {shared: true, released: true, holder: "b_b:1_ABCDEFGH"},
		"not shared":                  {released: true, holder: "cp-1_8d0cf2a7-6b1f-4a53-a6a9-0f2d5a6d3c11"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				server, err := kubetest.New(lease(tc.holder, 3600))
				if err != nil {
					t.Fatal(err)
				}
				a := &replica{t: t, duration: short, shared: tc.shared, done: make(chan struct{})}
				a.start(server.Client(a.before), "a", nil)
				if tc.released {
					time.Sleep(time.Second) // it sees the holder
					leases := server.Client(nil).CoordinationV1().Leases("divvy-system")
					now, err := leases.Get(t.Context(), "divvy-extender", metav1.GetOptions{})
					if err != nil {
						t.Fatal(err)
					}
					now.Spec = lease("", 1).Spec
					if _, err := leases.Update(t.Context(), now, metav1.UpdateOptions{}); err != nil {
						t.Fatal(err)
					}
				}
				if took := a.after(2*short + time.Second); took < tc.atLeast || tc.atLeast == 0 && took > short/2 {
					t.Errorf("it leads after %s, want at least %s", took, tc.atLeast)
				}
			})
		})
	}
}

func TestNewSaysAllThatIsWrong(t *testing.T) {
	_, err := New(Config{Pod: "a_b", Duration: 1500 * time.Millisecond})
	for _, want := range []string{"no client", "want the Lease's namespace", "underscore", "1.5s: must be whole seconds, from 1s to 1m0s"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v lacks %q", err, want)
		}
	}
}
