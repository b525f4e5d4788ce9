//go:build e2e

package scheduling

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/lab/internal/controlplane"
	"github.com/divvy-gpu/divvy/lab/internal/simnodes"
)

// Two replicas of divvy-scheduler under what may happen to them: see TestRacingReplicas of
// internal/app/extender for the extender's.
func TestPluginRacingReplicas(t *testing.T) { racingPlugins(t, 30*time.Second) }

// The same for longer.
func TestPluginReplicasRaceOn(t *testing.T) { racingPlugins(t, 4*time.Minute) }

// race is what happens, at random.
type race struct {
	*world
	mu       sync.Mutex // guards rng: the proxy uses it, too
	rng      *rand.Rand
	replicas []*competitor
	lossy    string // kubeconfig of an API server whose answers are lost
	started  int    // replicas
	made     int    // pods
	count    map[string]int
}

func (r *race) intn(n int) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.rng.IntN(n)
}

// lose wraps the API server: answers to binds are lost, and binds are late.
func (r *race) lose(next http.Handler) http.Handler {
	return http.HandlerFunc(func(out http.ResponseWriter, request *http.Request) {
		if request.Method != http.MethodPost || !strings.HasSuffix(request.URL.Path, "/binding") {
			next.ServeHTTP(out, request)
			return
		}
		switch r.intn(8) {
		case 0:
			next.ServeHTTP(httptest.NewRecorder(), request)
			panic(http.ErrAbortHandler)
		case 1:
			panic(http.ErrAbortHandler) // it never arrived
		case 2:
			// Also longer than a bind may take, but not as long as the Lease lasts of a leader that is paused
			// and cannot give up: a bind that comes after that is for the node to reject.
			select {
			case <-time.After(time.Duration(r.intn(int(controlplane.PluginLease / 2)))):
			case <-request.Context().Done():
				return
			}
		}
		next.ServeHTTP(out, request)
	})
}

// start starts a replica: every other one behind the API server that loses answers.
func (r *race) start() *competitor {
	r.Helper()
	r.started++
	name := fmt.Sprint("scheduler-", r.started)
	if r.started%2 == 0 {
		return r.compete(name, "")
	}
	return r.compete(name, r.lossy)
}

// step does one thing.
func (r *race) step(units accel.Units) {
	r.Helper()
	leader, _ := leads(r.Context(), r.contenders()).(*competitor)
	switch what := r.intn(10); {
	case what < 4:
		r.count["pods made"]++
		r.make(plugged, fmt.Sprint("pod-", r.made), 4+r.intn(8), 1+accel.Units(r.intn(int(units))))
		r.made++
	case what < 6:
		pods := r.pods()
		for range min(5, len(pods)) {
			i := r.intn(len(pods))
			r.gone(pods[i].Name)
			pods = slices.Delete(pods, i, i+1)
		}
		r.count["pods deleted"]++
	case leader == nil:
	case what == 6:
		r.count["killed"]++
		r.ended(leader, leader.Kill())
	case what == 7:
		r.count["ended in order"]++
		r.ended(leader, leader.Stop(3*stopGrace))
	case what == 8:
		// It finds out when another leads already, with binds that it began before.
		r.count["paused"]++
		r.make(plugged, fmt.Sprint("pod-", r.made), 8, 1)
		r.made++
		process := leader.PID()
		if err := syscall.Kill(process, syscall.SIGSTOP); err != nil {
			r.Fatal(err)
		}
		r.eventually("another leads", func(ctx context.Context) error {
			others := slices.DeleteFunc(r.contenders(), func(c contender) bool { return c == leader })
			if leads(ctx, others) == nil {
				return errors.New("none does")
			}
			return nil
		})
		if err := syscall.Kill(process, syscall.SIGCONT); err != nil {
			r.Fatal(err)
		}
		r.ended(leader, nil)
	default:
		if leader.api == nil {
			return
		}
		r.count["cut off"]++
		leader.api.cut()
		r.ended(leader, nil)
	}
}

func (r *race) contenders() (all []contender) {
	for _, one := range r.replicas {
		all = append(all, one)
	}
	return all
}

// ended waits for the end of a replica and starts another in its place.
func (r *race) ended(one *competitor, err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
	r.eventually(one.Name()+" ends", func(context.Context) error {
		if one.Running() {
			return errors.New("it runs")
		}
		return nil
	})
	r.replicas[slices.Index(r.replicas, one)] = r.start()
}

func racingPlugins(t *testing.T, lasts time.Duration) {
	t.Helper()
	const nodes, devices, units = 4, 4, 8
	w := newWorld(t, simnodes.Group{Count: nodes, Cards: devices, Units: units})
	if err := w.nodes.Create(t.Context(), w.client); err != nil {
		t.Fatal(err)
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := &race{world: w, rng: rand.New(rand.NewPCG(seed, 0)), count: map[string]int{}}
	r.lossy = w.before("lossy", r.lose)
	r.replicas = []*competitor{r.start(), r.start()}
	binds := w.watchBinds()
	for began := time.Now(); time.Since(began) < lasts; {
		r.step(units)
		w.right()
		if t.Failed() {
			t.FailNow()
		}
	}
	// All that is free is there for others: no reservation is left of any replica.
	w.gone(namesOf(w.pods())...)
	w.make(plugged, "last", nodes*devices, units)
	w.bound(nodes * devices)
	_, changed := binds.summary()
	for _, text := range changed {
		t.Error(text)
	}
	t.Logf("%d replicas, %v", r.started, r.count)
	if len(r.count) < 4 {
		t.Errorf("too little happened: %v", r.count)
	}
}

func namesOf(pods []corev1.Pod) (names []string) {
	for i := range pods {
		names = append(names, pods[i].Name)
	}
	return names
}
