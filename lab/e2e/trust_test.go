//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/retry"

	"github.com/divvy-gpu/divvy/lab/internal/cluster"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

const grantAnnotation = "divvy.dev/grant"

// forged are annotations of a user who wants card 7 for nothing.
func forged(grant string) map[string]string {
	return map[string]string{
		"enflame.com/gcu-device-id":             "7",
		"enflame.com/gcu-device-memory":         "999",
		"enflame.com/gcu-device-memory-request": "0",
		"enflame.com/gcu-device-assigned":       "true",
		"enflame.com/gcu-device-assign-time":    "1",
		grantAnnotation:                         grant,
	}
}

// TestForgedAnnotations: users who write what Divvy writes gain nothing by it, also
// where the API server would let them.
func TestForgedAnnotations(t *testing.T) {
	ctx := begin(t, guide)
	withoutAnnotationPolicy(t)
	start(t, one("honest", 4))
	books := agree(t)
	honest, err := lab.Pods.API.Get(ctx, "honest", metav1.GetOptions{})
	must(t, err)
	unsigned, err := json.Marshal(map[string]any{
		"v": 1, "resource": product.Resource, "node": layout.NodeName, "device": books.Cards[7].UUID, "index": 7,
		"deviceUnits": 16, "units": 1, "at": time.Now().UTC(), "confirmed": true, "mac": strings.Repeat("A", 43),
	})
	must(t, err)
	grants := map[string]string{
		"unsigned": string(unsigned),
		"stolen":   honest.Annotations[grantAnnotation],
		"garbage":  "{\x00",
		"huge":     strings.Repeat("x", 100<<10),
	}

	t.Run("before the pod is bound", func(t *testing.T) {
		want := map[string]int{"honest": 0}
		for name, grant := range grants {
			pod := one(name, 3)
			pod.Annotations = forged(grant)
			create(t, pod)
			want[name] = 0
		}
		running(t, "unsigned", "stolen", "garbage", "huge")
		wantCards(t, want)
		must(t, lab.Pods.Delete(ctx, "unsigned", "stolen", "garbage", "huge"))
	})
	t.Run("with the node named", func(t *testing.T) {
		want := map[string]int{"honest": 0}
		for name, grant := range grants {
			pod := one(name, 3)
			pod.Annotations = forged(grant)
			pod.Spec.NodeName = layout.NodeName
			create(t, pod)
			want[name] = 0
		}
		running(t, "unsigned", "stolen", "garbage", "huge")
		wantCards(t, want)
		must(t, lab.Pods.Delete(ctx, "unsigned", "stolen", "garbage", "huge"))
	})
	t.Run("on a running pod", func(t *testing.T) {
		start(t, one("patched", 12))
		wantCards(t, map[string]int{"honest": 0, "patched": 0})
		alive := lives(t)
		for name, grant := range grants {
			patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": forged(grant)}})
			must(t, err)
			_, err = lab.Client.CoreV1().Pods(namespace).Patch(ctx, "patched", types.MergePatchType, patch, metav1.PatchOptions{})
			must(t, err)
			// At no moment does the card look emptier than it is.
			for until := time.Now().Add(time.Second); time.Now().Before(until); {
				node, err := auditor.Inspect(ctx)
				must(t, err)
				if len(node.Devices) == 0 || node.Devices[0].Used != 16 {
					t.Fatalf("with a grant that is %s, inspect shows %s; want card 0 full", name, uses(node))
				}
			}
			wantCards(t, map[string]int{"honest": 0, "patched": 0})
		}
		undisturbed(t, alive)
	})
	t.Run("taken away", func(t *testing.T) {
		remove := map[string]any{}
		for key := range forged("") {
			remove[key] = nil
		}
		patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": remove}})
		must(t, err)
		_, err = lab.Client.CoreV1().Pods(namespace).Patch(ctx, "patched", types.MergePatchType, patch, metav1.PatchOptions{})
		must(t, err)
		wantCards(t, map[string]int{"honest": 0, "patched": 0})
	})
}

