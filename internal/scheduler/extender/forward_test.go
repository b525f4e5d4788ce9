package extender

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
	"github.com/divvy-gpu/divvy/internal/testing/decisiontest"
)

// fakeElection says what the test says.
type fakeElection struct {
	mu      sync.Mutex
	leading bool
	leader  string
	until   time.Time
	changed chan struct{}
}

func (f *fakeElection) Leading() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.leading
}

func (f *fakeElection) Leader() (string, <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.leader, f.changed
}

func (f *fakeElection) Until(context.Context) (time.Time, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.until.IsZero() {
		return time.Time{}, errors.New("another may lead")
	}
	return f.until, nil
}

func (f *fakeElection) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
	close(f.changed)
	f.changed = make(chan struct{})
}

// lead makes the world's replica one that leads.
func (f *fakeElection) lead() {
	f.set(func() { f.leading, f.leader, f.until = true, "", time.Now().Add(time.Minute) })
}

// plainly reaches the leader over plain HTTP.
type plainly struct{ http.RoundTripper }

func (p plainly) RoundTrip(r *http.Request) (*http.Response, error) {
	r.URL.Scheme = "http"
	return p.RoundTripper.RoundTrip(r)
}

// newFollower is a world whose replica follows leader; nil for none.
func newFollower(t *testing.T, leader http.Handler, change ...func(*Config)) (*world, *fakeElection) {
	t.Helper()
	f := &fakeElection{changed: make(chan struct{})}
	if leader != nil {
		server := httptest.NewServer(leader)
		t.Cleanup(server.Close)
		f.leader = strings.TrimPrefix(server.URL, "http://")
	}
	return newWorld(t, append([]func(*Config){func(c *Config) {
		c.Election, c.Forward, c.Hold = f, plainly{&http.Transport{DisableKeepAlives: true}}, 300*time.Millisecond
	}}, change...)...), f
}

func TestAFollowerAnswersByTheLeader(t *testing.T) {
	leader := newWorld(t)
	pod := leader.add(newPod("p", 4))
	follower, _ := newFollower(t, leader.server.Config.Handler)

	names := []string{"node-a", "node-b"}
	result := follower.filter(extenderv1.ExtenderArgs{Pod: pod, NodeNames: &names})
	if result.Error != "" || len(*result.NodeNames) != 2 {
		t.Errorf("filter answers %+v", result)
	}
	if got := follower.bind(pod, "node-a"); got != "" {
		t.Error(got)
	}
	if used := leader.used("node-a"); used[0] != 4 {
		t.Errorf("the leader's cards hold %v", used)
	}
	if used := follower.used("node-a"); used[0] != 0 {
		t.Errorf("the follower decided itself: %v", used)
	}
	_, want := leader.get(Prefix + "/inspect?details=true")
	if status, got := follower.get(Prefix + "/inspect?details=true"); status != http.StatusOK || !bytes.Equal(got, want) {
		t.Errorf("inspect answers %d %s, want %s", status, got, want)
	}
	// Errors are the leader's as well, with their status.
	if status, got := follower.post("/prioritize", []byte("hello")); status != http.StatusBadRequest ||
		!strings.Contains(string(got), "not valid JSON") {
		t.Errorf("prioritize answers %d %s", status, got)
	}
	if status, got := follower.get("/readyz"); status != http.StatusOK {
		t.Errorf("/readyz answers %d %s", status, got)
	}
}

// Anybody can reach the follower; what it hands on is believed by the leader.
func TestAFollowerHandsOnNoBindOfAStranger(t *testing.T) {
	asked := false
	follower, _ := newFollower(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked = true }))
	request := httptest.NewRequest(http.MethodPost,
		Prefix+"/bind", strings.NewReader(`{"PodName":"p","PodNamespace":"team","PodUID":"uid-p","Node":"node-a"}`))
	request.RemoteAddr = "203.0.113.9:40000"
	answer := httptest.NewRecorder()
	follower.server.Config.Handler.ServeHTTP(answer, request)
	if !strings.Contains(answer.Body.String(), "bind rejected: 203.0.113.9 is not an address of this host") || asked {
		t.Errorf("answered %s; the leader was asked: %t", answer.Body, asked)
	}
}

