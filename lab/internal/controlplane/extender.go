package controlplane

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/install/schedconf"
	"github.com/divvy-gpu/divvy/internal/scheduler/extender"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
)

// Namespace is where the extender keeps what it shares with kube-scheduler.
const Namespace = "divvy-system"

// Names of objects that the extender fills.
const (
	caConfigMap  = "divvy-extender-ca"
	clientSecret = "divvy-extender-client" //nolint:gosec // the name of a Secret
)

// route is the path of the extender's verbs.
const route = "/gcushare-scheduler"

// ExtenderOptions say how an extender is started.
type ExtenderOptions struct {
	// Name is that of the process and of its log.
	Name string
	// Program is the path of divvy-control.
	Program string
	// Resources are those that it manages.
	Resources []string
	// Host is the address of this machine that it listens on, that of the loopback
	// interface when empty.
	Host string
	// Args are further flags, and Env further variables of its environment.
	Args, Env []string
}

// Extender is a "divvy-control extender" that runs.
type Extender struct {
	*Process
	// Entry is what kube-scheduler is to be told about it.
	Entry schedconf.Extender
	// Plain is the URL for kube-scheduler over HTTP without TLS.
	Plain string

	endpoint
}

// endpoint are URLs of a program of Divvy's that places pods.
type endpoint struct{ url, metrics string }

// StartExtender starts an extender, with an administrator's rights, and waits until
// it answers and has published its certificates. All extenders of one control plane
// sign with one key.
func (c *ControlPlane) StartExtender(ctx context.Context, o ExtenderOptions) (*Extender, error) {
	key, err := c.GrantKey()
	if err != nil {
		return nil, err
	}
	ports, err := FreePorts(3)
	if err != nil {
		return nil, err
	}
	host := cmp.Or(o.Host, loopback)
	address := func(i int) string { return fmt.Sprintf("%s:%d", host, ports[i]) }
	e := &Extender{
		Entry: schedconf.Extender{URL: "https://" + address(2) + route, ServerName: "divvy-extender." + Namespace + ".svc",
			Resources: o.Resources},
		Plain:    "http://" + address(0) + route,
		endpoint: endpoint{url: "http://" + address(0), metrics: "http://" + address(1) + "/metrics"},
	}
	args := []string{
		"extender", "--kubeconfig=" + c.Kubeconfig(), "--grant-key-file=" + key, "--resources=" + strings.Join(o.Resources, ","),
		"--listen=" + address(0), "--metrics-listen=" + address(1), "--tls-listen=" + address(2), "--tls-namespace=" + Namespace,
		"--validating-config=",
	}
	if err := c.Prepare(ctx); err != nil {
		return nil, err
	}
	if e.Process, err = StartProcess(o.Name, o.Program, c.path(o.Name+".log"), o.Env, append(args, o.Args...)...); err != nil {
		return nil, err
	}
	if err = c.await(ctx, e.Process, e.Ready); err == nil {
		err = e.credentials(ctx, c)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start the extender: %w", err), e.Stop(stopGrace))
	}
	return e, nil
}

// Ready returns nil when the extender would get requests from a Service.
func (e *Extender) Ready(ctx context.Context) error {
	_, err := get(ctx, http.DefaultClient, e.url+"/readyz")
	return err
}

// Leads reports whether it is the replica that leads.
func (e endpoint) Leads(ctx context.Context) (bool, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, e.url+"/healthz", http.NoBody)
	if err != nil {
		return false, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return false, err
	}
	return response.Header.Get(extender.LeaderHeader) != "", response.Body.Close()
}

// GrantKey returns the path of the key that all extenders sign grants with. It makes
// it the first time.
func (c *ControlPlane) GrantKey() (string, error) {
	path := c.path("grant-key")
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		return path, err
	}
	// What is signed with it is worth nothing outside of this folder's cluster.
	key := []byte("a key that only this control plane's extenders know")
	if err := os.WriteFile(path, key, 0o600); err != nil {
		return "", fmt.Errorf("write the key for grants: %w", err)
	}
	return path, nil
}

// Prepare makes what the chart would: the namespace, and the objects that get what
// kube-scheduler needs to know of the extender.
func (c *ControlPlane) Prepare(ctx context.Context) error {
	client, err := c.Client()
	if err != nil {
		return err
	}
	_, err = client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: Namespace}},
		metav1.CreateOptions{})
	if err == nil || apierrors.IsAlreadyExists(err) {
		_, err = client.CoreV1().ConfigMaps(Namespace).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: caConfigMap}},
			metav1.CreateOptions{})
	}
	if err == nil || apierrors.IsAlreadyExists(err) {
		_, err = client.CoreV1().Secrets(Namespace).Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: clientSecret}},
			metav1.CreateOptions{})
	}
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("prepare the extender's namespace: %w", err)
	}
	return nil
}

// credentials waits for the CA and the client's certificate that the extender
// publishes for kube-scheduler.
func (e *Extender) credentials(ctx context.Context, c *ControlPlane) error {
	client, err := c.Client()
	if err != nil {
		return err
	}
	return poll.Until(ctx, readyTimeout, "the extender's certificates", func(ctx context.Context) error {
		ca, caErr := client.CoreV1().ConfigMaps(Namespace).Get(ctx, caConfigMap, metav1.GetOptions{})
		secret, secretErr := client.CoreV1().Secrets(Namespace).Get(ctx, clientSecret, metav1.GetOptions{})
		if err := errors.Join(caErr, secretErr); err != nil {
			return err
		}
		e.Entry.CA = []byte(ca.Data["ca.crt"])
		e.Entry.ClientCert, e.Entry.ClientKey = secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey]
		if len(e.Entry.CA) == 0 || len(e.Entry.ClientCert) == 0 || len(e.Entry.ClientKey) == 0 {
			return errors.New("one of them is empty")
		}
		return nil
	})
}

// MetricsURL is where its metrics are.
func (e *Extender) MetricsURL() string { return e.metrics }

// Metrics returns the extender's metrics in Prometheus' text format.
func (e *Extender) Metrics(ctx context.Context) (string, error) {
	return get(ctx, http.DefaultClient, e.metrics)
}

func get(ctx context.Context, client *http.Client, url string) (string, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	response, err := client.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close() //nolint:errcheck // read to its end
	text, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", url, response.Status, text)
	}
	return string(text), err
}
