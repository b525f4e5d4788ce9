package certs

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"sync"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	admissioninformers "k8s.io/client-go/informers/admissionregistration/v1"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// Kinds of configurations.
const (
	mutatingKind   = "MutatingWebhookConfiguration"
	validatingKind = "ValidatingWebhookConfiguration"
	configMapKind  = "ConfigMap"
)

// configuration is what matters of a webhook configuration, or of the ConfigMap
// that has the CAs for other clients.
type configuration struct {
	kind, name, resourceVersion string
	// version changes with the webhooks or the entry, and not with notes on the
	// object.
	version string
	// webhooks are the names, bundles their caBundles. A ConfigMap has one bundle
	// and no webhook.
	webhooks []string
	bundles  [][]byte
}

func mutating(c *admissionv1.MutatingWebhookConfiguration) configuration {
	out := configuration{kind: mutatingKind, name: c.Name, resourceVersion: c.ResourceVersion, version: versionOf(c)}
	for i := range c.Webhooks {
		out.webhooks = append(out.webhooks, c.Webhooks[i].Name)
		out.bundles = append(out.bundles, c.Webhooks[i].ClientConfig.CABundle)
	}
	return out
}

func validating(c *admissionv1.ValidatingWebhookConfiguration) configuration {
	out := configuration{kind: validatingKind, name: c.Name, resourceVersion: c.ResourceVersion, version: versionOf(c)}
	for i := range c.Webhooks {
		out.webhooks = append(out.webhooks, c.Webhooks[i].Name)
		out.bundles = append(out.bundles, c.Webhooks[i].ClientConfig.CABundle)
	}
	return out
}

