package certs

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/json"
	"fmt"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	admissioninformers "k8s.io/client-go/informers/admissionregistration/v1"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/platform/informers"
)

const configMapKind = "ConfigMap"

// target is an object in which the CAs are kept.
type target struct {
	kind, namespace, name string
	informer              cache.SharedIndexInformer
	get                   func(ctx context.Context) (any, error)
	patch                 func(ctx context.Context, patch []byte) error
}

// objects reads and changes the objects of a kind, as typed clients do.
type objects[T any] interface {
	Get(ctx context.Context, name string, o metav1.GetOptions) (T, error)
	Patch(ctx context.Context, name string, t types.PatchType, data []byte, o metav1.PatchOptions, subresources ...string) (T, error)
}

func newTarget[T any](kind, namespace, name string, informer cache.SharedIndexInformer, api objects[T], patch types.PatchType) *target {
	return &target{
		kind: kind, namespace: namespace, name: name, informer: informer,
		get: func(ctx context.Context) (any, error) { return api.Get(ctx, name, metav1.GetOptions{}) },
		patch: func(ctx context.Context, data []byte) error {
			_, err := api.Patch(ctx, name, patch, data, metav1.PatchOptions{})
			return err
		},
	}
}

// targets are those that the Manager has.
func (m *Manager) targets() []*target {
	client, namespace := m.config.Client, m.config.Namespace
	webhooks := client.AdmissionregistrationV1()
	var all []*target
	if name := m.config.Mutating; name != "" {
		informer := admissioninformers.NewFilteredMutatingWebhookConfigurationInformer(client, 0, nil, informers.ByName(name))
		all = append(all, newTarget("MutatingWebhookConfiguration", "", name, informer, webhooks.MutatingWebhookConfigurations(),
			types.StrategicMergePatchType))
	}
	if name := m.config.Validating; name != "" {
		informer := admissioninformers.NewFilteredValidatingWebhookConfigurationInformer(client, 0, nil, informers.ByName(name))
		all = append(all, newTarget("ValidatingWebhookConfiguration", "", name, informer, webhooks.ValidatingWebhookConfigurations(),
			types.StrategicMergePatchType))
	}
	if name := m.config.ConfigMap; name != "" {
		informer := coreinformers.NewFilteredConfigMapInformer(client, namespace, 0, nil, informers.ByName(name))
		all = append(all, newTarget(configMapKind, namespace, name, informer, client.CoreV1().ConfigMaps(namespace), types.MergePatchType))
	}
	return all
}

// String is kind, namespace and name, for messages.
func (t *target) String() string {
	return t.kind + " " + cache.NewObjectName(t.namespace, t.name).String()
}

// cached is the object as the watch last saw it; nil when there is none.
func (t *target) cached() any {
	obj, _, _ := t.informer.GetStore().GetByKey(cache.NewObjectName(t.namespace, t.name).String())
	return obj
}

// configuration is what matters of a webhook configuration, or of the ConfigMap
// that has the CAs for other clients.
type configuration struct {
	*target
	name, resourceVersion string
	// version changes with the webhooks or the entry, and not with notes on the
	// object.
	version string
	// webhooks are the names, bundles their caBundles. A ConfigMap has one bundle
	// and no webhook.
	webhooks []string
	bundles  [][]byte
}

// configurationOf returns what matters of an object of one of the kinds, false for none.
func configurationOf(obj any) (configuration, bool) {
	var out configuration
	add := func(webhook string, client admissionv1.WebhookClientConfig) {
		out.webhooks, out.bundles = append(out.webhooks, webhook), append(out.bundles, client.CABundle)
	}
	switch c := obj.(type) {
	case *admissionv1.MutatingWebhookConfiguration:
		out = configuration{name: c.Name, resourceVersion: c.ResourceVersion, version: versionOf(c)}
		for i := range c.Webhooks {
			add(c.Webhooks[i].Name, c.Webhooks[i].ClientConfig)
		}
	case *admissionv1.ValidatingWebhookConfiguration:
		out = configuration{name: c.Name, resourceVersion: c.ResourceVersion, version: versionOf(c)}
		for i := range c.Webhooks {
			add(c.Webhooks[i].Name, c.Webhooks[i].ClientConfig)
		}
	case *corev1.ConfigMap:
		bundle := []byte(c.Data[caCertKey])
		out = configuration{
			name: c.Name, resourceVersion: c.ResourceVersion,
			version: fmt.Sprintf("%s/%x", c.UID, sha256.Sum256(bundle)), bundles: [][]byte{bundle},
		}
	default:
		return out, false
	}
	return out, true
}

// versionOf names the state of a configuration's webhooks: the API server counts
// their changes as generations.
func versionOf(c metav1.Object) string {
	if c.GetGeneration() == 0 {
		return string(c.GetUID()) + "/" + c.GetResourceVersion()
	}
	return fmt.Sprintf("%s/generation %d", c.GetUID(), c.GetGeneration())
}

