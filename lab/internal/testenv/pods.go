package testenv

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	resourcehelper "k8s.io/component-helpers/resource"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/lab/internal/cluster"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/product"
)

// untilTerminated waits until it is told to end. Process 1 of a container ignores SIGTERM
// without a trap: kubelet would kill it after 2 s, which is its shortest grace period.
const untilTerminated = "trap 'exit 0' TERM; sleep infinity & wait"

// Container returns a container that asks for units, 0 for none, and waits until it is
// told to end, or runs the command.
func Container(name string, units int64, command ...string) corev1.Container {
	if len(command) == 0 {
		command = []string{"sh", "-c", untilTerminated}
	}
	c := corev1.Container{
		Name: name, Image: cluster.ShellImage, ImagePullPolicy: corev1.PullIfNotPresent, Command: command,
	}
	if units > 0 {
		amount := corev1.ResourceList{product.Resource: *resource.NewQuantity(units, resource.DecimalSI)}
		// The API server would copy one to the other.
		c.Resources = corev1.ResourceRequirements{Limits: amount, Requests: amount}
	}
	return c
}

// Sidecar returns an init container that keeps running.
func Sidecar(name string, units int64) corev1.Container {
	c := Container(name, units)
	c.RestartPolicy = ptr.To(corev1.ContainerRestartPolicyAlways)
	return c
}

// Pods are those of a namespace.
type Pods struct {
	Namespace string
	API       typedcorev1.PodInterface

	client kubernetes.Interface
	cli    *CLI
}

func newPods(client kubernetes.Interface, cli *CLI, namespace string) Pods {
	return Pods{Namespace: namespace, API: client.CoreV1().Pods(namespace), client: client, cli: cli}
}

// New returns a pod that ends at once when it is deleted, and is not started
// again by kubelet.
func (p *Pods) New(name string, containers ...corev1.Container) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: p.Namespace},
		Spec: corev1.PodSpec{
			Containers:                    containers,
			RestartPolicy:                 corev1.RestartPolicyNever,
			TerminationGracePeriodSeconds: ptr.To[int64](0),
			AutomountServiceAccountToken:  ptr.To(false),
			EnableServiceLinks:            ptr.To(false),
		},
	}
}

