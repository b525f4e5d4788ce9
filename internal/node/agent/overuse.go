package agent

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/overuse"
	"github.com/divvy-gpu/divvy/internal/platform/events"
)

// Reasons of the node's condition.
const (
	reasonOver       = "ContainersOverAllocation"
	reasonWithin     = "ContainersWithinAllocation"
	reasonUnmeasured = "UseNotMeasured"
)

// overuseDesk has what the last pass has shown of overuse, for the loop, which publishes it.
// It is safe for concurrent use.
type overuseDesk struct {
	// enabled is true if use is measured.
	enabled bool
	// withholds is true if excess is taken from the free units of devices.
	withholds bool

	mu sync.Mutex
	// last is the last pass; guarded by mu.
	last lastPass
}

// lastPass is what the last pass has shown. The zero value is that of none.
type lastPass struct {
	// at is when it was made, and until when it does not count any more, without another.
	at, until time.Time
	current   []overuse.Episode
	// conclusive is true if it proves something.
	conclusive bool
	// settled is true if there were enough passes to find what an earlier run has found.
	settled bool
}

func (d *overuseDesk) set(p lastPass) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.last = p
}

func (d *overuseDesk) get() lastPass {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.last
}

// proven are the episodes that the pass has shown and from which more than reports may follow.
func (p lastPass) proven(now time.Time) (out []overuse.Episode) {
	if now.Before(p.until) {
		for _, e := range p.current {
			if e.Assured && !e.Since.IsZero() {
				out = append(out, e)
			}
		}
	}
	return out
}

// withhold takes what containers use beyond their allocations from the units of an inventory
// that new pods may have. published returns the inventory that is published; a daemon that has
// just started keeps what is withheld there.
func (d *overuseDesk) withhold(in *accel.Inventory, published func(accel.Resource) (accel.Inventory, bool)) {
	unit, err := sharing.ParseMemoryUnit(in.Unit)
	if err != nil || !d.withholds {
		return // the resource is not counted in memory
	}
	last := d.get()
	if !last.settled {
		before, ok := published(in.Resource)
		if !ok || before.Unit != in.Unit {
			return
		}
		in.Shares = slices.Clone(in.Shares)
		for i := range in.Shares {
			s := &in.Shares[i]
			if j := slices.IndexFunc(before.Shares, func(b accel.Share) bool { return b.ID == s.ID }); j >= 0 {
				s.Withheld = min(before.Shares[j].Withheld, s.Units)
			}
		}
		return
	}
	excess := map[accel.DeviceID]uint64{}
	for _, e := range last.current {
		if e.Container.Resource == in.Resource && e.Assured {
			excess[e.Device] += e.Peak
		}
	}
	if len(excess) == 0 {
		return
	}
	in.Shares = slices.Clone(in.Shares)
	for i := range in.Shares {
		s := &in.Shares[i]
		s.Withheld = min(unit.Holding(excess[s.ID], s.MemoryBytes), s.Units)
	}
}

// settlingPasses is how many passes find all that an earlier run has found.
const settlingPasses = 5

// overuseWatch finds overuse in the passes of measured use, and reports it.
type overuseWatch struct {
	watch *overuse.Watch
	desk  *overuseDesk
	// passes is how many there were.
	passes int
	// lasts is how long a pass counts without another.
	lasts   time.Duration
	changed func()
	event   func(*corev1.Pod, events.Kind, string)
}

func newOveruseWatch(a *Agent) *overuseWatch {
	allowance := map[string]uint64{}
	for vendor, mib := range a.o.Config.Usage.Overuse.ContextAllowanceMiB {
		allowance[vendor] = uint64(max(mib, 0)) << 20
	}
	return &overuseWatch{watch: overuse.New(allowance), desk: a.overuse, changed: a.signals.wake.raise, event: a.tellPod,
		// A pass may take as long as the time between two.
		lasts: 3 * time.Duration(a.o.Config.Usage.Interval)}
}

// look takes in a pass over devices, and returns the episodes.
func (o *overuseWatch) look(devices []wire.DeviceUsage, models map[accel.DeviceID]string, pods []*corev1.Pod, now time.Time,
) []overuse.Episode {
	changes := o.watch.Look(overuse.Pass{
		Time: now, Devices: devices, Model: func(id accel.DeviceID) string { return models[id] },
		Started: func(row wire.ContainerUsage) (time.Time, bool) { return startOf(podOf(row, pods), row.Container) },
	})
	for _, e := range changes.Began {
		if pod := podOf(e.Container, pods); pod != nil {
			o.event(pod, events.DeviceMemoryOverused, describe(e))
		}
	}
	for _, e := range changes.Ended {
		if pod := podOf(e.Container, pods); pod != nil {
			o.event(pod, events.DeviceMemoryOveruseEnded, describe(e))
		}
	}
	// Events need the pod; the list needs its UID, which is not in the names of the control
	// groups of a static pod.
	current := slices.DeleteFunc(changes.Current, func(e overuse.Episode) bool { return podOf(e.Container, pods) == nil })
	for i := range current {
		current[i].Container.PodUID = string(podOf(current[i].Container, pods).UID)
	}
	o.passes++
	o.desk.set(lastPass{at: now, until: now.Add(o.lasts), current: current, conclusive: changes.Conclusive,
		settled: o.passes >= settlingPasses})
	if len(changes.Began)+len(changes.Ended) > 0 {
		o.changed()
	}
	return current
}

