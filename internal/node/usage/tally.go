package usage

import (
	"cmp"
	"slices"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/cgroup"
)

// tally adds up what is in use of one device.
type tally struct {
	rows []*row
	// system and foreign are bytes.
	system, foreign uint64
}

// row is a container that holds something of the device, or the rest of its pod.
type row struct {
	usage wire.ContainerUsage
	// used is the memory of the processes, in bytes; unknown is true if that of one is not
	// known.
	used    uint64
	unknown bool
}

// newTally returns a tally with a row for each container.
func newTally(holders []Container) *tally {
	t := &tally{}
	holders = slices.Clone(holders)
	slices.SortFunc(holders, func(a, b Container) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.PodUID, b.PodUID),
			cmp.Compare(a.Name, b.Name), cmp.Compare(a.Resource, b.Resource))
	})
	for i, c := range holders {
		var allocated *uint64
		if c.Bytes > 0 {
			allocated = &c.Bytes
		}
		if i > 0 {
			before := holders[i-1]
			if before.Namespace == c.Namespace && before.Pod == c.Pod && before.PodUID == c.PodUID && before.Name == c.Name {
				of := &t.rows[len(t.rows)-1].usage
				of.AllocatedBytes = wire.SumKnown(of.AllocatedBytes, allocated)
				continue
			}
		}
		t.rows = append(t.rows, &row{usage: wire.ContainerUsage{
			Namespace: c.Namespace, Pod: c.Pod, PodUID: c.PodUID, Container: c.Name, Resource: c.Resource, AllocatedBytes: allocated,
		}})
	}
	return t
}

// memory returns what a process uses, 0 if that is not known.
func memory(p backend.Process) uint64 {
	if p.Memory == nil {
		return 0
	}
	return *p.Memory
}

// add counts a process of a pod, and reports whether the pod holds something of the device.
func (t *tally) add(owner cgroup.Owner, p backend.Process, pods Pods) bool {
	of := t.pod(owner.PodUID, pods)
	if of == nil {
		t.foreign += memory(p)
		return false
	}
	name := ""
	if c := pods.ByContainer[owner.Container]; c.Namespace == of.usage.Namespace && c.Pod == of.usage.Pod {
		name = c.Name
	}
	t.container(of, name).add(p)
	return true
}

// pod returns a row of the pod with a UID in the name of its control group, nil if it
// holds nothing of the device. A pod that replaced another of the same name has a UID of
// its own, so that the UID counts if there is one.
func (t *tally) pod(uid string, pods Pods) *row {
	if i := slices.IndexFunc(t.rows, func(r *row) bool { return r.usage.PodUID == uid }); i >= 0 {
		return t.rows[i]
	}
	name := pods.ByUID[uid] // no row has the zero value's name
	i := slices.IndexFunc(t.rows, func(r *row) bool { return r.usage.Namespace == name.Namespace && r.usage.Pod == name.Name })
	if i < 0 {
		return nil
	}
	return t.rows[i]
}

// container returns the row of a container of the same pod as another row, or that of
// the rest of the pod if it has none or name is "".
func (t *tally) container(of *row, name string) *row {
	find := func(name string) int {
		return slices.IndexFunc(t.rows, func(r *row) bool {
			return r.usage.PodUID == of.usage.PodUID && r.usage.Namespace == of.usage.Namespace && r.usage.Pod == of.usage.Pod &&
				r.usage.Container == name
		})
	}
	for _, name := range []string{name, ""} {
		if i := find(name); i >= 0 {
			return t.rows[i]
		}
	}
	rest := &row{usage: wire.ContainerUsage{
		Namespace: of.usage.Namespace, Pod: of.usage.Pod, PodUID: of.usage.PodUID, Resource: of.usage.Resource,
	}}
	t.rows = append(t.rows, rest)
	return rest
}

// add counts a process of the container.
func (r *row) add(p backend.Process) {
	r.usage.Processes++
	r.used += memory(p)
	r.unknown = r.unknown || p.Memory == nil
	if p.Utilization != nil {
		before := 0.0
		if r.usage.Utilization != nil {
			before = *r.usage.Utilization
		}
		// The parts are of moments that differ a little.
		r.usage.Utilization = new(min(before+*p.Utilization, 1))
	}
}

// finish writes what was added up into the report of the device, of which used bytes
// are in use.
func (t *tally) finish(report *wire.DeviceUsage, used uint64) {
	for _, r := range t.rows {
		if !r.unknown {
			r.usage.UsedBytes = &r.used
		}
	}
	report.UsedBytes, report.SystemBytes, report.ForeignBytes = used, t.system, t.foreign
	report.Containers = t.containers()
	report.UnknownBytes = unknown(report)
}

// containers returns the rows in their order.
func (t *tally) containers() []wire.ContainerUsage {
	slices.SortFunc(t.rows, func(a, b *row) int {
		return cmp.Or(cmp.Compare(a.usage.Namespace, b.usage.Namespace), cmp.Compare(a.usage.Pod, b.usage.Pod),
			cmp.Compare(a.usage.Container, b.usage.Container), cmp.Compare(a.usage.PodUID, b.usage.PodUID))
	})
	var out []wire.ContainerUsage
	for _, r := range t.rows {
		out = append(out, r.usage)
	}
	return out
}
