package uninstall

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	clienttesting "k8s.io/client-go/testing"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/pool"
	"github.com/divvy-gpu/divvy/internal/testing/kubetest"
)

const (
	namespace = "divvy-system"
	memory    = "enflame.com/gcu-memory"
	count     = "enflame.com/gcu-count"
)

func named(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Name: name, Namespace: namespace}
}

// node returns a node that answers, with what a daemon writes.
func node(name string, resources map[string]string) *corev1.Node {
	n := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name: name,
			Labels: map[string]string{
				"kubernetes.io/hostname": name, "enflame.com/gcushare": "true", "divvy.dev/enflame.present": "true",
				"nvidia.com/gpu.product": "A100",
			},
			Annotations: map[string]string{
				wire.InventoryAnnotation: "{}", wire.LabelsAnnotation: "divvy.dev/enflame.present,divvy.dev/gone,kubernetes.io/hostname",
				wire.CountsAnnotation:     count,
				wire.QuarantineAnnotation: "{}", wire.DeviceRequestAnnotation: "{}", "other": "kept",
			},
		},
		Status: corev1.NodeStatus{
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue},
				{Type: wire.OveruseCondition, Status: corev1.ConditionFalse}},
			Capacity:    corev1.ResourceList{"cpu": resource.MustParse("4")},
			Allocatable: corev1.ResourceList{"cpu": resource.MustParse("4")},
		},
	}
	for name, amount := range resources {
		n.Status.Capacity[corev1.ResourceName(name)] = resource.MustParse(amount)
		n.Status.Allocatable[corev1.ResourceName(name)] = resource.MustParse(amount)
	}
	return n
}

// away makes a node one that does not answer.
func away(n *corev1.Node) *corev1.Node {
	n.Status.Conditions[0].Status = corev1.ConditionUnknown
	return n
}

// daemons returns a DaemonSet and its pods, by node; a pod is ready or not.
func daemons(name string, ready map[string]bool) []runtime.Object {
	labels := map[string]string{"app.kubernetes.io/name": name}
	set := &appsv1.DaemonSet{ObjectMeta: named(name), Spec: appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: labels}}}
	set.Generation, set.Status.ObservedGeneration, set.Status.DesiredNumberScheduled = 1, 1, int32(len(ready))
	set.UID = types.UID(name)
	out := []runtime.Object{set}
	for _, on := range slices.Sorted(maps.Keys(ready)) {
		p := &corev1.Pod{ObjectMeta: named(name + "-" + on), Spec: corev1.PodSpec{NodeName: on}}
		p.Labels = labels
		p.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(set, appsv1.SchemeGroupVersion.WithKind("DaemonSet"))}
		if ready[on] {
			p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		} else {
			waiting := &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff"}
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Waiting: waiting}}}
		}
		out = append(out, p)
	}
	return out
}

// installation is what the chart made, and programs after it.
func installation(more ...runtime.Object) []runtime.Object {
	out := []runtime.Object{
		&appsv1.DaemonSet{ObjectMeta: named("divvy-schedconf"),
			Spec: appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "schedconf"}}}},
		&appsv1.DaemonSet{ObjectMeta: named("divvy-node"),
			Spec: appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "node"}}}},
		&appsv1.Deployment{ObjectMeta: named("divvy-extender"),
			Spec: appsv1.DeploymentSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "extender"}}}},
		&admissionv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "bwki-webhook-cfg"}},
		&admissionv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "somebody-elses"}},
		&coordinationv1.Lease{ObjectMeta: named("divvy-extender")},
		&coordinationv1.Lease{ObjectMeta: named("somebody-elses")},
	}
	for _, ns := range []string{"a", "b"} {
		out = append(out, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{
			Name: pool.CASecret, Namespace: ns, Labels: map[string]string{"divvy.dev/managed-by": "divvy-pool"},
		}})
	}
	token := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: pool.CASecret,
		Namespace: "kube-system", Labels: map[string]string{"divvy.dev/pool-import": "true"}}}
	return append(append(out, token), more...)
}

