//go:build e2e

package node

import (
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// updates are the rules of a policy or webhook for changes of pods.
var updates = admissionregistrationv1.RuleWithOperations{
	Operations: []admissionregistrationv1.OperationType{admissionregistrationv1.Update},
	Rule:       admissionregistrationv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"pods"}},
}

// forbid makes an admission policy that forbids every change of pods with the
// label.
func (w *world) forbid(label string) {
	w.Helper()
	policies := w.client.AdmissionregistrationV1()
	meta := metav1.ObjectMeta{Name: "leave-pods-alone"}
	_, err := policies.ValidatingAdmissionPolicies().Create(w.Context(), &admissionregistrationv1.ValidatingAdmissionPolicy{
		ObjectMeta: meta,
		Spec: admissionregistrationv1.ValidatingAdmissionPolicySpec{
			FailurePolicy: new(admissionregistrationv1.Fail),
			MatchConstraints: &admissionregistrationv1.MatchResources{
				ResourceRules: []admissionregistrationv1.NamedRuleWithOperations{{RuleWithOperations: updates}},
			},
			Validations: []admissionregistrationv1.Validation{{
				Expression: "false", Message: "pods of this cluster are not changed", Reason: new(metav1.StatusReasonForbidden),
			}},
		},
	}, metav1.CreateOptions{})
	w.must(err)
	_, err = policies.ValidatingAdmissionPolicyBindings().Create(w.Context(), &admissionregistrationv1.ValidatingAdmissionPolicyBinding{
		ObjectMeta: meta,
		Spec: admissionregistrationv1.ValidatingAdmissionPolicyBindingSpec{
			PolicyName: meta.Name, ValidationActions: []admissionregistrationv1.ValidationAction{admissionregistrationv1.Deny},
			MatchResources: &admissionregistrationv1.MatchResources{
				ObjectSelector: &metav1.LabelSelector{MatchLabels: map[string]string{label: "true"}},
			},
		},
	}, metav1.CreateOptions{})
	w.must(err)
	// The API server takes a moment to enforce it.
	probe := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "probe", Namespace: namespace, Labels: map[string]string{label: "true"}}}
	probe.Spec.Containers = []corev1.Container{{Name: "app", Image: "none"}}
	pods := w.client.CoreV1().Pods(namespace)
	_, err = pods.Create(w.Context(), probe, metav1.CreateOptions{})
	w.must(err)
	w.eventually("the policy is enforced", func(ctx context.Context) error {
		now, err := pods.Get(ctx, probe.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		now.Annotations = map[string]string{"changed": now.ResourceVersion}
		if _, err := pods.Update(ctx, now, metav1.UpdateOptions{}); err == nil {
			return errors.New("the pod was changed")
		}
		return nil
	})
}

// delay makes a webhook that lets each change of a pod with the label wait until
// the API server gives up. asked gets a value for each.
func (w *world) delay(label string, seconds int32) (asked <-chan struct{}) {
	w.Helper()
	called := make(chan struct{}, 100)
	end := make(chan struct{})
	server := httptest.NewTLSServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		called <- struct{}{}
		select {
		case <-r.Context().Done():
		case <-end:
		}
	}))
	w.Cleanup(func() { close(end); server.Close() })
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	_, err := w.client.AdmissionregistrationV1().ValidatingWebhookConfigurations().Create(w.Context(),
		&admissionregistrationv1.ValidatingWebhookConfiguration{
			ObjectMeta: metav1.ObjectMeta{Name: "slow"},
			Webhooks: []admissionregistrationv1.ValidatingWebhook{{
				Name: "slow.example.com", ClientConfig: admissionregistrationv1.WebhookClientConfig{URL: &server.URL, CABundle: ca},
				Rules:          []admissionregistrationv1.RuleWithOperations{updates},
				ObjectSelector: &metav1.LabelSelector{MatchLabels: map[string]string{label: "true"}},
				FailurePolicy:  new(admissionregistrationv1.Fail), TimeoutSeconds: &seconds,
				SideEffects: new(admissionregistrationv1.SideEffectClassNone), AdmissionReviewVersions: []string{"v1"},
			}},
		}, metav1.CreateOptions{})
	w.must(err)
	return called
}

// largest makes the largest pod that etcd takes, to about a hundred bytes.
func (w *world) largest(name string, units int64) *corev1.Pod {
	w.Helper()
	for size := 1536 << 10; size > 1<<20; size -= 128 {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}}
		pod.Spec.Containers = []corev1.Container{{Env: []corev1.EnvVar{{Name: "FILLING", Value: strings.Repeat("x", size)}}}}
		made, err := w.create(pod, units)
		if err == nil {
			w.Logf("a pod of %d bytes is as large as etcd takes", size)
			return made
		}
	}
	w.Fatal("etcd takes no large pod")
	return nil
}

