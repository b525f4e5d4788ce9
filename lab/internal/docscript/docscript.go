// Package docscript reads the commands of a page of documentation, as a reader
// would type them, and makes one script of them, so that a test can run every
// command that the documents show.
//
// Commands stand in fences marked console. A line that begins with "$ " is a
// command; lines that end with a backslash, and those of a here-document, go on;
// every other line is output. What a reader knows and the page cannot say is in
// HTML comments, which rendering leaves out:
//
//	<!-- run: {page: bare} -->                      once, first: the lab that the page needs: bare, bare-vendors, installed (default), vendors
//	<!-- run: {set: {NODE: divvy-lab-0}} -->        once, first: words that stand for others
//	<!-- run: {fails: true} -->                     before a fence: its last command fails
//	<!-- run: {by: TestName, why: it needs two nodes} -->  before a fence: who else runs it
//	<!-- run: {before: "kubectl create namespace a"} -->   before a fence: commands that make what it needs
//	<!-- run: {after: "kubectl delete namespace a"} -->    anywhere: commands for the end of the page
package docscript

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/text"
	"sigs.k8s.io/yaml"
)

// Labs that a page may need.
const (
	// Bare is a cluster without Divvy, with the cards of the user guide of GCUShare;
	// BareVendors has cards of three vendors.
	Bare        = "bare"
	BareVendors = "bare-vendors"
	// Installed has Divvy as the user guide of GCUShare shows it, and a remote pool.
	Installed = "installed"
	// Vendors has cards of three vendors and lab/values/mixed.yaml.
	Vendors = "vendors"
)

// Files returns the pages with commands that a reader may follow, as paths below the
// root of the repository: all of docs/ but the decisions, and the READMEs.
func Files(root string) ([]string, error) {
	var files []string
	for _, pattern := range []string{"README*.md", "docs/*.md", "docs/reference/*.md", "examples/README.md", "CONTRIBUTING.md"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			return nil, fmt.Errorf("pages %s: %w", pattern, err)
		}
		for _, path := range found {
			path, err := filepath.Rel(root, path)
			if err != nil {
				return nil, fmt.Errorf("pages %s: %w", pattern, err)
			}
			files = append(files, path)
		}
	}
	return files, nil
}

// Page is the commands of a file.
type Page struct {
	Path string
	// Lab is the lab that the page needs.
	Lab string
	// Words are replaced, as whole words, in the commands of the page.
	Words  map[string]string
	Blocks []Block
	// After are commands for the end, in the order in which they are to run: the
	// last of the page first.
	After []string
}

// Block is a fence with commands.
type Block struct {
	// Line is the line of the file where its text begins, from 1.
	Line int
	// Before makes what the commands need.
	Before   string
	Commands []Command
	// Fails says that the last command is to fail.
	Fails bool
	// By is who runs the block if it is not run here, "" if it is: the name of a
	// test, "make" and a target, or another page that has the same commands. Why says
	// why it is so.
	By, Why string
}

// Command is what a reader types before pressing Enter; it may have several lines.
type Command struct {
	Line int
	Text string
}

// directive is what a comment may say.
type directive struct {
	Page   string            `json:"page,omitempty"`
	Set    map[string]string `json:"set,omitempty"`
	Fails  bool              `json:"fails,omitempty"`
	By     string            `json:"by,omitempty"`
	Why    string            `json:"why,omitempty"`
	Before string            `json:"before,omitempty"`
	After  string            `json:"after,omitempty"`
}

var comment = regexp.MustCompile(`(?s)^<!--\s*run:(.*?)-->\s*$`)

// program matches the beginning of a line that is a command although its fence is
// not marked as one.
var program = regexp.MustCompile(`^(\$ |sudo |kubectl |helm |make |docker |divvy-(node|control) [a-z-]|kubectl-divvy )`)

// Read reads the page. The error says all that is wrong with it, by lines: an
// unknown directive, a fence marked console without a command, commands in another
// fence.
func Read(path string) (*Page, error) {
	source, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read a page: %w", err)
	}
	return Parse(path, source)
}

// Parse is Read of a source; the path is for messages.
func Parse(path string, source []byte) (*Page, error) {
	r := reader{page: &Page{Path: path, Lab: Installed, Words: map[string]string{}}, source: source}
	root := goldmark.DefaultParser().Parse(text.NewReader(source))
	err := ast.Walk(root, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if !entering {
			return ast.WalkContinue, nil
		}
		switch n := n.(type) {
		case *ast.HTMLBlock:
			r.comment(n)
		case *ast.FencedCodeBlock:
			r.fence(n)
		}
		return ast.WalkContinue, nil
	})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if r.next != nil {
		r.wrong(r.nextLine, "no fence marked console follows this")
	}
	slices.Reverse(r.page.After)
	return r.page, errors.Join(r.errs...)
}

type reader struct {
	page   *Page
	source []byte
	// next is said of the fence to come.
	next     *directive
	nextLine int
	errs     []error
}

func (r *reader) wrong(line int, format string, args ...any) {
	r.errs = append(r.errs, fmt.Errorf("%s:%d: %s", r.page.Path, line, fmt.Sprintf(format, args...)))
}

// line returns the number of the line of an offset, from 1.
func (r *reader) line(offset int) int { return bytes.Count(r.source[:offset], []byte("\n")) + 1 }

// lines returns the text of a block and the number of its first line.
func (r *reader) lines(n ast.Node) (string, int) {
	var b strings.Builder
	lines := n.Lines()
	if lines.Len() == 0 {
		return "", 0
	}
	for i := range lines.Len() {
		segment := lines.At(i)
		b.Write(segment.Value(r.source))
	}
	return b.String(), r.line(lines.At(0).Start)
}

