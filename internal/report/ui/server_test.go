package ui

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/cookiejar"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/report/inspect/nodeusage"
	"github.com/divvy-gpu/divvy/internal/report/why"
)

const memory = "enflame.com/gcu-memory"

func testNode(t *testing.T) *corev1.Node {
	t.Helper()
	text, err := wire.EncodeInventory([]accel.Inventory{{Resource: memory, Unit: "1", Shares: []accel.Share{
		{Device: accel.Device{ID: "A", Model: "S60", NUMANode: accel.NoNUMA}, Units: 16},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gcu-1", Annotations: map[string]string{wire.InventoryAnnotation: text}},
		Status: corev1.NodeStatus{Allocatable: corev1.ResourceList{memory: resource.MustParse("16")}}}
}

func testPod(name string, units int64) *corev1.Pod {
	amount := corev1.ResourceList{memory: *resource.NewQuantity(units, resource.DecimalSI)}
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: name, UID: "uid", CreationTimestamp: metav1.Now()},
		Spec: corev1.PodSpec{SchedulerName: corev1.DefaultSchedulerName, Containers: []corev1.Container{{Name: "main",
			Resources: corev1.ResourceRequirements{Limits: amount, Requests: amount}}}},
		Status: corev1.PodStatus{Phase: corev1.PodPending, Conditions: []corev1.PodCondition{{Type: corev1.PodScheduled,
			Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable,
			Message: "0/1 nodes are available: 1 Insufficient enflame.com/gcu-memory."}}}}
}

// testClient is a cluster in which the person may not do what is denied, such as "list nodes".
func testClient(denied map[string]bool, objects ...runtime.Object) *fake.Clientset {
	c := fake.NewClientset(objects...)
	c.PrependReactor("create", "selfsubjectaccessreviews", func(a clienttesting.Action) (bool, runtime.Object, error) {
		review := &authorizationv1.SelfSubjectAccessReview{}
		if create, ok := a.(clienttesting.CreateAction); ok {
			if sent, ok := create.GetObject().(*authorizationv1.SelfSubjectAccessReview); ok {
				review = sent.DeepCopy()
			}
		}
		of := review.Spec.ResourceAttributes
		if denied["all"] {
			return true, nil, errors.New("connection refused")
		}
		review.Status.Allowed = !denied[of.Verb+" "+of.Resource+" "+of.Namespace]
		return true, review, nil
	})
	return c
}

// serving serves a cluster until the test ends, and returns a browser that has the cookie.
func serving(t *testing.T, o Options) (*Server, *http.Client) {
	t.Helper()
	o.Cluster, o.Namespace, o.Now = "test", "team-a", time.Now
	feed, err := NewFeed(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	s, err := Listen(t.Context(), 0, feed, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(2 * time.Minute):
			t.Error("the server does not end while a page is open")
		}
	})
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Jar: jar}
	if status, _ := get(t, client, s.URL()); status != http.StatusOK {
		t.Fatalf("the page has status %d", status)
	}
	return s, client
}

func get(t *testing.T, client *http.Client, url string) (int, string) {
	t.Helper()
	answer, err := client.Get(url) //nolint:noctx // of a test
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = answer.Body.Close() }()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer.StatusCode, string(body)
}

// stream opens the stream, and returns a function that waits until an event with a text in its data
// has been sent, and returns all that was sent.
func stream(t *testing.T, s *Server, client *http.Client) func(event, text string) string {
	t.Helper()
	answer, err := client.Get(s.at("api/stream")) //nolint:noctx // of a test
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = answer.Body.Close() })
	if answer.StatusCode != http.StatusOK || answer.Header.Get("Content-Type") != "text/event-stream" {
		t.Fatalf("status %d, %s", answer.StatusCode, answer.Header.Get("Content-Type"))
	}
	lines := bufio.NewReader(answer.Body)
	stop := time.AfterFunc(10*time.Second, func() { _ = answer.Body.Close() })
	t.Cleanup(func() { stop.Stop() })
	seen, now := "", ""
	return func(event, text string) string {
		t.Helper()
		has := func(events string) bool {
			for _, e := range strings.Split(events, "\n\n") {
				if strings.HasPrefix(e, "event: "+event+"\n") && strings.Contains(e, text) {
					return true
				}
			}
			return false
		}
		for !has(seen) {
			line, err := lines.ReadString('\n')
			if err != nil {
				t.Fatalf("no event %s with %q: %v\n%s", event, text, err, seen+now)
			}
			if now += line; line == "\n" {
				seen, now = seen+now, ""
			}
		}
		return seen
	}
}

