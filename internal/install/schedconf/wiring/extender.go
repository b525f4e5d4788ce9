package wiring

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/divvy-gpu/divvy/internal/install/schedconf"
	"github.com/divvy-gpu/divvy/internal/install/schedconf/host"
)

// Names that the chart gives to what the extender publishes, in the namespace of
// its Service.
const (
	CAConfigMap  = "divvy-extender-ca"
	ClientSecret = "divvy-extender-client" //nolint:gosec // the name of a Secret

	caKey   = "ca.crt"
	certKey = "tls.crt"
	keyKey  = "tls.key"
)

// Route is the prefix of the extender's verbs.
const Route = "/gcushare-scheduler"

// DefaultResource is that of GCUShare.
const DefaultResource = "enflame.com/gcu-memory"

// Source says what kube-scheduler is to call, and where that is published.
type Source struct {
	// URL is the prefix of the verbs' routes as kube-scheduler reaches it; "" for
	// the address of Service, which is namespace/name.
	URL, Service string
	// Proxy is host:port of the local proxy on this node, which takes the place of
	// the Service's address for a kube-scheduler on the node's network; "" for none.
	Proxy string
	// ServerName is the name in the extender's certificate; "" for the Service's.
	ServerName string
	// CAFile, CertFile and KeyFile are PEM. Without them, with Service, they are
	// read from the API server.
	CAFile, CertFile, KeyFile string
	// Resources are the extended resources whose pods the extender places; none
	// for those that the scheduler asks about already, or else DefaultResource.
	Resources []string
	// Weight is how many times the extender's scores count.
	Weight int
	// Timeout is how long kube-scheduler waits for an answer.
	Timeout time.Duration
	// Image is that of divvy-scheduler, which takes the place of kube-scheduler, and Args are its
	// flags; "" where kube-scheduler stays. GrantKeyFile holds the key that signs planned
	// allocations.
	Image        string
	Args         []string
	GrantKeyFile string
}

func (s Source) folders() []string {
	var dirs []string
	for _, file := range []string{s.CAFile, s.CertFile, s.KeyFile, s.GrantKeyFile} {
		if file != "" {
			dirs = append(dirs, filepath.Dir(file))
		}
	}
	return dirs
}

// waitingError says that the extender has not published something yet.
type waitingError struct{ what string }

func (e *waitingError) Error() string { return "waiting for the extender to publish " + e.what }

// extender returns what kube-scheduler is to ask. The error is a *waitingError
// while the extender has not said enough about itself.
func (s Source) extender(ctx context.Context, client kubernetes.Interface) (schedconf.Extender, error) {
	// Another order of resources must not restart a scheduler.
	resources := slices.Compact(slices.Sorted(slices.Values(s.Resources)))
	e := schedconf.Extender{URL: s.URL, ServerName: s.ServerName, Resources: resources, Timeout: s.Timeout, Weight: s.Weight}
	if s.Image != "" {
		key, err := readPublished(s.GrantKeyFile)
		e.Program = &schedconf.Program{Image: s.Image, Args: s.Args, Key: key}
		return e, err
	}
	if e.URL == "" {
		if err := s.fromService(ctx, client, &e); err != nil {
			return e, err
		}
	}
	u, err := url.Parse(e.URL)
	if err != nil {
		return e, fmt.Errorf("the extender's address: %w", err)
	}
	if u.Scheme != "https" {
		e.ServerName = ""
		return e, nil
	}
	if e.ServerName == "" {
		e.ServerName = u.Hostname()
	}
	if err := s.credentials(ctx, client, &e); err != nil {
		return e, err
	}
	return e, checkCredentials(e)
}

// fromService fills in the address: by https where the Service has that port.
func (s Source) fromService(ctx context.Context, client kubernetes.Interface, e *schedconf.Extender) error {
	namespace, name, _ := strings.Cut(s.Service, "/")
	service, err := client.CoreV1().Services(namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return fmt.Errorf("the extender's Service %s was not found; set --extender-service or --extender-url", s.Service)
	}
	if err != nil {
		return fmt.Errorf("get the extender's Service: %w", err)
	}
	ip := service.Spec.ClusterIP
	if net.ParseIP(ip) == nil {
		//nolint:staticcheck // it begins with a name
		return fmt.Errorf("Service %s has no cluster IP (%q), and kube-scheduler does not resolve names of Services; set --extender-url",
			s.Service, ip)
	}
	for _, scheme := range []string{"https", "http"} {
		for _, port := range service.Spec.Ports {
			if port.Name == scheme {
				address := net.JoinHostPort(ip, strconv.Itoa(int(port.Port)))
				if scheme == "https" { // the only port that the local proxy hands connections to
					address = cmp.Or(s.Proxy, address)
				}
				e.URL = scheme + "://" + address + Route
				if e.ServerName == "" {
					e.ServerName = name + "." + namespace + ".svc"
				}
				return nil
			}
		}
	}
	return fmt.Errorf("Service %s has no port named https or http", s.Service) //nolint:staticcheck // a name
}

