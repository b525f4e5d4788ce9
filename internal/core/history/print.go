package history

import (
	"cmp"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// Print writes an explanation for people.
func (e *Explanation) Print(out io.Writer) error {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("%s", e.headline())
	line("  POLICY    %s", e.Policy)
	line("  NODES     %s", e.nodesLine())
	for i := range e.Ratings {
		r := &e.Ratings[i]
		line("  %s  rated %s: %s", r.Node, ratingText(r.Rating, r.Terms), termsText(r.Terms))
		w := tabwriter.NewWriter(&b, 0, 1, 2, ' ', 0)
		for k := range r.Devices {
			d := &r.Devices[k]
			about := d.Rejected
			switch {
			case d.Chosen:
				about = "chosen"
			case d.WouldGet && (e.Bound == nil || e.Bound.Node != r.Node):
				about = "would get"
			case about == "" && len(d.Terms) > 0:
				about = "would be rated " + ratingText(Sum(d.Terms), d.Terms) + ": " + termsText(d.Terms)
			}
			fmt.Fprintf(w, "    device %s\t%d of %d free\t%s\n", accel.IndexText(d.Index), max(d.Free, 0), d.Total, about)
		}
		if err := w.Flush(); err != nil {
			return err
		}
	}
	if n := e.Fits - len(e.Ratings); n > 0 {
		line("  and %d more on which it fits, rated no better", n)
	}
	if why := e.whyBest(); why != "" {
		line("  WON       %s", why)
	}
	if e.Ended != nil {
		line("  ENDED     %s", e.Ended.At.Format(time.RFC3339))
	}
	for _, note := range e.Notes {
		line("  NOTE      %s", note)
	}
	_, err := io.WriteString(out, b.String())
	return err
}

func (e *Explanation) headline() string {
	pod := e.Pod.Namespace + "/" + e.Pod.Name
	asks := fmt.Sprintf("%d units of %s", e.Request.Units, e.Request.Resource)
	if e.Request.Devices > 1 {
		asks += fmt.Sprintf(" on %d devices", e.Request.Devices)
	}
	at := e.At.Format(time.RFC3339)
	switch placed := cmp.Or(e.Bound, e.Ended); {
	case placed != nil:
		text := fmt.Sprintf("%s requested %s at %s and was bound to %s", pod, asks, at, placed.Node)
		var devices []string
		for _, d := range placed.Devices {
			devices = append(devices, accel.IndexText(d.Index))
		}
		switch len(devices) {
		case 0:
		case 1:
			text += ", device " + devices[0]
		default:
			text += ", devices " + strings.Join(devices, ", ")
		}
		if e.Chosen == "" {
			text += "; kube-scheduler chose the node"
		}
		return text + "."
	case e.Chosen != "":
		return fmt.Sprintf("%s requested %s at %s: %s was chosen, and the pod is not bound yet.", pod, asks, at, e.Chosen)
	case e.Fits > 0:
		return fmt.Sprintf("%s requested %s at %s: the choice between nodes was left to kube-scheduler.", pod, asks, at)
	}
	return fmt.Sprintf("%s requested %s at %s: it fits on no node.", pod, asks, at)
}

// nodesLine says how many nodes were offered, on how many the pod fits, and why not on
// others.
func (e *Explanation) nodesLine() string {
	text := fmt.Sprintf("%d offered by kube-scheduler, the pod fits on %d", e.Offered, e.Fits)
	for _, r := range e.Rejected {
		text += fmt.Sprintf("; %d %s", r.Nodes, r.Code)
		if len(r.Named) > 0 {
			text += " (" + strings.Join(r.Named, ", ")
			if r.Nodes > len(r.Named) {
				text += ", ..."
			}
			text += ")"
		}
	}
	return text
}

// whyBest says what decided between the best two candidates.
func (e *Explanation) whyBest() string {
	if len(e.Ratings) == 0 || e.Chosen != e.Ratings[0].Node {
		return ""
	}
	best := &e.Ratings[0]
	switch {
	case e.Fits == 1:
		return best.Node + ", the only node on which the pod fits"
	case len(e.Ratings) == 1:
		return ""
	}
	next := &e.Ratings[1]
	if next.Rating == best.Rating {
		return fmt.Sprintf("%s, the first by name of the nodes that are rated %s", best.Node, ratingText(best.Rating, best.Terms))
	}
	var terms []string
	for i, t := range best.Terms {
		if i < len(next.Terms) && next.Terms[i].Name == t.Name && t.Value > next.Terms[i].Value {
			terms = append(terms, fmt.Sprintf("%s %d against %d", t.Name, t.Readable(), next.Terms[i].Readable()))
		}
	}
	text := fmt.Sprintf("%s over %s", best.Node, next.Node)
	if len(terms) > 0 {
		text += " by " + strings.Join(terms, ", ")
	}
	return text
}

func termsText(terms []place.Term) string {
	var out []string
	for _, t := range terms {
		out = append(out, fmt.Sprintf("%s %d", t.Name, t.Readable()))
	}
	if out == nil {
		return "terms unknown"
	}
	return strings.Join(out, ", ")
}

// ratingText is a rating as people read it: one with connections is only ordered.
func ratingText(rating int64, terms []place.Term) string {
	for _, t := range terms {
		if t.Name == place.TermConnections {
			return "by connections first"
		}
	}
	return strconv.FormatInt(rating, 10)
}
