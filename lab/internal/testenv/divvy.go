package testenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/product"
)

// The parts of Divvy, as their pods are labelled.
const (
	NodeDaemon = "divvy-node"
	Extender   = "divvy-extender"
	Schedconf  = "divvy-schedconf"
	// Scheduler is the extender with a scheduler of its own (scheduler.mode
	// dedicated), in whose place there is no Extender.
	Scheduler = "divvy-scheduler"
)

// ExtenderURL is where the extender answers on the lab's node.
const ExtenderURL = "http://127.0.0.1:32766"

// restartTimeout is how long a part may take to be back. Kubelet waits longer
// and longer before it starts a container that keeps ending, 40 s the fourth
// time.
const restartTimeout = 2 * time.Minute

// Divvy is the release in the lab and its programs.
type Divvy struct {
	client kubernetes.Interface
	cli    *CLI
	node   *Node
	values string // of the release, as SetUp installed it
}

// Pods returns the pods of a part that are not being deleted.
func (d *Divvy) Pods(ctx context.Context, part string) ([]corev1.Pod, error) {
	return livePods(ctx, d.client, product.Namespace, "app.kubernetes.io/name="+part)
}

// livePods returns the pods of a selector that have not ended and are not being deleted.
func livePods(ctx context.Context, client kubernetes.Interface, namespace, selector string) ([]corev1.Pod, error) {
	list, err := client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: selector})
	if err != nil {
		return nil, fmt.Errorf("list the pods with %s: %w", selector, err)
	}
	return slices.DeleteFunc(list.Items, func(pod corev1.Pod) bool { return pod.DeletionTimestamp != nil || Ended(&pod) }), nil
}

// Pod returns the one pod of a part.
func (d *Divvy) Pod(ctx context.Context, part string) (*corev1.Pod, error) {
	pods, err := d.Pods(ctx, part)
	if err != nil {
		return nil, err
	}
	if len(pods) != 1 {
		return nil, fmt.Errorf("%s has %d pods", part, len(pods))
	}
	return &pods[0], nil
}

// Wait waits until the newest settings of all parts are at work.
func (d *Divvy) Wait(ctx context.Context, timeout time.Duration) error {
	return poll.Until(ctx, timeout, "Divvy to be ready", d.Ready)
}

// Ready returns nil when the newest settings of all parts are at work.
// It asks the programs themselves: kubelet's word on them is some seconds old.
func (d *Divvy) Ready(ctx context.Context) error {
	apps := d.client.AppsV1()
	daemons, err := apps.DaemonSets(product.Namespace).Get(ctx, NodeDaemon, metav1.GetOptions{})
	if err != nil {
		return err
	}
	node, err := d.node.Get(ctx)
	if err != nil {
		return err
	}
	if err := product.Selects(daemons, node); err != nil {
		return err
	}
	if d := daemons.Status; d.ObservedGeneration < daemons.Generation || d.UpdatedNumberScheduled < d.DesiredNumberScheduled ||
		d.DesiredNumberScheduled == 0 {
		return fmt.Errorf("%s: %d of %d pods have the newest settings", NodeDaemon, d.UpdatedNumberScheduled, d.DesiredNumberScheduled)
	}
	deployment, err := d.extender(ctx)
	if err != nil {
		return err
	}
	if d := deployment.Status; d.ObservedGeneration < deployment.Generation || d.UpdatedReplicas < 1 {
		return fmt.Errorf("%s: no pod has the newest settings", deployment.Name)
	}
	return errors.Join(d.schedulerWired(ctx), d.Answers(ctx))
}

// extender returns the Deployment that the extender is in.
func (d *Divvy) extender(ctx context.Context) (*appsv1.Deployment, error) {
	deployments := d.client.AppsV1().Deployments(product.Namespace)
	found, err := deployments.Get(ctx, Extender, metav1.GetOptions{})
	if !apierrors.IsNotFound(err) {
		return found, err
	}
	return deployments.Get(ctx, Scheduler, metav1.GetOptions{})
}

// URL returns where the extender reports: a dedicated scheduler's does so on the network of pods.
func (d *Divvy) URL(ctx context.Context) (string, error) {
	deployment, err := d.extender(ctx)
	if err != nil || deployment.Name == Extender {
		return ExtenderURL, err
	}
	pods, err := d.Pods(ctx, Scheduler)
	if err != nil {
		return "", err
	}
	for i := range pods {
		if pod := &pods[i]; pod.Status.PodIP != "" && allReady(pod) {
			return "http://" + pod.Status.PodIP + ":32766", nil
		}
	}
	return "", fmt.Errorf("of %d pods of %s none is ready", len(pods), Scheduler)
}

// schedconfURL is where what wires kube-scheduler answers on the lab's node.
const schedconfURL = "http://127.0.0.1:9402"

