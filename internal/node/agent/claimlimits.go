package agent

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/dra"
	"github.com/divvy-gpu/divvy/internal/node/usage"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// claimLimits say which claims have limits in the driver. A nil pointer is for none.
type claimLimits struct {
	// chosen choose the devices, by vendor.
	chosen      map[string][]func(sharing.Card) bool
	records     *records
	discoveries *discoveries
	desk        *limitDesk
}

func newClaimLimits(a *Agent) *claimLimits {
	c := &a.o.Config
	l := &claimLimits{chosen: map[string][]func(sharing.Card) bool{}, records: a.records, discoveries: a.discoveries, desk: a.cdi.limits}
	for i := range c.Resources {
		if r := &c.Resources[i]; c.PathOf(r) == config.PathDRA && r.Mode == config.ModeMemory && r.Isolation == config.IsolationDriver {
			l.chosen[r.Vendor] = append(l.chosen[r.Vendor], chooserOf(r, c.Vendors[r.Vendor].Partitions()))
		}
	}
	return l
}

// of reports whether the memory that claims have of some of a vendor's devices is limited.
func (l *claimLimits) of(vendor string) bool { return l != nil && len(l.chosen[vendor]) > 0 }

// card reports whether claims that share the memory of a card have limits.
func (l *claimLimits) card(vendor string, card sharing.Card) bool {
	return slices.ContainsFunc(l.chosen[vendor], func(chooses func(sharing.Card) bool) bool { return chooses(card) })
}

// chip is card for a chip that claims can share.
func (l *claimLimits) chip(vendor string, chip accel.DeviceID) bool {
	if !l.of(vendor) {
		return false
	}
	e, done := l.records.owner.use()
	defer done()
	return slices.ContainsFunc(e.Claims.Devices(vendor), func(one alloc.ClaimDevice) bool {
		return one.Shared && one.Card.ID == chip && l.card(vendor, one.Card)
	})
}

// attested is what keeps apart the claims that share a card. The time of the last pass is left out:
// slices do not change with it, and the passes say when the tier is lost.
func (l *claimLimits) attested(vendor string, card sharing.Card) accel.Isolation {
	if !l.card(vendor, card) {
		return accel.Isolation{}
	}
	stated, _ := l.desk.isolation(card.ID) // nothing with an error
	return accel.Isolation{Memory: stated.Memory, Compute: stated.Compute, Backend: stated.Backend}
}

// hooks returns those that bound what a container gets of a chip: its part of the memory, or that clear
// a limit for a whole device and for time slices. While containers cannot be bounded there are none, and
// the node states that nothing is promised.
func (l *claimLimits) hooks(vendor string, p alloc.Portion) ([]*cdispecs.Hook, error) {
	if !l.of(vendor) || p.Bytes > 0 && !l.chip(vendor, p.Chip) {
		return nil, nil
	}
	mib := limitMiB(uint64(max(p.Bytes, 0)))
	if p.Bytes > 0 {
		if err := l.desk.besideContext(vendor, p.Chip, mib); err != nil {
			return nil, err
		}
	}
	one, ok := l.desk.device(vendor, p.Chip, mib)
	if !ok || l.partition(vendor, p.Chip) {
		return nil, nil
	}
	return one.ContainerEdits.Hooks, nil
}

// partition reports whether a chip is a partition, or is cut into some: the driver limits none of these.
func (l *claimLimits) partition(vendor string, chip accel.DeviceID) bool {
	_, all, _ := l.discoveries.all()
	return slices.ContainsFunc(all[vendor].found.Devices, func(one accel.Device) bool {
		return one.ID == chip && (one.Parent != "" || one.Partitioned)
	})
}

// Sized implements dra.Keeper.
func (d *claimDesk) Sized(vendor string) bool { return d.limits.of(vendor) }

// redescribe makes the drivers describe again what containers get with claims.
func (d *claimDesk) redescribe() {
	for _, s := range d.servers {
		s.Redescribe()
	}
}

// containers returns what the containers of pods have of claims, as the resource that is named after the
// driver. Of plain init containers, only those that run are among them.
func (d *claimDesk) containers(pods []*corev1.Pod) []usage.Container {
	e, done := d.records.owner.use()
	held := slices.DeleteFunc(e.Claims.All(), func(c alloc.Claim) bool { return !c.Prepared })
	done()
	if len(held) == 0 {
		return nil
	}
	holders := dra.Holders(held)
	var out []usage.Container
	for _, pod := range pods {
		if terminal(pod) {
			continue
		}
		for _, use := range dra.Uses(pod) {
			if ended(pod, use.Container) {
				continue
			}
			for vendor, portions := range holders(use) {
				for _, p := range portions {
					out = append(out, usage.Container{Namespace: pod.Namespace, Pod: pod.Name, PodUID: cgroupUID(pod), Name: use.Container,
						Resource: accel.Resource(wire.Driver(vendor)), Device: p.Chip, Bytes: uint64(max(p.Bytes, 0))})
				}
			}
		}
	}
	return out
}

// ended reports whether a container is a plain init container that does not run.
func ended(pod *corev1.Pod, container string) bool {
	for i := range pod.Spec.InitContainers {
		c := &pod.Spec.InitContainers[i]
		if c.Name != container || kube.IsSidecar(c) {
			continue
		}
		return !slices.ContainsFunc(pod.Status.InitContainerStatuses, func(s corev1.ContainerStatus) bool {
			return s.Name == container && s.State.Running != nil
		})
	}
	return false
}