// Nor does the leader believe a stranger that there is such a pod because a replica
// asks for it.
func TestAFollowerHandsOnWhoAsks(t *testing.T) {
	told := 0
	leader := newWorld(t, func(c *Config) { c.Tell = func(accel.PodRef, events.Kind, string) { told++ } })
	follower, _ := newFollower(t, leader.server.Config.Handler)
	body, err := json.Marshal(extenderv1.ExtenderArgs{Pod: newPod("p", 900), NodeNames: &[]string{"node-a"}})
	if err != nil {
		t.Fatal(err)
	}
	for remote, want := range map[string]int{"192.0.2.77:4000": 0, "127.0.0.1:4000": 1} {
		request := httptest.NewRequest(http.MethodPost, Prefix+"/filter", bytes.NewReader(body))
		request.RemoteAddr, told = remote, 0
		answer := httptest.NewRecorder()
		follower.server.Config.Handler.ServeHTTP(answer, request)
		if !strings.Contains(answer.Body.String(), noRoom) || told != want {
			t.Errorf("%s: %d events, want %d; the answer is %s", remote, told, want, answer.Body)
		}
	}
}

// losing is a cluster over which the lead is lost in the middle of an answer.
type losing struct {
	*decisiontest.Cluster
	lose func()
}

func (l losing) Problem(string) string { l.lose(); return "" }

func TestNoAnswerOfOneThatLostTheLead(t *testing.T) {
	w, f := newFollower(t, nil, func(c *Config) {
		f, ok := c.Election.(*fakeElection)
		if !ok {
			t.Fatal("the election is another")
		}
		c.Cluster = losing{&decisiontest.Cluster{}, func() { f.set(func() { f.leading = false }) }}
	})
	f.lead()
	pod := newPod("p", 4)
	for node, want := range map[string]string{"node-a": "", "nowhere": "the extender is not ready: another replica is the leader"} {
		if got := w.filter(extenderv1.ExtenderArgs{Pod: pod, NodeNames: &[]string{node}}); got.Error != want || want != "" &&
			got.FailedAndUnresolvableNodes != nil {
			t.Errorf("%s: filter answers %+v, want the error %q", node, got, want)
		}
		f.lead()
	}
	if status, got := w.get(Prefix + "/inspect/nowhere"); status != http.StatusServiceUnavailable ||
		!strings.Contains(string(got), "another replica is the leader") {
		t.Errorf("inspect answers %d %s", status, got)
	}
}

func TestARequestWaitsForALeader(t *testing.T) {
	tests := map[string]struct {
		leader http.Handler
		// then is what happens while the request waits.
		then func(f *fakeElection)
	}{
		"there is none yet": {then: func(f *fakeElection) { f.lead() }},
		"the one that is known leads no more": {
			leader: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusMisdirectedRequest) }),
			then:   func(f *fakeElection) { f.lead() },
		},
		"it dies in the middle of its answer": {
			leader: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Length", "100")
				_, _ = io.WriteString(w, `{"Error":"half`)
			}),
			then: func(f *fakeElection) { f.lead() },
		},
		"it is gone, and another leads": {then: func(f *fakeElection) {
			f.set(func() { f.leader = "127.0.0.1:1" })
			time.Sleep(20 * time.Millisecond)
			f.lead()
		}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			follower, f := newFollower(t, test.leader, func(c *Config) { c.Hold = 10 * time.Second })
			pod := follower.add(newPod("p", 4))
			time.AfterFunc(50*time.Millisecond, func() { test.then(f) })
			if got := follower.bind(pod, "node-a"); got != "" {
				t.Error(got)
			}
			if used := follower.used("node-a"); used[0] != 4 {
				t.Errorf("its cards hold %v", used)
			}
		})
	}
}

