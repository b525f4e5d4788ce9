package simulate

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/history"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// Decisions replays recorded decisions: the pods arrive and end as they did, and a policy
// places them. What kube-scheduler knows besides devices is not recorded, but where it
// offered few nodes; neither is CPU and memory, and no pod is evicted for another.
type Decisions struct {
	Cluster  *Cluster
	Resource accel.Resource
	Record   *history.Record
	Policies []PolicyKind
}

// DecisionReport says what each policy makes of the record.
type DecisionReport struct {
	Kind string `json:"kind"`
	// From and To are the first and the last time of the record.
	From time.Time `json:"from"`
	To   time.Time `json:"to"`
	// Pods were decided about, and Held is how many held devices before.
	Pods     int              `json:"pods"`
	Held     int              `json:"held"`
	Recorded Outcome          `json:"recorded"`
	Policies []DecisionResult `json:"policies"`
	Notes    []string         `json:"notes,omitempty"`
}

// DecisionsReport is the kind of a DecisionReport.
const DecisionsReport = "decisions"

// Outcome is what became of the pods, and how full devices are at the end.
type Outcome struct {
	Placed    int `json:"placed"`
	NotPlaced int `json:"notPlaced"`
	// InUse and Empty count devices, Units is what pods hold.
	InUse int         `json:"devicesInUse"`
	Empty int         `json:"devicesEmpty"`
	Units accel.Units `json:"units"`
}

// DecisionResult is the Outcome of one policy.
type DecisionResult struct {
	Policy string `json:"policy"`
	Outcome
	// Elsewhere counts the pods on another node than recorded, OtherDevice those on other
	// devices of the same node.
	Elsewhere   int          `json:"elsewhere"`
	OtherDevice int          `json:"otherDevice"`
	Differences []Difference `json:"differences"`
}

// Difference is one pod that a policy places otherwise. A node is empty where it was not
// placed.
type Difference struct {
	Pod      string `json:"pod"`
	Recorded Place  `json:"recorded"`
	Replayed Place  `json:"replayed"`
}

// Place is where a pod is.
type Place struct {
	Node    string           `json:"node"`
	Devices []accel.DeviceID `json:"devices,omitempty"`
}

func (p Place) String() string {
	if p.Node == "" {
		return "not placed"
	}
	ids := make([]string, len(p.Devices))
	for i, id := range p.Devices {
		ids[i] = string(id)
	}
	return p.Node + " " + strings.Join(ids, ",")
}

// recordedPod is what the record has of a pod.
type recordedPod struct {
	history.Pod
	ask place.Ask
	// decision is the last one, nil where it was another replica's, and only are the nodes
	// that it allows, nil for all.
	decision *history.Decision
	only     []string
	// needs tells pods apart that do not need the same.
	needs request
	at    time.Time
	bound *history.Placement
	ended bool
}

// step is the arrival or the end of a pod, or the end of one that held devices before.
type step struct {
	at   time.Time
	pod  int // -1 for one that held devices before
	ends string
}

// request is what a pod that waits needs: where one did not fit, no other one does until a
// pod ends.
type request struct {
	ask  place.Ask
	only string
}

// story is a record in the order in which it is replayed.
type story struct {
	pods  []recordedPod
	held  []history.Placement
	steps []step
	// sampled counts the decisions for which only some nodes were offered.
	sampled int
	// lost counts the pods on nodes that are no more, and late those that held devices since
	// the record began, of which it has no decision.
	lost, late int
}

