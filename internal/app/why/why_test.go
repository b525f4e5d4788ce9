package why

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/divvy-gpu/divvy/internal/app/kubectl"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/report/why"
)

const memory = "enflame.com/gcu-memory"

var now = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func node(t *testing.T) *corev1.Node {
	t.Helper()
	text, err := wire.EncodeInventory([]accel.Inventory{{Resource: memory, Unit: "1", Several: true, Shares: []accel.Share{
		{Units: 16, Device: accel.Device{Index: 0, ID: "a", NUMANode: accel.NoNUMA}},
		{Units: 16, Device: accel.Device{Index: 1, ID: "b", NUMANode: accel.NoNUMA}},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	return &corev1.Node{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
		ObjectMeta: metav1.ObjectMeta{Name: "gcu-1", Annotations: map[string]string{wire.InventoryAnnotation: text},
			Labels: map[string]string{"enflame.com/gcushare": "true"}},
		Status: corev1.NodeStatus{
			Allocatable: corev1.ResourceList{memory: resource.MustParse("32"), corev1.ResourcePods: resource.MustParse("110")},
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue,
				LastHeartbeatTime: metav1.NewTime(now)}},
		},
	}
}

func pod(name, units string, phase corev1.PodPhase) *corev1.Pod {
	p := &corev1.Pod{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: name, UID: "uid",
			CreationTimestamp: metav1.NewTime(now.Add(-5 * time.Minute))},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Resources: corev1.ResourceRequirements{
			Requests: corev1.ResourceList{memory: resource.MustParse(units)},
			Limits:   corev1.ResourceList{memory: resource.MustParse(units)},
		}}}},
		Status: corev1.PodStatus{Phase: phase, Conditions: []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse,
			Reason: corev1.PodReasonUnschedulable, Message: "0/1 nodes are available: 1 insufficient GCU Memory in one gcu device."}}},
	}
	if phase == corev1.PodRunning {
		p.Spec.NodeName, p.Status.Conditions = "gcu-1", nil
	}
	return p
}

// run runs the subcommand in a cluster of these objects. forbidden are resources that may
// not be listed cluster-wide.
func run(t *testing.T, objects []runtime.Object, forbidden, stdin string, args ...string) (string, error) {
	t.Helper()
	var others []*unstructured.Unstructured
	objects = slices.DeleteFunc(slices.Clone(objects), func(o runtime.Object) bool {
		other, is := o.(*unstructured.Unstructured)
		if is {
			others = append(others, other)
		}
		return is
	})
	client := fake.NewClientset(objects...)
	client.PrependReactor("list", "*", func(a clienttesting.Action) (bool, runtime.Object, error) {
		if a.GetNamespace() == "" && a.GetResource().Resource == forbidden {
			return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: forbidden}, "", errors.New("no"))
		}
		return false, nil, nil
	})
	client.PrependReactor("create", "selfsubjectaccessreviews", func(a clienttesting.Action) (bool, runtime.Object, error) {
		review, _ := a.(clienttesting.CreateAction).GetObject().(*authorizationv1.SelfSubjectAccessReview)
		review.Status.Allowed = review.Spec.ResourceAttributes.Namespace == "team-a"
		return true, review, nil
	})
	cmd := command(func() (Clients, string, error) {
		return Clients{client, queues(t, forbidden, others...)}, "team-a", nil
	},
		func() time.Time { return now })
	var out bytes.Buffer
	cmd.SetArgs(append([]string{}, args...))
	cmd.SetIn(strings.NewReader(stdin))
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	cmd.SilenceUsage, cmd.SilenceErrors = true, true
	err := cmd.ExecuteContext(t.Context())
	return out.String(), err
}

// queues is a client of the objects of Kueue and PodGroups. Without any the API server does not
// know their kinds.
func queues(t *testing.T, forbidden string, objects ...*unstructured.Unstructured) dynamic.Interface {
	t.Helper()
	kinds := map[schema.GroupVersionResource]string{}
	for _, version := range []string{"v1beta2", "v1beta1", "v1alpha3", "v1alpha2", "v1alpha1"} {
		for group, resource := range map[string]string{why.GroupKueue: "workloads", why.GroupPlugins: "podgroups",
			why.GroupScheduling: "podgroups", why.VisibilityKueue: "localqueues"} {
			kinds[schema.GroupVersionResource{Group: group, Version: version, Resource: resource}] = "List"
		}
	}
	scheme := runtime.NewScheme()
	client := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(scheme, kinds)
	client.PrependReactor("*", "*", func(a clienttesting.Action) (bool, runtime.Object, error) {
		var found []unstructured.Unstructured
		of := a.GetResource()
		for _, o := range objects {
			plural := map[string]string{"Workload": "workloads", "PodGroup": "podgroups",
				"PendingWorkloadsSummary": "localqueues"}[o.GetKind()]
			if o.GroupVersionKind().GroupVersion() == of.GroupVersion() && plural == of.Resource {
				found = append(found, *o)
			}
		}
		gr := of.GroupResource()
		switch {
		case forbidden == of.Resource:
			return true, nil, apierrors.NewForbidden(gr, "", errors.New("no"))
		case len(found) == 0:
			return true, nil, apierrors.NewNotFound(gr, "")
		case a.GetVerb() == "get":
			return true, &found[0], nil
		}
		return true, &unstructured.UnstructuredList{Object: map[string]any{"apiVersion": of.GroupVersion().String(), "kind": "List"},
			Items: found}, nil
	})
	return client
}

