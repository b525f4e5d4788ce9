package why

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// PrintJSON writes the plan as JSON.
func (p *Plan) PrintJSON(out io.Writer) error { return writeJSON(out, p) }

// Print writes the plan for people.
func (p *Plan) Print(out io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s.\n", p.headline())
	for i := range p.Before {
		before, after := &p.Before[i], &p.After[i]
		fmt.Fprintf(&b, "  %s  largest free device %d -> %d units, %d free", before.Resource, before.LargestFree, after.LargestFree,
			before.Free)
		if p.Goal == GoalAdmit {
			fmt.Fprintf(&b, ", usable by the waiting pods %d -> %d", before.Usable, after.Usable)
		}
		b.WriteByte('\n')
	}
	admitted := func(moves int) {
		for _, a := range p.Admitted {
			if a.AfterMove == moves {
				fmt.Fprintf(&b, "     then %s/%s (%s) fits: %s\n", a.Pod.Namespace, a.Pod.Name, count(int(a.Units), "unit"), &a.To)
			}
		}
	}
	for _, a := range p.Admitted {
		if a.AfterMove == 0 {
			fmt.Fprintf(&b, "  FITS NOW  %s/%s (%s): %s\n", a.Pod.Namespace, a.Pod.Name, count(int(a.Units), "unit"), &a.To)
		}
	}
	if len(p.Moves) > 0 {
		b.WriteString("  MOVES\n")
	}
	for i := range p.Moves {
		m := &p.Moves[i]
		what := m.Owner
		if m.Units > 0 {
			what = fmt.Sprintf("%s, %s", count(int(m.Units), "unit"), m.Owner)
		}
		fmt.Fprintf(&b, "  %2d  %s/%s (%s): %s -> %s\n", i+1, m.Pod.Namespace, m.Pod.Name, printable(what), &m.From, &m.To)
		for _, c := range m.Commands {
			fmt.Fprintf(&b, "        $ %s\n", printable(c))
		}
		admitted(i + 1)
	}
	for _, l := range p.Left {
		units := ""
		if l.Units > 0 {
			units = fmt.Sprintf(" (%s)", count(int(l.Units), "unit"))
		}
		fmt.Fprintf(&b, "  NO PLAN  %s/%s%s: %s\n", l.Pod.Namespace, l.Pod.Name, units, printable(l.Reason))
	}
	var unmoved []string
	for _, u := range p.Unmoved {
		unmoved = append(unmoved, fmt.Sprintf("%d %s", u.Pods, ruleTexts[u.Rule]))
	}
	if len(unmoved) > 0 && (len(p.Moves) > 0 || slices.ContainsFunc(p.Left, func(l Left) bool { return l.Code != LeftNotJudged })) {
		fmt.Fprintf(&b, "  NOT MOVED  %s\n", strings.Join(unmoved, ", "))
	}
	for _, note := range p.Notes {
		fmt.Fprintf(&b, "  NOTE  %s\n", printable(note))
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// headline is the first sentence, without its full stop.
func (p *Plan) headline() string {
	moves := count(len(p.Moves), "move")
	if p.Goal == GoalEmpty {
		switch {
		case !p.Reached:
			return "No plan empties node " + p.Node
		case len(p.Moves) == 0:
			return "Node " + p.Node + " has no pods to move"
		}
		return fmt.Sprintf("%s empty%s node %s", moves, verbEnding(len(p.Moves)), p.Node)
	}
	waiting := len(p.Admitted) + len(p.Left)
	all := func(n int) string {
		if n == 1 {
			return "the waiting pod"
		}
		return fmt.Sprintf("the %d waiting pods", n)
	}
	now := 0
	for _, a := range p.Admitted {
		if a.AfterMove == 0 {
			now++
		}
	}
	switch {
	case waiting == 0:
		return "No pod waits for a shared resource"
	case len(p.Moves) == 0 && now > 0 && len(p.Left) == 0:
		return fmt.Sprintf("No moves are needed: %s fit%s now", count(now, "waiting pod"), verbEnding(now))
	case len(p.Moves) == 0:
		return "No plan helps " + all(len(p.Left))
	case len(p.Left) == 0:
		return fmt.Sprintf("%s admit%s %s", moves, verbEnding(len(p.Moves)), all(len(p.Admitted)-now))
	}
	return fmt.Sprintf("%s admit%s %d of %s", moves, verbEnding(len(p.Moves)), len(p.Admitted)-now, count(waiting-now, "waiting pod"))
}

// verbEnding is the ending of the verb after so many.
func verbEnding(n int) string {
	if n == 1 {
		return "s"
	}
	return ""
}

func (s *Spot) String() string {
	switch len(s.Devices) {
	case 0:
		return s.Node
	case 1:
		return s.Node + " device " + s.Devices[0]
	}
	return s.Node + " devices " + strings.Join(s.Devices, ", ")
}