// schedulerWired returns nil when kube-scheduler was wired by the newest settings,
// or when that is not the chart's to do.
func (d *Divvy) schedulerWired(ctx context.Context) error {
	daemons, err := d.client.AppsV1().DaemonSets(product.Namespace).Get(ctx, Schedconf, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if d := daemons.Status; d.ObservedGeneration < daemons.Generation || d.UpdatedNumberScheduled < d.DesiredNumberScheduled {
		return fmt.Errorf("%s: %d of %d pods have the newest settings", Schedconf, d.UpdatedNumberScheduled, d.DesiredNumberScheduled)
	}
	if _, err := Fetch(ctx, schedconfURL+"/readyz"); err != nil {
		return fmt.Errorf("%s: %w", Schedconf, err)
	}
	return nil
}

// Answers returns nil when both programs say that they are ready.
func (d *Divvy) Answers(ctx context.Context) error {
	pod, err := d.Pod(ctx, NodeDaemon)
	if err != nil {
		return err
	}
	if pod.Status.PodIP == "" {
		return errors.New(Describe(pod))
	}
	if _, err := Fetch(ctx, "http://"+pod.Status.PodIP+":9400/readyz"); err != nil {
		return fmt.Errorf("%s: %w", NodeDaemon, err)
	}
	deployment, err := d.extender(ctx)
	if err != nil {
		return err
	}
	if deployment.Name == Extender {
		if _, err := Fetch(ctx, ExtenderURL+"/readyz"); err != nil {
			return fmt.Errorf("%s: %w", Extender, err)
		}
		return nil
	}
	// On the network of pods, where each of them answers.
	if d := deployment.Status; d.ReadyReplicas != *deployment.Spec.Replicas || d.UpdatedReplicas != *deployment.Spec.Replicas {
		return fmt.Errorf("%s: %d pods of %d are ready", Scheduler, d.ReadyReplicas, *deployment.Spec.Replicas)
	}
	return nil
}

// DeletePods deletes the pods of a part and waits until they are gone;
// their controller makes others.
func (d *Divvy) DeletePods(ctx context.Context, part string) error {
	pods, err := d.Pods(ctx, part)
	if err != nil {
		return err
	}
	api := d.client.CoreV1().Pods(product.Namespace)
	for _, pod := range pods {
		if err := api.Delete(ctx, pod.Name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("delete pod %s: %w", pod.Name, err)
		}
	}
	for _, pod := range pods {
		if err := waitGone(ctx, api, restartTimeout, pod.Name); err != nil {
			return err
		}
	}
	return nil
}

// Roll replaces the pod of the daemon as an upgrade does, and waits until the
// new one is alone.
func (d *Divvy) Roll(ctx context.Context, timeout time.Duration) error {
	patch := fmt.Appendf(nil, `{"spec":{"template":{"metadata":{"annotations":{"divvy-lab/rolled":%q}}}}}`,
		time.Now().Format(time.RFC3339Nano))
	_, err := d.client.AppsV1().DaemonSets(product.Namespace).Patch(ctx, NodeDaemon, types.StrategicMergePatchType, patch,
		metav1.PatchOptions{})
	if err != nil {
		return fmt.Errorf("roll %s: %w", NodeDaemon, err)
	}
	return d.Wait(ctx, timeout)
}

// AddArgument adds an argument to those of the daemon's program, which the chart does not
// set, and waits until it is at work. The next change of the release takes it back.
func (d *Divvy) AddArgument(ctx context.Context, argument string) error {
	patch := fmt.Appendf(nil, `[{"op":"add","path":"/spec/template/spec/containers/0/args/-","value":%q}]`, argument)
	_, err := d.client.AppsV1().DaemonSets(product.Namespace).Patch(ctx, NodeDaemon, types.JSONPatchType, patch, metav1.PatchOptions{})
	if err != nil {
		return fmt.Errorf("add %s to %s: %w", argument, NodeDaemon, err)
	}
	return d.Wait(ctx, restartTimeout)
}

// Kill ends the program of a part with SIGKILL; kubelet starts it again.
func (d *Divvy) Kill(ctx context.Context, part string) error {
	pod, err := d.Pod(ctx, part)
	if err != nil {
		return err
	}
	pid, err := kill(pod)
	if err != nil {
		return err
	}
	// Not ready until kubelet has started another.
	return poll.Until(ctx, restartTimeout, part+" to have ended", func(context.Context) error {
		if syscall.Kill(pid, 0) == nil {
			return fmt.Errorf("process %d still runs", pid)
		}
		return nil
	})
}

// kill ends the program of a pod with SIGKILL and returns its process.
func kill(pod *corev1.Pod) (pid int, err error) {
	if len(pod.Status.ContainerStatuses) == 0 {
		return 0, errors.New(Describe(pod))
	}
	if pid, err = ContainerPID(pod.Status.ContainerStatuses[0].ContainerID); err == nil {
		err = syscall.Kill(pid, syscall.SIGKILL)
	}
	if err != nil {
		return 0, fmt.Errorf("kill the program of pod %s: %w", pod.Name, err)
	}
	return pid, nil
}

// ContainerPID returns the first process of a running container. The id is
// that of a pod's status, containerd://....
func ContainerPID(id string) (int, error) {
	_, id, _ = strings.Cut(id, "://")
	if id == "" {
		return 0, errors.New("the container was not started")
	}
	data, err := os.ReadFile(filepath.Join(layout.ContainerdRunDir, "io.containerd.runtime.v2.task", "k8s.io", id, "init.pid"))
	if err != nil {
		return 0, fmt.Errorf("the container does not run: %w", err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil {
		return 0, fmt.Errorf("process of the container: %w", err)
	}
	return pid, nil
}

// DaemonLife tells one life of the daemon from another: its pod and how often
// its container was started again.
func (d *Divvy) DaemonLife(ctx context.Context) (string, error) {
	pod, err := d.Pod(ctx, NodeDaemon)
	if err != nil {
		return "", err
	}
	if len(pod.Status.ContainerStatuses) == 0 {
		return "", errors.New(Describe(pod))
	}
	return fmt.Sprintf("pod %s, started again %d times", pod.UID, pod.Status.ContainerStatuses[0].RestartCount), nil
}
