package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"unicode"
)

// Severity says how a check came out.
type Severity string

// The severities, from the best to the worst.
const (
	OK Severity = "ok"
	// Unknown: something that the check needs could not be read.
	Unknown Severity = "unknown"
	// Warning: it works, but not as it should, or not for long.
	Warning Severity = "warning"
	// Error: something does not work.
	Error Severity = "error"
)

var order = []Severity{OK, Unknown, Warning, Error}

// worse returns the worse of two severities.
func worse(a, b Severity) Severity {
	if slices.Index(order, b) > slices.Index(order, a) {
		return b
	}
	return a
}

// Finding is one thing that is wrong, or that could not be found out.
type Finding struct {
	// Check is the name of the check that found it.
	Check    string   `json:"check"`
	Severity Severity `json:"severity"`
	// Object is what is wrong, such as "Secret divvy-system/divvy-grant-key".
	Object string `json:"object"`
	// Problem says what is wrong with it, Remedy what to do, as sentences.
	Problem string `json:"problem"`
	Remedy  string `json:"remedy,omitempty"`
	// Commands carry the remedy out, in this order; each is a line for a shell
	// that can be run as it is. Empty where a person has to decide something.
	Commands []string `json:"commands,omitempty"`
	// Transient is true for what may mend itself within seconds, because kubelet
	// or a controller is a little behind.
	Transient bool `json:"-"`
}

// Result is how one check came out.
type Result struct {
	Check string `json:"check"`
	Group string `json:"group"`
	// Title says what holds when all is well.
	Title string `json:"title"`
	// Severity is that of the worst finding; OK without any.
	Severity Severity `json:"severity"`
	// Skipped says why there was nothing to check; "" when there was.
	Skipped  string    `json:"skipped,omitempty"`
	Findings []Finding `json:"findings,omitempty"`
}

// Report is what an examination found.
type Report struct {
	// Tool is the version of the program that examined, Kubernetes that of the API
	// server.
	Tool       string `json:"tool"`
	Kubernetes string `json:"kubernetes"`
	// Release names the installation, "" when there is none.
	Release   string `json:"release,omitempty"`
	Namespace string `json:"namespace,omitempty"`
	// Results are in the order of Checks.
	Results []Result `json:"results"`
}

// Count returns how many findings have the severity.
func (r Report) Count(s Severity) int {
	n := 0
	for _, result := range r.Results {
		for _, f := range result.Findings {
			if f.Severity == s {
				n++
			}
		}
	}
	return n
}

// Findings returns all findings, in the order of the checks.
func (r Report) Findings() []Finding {
	var all []Finding
	for _, result := range r.Results {
		all = append(all, result.Findings...)
	}
	return all
}

// Transient reports whether anything wrong may mend itself within seconds.
func (r Report) Transient() bool {
	return slices.ContainsFunc(r.Findings(), func(f Finding) bool { return f.Transient })
}

// findings collects those of one check.
type findings struct {
	check string
	found []Finding
}

// add notes a finding. Texts of foreign origin are made fit for a terminal.
func (f *findings) add(s Severity, object, problem, remedy string, commands ...string) *Finding {
	f.found = append(f.found, Finding{
		Check: f.check, Severity: s, Object: clean(object), Problem: clean(problem), Remedy: remedy, Commands: commands,
	})
	return &f.found[len(f.found)-1]
}

// maxText bounds a text of foreign origin, in bytes.
const maxText = 600

// clean makes a text fit to be printed on one line: names and messages come from
// objects that others write.
func clean(text string) string {
	text = strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || r == '\t' || r == '\r':
			return ' '
		case r == 0xfffd || unicode.In(r, unicode.Cc, unicode.Cf): // a terminal would obey it
			return '?'
		}
		return r
	}, strings.ToValidUTF8(text, "?"))
	if len(text) > maxText {
		text = strings.ToValidUTF8(text[:maxText], "") + " ..."
	}
	return strings.TrimSpace(text)
}

// maxListed is how many names a sentence lists.
const maxListed = 10

// list joins names, and counts those that are too many.
func list(names []string) string {
	names = slices.Clone(names)
	slices.Sort(names)
	names = slices.Compact(names)
	if len(names) > maxListed {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:maxListed], ", "), len(names)-maxListed)
	}
	return strings.Join(names, ", ")
}

// count is a number with its noun.
func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// byObject sorts findings by severity, worst first, then object.
func byObject(a, b Finding) int {
	return cmp.Or(
		cmp.Compare(slices.Index(order, b.Severity), slices.Index(order, a.Severity)),
		cmp.Compare(a.Object, b.Object), cmp.Compare(a.Problem, b.Problem))
}
