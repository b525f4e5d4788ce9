package fragmentation

import "github.com/divvy-gpu/divvy/internal/core/place"

// Names of the terms of a rating: by how much each part of the node's potential drops.
const (
	// TermWaste is the free parts of devices that no mixture of usual pieces fills.
	TermWaste = "waste"
	// TermMismatch is what is free beside the CPU and memory that usual pods take with it.
	TermMismatch = "mismatch"
	// TermWholeSlots is what whole slots for pods of several devices are worth.
	TermWholeSlots = "wholeSlots"
	// TermModels is what the free units of sought-after models are worth.
	TermModels = "models"
)

// Explain implements place.Explainer.
func (f *Policy) Explain(n *place.Node, a *place.Ask, slots []int) []place.Term {
	p := f.prices.Load()
	if p == nil {
		return place.Binpack.(place.Explainer).Explain(n, a, slots) //nolint:forcetypeassert // it is one
	}
	var space, spaceThen [16]cell
	before := p.stateOf(n, space[:0])
	after := before.charged(n, a)
	p.take(&after, n, a, slots, spaceThen[:0])
	terms := place.ConnectionsTerm(n, slots)
	then := p.parts(&after)
	for i, part := range p.parts(&before) {
		terms = append(terms, place.Term{Name: partNames[i], Value: part - then[i]})
	}
	return terms
}

// partNames are the names of the parts of a potential.
var partNames = [...]string{TermWaste, TermMismatch, TermWholeSlots, TermModels}

// parts are the parts of the potential of a state, see potential.
func (p *snapshot) parts(st *state) [len(partNames)]int64 {
	waste, mismatch := p.fixedParts(st)
	return [...]int64{waste, mismatch, -p.slotsWorth(p.memo.of(p.statics, st)), -p.modelsWorth(st)}
}
