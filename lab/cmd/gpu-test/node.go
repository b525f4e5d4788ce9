package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/node/agent"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/lab/internal/kubelet"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
)

const (
	nodeName  = "gpu-test"
	namespace = "default"
	// patience is how long anything may take.
	patience = 30 * time.Second
)

// node is a node of which the API server is played, and kubelet and the daemon
// are real.
type node struct {
	dir     string
	log     klog.Logger
	client  *fake.Clientset
	kubelet *kubelet.Kubelet
	backend backend.Backend

	stop func() error // the daemon
	pods int
}

// newNode returns a node whose kubelet runs, in a folder of its own.
func newNode(b backend.Backend, log io.Writer) (*node, error) {
	dir, err := os.MkdirTemp("", "gpu") // short: sockets lie in it
	if err != nil {
		return nil, fmt.Errorf("make a folder: %w", err)
	}
	logger := textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(log)))
	klog.SetLogger(logger)
	n := &node{
		dir: dir, log: logger, backend: b, stop: func() error { return nil },
		client: fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}}),
	}
	key := []byte("0123456789abcdef0123456789abcdef")
	if err := os.WriteFile(filepath.Join(dir, "key"), key, 0o600); err != nil {
		return nil, errors.Join(err, n.remove())
	}
	n.kubelet, err = kubelet.New(kubelet.Options{Log: klog.LoggerWithName(logger, "kubelet"), Dir: dir, Node: nodeName,
		Server: server{n.client}})
	if err == nil {
		err = n.kubelet.Start()
	}
	if err != nil {
		return nil, errors.Join(err, n.remove())
	}
	return n, nil
}

func (n *node) remove() error { return os.RemoveAll(n.dir) }

// close ends everything.
func (n *node) close() error { return errors.Join(n.stop(), n.kubelet.Stop(), n.remove()) }

// offer starts the daemon with these resources, or starts it again.
func (n *node) offer(resources ...config.Resource) error { return n.offerBy(nil, resources...) }

// offerBy is offer for containers that reach their devices in these ways.
func (n *node) offerBy(ways []config.Injection, resources ...config.Resource) error {
	if err := n.stop(); err != nil {
		return err
	}
	cfg := config.Default()
	cfg.KubeletDir, cfg.StateDir, cfg.CDIDir = n.dir, filepath.Join(n.dir, "state"), filepath.Join(n.dir, "cdi")
	cfg.GrantKeyFile = filepath.Join(n.dir, "key")
	cfg.HealthInterval = config.Duration(time.Second)
	cfg.Resources = resources
	if len(ways) > 0 {
		cfg = cfg.WithInjection(vendor, ways)
	}
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), klog.LoggerWithName(n.log, "divvy-node")))
	agent, err := agent.New(ctx, agent.Options{
		Config: cfg, Node: nodeName, Client: n.client, Keys: kube.NewKeyring(cfg.GrantKeyFile),
		Backends: map[string]backend.Backend{vendor: n.backend}, Registry: prometheus.NewRegistry(),
	})
	if err != nil {
		cancel()
		return fmt.Errorf("make the daemon: %w", err)
	}
	var running sync.WaitGroup
	var ended error
	running.Go(func() { ended = agent.Run(ctx) })
	n.stop = func() error {
		n.stop = func() error { return nil }
		cancel()
		running.Wait()
		return ended
	}
	return poll.Until(ctx, patience, "the daemon to be ready", func(context.Context) error { return agent.Ready() })
}

// capacity waits until kubelet shows so much of a resource, and returns what it
// shows: all of it, and what new pods may have.
func (n *node) capacity(ctx context.Context, name string, all, free int64) (gotAll, gotFree int64) {
	_ = poll.Until(ctx, patience, "", func(context.Context) error { // the caller compares
		if gotAll, gotFree = n.kubelet.Capacity(corev1.ResourceName(name)); gotAll != all || gotFree != free {
			return errors.New("not yet")
		}
		return nil
	})
	return gotAll, gotFree
}

// run makes a pod that asks for so much, and starts it.
func (n *node) run(ctx context.Context, name string, amount int64) (*corev1.Pod, error) {
	n.pods++
	list := corev1.ResourceList{corev1.ResourceName(name): *resource.NewQuantity(amount, resource.DecimalSI)}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: fmt.Sprint("pod-", n.pods), UID: types.UID(fmt.Sprint("uid-", n.pods)),
			CreationTimestamp: metav1.NewTime(time.Now().Truncate(time.Second)),
		},
		Spec: corev1.PodSpec{NodeName: nodeName, Containers: []corev1.Container{{
			Name: "app", Resources: corev1.ResourceRequirements{Limits: list, Requests: list},
		}}},
		Status: corev1.PodStatus{Phase: corev1.PodPending},
	}
	pod, err := n.client.CoreV1().Pods(namespace).Create(ctx, pod, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("make a pod: %w", err)
	}
	if err := n.kubelet.Add(pod); err != nil {
		return pod, err
	}
	return pod, n.kubelet.Run(pod)
}

// server is the API server as kubelet uses it.
type server struct{ client *fake.Clientset }

func (s server) Pods() []*corev1.Pod {
	list, err := s.client.CoreV1().Pods(namespace).List(context.Background(), metav1.ListOptions{})
	if err != nil {
		return nil
	}
	var pods []*corev1.Pod
	for i := range list.Items {
		pods = append(pods, &list.Items[i])
	}
	slices.SortFunc(pods, func(a, b *corev1.Pod) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.UID, b.UID))
	})
	return pods
}

func (s server) Update(uid types.UID, change func(*corev1.Pod)) {
	for _, pod := range s.Pods() {
		if pod.UID == uid {
			change(pod)
			_, _ = s.client.CoreV1().Pods(namespace).UpdateStatus(context.Background(), pod, metav1.UpdateOptions{})
		}
	}
}

func (s server) Remove(uid types.UID) {
	for _, pod := range s.Pods() {
		if pod.UID == uid {
			_ = s.client.CoreV1().Pods(namespace).Delete(context.Background(), pod.Name, metav1.DeleteOptions{})
		}
	}
}
