package admission

import (
	"fmt"
	"iter"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/platform/admissionreview"
	"github.com/divvy-gpu/divvy/internal/pool"
)

// Settings are what an administrator sets for all pods.
type Settings struct {
	// TotalMemoryMB is the memory of one GPU of the pool in MB (10^6 bytes); 0
	// when unknown, and then requests by memory are refused.
	TotalMemoryMB int64
	// ClientImage holds the clients whose catalog entry names no image.
	ClientImage string
	// ClientPullPolicy is the pull policy of that image.
	ClientPullPolicy corev1.PullPolicy
	// IgnoredNamespaces are left alone: kube-system, kube-public and Divvy's own.
	IgnoredNamespaces []string
}

// Denial is the error for a pod that is refused.
type Denial struct { //nolint:errname // what it is, to those who refuse
	// Problems are sentences, each naming container, key, value and what would be
	// accepted.
	Problems []string
	// Forbidden says that somebody must allow something, rather than that the pod
	// is wrong.
	Forbidden bool
}

const maxProblems = 10

// Error joins the problems, the first ten when there are more.
func (d *Denial) Error() string {
	if n := len(d.Problems); n > maxProblems {
		return fmt.Sprintf("%s; and %d more", strings.Join(d.Problems[:maxProblems], "; "), n-maxProblems)
	}
	return strings.Join(d.Problems, "; ")
}

// problems turns an error, joined or not, into one sentence for each part.
func problems(prefix string, err error) []string {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		var all []string
		for _, part := range joined.Unwrap() {
			all = append(all, problems(prefix, part)...)
		}
		return all
	}
	return []string{prefix + err.Error()}
}

// containers yields the init containers and containers of a pod in the order
// in which they start, each with the words that name it in a message.
func containers(pod *corev1.Pod) iter.Seq2[string, *corev1.Container] {
	return func(yield func(string, *corev1.Container) bool) {
		for i := range pod.Spec.InitContainers {
			c := &pod.Spec.InitContainers[i]
			if !yield(fmt.Sprintf("init container %q", admissionreview.Short(c.Name)), c) {
				return
			}
		}
		for i := range pod.Spec.Containers {
			c := &pod.Spec.Containers[i]
			if !yield(fmt.Sprintf("container %q", admissionreview.Short(c.Name)), c) {
				return
			}
		}
	}
}

func asks(pod *corev1.Pod) bool {
	for _, c := range containers(pod) {
		if pool.Asks(c.Resources) {
			return true
		}
	}
	return false
}

// holds reports whether a container takes units of the pool.
func holds(r corev1.ResourceRequirements) bool {
	request, limit := r.Requests[pool.Resource], r.Limits[pool.Resource]
	return !request.IsZero() || !limit.IsZero()
}

func holdsAny(pod *corev1.Pod) bool {
	for _, c := range containers(pod) {
		if holds(c.Resources) {
			return true
		}
	}
	return false
}

// unsupported tells why a pod cannot use the pool, whatever it asks for; "" when
// it can.
func unsupported(pod *corev1.Pod) string {
	if isWindows(pod) {
		return "the pod is for Windows, for which the pool has no client: run it on Linux"
	}
	if _, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]; mirror {
		return "the pod is static (a file on its node) and bypasses admission: create it through the API server, with a Deployment or a " +
			"DaemonSet"
	}
	return ""
}

func isWindows(pod *corev1.Pod) bool {
	if pod.Spec.OS != nil && pod.Spec.OS.Name == corev1.Windows || pod.Spec.NodeSelector[corev1.LabelOSStable] == string(corev1.Windows) {
		return true
	}
	hostProcess := func(w *corev1.WindowsSecurityContextOptions) bool {
		return w != nil && w.HostProcess != nil && *w.HostProcess
	}
	if s := pod.Spec.SecurityContext; s != nil && hostProcess(s.WindowsOptions) {
		return true
	}
	for _, c := range containers(pod) {
		if s := c.SecurityContext; s != nil && hostProcess(s.WindowsOptions) {
			return true
		}
	}
	return false
}