// podOf returns the pod of a row, nil if it is gone.
func podOf(row wire.ContainerUsage, pods []*corev1.Pod) *corev1.Pod {
	i := slices.IndexFunc(pods, func(p *corev1.Pod) bool {
		return p.Namespace == row.Namespace && p.Name == row.Pod && cgroupUID(p) == row.PodUID
	})
	if i < 0 {
		return nil
	}
	return pods[i]
}

// startOf returns when a container started to run; if the name is "", when the last of all
// of the pod's did. It is false for one that does not run.
func startOf(pod *corev1.Pod, name string) (last time.Time, runs bool) {
	if pod == nil {
		return time.Time{}, false
	}
	for _, s := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses, pod.Status.EphemeralContainerStatuses) {
		if state := s.State.Running; state != nil && (name == "" || name == s.Name) {
			runs = true
			if state.StartedAt.After(last) {
				last = state.StartedAt.Time
			}
		}
	}
	return last, runs
}

// describe says what an episode's container uses, for people.
func describe(e overuse.Episode) string {
	who := "The pod"
	if e.Container.Container != "" {
		who = "Container " + e.Container.Container
	}
	const mib = 1 << 20
	return fmt.Sprintf("%s uses %d MiB of %s device %s (%s); its allocation of %s is %d MiB", who, *e.Container.UsedBytes/mib, e.Vendor,
		accel.IndexText(e.Index), e.Device, e.Container.Resource, *e.Container.AllocatedBytes/mib)
}

// publish writes into the node's object which pods use more than their allocation: the list
// for the scheduler's side, and a condition for people.
func (d *overuseDesk) publish(ctx context.Context, p *publisher, now time.Time) error {
	node, err := p.current()
	if err != nil {
		return err
	}
	last := d.get()
	before := node.Annotations[wire.OveruseAnnotation]
	value, err := wire.EncodeOveruse(listOf(ctx, before, last.proven(now), last.at))
	if err != nil {
		return err
	}
	if value != before {
		if err := p.annotate(ctx, wire.OveruseAnnotation, value); err != nil {
			return fmt.Errorf("write which pods use more than their allocation: %w", err)
		}
	}
	if d.enabled && last.at.IsZero() {
		return nil // the condition is as an earlier run left it
	}
	var condition *corev1.NodeCondition
	if d.enabled {
		condition = conditionOf(last, now)
	}
	return p.publishCondition(ctx, node, wire.OveruseCondition, condition, now)
}

// listOf returns the list of a pass, or the one that is shown while that is not old and says
// the same but for the amounts, which change in each pass. Without another pass there is no
// other list: the reader takes a new one for a proof.
func listOf(ctx context.Context, before string, proven []overuse.Episode, at time.Time) wire.OveruseList {
	list := wire.OveruseList{Time: at.UTC().Truncate(time.Second)}
	for _, e := range proven[:min(len(proven), wire.MaxOveruse)] {
		c := e.Container
		list.Pods = append(list.Pods, wire.Overuse{
			Pod: accel.PodRef{UID: c.PodUID, Namespace: c.Namespace, Name: c.Pod}, Container: c.Container, Resource: c.Resource,
			Device: e.Device, AllocatedBytes: *c.AllocatedBytes, UsedBytes: *c.UsedBytes, Since: e.Since.UTC().Truncate(time.Second),
		})
	}
	slices.SortFunc(list.Pods, func(a, b wire.Overuse) int {
		return cmp.Or(cmp.Compare(a.Pod.UID, b.Pod.UID), cmp.Compare(a.Container, b.Container), cmp.Compare(a.Device, b.Device))
	})
	shown, err := wire.DecodeOveruse(before)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Could not parse the list of memory overuse on the node; writing it again")
		return list
	}
	same := slices.EqualFunc(shown.Pods, list.Pods, func(a, b wire.Overuse) bool {
		a.UsedBytes, b.UsedBytes = 0, 0
		return a == b
	})
	if age := list.Time.Sub(shown.Time); same && age >= 0 && age < wire.OveruseRefresh {
		return shown
	}
	return list
}

// conditionOf returns the condition without its times.
func conditionOf(last lastPass, now time.Time) *corev1.NodeCondition {
	c := &corev1.NodeCondition{Type: wire.OveruseCondition, Status: corev1.ConditionFalse, Reason: reasonWithin,
		Message: "no container uses more memory of a device than its allocation"}
	current := last.current
	switch {
	case !now.Before(last.until), len(current) == 0 && !last.conclusive:
		c.Status, c.Reason = corev1.ConditionUnknown, reasonUnmeasured
		c.Message = "the use of devices cannot be measured; the log of divvy-node has the reason"
		return c
	case len(current) == 0:
		return c
	}
	var names []string
	for _, e := range current {
		name := fmt.Sprintf("%s/%s", e.Container.Namespace, e.Container.Pod)
		if e.Container.Container != "" {
			name += "/" + e.Container.Container
		}
		names = append(names, fmt.Sprintf("%s on %s device %s", name, e.Vendor, accel.IndexText(e.Index)))
	}
	c.Status, c.Reason = corev1.ConditionTrue, reasonOver
	c.Message = "more memory in use than allocated: " + shortList(names)
	return c
}