// Ended reports whether the pod's containers have ended for good.
func Ended(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// Units returns what the pod counts for: the most that its containers hold at
// one time, by Kubernetes' own formula.
func Units(pod *corev1.Pod) int64 {
	requests := resourcehelper.PodRequests(pod, resourcehelper.PodResourcesOptions{})
	quantity := requests[product.Resource]
	return quantity.Value()
}

// Describe says in a line what a pod is doing, for messages of failure.
func Describe(pod *corev1.Pod) string {
	parts := []string{fmt.Sprintf("pod %s is %s", pod.Name, pod.Status.Phase)}
	if pod.Status.Reason != "" || pod.Status.Message != "" {
		parts = append(parts, strings.TrimSpace(pod.Status.Reason+" "+pod.Status.Message))
	}
	for _, condition := range pod.Status.Conditions {
		if condition.Status != corev1.ConditionTrue && condition.Message != "" {
			parts = append(parts, string(condition.Type)+": "+condition.Message)
		}
	}
	for _, status := range append(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses...) {
		if waiting := status.State.Waiting; waiting != nil && waiting.Message != "" {
			parts = append(parts, status.Name+": "+waiting.Message)
		}
		if ended := status.State.Terminated; ended != nil && ended.ExitCode != 0 {
			parts = append(parts, strings.TrimSpace(fmt.Sprintf("%s: ended with %d, %s %s", status.Name, ended.ExitCode, ended.Reason,
				ended.Message)))
		}
	}
	return strings.Join(parts, "; ")
}

// Create makes pods one after the other and returns them as the API server
// has them.
func (p *Pods) Create(ctx context.Context, pods ...*corev1.Pod) ([]*corev1.Pod, error) {
	made := make([]*corev1.Pod, 0, len(pods))
	for _, pod := range pods {
		created, err := p.client.CoreV1().Pods(pod.Namespace).Create(ctx, pod, metav1.CreateOptions{})
		if err != nil {
			return made, fmt.Errorf("create pod %s: %w", pod.Name, err)
		}
		made = append(made, created)
	}
	return made, nil
}

// WaitPhase waits until the pods have the phase and, for Running, all their
// containers are ready. A pod that has ended otherwise is an error at once, with the
// last of what it printed.
func (p *Pods) WaitPhase(ctx context.Context, timeout time.Duration, phase corev1.PodPhase, names ...string) error {
	return poll.Until(ctx, timeout, fmt.Sprintf("pods %s to be %s", strings.Join(names, ", "), phase), func(ctx context.Context) error {
		pods, err := p.client.CoreV1().Pods(p.Namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		found := map[string]*corev1.Pod{}
		for i := range pods.Items {
			found[pods.Items[i].Name] = &pods.Items[i]
		}
		for _, name := range names {
			pod, ok := found[name]
			switch {
			case !ok:
				return fmt.Errorf("there is no pod %s", name)
			case pod.Status.Phase != phase && Ended(pod):
				return fmt.Errorf("%w: %s; it printed %q", poll.ErrHopeless, Describe(pod), p.lastPrinted(ctx, name))
			case pod.Status.Phase != phase, phase == corev1.PodRunning && !allReady(pod):
				return errors.New(Describe(pod))
			}
		}
		return nil
	})
}

// lastPrinted are the last lines of each container of a pod, or why they cannot be had.
func (p *Pods) lastPrinted(ctx context.Context, pod string) string {
	text, err := p.cli.Kubectl(ctx, "logs", pod, "--namespace", p.Namespace, "--all-containers", "--tail", "5")
	if err != nil {
		return err.Error()
	}
	return text
}

func allReady(pod *corev1.Pod) bool {
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodReady {
			return condition.Status == corev1.ConditionTrue
		}
	}
	return false
}

// Delete deletes pods and waits until they are gone.
func (p *Pods) Delete(ctx context.Context, names ...string) error {
	for _, name := range names {
		err := p.client.CoreV1().Pods(p.Namespace).Delete(ctx, name, metav1.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("delete pod %s: %w", name, err)
		}
	}
	if err := p.WaitGone(ctx, names...); err != nil {
		return err
	}
	return p.waitFreed(ctx, names...)
}

// waitFreed waits until the extender, where one answers, counts nothing for pods of
// these names any more, or for any without names. The pods of the lab have no grace
// period, so the API server forgets them before their containers have ended.
func (p *Pods) waitFreed(ctx context.Context, names ...string) error {
	return poll.Until(ctx, freedTimeout, "the extender to give back what deleted pods held", func(ctx context.Context) error {
		type occupants []struct{ Name, Namespace string }
		var report struct {
			Nodes []struct {
				Devices      []struct{ Pods occupants }
				UnplacedPods occupants
			}
		}
		body, err := Fetch(ctx, ExtenderURL+"/gcushare-scheduler/inspect?details=true")
		if err != nil || json.Unmarshal(body, &report) != nil {
			return nil //nolint:nilerr // there is none to ask, or it is not ready to tell
		}
		for _, node := range report.Nodes {
			all := node.UnplacedPods
			for _, device := range node.Devices {
				all = append(all, device.Pods...)
			}
			for _, pod := range all {
				if pod.Namespace == p.Namespace && (len(names) == 0 || slices.Contains(names, pod.Name)) {
					return fmt.Errorf("pod %s is still counted", pod.Name)
				}
			}
		}
		return nil
	})
}

// PodTimeout is how long a pod may take to run, or to end. On busy processors it takes a
// minute; after five, kube-scheduler retries even a pod that no event moved to its queue.
const PodTimeout = 3 * time.Minute

// freedTimeout is how long what a deleted pod held may count.
const freedTimeout = 2 * time.Minute

// WaitGone waits until there are no pods of these names.
func (p *Pods) WaitGone(ctx context.Context, names ...string) error {
	for _, name := range names {
		if err := waitGone(ctx, p.API, 2*time.Minute, name); err != nil {
			return err
		}
	}
	return nil
}

func waitGone(ctx context.Context, api typedcorev1.PodInterface, timeout time.Duration, name string) error {
	return poll.Until(ctx, timeout, "pod "+name+" to be gone", func(ctx context.Context) error {
		pod, err := api.Get(ctx, name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			return nil
		case err != nil:
			return err
		}
		return errors.New(Describe(pod))
	})
}

// DeleteAll deletes every pod of the namespace and waits until
// they are gone.
func (p *Pods) DeleteAll(ctx context.Context) error {
	pods := p.client.CoreV1().Pods(p.Namespace)
	now := metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}
	err := poll.Until(ctx, 4*time.Minute, "the pods of namespace "+p.Namespace+" to be gone", func(ctx context.Context) error {
		list, err := pods.List(ctx, metav1.ListOptions{})
		if err != nil || len(list.Items) == 0 {
			return err
		}
		for i := range list.Items {
			pod := &list.Items[i]
			if pod.DeletionTimestamp != nil && pod.Spec.NodeName != "" {
				continue
			}
			options := metav1.DeleteOptions{}
			if pod.Spec.NodeName == "" {
				options = now
			}
			if err := pods.Delete(ctx, pod.Name, options); err != nil && !apierrors.IsNotFound(err) {
				return err
			}
		}
		return fmt.Errorf("%d are left, among them %s", len(list.Items), list.Items[0].Name)
	})
	if err != nil {
		return err
	}
	return p.waitFreed(ctx)
}