// read makes a story of the record.
func (d *Decisions) read() *story {
	s := &story{}
	byUID := map[string]int{}
	known := map[string]bool{}
	for i := range d.Cluster.Nodes {
		known[d.Cluster.Nodes[i].Name] = true
	}
	pod := func(of history.Pod, at time.Time, ask place.Ask) *recordedPod {
		i, seen := byUID[of.UID]
		if !seen {
			i = len(s.pods)
			byUID[of.UID] = i
			s.pods = append(s.pods, recordedPod{Pod: of, at: at})
			s.steps = append(s.steps, step{at: at, pod: i})
		}
		s.pods[i].ask = ask
		return &s.pods[i]
	}
	ended, selections := map[string]bool{}, map[string]*accel.Selection{}
	for i := range d.Record.Entries {
		e := &d.Record.Entries[i]
		switch {
		case e.Decision != nil && e.Decision.Request.Resource == d.Resource:
			r := &e.Decision.Request
			ask := place.Ask{Units: r.Units / accel.Units(r.Devices), Devices: r.Devices}
			if r.Selection != nil {
				only := accel.Selection(*r.Selection)
				key := fmt.Sprintf("%q", only)
				if selections[key] == nil {
					selections[key] = &only // one for equal ones, so that asks are equal
				}
				ask.Only = selections[key]
			}
			p := pod(e.Decision.Pod, e.Decision.At, ask)
			p.decision = e.Decision
			if e.Decision.Only == nil && e.Decision.Offered < len(d.Cluster.Nodes) {
				s.sampled++
			}
		case e.Bound != nil && e.Bound.Resource == d.Resource:
			b := e.Bound
			ask := place.Ask{Units: b.Units / accel.Units(len(b.Devices)), Devices: len(b.Devices)}
			if i, seen := byUID[b.Pod.UID]; seen {
				ask = s.pods[i].ask
			}
			pod(b.Pod, b.At, ask).bound = b
		case e.Ended != nil && e.Ended.Node == "":
			if i, seen := byUID[e.Ended.Pod.UID]; seen {
				s.steps = append(s.steps, step{e.Ended.At, i, e.Ended.Pod.UID})
			}
		case e.Ended != nil && e.Ended.Resource == d.Resource:
			ended[e.Ended.Pod.UID] = true
			if i, seen := byUID[e.Ended.Pod.UID]; seen {
				s.pods[i].ended = true
				s.pods[i].bound = cmp.Or(s.pods[i].bound, e.Ended) // of a bind without an outcome, or of another replica
				s.steps = append(s.steps, step{e.Ended.At, i, e.Ended.Pod.UID})
				continue
			}
			s.held = append(s.held, *e.Ended)
			s.steps = append(s.steps, step{e.Ended.At, -1, e.Ended.Pod.UID})
		}
	}
	for i := range d.Record.Held {
		h := &d.Record.Held[i]
		switch at, decided := byUID[h.Pod.UID]; {
		case h.Resource != d.Resource || ended[h.Pod.UID]:
		case decided:
			s.pods[at].bound = cmp.Or(s.pods[at].bound, h)
		default:
			s.held = append(s.held, *h)
			if len(d.Record.Entries) > 0 && known[h.Node] && h.At.After(d.Record.Entries[0].At()) {
				s.late++
			}
		}
	}
	held := len(s.held)
	s.held = slices.DeleteFunc(s.held, func(h history.Placement) bool { return !known[h.Node] })
	s.lost = held - len(s.held)
	for i := range s.pods {
		if b := s.pods[i].bound; b != nil && !known[b.Node] {
			s.lost++
		}
	}
	d.restrict(s)
	for i := range s.pods {
		p := &s.pods[i]
		p.needs = request{p.ask, strings.Join(p.only, " ")}
	}
	slices.SortStableFunc(s.steps, func(a, b step) int { return a.at.Compare(b.at) })
	return s
}

// maxOnly bounds the nodes that are kept for a pod; where it were more, all are allowed.
const maxOnly = 64

// restrict limits pods to the nodes that kube-scheduler offered, where these are known. It
// offers no node that has too few units free, so those that had too few then are allowed as
// well: with another policy they might have had enough.
func (d *Decisions) restrict(s *story) {
	free := map[string]accel.Units{}
	for i := range d.Cluster.Nodes {
		n := &d.Cluster.Nodes[i]
		free[n.Name] = 0
		for k := range n.Devices {
			if !n.Devices[k].Health.Unhealthy {
				free[n.Name] += n.Devices[k].Units
			}
		}
	}
	placed := map[string]*history.Placement{} // by UID
	put := func(p *history.Placement) {
		placed[p.Pod.UID] = p
		free[p.Node] -= p.Units
	}
	for i := range s.held {
		put(&s.held[i])
	}
	decided := map[*history.Decision]*recordedPod{}
	for i := range s.pods {
		decided[s.pods[i].decision] = &s.pods[i]
	}
	for i := range d.Record.Entries {
		switch e := &d.Record.Entries[i]; {
		case e.Bound != nil && e.Bound.Resource == d.Resource:
			put(e.Bound)
		case e.Ended != nil && placed[e.Ended.Pod.UID] != nil:
			p := placed[e.Ended.Pod.UID]
			delete(placed, p.Pod.UID)
			free[p.Node] += p.Units
		case e.Decision != nil && e.Decision.Only != nil && decided[e.Decision] != nil:
			p := decided[e.Decision]
			for i := range d.Cluster.Nodes {
				name := d.Cluster.Nodes[i].Name
				if slices.Contains(e.Decision.Only, name) || free[name] < e.Decision.Request.Units {
					p.only = append(p.only, name)
				}
			}
			if len(p.only) > maxOnly {
				p.only = nil
				s.sampled++
			}
		}
	}
}

