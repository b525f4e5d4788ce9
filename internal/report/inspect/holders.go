package inspect

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// Holder is a pod that has whole devices or time slices of a resource.
type Holder struct {
	Pod     accel.PodRef
	Created time.Time
	// Units are how many it asks for.
	Units accel.Units
	// IDs are those that it holds, "<uuid>" or "<uuid>::<replica>"; none until
	// the node has said. More than Units count as none.
	IDs []string
}

// NodeFromHolders makes one node of a report, with details, of a resource that
// is given out as whole devices or time slices.
func NodeFromHolders(name string, inv accel.Inventory, holders []Holder) Node {
	node := Node{Name: name, Resource: inv.Resource, Unit: inv.Unit, Devices: make([]Device, 0, len(inv.Shares))}
	holders = slices.Clone(holders)
	slices.SortFunc(holders, func(a, b Holder) int {
		return cmp.Or(a.Created.Compare(b.Created), cmp.Compare(a.Pod.Namespace, b.Pod.Namespace),
			cmp.Compare(a.Pod.Name, b.Pod.Name), cmp.Compare(a.Pod.UID, b.Pod.UID))
	})
	at := make(map[string]int, len(inv.Shares))
	for i, s := range inv.Shares {
		at[string(s.ID)] = i
		node.Devices = append(node.Devices, deviceOf(s, 0, []Pod{}))
		node.Total += s.Units
	}
	for _, h := range holders {
		if accel.Units(len(h.IDs)) > h.Units {
			// Kubelet gives no pod more than it asks for, so the node did not
			// write that.
			h.IDs = nil
		}
		if len(h.IDs) == 0 && h.Units > 0 {
			node.Used += h.Units
			node.Unplaced = append(node.Unplaced, h.pod(h.Units, nil))
			continue
		}
		node.Used += accel.Units(len(h.IDs))
		on := map[int][]string{}
		var lost []string
		for _, id := range h.IDs {
			device, whole := at[id]
			if !whole {
				sliced := false
				if cut := strings.LastIndex(id, "::"); cut >= 0 {
					device, sliced = at[id[:cut]]
				}
				if !sliced {
					lost = append(lost, id)
					continue
				}
			}
			on[device] = append(on[device], id)
		}
		for i := range node.Devices {
			if ids := on[i]; len(ids) > 0 {
				d := &node.Devices[i]
				d.Used += accel.Units(len(ids))
				d.Available = max(d.Total-d.Used, 0)
				d.Pods = append(d.Pods, h.pod(accel.Units(len(ids)), ids))
			}
		}
		if len(lost) > 0 {
			node.Unplaced = append(node.Unplaced, h.pod(accel.Units(len(lost)), lost))
		}
	}
	node.Available = max(node.Total-node.Used, 0)
	node.withdraw()
	return node
}

// pod makes one pod of a report, with details.
func (h *Holder) pod(units accel.Units, ids []string) Pod {
	return Pod{
		Name: h.Pod.Name, Namespace: h.Pod.Namespace, UID: h.Pod.UID,
		CreateTime: h.Created.UTC().Truncate(time.Second), Used: units, Confirmed: len(h.IDs) > 0, IDs: ids,
	}
}
