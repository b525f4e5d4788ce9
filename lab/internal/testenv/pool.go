package testenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/internal/pool"
	"github.com/divvy-gpu/divvy/lab/internal/product"
)

// The pool's parts, as the chart names them.
const (
	MutatingConfig   = "bwki-webhook-cfg"
	ValidatingConfig = "validation.bitfusion.io-cfg"
	WebhookSecret    = "bwki-webhook-certs" //nolint:gosec // the name of a secret is none
	WebhookService   = "bwki-webhook-svc"
)

// PoolUnits is what the lab's node offers of the pool.
const PoolUnits = 1000

// In returns the stage with another namespace for pods. Both are the same lab; do
// not close them twice.
func (s *Env) In(namespace string) *Env {
	other := *s
	other.Namespace = namespace
	return &other
}

// Example returns the path of an example.
func (s *Env) Example(name string) string { return filepath.Join(s.Repository, "examples", name) }

// ExamplePod reads the pod of an example and puts it into the namespace.
// It ends at once when it is deleted.
func (s *Env) ExamplePod(name string) (*corev1.Pod, error) {
	data, err := os.ReadFile(s.Example(name))
	if err != nil {
		return nil, fmt.Errorf("read an example: %w", err)
	}
	var p corev1.Pod
	if err := yaml.UnmarshalStrict(data, &p); err != nil {
		return nil, fmt.Errorf("example %s: %w", name, err)
	}
	p.Namespace = s.Namespace
	p.Spec.TerminationGracePeriodSeconds = ptr.To[int64](0)
	p.Spec.AutomountServiceAccountToken = ptr.To(false)
	return &p, nil
}

// WaitPool waits until pods of the pool can be created and scheduled.
func (s *Env) WaitPool(ctx context.Context, timeout time.Duration) error {
	return Poll(ctx, timeout, "the pool's webhook and its units", s.PoolReady)
}

// PoolReady returns nil when the node offers the pool's units and both replicas
// of the webhook answer under certificates that the API server was told of.
func (s *Env) PoolReady(ctx context.Context) error {
	_, allocatable, err := s.Offered(ctx, pool.Resource)
	if err != nil {
		return err
	}
	if allocatable != PoolUnits {
		return fmt.Errorf("the node offers %d of %s", allocatable, pool.Resource)
	}
	d, err := s.Client.AppsV1().Deployments(product.PoolNamespace).Get(ctx, product.PoolWebhook, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if d.Status.ObservedGeneration < d.Generation || d.Status.ReadyReplicas < *d.Spec.Replicas ||
		d.Status.Replicas > d.Status.UpdatedReplicas {
		return fmt.Errorf("%s: %d of %d pods are ready", d.Name, d.Status.ReadyReplicas, *d.Spec.Replicas)
	}
	bundles, err := s.CABundles(ctx)
	if err != nil {
		return err
	}
	for name, bundle := range bundles {
		if len(bundle) == 0 {
			return fmt.Errorf("%s has no CA bundle", name)
		}
	}
	return nil
}

// CABundles returns what the API server checks the webhooks by, by the name of
// the configuration.
func (s *Env) CABundles(ctx context.Context) (map[string]string, error) {
	api := s.Client.AdmissionregistrationV1()
	mutating, err := api.MutatingWebhookConfigurations().Get(ctx, MutatingConfig, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	validating, err := api.ValidatingWebhookConfigurations().Get(ctx, ValidatingConfig, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	bundles := map[string]string{}
	for _, w := range mutating.Webhooks {
		bundles[MutatingConfig+"/"+w.Name] = string(w.ClientConfig.CABundle)
	}
	for _, w := range validating.Webhooks {
		bundles[ValidatingConfig+"/"+w.Name] = string(w.ClientConfig.CABundle)
	}
	return bundles, nil
}

// AllowPool labels the namespace so that its pods may use the pool, or
// takes the label off.
func (s *Env) AllowPool(ctx context.Context, allowed bool) error {
	label := product.PoolLabel + "-"
	if allowed {
		label = product.PoolLabel + "=allowed"
	}
	_, err := s.Kubectl(ctx, "label", "--overwrite", "namespace", s.Namespace, label)
	return err
}

// WebhookPods returns the pods of the webhook that are not being deleted.
func (s *Env) WebhookPods(ctx context.Context) ([]corev1.Pod, error) {
	d, err := s.Client.AppsV1().Deployments(product.PoolNamespace).Get(ctx, product.PoolWebhook, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	list, err := s.Client.CoreV1().Pods(product.PoolNamespace).List(ctx, metav1.ListOptions{
		LabelSelector: metav1.FormatLabelSelector(d.Spec.Selector),
	})
	if err != nil {
		return nil, err
	}
	var pods []corev1.Pod
	for _, pod := range list.Items {
		if pod.DeletionTimestamp == nil && !Ended(&pod) {
			pods = append(pods, pod)
		}
	}
	return pods, nil
}

// KillWebhook ends the programs of all replicas with SIGKILL; kubelet starts them
// again.
func (s *Env) KillWebhook(ctx context.Context) error {
	pods, err := s.WebhookPods(ctx)
	if err != nil {
		return err
	}
	var pids []int
	for _, pod := range pods {
		if len(pod.Status.ContainerStatuses) == 0 {
			return errors.New(Describe(&pod))
		}
		pid, err := ContainerPID(pod.Status.ContainerStatuses[0].ContainerID)
		if err != nil {
			return err
		}
		pids = append(pids, pid)
	}
	for _, pid := range pids {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			return fmt.Errorf("kill the webhook: %w", err)
		}
	}
	return nil
}

// PokeWebhook makes kubelet bring a changed catalog to the webhook's pods at once.
func (s *Env) PokeWebhook(ctx context.Context) error {
	pods, err := s.WebhookPods(ctx)
	if err != nil {
		return err
	}
	for _, pod := range pods {
		if err := s.poke(ctx, &pod); err != nil {
			return err
		}
	}
	return nil
}

// Copies returns the secrets of the pool's token in the namespace.
func (s *Env) Copies(ctx context.Context) (map[string]*corev1.Secret, error) {
	found := map[string]*corev1.Secret{}
	for _, name := range product.TokenSecrets() {
		secret, err := s.Client.CoreV1().Secrets(s.Namespace).Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		found[name] = secret
	}
	return found, nil
}

// EnsureNamespace makes the namespace and waits until pods can be made in
// it.
func (s *Env) EnsureNamespace(ctx context.Context) error { return s.ensureNamespace(ctx) }

// Empty deletes the pods of the namespace, what would make others, and
// quotas.
func (s *Env) Empty(ctx context.Context) error { return s.emptyNamespace(ctx) }

// RemoveNamespace empties the namespace and deletes it; what else is in it
// goes a little later.
func (s *Env) RemoveNamespace(ctx context.Context) error { return s.removeNamespace(ctx) }

// Logs returns what a container of a pod has printed.
func (s *Env) Logs(ctx context.Context, pod, container string) (string, error) {
	return s.Kubectl(ctx, "logs", pod, "--namespace", s.Namespace, "--container", container)
}