// Run replays the record with each policy.
func (d *Decisions) Run(ctx context.Context) (*DecisionReport, error) {
	s := d.read()
	if len(s.pods) == 0 {
		return nil, fmt.Errorf("the record has no decision about %s", d.Resource)
	}
	r := &DecisionReport{Kind: DecisionsReport, From: s.steps[0].at, To: s.steps[len(s.steps)-1].at, Pods: len(s.pods), Held: len(s.held)}
	if d.Record.Dropped > 0 {
		r.Notes = append(r.Notes, fmt.Sprintf("%d older entries were not kept: the record begins at %s.", d.Record.Dropped,
			d.Record.Since.Format(time.RFC3339)))
	}
	if s.sampled > 0 {
		r.Notes = append(r.Notes, fmt.Sprintf("For %d decisions kube-scheduler offered only some of the nodes; the replay offers all, so "+
			"it may place these pods elsewhere with the same policy.", s.sampled))
	}
	if s.lost > 0 {
		r.Notes = append(r.Notes, fmt.Sprintf("%s held devices of nodes that the cluster does not have any more; the replay has only the "+
			"nodes of the export.", count(s.lost, "pod")))
	}
	if s.late > 0 {
		r.Notes = append(r.Notes, fmt.Sprintf("%s got devices during the record without a decision in it, from another replica of the "+
			"extender; the replay counts them from its start.", count(s.late, "pod")))
	}
	r.Recorded = d.recorded(s)
	w := &Workload{Name: string(d.Resource)}
	for i := range s.pods {
		w.Pods = append(w.Pods, Pod{Name: s.pods[i].Name, Ask: s.pods[i].ask})
	}
	for _, kind := range d.Policies {
		one, err := d.replay(ctx, s, kind, w)
		if err != nil {
			return nil, err
		}
		r.Policies = append(r.Policies, one)
	}
	return r, nil
}

// observe counts what a pod held.
func observe(w *world, h *history.Placement, uid string) {
	ids := make([]accel.DeviceID, len(h.Devices))
	for i := range h.Devices {
		ids[i] = h.Devices[i].ID
	}
	o := ledger.Holding{Pod: accel.PodRef{UID: uid}, Node: h.Node, Resource: resource, Units: h.Units, Confirmed: true}
	o.SetDevices(ids)
	w.books.Observe(o)
}

// begin is the cluster at the begin of the story.
func (d *Decisions) begin(s *story, p place.Policy) *world {
	order := make([]int, len(d.Cluster.Nodes))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(d.Cluster.Nodes[a].Name, d.Cluster.Nodes[b].Name) })
	w := newWorld(d.Cluster, order, p, nil, false)
	for i := range s.held {
		observe(w, &s.held[i], "held "+s.held[i].Pod.UID)
	}
	return w
}

// recorded is what became of the pods as they were placed.
func (d *Decisions) recorded(s *story) Outcome {
	w := d.begin(s, place.Binpack)
	var out Outcome
	for i := range s.pods {
		p := &s.pods[i]
		if p.bound == nil {
			out.NotPlaced++
			continue
		}
		out.Placed++
		if !p.ended {
			observe(w, p.bound, p.UID)
		}
	}
	for _, st := range s.steps {
		if st.pod < 0 {
			w.books.Forget("held " + st.ends)
		}
	}
	out.count(w)
	return out
}

// count counts devices.
func (o *Outcome) count(w *world) {
	for u := range w.books.Nodes(resource) {
		for i := range u.Devices {
			switch d := &u.Devices[i]; {
			case d.Used > 0:
				o.InUse++
				o.Units += d.Used
			case !d.Health.Unhealthy:
				o.Empty++
			}
		}
	}
}