// options are those of a whole installation.
func options() Options {
	o := Options{Namespace: namespace, Timeout: 270 * time.Second}
	o.Before, o.Namespace, o.TokenCopies, o.Hold = true, namespace, true, 2*time.Minute
	o.SchedulerDaemon, o.SchedulerHook, o.NodeHook = "divvy-schedconf", "divvy-uninstall-scheduler", "divvy-uninstall-node"
	o.Remove = []string{
		"lease/divvy-system/divvy-extender", "deployment/divvy-system/divvy-extender", "daemonset/divvy-system/divvy-node",
		"mutatingwebhookconfiguration/bwki-webhook-cfg", "validatingwebhookconfiguration/not-there",
	}
	return o
}

// run runs on a server with the objects, in a time of its own. It returns what was
// printed and what was written, in order.
func run(t *testing.T, o Options, server *kubetest.Server, client kubernetes.Interface) (out string, writes []string, err error) {
	t.Helper()
	var mu sync.Mutex // guards written: others may write as well
	var written []string
	server.OnWrite(func(verb string, obj runtime.Object) {
		m, accessErr := meta.Accessor(obj)
		if accessErr != nil {
			t.Error(accessErr)
			return
		}
		kind := strings.ToLower(strings.TrimPrefix(fmt.Sprintf("%T", obj), "*v1."))
		mu.Lock()
		defer mu.Unlock()
		written = append(written, strings.Join([]string{verb, kind, m.GetName()}, " "))
	})
	var printed bytes.Buffer
	err = Run(t.Context(), o, client, &printed)
	mu.Lock()
	defer mu.Unlock()
	return printed.String(), slices.Clone(written), err
}

func newServer(t *testing.T, objects []runtime.Object) *kubetest.Server {
	t.Helper()
	server, err := kubetest.New(objects...)
	if err != nil {
		t.Fatal(err)
	}
	return server
}

func TestBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newServer(t, slices.Concat(
			installation(node("n1", map[string]string{memory: "128", count: "8"}),
				&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "plain", Annotations: map[string]string{"other": "kept"}}}),
			daemons("divvy-uninstall-scheduler", map[string]bool{"n1": true}),
			daemons("divvy-uninstall-node", map[string]bool{"n1": true})))
		began := time.Now()
		out, writes, err := run(t, options(), server, server.Client(nil))
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		// kube-scheduler first, then webhooks, daemons, servers; the rest when nothing
		// runs that could make it again.
		want := []string{
			"delete daemonset divvy-schedconf", "delete mutatingwebhookconfiguration bwki-webhook-cfg", "delete daemonset divvy-node",
			"delete deployment divvy-extender", "patch node n1", "patch node n1", "patch node n1", "delete lease divvy-extender",
			"delete secret " + pool.CASecret, "delete secret " + pool.CASecret,
		}
		if diff := gocmp.Diff(want, writes); diff != "" {
			t.Errorf("writes (-want +got):\n%s", diff)
		}
		if strings.Contains(out, "remains") {
			t.Errorf("something remains:\n%s", out)
		}
		if lasted := time.Since(began); lasted < 2*time.Minute || lasted > 3*time.Minute {
			t.Errorf("it lasted %v, want what --hold says and little more", lasted)
		}
		client := server.Client(nil)
		n, err := client.CoreV1().Nodes().Get(t.Context(), "n1", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		wantLabels := map[string]string{"kubernetes.io/hostname": "n1", "enflame.com/gcushare": "true", "nvidia.com/gpu.product": "A100"}
		if diff := gocmp.Diff(wantLabels, n.Labels); diff != "" {
			t.Errorf("labels (-want +got):\n%s", diff)
		}
		if diff := gocmp.Diff(map[string]string{"other": "kept"}, n.Annotations); diff != "" {
			t.Errorf("annotations (-want +got):\n%s", diff)
		}
		if has(n, count) || !has(n, memory) || !has(n, "cpu") {
			t.Errorf("capacity %v: want no %s; %s is kubelet's", n.Status.Capacity, count, memory)
		}
		if len(n.Status.Conditions) != 1 || n.Status.Conditions[0].Type != corev1.NodeReady {
			t.Errorf("conditions %v: want kubelet's alone", n.Status.Conditions)
		}
		if _, err := client.CoreV1().Secrets("kube-system").Get(t.Context(), pool.CASecret, metav1.GetOptions{}); err != nil {
			t.Errorf("the token itself: %v", err)
		}
		// Again, there is nothing to do.
		again := newAgain(t, server, client)
		if len(again) > 0 {
			t.Errorf("again, it wrote %q", again)
		}
	})
}

