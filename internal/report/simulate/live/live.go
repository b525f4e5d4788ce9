// Package live makes of a live cluster, or of a dump of one, what can be simulated.
package live

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/report/simulate"
)

// Cluster is a cluster as its API server shows it.
type Cluster struct {
	nodes []v1.Node
	// pods are those that have not ended.
	pods []v1.Pod
}

// Read lists nodes and pods. Of each it keeps only what is needed.
func Read(ctx context.Context, connect func() (kube.Clients, error)) (*Cluster, error) {
	clients, err := connect()
	if err != nil {
		return nil, err
	}
	l := &Cluster{}
	core := clients.Kubernetes.CoreV1()
	return l, errors.Join(
		kube.EachItem(ctx, "nodes", metav1.ListOptions{}, core.Nodes().List, l.add),
		kube.EachItem(ctx, "pods", metav1.ListOptions{}, core.Pods(metav1.NamespaceAll).List, l.add),
	)
}

// add takes of an object what a simulation needs.
func (l *Cluster) add(obj runtime.Object) {
	switch o := obj.(type) {
	case *v1.Node:
		l.nodes = append(l.nodes, slimNode(o))
	case *v1.Pod:
		if o.Status.Phase != v1.PodSucceeded && o.Status.Phase != v1.PodFailed {
			l.pods = append(l.pods, slimPod(o))
		}
	}
}

// slimNode keeps what says which devices, CPU and memory the node has.
func slimNode(n *v1.Node) v1.Node {
	return v1.Node{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
		ObjectMeta: metav1.ObjectMeta{Name: n.Name, UID: n.UID, Annotations: keep(n.Annotations, wire.InventoryAnnotation)},
		Status:     v1.NodeStatus{Allocatable: n.Status.Allocatable},
	}
}

// slimPod keeps what says what the pod asks for and where it is: nothing of
// what its containers run.
func slimPod(p *v1.Pod) v1.Pod {
	out := v1.Pod{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: p.Namespace, Name: p.Name, UID: p.UID, Annotations: keep(p.Annotations, wire.AskAnnotations()...),
		},
		Spec: v1.PodSpec{
			NodeName: p.Spec.NodeName, Overhead: p.Spec.Overhead, Resources: p.Spec.Resources,
			InitContainers: slimContainers(p.Spec.InitContainers), Containers: slimContainers(p.Spec.Containers),
			ResourceClaims: p.Spec.ResourceClaims,
		},
		Status: v1.PodStatus{Phase: p.Status.Phase},
	}
	return out
}

func slimContainers(all []v1.Container) []v1.Container {
	out := make([]v1.Container, len(all))
	for i := range all {
		out[i] = v1.Container{Name: all[i].Name, Resources: all[i].Resources, RestartPolicy: all[i].RestartPolicy}
	}
	return out
}

func keep(all map[string]string, keys ...string) map[string]string {
	var out map[string]string
	for _, k := range keys {
		if v, ok := all[k]; ok {
			if out == nil {
				out = map[string]string{}
			}
			out[k] = v
		}
	}
	return out
}

// list is the form of a dump: that of kubectl get -o json.
type list struct {
	metav1.TypeMeta `json:",inline"`
	Items           []json.RawMessage `json:"items"`
}

// Write writes a dump.
func (l *Cluster) Write(out io.Writer) error {
	all, err := l.list()
	if err != nil {
		return err
	}
	enc := json.NewEncoder(out)
	enc.SetIndent("", " ")
	return enc.Encode(all)
}

func (l *Cluster) list() (list, error) {
	all := list{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "List"}, Items: []json.RawMessage{}}
	add := func(obj any) error {
		item, err := json.Marshal(obj)
		all.Items = append(all.Items, item)
		return err
	}
	for i := range l.nodes {
		if err := add(&l.nodes[i]); err != nil {
			return all, err
		}
	}
	for i := range l.pods {
		if err := add(&l.pods[i]); err != nil {
			return all, err
		}
	}
	return all, nil
}

// Open opens a dump: a file, or in if its path is "-". name is what errors call it.
func Open(path string, in io.Reader) (r io.ReadCloser, name string, err error) {
	if path == "-" {
		return io.NopCloser(in), "standard input", nil
	}
	r, err = os.Open(path)
	return r, path, err
}

