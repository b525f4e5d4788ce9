package agent

import (
	"slices"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
)

// selector chooses cards: those that match any entry of Models, IDs or Indexes
// (or all, when the three are empty) and that Except does not choose. A nil
// selector chooses all.
type selector struct {
	// Models are whole product names, with "*" for any text.
	Models []string
	// IDs are uuids, of a card or of any chip of it.
	IDs []accel.DeviceID
	// Indexes are the vendor's numbers.
	Indexes []int
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
	if len(s.Models)+len(s.IDs)+len(s.Indexes) == 0 {
		return true
	}
	return slices.Contains(s.Indexes, c.Index) ||
		slices.ContainsFunc(s.IDs, func(id accel.DeviceID) bool { return id == c.ID || slices.Contains(c.Chips, id) }) ||
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
	return out
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
