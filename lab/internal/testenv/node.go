package testenv

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// ConfigLabel is the node's label that names its configuration.
const ConfigLabel = "divvy.dev/config"

// usesCards reports whether a pod asks for anything of a card.
func usesCards(pod *corev1.Pod) bool {
	return slices.ContainsFunc(slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers), func(c corev1.Container) bool {
		for name := range c.Resources.Limits {
			if slices.ContainsFunc(accel.Vendors, func(v accel.Vendor) bool { return v.Owns(string(name)) }) {
				return true
			}
		}
		return false
	})
}

// Asking returns a container that asks for so much of a resource and waits for
// ever, or runs the command.
func Asking(name string, what corev1.ResourceName, amount int64, command ...string) corev1.Container {
	c := Container(name, 0, command...)
	list := corev1.ResourceList{what: *resource.NewQuantity(amount, resource.DecimalSI)}
	c.Resources = corev1.ResourceRequirements{Limits: list, Requests: list}
	return c
}

// Node returns the lab's node.
func (s *Env) Node(ctx context.Context) (*corev1.Node, error) {
	node, err := s.Client.CoreV1().Nodes().Get(ctx, s.Cluster.NodeName(), metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("read the node: %w", err)
	}
	return node, nil
}

// Label sets a label of the node, or removes it for the value "".
func (s *Env) Label(ctx context.Context, key, value string) error {
	labels := map[string]any{key: nil}
	if value != "" {
		labels[key] = value
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": labels}})
	if err == nil {
		_, err = s.Client.CoreV1().Nodes().Patch(ctx, s.Cluster.NodeName(), types.MergePatchType, patch, metav1.PatchOptions{})
	}
	if err != nil {
		return fmt.Errorf("label the node: %w", err)
	}
	return nil
}

// Offered returns what the node's status shows of a resource: all of it, and
// what pods may have.
func (s *Env) Offered(ctx context.Context, name corev1.ResourceName) (capacity, allocatable int64, err error) {
	node, err := s.Node(ctx)
	if err != nil {
		return 0, 0, err
	}
	c, a := node.Status.Capacity[name], node.Status.Allocatable[name]
	return c.Value(), a.Value(), nil
}

// WaitAllocatable waits until pods may have so much of a resource, and returns
// how long that took.
func (s *Env) WaitAllocatable(ctx context.Context, timeout time.Duration, name corev1.ResourceName, want int64) (time.Duration, error) {
	begun := time.Now()
	err := Poll(ctx, timeout, fmt.Sprintf("the node to offer %d %s", want, name), func(ctx context.Context) error {
		capacity, allocatable, err := s.Offered(ctx, name)
		if err == nil && allocatable != want {
			err = fmt.Errorf("it offers %d of %d", allocatable, capacity)
		}
		return err
	})
	return time.Since(begun), err
}

// Published is a card as the node publishes it.
type Published struct {
	Index     int    `json:"index"`
	ID        string `json:"id"`
	Units     int64  `json:"units"`
	Unhealthy bool   `json:"unhealthy"`
	Reason    string `json:"reason"`
}

// Published returns the cards of a resource as the node publishes them.
func (s *Env) Published(ctx context.Context, name corev1.ResourceName) ([]Published, error) {
	node, err := s.Node(ctx)
	if err != nil {
		return nil, err
	}
	var inventory struct {
		Resources []struct {
			Resource corev1.ResourceName `json:"resource"`
			Devices  []Published         `json:"devices"`
		} `json:"resources"`
	}
	if err := json.Unmarshal([]byte(node.Annotations["divvy.dev/inventory"]), &inventory); err != nil {
		return nil, fmt.Errorf("what the node publishes: %w", err)
	}
	for _, r := range inventory.Resources {
		if r.Resource == name {
			return r.Devices, nil
		}
	}
	return nil, fmt.Errorf("the node publishes no %s", name)
}

// DaemonLife tells one life of the daemon from another: its pod and how often
// its container was started again.
func (s *Env) DaemonLife(ctx context.Context) (string, error) {
	pod, err := s.DivvyPod(ctx, NodeDaemon)
	if err != nil {
		return "", err
	}
	if len(pod.Status.ContainerStatuses) == 0 {
		return "", errors.New(Describe(pod))
	}
	return fmt.Sprintf("pod %s, started again %d times", pod.UID, pod.Status.ContainerStatuses[0].RestartCount), nil
}

// Cards returns a topology of lab/topologies, to be changed and set.
func (s *Env) Cards(name string) (vendorsim.Topology, error) {
	text, err := s.Topology(name)
	if err != nil {
		return vendorsim.Topology{}, err
	}
	topology, err := vendorsim.Parse(name, []byte(text))
	if err != nil {
		return vendorsim.Topology{}, fmt.Errorf("topology: %w", err)
	}
	return topology, nil
}

// SetHardware changes the simulated cards under the running programs.
func (s *Env) SetHardware(ctx context.Context, topology vendorsim.Topology) error {
	text, err := topology.Encode()
	if err != nil {
		return err
	}
	return s.SetCards(ctx, string(text))
}

// ReleaseDevices releases all devices of the node from quarantine.
func (s *Env) ReleaseDevices(ctx context.Context) error {
	node, err := s.Node(ctx)
	if err != nil {
		return err
	}
	q, err := wire.DecodeQuarantine(node.Annotations[wire.QuarantineAnnotation])
	if err != nil || len(q.Devices) == 0 {
		return err
	}
	args := []string{"divvy", "device", "release", node.Name}
	for _, d := range q.Devices {
		args = append(args, string(d.Device))
	}
	_, err = s.Kubectl(ctx, args...)
	return err
}

// Sight is what a running container sees of cards.
type Sight struct {
	// Env are the variables that name cards.
	Env map[string]string
	// Nodes are the cards' device nodes in /dev, in order, also those that a
	// vendor's cards have in common.
	Nodes []string
}

// See looks at the cards from inside the first container of a pod.
func (s *Env) See(ctx context.Context, pod string) (Sight, error) {
	object, err := s.Get(ctx, pod)
	if err != nil {
		return Sight{}, err
	}
	text, err := s.Exec(ctx, pod, object.Spec.Containers[0].Name, "sh", "-c", "env; ls /dev")
	if err != nil {
		return Sight{}, err
	}
	return sight(text), nil
}

// sight reads the output of env and of ls /dev.
func sight(text string) Sight {
	sight := Sight{Env: map[string]string{}}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		name, value, assigned := strings.Cut(line, "=")
		switch {
		case assigned && strings.HasSuffix(name, "_DEVICES"):
			sight.Env[name] = value
		case !assigned && slices.ContainsFunc([]string{"gcu", "iluvatar", "itrctl", "nvidia"},
			func(prefix string) bool { return strings.HasPrefix(line, prefix) }):
			sight.Nodes = append(sight.Nodes, line)
		}
	}
	slices.Sort(sight.Nodes)
	return sight
}
