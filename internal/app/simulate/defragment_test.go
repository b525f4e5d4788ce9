package simulate

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/divvy-gpu/divvy/internal/app/kubectl"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/report/why"
)

// scattered are two nodes of two devices, of which no device has 16 units free, and a pod
// that waits for them.
func scattered(t *testing.T) []runtime.Object {
	t.Helper()
	signer, err := wire.NewSigner([]byte(strings.Repeat("k", wire.MinKeyBytes)))
	if err != nil {
		t.Fatal(err)
	}
	var out []runtime.Object
	yes := true
	at := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	for _, name := range []string{"a", "b"} {
		n := liveNode(t, name)
		n.Status.Allocatable[v1.ResourceName(gcuMemory)] = apiresource.MustParse("32")
		n.Status.Allocatable[v1.ResourcePods] = apiresource.MustParse("110")
		n.Status.Conditions = []v1.NodeCondition{{Type: v1.NodeReady, Status: v1.ConditionTrue, LastHeartbeatTime: metav1.NewTime(at)}}
		out = append(out, n)
		for i, units := range []int{4, 10} {
			p := livePod("web-"+name+string(rune('0'+i)), name, units, v1.PodRunning, nil)
			p.UID = types.UID("uid-" + p.Name)
			p.OwnerReferences = []metav1.OwnerReference{{Kind: "ReplicaSet", Name: "web", Controller: &yes}}
			text, err := signer.EncodeGrant(string(p.UID), accel.Grant{Resource: gcuMemory, Node: name, At: at, Confirmed: true,
				Device: accel.DeviceID(name + "-" + string(rune('0'+i))), Index: i, DeviceUnits: 16, Units: accel.Units(units)})
			if err != nil {
				t.Fatal(err)
			}
			p.Annotations = map[string]string{wire.GrantAnnotation: text}
			out = append(out, p)
		}
	}
	w := livePod("train", "", 16, v1.PodPending, nil)
	w.UID = "uid-train"
	return append(out, w)
}

func dumpOf(t *testing.T, objects []runtime.Object) string {
	t.Helper()
	list := map[string]any{"apiVersion": "v1", "kind": "List"}
	var items []any
	for _, o := range objects {
		switch o := o.(type) {
		case *v1.Node:
			o.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}
		case *v1.Pod:
			o.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}
		case *policyv1.PodDisruptionBudget:
			o.TypeMeta = metav1.TypeMeta{APIVersion: "policy/v1", Kind: "PodDisruptionBudget"}
		}
		items = append(items, o)
	}
	list["items"] = items
	text, err := json.Marshal(list)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestDefragment(t *testing.T) {
	budget := &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "web"},
		Spec: policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{}}}
	tests := map[string]struct {
		objects []runtime.Object
		args    []string
		code    int
		want    string
	}{
		"admits":       {scattered(t), nil, 0, "1 move admits the waiting pod."},
		"empties":      {scattered(t)[:5], []string{"--empty-node", "a"}, 0, "2 moves empty node a."},
		"nothing":      {scattered(t)[:6], nil, 0, "No pod waits for a shared resource."},
		"no plan":      {append(scattered(t), budget), nil, ExitNotReached, "No plan helps the waiting pod."},
		"unknown node": {scattered(t), []string{"--empty-node", "z"}, ExitUsage, `--empty-node: the cluster has no node "z"`},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			args := append([]string{"--defragment"}, tt.args...)
			out, _, err := run(t, tt.objects, "", append(args, "--from-cluster")...)
			if code := kubectl.ExitCode(err); code != tt.code {
				t.Errorf("exit code %d, want %d: %v", code, tt.code, err)
			}
			if err != nil {
				out += err.Error()
			}
			if !strings.Contains(out, tt.want) {
				t.Errorf("no %q in\n%s", tt.want, out)
			}
			fromDump, _, err := run(t, nil, dumpOf(t, tt.objects), append(args, "--from-dump", "-")...)
			if err != nil {
				fromDump += err.Error()
			}
			before, _, _ := strings.Cut(fromDump, "  NOTE  The PodDisruptionBudgets")
			if before != out {
				t.Errorf("a dump gives another answer:\n%s\nthan the cluster:\n%s", fromDump, out)
			}
		})
	}
}

func TestDefragmentJSON(t *testing.T) {
	out, _, err := run(t, scattered(t), "", "--from-cluster", "--defragment", "-o", "json")
	var p why.Plan
	if err != nil || json.Unmarshal([]byte(out), &p) != nil || p.Kind != why.PlanKind || len(p.Moves) != 1 || !p.Reached {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestDefragmentMistakes(t *testing.T) {
	file := filepath.Join(t.TempDir(), "dump.json")
	objects := scattered(t)
	for _, o := range objects {
		if n, ok := o.(*v1.Node); ok {
			n.Status.Conditions = nil
		}
	}
	if err := os.WriteFile(file, []byte(dumpOf(t, objects)), 0o600); err != nil {
		t.Fatal(err)
	}
	tests := map[string]struct {
		args []string
		code int
		want string
	}{
		"another question": {[]string{"--from-cluster", "--defragment", "--churn"}, ExitUsage,
			"--defragment cannot be combined with --churn, --find-nodes or --dump"},
		"a node without it": {[]string{"--from-cluster", "--empty-node", "a"}, 1, "--empty-node requires --defragment"},
		"no cluster":        {[]string{"--from-cluster", "--defragment"}, ExitUnknown, "there is no cluster"},
		"no file":           {[]string{"--from-dump", "/none", "--defragment"}, ExitUnknown, "open /none"},
		"a small dump": {[]string{"--from-dump", file, "--defragment"}, ExitUnknown,
			"its nodes have no conditions, as in a file of --dump"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			_, _, err := run(t, nil, "", tt.args...)
			if err == nil || !strings.Contains(err.Error(), tt.want) || kubectl.ExitCode(err) != tt.code {
				t.Errorf("exit code %d, %v", kubectl.ExitCode(err), err)
			}
		})
	}
}

// TestDefragmentRights: without the budgets there is a plan that says so, without nodes or
// pods none.
func TestDefragmentRights(t *testing.T) {
	for resource, code := range map[string]int{"poddisruptionbudgets": 0, "pods": ExitUnknown, "nodes": ExitUnknown} {
		t.Run(resource, func(t *testing.T) {
			client := fake.NewClientset(scattered(t)...)
			client.PrependReactor("list", resource, func(clienttesting.Action) (bool, runtime.Object, error) {
				return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "", nil)
			})
			var out strings.Builder
			o := DefaultOptions()
			o.FromCluster, o.Defragment = true, true
			err := Run(t.Context(), o, func() (kube.Clients, error) { return kube.Clients{Kubernetes: client}, nil }, nil, &out, &out)
			if kubectl.ExitCode(err) != code {
				t.Errorf("exit code %d, want %d: %v", kubectl.ExitCode(err), code, err)
			}
			if code == 0 && !strings.Contains(out.String(), "NOTE  The PodDisruptionBudgets could not be read") {
				t.Error(out.String())
			}
		})
	}
}
