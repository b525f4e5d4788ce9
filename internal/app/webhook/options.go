package webhook

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/divvy-gpu/divvy/internal/app/flags"
	"github.com/divvy-gpu/divvy/internal/pool/admission"
	"github.com/divvy-gpu/divvy/internal/pool/secrets"
)

// theirVariables are the variables of the original's Deployment, by flag.
var theirVariables = map[string]string{"total-gpu-memory": "TOTAL_GPU_MEMORY"}

// maxTotalMB is ten times what the largest GPUs have; more is a mistaken unit.
const maxTotalMB = 10_000_000

// Options are the settings of the webhooks. A flag wins over its environment variable,
// and that over the default.
type Options struct {
	flags.Server

	// Namespace is the program's own, "" for that of the pod (POD_NAMESPACE).
	// Service and Secret are in it: what the API server calls, and where the
	// certificate is kept.
	Namespace, Service, Secret string
	// MutatingConfig and ValidatingConfig name the webhook configurations whose CA
	// bundles are kept.
	MutatingConfig, ValidatingConfig string
	// CatalogFile lists the clients; "" for the catalog that is built in.
	CatalogFile string
	// TotalGPUMemory is the memory of one GPU of the pool in MB (10^6 bytes), as
	// it was written; "" or "0" when unknown.
	TotalGPUMemory string
	// ClientImage holds the clients whose catalog entry names no image, and
	// ClientPullPolicy is its pull policy, "" for the API server's default.
	ClientImage, ClientPullPolicy string
	// IgnoredNamespaces are left alone, besides Namespace.
	IgnoredNamespaces []string
	// SourceNamespace has the secrets that pods get copies of, in the namespaces
	// that NamespaceSelector selects: key=value and so on, or a label selector as
	// JSON.
	SourceNamespace, NamespaceSelector string
}

// DefaultOptions returns the defaults.
func DefaultOptions() Options {
	return Options{ //nolint:gosec // the name of a secret is none
		Server:            flags.Server{Listen: ":8443", MetricsListen: ":9403", ShutdownDelay: 5 * time.Second, Log: flags.DefaultLog()},
		Service:           "bwki-webhook-svc",
		Secret:            "bwki-webhook-certs",
		MutatingConfig:    "bwki-webhook-cfg",
		ValidatingConfig:  "validation.bitfusion.io-cfg",
		ClientImage:       "docker.io/bitfusiondeviceplugin/bitfusion-client:0.4",
		IgnoredNamespaces: []string{metav1.NamespaceSystem, metav1.NamespacePublic},
		SourceNamespace:   secrets.DefaultSourceNamespace,
		NamespaceSelector: "divvy.dev/pool=allowed",
	}
}

// AddFlags adds a flag for every option, with its present value as default.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	o.Server.AddFlags(fs, "address to serve admission reviews and probes on, with TLS", "how long to keep serving requests after SIGTERM")
	fs.StringVar(&o.Namespace, "namespace", o.Namespace,
		"namespace of the program, its service and its secret; the pod's namespace (POD_NAMESPACE) if empty")
	fs.StringVar(&o.Service, "service", o.Service, "service that the API server calls and that the certificate is issued for")
	fs.StringVar(&o.Secret, "secret", o.Secret, "secret for the certificate and its CA")
	fs.StringVar(&o.MutatingConfig, "mutating-config", o.MutatingConfig, "MutatingWebhookConfiguration whose CA bundle is maintained")
	fs.StringVar(&o.ValidatingConfig, "validating-config", o.ValidatingConfig,
		"ValidatingWebhookConfiguration whose CA bundle is maintained")
	fs.StringVar(&o.CatalogFile, "catalog-file", o.CatalogFile,
		"catalog of clients, reloaded when it changes; the built-in catalog if empty")
	fs.StringVar(&o.TotalGPUMemory, "total-gpu-memory", o.TotalGPUMemory, "memory of one GPU of the pool, a whole number of MB; requests "+
		"by memory are rejected if 0 or empty (also environment TOTAL_GPU_MEMORY)")
	fs.StringVar(&o.ClientImage, "client-image", o.ClientImage, "image of clients whose catalog entry names no image")
	fs.StringVar(&o.ClientPullPolicy, "client-pull-policy", o.ClientPullPolicy,
		"pull policy of the client images: Always, IfNotPresent or Never; the API server's default if empty")
	fs.StringSliceVar(&o.IgnoredNamespaces, "ignored-namespaces", o.IgnoredNamespaces,
		"namespaces whose pods are ignored, in addition to the program's own")
	fs.StringVar(&o.SourceNamespace, "source-namespace", o.SourceNamespace, "namespace of the pool's secrets")
	fs.StringVar(&o.NamespaceSelector, "namespace-selector", o.NamespaceSelector,
		"labels of the namespaces that may get copies of the secrets, as key=value or as a label selector in JSON; {} for all")
}