func bundleOf(c *corev1.ConfigMap) configuration {
	bundle := []byte(c.Data[caCertKey])
	return configuration{
		kind: configMapKind, name: c.Name, resourceVersion: c.ResourceVersion,
		version: fmt.Sprintf("%s/%x", c.UID, sha256.Sum256(bundle)), bundles: [][]byte{bundle},
	}
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

// patch returns a change of every webhook's caBundle, or of the ConfigMap's entry,
// and of nothing else, so fields that this program does not know stay as they
// are. It fails when the object has changed meanwhile.
func (c configuration) patch(bundle []byte) ([]byte, error) {
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
	api := m.config.Client.AdmissionregistrationV1()
	var out []configuration
	if name := m.config.Mutating; name != "" {
		c, err := api.MutatingWebhookConfigurations().Get(ctx, name, metav1.GetOptions{})
		if err == nil {
			out = append(out, mutating(c))
		} else if !apierrors.IsNotFound(err) {
			return nil, fmt.Errorf("read %s %s: %w", mutatingKind, name, err)
		}
	}
	if name := m.config.Validating; name != "" {
		c, err := api.ValidatingWebhookConfigurations().Get(ctx, name, metav1.GetOptions{})
		if err == nil {
			out = append(out, validating(c))
		} else if !apierrors.IsNotFound(err) {
			return nil, fmt.Errorf("read %s %s: %w", validatingKind, name, err)
		}
	}
	if name := m.config.ConfigMap; name != "" {
		c, err := m.config.Client.CoreV1().ConfigMaps(m.config.Namespace).Get(ctx, name, metav1.GetOptions{})
		if err == nil {
			out = append(out, bundleOf(c))
		} else if !apierrors.IsNotFound(err) {
			return nil, fmt.Errorf("read %s %s/%s: %w", configMapKind, m.config.Namespace, name, err)
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
	api := m.config.Client.AdmissionregistrationV1()
	for _, c := range st.configurations {
		if c.holds(trusted) {
			continue
		}
		patch, err := c.patch(encodeCerts(trusted...))
		if err != nil {
			return fmt.Errorf("CAs for %s %s: %w", c.kind, c.name, err)
		}
		switch c.kind {
		case mutatingKind:
			_, err = api.MutatingWebhookConfigurations().Patch(ctx, c.name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
		case validatingKind:
			_, err = api.ValidatingWebhookConfigurations().Patch(ctx, c.name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
		default:
			_, err = m.config.Client.CoreV1().ConfigMaps(m.config.Namespace).Patch(ctx, c.name, types.MergePatchType, patch,
				metav1.PatchOptions{})
		}
		if err != nil {
			return fmt.Errorf("write the CAs into %s %s: %w", c.kind, c.name, err)
		}
		m.metrics.bundles.WithLabelValues(c.name).Inc()
		klog.FromContext(ctx).Info("Wrote the CAs", "kind", c.kind, "name", c.name, "certificates", len(trusted))
	}
	return nil
}

// watches follow the Secrets and the configurations.
type watches struct {
	runs    []func(context.Context)
	waiting []*watched
	// Those of objects that the Manager has none of are nil.
	mutating, validating, configMap, client *watched
}

// watched is the watch of one object.
type watched struct {
	what     string
	informer cache.SharedIndexInformer

	mu sync.Mutex // guards err
	// err is why the watch failed last.
	err error
}

// watch prepares the watches; changed is called when anything changes.
func (m *Manager) watch(changed func()) (watches, error) {
	var w watches
	add := func(what, name string, informer cache.SharedIndexInformer, trim cache.TransformFunc) (*watched, error) {
		one := &watched{what: what + " " + name, informer: informer}
		err := informer.SetTransform(trim)
		if err != nil {
			return nil, err
		}
		err = informer.SetWatchErrorHandlerWithContext(func(ctx context.Context, r *cache.Reflector, err error) {
			one.mu.Lock()
			one.err = err
			one.mu.Unlock()
			cache.DefaultWatchErrorHandler(ctx, r, err)
		})
		if err != nil {
			return nil, err
		}
		_, err = informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc:    func(any) { changed() },
			UpdateFunc: func(any, any) { changed() },
			DeleteFunc: func(any) { changed() },
		})
		if err != nil {
			return nil, err
		}
		w.waiting = append(w.waiting, one)
		w.runs = append(w.runs, informer.RunWithContext)
		return one, nil
	}
	byName := func(name string) func(*metav1.ListOptions) {
		return func(o *metav1.ListOptions) {
			o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()
		}
	}

	client := m.config.Client
	var err error
	if _, err = add("Secret", m.config.Namespace+"/"+m.config.Secret,
		coreinformers.NewFilteredSecretInformer(client, m.config.Namespace, 0, nil, byName(m.config.Secret)), trimSecret); err != nil {
		return w, err
	}
	if name := m.config.Mutating; name != "" {
		if w.mutating, err = add(mutatingKind, name,
			admissioninformers.NewFilteredMutatingWebhookConfigurationInformer(client, 0, nil, byName(name)),
			trimConfiguration); err != nil {
			return w, err
		}
	}
	if name := m.config.Validating; name != "" {
		if w.validating, err = add(validatingKind, name,
			admissioninformers.NewFilteredValidatingWebhookConfigurationInformer(client, 0, nil, byName(name)),
			trimConfiguration); err != nil {
			return w, err
		}
	}
	if name := m.config.ConfigMap; name != "" {
		if w.configMap, err = add(configMapKind, m.config.Namespace+"/"+name,
			coreinformers.NewFilteredConfigMapInformer(client, m.config.Namespace, 0, nil, byName(name)), nil); err != nil {
			return w, err
		}
	}
	if name := m.config.ClientSecret; name != "" {
		if w.client, err = add("Secret", m.config.Namespace+"/"+name,
			coreinformers.NewFilteredSecretInformer(client, m.config.Namespace, 0, nil, byName(name)), nil); err != nil {
			return w, err
		}
	}
	return w, nil
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

// synced returns nil once everything has been read, or says what has not.
func (w watches) synced() error {
	for _, one := range w.waiting {
		if one.informer.HasSynced() {
			continue
		}
		one.mu.Lock()
		err := one.err
		one.mu.Unlock()
		if err != nil {
			return fmt.Errorf("watch %s: %w", one.what, err)
		}
		return fmt.Errorf("%w: %s", errNotRead, one.what)
	}
	return nil
}

// object is what the watch last saw; nil when there is none.
func (w *watched) object(namespace, name string) any {
	if w == nil {
		return nil
	}
	key := name
	if namespace != "" {
		key = namespace + "/" + name
	}
	obj, _, _ := w.informer.GetStore().GetByKey(key)
	return obj
}

// cached are the configurations that exist, as last seen.
func (m *Manager) cached() []configuration {
	var out []configuration
	if c, ok := m.watches.mutating.object("", m.config.Mutating).(*admissionv1.MutatingWebhookConfiguration); ok {
		out = append(out, mutating(c))
	}
	if c, ok := m.watches.validating.object("", m.config.Validating).(*admissionv1.ValidatingWebhookConfiguration); ok {
		out = append(out, validating(c))
	}
	if c, ok := m.watches.configMap.object(m.config.Namespace, m.config.ConfigMap).(*corev1.ConfigMap); ok {
		out = append(out, bundleOf(c))
	}
	return out
}
