package agent

import (
	"slices"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
)

// selector chooses cards: those that match any entry of Models, IDs, Indexes or
// Partitions (or all, when the four are empty) and that Except does not choose. What
// chooses a device chooses its partitions. A nil selector chooses all.
type selector struct {
	// Models are whole product names, with "*" for any text.
	Models []string
	// IDs are uuids, of a card or of any chip of it.
	IDs []accel.DeviceID
	// Indexes are the vendor's numbers.
	Indexes []int
	// Partitions are accel.PartitionIndex of partitions.
	Partitions []int
	// Except takes cards out again, nil for none.
	Except *selector
}

// matches reports whether the card is chosen.
func (s *selector) matches(c sharing.Card) bool {
	if s == nil {
		return true
	}
	return s.names(c) && (s.Except == nil || !s.Except.matches(c))
}

func (s *selector) names(c sharing.Card) bool {
	if len(s.Models)+len(s.IDs)+len(s.Indexes)+len(s.Partitions) == 0 {
		return true
	}
	device, _, _ := accel.SplitIndex(c.Index)
	return slices.Contains(s.Indexes, device) || slices.Contains(s.Partitions, c.Index) ||
		slices.ContainsFunc(s.IDs, func(id accel.DeviceID) bool {
			return id == c.ID || slices.Contains(c.Chips, id) || id == c.Parent && c.Parent != ""
		}) ||
		slices.ContainsFunc(s.Models, func(pattern string) bool { return config.MatchModel(pattern, c.Model) })
}

func selectorOf(d *config.DeviceSelector) *selector {
	if d == nil {
		return nil
	}
	out := &selector{Models: d.Models, Indexes: d.Indexes, Except: selectorOf(d.Except)}
	for _, id := range d.IDs {
		out.IDs = append(out.IDs, accel.DeviceID(id))
	}
	for _, text := range d.Partitions {
		if index, ok := accel.ParsePartition(text); ok { // as validation has checked
			out.Partitions = append(out.Partitions, index)
		}
	}
	return out
}

// chooserOf returns which cards a resource is made of, by its selector and by what it
// offers of devices that may be cut into partitions.
func chooserOf(c *config.Resource, strategy config.MigStrategy) func(sharing.Card) bool {
	chosen := selectorOf(c.Devices)
	return func(card sharing.Card) bool { return offers(c, strategy, card.Device) && chosen.matches(card) }
}

// claimsChooser returns which cards of a vendor are for claims, on a node that divides them: those that
// resources of the path dra choose, however these offer them.
func claimsChooser(c *config.NodeConfig, vendor string) func(sharing.Card) bool {
	var chosen []*selector
	for i := range c.Resources {
		if r := &c.Resources[i]; r.Vendor == vendor && c.PathOf(r) == config.PathDRA {
			chosen = append(chosen, selectorOf(r.Devices))
		}
	}
	return func(card sharing.Card) bool {
		return slices.ContainsFunc(chosen, func(s *selector) bool { return s.matches(card) })
	}
}

// offers reports whether a resource may be made of the device, whichever it selects.
// Memory is cut neither out of a partition nor out of a device that may be cut into
// partitions at any time.
func offers(c *config.Resource, strategy config.MigStrategy, d accel.Device) bool {
	switch {
	case d.Profile == "" && !d.Partitioned:
		return c.Profile == ""
	case c.Mode == config.ModeMemory:
		return false
	case d.Partitioned:
		return c.Profile == "" && (strategy == config.MigNone || strategy == "")
	case strategy == config.MigMixed:
		return c.Profile != "" && accel.ProfileName(c.Profile) == accel.ProfileName(d.Profile)
	}
	return c.Profile == ""
}

// cutOf reads how a resource cuts devices into slots.
func cutOf(r *config.Resource) alloc.Cut {
	out := alloc.Cut{SplitBoards: r.SplitBoards}
	if r.Allocation == config.PackedAllocation {
		out.Policy = sharing.Packed
	}
	if r.Mode != config.ModeTimeSlicing {
		return out
	}
	replicas, several := max(r.Replicas, 1), r.Replicas > 1
	var rules []replicaRule
	for i := range r.ReplicasFor {
		rule := replicaRule{Devices: *selectorOf(&r.ReplicasFor[i].Devices), Replicas: max(r.ReplicasFor[i].Replicas, 1)}
		rules, several = append(rules, rule), several || rule.Replicas > 1
	}
	out.Replicas = func(c sharing.Card) int { return replicasFor(c, rules, replicas) }
	// With one replica each, several are several whole devices.
	out.Single = r.FailRequestsGreaterThanOne && several
	return out
}

// replicaRule gives the cards that it matches a number of replicas.
type replicaRule struct {
	Devices  selector
	Replicas int
}

// replicasFor returns the number of replicas of the first rule that matches the
// card, otherwise when none does.
func replicasFor(c sharing.Card, rules []replicaRule, otherwise int) int {
	for i := range rules {
		if rules[i].Devices.matches(c) {
			return rules[i].Replicas
		}
	}
	return otherwise
}
