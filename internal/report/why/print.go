package why

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf16"
)

// PrintJSON writes explanations: one as an object, several as a list.
func PrintJSON(out io.Writer, all []Explanation, list bool) error {
	if !list {
		return writeJSON(out, &all[0])
	}
	return writeJSON(out, struct {
		APIVersion string        `json:"apiVersion"`
		Kind       string        `json:"kind"`
		Items      []Explanation `json:"items"`
	}{APIVersion, Kind + "List", all})
}

// writeJSON writes a document with all characters escaped that a terminal would obey. JSON
// itself escapes those of ASCII; the others are in texts alone, where an escape means the same.
func writeJSON(out io.Writer, doc any) error {
	var b, escaped bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	if err := enc.Encode(doc); err != nil {
		return err
	}
	for _, r := range b.String() {
		if r == '\n' || !unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp) {
			escaped.WriteRune(r)
			continue
		}
		for _, unit := range utf16.Encode([]rune{r}) {
			fmt.Fprintf(&escaped, `\u%04x`, unit)
		}
	}
	_, err := out.Write(escaped.Bytes())
	return err
}

// Print writes one explanation for people.
func Print(out io.Writer, e *Explanation) error {
	var b strings.Builder
	row(&b, e.headline()+".")
	for i := range e.Causes {
		if c := &e.Causes[i]; i > 0 && (len(c.Nodes) == 0 || slices.Contains(besideNodes, c.Code)) {
			row(&b, "  ALSO  "+c.Detail)
		}
	}
	if text := e.nodesLine(); text != "" {
		row(&b, "  NODES  "+text)
	}
	if text := e.hopeLine(); text != "" {
		row(&b, "  WAITING HELPS  "+text)
	}
	for _, c := range e.Causes {
		for _, text := range c.Evidence {
			row(&b, "  EVIDENCE  "+text)
		}
	}
	if len(e.Changes) > 0 {
		row(&b, "  WHAT WOULD HELP")
		w := tabwriter.NewWriter(&b, 0, 1, 2, ' ', 0)
		for i := range e.Changes {
			e.Changes[i].line(w, i+1)
		}
		if err := w.Flush(); err != nil {
			return err
		}
	}
	for _, note := range e.Notes {
		row(&b, "  NOTE  "+note)
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// besideNodes are the codes of causes that say why that of nodes lasts, though they are about
// nodes as well.
var besideNodes = []Code{PreemptNever, LowPriority, Budget}

// row writes one line. All text of people passes through here: names and messages come from
// any program.
func row(w io.Writer, cells ...string) {
	for i := range cells {
		cells[i] = printable(cells[i])
	}
	_, _ = io.WriteString(w, strings.Join(cells, "\t")+"\n") // into memory
}

// hopeLine says whether waiting helps; "" where nothing is known of it.
func (e *Explanation) hopeLine() string {
	if e.State == StateRuns || e.Waiting.Why == "" {
		return ""
	}
	helps := "no"
	if e.Waiting.Helps {
		helps = "yes"
		if !e.Waiting.Until.IsZero() {
			helps += ", until " + e.Waiting.Until.UTC().Format(time.RFC3339)
		}
	}
	text := helps + ": " + e.Waiting.Why + "."
	if a := e.Autoscaler; a != nil && !a.Sees {
		text += " An autoscaler will not act: " + a.Why + "."
	}
	return text
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
	row(w, fmt.Sprintf("   %d", number), c.Text, where)
	for _, command := range c.Commands {
		row(w, "   ", "  $ "+command)
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
	reason := e.Reason()
	if reason != "" {
		reason = ": " + reason
	}
	switch e.State {
	case StateRuns:
		if reason != "" {
			return e.name() + " runs" + reason
		}
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

// Reason is the cause that matters most, as a clause without a full stop; "" for none.
func (e *Explanation) Reason() string {
	if len(e.Causes) == 0 {
		return ""
	}
	c := &e.Causes[0]
	if c.ofNodes() {
		return fmt.Sprintf("fits on no node: %s (%s)", c.Detail, count(len(c.Nodes), "node"))
	}
	return strings.TrimSuffix(c.Detail, ".")
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

// PrintLines writes one line each: pod, state, since when, code, what would help.
func PrintLines(out io.Writer, all []Explanation) error {
	w := tabwriter.NewWriter(out, 0, 1, 2, ' ', 0)
	row(w, "POD", "STATE", "SINCE", "CAUSE", "WHAT WOULD HELP")
	for i := range all {
		e := &all[i]
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
		row(w, e.name(), string(e.State), ago(e.Taken.Sub(e.Since)), code, help)
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
