package picture

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/report/inspect"
	"github.com/divvy-gpu/divvy/internal/report/inspect/collect"
)

// Node is what is drawn of a node. 5000 nodes are some megabytes of JSON, which the browser reads
// before it can draw: what devices and pods of a node have in common is there once.
type Node struct {
	Name string `json:"name"`
	// Zone is the node's topology zone, "" without one.
	Zone string `json:"zone,omitempty"`
	// Closed says why no new pods come to the node: "cordoned", "not ready".
	Closed []string `json:"closed,omitempty"`
	// Problem is why what the node publishes cannot be shown.
	Problem string `json:"problem,omitempty"`
	// Kinds are the resources that the node offers, and Model that of devices without one.
	Kinds   []Kind   `json:"kinds,omitempty"`
	Model   string   `json:"model,omitempty"`
	Devices []Device `json:"devices"`
	// Unplaced are pods of which the node has not named the device yet, or has lost it.
	Unplaced []Allocation `json:"unplaced,omitempty"`
}

// Kind is a resource of a node.
type Kind struct {
	Resource accel.Resource `json:"resource"`
	// How says how units are counted: "in units of 1 GB", "in time slices".
	How string `json:"how,omitempty"`
}

// Device is one physical device, or a partition of one.
type Device struct {
	ID accel.DeviceID `json:"id"`
	// Index is the vendor's number of the device on its node.
	Index string `json:"index"`
	// Model is "" where it is that of the node.
	Model   string         `json:"model,omitempty"`
	Board   string         `json:"board,omitempty"`
	Chips   int            `json:"chips,omitempty"`
	NUMA    *int           `json:"numa,omitempty"`
	Profile string         `json:"profile,omitempty"`
	Parent  accel.DeviceID `json:"parent,omitempty"`
	// State is "", StateUnhealthy or StateQuarantine, and Reason says why.
	State  string `json:"state,omitempty"`
	Reason string `json:"reason,omitempty"`
	// Isolation is the tier of the device's memory, "" for none.
	Isolation accel.Tier `json:"isolation,omitempty"`
	// Offers are the resources as which the device is offered.
	Offers []Offer      `json:"offers,omitempty"`
	Pods   []Allocation `json:"pods,omitempty"`
	Use    *Use         `json:"use,omitempty"`
}

// The states of devices that take no new pods.
const (
	StateUnhealthy  = "unhealthy"
	StateQuarantine = "quarantine"
)

// Offer is a resource as which a device is offered. Amounts are in its units; the rest is free.
type Offer struct {
	// Kind is the index of the resource in Node.Kinds.
	Kind  int         `json:"kind,omitempty"`
	Total accel.Units `json:"total"`
	Used  accel.Units `json:"used,omitempty"`
	// Withheld is how many units are withheld from new pods, and Other how many cannot be allocated
	// since the device is allocated as another resource.
	Withheld accel.Units `json:"withheld,omitempty"`
	Other    accel.Units `json:"other,omitempty"`
}

// Allocation is what a pod holds of a device.
type Allocation struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Kind is the index of the resource in Node.Kinds.
	Kind  int         `json:"kind,omitempty"`
	Units accel.Units `json:"units"`
	// Holds is Units for people where that says more: "4 of 8", "whole", "::0 ::3".
	Holds string `json:"holds,omitempty"`
	// Since is when the pod was created, in seconds since 1970.
	Since int64 `json:"since"`
	// Planned is true until the node has confirmed the allocation.
	Planned bool `json:"planned,omitempty"`
	// AllocatedBytes and UsedBytes are measured; nil if they are not known.
	AllocatedBytes *uint64 `json:"allocatedBytes,omitempty"`
	UsedBytes      *uint64 `json:"usedBytes,omitempty"`
}

// Use is what is in use of a device's memory, in bytes.
type Use struct {
	Total uint64 `json:"total"`
	Used  uint64 `json:"used"`
	// Others is the part that the device's pods do not use: processes of the host, of pods that hold
	// nothing of it, and of unknown pods.
	Others uint64 `json:"others,omitempty"`
	// Problem is why nothing is known.
	Problem string `json:"problem,omitempty"`
}

