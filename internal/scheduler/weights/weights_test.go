package weights

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/demand"
	"github.com/divvy-gpu/divvy/internal/core/fragmentation"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/platform/serve"
)

// asking is a request of a pod for units of a resource.
func asking(name accel.Resource, units accel.Units) accel.Request {
	return accel.Request{Resource: name, Containers: []accel.ContainerRequest{{Name: "c", Kind: accel.AppContainer, Units: units}}}
}

// newBooks returns books with two nodes, each with a card of 16 units of each of the
// resources; on the first one 2 are held.
func newBooks(t *testing.T, o ledger.Options, resources ...accel.Resource) *ledger.Ledger {
	t.Helper()
	l := ledger.New(o)
	for _, node := range []string{"a", "b"} {
		var all []accel.Inventory
		for _, r := range resources {
			all = append(all, accel.Inventory{Resource: r,
				Unit: "1", Shares: []accel.Share{{Units: 16, Device: accel.Device{ID: accel.DeviceID(node + string(r)),
					NUMANode: accel.NoNUMA}}}})
		}
		l.SetNode(node, all)
	}
	for _, r := range resources {
		l.Observe(ledger.Holding{Pod: accel.PodRef{UID: "holds " + string(r)}, Node: "a", Resource: r, Units: 2,
			Device: accel.DeviceID("a" + string(r))})
	}
	return l
}

// best is the node that is rated best.
func best(l *ledger.Ledger, r accel.Request) string {
	names := []string{"a", "b"}
	var out [2]ledger.Verdict
	l.Check(r, names, out[:])
	if out[1].Rating > out[0].Rating {
		return names[1]
	}
	return names[0]
}

// A resource whose nodes are not in the ledger has weights of its own.
func TestFollow(t *testing.T) {
	const memory accel.Resource = "enflame.divvy.dev/memory"
	p := New([]accel.Resource{gcu}, nil, true)
	elsewhere := newBooks(t, ledger.Options{Policy: p}, memory)
	p.Follow([]accel.Resource{memory}, elsewhere.Each)
	for range fragmentation.MinPods {
		p.Learn(asking(memory, 12))
	}
	l := newBooks(t, ledger.Options{Policy: p}, gcu)
	p.renew(t.Context(), l)
	if p.For(memory).Epoch() == 0 || p.For(gcu).Epoch() != 0 {
		t.Errorf("weights of %d and %d epochs, want some of the first alone", p.For(memory).Epoch(), p.For(gcu).Epoch())
	}
	if got, of := best(elsewhere, asking(memory, 4)), best(l, asking(gcu, 4)); got != "b" || of != "a" {
		t.Errorf("best nodes %s and %s, want b and, by binpack, a", got, of)
	}
}

// Where pods of 12 are expected, 4 units go where that leaves room for one, for
// one resource whatever is expected of the other.
func TestPriorPerResource(t *testing.T) {
	prior, err := ParsePrior(`[{"resource":"enflame.com/gcu-memory","units":12,"share":1},{"resource":"nvidia.com/gpu-memory","units":2,`+
		`"share":1}]`, []accel.Resource{gcu, gpu})
	if err != nil {
		t.Fatal(err)
	}
	p := New([]accel.Resource{gcu, gpu}, prior, true)
	l := newBooks(t, ledger.Options{Policy: p}, gcu, gpu)
	if got := best(l, asking(gcu, 4)); got != "a" || p.Ready() {
		t.Errorf("before there are prices: %s, want a as binpack; made %t", got, p.Ready())
	}
	p.renew(t.Context(), l)
	if got := best(l, asking(gcu, 4)); got != "b" || !p.Ready() {
		t.Errorf("with pods of 12 expected: %s, want b; made %t", got, p.Ready())
	}
	if got := best(l, asking(gpu, 4)); got != "a" {
		t.Errorf("with pods of 2 expected: %s, want a", got)
	}
	request := asking(gcu, 4)
	request.Policy = place.Binpack.Name()
	if got := best(l, request); got != "a" {
		t.Errorf("a pod that asks for binpack: %s, want a", got)
	}
	if got := p.For("a.example/b"); got != place.Binpack {
		t.Errorf("of a resource that nobody manages %s decides", got.Name())
	}
}