// credentials fills in the CA, and the client's certificate where there is one.
func (s Source) credentials(ctx context.Context, client kubernetes.Interface, e *schedconf.Extender) (err error) {
	published := s.URL == ""
	namespace, _, _ := strings.Cut(s.Service, "/")
	switch {
	case s.CAFile != "":
		e.CA, err = readPublished(s.CAFile)
	case published:
		var m *corev1.ConfigMap
		if m, err = client.CoreV1().ConfigMaps(namespace).Get(ctx, CAConfigMap, metav1.GetOptions{}); err == nil {
			e.CA = []byte(m.Data[caKey])
		}
		err = absent(err, "ConfigMap "+namespace+"/"+CAConfigMap)
	default:
		err = fmt.Errorf("--extender-url is %s, so --ca-file is required to verify its certificate", s.URL)
	}
	if err != nil {
		return err
	}
	switch {
	case s.CertFile != "":
		if e.ClientCert, err = readPublished(s.CertFile); err == nil {
			e.ClientKey, err = readPublished(s.KeyFile)
		}
	case published:
		var secret *corev1.Secret
		if secret, err = client.CoreV1().Secrets(namespace).Get(ctx, ClientSecret, metav1.GetOptions{}); err == nil {
			e.ClientCert, e.ClientKey = secret.Data[certKey], secret.Data[keyKey]
		}
		err = absent(err, "Secret "+namespace+"/"+ClientSecret)
	}
	if err != nil {
		return err
	}
	switch {
	case len(e.CA) == 0:
		return &waitingError{"its CA"}
	case published && (len(e.ClientCert) == 0 || len(e.ClientKey) == 0):
		return &waitingError{"a certificate for kube-scheduler"}
	}
	return nil
}

// readPublished reads a file of a mounted object. One that is not there is one
// that the extender has not filled.
func readPublished(file string) ([]byte, error) {
	data, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, &waitingError{file}
	}
	if err != nil {
		return nil, fmt.Errorf("credentials for the extender: %w", err)
	}
	if len(data) == 0 {
		return nil, &waitingError{file}
	}
	return data, nil
}

func absent(err error, what string) error {
	switch {
	case err == nil:
		return nil
	case apierrors.IsNotFound(err):
		return &waitingError{what}
	case apierrors.IsForbidden(err):
		return fmt.Errorf("read the %s: %w; set --ca-file, --client-cert-file and --client-key-file, or use a kubeconfig of an "+
			"administrator", what, err)
	}
	return fmt.Errorf("read the %s: %w", what, err)
}

// checkCredentials says what is wrong with credentials that kube-scheduler would
// start with and then never reach the extender by.
func checkCredentials(e schedconf.Extender) error {
	if !x509.NewCertPool().AppendCertsFromPEM(e.CA) {
		return errors.New("the extender's CA has no certificate in PEM form")
	}
	if len(e.ClientCert) == 0 && len(e.ClientKey) == 0 {
		return nil
	}
	if _, err := tls.X509KeyPair(e.ClientCert, e.ClientKey); err != nil {
		return fmt.Errorf("the certificate for kube-scheduler and its key: %w", err)
	}
	return nil
}

// desired is what kube-scheduler of the node is to ask. Resources that are not given are
// those that it asks about.
func (s Source) desired(ctx context.Context, client kubernetes.Interface, h *host.Host) (schedconf.Extender, error) {
	st, err := h.Status()
	if err != nil {
		return schedconf.Extender{}, err
	}
	if s.Proxy != "" {
		want, err := h.Want()
		if err != nil {
			return schedconf.Extender{}, err
		}
		if !want.HostNetwork {
			s.Proxy = "" // out of its reach
		}
	}
	e, err := s.extender(ctx, client)
	if len(s.Resources) == 0 {
		e.Resources = []string{DefaultResource}
		if st.Extender != nil && len(st.Extender.Resources) > 0 {
			e.Resources = st.Extender.Resources
		}
	}
	return e, err
}

// withProxy returns the source for a command of a person, who need not know of the
// local proxy: where kube-scheduler is wired to it, it stays so.
func (s Source) withProxy(h *host.Host) Source {
	if st, err := h.Status(); err == nil && s.Proxy == "" && s.URL == "" && st.Extender != nil {
		s.Proxy = proxyOf(st.Extender.URL)
	}
	return s
}

// proxyOf returns the address of the local proxy that kube-scheduler is wired to, ""
// where it is wired to something else.
func proxyOf(extenderURL string) string {
	u, err := url.Parse(extenderURL)
	if err != nil || u.Scheme != "https" || !net.ParseIP(u.Hostname()).IsLoopback() {
		return ""
	}
	return u.Host
}
