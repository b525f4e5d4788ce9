package cluster

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/scheduler"
)

// probeTimeout bounds one question about a component's health.
const probeTimeout = 5 * time.Second

// readyTimeout is how long a component may take to become ready on a slow,
// busy machine.
const readyTimeout = 3 * time.Minute

// insecureClient asks servers on the loopback interface whose certificates they
// signed themselves. Nothing secret is sent, and the answer is only shown.
var insecureClient = &http.Client{
	Timeout: probeTimeout,
	Transport: &http.Transport{
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // see above
		DisableKeepAlives: true,
	},
}

// Healthy asks a component whether it is ready, once.
func (c *Cluster) Healthy(ctx context.Context, component Component) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	switch component {
	case Containerd:
		out, err := exec.CommandContext(ctx, c.Program("ctr"), "--address", layout.ContainerdSocket, "version").CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, strings.TrimSpace(string(out)))
		}
		return nil
	case Etcd:
		return get(ctx, "http://"+etcdMetricsAddress+"/health?serializable=true")
	case APIServer:
		client, err := Client()
		if err != nil {
			return err
		}
		_, err = client.Discovery().RESTClient().Get().AbsPath("/readyz").DoRaw(ctx)
		return err
	case ControllerManager:
		return get(ctx, "https://"+controllerManagerAddress+"/healthz")
	case Kubelet:
		if err := get(ctx, "http://"+kubeletHealthAddress+"/healthz"); err != nil {
			return err
		}
		return kubeletKnowsPods(ctx)
	case Proxy:
		return get(ctx, "http://"+proxyHealthAddress+"/healthz")
	case Scheduler:
		return schedulerHealthy(ctx)
	}
	return fmt.Errorf("unknown component %q", component)
}

// schedulerHealthy reports whether the scheduler of the present manifest runs,
// is ready, and leads: one that was killed leaves a lease behind that its
// successor has to wait for. It asks the scheduler itself, which is ready long
// before kubelet's first probe says so.
func schedulerHealthy(ctx context.Context) error {
	if err := get(ctx, "https://"+schedulerAddress+"/readyz"); err != nil {
		return err
	}
	client, err := Client()
	if err != nil {
		return err
	}
	pod, err := client.CoreV1().Pods(scheduler.Namespace).Get(ctx, mirrorName, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("kubelet has not reported the static pod: %w", err)
	}
	wanted, err := readManifest()
	if err != nil {
		return err
	}
	if !scheduler.SamePod(wanted, pod) {
		return errors.New("kubelet has not loaded the new manifest yet")
	}
	// Kubelet shows the pod when it starts it, and may report its containers 10 s later.
	started := pod.CreationTimestamp.Add(time.Second)
	if len(pod.Status.ContainerStatuses) > 0 {
		status := pod.Status.ContainerStatuses[0]
		if status.State.Running == nil {
			return errors.New("the scheduler's container does not run yet")
		}
		started = status.State.Running.StartedAt.Time
	}
	lease, err := client.CoordinationV1().Leases(scheduler.Namespace).Get(ctx, scheduler.PodName, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("read the scheduler's lease: %w", err)
	}
	holder, renewed := lease.Spec.HolderIdentity, lease.Spec.RenewTime
	if holder == nil || *holder == "" || renewed == nil || !renewed.After(started) {
		return errors.New("the scheduler waits for the lease of the one before it")
	}
	return nil
}

// kubeletKnowsPods reports whether kubelet has heard of every pod that runs on
// the node: one that just started is healthy before it has, and refuses to
// show logs or run commands until then. Without an API server it cannot hear
// of any, so nothing is asked.
func kubeletKnowsPods(ctx context.Context) error {
	client, err := Client()
	if err != nil {
		return err
	}
	running, err := client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{
		FieldSelector: "spec.nodeName=" + layout.NodeName + ",status.phase=Running",
	})
	if err != nil {
		return nil //nolint:nilerr // see above
	}
	data, err := client.CoreV1().RESTClient().Get().Resource("nodes").Name(layout.NodeName).SubResource("proxy").Suffix("pods").DoRaw(ctx)
	if err != nil {
		return fmt.Errorf("ask kubelet for its pods: %w", err)
	}
	var known corev1.PodList
	if err := json.Unmarshal(data, &known); err != nil {
		return fmt.Errorf("ask kubelet for its pods: %w", err)
	}
	names := make(map[string]bool, len(known.Items))
	for _, pod := range known.Items {
		names[pod.Namespace+"/"+pod.Name] = true
	}
	for _, pod := range running.Items {
		if !names[pod.Namespace+"/"+pod.Name] {
			return fmt.Errorf("kubelet has not heard of pod %s/%s yet", pod.Namespace, pod.Name)
		}
	}
	return nil
}

// nodeReady reports whether the node is ready for pods.
func nodeReady(ctx context.Context) error {
	client, err := Client()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	node, err := client.CoreV1().Nodes().Get(ctx, layout.NodeName, metav1.GetOptions{})
	if err != nil {
		return err
	}
	for _, condition := range node.Status.Conditions {
		if condition.Type != corev1.NodeReady {
			continue
		}
		// After a long stop the last word of the old kubelet still stands.
		if condition.Status != corev1.ConditionTrue {
			return fmt.Errorf("node is not ready: %s", condition.Message)
		}
		return nil
	}
	return errors.New("kubelet has not reported on the node yet")
}

func get(ctx context.Context, url string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	response, err := insecureClient.Do(request)
	if err != nil {
		return err
	}
	body, err := io.ReadAll(io.LimitReader(response.Body, 2048))
	if err := errors.Join(err, response.Body.Close()); err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", response.Status, strings.TrimSpace(string(body)))
	}
	return nil
}