// replay plays the story with one policy.
func (d *Decisions) replay(ctx context.Context, s *story, kind PolicyKind, load *Workload) (DecisionResult, error) {
	policy := kind.New(d.Cluster, load)
	r := &run{world: d.begin(s, policy), policy: policy}
	out := DecisionResult{Policy: kind.Name, Differences: []Difference{}}
	placed := make([]placement, len(s.pods))
	at := make([]Place, len(s.pods))
	var waiting []int
	arrived := 0
	try := func(i int) (bool, error) {
		if ctx.Err() != nil {
			return false, ctx.Err()
		}
		p := &s.pods[i]
		r.only = p.only
		one, _, ok, err := r.arrive(arrived, &p.ask)
		if ok {
			arrived++
			placed[i], at[i] = one, Place{r.names[one.at], one.devices}
		}
		return ok, err
	}
	for _, st := range s.steps {
		if st.ends == "" {
			ok, err := try(st.pod)
			if err != nil {
				return out, err
			}
			if !ok {
				waiting = append(waiting, st.pod)
			}
			continue
		}
		if st.pod < 0 {
			r.books.Forget("held " + st.ends)
		} else if at[st.pod].Node != "" {
			r.remove(placed[st.pod])
		}
		var still []int
		failed := map[request]bool{}
		for _, i := range waiting {
			if i == st.pod {
				continue // it would have ended by now
			}
			if needs := s.pods[i].needs; !failed[needs] {
				ok, err := try(i)
				if err != nil {
					return out, err
				}
				if ok {
					continue
				}
				failed[needs] = true
			}
			still = append(still, i)
		}
		waiting = still
	}
	for i := range s.pods {
		p := &s.pods[i]
		if at[i].Node == "" {
			out.NotPlaced++
		} else {
			out.Placed++
		}
		var was Place
		if p.bound != nil {
			was.Node = p.bound.Node
			for _, dev := range p.bound.Devices {
				was.Devices = append(was.Devices, dev.ID)
			}
		}
		switch {
		case was.Node != at[i].Node:
			if was.Node != "" && at[i].Node != "" {
				out.Elsewhere++
			}
		case !sameDevices(was.Devices, at[i].Devices):
			out.OtherDevice++
		default:
			continue
		}
		out.Differences = append(out.Differences, Difference{p.Namespace + "/" + p.Name, was, at[i]})
	}
	out.count(r.world)
	return out, nil
}

func sameDevices(a, b []accel.DeviceID) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}

// PrintJSON prints the report with all differences.
func (r *DecisionReport) PrintJSON(out io.Writer) error {
	enc := json.NewEncoder(out)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

// maxDifferences bounds the pods of each policy in a table.
const maxDifferences = 20

// PrintTable prints the report for people.
func (r *DecisionReport) PrintTable(out io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s decided from %s to %s, beside %d that held devices before\n\n", count(r.Pods, "pod"), r.From.Format(time.RFC3339),
		r.To.Format(time.RFC3339), r.Held)
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "POLICY\tPLACED\tNOT PLACED\tELSEWHERE\tOTHER DEVICE\tDEVICES IN USE\tEMPTY")
	fmt.Fprintf(t, "as recorded\t%d\t%d\t\t\t%d\t%d\n", r.Recorded.Placed, r.Recorded.NotPlaced, r.Recorded.InUse, r.Recorded.Empty)
	for i := range r.Policies {
		p := &r.Policies[i]
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%d\t%d\t%d\n", p.Policy, p.Placed, p.NotPlaced, p.Elsewhere, p.OtherDevice, p.InUse, p.Empty)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for i := range r.Policies {
		p := &r.Policies[i]
		if len(p.Differences) == 0 {
			continue
		}
		fmt.Fprintf(&b, "\n%s:\n", p.Policy)
		for _, d := range p.Differences[:min(len(p.Differences), maxDifferences)] {
			fmt.Fprintf(&b, "  %s: %s instead of %s\n", d.Pod, d.Replayed, d.Recorded)
		}
		if more := len(p.Differences) - maxDifferences; more > 0 {
			fmt.Fprintf(&b, "  and %d more; -o json lists all\n", more)
		}
	}
	// Names come from a file, and would speak to the terminal.
	_, err := io.WriteString(out, strings.Map(func(r rune) rune {
		if r != '\n' && !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, b.String()))
	return err
}