// withoutAnnotationPolicy lets everybody write Divvy's annotations until the test
// ends.
func withoutAnnotationPolicy(t *testing.T) {
	t.Helper()
	// act changes what the API server does about it, and waits until it does.
	act := func(ctx context.Context, action string, refuses bool) error {
		bindings := lab.Client.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings()
		patch := fmt.Appendf(nil, `{"spec":{"validationActions":[%q]}}`, action)
		if _, err := bindings.Patch(ctx, "divvy-annotations", types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
			return err
		}
		pod := one("probe", 1)
		pod.Annotations = forged("x")
		return poll.Until(ctx, settingTimeout, "the API server to heed the policy's binding", func(ctx context.Context) error {
			_, err := lab.Client.CoreV1().Pods(namespace).Create(ctx, pod, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			switch {
			case apierrors.IsForbidden(err) && refuses:
				return nil
			case err == nil && refuses:
				return errors.New("it does not yet")
			}
			return err
		})
	}
	t.Cleanup(func() { must(t, act(context.WithoutCancel(t.Context()), "Deny", true)) })
	must(t, act(t.Context(), "Audit", false))
}

// as returns a client that acts as somebody else, with the groups that a service
// account has.
func as(t *testing.T, user string, groups ...string) kubernetes.Interface {
	t.Helper()
	config, err := cluster.RESTConfig()
	must(t, err)
	config = rest.CopyConfig(config)
	config.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: append(groups, "system:authenticated")}
	client, err := kubernetes.NewForConfig(config)
	must(t, err)
	return client
}

// withToken returns a client with a token of one of Divvy's accounts: bound to a pod,
// as those that kubelet mounts are, to another object, or to nothing if that is nil.
func withToken(t *testing.T, account string, bound *authenticationv1.BoundObjectReference) kubernetes.Interface {
	t.Helper()
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{BoundObjectRef: bound}}
	token, err := lab.Client.CoreV1().ServiceAccounts(product.Namespace).CreateToken(t.Context(), account, request, metav1.CreateOptions{})
	must(t, err)
	config, err := cluster.RESTConfig()
	must(t, err)
	config = rest.AnonymousClientConfig(config)
	config.BearerToken = token.Status.Token
	client, err := kubernetes.NewForConfig(config)
	must(t, err)
	return client
}

func boundTo(kind string, object metav1.Object) *authenticationv1.BoundObjectReference {
	return &authenticationv1.BoundObjectReference{Kind: kind, APIVersion: "v1", Name: object.GetName(), UID: object.GetUID()}
}

// metadata is a patch of an object's annotations or labels; nil takes one away.
func metadata(t *testing.T, what, key string, value any) []byte {
	t.Helper()
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{what: map[string]any{key: value}}})
	must(t, err)
	return patch
}

// refusedWith checks that the API server refuses a request with a reason.
func refusedWith(t *testing.T, what string, err error, reason string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), reason) {
		t.Errorf("%s: %v; want it refused with %q", what, err, reason)
	}
}