// holds reports whether every webhook trusts these CAs and no other.
func (c configuration) holds(trusted []*x509.Certificate) bool {
	for _, bundle := range c.bundles {
		if !holds(bundle, trusted) {
			return false
		}
	}
	return true
}

// certs are the CAs that its webhooks trust; what cannot be read is left out.
func (c configuration) certs() []*x509.Certificate {
	var out []*x509.Certificate
	for _, bundle := range c.bundles {
		certs, _ := parseBundle(bundle) // what was read before the mistake counts
		out = append(out, certs...)
	}
	return out
}

// withBundle returns a change of every webhook's caBundle, or of the ConfigMap's entry,
// and of nothing else, so fields that this program does not know stay as they
// are. It fails when the object has changed meanwhile.
func (c configuration) withBundle(bundle []byte) ([]byte, error) {
	if c.kind == configMapKind {
		return json.Marshal(map[string]any{
			"metadata": map[string]string{"resourceVersion": c.resourceVersion},
			"data":     map[string]string{caCertKey: string(bundle)},
		})
	}
	type clientConfig struct {
		CABundle []byte `json:"caBundle"`
	}
	type webhook struct {
		Name         string       `json:"name"`
		ClientConfig clientConfig `json:"clientConfig"`
	}
	var p struct {
		Metadata struct {
			ResourceVersion string `json:"resourceVersion"`
		} `json:"metadata"`
		Webhooks []webhook `json:"webhooks"`
	}
	p.Metadata.ResourceVersion = c.resourceVersion
	for _, name := range c.webhooks {
		p.Webhooks = append(p.Webhooks, webhook{Name: name, ClientConfig: clientConfig{CABundle: bundle}})
	}
	return json.Marshal(p)
}

// getConfigurations reads those that exist from the API server.
func (m *Manager) getConfigurations(ctx context.Context) ([]configuration, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	return configurations(m.kept, func(t *target) (any, error) {
		obj, err := t.get(ctx)
		switch {
		case apierrors.IsNotFound(err):
			return nil, nil
		case err != nil:
			return nil, fmt.Errorf("read %s: %w", t, err)
		}
		return obj, nil
	})
}

// configurations are those of the targets that exist.
func configurations(targets []*target, get func(*target) (any, error)) ([]configuration, error) {
	var out []configuration
	for _, t := range targets {
		obj, err := get(t)
		if err != nil {
			return nil, err
		}
		if c, ok := configurationOf(obj); ok {
			c.target = t
			out = append(out, c)
		}
	}
	return out, nil
}

// distribute writes the Secret's CAs into the configurations that do not hold
// them.
func (m *Manager) distribute(ctx context.Context, st state) error {
	trusted := st.content.trusted()
	if st.secret == nil || len(trusted) == 0 {
		return nil
	}
	for _, c := range st.configurations {
		if c.holds(trusted) {
			continue
		}
		patch, err := c.withBundle(encodeCerts(trusted...))
		if err != nil {
			return fmt.Errorf("CAs for %s: %w", c.target, err)
		}
		if err := c.patch(ctx, patch); err != nil {
			return fmt.Errorf("write the CAs into %s: %w", c.target, err)
		}
		m.metrics.bundles.WithLabelValues(c.name).Inc()
		klog.FromContext(ctx).Info("Wrote the CAs", "kind", c.kind, "name", c.name, "certificates", len(trusted))
	}
	return nil
}

// watch prepares the informers; changed is called when anything changes.
func (m *Manager) watch(changed func()) {
	m.kept = m.targets()
	secrets := func(name string) cache.SharedIndexInformer {
		return coreinformers.NewFilteredSecretInformer(m.config.Client, m.config.Namespace, 0, nil, informers.ByName(name))
	}
	handler := func(any, any) { changed() }
	m.watches.Add("Secret "+m.config.Namespace+"/"+m.config.Secret, secrets(m.config.Secret), trimSecret, handler)
	for _, t := range m.kept {
		m.watches.Add(t.String(), t.informer, trimConfiguration, handler)
	}
	if name := m.config.ClientSecret; name != "" {
		m.client = &target{kind: "Secret", namespace: m.config.Namespace, name: name, informer: secrets(name)}
		m.watches.Add(m.client.String(), m.client.informer, nil, handler)
	}
}

// trimSecret keeps no keys: the watch only tells that the Secret is to be read.
func trimSecret(obj any) (any, error) {
	if secret, ok := obj.(*corev1.Secret); ok {
		return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{
			Namespace: secret.Namespace, Name: secret.Name, UID: secret.UID, ResourceVersion: secret.ResourceVersion,
		}}, nil
	}
	return obj, nil
}

// trimConfiguration drops what is not looked at.
func trimConfiguration(obj any) (any, error) {
	switch c := obj.(type) {
	case *admissionv1.MutatingWebhookConfiguration:
		c.ManagedFields, c.Annotations = nil, nil
	case *admissionv1.ValidatingWebhookConfiguration:
		c.ManagedFields, c.Annotations = nil, nil
	}
	return obj, nil
}
