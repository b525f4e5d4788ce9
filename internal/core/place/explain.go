package place

import "github.com/divvy-gpu/divvy/internal/core/accel"

// Term is a part of a rating.
type Term struct {
	Name string `json:"name"`
	// Value is what the part adds: higher is better.
	Value int64 `json:"value"`
}

// Names of the terms of Binpack and Spread.
const (
	// TermConnections is how well several devices are connected.
	TermConnections = "connections"
	// TermLeft is what is left free on the devices, which counts against a node with
	// Binpack and for it with Spread.
	TermLeft = "freeLeft"
)

// Explainer is a Policy that says what its ratings are made of.
type Explainer interface {
	Policy
	// Explain returns the terms of the rating that a node has for the ask on these slots, on
	// which it fits. Their sum is what Choose returns if it chooses the same slots.
	Explain(n *Node, a *Ask, slots []int) []Term
}

// Explain implements Explainer.
func (p ordered) Explain(n *Node, a *Ask, slots []int) []Term {
	var left accel.Units
	for _, i := range slots {
		left += n.Slots[i].Free - a.Units
	}
	if len(slots) > 1 {
		left = min(left, maxLeft)
	}
	return append(ConnectionsTerm(n, slots), Term{TermLeft, p.rate(left)})
}

// ConnectionsTerm is the part of a rating of several devices that stands for their
// connections; none for one device, and where connections are not known.
func ConnectionsTerm(n *Node, slots []int) []Term {
	if len(slots) < 2 || n.Graph == nil {
		return nil
	}
	var connected int64
	for i, a := range slots {
		for _, b := range slots[:i] {
			connected += n.Graph.score(a, b)
		}
	}
	return []Term{{TermConnections, min(connected, maxConnected) << connectedAt}}
}

// Readable is the value of a term as people compare it: connections are rated far above
// all else.
func (t Term) Readable() int64 {
	if t.Name == TermConnections {
		return t.Value >> connectedAt
	}
	return t.Value
}
