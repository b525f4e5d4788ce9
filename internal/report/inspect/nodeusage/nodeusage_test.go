package nodeusage

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"

	"github.com/divvy-gpu/divvy/internal/core/wire"
)

const namespace = "divvy-system"

// daemon is a pod of divvy-node.
func daemon(name, node string, change ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name,
		Labels: map[string]string{"app.kubernetes.io/name": "divvy-node"}, CreationTimestamp: metav1.Unix(1000, 0)}}
	p.Spec.NodeName, p.Status.Phase = node, corev1.PodRunning
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	for _, f := range change {
		f(p)
	}
	return p
}

func unready(p *corev1.Pod) { p.Status.Conditions = nil }
func newer(p *corev1.Pod)   { p.CreationTimestamp = metav1.Unix(2000, 0) }

// answering prints the pod's name as the device of a report; pods whose names begin with "bad-"
// fail.
func answering(t *testing.T) Exec {
	t.Helper()
	return func(_ context.Context, pod *corev1.Pod, container string, command []string, stdout, stderr io.Writer) error {
		if container != "divvy-node" || strings.Join(command, " ") != "/usr/bin/divvy-node usage --output json" {
			t.Errorf("ran %q in %s", command, container)
		}
		switch pod.Name {
		case "bad-off":
			fmt.Fprintln(stderr, "a warning\ndivvy-node: use is not measured on this node")
			return errors.New("command terminated with exit code 1")
		case "bad-denied":
			return errors.New("pods \"bad-denied\" is forbidden")
		case "bad-text":
			fmt.Fprintln(stdout, "hello")
			return nil
		}
		return json.NewEncoder(stdout).Encode(wire.UsageReport{Node: "itself", Time: time.Unix(1e9, 0).UTC(),
			Devices: []wire.DeviceUsage{{Vendor: "nvidia", Device: "of-" + "pod", MemoryBytes: 1 << 30, Problem: pod.Name}}})
	}
}