// ReadDump reads what Write has written, or kubectl get -o json. The name is
// for errors.
func ReadDump(in io.Reader, name string) (*Cluster, error) {
	l := &Cluster{}
	items, err := ReadList(in, name, func(kind string) runtime.Object {
		switch kind {
		case "Node":
			return &v1.Node{}
		case "Pod":
			return &v1.Pod{}
		}
		return nil
	}, l.add)
	if err == nil && len(l.nodes) == 0 {
		err = fmt.Errorf("%s: no nodes among its %d items", name, items)
	}
	if err != nil {
		return nil, err
	}
	return l, nil
}

const mustBeList = "it must be a List of nodes and pods, as --dump and \"kubectl get nodes,pods -A -o json\" write it"

// ReadList reads a list of objects as kubectl get -o json writes it, and returns how many
// there are. Objects for whose kind empty returns nil are left out: a list may have more
// than is needed. The name is for errors.
func ReadList(in io.Reader, name string, empty func(kind string) runtime.Object, add func(runtime.Object)) (int, error) {
	data, err := io.ReadAll(in)
	if err != nil {
		return 0, fmt.Errorf("read %s: %w", name, err)
	}
	var all list
	if err := json.Unmarshal(data, &all); err != nil {
		var syntax *json.SyntaxError
		if errors.As(err, &syntax) {
			return 0, fmt.Errorf("%s:%d: %w", name, 1+bytes.Count(data[:syntax.Offset], []byte{'\n'}), err)
		}
		return 0, fmt.Errorf("%s: %s: %w", name, mustBeList, err)
	}
	if all.Kind != "List" {
		return 0, fmt.Errorf("%s: kind is %q; %s", name, all.Kind, mustBeList)
	}
	for i, item := range all.Items {
		var what metav1.TypeMeta
		err := json.Unmarshal(item, &what)
		obj := empty(what.Kind)
		if obj == nil && err == nil {
			continue
		}
		if obj != nil {
			err = errors.Join(err, json.Unmarshal(item, obj))
		}
		if err != nil {
			return 0, fmt.Errorf("%s: items[%d]: %w", name, i, err)
		}
		add(obj)
	}
	return len(all.Items), nil
}

// Nodes makes of the nodes of the cluster an empty one of the devices of a resource, the
// wanted one, or the only one if that is "". What cannot be used is said to errOut and left
// out.
func (l *Cluster) Nodes(wanted string, errOut io.Writer) (*simulate.Cluster, accel.Resource, error) {
	c, _, resource, err := l.devices(wanted, errOut)
	return c, resource, err
}

// devices is Nodes, and returns the positions of the nodes by name.
func (l *Cluster) devices(wanted string, errOut io.Writer) (*simulate.Cluster, map[string]int, accel.Resource, error) {
	inventories := map[string][]accel.Inventory{}
	offered := map[accel.Resource]bool{}
	for i := range l.nodes {
		n := &l.nodes[i]
		text := n.Annotations[wire.InventoryAnnotation]
		if text == "" {
			continue
		}
		all, err := wire.DecodeInventory(text)
		if err != nil {
			fmt.Fprintf(errOut, "Node %s is ignored: %v.\n", n.Name, err)
			continue
		}
		inventories[n.Name] = all
		for _, inv := range all {
			offered[inv.Resource] = true
		}
	}
	resource, err := choose(wanted, slices.Sorted(maps.Keys(offered)))
	if err != nil {
		return nil, nil, "", err
	}
	c := &simulate.Cluster{}
	at := map[string]int{}
	for i := range l.nodes {
		n := &l.nodes[i]
		for _, inv := range inventories[n.Name] {
			if inv.Resource != resource || len(inv.Shares) == 0 {
				continue
			}
			at[n.Name] = len(c.Nodes)
			c.Nodes = append(c.Nodes, simulate.Node{
				Name: n.Name, CPU: cpuOf(n), Memory: memoryOf(n), Devices: inv.Shares, Links: inv.Links,
			})
		}
	}
	return c, at, resource, nil
}

