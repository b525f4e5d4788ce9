package history

import (
	"fmt"
	"slices"

	"github.com/divvy-gpu/divvy/internal/core/place"
)

// APIVersion and Kind are those of an Explanation.
const (
	APIVersion = "divvy.dev/v1"
	Kind       = "DecisionExplanation"
)

// Explanation says why a pod is where it is, or why it is nowhere.
type Explanation struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Decision
	// Policy is the one that rated.
	Policy string `json:"policy"`
	// Ratings are of the candidates, in their order.
	Ratings []Rating   `json:"ratings"`
	Bound   *Placement `json:"bound,omitempty"`
	Ended   *Placement `json:"ended,omitempty"`
	Notes   []string   `json:"notes,omitempty"`
}

// Rating says what the rating of one candidate is made of.
type Rating struct {
	Node   string       `json:"node"`
	Rating int64        `json:"rating"`
	Terms  []place.Term `json:"terms"`
	// Devices are all of the node.
	Devices []RatedDevice `json:"devices"`
}

// RatedDevice is a device of a rated node.
type RatedDevice struct {
	Slot
	// Chosen is true for one that the pod got.
	Chosen bool `json:"chosen,omitempty"`
	// Rejected says why the pod cannot get it; "" where it could.
	Rejected string `json:"rejected,omitempty"`
	// Terms are those of the node with this device alone, for a pod on one device.
	Terms []place.Term `json:"terms,omitempty"`
}

// Sum is what terms add up to.
func Sum(terms []place.Term) (sum int64) {
	for _, t := range terms {
		sum += t.Value
	}
	return sum
}

// Why a device is not for the pod.
const (
	DeviceUnhealthy  = "unhealthy"
	DeviceExcluded   = "excluded by the pod's selection"
	DeviceTooSmall   = "smaller than the request"
	DeviceTooLittle  = "too little free"
	noteNoTerms      = "policy %s does not say what its ratings are made of"
	noteNodeChanged  = "node %s changed while it was rated; its devices are shown as they were just after"
	noteOtherWeights = "the weights of policy %s were renewed since: what other devices would have been rated is not known"
)

// Explain explains a decision. What other devices would have been rated is computed by the
// policy that rated, for that ask; the rest was kept.
func Explain(e Entry, policy place.Policy, ask place.Ask) Explanation {
	out := Explanation{APIVersion: APIVersion, Kind: Kind, Decision: *e.Decision, Policy: policy.Name(), Bound: e.Bound, Ended: e.Ended,
		Ratings: []Rating{}}
	explainer, explains := policy.(place.Explainer)
	if !explains {
		out.Notes = append(out.Notes, fmt.Sprintf(noteNoTerms, policy.Name()))
	}
	renewed := false
	for i := range e.Decision.Candidates {
		c := &e.Decision.Candidates[i]
		n := c.node()
		r := Rating{Node: c.Node, Rating: c.Rating, Terms: append([]place.Term{}, c.Terms...), Devices: make([]RatedDevice, len(c.Slots))}
		same := false // weights as then
		switch {
		case explains && len(c.Terms) == 0:
			out.Notes = append(out.Notes, fmt.Sprintf(noteNodeChanged, c.Node))
		case explains && ask.Devices == 1:
			same = slices.Equal(c.Terms, explainer.Explain(&n, &ask, c.wouldGet()))
			renewed = renewed || !same
		}
		for k := range c.Slots {
			d := RatedDevice{Slot: c.Slots[k], Chosen: e.Bound.has(c.Node, c.Slots[k].Index)}
			switch {
			case d.Excluded:
				d.Rejected = DeviceExcluded
			case d.Unhealthy:
				d.Rejected = DeviceUnhealthy
			case d.Total < ask.Units:
				d.Rejected = DeviceTooSmall
			case max(d.Free, 0) < ask.Units:
				d.Rejected = DeviceTooLittle
			case same:
				d.Terms = explainer.Explain(&n, &ask, []int{k})
			}
			r.Devices[k] = d
		}
		out.Ratings = append(out.Ratings, r)
	}
	if renewed {
		out.Notes = append(out.Notes, fmt.Sprintf(noteOtherWeights, policy.Name()))
	}
	return out
}

// node is the candidate as a policy sees it for one device: without connections.
func (c *Candidate) node() place.Node {
	n := place.Node{CPU: c.CPU, Memory: c.Memory, Cores: c.Cores, Slots: make([]place.Slot, len(c.Slots))}
	for i, s := range c.Slots {
		n.Slots[i] = place.Slot{Index: s.Index, Model: s.Model, Total: s.Total, Free: s.Free, Unhealthy: s.Unhealthy}
	}
	return n
}

// wouldGet are the positions of the devices that the pod would get.
func (c *Candidate) wouldGet() (slots []int) {
	for i := range c.Slots {
		if c.Slots[i].WouldGet {
			slots = append(slots, i)
		}
	}
	return slots
}

// has reports whether it is on the device.
func (p *Placement) has(node string, index int) bool {
	return p != nil && p.Node == node && slices.ContainsFunc(p.Devices, func(d Device) bool { return d.Index == index })
}
