package uninstall

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// update is how often kubelet updates the status of its node.
const update = 10 * time.Second

// calm is how long an entry of a node's status has to stay away before it counts
// as gone: two of kubelet's updates, ten seconds apart, and some more.
const calm = 25 * time.Second

const fieldManager = "divvy-uninstall"

func (u *uninstaller) nodes(ctx context.Context) ([]corev1.Node, error) {
	var nodes *corev1.NodeList
	err := call(ctx, func(ctx context.Context) (err error) {
		nodes, err = u.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list the nodes: %w", err)
	}
	return nodes.Items, nil
}

func (u *uninstaller) cleanNodes(ctx context.Context) {
	cleaned := 0
	left := u.out.wait(ctx, cleaningLimit, func(ctx context.Context) (string, error) {
		nodes, err := u.nodes(ctx)
		if err != nil {
			return "", err
		}
		var errs []string
		for i := range nodes {
			changed, err := u.cleanNode(ctx, &nodes[i])
			switch {
			case err != nil:
				errs = append(errs, err.Error())
			case changed:
				cleaned++
			}
		}
		return strings.Join(errs, "; "), nil
	})
	if left != "" {
		var keys []string
		for _, key := range wire.NodeAnnotations() {
			keys = append(keys, key+"-")
		}
		conditions := `{"status":{"conditions":[{"type":"` + wire.OveruseCondition + `","$patch":"delete"}]}}`
		u.out.remain("annotations, labels, conditions and device counts on nodes ("+left+")",
			"kubectl annotate nodes --all "+strings.Join(keys, " ")+
				", for each label that "+wire.LabelsAnnotation+" lists, kubectl label nodes --all LABEL-"+
				", and for each node, kubectl patch node NODE --subresource=status --type=strategic -p '"+conditions+"'")
	}
	u.out.say("removed Divvy's annotations and labels from %d nodes", cleaned)
}

// cleanNode takes off one node what Divvy wrote on it. The annotations say what
// that is, so they go last.
func (u *uninstaller) cleanNode(ctx context.Context, n *corev1.Node) (changed bool, err error) {
	status := map[string]any{}
	for _, name := range append(wire.CountedResources(n.Annotations[wire.CountsAnnotation]), u.options.Counts...) {
		if has(n, name) {
			status[name] = nil
		}
	}
	if len(status) > 0 {
		if err := u.patchStatus(ctx, n.Name, status); err != nil && !gone(err) {
			return false, fmt.Errorf("device counts of node %s: %w", n.Name, err)
		}
	}
	var conditions []any
	for _, c := range n.Status.Conditions {
		if slices.Contains(wire.NodeConditions(), string(c.Type)) {
			conditions = append(conditions, map[string]string{"type": string(c.Type), "$patch": "delete"})
		}
	}
	if len(conditions) > 0 {
		body := map[string]any{"status": map[string]any{"conditions": conditions}}
		if err := u.patch(ctx, n.Name, types.StrategicMergePatchType, body, "status"); err != nil && !gone(err) {
			return false, fmt.Errorf("conditions of node %s: %w", n.Name, err)
		}
	}
	labels, annotations := map[string]any{}, map[string]any{}
	for _, key := range wire.OwnedLabels(n.Annotations[wire.LabelsAnnotation]) {
		if _, there := n.Labels[key]; there {
			labels[key] = nil
		}
	}
	for _, key := range wire.NodeAnnotations() {
		if _, there := n.Annotations[key]; there {
			annotations[key] = nil
		}
	}
	if len(labels)+len(annotations) == 0 {
		return len(status) > 0 || len(conditions) > 0, nil
	}
	body := map[string]any{"metadata": map[string]any{"labels": labels, "annotations": annotations}}
	if err := u.patch(ctx, n.Name, types.MergePatchType, body); err != nil && !gone(err) {
		return false, fmt.Errorf("annotations and labels of node %s: %w", n.Name, err)
	}
	return true, nil
}

func (u *uninstaller) patchStatus(ctx context.Context, node string, resources map[string]any) error {
	return u.patch(ctx, node, types.MergePatchType,
		map[string]any{"status": map[string]any{"capacity": resources, "allocatable": resources}}, "status")
}

func (u *uninstaller) patch(ctx context.Context, node string, kind types.PatchType, body map[string]any, subresources ...string) error {
	data, err := json.Marshal(body)
	if err != nil {
		return err
	}
	return call(ctx, func(ctx context.Context) error {
		_, err := u.client.CoreV1().Nodes().Patch(ctx, node, kind, data, metav1.PatchOptions{FieldManager: fieldManager},
			subresources...)
		return err
	})
}

func has(n *corev1.Node, resource string) bool {
	_, capacity := n.Status.Capacity[corev1.ResourceName(resource)]
	_, allocatable := n.Status.Allocatable[corev1.ResourceName(resource)]
	return capacity || allocatable
}

type entry struct{ node, resource string }

func (e entry) command() string {
	return fmt.Sprintf(`kubectl patch node %s --subresource=status --type=merge -p '{"status":{"capacity":{%q:null},`+
		`"allocatable":{%q:null}}}'`,
		e.node, e.resource, e.resource)
}

// after takes the resources that kubelet was offered out of the nodes' status, and
// sees that they stay away.
//
// Kubelet keeps a resource whose plugin has gone for five minutes: its capacity as
// it was, and nothing of it to give out. Then it writes a capacity of zero, once,
// and forgets the resource; an entry that is taken away before comes back.
func (u *uninstaller) after(ctx context.Context) error {
	u.awaitHosts(ctx)
	if len(u.options.Resources) == 0 {
		return nil
	}
	patched := map[entry]time.Time{}
	limit := u.options.Timeout - MinTimeout
	if deadline, ok := ctx.Deadline(); ok {
		limit = time.Until(deadline) - MinTimeout
	}
	away := map[entry]time.Time{} // since when an entry that was there is not
	var listed error
	taken := map[entry]bool{}
	var forgetting map[entry]string
	pending := u.out.wait(ctx, limit, func(ctx context.Context) (string, error) {
		var nodes []corev1.Node
		if nodes, listed = u.nodes(ctx); listed != nil {
			return "", listed
		}
		forgetting = map[entry]string{}
		settling := false
		for i := range nodes {
			u.forget(ctx, &nodes[i], away, patched, taken, forgetting)
		}
		for _, since := range away {
			settling = settling || time.Since(since) < calm
		}
		switch {
		case len(forgetting) > 0:
			return "kubelet to drop " + describe(forgetting), nil
		case settling:
			return "kubelet's next updates of the nodes' status", nil
		}
		return "", nil
	})
	if listed != nil {
		return listed
	}
	for e := range taken {
		u.out.say("node %s: %s is offered by another device plugin and was kept", e.node, e.resource)
	}
	for e, why := range forgetting {
		u.out.remain(fmt.Sprintf("%s in the status of node %s (%s)", e.resource, e.node, why),
			e.command()+", once kubelet shows a capacity of 0")
	}
	if pending == "" {
		u.out.say("nodes: their status was restored")
	}
	return nil
}

// forget does for one node what can be done now.
func (u *uninstaller) forget(ctx context.Context, n *corev1.Node, away, patched map[entry]time.Time, taken map[entry]bool,
	forgetting map[entry]string) {
	remove := map[string]any{}
	for _, name := range u.options.Resources {
		e := entry{n.Name, name}
		capacity := n.Status.Capacity[corev1.ResourceName(name)]
		allocatable := n.Status.Allocatable[corev1.ResourceName(name)]
		switch {
		case !has(n, name):
			if _, seen := away[e]; !seen {
				away[e] = time.Now()
			}
			continue
		case !allocatable.IsZero():
			taken[e] = true
		case !nodeReady(n):
			u.out.remain(fmt.Sprintf("%s in the status of node %s, which does not respond", name, n.Name),
				"five minutes after it is back, "+e.command())
		case capacity.IsZero():
			forgetting[e] = "kubelet still shows 0 of it"
			if time.Since(patched[e]) >= update {
				remove[name], patched[e] = nil, time.Now()
			}
		default:
			forgetting[e] = fmt.Sprintf("kubelet still lists %s", capacity.String())
		}
		delete(away, e)
	}
	if len(remove) == 0 {
		return
	}
	if err := u.patchStatus(ctx, n.Name, remove); err != nil && !gone(err) {
		for name := range remove {
			forgetting[entry{n.Name, name}] = err.Error()
		}
		return
	}
	u.out.say("node %s: removed %s from its status", n.Name, strings.Join(slices.Sorted(maps.Keys(remove)), ", "))
}

func describe(entries map[entry]string) string {
	var resources, nodes []string
	for e := range entries {
		resources, nodes = append(resources, e.resource), append(nodes, e.node)
	}
	return fmt.Sprintf("%s on %s", join(resources), join(nodes))
}