func newAgain(t *testing.T, server *kubetest.Server, client kubernetes.Interface) []string {
	t.Helper()
	out, writes, err := run(t, options(), server, client)
	if err != nil || strings.Contains(out, "remains") {
		t.Errorf("again: %v\n%s", err, out)
	}
	return writes
}

func TestBeforeStopsWhereASchedulerStillAsks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newServer(t, slices.Concat(installation(node("n1", nil), node("n2", nil)),
			daemons("divvy-uninstall-scheduler", map[string]bool{"n1": true, "n2": false}), daemons("divvy-uninstall-node", nil)))
		out, writes, err := run(t, options(), server, server.Client(nil))
		if err == nil {
			t.Fatalf("no error\n%s", out)
		}
		for _, want := range []string{
			"kube-scheduler still calls the extender", "1 of 2 are ready", "divvy-uninstall-scheduler-n2 on node n2 (ImagePullBackOff)",
			"kubectl logs -n divvy-system daemonset/divvy-uninstall-scheduler",
		} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("error %q does not say %q", err, want)
			}
		}
		if want := []string{"delete daemonset divvy-schedconf"}; !slices.Equal(writes, want) {
			t.Errorf("writes %q, want %q", writes, want)
		}
	})
}

// TestBeforeTakesNoPodOfAnEarlierRun for one of this: helm makes the DaemonSets anew,
// and pods of the former ones, which were done, are there for a while.
func TestBeforeTakesNoPodOfAnEarlierRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		former := daemons("divvy-uninstall-scheduler", map[string]bool{"n1": true})
		former[0].(*appsv1.DaemonSet).UID = "new"
		server := newServer(t, slices.Concat(installation(node("n1", nil)), former, daemons("divvy-uninstall-node", nil)))
		out, writes, err := run(t, options(), server, server.Client(nil))
		if err == nil || !strings.Contains(err.Error(), "some do not exist yet") {
			t.Errorf("error %v, want one that says that no pod is there\n%s", err, out)
		}
		if want := []string{"delete daemonset divvy-schedconf"}; !slices.Equal(writes, want) {
			t.Errorf("writes %q, want %q", writes, want)
		}
	})
}

// TestBeforeOutlastsAnAPIServerThatRestarts: nobody runs it a second time, as helm
// deletes what it runs in.
func TestBeforeOutlastsAnAPIServerThatRestarts(t *testing.T) {
	for _, kind := range []string{"mutatingwebhookconfigurations", "leases", "secrets"} {
		t.Run(kind, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				server := newServer(t, slices.Concat(installation(node("n1", nil)),
					daemons("divvy-uninstall-scheduler", map[string]bool{"n1": true}),
					daemons("divvy-uninstall-node", map[string]bool{"n1": true})))
				var first time.Time
				restarting := func(action clienttesting.Action) error {
					if action.GetResource().Resource != kind || action.GetVerb() != "delete" {
						return nil
					}
					if first.IsZero() {
						first = time.Now()
					}
					if time.Since(first) < 15*time.Second {
						return errors.New("connection refused")
					}
					return nil
				}
				out, writes, err := run(t, options(), server, server.Client(restarting))
				if err != nil || strings.Contains(out, "remains") {
					t.Errorf("%v\n%s", err, out)
				}
				for _, want := range []string{"delete mutatingwebhookconfiguration bwki-webhook-cfg", "delete lease divvy-extender",
					"delete secret " + pool.CASecret} {
					if !slices.Contains(writes, want) {
						t.Errorf("no %q in %q", want, writes)
					}
				}
			})
		})
	}
}

