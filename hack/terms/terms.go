// Package terms finds the terms of docs/testdata/private-terms.txt in what users read:
// the documentation, the chart and what the programs print.
package terms

import (
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// patterns is the file of the patterns and of the terms to use instead.
const patterns = "docs/testdata/private-terms.txt"

// exempt are texts in which a term may stand, by the reason.
var exempt = []*regexp.Regexp{
	// The error of the system's connect, which users search for.
	regexp.MustCompile(`(?i)connection refused`),
	// API identifiers in Markdown: names of events, labels of metrics, flags, tests.
	regexp.MustCompile("`[^`\\s]*`"),
	// The flag and the column of the simulation, which scripts read.
	regexp.MustCompile(`--refused|REFUSED`),
	// Annotations of kubelet's own, and what Markdown refers to.
	regexp.MustCompile(`\]\([^)\s]*\)`),
}

// unchecked are folders of Go files whose texts reach no user: helpers of tests.
var unchecked = []string{"internal/node/backend/backendtest", "internal/testing"}

// Match is a term that was found.
type Match struct {
	// Place is the file, with a line or the path in a schema.
	Place string
	// Term is what was found, and Instead what to write.
	Term, Instead string
	// Text is what the term stands in.
	Text string
}

// Result is what Find found, and in how much.
type Result struct {
	Matches         []Match
	Patterns, Texts int
}

// Find looks for the terms in the checkout at root.
func Find(root string) (Result, error) {
	terms, err := read(root)
	if err != nil {
		return Result{}, err
	}
	texts, err := texts(root)
	if err != nil {
		return Result{}, err
	}
	found := Result{Patterns: len(terms), Texts: len(texts)}
	for _, t := range texts {
		rest := t.text
		for _, e := range exempt {
			rest = e.ReplaceAllString(rest, "")
		}
		for term, instead := range terms {
			for _, match := range term.FindAllString(rest, -1) {
				found.Matches = append(found.Matches, Match{Place: t.place, Term: match, Instead: instead, Text: strings.TrimSpace(rest)})
			}
		}
	}
	return found, nil
}

// read reads the patterns, with the terms to use instead.
func read(root string) (map[*regexp.Regexp]string, error) {
	text, err := os.ReadFile(filepath.Join(root, patterns))
	if err != nil {
		return nil, err
	}
	terms := map[*regexp.Regexp]string{}
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		pattern, instead, ok := strings.Cut(line, " => ")
		if !ok {
			return nil, fmt.Errorf("%s: %q has no term to use instead", patterns, line)
		}
		term, err := regexp.Compile("(?i)" + pattern)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", patterns, err)
		}
		terms[term] = instead
	}
	return terms, nil
}

// text is a line or a string that users read.
type text struct{ place, text string }

// texts are all that is checked.
func texts(root string) ([]text, error) {
	files, err := pagesAndChart(root)
	if err != nil {
		return nil, err
	}
	var all []text
	for _, file := range files {
		content, err := os.ReadFile(filepath.Join(root, file))
		if err != nil {
			return nil, err
		}
		if filepath.Ext(file) == ".json" {
			var schema any
			if err := json.Unmarshal(content, &schema); err != nil {
				return nil, fmt.Errorf("%s: %w", file, err)
			}
			all = append(all, descriptions(file, schema)...)
			continue
		}
		line := 0
		for one := range strings.Lines(string(content)) {
			line++
			all = append(all, text{file + ":" + strconv.Itoa(line), one})
		}
	}
	printed, err := printed(root)
	return append(all, printed...), err
}

// pagesAndChart are the files whose lines are checked. Design notes and the change
// log quote what was, and are left out.
func pagesAndChart(root string) ([]string, error) {
	files := []string{"README.md", "CONTRIBUTING.md", "examples/README.md", "charts/divvy/Chart.yaml", "charts/divvy/values.yaml",
		"charts/divvy/values.schema.json", "charts/divvy/templates/NOTES.txt", "charts/divvy/files/alerts.yaml"}
	for _, pattern := range []string{"docs/*.md", "docs/reference/*.md"} {
		found, err := fs.Glob(os.DirFS(root), pattern)
		if err == nil && len(found) == 0 {
			err = fs.ErrNotExist
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", pattern, err)
		}
		files = append(files, found...)
	}
	return files, nil
}

// descriptions are the descriptions of a JSON schema, by their path.
func descriptions(path string, node any) (found []text) {
	switch node := node.(type) {
	case map[string]any:
		for key, value := range node {
			if description, ok := value.(string); ok && key == "description" {
				found = append(found, text{path, description})
			}
			found = append(found, descriptions(path+"/"+key, value)...)
		}
	case []any:
		for i, value := range node {
			found = append(found, descriptions(path+"/"+strconv.Itoa(i), value)...)
		}
	}
	return found
}

// printed are the string literals with a space of the programs, by their place: help,
// messages, errors and logs, as there is no safe way to tell them from other literals.
func printed(root string) ([]text, error) {
	var found []text
	for _, top := range []string{"api", "cmd", "internal"} {
		err := fs.WalkDir(os.DirFS(root), top, func(name string, entry fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			if entry.IsDir() {
				if slices.Contains(unchecked, name) {
					return fs.SkipDir
				}
				return nil
			}
			if !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
				return nil
			}
			source, err := os.ReadFile(filepath.Join(root, name))
			if err != nil {
				return err
			}
			set := token.NewFileSet()
			file, err := parser.ParseFile(set, name, source, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			ast.Inspect(file, func(n ast.Node) bool {
				if literal, ok := n.(*ast.BasicLit); ok && literal.Kind == token.STRING {
					if content, err := strconv.Unquote(literal.Value); err == nil && strings.Contains(content, " ") {
						found = append(found, text{set.Position(literal.Pos()).String(), content})
					}
				}
				return true
			})
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return found, nil
}