func TestStream(t *testing.T) {
	client := testClient(nil, testNode(t), testPod("waits", 20))
	used := uint64(3)
	s, browser := serving(t, Options{Client: client, Usage: func(context.Context, []string) (nodeusage.Reports, error) {
		return nodeusage.Reports{Reports: []wire.UsageReport{{Node: "gcu-1", Devices: []wire.DeviceUsage{{Device: "A", MemoryBytes: 16,
			UsedBytes: used}}}},
			Failed: []nodeusage.Failure{{Node: "gcu-2", Error: "no answer within 10s."}}}, nil
	}})
	wait := stream(t, s, browser)
	wait("status", `"cluster":"test"`)
	wait("nodes", `"name":"gcu-1"`)
	wait("waiting", `"total":1`)
	wait("waiting", "20 units of enflame.com/gcu-memory (20 GB) are more than any device has")
	wait("nodes", `"used":3`)
	wait("status", "could not be read on 1 of 2 nodes, such as gcu-2: no answer within 10s.")
	pod := testPod("comes", 4)
	pod.Spec.NodeName, pod.UID = "gcu-1", "other"
	if _, err := client.CoreV1().Pods("team-a").Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	wait("nodes", `"name":"comes"`)
	if err := client.CoreV1().Nodes().Delete(t.Context(), "gcu-1", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	wait("gone", `["gcu-1"]`)
	if err := client.CoreV1().Pods("team-a").Delete(t.Context(), "waits", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	wait("waiting", `"total":0,"pods":[]`)
}

func TestStreamsAreBounded(t *testing.T) {
	s, browser := serving(t, Options{Client: testClient(nil)})
	for range maxStreams {
		stream(t, s, browser)("complete", "")
	}
	if status, body := get(t, browser, s.at("api/stream")); status != http.StatusServiceUnavailable ||
		!strings.Contains(body, "open 4 times already") {
		t.Errorf("status %d, %s", status, body)
	}
}

func TestWhy(t *testing.T) {
	s, browser := serving(t, Options{Client: testClient(map[string]bool{"delete pods ": true, "delete pods team-a": true}, testNode(t),
		testPod("waits", 20))})
	wait := stream(t, s, browser)
	wait("waiting", "more than any device has") // all has been read
	ask := func(name string) (int, string) {
		return get(t, browser, s.at("api/why?namespace=team-a&name="+name))
	}
	status, body := ask("waits")
	var e why.Explanation
	if err := json.Unmarshal([]byte(body), &e); err != nil || status != http.StatusOK || len(e.Causes) == 0 ||
		e.Causes[0].Code != why.LargerThanDevice {
		t.Errorf("status %d, %v: %s", status, err, body)
	}
	for _, name := range []string{"nothing", "%3Cimg%20src=x%3E", "", "a,b=c", "..%2f.."} {
		if status, body = ask(name); status != http.StatusNotFound || !strings.Contains(body, `namespace team-a has no pod \"`) {
			t.Errorf("%q: status %d: %s", name, status, body)
		}
	}
}

// TestWhyAfterAPass: what a pass over the waiting pods found out, without the person's rights and
// without the controller, is not the answer about a pod that is opened.
func TestWhyAfterAPass(t *testing.T) {
	node := testNode(t)
	node.Status.Allocatable[corev1.ResourceCPU] = resource.MustParse("2")
	node.Status.Allocatable[corev1.ResourcePods] = resource.MustParse("9")
	holder, waits := testPod("holder", 0), testPod("web-5d-x", 20)
	holder.Spec.NodeName, holder.Status.Phase = node.Name, corev1.PodRunning
	holder.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("2")}
	waits.UID, waits.Labels = "waits", map[string]string{"pod-template-hash": "5d"}
	yes := true
	waits.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "web-5d", Controller: &yes}}
	web := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: "web"}, Spec: appsv1.DeploymentSpec{Paused: true}}
	cpu := testPod("train-7f-y", 8)
	cpu.UID, cpu.Labels, cpu.OwnerReferences = "cpu", map[string]string{"pod-template-hash": "7f"}, slices.Clone(waits.OwnerReferences)
	cpu.OwnerReferences[0].Name = "train-7f"
	cpu.Spec.Containers[0].Resources.Requests[corev1.ResourceCPU] = resource.MustParse("1")

	s, browser := serving(t, Options{Client: testClient(nil, node, holder, waits, cpu, web)})
	wait := stream(t, s, browser)
	wait("waiting", "more than any device has")
	wait("waiting", "insufficient cpu")
	for name, want := range map[string]string{
		"web-5d-x": "deployment/web is paused", "train-7f-y": "kubectl delete pod -n team-a holder",
	} {
		if _, body := get(t, browser, s.at("api/why?namespace=team-a&name="+name)); !strings.Contains(body, want) {
			t.Errorf("%s: no %q in %s", name, want, body)
		}
	}
}