func TestBeforeGoesOnWithoutNodesThatDoNotAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newServer(t, slices.Concat(installation(node("n1", nil), away(node("n2", map[string]string{count: "8"}))),
			daemons("divvy-uninstall-scheduler", map[string]bool{"n1": true, "n2": false}),
			daemons("divvy-uninstall-node", map[string]bool{"n1": true, "n2": false}),
			daemons("app-node", map[string]bool{"n2": true})[1:]))
		// As with foreground deletion, the DaemonSet outlives the pod, which does not
		// end on a node that is away.
		client, other := server.Client(nil), server.Client(nil)
		pod, err := other.CoreV1().Pods(namespace).Get(t.Context(), "app-node-n2", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		pod.Labels = map[string]string{"app": "node"}
		if _, err := other.CoreV1().Pods(namespace).Update(t.Context(), pod, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		client.PrependReactor("delete", "daemonsets", func(action clienttesting.Action) (bool, runtime.Object, error) {
			name := action.(clienttesting.DeleteAction).GetName()
			if name != "divvy-node" {
				return false, nil, nil
			}
			set, err := other.AppsV1().DaemonSets(namespace).Get(t.Context(), name, metav1.GetOptions{})
			if err == nil {
				now := metav1.Now()
				set.DeletionTimestamp, set.Finalizers = &now, []string{metav1.FinalizerDeleteDependents}
				_, err = other.AppsV1().DaemonSets(namespace).Update(t.Context(), set, metav1.UpdateOptions{})
			}
			return true, nil, err
		})
		began := time.Now()
		out, writes, err := run(t, options(), server, client)
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		for _, want := range []string{
			"- kube-scheduler on node n2, which does not respond", "/etc/kubernetes/kube-scheduler.back.yaml",
			"- daemonset divvy-system/divvy-node until nodes that do not respond are back or deleted: app-node-n2 on node n2",
			"- files on the host of node n2, which does not respond; to fix it: on that node, run divvy-node uninstall",
		} {
			if !strings.Contains(out, want) {
				t.Errorf("it does not say %q:\n%s", want, out)
			}
		}
		// Its object is cleaned all the same.
		if !slices.Contains(writes, "patch node n2") || !slices.Contains(writes, "delete lease divvy-extender") {
			t.Errorf("writes %q", writes)
		}
		if lasted := time.Since(began); lasted > 4*time.Minute {
			t.Errorf("it lasted %v", lasted)
		}
	})
}

func TestBeforeNamesWhatItMayNotDelete(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newServer(t, slices.Concat(installation(node("n1", nil)), daemons("divvy-uninstall-scheduler", nil),
			daemons("divvy-uninstall-node", nil)))
		forbidden := func(action clienttesting.Action) error {
			if action.GetVerb() == "delete" || action.GetVerb() == "patch" {
				return apierrors.NewForbidden(action.GetResource().GroupResource(), "x", errors.New("not allowed"))
			}
			return nil
		}
		o := options()
		o.SchedulerDaemon, o.SchedulerHook = "", ""
		out, writes, err := run(t, o, server, server.Client(forbidden))
		if err != nil || len(writes) > 0 {
			t.Fatalf("%v, writes %q\n%s", err, writes, out)
		}
		for _, want := range []string{
			"kubectl delete mutatingwebhookconfiguration bwki-webhook-cfg", "kubectl delete daemonset divvy-node -n divvy-system",
			"kubectl delete deployment divvy-extender -n divvy-system", "kubectl delete lease divvy-extender -n divvy-system",
			"kubectl annotate nodes --all divvy.dev/inventory- divvy.dev/labels- divvy.dev/counts-",
			"kubectl delete secret -A -l divvy.dev/managed-by=divvy-pool",
		} {
			if !strings.Contains(out, want) {
				t.Errorf("it does not say %q:\n%s", want, out)
			}
		}
	})
}