// TestOnlyDivvyWritesItsAnnotations, whatever rights somebody else has; and what
// others do with the same pods and nodes is none of its business.
func TestOnlyDivvyWritesItsAnnotations(t *testing.T) {
	ctx := begin(t, guide)
	start(t, one("held", 4))
	agree(t)
	waiting := one("unbound", 1)
	waiting.Spec.SchedulerName = "nobody"
	create(t, waiting)
	node := layout.NodeName

	broad := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "divvy-e2e-broad"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: "broad", Namespace: namespace}},
	}
	_, err := lab.Client.RbacV1().ClusterRoleBindings().Create(ctx, broad, metav1.CreateOptions{})
	must(t, err)
	t.Cleanup(func() {
		must(t, lab.Client.RbacV1().ClusterRoleBindings().Delete(context.WithoutCancel(ctx), broad.Name, metav1.DeleteOptions{}))
	})
	for who, client := range map[string]kubernetes.Interface{
		"cluster-admin":                    lab.Client,
		"an account with all rights":       as(t, "system:serviceaccount:"+namespace+":broad", "system:serviceaccounts"),
		"a controller":                     as(t, "system:serviceaccount:kube-system:replicaset-controller", "system:masters"),
		"an account of Divvy's namespace":  as(t, "system:serviceaccount:"+product.Namespace+":default", "system:masters"),
		"the account of the pool's daemon": as(t, "system:serviceaccount:"+product.Namespace+":bitfusion-device-plugin", "system:masters"),
	} {
		t.Run(who, func(t *testing.T) {
			pods, nodes := client.CoreV1().Pods(namespace), client.CoreV1().Nodes()
			patchPod := func(patch []byte, subresources ...string) error {
				_, err := pods.Patch(ctx, "held", types.MergePatchType, patch, metav1.PatchOptions{}, subresources...)
				return err
			}
			patchNode := func(patch []byte, subresources ...string) error {
				_, err := nodes.Patch(ctx, node, types.MergePatchType, patch, metav1.PatchOptions{}, subresources...)
				return err
			}
			const refusal = "only Divvy may write the annotations "
			for key, value := range forged("{}") {
				refusedWith(t, "set "+key, patchPod(metadata(t, "annotations", key, value+"1")), refusal+key+"; leave them unchanged")
				refusedWith(t, "remove "+key, patchPod(metadata(t, "annotations", key, nil)), refusal+key)
			}
			refusedWith(t, "set the grant by the status", patchPod(metadata(t, "annotations", grantAnnotation, "{}"), "status"),
				refusal+grantAnnotation)
			for _, key := range []string{"divvy.dev/inventory", "divvy.dev/counts", "divvy.dev/labels"} {
				for _, sub := range [][]string{nil, {"status"}} {
					refusedWith(t, "set "+key, patchNode(metadata(t, "annotations", key, "x"), sub...), refusal+key)
				}
			}
			refusedWith(t, "remove the inventory", patchNode(metadata(t, "annotations", "divvy.dev/inventory", nil)),
				refusal+"divvy.dev/inventory")
			restored := one("restored", 1)
			restored.Annotations = forged("{}")
			_, err := pods.Create(ctx, restored, metav1.CreateOptions{})
			refusedWith(t, "create a pod as it was", err, "; remove them from the new object")
			bind := &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: "unbound", Annotations: forged("{}")},
				Target: corev1.ObjectReference{Kind: "Node", Name: node}}
			refusedWith(t, "bind a pod with a grant", pods.Bind(ctx, bind, metav1.CreateOptions{}), refusal+grantAnnotation)

			// The rest is as ever.
			must(t, patchPod(metadata(t, "annotations", "example.com/note", who)))
			must(t, patchPod(metadata(t, "labels", "example", "x")))
			must(t, patchPod(metadata(t, "annotations", "divvy.dev/note", nil), "status"))
			must(t, patchNode(metadata(t, "annotations", "example.com/note", who)))
			must(t, patchNode(metadata(t, "annotations", "example.com/note", nil)))
			must(t, retry.RetryOnConflict(retry.DefaultBackoff, func() error {
				whole, err := pods.Get(ctx, "held", metav1.GetOptions{})
				if err != nil {
					return err
				}
				whole.Annotations["example.com/other"] = who
				_, err = pods.Update(ctx, whole, metav1.UpdateOptions{})
				return err
			}))
		})
	}
	agree(t)
}

