package sharing

import (
	"slices"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/accel"
)

// Selector chooses cards: those that match any entry of Models, IDs or Indexes
// (or all, when the three are empty) and that Except does not choose. A nil
// Selector chooses all.
type Selector struct {
	// Models are whole product names, with "*" for any text.
	Models []string
	// IDs are uuids, of a card or of any chip of it.
	IDs []accel.DeviceID
	// Indexes are the vendor's numbers.
	Indexes []int
	// Except takes cards out again, nil for none.
	Except *Selector
}

// Matches reports whether the card is chosen.
func (s *Selector) Matches(c Card) bool {
	if s == nil {
		return true
	}
	return s.names(c) && (s.Except == nil || !s.Except.Matches(c))
}

func (s *Selector) names(c Card) bool {
	if len(s.Models)+len(s.IDs)+len(s.Indexes) == 0 {
		return true
	}
	return slices.Contains(s.Indexes, c.Index) ||
		slices.ContainsFunc(s.IDs, func(id accel.DeviceID) bool { return id == c.ID || slices.Contains(c.Chips, id) }) ||
		slices.ContainsFunc(s.Models, func(pattern string) bool { return config.MatchModel(pattern, c.Model) })
}

// Select returns the cards that s chooses, in their order.
func Select(cards []Card, s *Selector) []Card {
	var out []Card
	for _, c := range cards {
		if s.Matches(c) {
			out = append(out, c)
		}
	}
	return out
}

// ReplicaRule gives the cards that it matches a number of replicas.
type ReplicaRule struct {
	Devices  Selector
	Replicas int
}

// Replicas returns the number of replicas of the first rule that matches the
// card, otherwise when none does.
func Replicas(c Card, rules []ReplicaRule, otherwise int) int {
	for i := range rules {
		if rules[i].Devices.Matches(c) {
			return rules[i].Replicas
		}
	}
	return otherwise
}
