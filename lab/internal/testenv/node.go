package testenv

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
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

// Node is the lab's node.
type Node struct {
	client kubernetes.Interface
	name   string
}

// Get returns the node as the API server has it.
func (n *Node) Get(ctx context.Context) (*corev1.Node, error) {
	node, err := n.client.CoreV1().Nodes().Get(ctx, n.name, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("read the node: %w", err)
	}
	return node, nil
}

// Label sets a label of the node, or removes it for the value "".
func (n *Node) Label(ctx context.Context, key, value string) error {
	labels := map[string]any{key: nil}
	if value != "" {
		labels[key] = value
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": labels}})
	if err == nil {
		_, err = n.client.CoreV1().Nodes().Patch(ctx, n.name, types.MergePatchType, patch, metav1.PatchOptions{})
	}
	if err != nil {
		return fmt.Errorf("label the node: %w", err)
	}
	return nil
}

// forget removes the annotations and labels that Divvy wrote.
func (n *Node) forget(ctx context.Context) error {
	node, err := n.Get(ctx)
	if err != nil {
		return err
	}
	labels, annotations := map[string]any{}, map[string]any{}
	for _, key := range wire.OwnedLabels(node.Annotations[wire.LabelsAnnotation]) {
		labels[key] = nil
	}
	for _, key := range wire.NodeAnnotations() {
		annotations[key] = nil
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": labels, "annotations": annotations}})
	if err != nil {
		return err
	}
	// The API server enforces a policy for a moment after its deletion.
	return poll.Until(ctx, 30*time.Second, "Divvy's annotations to be removed from the node", func(ctx context.Context) error {
		_, err := n.client.CoreV1().Nodes().Patch(ctx, n.name, types.MergePatchType, patch, metav1.PatchOptions{})
		return err
	})
}

// Offered returns what the node's status shows of a resource: all of it, and
// what pods may have.
func (n *Node) Offered(ctx context.Context, name corev1.ResourceName) (capacity, allocatable int64, err error) {
	node, err := n.Get(ctx)
	if err != nil {
		return 0, 0, err
	}
	c, a := node.Status.Capacity[name], node.Status.Allocatable[name]
	return c.Value(), a.Value(), nil
}

// WaitAllocatable waits until pods may have so much of a resource, and returns
// how long that took.
func (n *Node) WaitAllocatable(ctx context.Context, timeout time.Duration, name corev1.ResourceName, want int64) (time.Duration, error) {
	begun := time.Now()
	err := poll.Until(ctx, timeout, fmt.Sprintf("the node to offer %d %s", want, name), func(ctx context.Context) error {
		capacity, allocatable, err := n.Offered(ctx, name)
		if err == nil && allocatable != want {
			err = fmt.Errorf("it offers %d of %d", allocatable, capacity)
		}
		return err
	})
	return time.Since(begun), err
}

// Published returns the devices of a resource as the node publishes them.
func (n *Node) Published(ctx context.Context, name corev1.ResourceName) ([]accel.Share, error) {
	node, err := n.Get(ctx)
	if err != nil {
		return nil, err
	}
	inventory, err := wire.DecodeInventory(node.Annotations[wire.InventoryAnnotation])
	if err != nil {
		return nil, fmt.Errorf("what the node publishes: %w", err)
	}
	for _, r := range inventory {
		if r.Resource == accel.Resource(name) {
			return r.Shares, nil
		}
	}
	return nil, fmt.Errorf("the node publishes no %s", name)
}

// Isolations returns what isolates the devices of a resource, as the node publishes it.
func (n *Node) Isolations(ctx context.Context, name corev1.ResourceName) ([]accel.Isolation, error) {
	shares, err := n.Published(ctx, name)
	var found []accel.Isolation
	for _, s := range shares {
		found = append(found, s.Isolation)
	}
	return found, err
}

// WaitTiers waits until the node states these tiers of the memory of a resource's devices.
func (n *Node) WaitTiers(ctx context.Context, timeout time.Duration, name corev1.ResourceName, want ...accel.Tier) error {
	return poll.Until(ctx, timeout, fmt.Sprintf("tiers %q of %s", want, name), func(ctx context.Context) error {
		stated, err := n.Isolations(ctx, name)
		var got []accel.Tier
		for _, one := range stated {
			got = append(got, one.Memory)
		}
		if err == nil && !slices.Equal(got, want) {
			err = fmt.Errorf("they are %q", got)
		}
		return err
	})
}

// WaitCondition waits for a condition of the node and a part of its message, and returns the
// message.
func (n *Node) WaitCondition(ctx context.Context, timeout time.Duration, kind corev1.NodeConditionType, status corev1.ConditionStatus,
	message string,
) (found string, err error) {
	err = poll.Until(ctx, timeout, fmt.Sprintf("condition %s to be %s with %q", kind, status, message), func(ctx context.Context) error {
		node, err := n.Get(ctx)
		if err != nil {
			return err
		}
		for _, c := range node.Status.Conditions {
			if c.Type == kind && c.Status == status && strings.Contains(c.Message, message) {
				found = c.Message
				return nil
			}
		}
		return fmt.Errorf("conditions: %+v", node.Status.Conditions)
	})
	return found, err
}

// WaitUsed waits until inspect reports that pods, and processes in none, use so many bytes,
// and returns the devices that pods hold something of.
func (s *Env) WaitUsed(ctx context.Context, timeout time.Duration, want map[string]uint64) (on map[string]accel.DeviceID, err error) {
	return on, poll.Until(ctx, timeout, "measured use to be reported", func(ctx context.Context) error {
		text, err := s.CLI.Kubectl(ctx, "divvy", "inspect", "--usage", s.Node.name, "--output", "json")
		if err != nil {
			return err
		}
		var answer struct{ Reports []wire.UsageReport }
		if err := json.Unmarshal([]byte(text), &answer); err != nil || len(answer.Reports) != 1 {
			return fmt.Errorf("want the report of one node (%w):\n%s", err, text)
		}
		used := map[string]uint64{}
		on = map[string]accel.DeviceID{}
		for _, d := range answer.Reports[0].Devices {
			used[d.Vendor+" system"] += d.SystemBytes
			used[d.Vendor+" foreign"] += d.ForeignBytes
			for _, c := range d.Containers {
				if c.UsedBytes != nil {
					used[c.Pod] += *c.UsedBytes
					on[c.Pod] = d.Device
				}
			}
		}
		for who, bytes := range want {
			if got, known := used[who]; !known || got != bytes {
				err = errors.Join(err, fmt.Errorf("%s uses %d bytes, want %d:\n%s", who, got, bytes, text))
			}
		}
		return err
	})
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
func (p *Pods) See(ctx context.Context, pod string) (Sight, error) {
	object, err := p.API.Get(ctx, pod, metav1.GetOptions{})
	if err != nil {
		return Sight{}, err
	}
	text, err := p.Exec(ctx, pod, object.Spec.Containers[0].Name, "sh", "-c", "env; ls /dev")
	if err != nil {
		return Sight{}, err
	}
	return sight(text), nil
}

// Look looks at the cards from outside a container, through its first process.
func Look(pid int) (Sight, error) {
	environment, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil {
		return Sight{}, fmt.Errorf("environment of the container: %w", err)
	}
	if len(environment) == 0 {
		return Sight{}, errors.New("environment of the container: its process has ended")
	}
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/root/dev", pid))
	if err != nil {
		return Sight{}, fmt.Errorf("devices of the container: %w", err)
	}
	lines := strings.Split(string(environment), "\x00")
	for _, entry := range entries {
		if entry.Type()&fs.ModeCharDevice != 0 {
			lines = append(lines, entry.Name())
		}
	}
	return sight(strings.Join(lines, "\n")), nil
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
