//go:build e2e

// Package node tests what divvy-node does with a real API server: its agent runs in
// the test, beside kubelet's own device manager and the lab's etcd and API server.
// The cards are simulated. It leaves the lab's cluster alone and needs no root.
//
//	go test -tags e2e -count=1 ./e2e/node
package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/retry"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/agent"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/vendors"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
	"github.com/divvy-gpu/divvy/lab/internal/controlplane"
	"github.com/divvy-gpu/divvy/lab/internal/kubelet"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
)

const (
	nodeName  = "node-1"
	namespace = "team"
	gcuMemory = accel.Resource("enflame.com/gcu-memory")
	grantKey  = "0123456789abcdef0123456789abcdef"
	// patience is how long something that is bound to come may take where every
	// processor is busy with other tests.
	patience = 2 * time.Minute
)

// Built once, by TestMain.
var (
	programs controlplane.Programs
	libefml  []byte
)

func TestMain(m *testing.M) {
	klog.SetSlogLogger(slog.New(slog.DiscardHandler)) // watches that a stopped API server ends
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	if code != 0 || err != nil {
		os.Exit(1)
	}
}

func run(m *testing.M) (code int, err error) {
	dir, err := os.MkdirTemp("", "divvy-node-")
	if err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	// The tests need no divvy-control, which any path says.
	if programs, err = controlplane.Build(context.Background(), dir, "none", os.Stderr); err != nil {
		return 1, err
	}
	library, err := vendorsim.Build(context.Background(), vendorsim.Enflame, dir)
	if err != nil {
		return 1, err
	}
	if libefml, err = os.ReadFile(library); err != nil {
		return 1, err
	}
	return m.Run(), nil
}

// world is a control plane with one node, its kubelet and its divvy-node.
type world struct {
	*testing.T
	client   kubernetes.Interface
	kubelet  *kubelet.Kubelet
	agent    *agent.Agent
	metrics  *prometheus.Registry
	dir      string
	topology vendorsim.Topology
}

// newWorld starts a node with cards that divvy-node shares by the GB.
func newWorld(t *testing.T, cards []vendorsim.Card) *world {
	t.Helper()
	dir, err := os.MkdirTemp("", "node") //nolint:usetesting // a socket's path has 107 characters at most
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	w := &world{T: t, dir: dir, metrics: prometheus.NewRegistry()}
	for name, content := range map[string][]byte{"key": []byte(grantKey), vendorsim.LibraryName(vendorsim.Enflame): libefml} {
		w.must(os.WriteFile(filepath.Join(dir, name), content, 0o600))
	}
	w.setCards(cards...)
	plane, err := controlplane.Start(t.Context(), programs.BinDir, t.TempDir())
	w.must(err)
	t.Cleanup(func() {
		if err := plane.Stop(); err != nil {
			t.Error(err)
		}
	})
	w.client, err = plane.Client()
	w.must(err)
	_, err = w.client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}},
		metav1.CreateOptions{})
	w.must(err)
	_, err = w.client.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}},
		metav1.CreateOptions{})
	w.must(err)
	log := textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(io.Discard)))
	w.kubelet, err = kubelet.New(kubelet.Options{Log: log, Dir: dir, Node: nodeName, Server: server{w}})
	w.must(err)
	w.must(w.kubelet.Start())
	t.Cleanup(func() {
		if err := w.kubelet.Stop(); err != nil {
			t.Error(err)
		}
	})
	w.startAgent(log)
	w.eventually("divvy-node is ready", func(context.Context) error { return w.agent.Ready() })
	w.eventually("kubelet has the units", func(context.Context) error {
		if _, got := w.kubelet.Capacity(corev1.ResourceName(gcuMemory)); got == 0 {
			return errors.New("it has none")
		}
		return nil
	})
	return w
}