// TestDaemonKeepsToItsNode: whoever has the token of a node's daemon can change
// nothing on another node, and on its own nothing but what the daemon writes.
func TestDaemonKeepsToItsNode(t *testing.T) {
	ctx := begin(t, guide)
	start(t, one("here", 4))
	// A node without a kubelet, and without the labels for which daemons go there.
	const elsewhere = "divvy-lab-other"
	_, err := lab.Client.CoreV1().Nodes().Create(ctx, &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: elsewhere}, Spec: corev1.NodeSpec{Unschedulable: true},
	}, metav1.CreateOptions{})
	must(t, err)
	there := one("there", 0)
	there.Spec.NodeName = elsewhere
	there.Spec.Containers[0].Resources = corev1.ResourceRequirements{}
	create(t, there)
	t.Cleanup(func() {
		ctx, now := context.WithoutCancel(ctx), metav1.DeleteOptions{GracePeriodSeconds: new(int64)}
		must(t, errors.Join(lab.Client.CoreV1().Pods(namespace).Delete(ctx, "there", now), lab.Client.CoreV1().Nodes().Delete(ctx,
			elsewhere, now)))
	})
	daemon, err := lab.Divvy.Pod(ctx, testenv.NodeDaemon)
	must(t, err)
	poolPods, err := lab.Divvy.Pods(ctx, "bitfusion-device-plugin")
	must(t, err)
	if len(poolPods) != 1 {
		t.Fatalf("%d pods of the pool's daemon", len(poolPods))
	}
	client, unbound := withToken(t, testenv.NodeDaemon, boundTo("Pod", daemon)), withToken(t, testenv.NodeDaemon, nil)
	node, err := lab.Node.Get(ctx)
	must(t, err)
	ofNode := withToken(t, testenv.NodeDaemon, boundTo("Node", node))
	patchPod := func(client kubernetes.Interface, namespace, name string, patch []byte) error {
		_, err := client.CoreV1().Pods(namespace).Patch(ctx, name, types.MergePatchType, patch,
			metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}})
		return err
	}
	patchNode := func(client kubernetes.Interface, name string, patch []byte, sub ...string) error {
		_, err := client.CoreV1().Nodes().Patch(ctx, name, types.MergePatchType, patch,
			metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}}, sub...)
		return err
	}
	here, grant := layout.NodeName, metadata(t, "annotations", grantAnnotation, "{}")
	inventory := metadata(t, "annotations", "divvy.dev/inventory", "[]")
	must(t, patchPod(client, namespace, "here", grant))
	must(t, patchNode(client, here, inventory))
	must(t, patchNode(client, here, metadata(t, "labels", "divvy.dev/enflame.test", "x")))
	must(t, patchNode(client, here, []byte(`{"status":{"capacity":{"enflame.com/gcu-count":"8"}}}`), "status"))

	notThere := "divvy-node on " + here + " may not change objects of node " + elsewhere
	poolPod := poolPods[0].Name
	for what, tt := range map[string]struct {
		err    error
		reason string
	}{
		"a pod of another node": {patchPod(client, namespace, "there", grant), notThere},
		"another node":          {patchNode(client, elsewhere, inventory), notThere},
		"the status of another node": {patchNode(client, elsewhere,
			[]byte(`{"status":{"capacity":{"enflame.com/gcu-count":"8"}}}`), "status"), notThere},
		"labels of another node": {patchNode(client, elsewhere, metadata(t, "labels", "divvy.dev/enflame.test", "x")),
			notThere},
		"a pod's labels": {patchPod(client, namespace, "here", metadata(t, "labels", "app", "x")),
			"may not change labels of pods"},
		"a pod's other annotations": {patchPod(client, namespace, "here", metadata(t, "annotations", "example.com/x", "x")),
			"may change only Divvy's annotations"},
		"labels of the pool's daemon": {patchPod(client, product.Namespace, poolPod, metadata(t, "labels", "app", "x")),
			"may not change labels of pods"},
		"annotations of the pool's daemon": {patchPod(client, product.Namespace, poolPod,
			metadata(t, "annotations", "prometheus.io/port", "1")), "may change only Divvy's annotations"},
		"the image of the pool's daemon": {patchPod(client, product.Namespace, poolPod,
			[]byte(`{"spec":{"activeDeadlineSeconds":1}}`)), "may not change a spec"},
		"its node's configuration": {patchNode(client, here, metadata(t, "labels", "divvy.dev/config", "x")),
			"may change only labels that describe devices"},
		"its node's taints": {patchNode(client, here, []byte(`{"spec":{"unschedulable":true}}`)),
			"may not change a spec"},
		"with a token of no pod":           {patchPod(unbound, namespace, "here", grant), "does not name the node of its pod"},
		"its node, with a token of no pod": {patchNode(unbound, here, inventory), "does not name the node of its pod"},
		"with a token bound to the node":   {patchPod(ofNode, namespace, "here", grant), "is not bound to a pod"},
		"its node, with such a token":      {patchNode(ofNode, here, inventory), "is not bound to a pod"},
		"a pod that is to go": {client.CoreV1().Pods(namespace).Delete(ctx,
			"here", metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}}), "cannot delete resource"},
		"the key of the grants": {second(client.CoreV1().Secrets(product.Namespace).Get(ctx,
			"divvy-grant-key", metav1.GetOptions{})), "cannot get resource"},
		"a pod in the name of the pool's own": {second(as(t, "system:serviceaccount:"+product.Namespace+
			":bitfusion-device-plugin").CoreV1().Pods(namespace).Get(ctx, "here", metav1.GetOptions{})), "cannot get resource"},
	} {
		refusedWith(t, what, tt.err, tt.reason)
	}
}