// NodeOf returns what is drawn of a node.
func NodeOf(node *v1.Node, pods []*v1.Pod) Node {
	n := Node{Name: node.Name, Zone: node.Labels[v1.LabelTopologyZone], Closed: closed(node), Devices: []Device{}}
	shown, err := collect.Of(node, pods)
	if err != nil {
		n.Problem = err.Error()
	}
	for i := range shown {
		n.add(&shown[i])
	}
	n.foldBoards()
	n.sort()
	return n
}

func closed(node *v1.Node) []string {
	var out []string
	if node.Spec.Unschedulable {
		out = append(out, "cordoned")
	}
	for _, c := range node.Status.Conditions {
		if c.Type == v1.NodeReady && c.Status != v1.ConditionTrue {
			out = append(out, "not ready")
		}
	}
	return out
}

// add adds the devices of one resource. A device that is offered as several resources is one.
func (n *Node) add(shown *inspect.Node) {
	kind := len(n.Kinds)
	n.Kinds = append(n.Kinds, Kind{shown.Resource, shown.Shared()})
	for i := range shown.Devices {
		from := &shown.Devices[i]
		// A board has the id of its first chip.
		at := slices.IndexFunc(n.Devices, func(d Device) bool { return d.ID == from.UUID && d.Chips == from.Chips })
		if at < 0 {
			at = len(n.Devices)
			n.Devices = append(n.Devices, Device{ID: from.UUID, Index: accel.IndexText(from.ID), Model: from.Model, Board: from.Board,
				Chips: from.Chips, NUMA: from.NUMANode, Profile: from.Profile, Parent: from.Parent})
		}
		d := &n.Devices[at]
		d.Offers = append(d.Offers, Offer{Kind: kind, Total: from.Total, Used: from.Used, Withheld: from.Withheld,
			Other: max(from.Total-from.Used-from.Withheld-from.Available, 0)})
		if from.Isolation != nil {
			d.Isolation = from.Isolation.Memory
		}
		switch {
		case !from.Quarantined.IsZero():
			d.State, d.Reason = StateQuarantine, from.Reason
		case from.Unhealthy && !strings.HasPrefix(from.Reason, accel.ReasonGivenOut):
			d.State, d.Reason = StateUnhealthy, from.Reason
		}
		for _, p := range from.Pods {
			d.Pods = append(d.Pods, allocationOf(kind, &p))
		}
	}
	for _, p := range shown.Unplaced {
		n.Unplaced = append(n.Unplaced, allocationOf(kind, &p))
	}
}

// foldBoards draws a board that is offered whole and by chip once: as the board while pods hold it
// whole, else as its chips, which then have the board's offers as well.
func (n *Node) foldBoards() {
	for _, board := range slices.Clone(n.Devices) {
		isChip := func(d Device) bool { return d.Chips <= 1 && d.Board == board.Board }
		if board.Chips <= 1 || board.Board == "" || !slices.ContainsFunc(n.Devices, isChip) {
			continue
		}
		if slices.ContainsFunc(board.Offers, func(o Offer) bool { return o.Used > 0 }) {
			n.Devices = slices.DeleteFunc(n.Devices, func(d Device) bool { return isChip(d) && len(d.Pods) == 0 })
			continue
		}
		n.Devices = slices.DeleteFunc(n.Devices, func(d Device) bool { return d.ID == board.ID && d.Chips == board.Chips })
		for i := range n.Devices {
			if d := &n.Devices[i]; isChip(*d) {
				d.Offers = append(d.Offers, board.Offers...)
			}
		}
	}
}

func allocationOf(kind int, p *inspect.Pod) Allocation {
	a := Allocation{Namespace: p.Namespace, Name: p.Name, Kind: kind, Units: p.Used, Since: p.CreateTime.Unix(), Planned: !p.Confirmed}
	if holds := p.Holds(); holds != strconv.FormatInt(int64(p.Used), 10) {
		a.Holds = holds
	}
	return a
}

