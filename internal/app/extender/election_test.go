package extender

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clienttesting "k8s.io/client-go/testing"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/platform/serve"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
	"github.com/divvy-gpu/divvy/internal/testing/kubetest"
)

// replicated is an API server with the chart's empty objects, the pods of two
// replicas, and pods of users.
type replicated struct {
	t      *testing.T
	server *kubetest.Server
	key    string
	cut    [2]atomic.Bool // the API server is unavailable for this replica
	// binding, when set, is called before each bind.
	binding func()
}

func newReplicated(t *testing.T, pods ...string) *replicated {
	t.Helper()
	meta := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: release, Name: name} }
	server, err := kubetest.New(&v1.Pod{ObjectMeta: meta("replica-0")}, &v1.Pod{ObjectMeta: meta("replica-1")},
		&v1.Secret{ObjectMeta: meta("divvy-extender-certs")}, &v1.Secret{ObjectMeta: meta("divvy-extender-client")},
		&v1.ConfigMap{ObjectMeta: meta("divvy-extender-ca")})
	if err != nil {
		t.Fatal(err)
	}
	w := &replicated{t: t, server: server, key: grantKey(t)}
	for _, name := range pods {
		p := pod(name)
		p.UID = types.UID("uid-" + name)
		if _, err := server.Client(nil).CoreV1().Pods("team").Create(t.Context(), p, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	return w
}

// start starts a replica, with TLS or without.
func (w *replicated) start(n int, secured bool, change ...func(*Options)) *instance {
	w.t.Helper()
	w.t.Setenv("POD_NAME", fmt.Sprint("replica-", n))
	w.t.Setenv("POD_IP", "127.0.0.1")
	c, _ := clients(w.t)
	before := func(action clienttesting.Action) error {
		if w.binding != nil && action.Matches("create", "pods") && action.GetSubresource() == "binding" {
			w.binding()
		}
		if w.cut[n].Load() {
			return errors.New("the API server is unavailable")
		}
		return nil
	}
	return start(w.t, kube.Clients{Kubernetes: w.server.Client(before), Metadata: c.Metadata}, func(o *Options) {
		o.GrantKeyFile, o.Election.Enabled, o.Election.Namespace, o.Election.Duration = w.key, true, release, time.Second
		if secured {
			o.TLS.Listen, o.TLS.Namespace = ":0", release
		}
		for _, f := range change {
			f(o)
		}
	})
}

// crash ends a replica that can tell nobody.
func (w *replicated) crash(n int, i *instance) {
	w.cut[n].Store(true)
	i.stop()
}

func (w *replicated) nodeOf(name string) string {
	w.t.Helper()
	p, err := w.server.Client(nil).CoreV1().Pods("team").Get(w.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	return p.Spec.NodeName
}

// leads waits until the metrics of the replica say that it leads.
func (i *instance) leads() {
	i.t.Helper()
	deadline := time.Now().Add(2 * time.Minute)
	for {
		if _, body := i.get(i.metrics + "/metrics"); strings.Contains(body, "\ndivvy_extender_leader 1\n") {
			return
		}
		if time.Now().After(deadline) {
			i.t.Fatal("it does not lead")
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// bind asks for a bind over plain HTTP and returns the Error of the answer.
func (i *instance) bind(name string) string {
	i.t.Helper()
	var result extenderv1.ExtenderBindingResult
	i.post("bind", extenderv1.ExtenderBindingArgs{PodName: name, PodNamespace: "team", PodUID: types.UID("uid-" + name), Node: "node-a"},
		&result)
	return result.Error
}

// Whatever is asked of the replica that does not lead is answered by the one that
// does, and when that dies by the other.
func TestTwoReplicas(t *testing.T) {
	w := newReplicated(t, "p", "q", "r", "s", "t")
	first := w.start(0, true)
	first.leads()
	second := w.start(1, true)
	second.ready("")
	published(t, kube.Clients{Kubernetes: w.server.Client(nil)})

	if got := second.bind("p"); got != "" || w.nodeOf("p") != "node-a" {
		t.Fatalf("a bind through the replica that does not lead: %q", got)
	}
	if got := second.bind("p"); got != "" {
		t.Errorf("the same bind again: %q", got)
	}
	_, here := first.get(first.url + "/gcushare-scheduler/inspect/node-a")
	if _, there := second.get(second.url + "/gcushare-scheduler/inspect/node-a"); there != here || !strings.Contains(here, `"usedGCU": 4`) {
		t.Errorf("the one that leads reports %s, the other %s", here, there)
	}
	if status, body := second.get(second.url + "/gcushare-scheduler/inspect/nowhere"); status != http.StatusNotFound ||
		!strings.Contains(body, "nowhere") {
		t.Errorf("a report on a node that is not known: %d %s", status, body)
	}
	names := []string{"node-a", "node-b"}
	var filtered extenderv1.ExtenderFilterResult
	second.post("filter", extenderv1.ExtenderArgs{Pod: pod("q"), NodeNames: &names}, &filtered)
	if filtered.Error != "" || len(*filtered.NodeNames) != 1 {
		t.Errorf("filter answers %+v", filtered)
	}
	if _, metrics := second.get(second.metrics + "/metrics"); !strings.Contains(metrics,
		`divvy_extender_forwarded_total{result="leader"} 5`) {
		t.Error("the metrics do not count what was handed on")
	}

	// The leader binds a pod and dies; the next one knows of it.
	if got := first.bind("q"); got != "" {
		t.Fatal(got)
	}
	w.crash(0, first)
	began := time.Now()
	if got := second.bind("r"); got != "" || w.nodeOf("r") != "node-a" {
		t.Errorf("a bind while there is no leader: %q", got)
	}
	t.Logf("the bind waited for %s, with a Lease of 1 s", time.Since(began).Round(time.Millisecond))
	if got := second.bind("s"); got != "" {
		t.Error(got)
	}
	if got := second.bind("t"); !strings.Contains(got, "no") || w.nodeOf("t") != "" {
		t.Errorf("the fifth pod of 4 on a card of 16: %q, on %q", got, w.nodeOf("t"))
	}
	if _, body := second.get(second.url + "/gcushare-scheduler/inspect/node-a"); !strings.Contains(body, `"usedGCU": 16`) {
		t.Errorf("the new leader reports %s", body)
	}
	if err := <-first.done; err != nil {
		t.Error(err)
	}

	// The one that died is back, and takes over from one that ends in order.
	w.cut[0].Store(false)
	third := w.start(0, true)
	third.ready("")
	if err := second.end(); err != nil {
		t.Error(err)
	}
	third.leads()
	if _, body := third.get(third.url + "/gcushare-scheduler/inspect/node-a"); !strings.Contains(body, `"usedGCU": 16`) {
		t.Errorf("the third leader reports %s", body)
	}
}

// A replica that answers reviews for a while after it was told to end gives the lead up
// before: as soon as what it was doing is done, and not sooner.
func TestLeadIsGivenUpBeforeReviewsEnd(t *testing.T) {
	w := newReplicated(t, "p", "q")
	arrived, goOn := make(chan struct{}), make(chan struct{})
	var once sync.Once
	w.binding = func() { once.Do(func() { close(arrived); <-goOn }) }
	// As in mode dedicated: no other program than replicas asks over TLS.
	reviewing := func(o *Options) {
		o.ShutdownDelay, o.Election.Duration, o.TLS.ConfigMap = 20*time.Second, 4*time.Second, ""
	}
	first := w.start(0, true, reviewing)
	first.leads()
	second := w.start(1, true, reviewing)
	second.ready("")
	// Until the replicas have each other's certificates, none of the other is believed.
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
		var filtered extenderv1.ExtenderFilterResult
		second.post("filter", extenderv1.ExtenderArgs{Pod: pod("q"), NodeNames: &[]string{"node-a"}}, &filtered)
		if filtered.Error == "" {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the replicas do not reach each other: %s", filtered.Error)
		}
	}
	bound := make(chan string, 1)
	go func() { bound <- first.bind("p") }()
	<-arrived
	began := time.Now()
	first.stop()
	first.ready("shutting down")
	if _, body := second.get(second.metrics + "/metrics"); !strings.Contains(body, "\ndivvy_extender_leader 0\n") {
		t.Error("the other replica leads while a bind is under way")
	}
	close(goOn)
	second.leads()
	if got := <-bound; got != "" {
		t.Errorf("the bind that was under way: %q", got)
	}
	if got := second.bind("q"); got != "" || w.nodeOf("q") != "node-a" {
		t.Errorf("a bind by the next leader: %q", got)
	}
	select {
	case err := <-first.done:
		t.Errorf("it has ended %s after it was told to: %v", time.Since(began), err)
	default: // reviews are answered still
	}
	if _, body := second.get(second.url + "/gcushare-scheduler/inspect/node-a"); !strings.Contains(body, `"usedGCU": 8`) {
		t.Errorf("the next leader reports %s", body)
	}
}

// A leader that is cut off from the API server stops answering, keeps its books, and
// may lead again.
func TestALeaderThatIsCutOff(t *testing.T) {
	w := newReplicated(t, "p", "q")
	first := w.start(0, true)
	first.leads()
	second := w.start(1, true)
	second.ready("")
	published(t, kube.Clients{Kubernetes: w.server.Client(nil)})
	w.cut[0].Store(true)
	second.leads()
	first.ready("no leader is known") // it cannot know whom to hand on to
	if got := first.bind("p"); !strings.Contains(got, "no replica of the extender is the leader yet") || w.nodeOf("p") != "" {
		t.Errorf("a bind through the one that led before: %q", got)
	}
	if got := second.bind("p"); got != "" {
		t.Error(got)
	}
	w.crash(1, second)
	w.cut[0].Store(false)
	first.leads()
	if got := first.bind("q"); got != "" {
		t.Error(got)
	}
	if _, body := first.get(first.metrics + "/metrics"); !strings.Contains(body, "divvy_extender_terms_total 2") {
		t.Error("the metrics do not count two terms")
	}
	if err := first.end(); err != nil {
		t.Error(err)
	}
}

// Replicas that do not reach each other refuse, and say so.
func TestReplicasWithoutTLS(t *testing.T) {
	w := newReplicated(t, "p")
	first := w.start(0, false)
	first.ready("")
	second := w.start(1, false)
	second.ready("another replica is the leader")
	if got := second.bind("p"); !strings.Contains(got, "no replica of the extender is the leader yet; retry the request") {
		t.Errorf("a bind through the one that does not lead: %q", got)
	}
	if err := first.end(); err != nil {
		t.Error(err)
	}
	second.ready("")
	if got := second.bind("p"); got != "" {
		t.Error(got)
	}
}

// What a leader did not live to see stays reserved until the API server says what
// became of it; the next leader starts from the API server alone.
func TestTheWriteThatProvesItIsSeen(t *testing.T) {
	w := newReplicated(t)
	first := w.start(0, false)
	first.leads()
	p, err := w.server.Client(nil).CoreV1().Pods(release).Get(context.Background(), "replica-0", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(p.Status.Conditions) != 1 || p.Status.Conditions[0].Type != cluster.TookTheLead ||
		p.Status.Conditions[0].Status != v1.ConditionTrue {
		text, err := json.Marshal(p.Status.Conditions)
		t.Errorf("the pod that leads has the conditions %s, %v", text, err)
	}
	if err := first.end(); err != nil {
		t.Error(err)
	}
}

// As many binds as a replica may hold wait for the next leader at once, over TLS and over
// plain HTTP with a connection for each.
func TestBindsAreHeldUntilAReplicaLeads(t *testing.T) {
	const binds = 1000
	for _, secured := range []bool{false, true} {
		t.Run(fmt.Sprint("TLS is ", secured), func(t *testing.T) {
			w := newReplicated(t)
			first := w.start(0, true)
			first.leads()
			second := w.start(1, true)
			second.ready("")
			roots, certificate := published(t, kube.Clients{Kubernetes: w.server.Client(nil)})
			// One connection for each bind, or one for as many as there are streams on it.
			perClient, address := binds, second.url
			if secured {
				perClient, address = serve.MaxStreams, "https://"+second.tls
			}
			var clients []*http.Client
			for range binds / perClient {
				transport := &http.Transport{MaxIdleConnsPerHost: binds}
				if secured {
					transport.ForceAttemptHTTP2 = true
					transport.TLSClientConfig = &tls.Config{
						MinVersion: tls.VersionTLS12, RootCAs: roots, Certificates: []tls.Certificate{certificate},
						ServerName: "divvy-extender." + release + ".svc",
					}
				}
				client := &http.Client{Transport: transport}
				t.Cleanup(client.CloseIdleConnections)
				// A replica that waits has the certificate some time after it was published.
				resp, err := client.Get(address + "/version") //nolint:noctx // a test
				for deadline := time.Now().Add(2 * time.Minute); err != nil && time.Now().Before(deadline); {
					time.Sleep(20 * time.Millisecond)
					resp, err = client.Get(address + "/version") //nolint:noctx // a test
				}
				if err != nil {
					t.Fatal(err)
				}
				_ = resp.Body.Close()
				clients = append(clients, client)
			}
			w.crash(0, first)
			var group sync.WaitGroup
			var wrong atomic.Pointer[string]
			for n := range binds {
				group.Go(func() {
					body, err := json.Marshal(extenderv1.ExtenderBindingArgs{PodName: "p", PodNamespace: "team",
						PodUID: types.UID(fmt.Sprint(n)), Node: "node-a"})
					if err != nil {
						t.Error(err)
						return
					}
					text, retry := "", true
					for deadline := time.Now().Add(2 * time.Minute); retry && time.Now().Before(deadline); {
						text, retry = heldBind(clients[n%len(clients)], address, body)
					}
					if text == "" {
						return
					}
					wrong.Store(&text)
				})
			}
			group.Wait()
			if text := wrong.Load(); text != nil {
				t.Errorf("a bind is answered %s", *text)
			}
			if err := second.end(); err != nil {
				t.Error(err)
			}
		})
	}
}

// heldBind sends a bind to a replica that does not lead, and returns "" if the leader answered, which it does as soon
// as there is one. Where there was none for as long as a bind is held, which a busy machine does, kube-scheduler
// tries again.
func heldBind(client *http.Client, address string, body []byte) (wrong string, retry bool) {
	start := time.Now()
	resp, err := client.Post(address+"/gcushare-scheduler/bind", "application/json", bytes.NewReader(body)) //nolint:noctx // a test
	if err != nil {
		return err.Error(), false
	}
	answer, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	text := string(answer)
	switch {
	case err != nil:
		return err.Error(), false
	// There is no such pod, which the replica that leads then has found out, unless it
	// lost the lead again on a machine that is busy.
	case strings.Contains(text, "the pod no longer exists"), strings.Contains(text, "another replica is the leader"):
		return "", false
	case strings.Contains(text, "no leader is known") && time.Since(start) >= time.Second+holdBeyond: // the Leases last a second
		return text, true
	}
	return text, false
}

// TestWhatRunsEndsAfterTheLastBind: the Lease is kept while a bind is under way, however soon the
// program's other parts end, and not longer than a bind can take.
func TestWhatRunsEndsAfterTheLastBind(t *testing.T) {
	for name, test := range map[string]struct{ bind, want time.Duration }{
		"no bind":                {0, 0},
		"a bind under way":       {5 * time.Second, 5 * time.Second},
		"a bind that never ends": {time.Hour, shutdownTimeout},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := &program{ending: make(chan struct{})}
				ctx, cancel := context.WithCancel(t.Context())
				began := time.Now()
				close(p.ending)
				cancel()
				last := func(ctx context.Context) {
					select {
					case <-time.After(test.bind):
					case <-ctx.Done():
					}
				}
				if err := p.untilEnding(ctx, last, func(ctx context.Context) error { <-ctx.Done(); return nil }); err != nil {
					t.Error(err)
				}
				if took := time.Since(began); took != test.want {
					t.Errorf("it ended after %v, want %v", took, test.want)
				}
			})
		})
	}
}