// Without a prior, pods that came are learned from.
func TestLearnOnline(t *testing.T) {
	p := New([]accel.Resource{gcu}, nil, true)
	l := newBooks(t, ledger.Options{Policy: p}, gcu)
	p.renew(t.Context(), l)
	if got := best(l, asking(gcu, 4)); got != "a" {
		t.Fatalf("without pods: %s, want a as binpack", got)
	}
	for range 101 { // the first ones count a bit less than one by now
		p.Learn(asking(gcu, 12))
		p.Learn(asking("a.example/b", 1)) // nobody manages it
	}
	select {
	case <-p.wake:
	default:
		t.Error("after 101 pods there is no renewal")
	}
	p.renew(t.Context(), l)
	if got := best(l, asking(gcu, 4)); got != "b" {
		t.Errorf("after 101 pods of 12: %s, want b", got)
	}
	p.LearnBeside(gcu, 500, 7)
	p.LearnBeside("a.example/b", 1, 1)
	several := asking(gcu, 8)
	several.Devices, several.CPU, several.Memory = 2, 30, 40
	p.Learn(several)
	for _, want := range []string{
		`divvy_extender_demand_seen_pods_total{resource="enflame.com/gcu-memory"} 103`,
		`divvy_extender_demand_kinds{resource="enflame.com/gcu-memory"} 1`,
		`divvy_extender_price_renewals_total{resource="enflame.com/gcu-memory"} 2`,
		`divvy_extender_price_tables_total{resource="enflame.com/gcu-memory"} 1`,
		`divvy_extender_price_changes_total{resource="enflame.com/gcu-memory"} 1`,
	} {
		if text := shown(t, p); !strings.Contains(text, want+"\n") {
			t.Errorf("metrics lack %s:\n%s", want, text)
		}
	}
}

// shown is what a collector shows, as text.
func shown(t *testing.T, c prometheus.Collector) string {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(c)
	out := httptest.NewRecorder()
	serve.Metrics(registry).ServeHTTP(out, httptest.NewRequest(http.MethodGet, "/metrics", http.NoBody))
	return out.Body.String()
}

// Prices are renewed where somebody wants them alone; the first pod that asks for
// them wakes the loop.
func TestRenewWhereWanted(t *testing.T) {
	prior := map[accel.Resource][]demand.Count{gcu: {{Kind: demand.Kind{Units: 12, Devices: 1}, Pods: priorPods}}}
	p := New([]accel.Resource{gcu}, prior, false)
	l := newBooks(t, ledger.Options{Policies: []place.Policy{p}}, gcu)
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		if err := p.Run(ctx, l, func() bool { return true }); err != nil {
			t.Error(err)
		}
	})
	defer running.Wait()
	defer stop()
	if !p.Ready() {
		t.Error("an extender with another policy waits for prices")
	}
	for range 2 * fragmentation.RenewAfter {
		p.Learn(asking(gcu, 12))
	}
	wants := asking(gcu, 4)
	wants.Policy = fragmentation.Name
	if got := best(l, wants); got != "a" {
		t.Errorf("without prices: %s, want a as binpack", got)
	}
	if last := p.policies[0].last.Load(); last != nil {
		t.Errorf("%d renewals for nobody", last.Renewals)
	}
	p.Learn(wants)
	deadline := time.Now().Add(2 * time.Minute)
	for best(l, wants) != "b" {
		if time.Now().After(deadline) {
			t.Fatal("no renewal for a pod that wants it")
		}
		time.Sleep(10 * time.Millisecond)
	}
	if got := best(l, asking(gcu, 4)); got != "a" {
		t.Errorf("the policy of the cluster: %s, want a", got)
	}
}

// Pods come, requests are answered and metrics are read while prices are renewed.
func TestRenewBesideRequests(t *testing.T) {
	p := New([]accel.Resource{gcu}, nil, true)
	l := newBooks(t, ledger.Options{Policy: p}, gcu)
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	for worker := range 3 {
		running.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				request := asking(gcu, accel.Units(1+(i*7+worker)%16))
				p.Learn(request)
				best(l, request)
			}
		})
	}
	running.Go(func() {
		for ctx.Err() == nil {
			testutil.CollectAndCount(p)
		}
	})
	renewals := uint64(0)
	for ; renewals < 300 || p.policies[0].seen.Load() < 5000; renewals++ {
		p.renew(ctx, l)
	}
	stop()
	running.Wait()
	p.renew(t.Context(), l)
	last := p.policies[0].last.Load()
	if last.Renewals != renewals+1 || last.Tables == 0 || last.Pods < 100 {
		t.Errorf("after %d renewals: %+v", renewals, last)
	}
}
