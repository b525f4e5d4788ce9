package host

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/internal/schedconf"
)

// Want says which kube-scheduler is to run.
type Want struct {
	// Hash is the value of schedconf.AnnotationHash on its pod; "" for a pod
	// without it.
	Hash string
	// Name and Namespace of the static pod; kubelet adds the node's name.
	Name, Namespace string
	// Container is the one that runs kube-scheduler.
	Container string
	// Health is the URL that answers 200 when the program is well; "" for none.
	Health string
}

// An UnhealthyError says that kube-scheduler is not well with its manifest.
type UnhealthyError struct {
	// Problem is what was seen last.
	Problem string
	// Crashed is true when the program ended by itself.
	Crashed bool
	// Log is the end of what it said, "" when that is not known.
	Log string
}

func (e *UnhealthyError) Error() string {
	if e.Log == "" {
		return e.Problem
	}
	return e.Problem + "; it said: " + e.Log
}

const schedulerName = "kube-scheduler"

// defaultHealth is where kube-scheduler answers unless its flags say otherwise.
const defaultHealth = "https://127.0.0.1:10259/healthz"

// WantOf returns what a manifest says of the pod that kubelet makes of it.
func WantOf(content []byte) (Want, error) {
	var pod corev1.Pod
	if err := yaml.Unmarshal(content, &pod); err != nil {
		return Want{}, fmt.Errorf("the manifest is no pod: %w", err)
	}
	if pod.Name == "" || len(pod.Spec.Containers) == 0 {
		return Want{}, errors.New("the manifest is a pod without a name or containers")
	}
	w := Want{Hash: pod.Annotations[schedconf.AnnotationHash], Name: pod.Name, Namespace: pod.Namespace}
	if w.Namespace == "" {
		w.Namespace = corev1.NamespaceDefault
	}
	container := &pod.Spec.Containers[0]
	for i := range pod.Spec.Containers {
		if c := &pod.Spec.Containers[i]; c.Name == schedulerName {
			container = c
		}
	}
	w.Container = container.Name
	w.Health = healthURL(container)
	return w, nil
}

// healthURL is the URL of the liveness probe, which kubelet asks on the node's
// own network as this package does.
func healthURL(c *corev1.Container) string {
	for _, arg := range append(append([]string{}, c.Command...), c.Args...) {
		if arg == "--secure-port=0" {
			return ""
		}
	}
	if c.LivenessProbe == nil || c.LivenessProbe.HTTPGet == nil {
		return defaultHealth
	}
	get := c.LivenessProbe.HTTPGet
	port := get.Port.IntValue()
	for _, p := range c.Ports {
		if p.Name == get.Port.StrVal && p.Name != "" {
			port = int(p.ContainerPort)
		}
	}
	if port == 0 {
		return defaultHealth
	}
	host := get.Host
	if host == "" {
		host = "127.0.0.1"
	}
	scheme := strings.ToLower(string(get.Scheme))
	if scheme == "" {
		scheme = "http"
	}
	path := get.Path
	if path == "" {
		path = "/healthz"
	}
	u := url.URL{Scheme: scheme, Host: net.JoinHostPort(host, strconv.Itoa(port)), Path: path}
	return u.String()
}
