package abuse

import (
	"context"
	"crypto/tls"
	_ "embed" // the configurations of the webhooks
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
	"github.com/divvy-gpu/divvy/lab/internal/build"
	"github.com/divvy-gpu/divvy/lab/internal/controlplane"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/simnodes"
)

const (
	resource  = "enflame.com/gcu-memory"
	namespace = "team"
	poolSpace = "bwki"
	// readyTimeout is how long a program may take to be ready.
	readyTimeout = 2 * time.Minute
	stopGrace    = 10 * time.Second
)

// Memory limits of the chart in bytes, which are not changed: extender.resources,
// pool.webhook.resources, node.resources and pool.node.resources.
const (
	extenderLimit = 512 << 20
	webhookLimit  = 512 << 20
	nodeLimit     = 512 << 20
	poolLimit     = 128 << 20
)

// program is one of Divvy's.
type program struct {
	*controlplane.Process
	limit int64
}

// world is a control plane without nodes of its own, Divvy's programs, and pods outside.
type world struct {
	o        Options
	dir      string
	programs controlplane.Programs
	node     string // path of divvy-node
	outside  *outside
	plane    *controlplane.ControlPlane
	client   kubernetes.Interface
	nodes    simnodes.Group
	extender *controlplane.Extender

	extenderProgram, webhook, nodeAgent, poolAgent program
	schedulers                                     []string
	ports                                          map[string]string // host:port by name
	stops                                          []func() error
}

// start starts everything. What was started is in stops, also after an error.
func (w *world) start(ctx context.Context) (err error) {
	if w.outside, err = newOutside(); err != nil {
		return err
	}
	w.stops = append(w.stops, w.outside.close)
	if w.programs, err = controlplane.Build(ctx, w.dir, w.o.Control, w.o.Out); err != nil {
		return err
	}
	if w.plane, err = controlplane.Start(ctx, w.programs.BinDir, w.dir); err != nil {
		return err
	}
	w.stops = append(w.stops, w.plane.Stop)
	if w.client, err = w.plane.Client(); err != nil {
		return err
	}
	for _, name := range []string{namespace, poolSpace} {
		if _, err := w.client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}},
			metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	w.nodes = simnodes.Group{Count: w.o.Nodes, Resource: resource}
	if err := w.nodes.Create(ctx, w.client); err != nil {
		return err
	}
	w.ports = map[string]string{}
	for _, step := range []func(context.Context) error{w.startExtender, w.startWebhook, w.startNode, w.startPool} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (w *world) stop() error {
	var errs []error
	for i := len(w.stops) - 1; i >= 0; i-- {
		errs = append(errs, w.stops[i]())
	}
	return errors.Join(errs...)
}

// startExtender starts an extender and two kube-schedulers, of which one asks it over
// TLS with its certificate, and the other one over plain HTTP from the extender's own host.
func (w *world) startExtender(ctx context.Context) error {
	var err error
	w.extender, err = w.plane.StartExtender(ctx, controlplane.ExtenderOptions{
		Name: "extender", Program: w.programs.Control, Resources: []string{resource}, Host: w.outside.address(here), Args: w.o.ExtenderArgs,
	})
	if err != nil {
		return err
	}
	w.stops = append(w.stops, func() error { return w.extender.Stop(stopGrace) })
	w.extenderProgram = program{w.extender.Process, extenderLimit}
	plain := w.extender.Entry
	plain.URL, plain.CA, plain.ClientCert, plain.ClientKey, plain.ServerName = w.extender.Plain, nil, nil, nil, ""
	for name, text := range map[string]string{"plain": plain.URL, "tls": w.extender.Entry.URL, "metrics": w.extender.MetricsURL()} {
		parsed, err := url.Parse(text)
		if err != nil {
			return err
		}
		w.ports["extender "+name] = parsed.Host
	}
	w.schedulers = []string{"scheduler-over-tls", "scheduler-over-http"}
	for _, name := range w.schedulers {
		entry := &plain
		if name == "scheduler-over-tls" {
			entry = &w.extender.Entry
		}
		s, err := w.plane.StartScheduler(ctx, w.programs.Kubernetes, controlplane.SchedulerOptions{Name: name, Extender: entry, QPS: 1000})
		if err != nil {
			return err
		}
		w.stops = append(w.stops, func() error { return s.Stop(stopGrace) })
	}
	return nil
}