// notWritten returns the events that tell that a pod's annotations cannot be
// written, each as often as it was counted.
func (w *world) notWritten(ctx context.Context) (map[string]int32, error) {
	list, err := w.client.CoreV1().Events("").List(ctx, metav1.ListOptions{FieldSelector: "reason=GrantNotWritten"})
	if err != nil {
		return nil, err
	}
	out := map[string]int32{}
	for _, e := range list.Items {
		out[e.InvolvedObject.Kind+" "+e.InvolvedObject.Name] += max(1, e.Count)
	}
	return out, nil
}

// rejections is how many writes of divvy-node were rejected.
func (w *world) rejections() float64 {
	w.Helper()
	families, err := w.metrics.Gather()
	w.must(err)
	for _, f := range families {
		if f.GetName() == "divvy_node_patch_errors_total" {
			return f.GetMetric()[0].GetCounter().GetValue()
		}
	}
	return 0
}

// TestPodsThatMayNotBeWritten: a pod without room for annotations, one near the
// limit of an object's size, one that a policy protects and one whose changes a
// webhook delays are reported, each on the pod and once. The daemon stays ready,
// writes the other pods and publishes what happens on the node.
func TestPodsThatMayNotBeWritten(t *testing.T) {
	w := newWorld(t, vendorsim.GCUs(2, 16<<10))
	w.forbid("protected")
	asked := w.delay("slow", 15)
	labelled := func(name, label string) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{label: "true"}}}
	}
	w.pod(labelled("protected", "protected"), 2)
	full := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "full",
		Annotations: map[string]string{"filling": strings.Repeat("x", 262_100)}}}
	w.pod(full, 2)
	w.must(w.kubelet.Add(w.largest("large", 2)))
	w.pod(labelled("slow", "slow"), 2)
	bad := map[string]int32{"Pod protected": 1, "Pod full": 1, "Pod large": 1, "Pod slow": 1}

	// While the webhook is asked, all else goes on.
	select {
	case <-asked:
	case <-time.After(patience):
		t.Fatal("the webhook was not asked")
	}
	cards := vendorsim.GCUs(2, 16<<10)
	cards[1].Unhealthy = true
	w.setCards(cards...)
	begin := time.Now()
	w.eventually("the inventory shows the card as unhealthy", func(ctx context.Context) error {
		in, err := w.inventory(ctx)
		if err == nil && (len(in.Shares) != 2 || !in.Shares[1].Health.Unhealthy) {
			err = fmt.Errorf("it shows %+v", in.Shares)
		}
		return err
	})
	took := time.Since(begin)
	t.Logf("the inventory was published after %v, the webhook takes 15 s", took.Round(time.Millisecond))
	if took > 10*time.Second {
		t.Errorf("the inventory was published after %v: it waited for the webhook", took)
	}

	w.eventually("each pod has an event", func(ctx context.Context) error {
		if err := w.agent.Ready(); err != nil {
			t.Errorf("divvy-node is not ready: %v", err)
		}
		got, err := w.notWritten(ctx)
		if err == nil && len(got) < len(bad) {
			err = fmt.Errorf("so far: %v", got)
		}
		return err
	})
	// Each was tried again since, more than once on average.
	enough := w.rejections() + float64(len(bad)) + 1
	w.eventually("it was tried again", func(context.Context) error {
		if err := w.agent.Ready(); err != nil {
			t.Errorf("divvy-node is not ready: %v", err)
		}
		if got := w.rejections(); got < enough {
			return fmt.Errorf("%v writes were rejected, waiting for %v", got, enough)
		}
		return nil
	})
	got, err := w.notWritten(t.Context())
	w.must(err)
	for name, want := range bad {
		if got[name] != want {
			t.Errorf("%s has %d events, want %d", name, got[name], want)
		}
	}
	if len(got) != len(bad) {
		t.Errorf("events: %v, want %v", got, bad)
	}

	w.pod(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "plain"}}, 2)
	confirmed := func(name string) {
		t.Helper()
		w.eventually(name+" has its annotations", func(ctx context.Context) error {
			pod, err := w.get(ctx, name)
			if err == nil && pod.Annotations[wire.GrantAnnotation] == "" {
				err = fmt.Errorf("it has %v", len(pod.Annotations))
			}
			return err
		})
	}
	confirmed("plain")
	// What was rejected is written once it may be.
	w.must(w.client.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings().Delete(t.Context(),
		"leave-pods-alone", metav1.DeleteOptions{}))
	confirmed("protected")
}
