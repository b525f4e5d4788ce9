package nodeagent

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/divvy-gpu/divvy/internal/deviceplugin"
	"github.com/divvy-gpu/divvy/internal/sharing"
)

// discoveryLimit is how long a question of kubelet waits for the first discovery.
const discoveryLimit = 5 * time.Second

// early is implemented by parts that can offer what the state file describes before
// the devices are found. A vendor's library may take seconds to load, and kubelet
// rejects every pod that arrives while a resource has no device plugin. What it asks
// meanwhile waits for the discovery.
type early interface {
	// early returns the units that an earlier run offered, nil if there are none.
	early() []deviceplugin.Unit
}

// offerEarly lets kubelet know the units of the state files.
func (r *offering) offerEarly() {
	for i, p := range r.parts {
		e, ok := p.(early)
		if !ok {
			continue
		}
		if units := e.early(); units != nil {
			_ = shelf{r, i}.SetUnits(units) // after the discovery its error is reported
		}
	}
}

// discovered notes that the parts have the result of a discovery.
func (r *offering) discovered() { r.once.Do(func() { close(r.found) }) }

// awaitDiscovery waits until the devices are known.
func (r *offering) awaitDiscovery(ctx context.Context) error {
	select {
	case <-r.found:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(discoveryLimit):
		return errors.New("the devices were not found yet; divvy-node has just started")
	}
}

// early implements early.
func (p *memoryPool) early() []deviceplugin.Unit {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.lost || p.draining != "" || p.looked {
		return nil
	}
	var out []deviceplugin.Unit
	var ids []string
	for _, r := range p.layout.Ranges() {
		ids = p.layout.IDs(ids[:0], r.Device)
		for _, id := range ids {
			out = append(out, deviceplugin.Unit{ID: id})
		}
	}
	p.offeredEarly = out != nil
	return out
}

// early implements early.
func (p *slotPool) early() []deviceplugin.Unit {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.draining != "" || p.looked {
		return nil
	}
	nodes := map[string][]int{}
	for _, c := range p.remembered {
		card := unstored(c)
		for _, id := range sharing.SlotIDs(nil, card.ID, p.rules.replicasOf(card)) {
			nodes[id] = card.NUMANodes
		}
	}
	for id := range p.holds {
		if s, err := sharing.ParseSlotID(id); err == nil {
			nodes[id] = p.remembered[s.Device].NUMANodes
		}
	}
	var out []deviceplugin.Unit
	for id, numa := range nodes {
		out = append(out, deviceplugin.Unit{ID: id, NUMANodes: numa})
	}
	slices.SortFunc(out, func(a, b deviceplugin.Unit) int { return strings.Compare(a.ID, b.ID) })
	p.offeredEarly = out != nil
	return out
}

// none is the list of a part that has nothing to offer: nil, by which kubelet keeps
// what it has, or no unit at all in place of those of early.
func none(offeredEarly bool) []deviceplugin.Unit {
	if offeredEarly {
		return []deviceplugin.Unit{}
	}
	return nil
}