// startWebhook starts the webhooks of the pool, which the API server asks about every pod.
func (w *world) startWebhook(ctx context.Context) error {
	listen, port, err := w.listen("webhook tls")
	if err != nil {
		return err
	}
	metrics, _, err := w.listen("webhook metrics")
	if err != nil {
		return err
	}
	const name = "bwki-webhook"
	meta := func(suffix string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: poolSpace, Name: name + suffix}
	}
	if _, err := w.client.CoreV1().Secrets(poolSpace).Create(ctx, &corev1.Secret{ObjectMeta: meta("-certs")},
		metav1.CreateOptions{}); err != nil {
		return err
	}
	// The API server goes to the name of such a Service as it is.
	service := &corev1.Service{ObjectMeta: meta("-svc"), Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName,
		ExternalName: w.outside.address(here)}}
	if _, err := w.client.CoreV1().Services(poolSpace).Create(ctx, service, metav1.CreateOptions{}); err != nil {
		return err
	}
	mutating, validating, err := configurations(port)
	if err != nil {
		return err
	}
	api := w.client.AdmissionregistrationV1()
	if _, err := api.MutatingWebhookConfigurations().Create(ctx, &mutating, metav1.CreateOptions{}); err != nil {
		return err
	}
	if _, err := api.ValidatingWebhookConfigurations().Create(ctx, &validating, metav1.CreateOptions{}); err != nil {
		return err
	}
	w.webhook, err = w.run("webhook", w.programs.Control, webhookLimit, nil, "webhook", "--kubeconfig="+w.plane.Kubeconfig(),
		"--listen="+listen,
		"--metrics-listen="+metrics, "--namespace="+poolSpace, "--mutating-config="+mutating.Name, "--validating-config="+validating.Name,
		"--log-level=error")
	if err != nil {
		return err
	}
	return w.ready(ctx, w.webhook, "https://"+listen+"/readyz")
}

//go:embed webhooks.yaml
var webhooks string

// configurations are those of the webhooks, at a port of the Service.
func configurations(port int) (mutating admissionregistrationv1.MutatingWebhookConfiguration,
	validating admissionregistrationv1.ValidatingWebhookConfiguration, err error) {
	first, second, _ := strings.Cut(strings.ReplaceAll(webhooks, "PORT", strconv.Itoa(port)), "\n---\n")
	err = errors.Join(yaml.UnmarshalStrict([]byte(first), &mutating), yaml.UnmarshalStrict([]byte(second), &validating))
	return mutating, validating, err
}