func TestRun(t *testing.T) {
	good := []*corev1.Pod{daemon("one", "node-a"), daemon("two", "node-b")}
	bad := []*corev1.Pod{daemon("bad-off", "node-c"), daemon("bad-denied", "node-d"), daemon("bad-text", "node-e")}
	line := func(node, pod string) string {
		return "NODE " + node + ": measured at 2001-09-09T01:46:40Z\n  nvidia 0 of-pod: total 1.00 GiB, used -: " + pod + "\n"
	}
	tests := map[string]struct {
		pods  []*corev1.Pod
		nodes []string
		want  string
		err   string
	}{
		"all nodes":       {good, nil, line("node-a", "one") + "\n" + line("node-b", "two"), ""},
		"one node, twice": {good, []string{"node-b", "node-b"}, line("node-b", "two"), ""},
		"nodes that fail": {append(bad, good...), []string{"node-e", "node-d", "node-c", "node-a", "nowhere"}, line("node-a", "one") +
			"NODE node-c: use is not measured on this node\n" +
			"NODE node-d: run divvy-node usage in pod bad-denied: pods \"bad-denied\" is forbidden\n" +
			"NODE node-e: the answer of pod bad-text is not a report: invalid character 'h' looking for beginning of value\n" +
			"NODE nowhere: no pod of divvy-node runs on the node\n", ""},
		"no node answers": {bad[:1], nil, "NODE node-c: use is not measured on this node\n", "no node reported"},
		"no pods":         {nil, nil, "", `there is no pod of divvy-node in namespace "divvy-system"`},
		"an update: the ready one": {[]*corev1.Pod{daemon("new", "node-a", newer, unready), daemon("old", "node-a")}, nil,
			line("node-a", "old"), ""},
		"an update: the newer one": {[]*corev1.Pod{daemon("a-old", "node-a"), daemon("b-new", "node-a", newer)}, nil,
			line("node-a", "b-new"), ""},
		"an update: not the one that ends": {[]*corev1.Pod{
			daemon("new", "node-a", unready), daemon("old", "node-a", newer, func(p *corev1.Pod) {
				p.DeletionTimestamp, p.Finalizers = new(metav1.Now()), []string{"x/y"}
			}),
		}, nil, line("node-a", "new"), ""},
		"pods that do not run": {[]*corev1.Pod{daemon("waits", "", nil...), daemon("ended", "node-a", func(p *corev1.Pod) {
			p.Status.Phase = corev1.PodFailed
		})}, []string{"node-a"}, "NODE node-a: no pod of divvy-node runs on the node\n", "no node reported"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			var objects []runtime.Object
			for _, p := range tt.pods {
				objects = append(objects, p)
			}
			other := daemon("other", "node-z")
			other.Labels = nil
			client := fake.NewClientset(append(objects, other)...)
			var out strings.Builder
			err := Run(t.Context(), Options{Namespace: namespace, Nodes: tt.nodes}, client, answering(t), &out)
			if tt.err == "" && err != nil || tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) {
				t.Errorf("error %v, want %q", err, tt.err)
			}
			if diff := cmp.Diff(tt.want, out.String()); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestRunAsJSON(t *testing.T) {
	client := fake.NewClientset(daemon("one", "node-a"), daemon("bad-off", "node-c"))
	var out strings.Builder
	if err := Run(t.Context(), Options{JSON: true, Namespace: namespace}, client, answering(t), &out); err != nil {
		t.Fatal(err)
	}
	var got Reports
	if err := json.Unmarshal([]byte(out.String()), &got); err != nil {
		t.Fatal(err)
	}
	if len(got.Reports) != 1 || got.Reports[0].Node != "node-a" ||
		!cmp.Equal(got.Failed, []Failure{{"node-c", "use is not measured on this node"}}) {
		t.Errorf("%+v", got)
	}
}

// TestNodesAreAskedAtOnce, but not all of them, and one that does not answer is not waited for
// longer than the caller does.
func TestNodesAreAskedAtOnce(t *testing.T) {
	pods, nodes := map[string]*corev1.Pod{}, []string{}
	for i := range 3 * parallel {
		name := fmt.Sprintf("node-%02d", i)
		pods[name], nodes = daemon(name, name), append(nodes, name)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var mu sync.Mutex
	var now, most int
	got := gather(ctx, nodes, pods, func(ctx context.Context, _ *corev1.Pod, _ string, _ []string, _, _ io.Writer) error {
		if until, ok := ctx.Deadline(); !ok || time.Until(until) > nodeLimit {
			t.Error("a node has more time than 10 s")
		}
		mu.Lock()
		now++
		most = max(most, now)
		if now == parallel {
			cancel()
		}
		mu.Unlock()
		<-ctx.Done()
		mu.Lock()
		now--
		mu.Unlock()
		return ctx.Err()
	})
	if len(got.Failed) != len(nodes) || most != parallel {
		t.Errorf("%d failed, %d at once", len(got.Failed), most)
	}
}

func TestAnswerThatIsTooLong(t *testing.T) {
	tooLong := func(_ context.Context, _ *corev1.Pod, _ string, _ []string, stdout, _ io.Writer) error {
		_, err := stdout.Write(make([]byte, maxBytes+1))
		return err
	}
	_, err := ask(t.Context(), "n", daemon("p", "n"), tooLong)
	if err == nil || !strings.Contains(err.Error(), "more than") {
		t.Errorf("%v", err)
	}
}

// TestRemoteSaysWhatTheAPIServerSays, whichever way it was asked.
func TestRemoteSaysWhatTheAPIServerSays(t *testing.T) {
	var asked []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.Method+" "+r.URL.Path)
		if c := r.URL.Query(); c.Get("container") != "divvy-node" || !cmp.Equal(c["command"], command()) || c.Get("stdin") != "" {
			t.Errorf("asked for %v", c)
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		_ = json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure",
			Reason: metav1.StatusReasonForbidden, Code: http.StatusForbidden, Message: "you cannot create resource pods/exec"})
	}))
	defer server.Close()
	config := &rest.Config{Host: server.URL}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	_, err = ask(t.Context(), "n", daemon("p", "n"), Remote(config, client))
	if err == nil || !strings.Contains(err.Error(), "you cannot create resource pods/exec") {
		t.Errorf("%v", err)
	}
	const path = " /api/v1/namespaces/divvy-system/pods/p/exec"
	if diff := cmp.Diff([]string{"GET" + path, "POST" + path}, asked); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