func (w *world) startAgent(log klog.Logger) {
	w.Helper()
	cfg := config.Default()
	cfg.KubeletDir, cfg.StateDir, cfg.CDIDir = w.dir, filepath.Join(w.dir, "state"), filepath.Join(w.dir, "cdi")
	cfg.GrantKeyFile = filepath.Join(w.dir, "key")
	cfg.HealthInterval = config.Duration(200 * time.Millisecond)
	cfg.Resources[0].MemoryUnit = "1"
	vendor, err := vendors.New("enflame", backend.Options{DriverRoot: w.dir,
		LibraryPath: filepath.Join(w.dir, vendorsim.LibraryName(vendorsim.Enflame))})
	w.must(err)
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), log))
	w.agent, err = agent.New(ctx, agent.Options{
		Config: cfg, Node: nodeName, Client: w.client, Keys: kube.NewKeyring(cfg.GrantKeyFile),
		Backends: map[string]backend.Backend{"enflame": vendor}, Registry: w.metrics,
	})
	w.must(err)
	var running sync.WaitGroup
	running.Go(func() {
		if err := w.agent.Run(ctx); err != nil {
			w.Errorf("divvy-node ended: %v", err)
		}
	})
	w.Cleanup(func() {
		cancel()
		running.Wait()
		if err := vendor.Close(); err != nil {
			w.Error(err)
		}
	})
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

func (w *world) eventually(what string, done func(context.Context) error) {
	w.Helper()
	w.must(poll.Until(w.Context(), patience, what, done))
}

// setCards changes the hardware.
func (w *world) setCards(cards ...vendorsim.Card) {
	w.Helper()
	w.topology.Cards = slices.Clone(cards)
	w.must(w.topology.Write(filepath.Join(w.dir, vendorsim.TopologyName)))
}

// pod makes a pod that is bound to the node, and has kubelet admit it.
func (w *world) pod(pod *corev1.Pod, units int64) *corev1.Pod {
	w.Helper()
	pod, err := w.create(pod, units)
	w.must(err)
	w.must(w.kubelet.Add(pod))
	return pod
}

// create makes a pod at the API server.
func (w *world) create(pod *corev1.Pod, units int64) (*corev1.Pod, error) {
	pod = pod.DeepCopy()
	pod.Namespace = namespace
	list := corev1.ResourceList{corev1.ResourceName(gcuMemory): *apiresource.NewQuantity(units, apiresource.DecimalSI)}
	pod.Spec.NodeName = nodeName
	if len(pod.Spec.Containers) == 0 {
		pod.Spec.Containers = []corev1.Container{{}}
	}
	c := &pod.Spec.Containers[0]
	c.Name, c.Image = "app", "none"
	c.Resources = corev1.ResourceRequirements{Limits: list, Requests: list}
	return w.client.CoreV1().Pods(namespace).Create(w.Context(), pod, metav1.CreateOptions{})
}

// get returns a pod as it is now.
func (w *world) get(ctx context.Context, name string) (*corev1.Pod, error) {
	return w.client.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
}

// inventory is what the node's object shows.
func (w *world) inventory(ctx context.Context) (accel.Inventory, error) {
	node, err := w.client.CoreV1().Nodes().Get(ctx, nodeName, metav1.GetOptions{})
	if err != nil {
		return accel.Inventory{}, err
	}
	all, err := wire.DecodeInventory(node.Annotations[wire.InventoryAnnotation])
	if err != nil || len(all) != 1 {
		return accel.Inventory{}, fmt.Errorf("%d resources: %w", len(all), err)
	}
	return all[0], nil
}

// server is the API server as kubelet uses it.
type server struct{ *world }

// Pods implements kubelet.Server.
func (s server) Pods() []*corev1.Pod {
	list, err := s.client.CoreV1().Pods(namespace).List(context.Background(),
		metav1.ListOptions{FieldSelector: "spec.nodeName=" + nodeName})
	if err != nil {
		s.Error(err)
		return nil
	}
	var out []*corev1.Pod
	for i := range list.Items {
		out = append(out, &list.Items[i])
	}
	return out
}

// Update implements kubelet.Server: kubelet changes nothing but the status.
func (s server) Update(uid types.UID, change func(*corev1.Pod)) {
	for _, pod := range s.Pods() {
		if pod.UID != uid {
			continue
		}
		err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
			now, err := s.get(context.Background(), pod.Name)
			if err != nil {
				return err
			}
			change(now)
			_, err = s.client.CoreV1().Pods(namespace).UpdateStatus(context.Background(), now, metav1.UpdateOptions{})
			return err
		})
		if err != nil && !apierrors.IsNotFound(err) {
			s.Error(err)
		}
	}
}

// Remove implements kubelet.Server.
func (s server) Remove(uid types.UID) {
	for _, pod := range s.Pods() {
		if pod.UID != uid {
			continue
		}
		err := s.client.CoreV1().Pods(namespace).Delete(context.Background(), pod.Name,
			metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))})
		if err != nil && !apierrors.IsNotFound(err) {
			s.Error(err)
		}
	}
}