func TestFiles(t *testing.T) {
	s, browser := serving(t, Options{Client: testClient(nil)})
	for path, want := range map[string]int{
		"": 200, "app.js": 200, "style.css": 200, "icon.svg": 200, "nothing": 404, "static/app.js": 404, "api/": 404,
		"%2e%2e/server.go": 404, "../server.go": 403, "..": 403, // which lead out of the path of the session
	} {
		if status, _ := get(t, browser, s.at(path)); status != want {
			t.Errorf("%s has status %d, want %d", path, status, want)
		}
	}
	for _, path := range []string{"app.js", "style.css", "icon.svg"} {
		want := kinds[filepath.Ext(path)]
		answer, err := browser.Get(s.at(path)) //nolint:noctx // of a test
		if err != nil {
			t.Fatal(err)
		}
		_ = answer.Body.Close()
		if got := answer.Header.Get("Content-Type"); got != want {
			t.Errorf("%s has type %q, want %q", path, got, want)
		}
	}
}

func TestRights(t *testing.T) {
	for name, tt := range map[string]struct {
		denied []string
		notes  []string
	}{
		"all":               {},
		"no nodes":          {[]string{"list nodes "}, []string{"You may not list and watch nodes"}},
		"no watch of nodes": {[]string{"watch nodes "}, []string{"You may not list and watch nodes"}},
		"pods of the own":   {[]string{"list pods "}, []string{"only those of namespace team-a are shown"}},
		"no pods":           {[]string{"list pods ", "list pods team-a"}, []string{"neither of all namespaces nor of namespace team-a"}},
		"neither nodes nor pods": {[]string{"list nodes ", "list pods ", "list pods team-a"},
			[]string{"You may not list and watch nodes", "neither of all namespaces"}},
	} {
		t.Run(name, func(t *testing.T) {
			denied := map[string]bool{}
			for _, d := range tt.denied {
				denied[d] = true
			}
			feed, err := NewFeed(t.Context(), Options{Client: testClient(denied), Namespace: "team-a", Now: time.Now})
			if err != nil {
				t.Fatal(err)
			}
			notes := feed.Status().Notes
			if len(notes) != len(tt.notes) {
				t.Fatalf("notes %q, want %d", notes, len(tt.notes))
			}
			for i, want := range tt.notes {
				if !strings.Contains(notes[i], want) {
					t.Errorf("note %q, want %q in it", notes[i], want)
				}
			}
		})
	}
	if _, err := NewFeed(t.Context(), Options{Client: testClient(map[string]bool{"all": true})}); err == nil ||
		!strings.Contains(err.Error(), "ask for the right to list nodes: connection refused") {
		t.Errorf("error %v of an API server that does not answer", err)
	}
}

// TestPartlyRead: nothing is shown before all has been read.
func TestPartlyRead(t *testing.T) {
	var fails atomic.Bool
	fails.Store(true)
	client := testClient(nil, testNode(t), testPod("waits", 20))
	client.PrependReactor("list", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		if fails.Load() {
			return true, nil, errors.New("etcdserver: request timed out")
		}
		return false, nil, nil
	})
	s, browser := serving(t, Options{Client: client})
	wait := stream(t, s, browser)
	if seen := wait("status", "watch pods: "); strings.Contains(seen, "event: nodes") || strings.Contains(seen, "event: waiting") ||
		strings.Contains(seen, "event: complete") {
		t.Errorf("while pods are not read: %s", seen)
	}
	fails.Store(false)
	wait("nodes", `"name":"gcu-1"`)
	wait("waiting", `"total":1`)
	wait("complete", "")
}

// TestStale: the page says why the picture may be old, and when it is not any more.
func TestStale(t *testing.T) {
	for name, tt := range map[string]struct{ then, want string }{
		"no answer":      {"all", "the API server does not answer: ask for the right to list nodes: connection refused."},
		"nodes withheld": {"watch nodes ", "you may not list and watch nodes any more."},
		"pods withheld":  {"list pods team-a", "you may not list and watch pods in namespace team-a any more."},
		"not followed":   {"list pods ", ""},
	} {
		t.Run(name, func(t *testing.T) {
			denied := map[string]bool{"list pods ": true}
			feed, err := NewFeed(t.Context(), Options{Client: testClient(denied), Namespace: "team-a", Now: time.Now})
			if err != nil {
				t.Fatal(err)
			}
			denied[tt.then] = true
			feed.check(t.Context())
			if got := feed.Status().Stale; !strings.HasSuffix(got, tt.want) || (got == "") != (tt.want == "") {
				t.Errorf("it says %q", got)
			}
			denied[tt.then] = tt.then == "list pods "
			feed.check(t.Context())
			if got := feed.Status().Stale; got != "" {
				t.Errorf("it still says %q", got)
			}
		})
	}
}

