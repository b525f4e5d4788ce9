package scheduler

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	fwk "k8s.io/kube-scheduler/framework"

	"github.com/divvy-gpu/divvy/internal/testing/kubetest"
)

func TestTheGateWaitsForBindsAndLetsNoneIn(t *testing.T) {
	var g gate
	leave, err := g.enter()
	if err != nil {
		t.Fatal(err)
	}
	impatient, cancel := context.WithCancel(t.Context())
	cancel()
	g.close(impatient)
	if _, err := g.enter(); !errors.Is(err, errClosing) {
		t.Errorf("a bind began after the end: %v", err)
	}
	closed := make(chan struct{})
	go func() { g.close(context.WithoutCancel(t.Context())); close(closed) }()
	select {
	case <-closed:
		t.Error("it does not wait for the bind")
	case <-time.After(20 * time.Millisecond):
	}
	leave()
	<-closed
	var idle gate
	idle.close(t.Context())
}

// cache is a scheduler that shows a pod as it was at a version.
type cache struct {
	Scheduler
	versions []string // one for each question, the last one from then on
}

func (c *cache) Cached(pod *v1.Pod) (*v1.Pod, error) {
	version := c.versions[0]
	if len(c.versions) > 1 {
		c.versions = c.versions[1:]
	}
	if version == "" {
		return nil, errors.New("not cached")
	}
	shown := pod.DeepCopy()
	shown.ResourceVersion = version
	return shown, nil
}

func TestTakeoverWaitsForTheSchedulersCache(t *testing.T) {
	own := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "divvy-system", Name: "replica"}}
	server, err := kubetest.New(own)
	if err != nil {
		t.Fatal(err)
	}
	client := server.Client(nil)
	stored, err := client.CoreV1().Pods("divvy-system").Get(t.Context(), "replica", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	p := &Program{scheduler: make(chan Scheduler, 1), claims: func() fwk.ResourceClaimTracker { return nil }}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := p.catchUp(ctx, client, "divvy-system", "replica"); err == nil {
		t.Error("it leads before the cache is there")
	}
	shows := &cache{versions: []string{"", "1", stored.ResourceVersion}}
	p.scheduler <- shows
	if err := p.catchUp(t.Context(), client, "divvy-system", "replica"); err != nil {
		t.Fatal(err)
	}
	if len(shows.versions) != 1 {
		t.Errorf("it did not wait: %d versions were not asked for", len(shows.versions))
	}
	ctx, cancel = context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	shows.versions = []string{"1"}
	if err := p.catchUp(ctx, client, "divvy-system", "replica"); err == nil {
		t.Error("it leads with an old cache")
	}
}

// tracker has claims as a cache shows them, by name.
type tracker struct {
	fwk.ResourceClaimTracker

	mu       sync.Mutex
	versions map[string]string
}

func (r *tracker) set(versions map[string]string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.versions = versions
}

func (r *tracker) Get(_, name string) (*resourceapi.ResourceClaim, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	version, there := r.versions[name]
	if !there {
		return nil, errors.New("not cached")
	}
	return &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: name, ResourceVersion: version}}, nil
}

// TestTakeoverWaitsForClaims: allocations that were written before this replica had the Lease are known before it leads.
func TestTakeoverWaitsForClaims(t *testing.T) {
	const patience = 9*listClaimsEvery + listClaimsEvery/2 // it does not end while claims are listed
	claims := func(versions ...string) []runtime.Object {
		var out []runtime.Object
		for i, version := range versions {
			name := string(rune('a' + i))
			out = append(out, &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID(name),
				ResourceVersion: version}})
		}
		return out
	}
	for name, tc := range map[string]struct {
		written []runtime.Object
		cached  map[string]string
		// later happens after a while.
		later func(*testing.T, kubernetes.Interface, *tracker)
		want  string // in the error; "" for none
		takes time.Duration
	}{
		"no claims": {},
		"all known": {written: claims("11", "12"), cached: map[string]string{"a": "11", "b": "13"}},
		"one later": {written: claims("11", "12"), cached: map[string]string{"a": "11", "b": "9"},
			later: func(_ *testing.T, _ kubernetes.Interface, r *tracker) { r.set(map[string]string{"b": "100"}) },
			takes: 300 * time.Millisecond},
		"one that is deleted meanwhile": {written: claims("11", "12"), cached: map[string]string{"a": "11"},
			later: func(t *testing.T, client kubernetes.Interface, _ *tracker) {
				t.Helper()
				if err := client.ResourceV1().ResourceClaims("team").Delete(t.Context(), "b", metav1.DeleteOptions{}); err != nil {
					t.Error(err)
				}
			}, takes: listClaimsEvery},
		"never": {written: claims("11", "12"), cached: map[string]string{"a": "10", "b": "12"}, takes: patience,
			want: "the newest changes of 1 ResourceClaims"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				own := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "divvy-system", Name: "replica", ResourceVersion: "1"}}
				client := fake.NewClientset(append(tc.written, own)...)
				r := &tracker{versions: tc.cached}
				p := &Program{scheduler: make(chan Scheduler, 1), claims: func() fwk.ResourceClaimTracker { return r }}
				p.scheduler <- &cache{versions: []string{"1"}}
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				began, done := time.Now(), make(chan error)
				go func() { done <- p.catchUp(ctx, client, "divvy-system", "replica") }()
				if tc.later != nil {
					time.Sleep(299 * time.Millisecond)
					synctest.Wait()
					tc.later(t, client, r)
				}
				err := <-done
				if took := time.Since(began).Round(10 * time.Millisecond); took != tc.takes {
					t.Errorf("it took %s, want %s", took, tc.takes)
				}
				if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
					t.Errorf("%v, want %q", err, tc.want)
				}
			})
		})
	}
}

func TestOptionsNeedAConfiguration(t *testing.T) {
	o := DefaultOptions()
	o.TLS.Listen = ""
	if err := o.Validate(); err == nil || !strings.Contains(err.Error(), "scheduler-config") ||
		!strings.Contains(err.Error(), "multiPoint: {enabled: [{name: Divvy}]}") {
		t.Errorf("%v", err)
	}
	o.Config = "/etc/config"
	if err := o.Validate(); err != nil {
		t.Error(err)
	}
}
