// Package inspect shows which pods hold which devices: the report as the guide
// documents it in JSON, and the same as a table for people.
//
// A report is made from the ledger. The extender answers with one, and
// kubectl-divvy makes its own from what nodes and pods carry when the extender
// does not answer.
package inspect

import (
	"fmt"
	"strings"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
)

// Route is where the extender answers with a Report of all nodes, and below it,
// at /NODE, with one of a single node. With details=true the report has details.
const Route = "/gcushare-scheduler/inspect"

// ExplainRoute is where the extender explains, below it at /NAMESPACE/POD, its last decision
// about a pod, and DecisionsRoute where it answers with all that it keeps of decisions.
const (
	ExplainRoute   = Route + "/explain"
	DecisionsRoute = "/gcushare-scheduler/decisions"
)

// Report is the state of some nodes. In the guide's form its JSON has exactly
// the guide's fields in the guide's order; what Divvy adds is left out when it
// is empty and comes after them.
type Report struct {
	Nodes []Node `json:"nodes"`
	// Pool is nil when nothing of a remote pool is in the cluster, and in the
	// extender's reports.
	Pool *Pool `json:"pool,omitempty"`
	// Claims are the nodes that offer devices to ResourceClaims; not in the extender's reports.
	Claims []ClaimNode `json:"claims,omitempty"`
	// Error says why there are no nodes; "" when all is well.
	Error string `json:"error,omitempty"`
}

// Node is one node. Amounts are in units of the resource.
type Node struct {
	Name  string      `json:"name"`
	Total accel.Units `json:"totalGCU"`
	// Used counts all pods, also those in Unplaced.
	Used accel.Units `json:"usedGCU"`
	// Available is what Total leaves over Used and what devices withhold, never below 0.
	Available accel.Units `json:"availableGCU"`
	// Devices are sorted by ID.
	Devices []Device `json:"devices"`
	// Unplaced are pods that hold units of a device that the node has not
	// named yet, or has lost.
	Unplaced []Pod `json:"unplacedPods,omitempty"`

	// Details.

	Resource accel.Resource `json:"resource,omitempty"`
	// Unit is the size of one unit in GB, such as "0.1", or "1/6" of a card; "" when the resource
	// does not count memory.
	Unit string `json:"unit,omitempty"`
}

// Device is one device of a node.
type Device struct {
	// ID is the device's index on its node; of a partition, accel.IndexText of it is
	// Partition.
	ID        int         `json:"id"`
	Total     accel.Units `json:"totalGCU"`
	Used      accel.Units `json:"usedGCU"`
	Available accel.Units `json:"availableGCU"`
	// Pods are sorted by age.
	Pods []Pod `json:"pods"`
	// Withheld is how many units are withheld from new pods, because containers use more of
	// the device's memory than their allocations. None of them is in Used or Available.
	Withheld accel.Units `json:"withheldGCU,omitempty"`

	// Details.

	UUID  accel.DeviceID `json:"uuid,omitempty"`
	Model string         `json:"model,omitempty"`
	// NUMANode is nil when it is not known.
	NUMANode *int   `json:"numaNode,omitempty"`
	Board    string `json:"board,omitempty"`
	// Chip is the device's position on its board.
	Chip int `json:"chip,omitempty"`
	// Chips is how many chips the device is made of, when it is a whole board.
	Chips int `json:"chips,omitempty"`
	// Partition is the number of a partition, such as "0:1", Parent the device that it
	// is cut from, and Profile its size; "" for a whole device.
	Partition string         `json:"partition,omitempty"`
	Parent    accel.DeviceID `json:"parent,omitempty"`
	Profile   string         `json:"profile,omitempty"`
	Unhealthy bool           `json:"unhealthy,omitempty"`
	// Reason says why the device is unhealthy.
	Reason string `json:"reason,omitempty"`
	// Quarantined is since when the device takes no pods until it is released, zero
	// when it is not in quarantine.
	Quarantined time.Time `json:"quarantinedSince,omitzero"`
	// Isolation is what keeps the containers on the device apart; nil for nothing.
	Isolation *Isolation `json:"isolation,omitempty"`
}

// Isolation is what keeps the containers on a device apart.
type Isolation struct {
	// Memory is the tier of the device's memory, and Compute that of its compute time; "" for
	// none.
	Memory  accel.Tier `json:"memory,omitempty"`
	Compute accel.Tier `json:"compute,omitempty"`
	// Backend is what does it, such as "mig".
	Backend string `json:"backend,omitempty"`
	// Attested is when it was last found to hold; zero for what needs no attestation.
	Attested time.Time `json:"attested,omitzero"`
}

// Pod is a pod and what it holds of one device.
type Pod struct {
	Name       string      `json:"name"`
	Namespace  string      `json:"namespace"`
	UID        string      `json:"uid"`
	CreateTime time.Time   `json:"createTime"`
	Used       accel.Units `json:"usedGCU"`

	// Details.

	// Cards is on how many devices the pod is, when there are several: it stands
	// with its part at each of them. Of is what it holds of all of them.
	Cards int         `json:"cards,omitempty"`
	Of    accel.Units `json:"usedOfAll,omitempty"`
	// Confirmed is true once the node has seen kubelet hand the units out.
	Confirmed bool `json:"confirmed,omitempty"`
	// Device is the uuid of the device of an unplaced pod, when it was known.
	Device accel.DeviceID `json:"device,omitempty"`
	// IDs are what the pod holds of a device that is given out as a whole or by
	// time slices, as kubelet counts it.
	IDs []string `json:"ids,omitempty"`
}