// kubelet updates the status of its node every ten seconds, as kubelet does with a
// resource whose plugin ended at the start: MachineInfo in pkg/kubelet/nodestatus
// and GetCapacity of the device manager.
func kubelet(ctx context.Context, t *testing.T, client kubernetes.Interface, name, resourceName, amount string) {
	t.Helper()
	stopped, forgotten := time.Now(), false
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(10 * time.Second):
		}
		n, err := client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			if ctx.Err() == nil {
				t.Error(err)
			}
			return
		}
		r := corev1.ResourceName(resourceName)
		switch {
		case time.Since(stopped) <= 5*time.Minute:
			n.Status.Capacity[r] = resource.MustParse(amount)
		case !forgotten:
			n.Status.Capacity[r], forgotten = resource.MustParse("0"), true
		}
		if _, ok := n.Status.Capacity[r]; ok {
			n.Status.Allocatable[r] = resource.MustParse("0")
		} else {
			delete(n.Status.Allocatable, r)
		}
		if _, err := client.CoreV1().Nodes().UpdateStatus(ctx, n, metav1.UpdateOptions{}); err != nil && !apierrors.IsConflict(err) &&
			ctx.Err() == nil {
			t.Error(err)
			return
		}
	}
}

func TestAfter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newServer(t, []runtime.Object{
			node("n1", map[string]string{memory: "128"}), node("never", nil),
			node("others", map[string]string{memory: "4"}), away(node("dead", map[string]string{memory: "0"})),
		})
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		client := server.Client(nil)
		go kubelet(ctx, t, client, "n1", memory, "128")
		// The first part has taken its time.
		time.Sleep(2 * time.Minute)
		o := Options{Namespace: namespace, Timeout: 270 * time.Second}
		o.After, o.Resources = true, []string{memory}
		began := time.Now()
		out, _, err := run(t, o, server, server.Client(nil))
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		if lasted := time.Since(began); lasted < 3*time.Minute || lasted > 4*time.Minute {
			t.Errorf("it lasted %v; kubelet forgets three minutes after the start", lasted)
		}
		time.Sleep(time.Hour)
		for name, want := range map[string]bool{"n1": false, "never": false, "others": true, "dead": true} {
			n, err := client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if has(n, memory) != want {
				t.Errorf("node %s has the resource: %v, want %v", name, has(n, memory), want)
			}
		}
		for _, want := range []string{
			"node n1: removed " + memory + " from its status",
			"node others: " + memory + " is offered by another device plugin and was kept",
			"- " + memory + " in the status of node dead, which does not respond", "kubectl patch node dead --subresource=status",
		} {
			if !strings.Contains(out, want) {
				t.Errorf("it does not say %q:\n%s", want, out)
			}
		}
		stop()
	})
}

func TestAfterGivesUpInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newServer(t, []runtime.Object{node("n1", map[string]string{memory: "128"})})
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		go kubelet(ctx, t, server.Client(nil), "n1", memory, "128")
		time.Sleep(30 * time.Second)
		o := Options{Namespace: namespace, Timeout: 270 * time.Second}
		o.After, o.Resources, o.Timeout = true, []string{memory}, time.Minute
		began := time.Now()
		out, _, err := run(t, o, server, server.Client(nil))
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		if lasted := time.Since(began); lasted > time.Minute {
			t.Errorf("it lasted %v", lasted)
		}
		if want := "- " + memory +
			" in the status of node n1 (kubelet still lists 128); to fix it: kubectl patch node n1"; !strings.Contains(out, want) {
			t.Errorf("it does not say %q:\n%s", want, out)
		}
		stop()
	})
}

func TestAfterWithoutTheAPIServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := newServer(t, nil)
		o := Options{Namespace: namespace, Timeout: 270 * time.Second}
		o.After, o.Resources = true, []string{memory}
		refused := errors.New("connection refused")
		_, _, err := run(t, o, server, server.Client(func(clienttesting.Action) error { return refused }))
		if !errors.Is(err, refused) {
			t.Errorf("error %v, want %v", err, refused)
		}
	})
}