// WaitEvent waits for an event of a pod whose message contains the text and
// returns the message.
func (p *Pods) WaitEvent(ctx context.Context, timeout time.Duration, pod *corev1.Pod, text string) (string, error) {
	var message string
	err := poll.Until(ctx, timeout, fmt.Sprintf("an event of pod %s that says %q", pod.Name, text), func(ctx context.Context) error {
		events, err := p.client.CoreV1().Events(pod.Namespace).List(ctx, metav1.ListOptions{
			FieldSelector: "involvedObject.uid=" + string(pod.UID),
		})
		if err != nil {
			return err
		}
		var seen []string
		for _, event := range events.Items {
			if strings.Contains(event.Message, text) {
				message = event.Message
				return nil
			}
			seen = append(seen, fmt.Sprintf("%s: %s", event.Reason, event.Message))
		}
		return fmt.Errorf("seen so far: %q", seen)
	})
	return message, err
}

// EnsureNamespace makes the namespace and waits until pods can be made in it.
func (p *Pods) EnsureNamespace(ctx context.Context) error {
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: p.Namespace}}
	_, err := p.client.CoreV1().Namespaces().Create(ctx, namespace, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("make namespace %s: %w", p.Namespace, err)
	}
	return poll.Until(ctx, time.Minute, "service account of namespace "+p.Namespace, func(ctx context.Context) error {
		_, err := p.client.CoreV1().ServiceAccounts(p.Namespace).Get(ctx, "default", metav1.GetOptions{})
		return err
	})
}

