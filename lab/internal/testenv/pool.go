package testenv

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/divvy-gpu/divvy/internal/pool"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
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

// Pool is the webhook of the remote pool and what the node offers of it.
type Pool struct {
	client kubernetes.Interface
	node   *Node
}

// Wait waits until pods of the pool can be created and scheduled.
func (p *Pool) Wait(ctx context.Context, timeout time.Duration) error {
	return poll.Until(ctx, timeout, "the pool's webhook and its units", p.Ready)
}

// Ready returns nil when the node offers the pool's units and both replicas
// of the webhook answer under certificates that the API server was told of.
func (p *Pool) Ready(ctx context.Context) error {
	_, allocatable, err := p.node.Offered(ctx, pool.Resource)
	if err != nil {
		return err
	}
	if allocatable != PoolUnits {
		return fmt.Errorf("the node offers %d of %s", allocatable, pool.Resource)
	}
	d, err := p.client.AppsV1().Deployments(product.PoolNamespace).Get(ctx, product.PoolWebhook, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if d.Status.ObservedGeneration < d.Generation || d.Status.ReadyReplicas < *d.Spec.Replicas ||
		d.Status.Replicas > d.Status.UpdatedReplicas {
		return fmt.Errorf("%s: %d of %d pods are ready", d.Name, d.Status.ReadyReplicas, *d.Spec.Replicas)
	}
	bundles, err := p.CABundles(ctx)
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
func (p *Pool) CABundles(ctx context.Context) (map[string]string, error) {
	api := p.client.AdmissionregistrationV1()
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

// WebhookPods returns the pods of the webhook that are not being deleted.
func (p *Pool) WebhookPods(ctx context.Context) ([]corev1.Pod, error) {
	d, err := p.client.AppsV1().Deployments(product.PoolNamespace).Get(ctx, product.PoolWebhook, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	return livePods(ctx, p.client, product.PoolNamespace, metav1.FormatLabelSelector(d.Spec.Selector))
}

// KillWebhook ends the programs of all replicas with SIGKILL; kubelet starts them
// again.
func (p *Pool) KillWebhook(ctx context.Context) error {
	pods, err := p.WebhookPods(ctx)
	if err != nil {
		return err
	}
	for i := range pods {
		if _, err := kill(&pods[i]); err != nil {
			return err
		}
	}
	return nil
}

// PokeWebhook makes kubelet bring a changed catalog to the webhook's pods at once.
func (p *Pool) PokeWebhook(ctx context.Context) error {
	pods, err := p.WebhookPods(ctx)
	if err != nil {
		return err
	}
	for _, pod := range pods {
		if err := poke(ctx, p.client, &pod); err != nil {
			return err
		}
	}
	return nil
}