// second returns the error of a call.
func second[T any](_ T, err error) error { return err }

// TestExtenderBindsWhatItGrants: with the extender's token no pod can be bound
// but with a grant for that node.
func TestExtenderBindsWhatItGrants(t *testing.T) {
	ctx := begin(t, guide)
	pod := one("loose", 1)
	pod.Spec.SchedulerName = "nobody"
	loose := create(t, pod)[0]
	client, here := withToken(t, testenv.Extender, nil), layout.NodeName
	bind := func(uid types.UID, annotations map[string]string) error {
		return client.CoreV1().Pods(namespace).Bind(ctx, &corev1.Binding{
			ObjectMeta: metav1.ObjectMeta{Name: "loose", UID: uid, Annotations: annotations},
			Target:     corev1.ObjectReference{Kind: "Node", Name: here},
		}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	}
	grant := func(node string, resource corev1.ResourceName) map[string]string {
		return map[string]string{grantAnnotation: fmt.Sprintf(`{"v":1,"resource":%q,"node":%q}`, resource, node)}
	}
	must(t, bind(loose.UID, grant(here, product.Resource)))
	refusedWith(t, "without a grant", bind(loose.UID, nil), "without a planned allocation on the node that it is bound to")
	refusedWith(t, "with a grant for elsewhere", bind(loose.UID, grant("elsewhere", product.Resource)),
		"without a planned allocation on the node")
	refusedWith(t, "for another resource", bind(loose.UID, grant(here, "example.com/x")),
		"may bind only pods that request "+string(product.Resource))
	refusedWith(t, "by name", bind("", grant(here, product.Resource)), "must bind pods by UID")
	foreign := grant(here, product.Resource)
	foreign["example.com/role"] = "admin"
	refusedWith(t, "with another annotation", bind(loose.UID, foreign), "no annotations but those of a planned allocation")
}

// TestGrantKeyChanges replaces the key that grants are signed with.
func TestGrantKeyChanges(t *testing.T) {
	ctx := begin(t, guide)
	start(t, one("before", 4))
	agree(t)
	alive := lives(t)
	since := map[string]int{nodeLog: logSize(t, nodeLog), extenderLog: logSize(t, extenderLog)}

	key := fmt.Sprintf("%064d", time.Now().UnixNano())
	patch, err := json.Marshal(map[string]any{"stringData": map[string]string{"key": key}})
	must(t, err)
	_, err = lab.Client.CoreV1().Secrets(product.Namespace).Patch(ctx, "divvy-grant-key", types.MergePatchType, patch,
		metav1.PatchOptions{})
	must(t, err)
	// Kubelet updates what it has mounted about once a minute, or when the pod
	// changes.
	for _, part := range []string{testenv.NodeDaemon, testenv.Extender} {
		must(t, lab.Divvy.Poke(ctx, part))
	}
	for log, size := range since {
		must(t, poll.Until(ctx, 2*settingTimeout, log+" to report a new key", func(context.Context) error {
			data, err := os.ReadFile(log)
			if err == nil && !strings.Contains(string(data[min(size, len(data)):]), "new signing key") {
				err = errors.New("it does not yet")
			}
			return err
		}))
	}
	wantCards(t, map[string]int{"before": 0})
	start(t, one("after", 8))
	wantCards(t, map[string]int{"before": 0, "after": 0})

	// An extender that never saw the old key knows the pods all the same.
	must(t, lab.Divvy.DeletePods(ctx, testenv.Extender))
	must(t, lab.Divvy.Wait(ctx, settingTimeout))
	wantCards(t, map[string]int{"before": 0, "after": 0})
	undisturbed(t, alive)
}