func object(t *testing.T, text string) *unstructured.Unstructured {
	t.Helper()
	var o unstructured.Unstructured
	if err := o.UnmarshalJSON([]byte(text)); err != nil {
		t.Fatal(err)
	}
	return &o
}

func dumpOf(t *testing.T, objects ...runtime.Object) string {
	t.Helper()
	text, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "List", "items": objects})
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestCommand(t *testing.T) {
	yes := true
	owned := pod("train-0", "20", corev1.PodPending)
	owned.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "train", Controller: &yes}}
	meta := metav1.ObjectMeta{Namespace: "team-a", Name: "train"}
	waiting := []runtime.Object{node(t), pod("train-0", "20", corev1.PodPending)}
	slim := node(t)
	slim.Status.Conditions = nil
	file := filepath.Join(t.TempDir(), "dump.json")
	if err := os.WriteFile(file, []byte(dumpOf(t, waiting...)), 0o600); err != nil {
		t.Fatal(err)
	}
	queued := object(t, `{"apiVersion":"kueue.x-k8s.io/v1beta1","kind":"Workload","metadata":{"namespace":"team-a","name":"job-train-1",
		"ownerReferences":[{"apiVersion":"batch/v1","kind":"Job","name":"train","uid":"u"}]},"spec":{"queueName":"q"},
		"status":{"conditions":[		{"type":"QuotaReserved","status":"False","reason":"Pending",
		"message":"insufficient unused quota for x in flavor f, 3 more needed"}]}}`)
	admitted := queued.DeepCopy()
	_ = unstructured.SetNestedField(admitted.Object, []any{map[string]any{"type": "Admitted", "status": "True"}}, "status", "conditions")
	pending := object(t, `{"apiVersion":"visibility.kueue.x-k8s.io/v1beta1","kind":"PendingWorkloadsSummary",
		"metadata":{"name":"q"},"items":[
		{"metadata":{"name":"other"}},{"metadata":{"name":"job-train-1"},"positionInClusterQueue":4,"positionInLocalQueue":1}]}`)
	suspended := &batchv1.Job{TypeMeta: metav1.TypeMeta{APIVersion: "batch/v1", Kind: "Job"}, ObjectMeta: meta,
		Spec: batchv1.JobSpec{Suspend: &yes}}
	group := object(t, `{"apiVersion":"scheduling.x-k8s.io/v1alpha1","kind":"PodGroup","metadata":{"namespace":"team-a","name":"g"},
		"spec":{"minMember":2}}`)
	member := pod("train-0", "20", corev1.PodPending)
	member.Labels = map[string]string{"scheduling.x-k8s.io/pod-group": "g"}
	for name, tt := range map[string]struct {
		objects   []runtime.Object
		forbidden string
		stdin     string
		args      []string
		code      int
		want      []string // in the output or the error
	}{
		"a pod that waits": {objects: waiting, args: []string{"train-0"}, code: ExitWaits, want: []string{
			"train-0 has waited 5 min: 20 units of enflame.com/gcu-memory (20 GB) are more than any device has.",
			"spread over 2 devices (10 each)  gcu-1 devices 0, 1",
			"$ kubectl annotate pod -n team-a train-0 divvy.dev/devices=2"}},
		"a pod that runs": {objects: []runtime.Object{node(t), pod("train-0", "8", corev1.PodRunning)}, args: []string{"train-0"},
			want: []string{"train-0 does not wait."}},
		"JSON": {objects: waiting, args: []string{"train-0", "-o", "json"}, code: ExitWaits,
			want: []string{`"kind": "PodExplanation"`, `"code": "largerThanDevice"`}},
		"all": {objects: waiting, args: []string{"--all"}, code: ExitWaits,
			want: []string{"train-0  waits  5 min  largerThanDevice  spread"}},
		"all as JSON": {objects: waiting, args: []string{"--all", "-o", "json"}, code: ExitWaits,
			want: []string{`"kind": "PodExplanationList"`}},
		"none waits": {objects: waiting[:1], args: []string{"--all"}, want: []string{"No pod waits in namespace team-a."}},
		"a StatefulSet": {objects: []runtime.Object{node(t), owned, &appsv1.StatefulSet{ObjectMeta: meta}},
			args: []string{"sts/train"}, code: ExitWaits,
			want: []string{"train-0 has waited", "statefulset/train"}},
		"a Deployment without pods": {objects: []runtime.Object{node(t), &appsv1.Deployment{ObjectMeta: meta,
			Status: appsv1.DeploymentStatus{Conditions: []appsv1.DeploymentCondition{
				{Type: appsv1.DeploymentReplicaFailure, Status: corev1.ConditionTrue, Message: "exceeded quota: gcu"}}}}},
			args: []string{"deployment/train"}, code: ExitWaits, want: []string{"0 of 1 pod exist: exceeded quota: gcu"}},
		"a Job that is suspended": {objects: []runtime.Object{node(t), &batchv1.Job{ObjectMeta: meta,
			Spec: batchv1.JobSpec{Suspend: &yes}}}, args: []string{"job/train"}, code: ExitWaits,
			want: []string{"job/train waits: the Job is suspended."}},
		"a Workload": {objects: []runtime.Object{node(t), queued, pending, suspended}, args: []string{"workload/job-train-1"},
			code: ExitWaits,
			want: []string{"raise the quota of x in flavor f by 3", "place 5 in the cluster queue, 2 in local queue q"}},
		"a Workload whose place is unknown": {objects: []runtime.Object{node(t), queued, suspended}, args: []string{"wl/job-train-1"},
			code: ExitWaits, want: []string{"3 more needed", "Its place in the queue is unknown"}},
		"a Workload that is admitted": {objects: []runtime.Object{node(t), admitted, &batchv1.Job{ObjectMeta: meta}},
			args: []string{"workload/job-train-1"}, code: ExitWaits, want: []string{"job/train has too few pods: 0 of 1 pod exist"}},
		"the Job of a Workload": {objects: []runtime.Object{node(t), queued, suspended}, args: []string{"job/train"}, code: ExitWaits,
			want: []string{"Kueue has not admitted it"}},
		"a suspended Job and no right to Workloads": {objects: []runtime.Object{node(t), suspended}, forbidden: "workloads",
			args: []string{"job/train"}, code: ExitWaits, want: []string{"the Job is suspended",
				"The Workloads of Kueue could not be read"}},
		"a Workload without the right to it": {objects: []runtime.Object{node(t)}, forbidden: "workloads", args: []string{"workload/x"},
			code: ExitUnknown, want: []string{"the Workloads of Kueue cannot be read"}},
		"a Workload without Kueue": {objects: []runtime.Object{node(t)}, args: []string{"workload/x"}, code: ExitUnknown,
			want: []string{"the Workloads of Kueue cannot be read: it is not installed"}},
		"an unknown Workload": {objects: []runtime.Object{node(t), queued}, args: []string{"workload/x"}, code: ExitUsage,
			want: []string{`namespace team-a has no workload "x"`}},
		"a Workload of a dump": {stdin: dumpOf(t, node(t), queued, suspended), code: ExitWaits,
			args: []string{"workload/job-train-1", "-n", "team-a", "--from-dump", "-"}, want: []string{"raise the quota of x"}},
		"an unknown Workload of a dump": {stdin: dumpOf(t, node(t), queued), code: ExitUsage,
			args: []string{"workload/x", "--from-dump", "-"}, want: []string{`has no workload "x"`}},
		"a gang": {objects: []runtime.Object{node(t), member, group}, args: []string{"train-0"}, code: ExitWaits,
			want: []string{"pod group g needs 2 pods at once, and 1 exists"}},
		"a gang without the right to it": {objects: []runtime.Object{node(t), member}, forbidden: "podgroups", args: []string{"train-0"},
			code: ExitWaits, want: []string{"The PodGroups could not be read"}},
		"no right to budgets": {objects: []runtime.Object{node(t), pod("train-0", "16", corev1.PodPending), pod("o", "32",
			corev1.PodRunning)},
			forbidden: "poddisruptionbudgets", args: []string{"train-0"}, code: ExitWaits,
			want: []string{"The PodDisruptionBudgets could not be read"}},
		"an unknown pod": {objects: waiting, args: []string{"other"}, code: ExitUsage,
			want: []string{`namespace team-a has no pod "other"`}},
		"an unknown controller": {objects: waiting, args: []string{"job/other"}, code: ExitUsage,
			want: []string{`namespace team-a has no job "other"`}},
		"an unknown kind": {args: []string{"cronjob/x"}, code: ExitUsage, want: []string{`the kind "cronjob" cannot be explained`}},
		"nothing named":   {code: ExitUsage, want: []string{"exactly one POD"}},
		"too much named":  {args: []string{"--all", "x"}, code: ExitUsage, want: []string{"--all explains all pods"}},
		"an unknown flag": {args: []string{"--some"}, code: ExitUsage, want: []string{"unknown flag"}},
		"an unknown format": {args: []string{"x", "-o", "yaml", "--timeout", "0s", "-n", "A"}, code: ExitUsage,
			want: []string{`--output "yaml"`, "--timeout 0s", `--namespace "A"`}},
		"no right to nodes": {objects: waiting, forbidden: "nodes", args: []string{"train-0"}, code: ExitUnknown, want: []string{
			"train-0 has waited 5 min: 1 insufficient GCU Memory in one gcu device.", "The nodes could not be read", "nodes is forbidden"}},
		"no right to pods of others": {objects: waiting, forbidden: "pods", args: []string{"train-0"}, code: ExitUnknown, want: []string{
			"The pods of other namespaces could not be read"}},
		"a dump": {args: []string{"train-0", "-n", "team-a", "--from-dump", file}, code: ExitWaits,
			want: []string{"train-0 has waited 5 min: 20 units", "spread over 2 devices"}},
		"a dump on standard input": {stdin: dumpOf(t, waiting...), args: []string{"train-0", "-n", "team-a", "--from-dump", "-"},
			code: ExitWaits, want: []string{"train-0 has waited 5 min: 20 units"}},
		"a dump of simulate": {stdin: dumpOf(t, slim), args: []string{"x", "--from-dump", "-"}, code: ExitUnknown,
			want: []string{"its nodes have no conditions"}},
		"a dump without nodes": {stdin: dumpOf(t), args: []string{"x", "--from-dump", "-"}, code: ExitUnknown,
			want: []string{"no nodes among"}},
		"a broken dump": {stdin: "{\n", args: []string{"x", "--from-dump", "-"}, code: ExitUnknown,
			want: []string{"standard input:2"}},
		"a dump that is no list": {stdin: "[]", args: []string{"x", "--from-dump", "-"}, code: ExitUnknown,
			want: []string{"standard input: it must be a List of nodes and pods"}},
		"no dump": {args: []string{"x", "--from-dump", "/nonexistent"}, code: ExitUnknown, want: []string{"no such file"}},
		"a dump without the controller": {stdin: dumpOf(t, waiting...), args: []string{"job/x", "--from-dump", "-"}, code: ExitUsage,
			want: []string{`namespace default has no job "x"`}},
		"a cluster without Divvy": {objects: []runtime.Object{&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}},
			pod("train-0", "8", corev1.PodPending)}, args: []string{"train-0"}, code: ExitWaits,
			want: []string{"no node offers enflame.com/gcu-memory", "No node publishes devices that Divvy shares"}},
	} {
		t.Run(name, func(t *testing.T) {
			out, err := run(t, tt.objects, tt.forbidden, tt.stdin, tt.args...)
			if code := kubectl.ExitCode(err); code != tt.code {
				t.Errorf("exit code %d, want %d", code, tt.code)
			}
			if err != nil {
				out += err.Error()
			}
			for _, want := range tt.want {
				if !strings.Contains(out, want) {
					t.Errorf("%q is not in:\n%s", want, out)
				}
			}
		})
	}
}

// TestDeleteCommands: a pod of a namespace in which the person may not delete pods has no
// command.
func TestDeleteCommands(t *testing.T) {
	other := pod("other", "32", corev1.PodRunning)
	other.Namespace, other.UID = "team-b", "other"
	out, err := run(t, []runtime.Object{node(t), pod("train-0", "16", corev1.PodPending), other}, "", "", "train-0", "-o", "json")
	if kubectl.ExitCode(err) != ExitWaits {
		t.Fatal(err)
	}
	var e why.Explanation
	if err := json.Unmarshal([]byte(out), &e); err != nil {
		t.Fatal(err)
	}
	for _, c := range e.Changes {
		if c.Kind == why.ChangeEnd && (len(c.Commands) > 0 || c.By == "") {
			t.Errorf("%+v", c)
		}
	}
}