// Simulation makes of what the cluster has an empty cluster, and of its pods
// the workload. What cannot be simulated is said to errOut and left out.
func (l *Cluster) Simulation(wanted string, errOut io.Writer) (*simulate.Cluster, *simulate.Workload, error) {
	c, at, resource, err := l.devices(wanted, errOut)
	if err != nil {
		return nil, nil, err
	}
	w := &simulate.Workload{Name: string(resource)}
	selections := map[string]*accel.Selection{}
	claiming := 0
	for i := range l.pods {
		p := &l.pods[i]
		if len(p.Spec.ResourceClaims) > 0 {
			claiming++
		}
		cpu, memory := kube.PeakOf(p)
		requests, err := kube.RequestsOf(p, []accel.Resource{resource})
		switch {
		case len(requests) == 0:
			// It takes of its node what no simulated pod can have.
			if j, ok := at[p.Spec.NodeName]; ok {
				take(&c.Nodes[j].CPU, cpu)
				take(&c.Nodes[j].Memory, memory)
			}
			continue
		case err != nil:
			fmt.Fprintf(errOut, "Pod %s/%s is ignored: %v.\n", p.Namespace, p.Name, err)
			continue
		}
		ask := askOf(&requests[0], c)
		ask.CPU, ask.Memory = cpu, memory
		ask.Only = intern(selections, ask.Only)
		name := p.Namespace + "/" + p.Name
		w.Pods = append(w.Pods, simulate.Pod{Name: name, Source: "pod " + name, Ask: ask})
	}
	if claiming > 0 {
		fmt.Fprintf(errOut, "ResourceClaims are not simulated, and %d of the pods have some. Devices that claims have, or that nodes "+
			"offer to claims alone, are left out.\n", claiming)
	}
	if len(w.Pods) == 0 {
		return nil, nil, fmt.Errorf("no pod requests %s: there is no workload to replay", resource)
	}
	return c, w, nil
}

// choose returns the resource that is wanted, or the only one.
func choose(wanted string, offered []accel.Resource) (accel.Resource, error) {
	switch {
	case len(offered) == 0:
		return "", errors.New("no node publishes devices that Divvy shares; check that divvy-node is running")
	case wanted == "" && len(offered) == 1:
		return offered[0], nil
	case wanted == "":
		return "", fmt.Errorf("the nodes share several resources; select one with --resource: %s", accel.JoinResources(offered))
	case !slices.Contains(offered, accel.Resource(wanted)):
		return "", fmt.Errorf("--resource %s: no node publishes it; published resources: %s", wanted, accel.JoinResources(offered))
	}
	return accel.Resource(wanted), nil
}

// cpuOf and memoryOf are what the node has for pods, in millicores and MiB; a
// node that does not say has no limit.
func cpuOf(n *v1.Node) int64 {
	if q, ok := n.Status.Allocatable[v1.ResourceCPU]; ok {
		return q.MilliValue()
	}
	return place.Unlimited
}

func memoryOf(n *v1.Node) int64 {
	if q, ok := n.Status.Allocatable[v1.ResourceMemory]; ok {
		return q.Value() >> 20
	}
	return place.Unlimited
}

func take(from *int64, amount int64) {
	if *from != place.Unlimited {
		*from -= amount
	}
}

// askOf is what a pod asks of a node. Of devices that are given out whole, a
// pod takes as many as it asks units for.
func askOf(r *accel.Request, c *simulate.Cluster) place.Ask {
	units, devices := r.Peak(), max(r.Devices, 1)
	whole := true
	for i := range c.Nodes {
		whole = whole && !slices.ContainsFunc(c.Nodes[i].Devices, func(d accel.Share) bool { return d.Units != 1 })
	}
	if whole {
		devices = int(units)
	}
	return place.Ask{Units: units / accel.Units(devices), Devices: devices, Only: r.Selection}
}

// intern returns one selection for all equal ones, so that equal asks are equal.
func intern(known map[string]*accel.Selection, s *accel.Selection) *accel.Selection {
	if s == nil {
		return nil
	}
	key := fmt.Sprintf("%q", *s)
	if known[key] == nil {
		known[key] = s
	}
	return known[key]
}
