package doctor

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/internal/pool"
)

// Format is a way to print a report.
type Format string

// The formats.
const (
	Text Format = "text"
	JSON Format = "json"
	YAML Format = "yaml"
)

// ParseFormat reads the name of a format.
func ParseFormat(name string) (Format, error) {
	switch f := Format(name); f {
	case Text, JSON, YAML:
		return f, nil
	}
	return "", fmt.Errorf("output format %q: must be text, json or yaml", name)
}

// Print writes the report. verbose adds, in text, the checks without findings.
func Print(out io.Writer, r Report, format Format, verbose bool) error {
	var text []byte
	var err error
	switch format {
	case JSON:
		var b bytes.Buffer
		e := json.NewEncoder(&b)
		e.SetEscapeHTML(false)
		e.SetIndent("", "    ")
		err = e.Encode(r)
		text = b.Bytes()
	case YAML:
		text, err = yaml.Marshal(r)
	default:
		text = r.text(verbose)
	}
	if err == nil {
		_, err = out.Write(text)
	}
	if err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}

func (r Report) text(verbose bool) []byte {
	var b bytes.Buffer
	where := "not installed"
	if r.Release != "" {
		where = fmt.Sprintf("release %s in namespace %s", r.Release, r.Namespace)
	}
	fmt.Fprintf(&b, "Divvy: %s. Kubernetes %s, kubectl-divvy %s.\n", where, r.Kubernetes, r.Tool)
	group := ""
	for _, result := range r.Results {
		if len(result.Findings) == 0 && !verbose {
			continue
		}
		if result.Group != group {
			group = result.Group
			fmt.Fprintf(&b, "\n%s\n", strings.ToUpper(group[:1])+group[1:])
		}
		mark := string(result.Severity)
		if result.Skipped != "" {
			mark = "skipped"
		}
		fmt.Fprintf(&b, "  %-7s  %-13s  %s\n", mark, result.Check, result.Title)
		if result.Skipped != "" {
			fmt.Fprintf(&b, "%sbecause %s\n", indent, result.Skipped)
		}
		for _, f := range result.Findings {
			f.text(&b, result.Severity)
		}
	}
	fmt.Fprintf(&b, "\n%s\n", r.summary())
	return b.Bytes()
}

const indent = "           "

func (f Finding) text(b *bytes.Buffer, of Severity) {
	mark := ""
	if f.Severity != of {
		mark = string(f.Severity) + ": "
	}
	fmt.Fprintf(b, "%s%s%s: %s\n", indent, mark, f.Object, f.Problem)
	if f.Remedy != "" {
		fmt.Fprintf(b, "%s  remedy: %s\n", indent, f.Remedy)
	}
	for _, c := range f.Commands {
		fmt.Fprintf(b, "%s  $ %s\n", indent, c)
	}
}

// summary is the last line.
func (r Report) summary() string {
	made, skipped, unmade := 0, 0, 0
	for _, result := range r.Results {
		switch {
		case result.Skipped != "":
			skipped++
		case result.Severity == Unknown:
			unmade++
		default:
			made++
		}
	}
	errors, warnings := r.Count(Error), r.Count(Warning)
	var text string
	switch {
	case errors+warnings == 0 && unmade > 0:
		text = "No problems were found"
	case errors+warnings == 0:
		text = "No problems"
	default:
		text = count(errors, "error") + ", " + count(warnings, "warning")
	}
	text += fmt.Sprintf("; %s performed", count(made, "check"))
	if unmade > 0 {
		text += fmt.Sprintf(", %d could not be performed", unmade)
	}
	if skipped > 0 {
		text += fmt.Sprintf(", %d not applicable", skipped)
	}
	text += "."
	if unmade > 0 {
		text += " The checks that could not be performed need more permissions."
	}
	return text
}

var (
	kubectlWord = regexp.MustCompile(`(^|\| )kubectl ([a-z])`)
	helmWord    = regexp.MustCompile(`(^|\| )helm ([a-z])`)
)

// At returns the report with commands that speak to the cluster that was
// examined, where that is not kubectl's present one: context and kubeconfig are
// the values of kubectl's flags, "" where they were not given.
func (r Report) At(context, kubeconfig string) Report {
	if context == "" && kubeconfig == "" {
		return r
	}
	var forKubectl, forHelm string
	if kubeconfig != "" {
		forKubectl += "--kubeconfig=" + pool.Quote(kubeconfig) + " "
		forHelm += "--kubeconfig=" + pool.Quote(kubeconfig) + " "
	}
	if context != "" {
		forKubectl += "--context=" + pool.Quote(context) + " "
		forHelm += "--kube-context=" + pool.Quote(context) + " "
	}
	// A dollar sign would be read as a reference to what was matched.
	forKubectl, forHelm = strings.ReplaceAll(forKubectl, "$", "$$"), strings.ReplaceAll(forHelm, "$", "$$")
	results := make([]Result, len(r.Results))
	for i, result := range r.Results {
		found := make([]Finding, len(result.Findings))
		for j, f := range result.Findings {
			commands := make([]string, len(f.Commands))
			for k, c := range f.Commands {
				c = kubectlWord.ReplaceAllString(c, "${1}kubectl "+forKubectl+"${2}")
				commands[k] = helmWord.ReplaceAllString(c, "${1}helm "+forHelm+"${2}")
			}
			f.Commands = commands
			found[j] = f
		}
		result.Findings = found
		results[i] = result
	}
	r.Results = results
	return r
}