// Failed is a report that says why there is none.
func Failed(text string) Report { return Report{Nodes: []Node{}, Error: text} }

// NodeFromUsage makes one node of a report, with details.
func NodeFromUsage(resource accel.Resource, u ledger.NodeUsage) Node {
	node := Node{
		Name: u.Name, Total: u.Total, Used: u.Used, Available: max(u.Total-u.Used, 0),
		Devices:  make([]Device, 0, len(u.Devices)),
		Resource: resource, Unit: u.Unit,
	}
	for _, d := range u.Devices {
		node.Devices = append(node.Devices, deviceOf(d.Share, d.Used, podsOf(d.Pods)))
	}
	if len(u.Unplaced) > 0 {
		node.Unplaced = podsOf(u.Unplaced)
		for i, p := range u.Unplaced {
			node.Unplaced[i].Device = p.Device
		}
	}
	node.sumParts()
	node.withdraw()
	return node
}

// sumParts tells of each pod that stands at several devices how much it holds in
// all.
func (n *Node) sumParts() {
	type sum struct {
		cards int
		units accel.Units
	}
	sums := map[string]sum{}
	each := func(do func(p *Pod)) {
		for i := range n.Devices {
			for k := range n.Devices[i].Pods {
				do(&n.Devices[i].Pods[k])
			}
		}
		for k := range n.Unplaced {
			do(&n.Unplaced[k])
		}
	}
	each(func(p *Pod) {
		s := sums[p.UID]
		sums[p.UID] = sum{s.cards + 1, s.units + p.Used}
	})
	each(func(p *Pod) {
		if s := sums[p.UID]; s.cards > 1 {
			p.Cards, p.Of = s.cards, s.units
		}
	})
}

// withdraw subtracts from what is available the units that no pod can get: those that are
// withheld, and the rest of devices that are given out as another resource.
func (n *Node) withdraw() {
	for i := range n.Devices {
		d := &n.Devices[i]
		lost := min(d.Withheld, d.Available)
		if strings.HasPrefix(d.Reason, accel.ReasonGivenOut) {
			lost = d.Available
		}
		d.Available -= lost
		n.Available = max(n.Available-lost, 0)
	}
}

// deviceOf makes one device of a report, with details.
func deviceOf(s accel.Share, used accel.Units, pods []Pod) Device {
	d := Device{
		ID: s.Index, Total: s.Units, Used: used, Available: max(s.Units-used, 0), Pods: pods, Withheld: s.Withheld,
		UUID: s.ID, Model: s.Model, Board: s.Board, Chip: s.Chip, Chips: s.Chips, Parent: s.Parent, Profile: s.Profile,
		Unhealthy: s.Health.Unhealthy, Reason: s.Health.Reason, Quarantined: s.Health.Quarantined,
	}
	if i := Isolation(s.Isolation); i != (Isolation{}) {
		d.Isolation = &i
	}
	if s.NUMANode != accel.NoNUMA {
		d.NUMANode = &s.NUMANode
	}
	if _, _, ok := accel.SplitIndex(s.Index); ok {
		d.Partition = accel.IndexText(s.Index)
	}
	return d
}

// NotManaged is the error of a report of a resource that the extender does not
// manage: whoever asks finds it on nodes and pods.
func NotManaged(resource accel.Resource) string {
	return fmt.Sprintf("resource %q is not managed here", resource)
}

func podsOf(usages []ledger.PodUsage) []Pod {
	pods := make([]Pod, 0, len(usages))
	for _, u := range usages {
		pods = append(pods, Pod{
			Name: u.Pod.Name, Namespace: u.Pod.Namespace, UID: u.Pod.UID,
			CreateTime: u.Created.UTC().Truncate(time.Second), Used: u.Units,
			Confirmed: u.Confirmed,
		})
	}
	return pods
}

// Guide returns the report in the guide's form, without details. The original
// is not changed.
func (r Report) Guide() Report {
	out := Report{Nodes: make([]Node, 0, len(r.Nodes)), Pool: r.Pool, Error: r.Error}
	for _, n := range r.Nodes {
		out.Nodes = append(out.Nodes, n.Guide())
	}
	return out
}

// Guide returns the node in the guide's form, without details. The original is
// not changed.
func (n Node) Guide() Node {
	out := Node{Name: n.Name, Total: n.Total, Used: n.Used, Available: n.Available,
		Devices: make([]Device, 0, len(n.Devices))}
	for _, d := range n.Devices {
		out.Devices = append(out.Devices, Device{
			ID: d.ID, Total: d.Total, Used: d.Used, Available: d.Available, Pods: withoutDetails(d.Pods), Withheld: d.Withheld,
		})
	}
	if len(n.Unplaced) > 0 {
		out.Unplaced = withoutDetails(n.Unplaced)
	}
	return out
}

func withoutDetails(pods []Pod) []Pod {
	out := make([]Pod, 0, len(pods))
	for _, p := range pods {
		p.Cards, p.Of, p.Confirmed, p.Device, p.IDs = 0, 0, false, "", nil
		out = append(out, p)
	}
	return out
}