func TestWithoutALeaderTheErrorCanBeTriedAgain(t *testing.T) {
	const want = "no replica of the extender is the leader yet; retry the request: "
	follower, f := newFollower(t, nil)
	pod := follower.add(newPod("p", 4))
	names := []string{"node-a"}
	if got := follower.filter(extenderv1.ExtenderArgs{Pod: pod, NodeNames: &names}); got.Error != want+"no leader is known" {
		t.Errorf("filter answers %q", got.Error)
	}
	f.set(func() { f.leader = "127.0.0.1:1" })
	if got := follower.bind(pod, "node-a"); !strings.HasPrefix(got, want+"the leader at 127.0.0.1:1: ") {
		t.Errorf("bind answers %q", got)
	}
	if status, got := follower.post("/prioritize", []byte("{}")); status != http.StatusServiceUnavailable ||
		!strings.Contains(string(got), want) {
		t.Errorf("prioritize answers %d %s", status, got)
	}
	status, got := follower.get(Prefix + "/inspect")
	var report struct {
		Error string `json:"error"`
	}
	if err := json.Unmarshal(got, &report); err != nil || status != http.StatusServiceUnavailable || !strings.Contains(string(got), want) {
		t.Errorf("inspect answers %d %s, %v", status, got, err)
	}
	f.set(func() { f.leader = "" })
	if status, got := follower.get("/readyz"); status != http.StatusServiceUnavailable ||
		!strings.Contains(string(got), "no leader is known") {
		t.Errorf("/readyz answers %d %s", status, got)
	}
}

// kube-scheduler asks these in its one scheduling loop, where every pod of the cluster
// waits for the answer, whether it requests an accelerator or not.
func TestOnlyBindsWait(t *testing.T) {
	body, err := json.Marshal(extenderv1.ExtenderArgs{Pod: newPod("p", 4), NodeNames: &[]string{"node-a"}})
	if err != nil {
		t.Fatal(err)
	}
	ask := func(t *testing.T, w *world, path string) (took time.Duration, answer string) {
		t.Helper()
		began := time.Now()
		request := httptest.NewRequestWithContext(t.Context(), http.MethodPost, Prefix+path, bytes.NewReader(body))
		if path == "/inspect" {
			request = httptest.NewRequestWithContext(t.Context(), http.MethodGet, Prefix+path, nil)
		}
		request.RemoteAddr = "127.0.0.1:4000"
		recorder := httptest.NewRecorder()
		w.extender.Handler().ServeHTTP(recorder, request)
		return time.Since(began), recorder.Body.String()
	}
	verbs := []string{"/filter", "/prioritize", "/preempt", "/inspect"}
	t.Run("no leader is known", func(t *testing.T) {
		w, f := newFollower(t, nil, func(c *Config) { c.Hold = 9 * time.Second })
		synctest.Test(t, func(t *testing.T) {
			f.set(func() {}) // its channel is one of this test then
			for _, verb := range verbs {
				if took, answer := ask(t, w, verb); took > 0 || !strings.Contains(answer, errNoLeader.Error()) {
					t.Errorf("%s: answered after %s: %s", verb, took, answer)
				}
			}
			if took, answer := ask(t, w, "/bind"); took < 9*time.Second {
				t.Errorf("/bind: answered after %s: %s", took, answer)
			}
		})
	})
	t.Run("the leader is cut off", func(t *testing.T) {
		net := &network{}
		w, f := newFollower(t, nil, func(c *Config) { c.Forward, c.Hold = net, 9*time.Second })
		synctest.Test(t, func(t *testing.T) {
			f.set(func() { f.leader = "192.0.2.1:32765" })
			ctx, stop := context.WithCancel(t.Context())
			defer synctest.Wait()
			defer stop()
			go w.extender.replica.watch(ctx)
			time.Sleep(time.Minute)
			if _, answer := ask(t, w, "/filter"); answer != "response of the leader" {
				t.Fatalf("before: %s", answer)
			}
			net.cut.Store(true)
			if took, answer := ask(t, w, "/filter"); took > probeEvery+probeTimeout || !strings.Contains(answer, errSilent.Error()) {
				t.Errorf("the request in which it was cut off: answered after %s: %s", took, answer)
			}
			for _, verb := range verbs {
				if took, answer := ask(t, w, verb); took > 0 || !strings.Contains(answer, errSilent.Error()) {
					t.Errorf("%s: answered after %s: %s", verb, took, answer)
				}
			}
			time.AfterFunc(5*time.Second, func() { net.cut.Store(false) })
			if took, answer := ask(t, w, "/bind"); took < 5*time.Second || answer != "response of the leader" {
				t.Errorf("/bind: answered after %s: %s", took, answer)
			}
			if _, answer := ask(t, w, "/filter"); answer != "response of the leader" {
				t.Errorf("after: %s", answer)
			}
		})
	})
	t.Run("the leader is slow", func(t *testing.T) {
		net := &network{}
		net.slow.Store(int64(5 * time.Second))
		w, f := newFollower(t, nil, func(c *Config) { c.Forward, c.Hold = net, 9*time.Second })
		synctest.Test(t, func(t *testing.T) {
			f.set(func() { f.leader = "192.0.2.1:32765" })
			for _, verb := range verbs[:3] {
				if took, answer := ask(t, w, verb); took > askTimeout || !strings.Contains(answer, errSilent.Error()) {
					t.Errorf("%s: answered after %s: %s", verb, took, answer)
				}
			}
			for _, verb := range []string{"/inspect", "/bind"} {
				if _, answer := ask(t, w, verb); answer != "response of the leader" {
					t.Errorf("%s: %s", verb, answer)
				}
			}
		})
	})
}

