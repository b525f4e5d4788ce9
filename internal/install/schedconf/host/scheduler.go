package host

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/internal/install/schedconf"
)

// Want says which kube-scheduler is to run.
type Want struct {
	// Hash is schedconf.HashOf its pod; "" for a pod that is not wired.
	Hash string
	// Name and Namespace of the static pod; kubelet adds the node's name.
	Name, Namespace string
	// Container is the one that runs kube-scheduler.
	Container string
	// Health is the URL that answers 200 when the program is well; "" for none.
	Health string
	// HostNetwork is true where the pod uses the node's network, and so reaches what
	// listens on its loopback address.
	HostNetwork bool
	// Replaced is true where the pod runs divvy-scheduler.
	Replaced bool
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
	return e.Problem + "; its last message: " + e.Log
}

const schedulerName = "kube-scheduler"

// defaultPort is where kube-scheduler answers unless its flags say otherwise.
const defaultPort = 10259

// WantOf returns what a manifest says of the pod that kubelet makes of it.
func WantOf(content []byte) (Want, error) {
	var pod corev1.Pod
	if err := yaml.Unmarshal(content, &pod); err != nil {
		return Want{}, fmt.Errorf("the manifest is not a pod: %w", err)
	}
	if pod.Name == "" || len(pod.Spec.Containers) == 0 {
		return Want{}, errors.New("the manifest is a pod without a name or containers")
	}
	w := Want{Hash: schedconf.HashOf(pod.Annotations), Name: pod.Name, Namespace: pod.Namespace, HostNetwork: pod.Spec.HostNetwork,
		Replaced: pod.Annotations[schedconf.AnnotationReplaced] != ""}
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
	probe := container.LivenessProbe
	if w.Replaced && container.ReadinessProbe != nil {
		probe = container.ReadinessProbe // divvy-scheduler is ready also while another leads
	}
	w.Health = healthURL(container, probe)
	return w, nil
}

// healthURL is the URL of a probe, which kubelet asks on the node's own
// network as this package does. Where it names no address, kubelet takes the pod's;
// that is the one that the program listens on, or all of the node's.
func healthURL(c *corev1.Container, probe *corev1.Probe) string {
	address, port := "127.0.0.1", defaultPort
	args := slices.Concat(c.Command, c.Args)
	if a := net.ParseIP(flagOf(args, "bind-address")); a != nil && !a.IsUnspecified() {
		address = a.String()
	}
	if p, err := strconv.Atoi(flagOf(args, "secure-port")); err == nil {
		port = p
	}
	if port == 0 {
		return ""
	}
	u := url.URL{Scheme: "https", Host: net.JoinHostPort(address, strconv.Itoa(port)), Path: "/healthz"}
	if probe == nil || probe.HTTPGet == nil {
		return u.String()
	}
	get := probe.HTTPGet
	port = get.Port.IntValue()
	for _, p := range c.Ports {
		if p.Name == get.Port.StrVal && p.Name != "" {
			port = int(p.ContainerPort)
		}
	}
	if port == 0 {
		return u.String()
	}
	u.Scheme = strings.ToLower(cmp.Or(string(get.Scheme), "http"))
	u.Host = net.JoinHostPort(cmp.Or(get.Host, address), strconv.Itoa(port))
	u.Path = cmp.Or(get.Path, u.Path)
	return u.String()
}

// flagOf returns the value of a flag of a command, "" without it.
func flagOf(args []string, name string) (value string) {
	for i, arg := range args {
		flag, after, has := strings.Cut(arg, "=")
		switch {
		case strings.ReplaceAll(flag, "_", "-") != "--"+name:
		case has:
			value = after
		case i+1 < len(args):
			value = args[i+1]
		}
	}
	return value
}