// sort orders devices as their vendors number them; those of another model are other devices with
// the same numbers.
func (n *Node) sort() {
	number := func(d *Device) int { // of a partition, that of the device that it is cut from
		device, _, _ := strings.Cut(d.Index, ":")
		at, _ := strconv.Atoi(device) // IndexText has written it
		return at
	}
	slices.SortStableFunc(n.Devices, func(a, b Device) int {
		return cmp.Or(cmp.Compare(n.vendorOf(&a), n.vendorOf(&b)), cmp.Compare(number(&a), number(&b)), cmp.Compare(a.Index, b.Index),
			cmp.Compare(a.ID, b.ID))
	})
	if len(n.Devices) > 0 {
		n.Model = n.Devices[0].Model
	}
	for i := range n.Devices {
		if d := &n.Devices[i]; d.Model == n.Model {
			d.Model = ""
		}
	}
}

// vendorOf is the domain of the device's resources.
func (n *Node) vendorOf(d *Device) string {
	if len(d.Offers) == 0 {
		return ""
	}
	domain, _, _ := strings.Cut(string(n.Kinds[d.Offers[0].Kind].Resource), "/")
	return domain
}

// Measure sets what is in use, in place of what was before. A nil report says that nothing is known.
func (n *Node) Measure(report *wire.UsageReport) {
	for i := range n.Devices {
		n.Devices[i].measure(report)
	}
}

func (d *Device) measure(report *wire.UsageReport) {
	d.Use = nil
	for k := range d.Pods {
		d.Pods[k].AllocatedBytes, d.Pods[k].UsedBytes = nil, nil
	}
	// A report has the chips of a board, and does not name the board.
	if report == nil || d.Chips > 1 {
		return
	}
	at := slices.IndexFunc(report.Devices, func(u wire.DeviceUsage) bool { return u.Device == d.ID })
	if at < 0 {
		return
	}
	u := &report.Devices[at]
	d.Use = &Use{Total: u.MemoryBytes, Used: u.UsedBytes, Others: u.SystemBytes + u.ForeignBytes + u.UnknownBytes, Problem: u.Problem}
	for k := range d.Pods {
		p := &d.Pods[k]
		var allocated, used uint64
		known, measured := true, false
		for _, c := range u.Containers {
			if c.Namespace != p.Namespace || c.Pod != p.Name {
				continue
			}
			measured = true
			if c.AllocatedBytes != nil {
				allocated += *c.AllocatedBytes
			}
			if known = known && c.UsedBytes != nil; known {
				used += *c.UsedBytes
			}
		}
		if measured && known {
			p.UsedBytes = &used
		}
		if measured && allocated > 0 {
			p.AllocatedBytes = &allocated
		}
	}
}

// unseen returns what is known of a node that may not be read, from the pods on it: the devices of
// planned allocations.
func unseen(name string, pods []*v1.Pod) Node {
	n := Node{Name: name, Devices: []Device{}}
	for _, pod := range pods {
		grant, err := wire.DecodeGrantUnverified(pod.Annotations[wire.GrantAnnotation])
		if err != nil || grant.Node != name {
			continue
		}
		devices := append([]accel.GrantedDevice{{Device: grant.Device, Index: grant.Index, DeviceUnits: grant.DeviceUnits}}, grant.More...)
		units := grant.Units / accel.Units(len(devices))
		kind := slices.IndexFunc(n.Kinds, func(k Kind) bool { return k.Resource == grant.Resource })
		if kind < 0 {
			kind = len(n.Kinds)
			n.Kinds = append(n.Kinds, Kind{Resource: grant.Resource})
		}
		for _, one := range devices {
			at := slices.IndexFunc(n.Devices, func(d Device) bool { return d.ID == one.Device })
			if at < 0 {
				at = len(n.Devices)
				n.Devices = append(n.Devices, Device{ID: one.Device, Index: accel.IndexText(one.Index),
					Offers: []Offer{{Kind: kind, Total: one.DeviceUnits}}})
			}
			d := &n.Devices[at]
			d.Offers[0].Used += units
			shown := inspect.Pod{Namespace: pod.Namespace, Name: pod.Name, Used: units, Of: grant.Units, Cards: len(devices),
				CreateTime: pod.CreationTimestamp.Time, Confirmed: grant.Confirmed}
			d.Pods = append(d.Pods, allocationOf(kind, &shown))
		}
	}
	n.sort()
	return n
}
