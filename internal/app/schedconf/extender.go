package schedconf

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
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/divvy-gpu/divvy/internal/install/schedconf"
)

// waitingError says that the extender has not published something yet.
type waitingError struct{ what string }

func (e *waitingError) Error() string { return "waiting for the extender to publish " + e.what }

// extender returns what kube-scheduler is to ask. The error is a *waitingError
// while the extender has not said enough about itself.
func (s settings) extender(ctx context.Context, client kubernetes.Interface) (schedconf.Extender, error) {
	e := schedconf.Extender{URL: s.ExtenderURL, ServerName: s.ServerName, Resources: s.Resources, Timeout: s.ExtenderTimeout,
		Weight: s.Weight}
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
func (s settings) fromService(ctx context.Context, client kubernetes.Interface, e *schedconf.Extender) error {
	namespace, name, _ := strings.Cut(s.ExtenderService, "/")
	service, err := client.CoreV1().Services(namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return fmt.Errorf("the extender's Service %s was not found; set --extender-service or --extender-url", s.ExtenderService)
	}
	if err != nil {
		return fmt.Errorf("get the extender's Service: %w", err)
	}
	ip := service.Spec.ClusterIP
	if net.ParseIP(ip) == nil {
		return fmt.Errorf("Service %s has no cluster IP (%q), and kube-scheduler does not resolve names of Services; set --extender-url",
			s.ExtenderService, ip) //nolint:staticcheck // a name
	}
	for _, scheme := range []string{"https", "http"} {
		for _, port := range service.Spec.Ports {
			if port.Name == scheme {
				address := net.JoinHostPort(ip, strconv.Itoa(int(port.Port)))
				if scheme == "https" { // the only port that the local proxy hands connections to
					address = cmp.Or(s.ExtenderProxy, address)
				}
				e.URL = scheme + "://" + address + route
				if e.ServerName == "" {
					e.ServerName = name + "." + namespace + ".svc"
				}
				return nil
			}
		}
	}
	return fmt.Errorf("Service %s has no port named https or http", s.ExtenderService) //nolint:staticcheck // a name
}

// credentials fills in the CA, and the client's certificate where there is one.
func (s settings) credentials(ctx context.Context, client kubernetes.Interface, e *schedconf.Extender) (err error) {
	published := s.ExtenderURL == ""
	namespace, _, _ := strings.Cut(s.ExtenderService, "/")
	switch {
	case s.CAFile != "":
		e.CA, err = readPublished(s.CAFile)
	case published:
		var m *corev1.ConfigMap
		if m, err = client.CoreV1().ConfigMaps(namespace).Get(ctx, caConfigMap, metav1.GetOptions{}); err == nil {
			e.CA = []byte(m.Data[caKey])
		}
		err = absent(err, "ConfigMap "+namespace+"/"+caConfigMap)
	default:
		err = fmt.Errorf("--extender-url is %s, so --ca-file is required to verify its certificate", s.ExtenderURL)
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
		if secret, err = client.CoreV1().Secrets(namespace).Get(ctx, clientSecret, metav1.GetOptions{}); err == nil {
			e.ClientCert, e.ClientKey = secret.Data[certKey], secret.Data[keyKey]
		}
		err = absent(err, "Secret "+namespace+"/"+clientSecret)
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
