package why

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
)

// PrintJSON writes explanations: one as an object, several as a list.
func PrintJSON(out io.Writer, all []Explanation, list bool) error {
	enc := json.NewEncoder(out)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	if !list {
		return enc.Encode(&all[0])
	}
	return enc.Encode(struct {
		APIVersion string        `json:"apiVersion"`
		Kind       string        `json:"kind"`
		Items      []Explanation `json:"items"`
	}{APIVersion, Kind + "List", all})
}

// Print writes one explanation for people.
func Print(out io.Writer, e *Explanation) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s.\n", printable(e.headline()))
	for i := range e.Causes {
		if c := &e.Causes[i]; i > 0 && len(c.Nodes) == 0 {
			fmt.Fprintf(&b, "  ALSO  %s\n", printable(c.Detail))
		}
	}
	if text := e.nodesLine(); text != "" {
		fmt.Fprintf(&b, "  NODES  %s\n", printable(text))
	}
	if e.State != StateRuns {
		helps := "no"
		if e.Waiting.Helps {
			helps = "yes"
			if !e.Waiting.Until.IsZero() {
				helps += ", until " + e.Waiting.Until.UTC().Format(time.RFC3339)
			}
		}
		fmt.Fprintf(&b, "  WAITING HELPS  %s: %s.", helps, e.Waiting.Why)
		if a := e.Autoscaler; a != nil && !a.Sees {
			fmt.Fprintf(&b, " An autoscaler will not act: %s.", printable(a.Why))
		}
		b.WriteByte('\n')
	}
	for _, c := range e.Causes {
		for _, text := range c.Evidence {
			fmt.Fprintf(&b, "  EVIDENCE  %s\n", printable(text))
		}
	}
	if len(e.Changes) > 0 {
		b.WriteString("  WHAT WOULD HELP\n")
		w := tabwriter.NewWriter(&b, 0, 1, 2, ' ', 0)
		for i := range e.Changes {
			e.Changes[i].line(w, i+1)
		}
		if err := w.Flush(); err != nil {
			return err
		}
	}
	for _, note := range e.Notes {
		fmt.Fprintf(&b, "  NOTE  %s\n", printable(note))
	}
	_, err := io.WriteString(out, b.String())
	return err
}

func (c *Change) line(w io.Writer, number int) {
	where := c.Node
	if len(c.Devices) > 0 {
		noun := "device "
		if len(c.Devices) > 1 {
			noun = "devices "
		}
		where += " " + noun + strings.Join(c.Devices, ", ")
	}
	var marks []string
	if c.By != "" {
		marks = append(marks, c.By)
	}
	if !c.Verified {
		marks = append(marks, "not verified")
	}
	if len(marks) > 0 {
		where = strings.TrimSpace(where + " (" + strings.Join(marks, ", ") + ")")
	}
	fmt.Fprintf(w, "   %d\t%s\t%s\n", number, printable(c.Text), where)
	for _, command := range c.Commands {
		fmt.Fprintf(w, "   \t  $ %s\n", printable(command))
	}
}

// name is what is explained: a pod, or an owner without pods.
func (e *Explanation) name() string {
	if e.Pod.Name == "" {
		return e.Owner
	}
	return e.Pod.Name
}

// headline is the first sentence, without its full stop.
func (e *Explanation) headline() string {
	age := ""
	if !e.Since.IsZero() {
		age = " " + ago(e.Taken.Sub(e.Since))
	}
	reason := ""
	if len(e.Causes) > 0 {
		c := &e.Causes[0]
		reason = ": " + strings.TrimSuffix(c.Detail, ".")
		if c.ofNodes() {
			reason = fmt.Sprintf(": no node takes it: %s (%s)", c.Detail, count(len(c.Nodes), "node"))
		}
	}
	switch e.State {
	case StateRuns:
		return e.name() + " does not wait"
	case StateFailed:
		return e.name() + " has failed" + reason
	case StateStarting:
		return e.name() + " is starting" + reason
	case StateNotCreated:
		return e.name() + " has too few pods" + reason
	}
	if age == "" {
		return e.name() + " waits" + reason
	}
	return e.name() + " has waited" + age + reason
}

// ofNodes reports whether the detail is what single nodes lack, and not a clause of its own.
func (c *Cause) ofNodes() bool {
	return len(c.Nodes) > 0 && c.Code.rank() >= OldRelease.rank() && c.Code.rank() <= Stale.rank() && !quoted(c.Code)
}

// nodesLine counts the nodes by what they lack.
func (e *Explanation) nodesLine() string {
	var parts []string
	for _, code := range codes {
		var free, sums, details []string
		n := 0
		for _, node := range e.Nodes {
			if node.Code != code {
				continue
			}
			n++
			free, sums = append(free, fmt.Sprint(node.LargestFree)), append(sums, fmt.Sprint(node.Sum))
			if !slices.Contains(details, node.Missing) {
				details = append(details, node.Missing)
			}
		}
		switch {
		case n == 0:
		case code == NoDeviceFits:
			parts = append(parts, fmt.Sprintf("%d no device fits (largest free %s; sums %s)", n, listed(free, 5), listed(sums, 5)))
		default:
			parts = append(parts, fmt.Sprintf("%d %s", n, listed(details, 3)))
		}
	}
	fit := 0
	for _, node := range e.Nodes {
		if node.Code == "" {
			fit++
		}
	}
	if fit > 0 {
		parts = append(parts, fmt.Sprintf("%d fit", fit))
	}
	return strings.Join(parts, ", ")
}

// Line is one explanation in a line: pod, state, code, what would help.
func (e *Explanation) Line() string {
	code, help := "-", "-"
	if len(e.Causes) > 0 {
		code = string(e.Causes[0].Code)
	}
	for _, c := range e.Changes {
		if c.Verified {
			help = c.Text
			break
		}
	}
	return strings.Join([]string{e.name(), string(e.State), ago(e.Taken.Sub(e.Since)), code, printable(help)}, "\t")
}

// PrintLines writes one line each.
func PrintLines(out io.Writer, all []Explanation) error {
	w := tabwriter.NewWriter(out, 0, 1, 2, ' ', 0)
	fmt.Fprintln(w, "POD\tSTATE\tSINCE\tCAUSE\tWHAT WOULD HELP")
	for i := range all {
		fmt.Fprintln(w, all[i].Line())
	}
	return w.Flush()
}

// printable is a text on one line, without what would control a terminal: messages and
// names of models come from any program.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case unicode.IsSpace(r):
			return ' '
		case unicode.IsPrint(r):
			return r
		}
		return unicode.ReplacementChar
	}, s)
}
