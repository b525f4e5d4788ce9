package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/nodelabels"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// publisher writes the node's inventory and its number of devices into the node
// object, and writes again when somebody else changed them: kubelet sets
// resources that it does not know to zero when it registers anew.
type publisher struct {
	node    string
	client  kubernetes.Interface
	objects *objects
	metrics *metrics
	// labels remembers the labels that were written, and conflicts are those
	// that were told. Only the agent's loop uses them.
	labels    nodelabels.Keeper
	conflicts map[nodelabels.Conflict]bool
	// decoded is the inventory that the node's object had last.
	decoded struct {
		sync.Mutex
		text string
		all  []accel.Inventory
	}
}

// newPublisher makes the copy of the node object, which Run keeps; changed is
// called after each change of it.
func newPublisher(client kubernetes.Interface, node string, m *metrics, changed func()) *publisher {
	return &publisher{node: node, client: client, objects: newObjects(stripNode, changed), metrics: m}
}

// Run follows the API server until ctx ends.
func (p *publisher) Run(ctx context.Context) {
	nodes := p.client.CoreV1().Nodes()
	selector := fields.OneTermEqualSelector("metadata.name", p.node).String()
	kube.NewReflector("the node", &corev1.Node{}, p.objects, kube.ListWatch(p.client, selector, nodes.List,
		nodes.Watch)).RunWithContext(ctx)
}

// current returns the node object as the watch has delivered it.
func (p *publisher) current() (*corev1.Node, error) {
	object, exists, err := p.objects.GetByKey(p.node)
	if err != nil {
		return nil, fmt.Errorf("read node %s: %w", p.node, err)
	}
	node, ok := object.(*corev1.Node)
	if !exists || !ok {
		return nil, fmt.Errorf("the API server has not shown node %s yet", p.node)
	}
	return node, nil
}

// before returns what the node's object says of a resource. It must not be changed.
func (p *publisher) before(name accel.Resource) (accel.Inventory, bool) {
	node, err := p.current()
	if err != nil {
		return accel.Inventory{}, false
	}
	p.decoded.Lock()
	defer p.decoded.Unlock()
	if text := node.Annotations[wire.InventoryAnnotation]; text != p.decoded.text {
		p.decoded.text = text
		p.decoded.all, _ = wire.DecodeInventory(text) // one that cannot be read says nothing of any resource
	}
	i := slices.IndexFunc(p.decoded.all, func(in accel.Inventory) bool { return in.Resource == name })
	if i < 0 {
		return accel.Inventory{}, false
	}
	return p.decoded.all[i], true
}

// stripNode drops what nobody here reads.
func stripNode(object any) (any, error) {
	n, ok := object.(*corev1.Node)
	if !ok {
		return object, nil
	}
	kept := &corev1.Node{TypeMeta: n.TypeMeta, ObjectMeta: n.ObjectMeta}
	kept.ManagedFields = nil
	kept.Annotations = map[string]string{}
	for _, key := range wire.NodeAnnotations() {
		if v, ok := n.Annotations[key]; ok {
			kept.Annotations[key] = v
		}
	}
	kept.Status.Capacity, kept.Status.Allocatable = n.Status.Capacity, n.Status.Allocatable
	for _, of := range wire.NodeConditions() {
		if c := findCondition(n.Status.Conditions, corev1.NodeConditionType(of)); c != nil {
			kept.Status.Conditions = append(kept.Status.Conditions, *c)
		}
	}
	return kept, nil
}

// publish writes what differs.
func (p *publisher) publish(ctx context.Context, inventory []accel.Inventory, c counts) error {
	node, err := p.current()
	if err != nil {
		return err
	}
	want, err := wire.EncodeInventory(inventory)
	if err != nil {
		return fmt.Errorf("encode the inventory: %w", err)
	}
	annotations := map[string]any{}
	if node.Annotations[wire.InventoryAnnotation] != want {
		annotations[wire.InventoryAnnotation] = want
	}
	// Before the numbers themselves, so that none is ever there unlisted.
	ours, gone := c.of(node)
	if list := strings.Join(ours, ","); node.Annotations[countsAnnotation] != list {
		annotations[countsAnnotation] = list
		if list == "" {
			annotations[countsAnnotation] = nil
		}
	}
	if len(annotations) > 0 {
		if err := p.patch(ctx, "", map[string]any{"metadata": map[string]any{"annotations": annotations}}); err != nil {
			return fmt.Errorf("publish the inventory: %w", err)
		}
		klog.FromContext(ctx).Info("Published the inventory", "bytes", len(want))
	}
	return p.publishCounts(ctx, node, c, gone)
}

// annotate sets an annotation of the node, and removes it if value is empty.
func (p *publisher) annotate(ctx context.Context, key, value string) error {
	var set any // null removes the annotation
	if value != "" {
		set = value
	}
	return p.patch(ctx, "", map[string]any{"metadata": map[string]any{"annotations": map[string]any{key: set}}})
}

func (p *publisher) patch(ctx context.Context, subresource string, body map[string]any) error {
	data, err := json.Marshal(body)
	if err != nil {
		return err
	}
	var subresources []string
	if subresource != "" {
		subresources = []string{subresource}
	}
	return p.send(ctx, types.StrategicMergePatchType, data, subresources...)
}

func (p *publisher) send(ctx context.Context, kind types.PatchType, data []byte, subresources ...string) error {
	_, err := p.client.CoreV1().Nodes().Patch(ctx, p.node, kind, data, metav1.PatchOptions{FieldManager: "divvy-node"}, subresources...)
	if err != nil {
		p.metrics.patchErrors.Inc()
	}
	return err
}