func (r *reader) comment(n *ast.HTMLBlock) {
	content, line := r.lines(n)
	if n.HasClosure() {
		// The closing line is not among the lines.
		content += string(n.ClosureLine.Value(r.source))
	}
	match := comment.FindStringSubmatch(strings.TrimSpace(content))
	if match == nil {
		return
	}
	var d directive
	if err := yaml.UnmarshalStrict([]byte(match[1]), &d); err != nil {
		r.wrong(line, "a comment for running the page: %v", err)
		return
	}
	switch d.Page {
	case "":
	case Bare, BareVendors, Installed, Vendors:
		r.page.Lab = d.Page
	default:
		r.wrong(line, "page: %s: there is no such lab; there are %s, %s, %s and %s", d.Page, Bare, BareVendors, Installed, Vendors)
	}
	maps.Copy(r.page.Words, d.Set)
	if d.After != "" {
		r.page.After = append(r.page.After, d.After)
	}
	if !d.Fails && d.By == "" && d.Why == "" && d.Before == "" {
		return
	}
	if (d.By == "") != (d.Why == "") {
		r.wrong(line, "by and why go together: who runs the commands, and why they are not run with the page")
	}
	if r.next != nil {
		r.wrong(r.nextLine, "no fence marked console follows this")
	}
	r.next, r.nextLine = &d, line
}

func (r *reader) fence(n *ast.FencedCodeBlock) {
	content, line := r.lines(n)
	if string(n.Language(r.source)) != "console" {
		for i, l := range strings.Split(content, "\n") {
			if len(n.Language(r.source)) == 0 && program.MatchString(strings.TrimSpace(l)) {
				r.wrong(line+i, "a command in a fence that is not marked console, so that no test runs it: %s", l)
			}
		}
		return
	}
	b := Block{Line: line}
	if d := r.next; d != nil {
		b.Before, b.Fails, b.By, b.Why = d.Before, d.Fails, d.By, d.Why
		r.next = nil
	}
	b.Commands = commands(content, line)
	if len(b.Commands) == 0 {
		r.wrong(line, `no line of this fence begins with "$ ", so there is no command in it`)
		return
	}
	r.page.Blocks = append(r.page.Blocks, b)
}

var heredoc = regexp.MustCompile(`<<-?\s*['"]?(\w+)['"]?`)

func commands(content string, line int) []Command {
	var found []Command
	end := "" // of a here-document
	goesOn := false
	for i, l := range strings.Split(strings.TrimSuffix(content, "\n"), "\n") {
		switch {
		case end != "" || goesOn:
			last := &found[len(found)-1]
			last.Text += "\n" + l
			if end != "" && strings.TrimSpace(l) == end {
				end = ""
			}
			if end != "" {
				continue
			}
		case strings.HasPrefix(l, "$ "):
			found = append(found, Command{Line: line + i, Text: l[2:]})
		default:
			continue
		}
		if match := heredoc.FindStringSubmatch(l); match != nil && end == "" {
			end = match[1]
		}
		goesOn = end == "" && strings.HasSuffix(l, `\`)
	}
	return found
}

// Script is a script for bash that runs the page's commands in one shell, with what
// they need before and what is to be done after, and stops at the first that
// fails. It prints the place of each command before it runs.
func (p *Page) Script() string {
	var b strings.Builder
	b.WriteString("set -eo pipefail\n")
	// What is done after is done also after a failure, and its own failures do not
	// hide that.
	b.WriteString("after() {\n  code=$?\n  set +e\n")
	for _, a := range p.After {
		fmt.Fprintf(&b, "%s\n", p.words(a))
	}
	b.WriteString("  exit $code\n}\ntrap after EXIT\n")
	for _, block := range p.Blocks {
		if block.By != "" {
			continue
		}
		if block.Before != "" {
			fmt.Fprintf(&b, "%s\n", p.words(block.Before))
		}
		for i, c := range block.Commands {
			fmt.Fprintf(&b, "echo %s\n", quote(fmt.Sprintf("== %s:%d: %s", p.Path, c.Line, c.Text)))
			if command := p.words(c.Text); block.Fails && i == len(block.Commands)-1 {
				fmt.Fprintf(&b, "if {\n%s\n}; then echo 'This was to fail.'; exit 1; fi\n", command)
			} else {
				fmt.Fprintf(&b, "%s\n", command)
			}
		}
	}
	return b.String()
}

// Of returns the page with the blocks that another runner runs, and with no others.
func (p *Page) Of(runner string) *Page {
	part := *p
	part.After, part.Blocks = nil, nil
	for _, block := range p.Blocks {
		if block.By == runner {
			block.By, block.Why = "", ""
			part.Blocks = append(part.Blocks, block)
		}
	}
	return &part
}

// Runs returns how many commands Script runs, and how many others do.
func (p *Page) Runs() (here, elsewhere int) {
	for _, b := range p.Blocks {
		if b.By == "" {
			here += len(b.Commands)
		} else {
			elsewhere += len(b.Commands)
		}
	}
	return here, elsewhere
}

// words puts in what the page's words stand for, once: what was put in is left as it
// is.
func (p *Page) words(command string) string {
	if len(p.Words) == 0 {
		return command
	}
	var all []string
	for _, word := range slices.Sorted(maps.Keys(p.Words)) {
		all = append(all, regexp.QuoteMeta(word))
	}
	// Words of a command are longer than those of a text: paths and options are one.
	candidate := regexp.MustCompile(`[\w-]*(?:` + strings.Join(all, "|") + `)[\w-]*`)
	return candidate.ReplaceAllStringFunc(command, func(found string) string {
		if meaning, ok := p.Words[found]; ok {
			return meaning
		}
		return found
	})
}

func quote(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" }
