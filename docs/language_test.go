package docs

import (
	"encoding/json"
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
	"testing"
)

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

// privateTerms reads the patterns, with the terms to use instead.
func privateTerms(t *testing.T) map[*regexp.Regexp]string {
	t.Helper()
	terms := map[*regexp.Regexp]string{}
	for line := range strings.Lines(read(t, "docs/testdata/private-terms.txt")) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		pattern, instead, ok := strings.Cut(line, " => ")
		if !ok {
			t.Fatalf("private-terms.txt: %q has no term to use instead", line)
		}
		terms[regexp.MustCompile("(?i)"+pattern)] = instead
	}
	return terms
}

// TestTermsOfTheField: the documentation, the chart and what the programs print use
// the terms of private-terms.txt nowhere.
func TestTermsOfTheField(t *testing.T) {
	terms, matches, texts := privateTerms(t), 0, 0
	check := func(place, text string) {
		texts++
		for _, e := range exempt {
			text = e.ReplaceAllString(text, "")
		}
		for term, instead := range terms {
			for _, match := range term.FindAllString(text, -1) {
				matches++
				t.Errorf("%s: %q: %s\n\t%s", place, match, instead, shorten(text))
			}
		}
	}
	for _, file := range pagesAndChart(t) {
		text := read(t, file)
		if filepath.Ext(file) == ".json" {
			for path, description := range descriptions(t, text) {
				check(file+path, description)
			}
			continue
		}
		line := 0
		for one := range strings.Lines(text) {
			line++
			check(file+":"+strconv.Itoa(line), one)
		}
	}
	for place, text := range printed(t) {
		check(place, text)
	}
	t.Logf("%d matches of %d patterns in %d texts", matches, len(terms), texts)
}

func shorten(text string) string {
	if text = strings.TrimSpace(text); len(text) > 160 {
		text = text[:160] + " ..."
	}
	return text
}

// pagesAndChart are the files whose lines are checked. Design notes and the change
// log quote what was, and are left out.
func pagesAndChart(t *testing.T) []string {
	t.Helper()
	files := []string{"README.md", "CONTRIBUTING.md", "examples/README.md", "charts/divvy/Chart.yaml", "charts/divvy/values.yaml",
		"charts/divvy/values.schema.json", "charts/divvy/templates/NOTES.txt", "charts/divvy/files/alerts.yaml"}
	for _, pattern := range []string{"docs/*.md", "docs/reference/*.md"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil || len(found) == 0 {
			t.Fatalf("%s: %d files, %v", pattern, len(found), err)
		}
		for _, file := range found {
			files = append(files, strings.TrimPrefix(filepath.ToSlash(file), root+"/"))
		}
	}
	return files
}

// descriptions are the descriptions of a JSON schema, by their path.
func descriptions(t *testing.T, text string) map[string]string {
	t.Helper()
	found := map[string]string{}
	var walk func(path string, node any)
	walk = func(path string, node any) {
		switch node := node.(type) {
		case map[string]any:
			for key, value := range node {
				if text, ok := value.(string); ok && key == "description" {
					found[path] = text
				}
				walk(path+"/"+key, value)
			}
		case []any:
			for i, value := range node {
				walk(path+"/"+strconv.Itoa(i), value)
			}
		}
	}
	var schema any
	if err := json.Unmarshal([]byte(text), &schema); err != nil {
		t.Fatal(err)
	}
	walk("", schema)
	return found
}

// printed are the string literals with a space of the programs, by their place: help,
// messages, errors and logs, as there is no safe way to tell them from other literals.
func printed(t *testing.T) map[string]string {
	t.Helper()
	found := map[string]string{}
	for _, top := range []string{"api", "cmd", "internal"} {
		err := filepath.WalkDir(filepath.Join(root, top), func(path string, entry fs.DirEntry, err error) error {
			name := strings.TrimPrefix(filepath.ToSlash(path), root+"/")
			if err != nil || entry.IsDir() {
				if slices.Contains(unchecked, name) {
					return fs.SkipDir
				}
				return err
			}
			if !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
				return nil
			}
			source, err := os.ReadFile(path)
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
					if text, err := strconv.Unquote(literal.Value); err == nil && strings.Contains(text, " ") {
						found[set.Position(literal.Pos()).String()] = text
					}
				}
				return true
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return found
}