// TestOpenedAgain: the server ends, with open pages, if a second browser has the token.
func TestOpenedAgain(t *testing.T) {
	feed, err := NewFeed(t.Context(), Options{Client: testClient(nil), Now: time.Now})
	if err != nil {
		t.Fatal(err)
	}
	s, err := Listen(t.Context(), 0, feed, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- s.Run(t.Context()) }()
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	first := &http.Client{Jar: jar}
	if status, _ := get(t, first, s.URL()); status != http.StatusOK {
		t.Fatalf("the page has status %d", status)
	}
	stream(t, s, first)("complete", "")
	if status, body := get(t, first, s.URL()); status != http.StatusOK {
		t.Fatalf("in the same browser: status %d: %s", status, body)
	}
	if status, body := get(t, http.DefaultClient, s.URL()); status != http.StatusForbidden || !strings.Contains(body, "was opened before") {
		t.Errorf("status %d: %s", status, body)
	}
	select {
	case err := <-ended:
		if !errors.Is(err, ErrOpenedAgain) {
			t.Errorf("it ends with %v", err)
		}
	case <-time.After(2 * time.Minute):
		t.Error("it goes on")
	}
}

// TestUseThatIsNotReadAgain: what was measured is not shown once it is not known any more.
func TestUseThatIsNotReadAgain(t *testing.T) {
	report := wire.UsageReport{Node: "gcu-1", Devices: []wire.DeviceUsage{{Device: "A", MemoryBytes: 16, UsedBytes: 3}}}
	for name, tt := range map[string]struct {
		reports nodeusage.Reports
		err     error
	}{
		"the node fails":     {reports: nodeusage.Reports{Failed: []nodeusage.Failure{{Node: "gcu-1", Error: "no pod"}}}},
		"all fail":           {err: errors.New("no pods")},
		"without the device": {reports: nodeusage.Reports{Reports: []wire.UsageReport{{Node: "gcu-1"}}}},
	} {
		t.Run(name, func(t *testing.T) {
			answer, fails := nodeusage.Reports{Reports: []wire.UsageReport{report}}, error(nil)
			usage := func(context.Context, []string) (nodeusage.Reports, error) { return answer, fails }
			feed, err := NewFeed(t.Context(), Options{Client: testClient(nil), Now: time.Now, Usage: usage})
			if err != nil {
				t.Fatal(err)
			}
			feed.cluster.SetNode(testNode(t))
			shown := func() bool {
				feed.measure(t.Context())
				change, _ := feed.cluster.Since(0)
				return strings.Contains(string(change.Nodes[0]), `"used":3`)
			}
			if !shown() {
				t.Error("use is not shown")
			}
			answer, fails = tt.reports, tt.err
			if shown() {
				t.Error("use that is not known any more is shown")
			}
		})
	}
}

// TestUseWithoutNodes: no command is run on nodes that are not shown.
func TestUseWithoutNodes(t *testing.T) {
	usage := func(context.Context, []string) (nodeusage.Reports, error) {
		t.Error("it was asked for")
		return nodeusage.Reports{}, nil
	}
	feed, err := NewFeed(t.Context(), Options{Client: testClient(map[string]bool{"list nodes ": true}), Now: time.Now, Usage: usage})
	if err != nil {
		t.Fatal(err)
	}
	feed.measure(t.Context())
	if notes := feed.Status().Notes; len(notes) != 2 || notes[1] != "The use of devices is not shown: you may not list and watch nodes." {
		t.Errorf("notes %q", notes)
	}
}

func TestUsageThatIsForbidden(t *testing.T) {
	usage := func(context.Context, []string) (nodeusage.Reports, error) {
		return nodeusage.Reports{}, fmt.Errorf("list the pods of divvy-node: %w",
			apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "", errors.New("not you")))
	}
	feed, err := NewFeed(t.Context(), Options{Client: testClient(nil), Now: time.Now, Usage: usage})
	if err != nil {
		t.Fatal(err)
	}
	feed.cluster.SetNode(testNode(t))
	feed.measure(t.Context())
	if notes := feed.Status().Notes; len(notes) != 1 || !strings.Contains(notes[0],
		"The use of devices is not shown: list the pods of divvy-node") {
		t.Errorf("notes %q", notes)
	}
}
