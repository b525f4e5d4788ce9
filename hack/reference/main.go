// reference writes docs/reference: what the code itself says of flags, the
// configuration file, the chart's values, metrics, events and the names that
// Divvy reads and writes on objects. It also writes what the chart has of the
// tables of vendors and policies.
//
//	go run ./hack/reference
//
// Its test fails when the pages differ from what it would write.
package main

import (
	"flag"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"
)

func main() {
	root := flag.String("root", ".", "folder of the repository")
	flag.Parse()
	if err := run(*root); err != nil {
		fmt.Fprintln(os.Stderr, "reference:", err)
		os.Exit(1)
	}
}

// folder is where the pages are, below the root.
const folder = "docs/reference"

// page is one page of the reference.
type page struct {
	file, title, about string
	write              func(root string, w *strings.Builder) error
}

var pages = []page{
	{"flags.md", "Flags and environment variables", "every command of every program", flags},
	{"configuration.md", "The configuration file of divvy-node", "each key of `config.divvy.dev/v1alpha1`", configuration},
	{"values.md", "Values of the chart", "each value with its default and what it may be", values},
	{"metrics.md", "Metrics", "each metric with its labels, and who shows it", metricsPage},
	{"events.md", "Events", "each Kubernetes event, what it means and what to do", eventsPage},
	{"annotations.md", "Annotations, labels and resources", "each name that Divvy reads or writes on objects", names},
}

// generated heads every page.
const generated = "<!-- Written by `make generate` from the code; edits are lost. -->\n\n"

// render returns the pages and the files of the chart by their paths below the root.
func render(root string) (map[string]string, error) {
	// Defaults of flags that are the environment's are those of an empty one.
	for _, variable := range os.Environ() {
		name, _, _ := strings.Cut(variable, "=")
		if strings.HasPrefix(name, "DIVVY_") || strings.HasPrefix(name, "POD_") || name == "NODE_NAME" || name == "KUBECONFIG" {
			if err := os.Unsetenv(name); err != nil {
				return nil, err
			}
		}
	}
	out, err := chart(root)
	if err != nil {
		return nil, err
	}
	index := generated + "# Reference\n\nWritten from the code itself.\n\n"
	for _, p := range pages {
		var w strings.Builder
		fmt.Fprintf(&w, "%s# %s\n\n", generated, p.title)
		if err := p.write(root, &w); err != nil {
			return nil, fmt.Errorf("%s: %w", p.file, err)
		}
		out[path.Join(folder, p.file)] = strings.TrimRight(w.String(), "\n") + "\n"
		index += fmt.Sprintf("- [%s](%s): %s\n", p.title, p.file, p.about)
	}
	out[path.Join(folder, "README.md")] = index
	return out, nil
}

func run(root string) error {
	files, err := render(root)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(root, folder), 0o755); err != nil {
		return err
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(root, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// row writes a row of a table.
func row(w *strings.Builder, cells ...string) {
	for i, c := range cells {
		c = strings.ReplaceAll(strings.Join(strings.Fields(c), " "), "|", "\\|")
		if i > 0 {
			w.WriteString(" ")
		}
		if c == "" {
			w.WriteString("|")
			continue
		}
		w.WriteString("| " + c)
	}
	w.WriteString(" |\n")
}

// table writes the head of a table.
func table(w *strings.Builder, heads ...string) {
	row(w, heads...)
	w.WriteString(strings.Repeat("|---", len(heads)) + "|\n")
}

// escape keeps text from being taken for HTML or emphasis.
func escape(text string) string {
	return strings.NewReplacer("<", "&lt;", ">", "&gt;", "*", "\\*").Replace(text)
}

// code is text as code, "" for nothing.
func code(text string) string {
	if text == "" {
		return ""
	}
	if strings.Contains(text, "`") {
		return "`` " + text + " ``"
	}
	return "`" + text + "`"
}