// Validate reports all mistakes at once.
func (o Options) Validate() error {
	errs := []error{o.Server.Validate()}
	check := func(flag string, err error) { errs = append(errs, flags.Mistake(flag, err)) }
	if o.namespace() == "" {
		check("namespace", errors.New("is required if POD_NAMESPACE is not set"))
	} else {
		check("namespace", checkName(o.namespace(), validation.IsDNS1123Label))
	}
	check("service", checkName(o.Service, validation.IsDNS1035Label))
	check("secret", checkName(o.Secret, validation.IsDNS1123Subdomain))
	check("mutating-config", checkName(o.MutatingConfig, validation.IsDNS1123Subdomain))
	check("validating-config", checkName(o.ValidatingConfig, validation.IsDNS1123Subdomain))
	check("source-namespace", checkName(o.SourceNamespace, validation.IsDNS1123Label))
	for _, namespace := range o.IgnoredNamespaces {
		check("ignored-namespaces", checkName(namespace, validation.IsDNS1123Label))
	}
	_, err := parseTotal(o.TotalGPUMemory)
	check("total-gpu-memory", err)
	if strings.ContainsAny(o.ClientImage, " \t\r\n") {
		check("client-image", fmt.Errorf("%q: must not contain blanks", o.ClientImage))
	}
	policies := []corev1.PullPolicy{"", corev1.PullAlways, corev1.PullIfNotPresent, corev1.PullNever}
	if !slices.Contains(policies, corev1.PullPolicy(o.ClientPullPolicy)) {
		check("client-pull-policy", fmt.Errorf("%q: must be Always, IfNotPresent, Never or empty", o.ClientPullPolicy))
	}
	_, err = parseSelector(o.NamespaceSelector)
	check("namespace-selector", err)
	return errors.Join(errs...)
}

func (o Options) namespace() string { return cmp.Or(o.Namespace, os.Getenv("POD_NAMESPACE")) }

// admission returns what reviews go by.
func (o Options) admission() (admission.Settings, error) {
	total, err := parseTotal(o.TotalGPUMemory)
	return admission.Settings{
		TotalMemoryMB: total, ClientImage: o.ClientImage, ClientPullPolicy: corev1.PullPolicy(o.ClientPullPolicy),
		IgnoredNamespaces: append(slices.Clone(o.IgnoredNamespaces), o.namespace()),
	}, err
}

// dnsNames are the names that the API server may call the service by; it uses
// the first.
func (o Options) dnsNames() []string {
	inNamespace := o.Service + "." + o.namespace()
	return []string{inNamespace + ".svc", inNamespace, o.Service}
}

func checkName(name string, form func(string) []string) error {
	if name == "" {
		return errors.New("must not be empty")
	}
	if problems := form(name); len(problems) > 0 {
		return fmt.Errorf("%q: %s", name, strings.Join(problems, "; "))
	}
	return nil
}

// parseTotal reads the memory of one GPU in MB. The original took a quantity and
// its unit for MB, so that "16000M" was a million times too much and what is no
// quantity stopped the program at a pod's creation.
func parseTotal(text string) (int64, error) {
	text = strings.TrimSpace(text)
	if text == "" {
		return 0, nil
	}
	const form = "must be a whole number of MB (10^6 bytes) of one GPU, without a unit, such as 16000"
	total, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		if q, err := resource.ParseQuantity(text); err == nil && q.Value() >= 1_000_000 {
			return 0, fmt.Errorf("%q: %s; if %s bytes are meant, write %d", text, form, text, q.Value()/1_000_000)
		}
		return 0, fmt.Errorf("%q: %s", text, form)
	}
	if total < 0 || total > maxTotalMB {
		return 0, fmt.Errorf("%q: %s; from 0 to %d", text, form, maxTotalMB)
	}
	return total, nil
}

// parseSelector reads a selector as kubectl writes it, or as the JSON of a label
// selector.
func parseSelector(text string) (labels.Selector, error) {
	text = strings.TrimSpace(text)
	switch {
	case text == "":
		return nil, errors.New("must not be empty; {} selects all namespaces")
	case !strings.HasPrefix(text, "{"):
		selector, err := labels.Parse(text)
		if err != nil {
			return nil, fmt.Errorf("%q: must be labels such as divvy.dev/pool=allowed: %w", text, err)
		}
		return selector, nil
	}
	var s metav1.LabelSelector
	decoder := json.NewDecoder(strings.NewReader(text))
	decoder.DisallowUnknownFields()
	err := decoder.Decode(&s)
	if err == nil && decoder.More() {
		err = errors.New("unexpected text after it")
	}
	var selector labels.Selector
	if err == nil {
		selector, err = metav1.LabelSelectorAsSelector(&s)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: must be a label selector with matchLabels and matchExpressions: %w", text, err)
	}
	return selector, nil
}