// network is the way to a leader that answers everything alike.
type network struct {
	// cut is true while nothing comes through, and nothing says so.
	cut atomic.Bool
	// slow is how long the leader takes for what is no probe, in ns.
	slow atomic.Int64
}

// RoundTrip implements http.RoundTripper.
func (n *network) RoundTrip(r *http.Request) (*http.Response, error) {
	if n.cut.Load() {
		<-r.Context().Done()
		return nil, r.Context().Err()
	}
	if r.URL.Path != "/healthz" {
		select {
		case <-time.After(time.Duration(n.slow.Load())):
		case <-r.Context().Done():
			return nil, r.Context().Err()
		}
	}
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{},
		Body: io.NopCloser(strings.NewReader("response of the leader"))}, nil
}

// Two that take each other for the leader do not hand a request on for ever.
func TestARequestIsHandedOnOnce(t *testing.T) {
	follower, _ := newFollower(t, nil)
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, follower.server.URL+Prefix+"/inspect", nil)
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set(ForwardedHeader, forwardedBelieved)
	resp, err := follower.server.Client().Do(request)
	if err != nil {
		t.Fatal(err)
	}
	if status, body := readAll(t, resp); status != http.StatusMisdirectedRequest {
		t.Errorf("answered %d %s", status, body)
	}
}

// A report of megabytes that is cut off must not look like a whole one.
func TestALargeAnswerThatIsCutOffIsNoAnswer(t *testing.T) {
	follower, _ := newFollower(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write(bytes.Repeat([]byte("x"), 2*keepBuffer))
		panic(http.ErrAbortHandler)
	}))
	resp, err := follower.server.Client().Get(follower.server.URL + Prefix + "/inspect") //nolint:noctx // a test
	if err == nil {
		_, err = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
	}
	if err == nil {
		t.Error("the half of an answer looks like the whole of one")
	}
}

// What is decided while a replica leads is written while it leads.
func TestABindEndsWithTheLead(t *testing.T) {
	follower, f := newFollower(t, nil)
	pod := follower.add(newPod("p", 4))
	f.set(func() { f.leading, f.until = true, time.Now().Add(50*time.Millisecond) })
	follower.cluster.BindError = func(ctx context.Context, _ accel.PodRef, _ string) error {
		<-ctx.Done() // the API server is slow
		return cluster.ErrOutcomeUnknown
	}
	if got := follower.bind(pod, "node-a"); !strings.Contains(got, "is unknown") {
		t.Errorf("a bind that took longer than the lead: %q", got)
	}
	f.set(func() { f.until = time.Time{} })
	if got := follower.bind(pod, "node-a"); !strings.Contains(got, "another may lead") {
		t.Errorf("a bind of one whose Lease may be another's: %q", got)
	}
}