// startNode starts divvy-node on simulated cards. There is no kubelet, which it waits for;
// its port is served.
func (w *world) startNode(ctx context.Context) error {
	fmt.Fprintln(w.o.Out, "Building divvy-node.")
	lab, err := layout.LabDir()
	if err != nil {
		return err
	}
	w.node = filepath.Join(w.dir, "divvy-node")
	if err := build.RunGo(ctx, filepath.Dir(lab), []string{"CGO_ENABLED=1", "CGO_CFLAGS=-g -O2 -Wno-deprecated-declarations"}, nil,
		"build", "-buildvcs=false", "-trimpath", "-tags", "netgo,osusergo", "-ldflags", "-s -w -extldflags=-Wl,-z,lazy", "-o", w.node,
		"./cmd/divvy-node"); err != nil {
		return fmt.Errorf("build divvy-node: %w", err)
	}
	dir := filepath.Join(w.dir, "node")
	for _, below := range []string{"kubelet/device-plugins", "kubelet/pod-resources", "state", "cdi"} {
		if err := os.MkdirAll(filepath.Join(dir, below), 0o750); err != nil {
			return err
		}
	}
	library, err := vendorsim.Build(ctx, vendorsim.Enflame, dir)
	if err != nil {
		return err
	}
	topology := vendorsim.Topology{Cards: vendorsim.GCUs(8, 16<<10)}
	if err := topology.Write(filepath.Join(dir, vendorsim.TopologyName)); err != nil {
		return err
	}
	key, err := w.plane.GrantKey()
	if err != nil {
		return err
	}
	listen, _, err := w.listen("node")
	if err != nil {
		return err
	}
	config := fmt.Sprintf("apiVersion: config.divvy.dev/v1alpha1\nkind: NodeConfig\nlisten: %q\nkubeletDir: %s/kubelet\nstateDir: "+
		"%s/state\ncdiDir: %s/cdi\n"+
		"grantKeyFile: %s\nlogLevel: error\nlibraries: {enflame: %s}\nresources:\n- {name: %s, vendor: enflame, mode: memory, "+
		"memoryUnit: \"1\"}\n",
		listen, dir, dir, dir, key, library, resource)
	file := filepath.Join(dir, "node.yaml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		return err
	}
	w.nodeAgent, err = w.run("divvy-node", w.node, nodeLimit, nil, "--kubeconfig="+w.plane.Kubeconfig(), "--node-name="+w.nodes.NodeName(0),
		"--config="+file)
	if err != nil {
		return err
	}
	return w.ready(ctx, w.nodeAgent, "http://"+listen+"/healthz")
}

func (w *world) startPool(ctx context.Context) error {
	dir := filepath.Join(w.dir, "pool")
	if err := os.MkdirAll(filepath.Join(dir, "device-plugins"), 0o750); err != nil {
		return err
	}
	listen, _, err := w.listen("node pool")
	if err != nil {
		return err
	}
	if w.poolAgent, err = w.run("divvy-node-pool", w.node, poolLimit, nil, "pool", "--kubelet-dir="+dir, "--listen="+listen); err != nil {
		return err
	}
	return w.ready(ctx, w.poolAgent, "http://"+listen+"/healthz")
}

// listen returns a free address for a port of that name.
func (w *world) listen(name string) (address string, port int, err error) {
	ports, err := controlplane.FreePorts(1)
	if err != nil {
		return "", 0, err
	}
	w.ports[name] = fmt.Sprintf("%s:%d", w.outside.address(here), ports[0])
	return w.ports[name], ports[0], nil
}

func (w *world) run(name, path string, limit int64, env []string, args ...string) (program, error) {
	p, err := controlplane.StartProcess(name, path, filepath.Join(w.dir, name+".log"), env, args...)
	if err != nil {
		return program{}, err
	}
	w.stops = append(w.stops, func() error { return p.Stop(stopGrace) })
	return program{p, limit}, nil
}

func (w *world) ready(ctx context.Context, p program, address string) error {
	client := w.from(bystander)
	defer client.CloseIdleConnections()
	return poll.Until(ctx, readyTimeout, p.Name()+" is ready", func(ctx context.Context) error {
		if !p.Running() {
			return fmt.Errorf("it ended: %w\n%s", p.Err(), p.LogTail(10))
		}
		return ask(ctx, client, address)
	})
}

// from is a client outside.
func (w *world) from(last int) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
			return w.outside.dial(ctx, last, address)
		},
		// The API server's trust is not what is looked at.
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // see above
		DisableKeepAlives: true,                                  // as kubelet's probes
	}}
}

// ask returns nil for an answer with status 200 that was read to its end.
func ask(ctx context.Context, client *http.Client, address string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, http.NoBody)
	if err != nil {
		return err
	}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close() //nolint:errcheck // read to its end
	_, err = io.Copy(io.Discard, response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", address, response.Status)
	}
	return err
}
