package nodeagent

import (
	"context"
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/accel/wire"
)

// publisher writes the node's inventory and its number of devices into the node
// object, and writes again when somebody else changed them: kubelet sets
// resources that it does not know to zero when it registers anew.
type publisher struct {
	node    string
	client  kubernetes.Interface
	nodes   corelisters.NodeLister
	metrics *metrics
}

// newPublisher watches the node object once the factory is started; changed is
// called after each change of it.
func newPublisher(client kubernetes.Interface, node string, m *metrics, changed func()) (*publisher, informers.SharedInformerFactory, error) {
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0,
		informers.WithTweakListOptions(func(o *metav1.ListOptions) {
			o.FieldSelector = fields.OneTermEqualSelector("metadata.name", node).String()
		}),
		informers.WithTransform(stripNode))
	nodes := factory.Core().V1().Nodes()
	_, err := nodes.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { changed() },
		UpdateFunc: func(any, any) { changed() },
	})
	if err != nil {
		return nil, nil, fmt.Errorf("watch the node: %w", err)
	}
	return &publisher{node: node, client: client, nodes: nodes.Lister(), metrics: m}, factory, nil
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
	if v, ok := n.Annotations[wire.InventoryAnnotation]; ok {
		kept.Annotations[wire.InventoryAnnotation] = v
	}
	kept.Status.Capacity = n.Status.Capacity
	return kept, nil
}

// publish writes what differs. counts gives the number of devices by the
// resource that shows it.
func (p *publisher) publish(ctx context.Context, inventory []accel.Inventory, counts map[string]int) error {
	node, err := p.nodes.Get(p.node)
	if err != nil {
		return fmt.Errorf("read node %s: %w", p.node, err)
	}
	want, err := wire.EncodeInventory(inventory)
	if err != nil {
		return fmt.Errorf("encode the inventory: %w", err)
	}
	log := klog.FromContext(ctx)
	if node.Annotations[wire.InventoryAnnotation] != want {
		if err := p.patch(ctx, "", map[string]any{"metadata": map[string]any{"annotations": map[string]string{wire.InventoryAnnotation: want}}}); err != nil {
			return fmt.Errorf("publish the inventory: %w", err)
		}
		log.Info("Published the inventory", "bytes", len(want))
	}
	capacity := map[string]string{}
	for name, n := range counts {
		have, set := node.Status.Capacity[corev1.ResourceName(name)]
		if q := resource.NewQuantity(int64(n), resource.DecimalSI); !set || have.Cmp(*q) != 0 {
			capacity[name] = q.String()
		}
	}
	if len(capacity) == 0 {
		return nil
	}
	// Kubelet derives allocatable from capacity at its next heartbeat; setting
	// both spares users the time in which they differ.
	if err := p.patch(ctx, "status", map[string]any{"status": map[string]any{"capacity": capacity, "allocatable": capacity}}); err != nil {
		return fmt.Errorf("publish the number of devices: %w", err)
	}
	log.Info("Published the number of devices", "capacity", capacity)
	return nil
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
	_, err = p.client.CoreV1().Nodes().Patch(ctx, p.node, types.StrategicMergePatchType, data,
		metav1.PatchOptions{FieldManager: "divvy-node"}, subresources...)
	if err != nil {
		p.metrics.patchErrors.Inc()
	}
	return err
}