// EmptyNamespace deletes all pods of the namespace, which an interrupted run
// may have left, what would make others, and quotas.
func (p *Pods) EmptyNamespace(ctx context.Context) error {
	background := metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationBackground)}
	all := metav1.ListOptions{}
	err := errors.Join(
		p.client.AppsV1().StatefulSets(p.Namespace).DeleteCollection(ctx, background, all),
		p.client.AppsV1().Deployments(p.Namespace).DeleteCollection(ctx, background, all),
		p.client.AppsV1().ReplicaSets(p.Namespace).DeleteCollection(ctx, background, all),
		p.client.BatchV1().Jobs(p.Namespace).DeleteCollection(ctx, background, all),
		p.client.CoreV1().ResourceQuotas(p.Namespace).DeleteCollection(ctx, metav1.DeleteOptions{}, all))
	if err != nil {
		return fmt.Errorf("empty namespace %s: %w", p.Namespace, err)
	}
	return p.DeleteAll(ctx)
}

// RemoveNamespace empties the namespace and deletes it; what else is in it goes a
// little later.
func (p *Pods) RemoveNamespace(ctx context.Context) error {
	if err := p.EmptyNamespace(ctx); err != nil {
		return err
	}
	err := p.client.CoreV1().Namespaces().Delete(ctx, p.Namespace, metav1.DeleteOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("remove namespace %s: %w", p.Namespace, err)
	}
	return nil
}

// AllowPool labels the namespace so that its pods may use the pool, or
// takes the label off.
func (p *Pods) AllowPool(ctx context.Context, allowed bool) error {
	label := product.PoolLabel + "-"
	if allowed {
		label = product.PoolLabel + "=allowed"
	}
	_, err := p.cli.Kubectl(ctx, "label", "--overwrite", "namespace", p.Namespace, label)
	return err
}

// TokenSecrets returns the secrets of the pool's token in the namespace.
func (p *Pods) TokenSecrets(ctx context.Context) (map[string]*corev1.Secret, error) {
	found := map[string]*corev1.Secret{}
	for _, name := range product.TokenSecrets() {
		secret, err := p.client.CoreV1().Secrets(p.Namespace).Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		found[name] = secret
	}
	return found, nil
}

// Logs returns what a container of a pod has printed.
func (p *Pods) Logs(ctx context.Context, pod, container string) (string, error) {
	return p.cli.Kubectl(ctx, "logs", pod, "--namespace", p.Namespace, "--container", container)
}

// WaitPrinted waits until a container of a pod has printed these lines, and no others.
func (p *Pods) WaitPrinted(ctx context.Context, timeout time.Duration, pod, container string, lines ...string) error {
	return poll.Until(ctx, timeout, "output of pod "+pod, func(ctx context.Context) error {
		text, err := p.Logs(ctx, pod, container)
		if err == nil && text != strings.Join(lines, "\n") {
			err = fmt.Errorf("it is %q, want %q", text, lines)
		}
		return err
	})
}

// PID returns the first process of a pod's first container.
func (p *Pods) PID(ctx context.Context, name string) (int, error) {
	pod, err := p.API.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return 0, err
	}
	if len(pod.Status.ContainerStatuses) == 0 {
		return 0, errors.New(Describe(pod))
	}
	return ContainerPID(pod.Status.ContainerStatuses[0].ContainerID)
}

// Exec runs a command in a container of a pod and returns its output.
func (p *Pods) Exec(ctx context.Context, pod, container string, command ...string) (string, error) {
	args := []string{"exec", "--namespace", p.Namespace, pod, "--container", container, "--"}
	return p.cli.Kubectl(ctx, append(args, command...)...)
}

// Example reads the pod of an example and puts it into the namespace.
// It ends at once when it is deleted.
func (p *Pods) Example(name string) (*corev1.Pod, error) {
	data, err := os.ReadFile(p.cli.Example(name))
	if err != nil {
		return nil, fmt.Errorf("read an example: %w", err)
	}
	var pod corev1.Pod
	if err := yaml.UnmarshalStrict(data, &pod); err != nil {
		return nil, fmt.Errorf("example %s: %w", name, err)
	}
	pod.Namespace = p.Namespace
	pod.Spec.TerminationGracePeriodSeconds = ptr.To[int64](0)
	pod.Spec.AutomountServiceAccountToken = ptr.To(false)
	return &pod, nil
}
