// Package history keeps the last decisions about pods in a bounded number of bytes, and
// explains them.
//
// A Decision is kept with what it was made of: the request, the best candidates with their
// devices as they were and what each term of the policy gave, and how many of the other
// nodes were rejected and why. What other devices would have been rated is computed on
// request, by the policy itself. Beside decisions a Log keeps where pods were bound and
// when they ended, with which a simulation can replay the decisions.
//
// A Log holds what one process has decided since its start, no more.
package history

import (
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// Pod identifies a pod.
type Pod struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid"`
}

// PodOf returns the pod of a reference.
func PodOf(ref accel.PodRef) Pod { return Pod{Namespace: ref.Namespace, Name: ref.Name, UID: ref.UID} }

// Selection is an accel.Selection as it is written.
type Selection struct {
	UseModels   []string   `json:"useModels,omitempty"`
	AvoidModels []string   `json:"avoidModels,omitempty"`
	UseIDs      []string   `json:"useDevices,omitempty"`
	AvoidIDs    []string   `json:"avoidDevices,omitempty"`
	Isolation   accel.Tier `json:"isolation,omitempty"`
}

// Request is what a pod requests, as it is written.
type Request struct {
	Resource accel.Resource `json:"resource"`
	// Units are on all Devices together.
	Units   accel.Units `json:"units"`
	Devices int         `json:"devices"`
	// CPU and Memory are in millicores and MiB, 0 where they are not counted.
	CPU       int64      `json:"cpu,omitempty"`
	Memory    int64      `json:"memory,omitempty"`
	Priority  int32      `json:"priority,omitempty"`
	Policy    string     `json:"policy,omitempty"`
	Selection *Selection `json:"selection,omitempty"`
}

// RequestOf returns how a request is written.
func RequestOf(r *accel.Request) Request {
	out := Request{Resource: r.Resource, Units: r.Peak(), Devices: max(r.Devices, 1), CPU: r.CPU, Memory: r.Memory,
		Priority: r.Priority, Policy: r.Policy}
	if r.Selection != nil {
		s := Selection(*r.Selection)
		out.Selection = &s
	}
	return out
}

// Request returns the request of a pod.
func (r *Request) Request(podUID string) accel.Request {
	out := accel.Request{
		Resource: r.Resource, Devices: r.Devices, CPU: r.CPU, Memory: r.Memory, Priority: r.Priority, Policy: r.Policy, Pod: podUID,
		Containers: []accel.ContainerRequest{{Kind: accel.AppContainer, Units: r.Units}},
	}
	if r.Selection != nil {
		s := accel.Selection(*r.Selection)
		out.Selection = &s
	}
	return out
}

// Decision is an answer to a question where a pod may go.
type Decision struct {
	Pod     Pod       `json:"pod"`
	At      time.Time `json:"at"`
	Request Request   `json:"request"`
	// Offered is how many nodes kube-scheduler offered. Only are their names, where they are
	// no more than MaxOnly.
	Offered int      `json:"offered"`
	Only    []string `json:"only,omitempty"`
	// Fits is on how many of them the pod fits. Chosen is the node that was named; "" where
	// there was none, or where the choice was kube-scheduler's.
	Fits   int    `json:"fits"`
	Chosen string `json:"chosen,omitempty"`
	// Rejected says why it does not fit on others.
	Rejected []Rejected `json:"rejected,omitempty"`
	// Candidates are the best, at most MaxCandidates, in the order of their ratings.
	Candidates []Candidate `json:"candidates,omitempty"`
}

const (
	// MaxCandidates bounds the candidates of a decision of which the devices are kept.
	MaxCandidates = 3
	// MaxOnly bounds the nodes that are kept by name.
	MaxOnly = 8
	// MaxNamed bounds the nodes that are named for each reason.
	MaxNamed = 2
)

// Rejected are nodes on which a pod does not fit for one reason.
type Rejected struct {
	// Code is the verdict as the metrics name it, Nodes how many have it, and Named a few
	// of them.
	Code  string   `json:"code"`
	Nodes int      `json:"nodes"`
	Named []string `json:"named,omitempty"`
}

// Candidate is a node on which the pod fits, as it was.
type Candidate struct {
	Node   string `json:"node"`
	Rating int64  `json:"rating"`
	// CPU, Memory and Cores are those of a place.Node.
	CPU    int64  `json:"cpu,omitempty"`
	Memory int64  `json:"memory,omitempty"`
	Cores  int64  `json:"cores,omitempty"`
	Slots  []Slot `json:"slots"`
	// Terms are what the rating was made of; none where the policy does not say, or the
	// node changed while it was rated.
	Terms []place.Term `json:"terms,omitempty"`
}

// Slot is a device of a candidate, as it was.
type Slot struct {
	Index     int         `json:"index"`
	Model     string      `json:"model,omitempty"`
	Total     accel.Units `json:"total"`
	Free      accel.Units `json:"free"`
	Unhealthy bool        `json:"unhealthy,omitempty"`
	// Excluded is true where the pod's selection does not allow the device.
	Excluded bool `json:"excluded,omitempty"`
	// WouldGet is true for one that the policy would give the pod if it chose the node.
	WouldGet bool `json:"wouldGet,omitempty"`
}

// CandidateOf keeps a node as it was when a policy rated it for an ask.
func CandidateOf(name string, rating int64, n *place.Node, ask *place.Ask, policy place.Policy) Candidate {
	c := Candidate{Node: name, Rating: rating, CPU: n.CPU, Memory: n.Memory, Cores: n.Cores, Slots: make([]Slot, len(n.Slots))}
	for i := range n.Slots {
		s := &n.Slots[i]
		c.Slots[i] = Slot{Index: s.Index, Model: s.Model, Total: s.Total, Free: s.Free, Unhealthy: s.Unhealthy,
			Excluded: !ask.Only.Allows(s.ID, s.Model, s.Tier)}
	}
	slots, _, ok := policy.Choose(n, ask, nil)
	if !ok {
		return c
	}
	for _, i := range slots {
		c.Slots[i].WouldGet = true
	}
	if explainer, explains := policy.(place.Explainer); explains {
		if terms := explainer.Explain(n, ask, slots); Sum(terms) == rating {
			c.Terms = terms
		}
	}
	return c
}

// Placement is a pod on devices, from the time of its bind, or until it ended.
type Placement struct {
	Pod      Pod            `json:"pod"`
	At       time.Time      `json:"at"`
	Node     string         `json:"node"`
	Resource accel.Resource `json:"resource"`
	Units    accel.Units    `json:"units"`
	Devices  []Device       `json:"devices"`
}

// Device names a device. Index is -1 where it is not known.
type Device struct {
	Index int            `json:"index"`
	ID    accel.DeviceID `json:"id"`
}

// Entry is one thing that a Log keeps; one of its fields is set.
type Entry struct {
	Decision *Decision  `json:"decision,omitempty"`
	Bound    *Placement `json:"bound,omitempty"`
	// Ended is without a node, and has the UID alone, where the pod ended while it waited.
	Ended *Placement `json:"ended,omitempty"`
}

// At is when it happened.
func (e *Entry) At() time.Time {
	switch {
	case e.Decision != nil:
		return e.Decision.At
	case e.Bound != nil:
		return e.Bound.At
	}
	return e.Ended.At
}

// Pod is the pod that it is about.
func (e *Entry) Pod() Pod {
	switch {
	case e.Decision != nil:
		return e.Decision.Pod
	case e.Bound != nil:
		return e.Bound.Pod
	}
	return e.Ended.Pod
}
