// Package docscript reads the commands of a page of documentation, as a reader
// would type them, and makes one script of them, so that a test can run every
// command that the documents show.
//
// Commands stand in fences marked console. A line that begins with "$ " is a
// command; lines that end with a backslash, and those of a here-document, go on;
// every other line is what the command above it prints, and Check compares it where
// there is any. A line "..." stands for any lines, "..." within a line for any text,
// and ages, times, hashes, addresses, versions and ends of generated names for others
// of their form. What a reader knows and the page cannot say is in HTML comments,
// which rendering leaves out:
//
//	<!-- run: {page: bare} -->                      once, first: the lab that the page needs: bare, bare-vendors, installed (default),
//
// vendors
//
//	<!-- run: {set: {NODE: divvy-lab-0}} -->        once, first: words that stand for others
//	<!-- run: {fails: true} -->                     before a fence: its last command fails
//	<!-- run: {by: TestName, why: it needs two nodes} -->  before a fence: who else runs it
//	<!-- run: {why: the program is not in the lab} -->      before a fence: why no test runs it
//	<!-- run: {before: "kubectl create namespace a"} -->   before a fence: commands that make what it needs
//	<!-- run: {after: "kubectl delete namespace a"} -->    anywhere: commands for the end of the page
//	<!-- run: {file: testdata/a.txt} -->            before another fence: a file of the repository that it shows
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
	for _, pattern := range []string{"README*.md", "docs/*.md", "docs/reference/*.md", "examples/README.md", "examples/*/README.md",
		"CONTRIBUTING.md"} {
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
	// Words are replaced, as whole words, in the commands of the page; in outputs they
	// stand for either.
	Words  map[string]string
	Blocks []Block
	// After are commands for the end, in the order in which they are to run: the
	// last of the page first.
	After []string
	// Excerpts are fences that show a file, such as a test's golden one.
	Excerpts []Excerpt
}

// Excerpt is a fence that shows a file of the repository, in the notation of outputs.
type Excerpt struct {
	// Line is the line of the page where its text begins, from 1.
	Line  int
	Shown []string
	File  string
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
	// Why says why the block is not run here, "" if it is. By is who runs it instead:
	// the name of a test, "make" and a target, another page that has the same commands,
	// or "" for none.
	By, Why string
}

// Command is what a reader types before pressing Enter; it may have several lines.
type Command struct {
	Line int
	Text string
	// Output is what the page shows below it, nil if nothing.
	Output []string
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
	File   string            `json:"file,omitempty"`
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
	r.drop()
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
	if !d.Fails && d.By == "" && d.Why == "" && d.Before == "" && d.File == "" {
		return
	}
	if d.By != "" && d.Why == "" {
		r.wrong(line, "by needs why: who runs the commands, and why they are not run with the page")
	}
	r.drop()
	r.next, r.nextLine = &d, line
}

// drop reports what was said of a fence that did not come.
func (r *reader) drop() {
	switch {
	case r.next == nil:
	case r.next.File != "":
		r.wrong(r.nextLine, "no fence that could show %s follows this", r.next.File)
	default:
		r.wrong(r.nextLine, "no fence marked console follows this")
	}
}

func (r *reader) fence(n *ast.FencedCodeBlock) {
	content, line := r.lines(n)
	if string(n.Language(r.source)) != "console" {
		if d := r.next; d != nil && d.File != "" {
			r.page.Excerpts = append(r.page.Excerpts, Excerpt{Line: line, Shown: lines(content), File: d.File})
			r.next = nil
		}
		for i, l := range strings.Split(content, "\n") {
			if len(n.Language(r.source)) == 0 && program.MatchString(strings.TrimSpace(l)) {
				r.wrong(line+i, "a command in a fence that is not marked console, so that no test runs it: %s", l)
			}
		}
		return
	}
	b := Block{Line: line}
	if d := r.next; d != nil && d.File == "" {
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
			if len(found) > 0 {
				last := &found[len(found)-1]
				last.Output = append(last.Output, l)
			}
			continue
		}
		if match := heredoc.FindStringSubmatch(l); match != nil && end == "" {
			end = match[1]
		}
		goesOn = end == "" && strings.HasSuffix(l, `\`)
	}
	for i := range found {
		found[i].Output = lines(strings.Join(found[i].Output, "\n"))
	}
	return found
}

// Script is a script for bash that runs the page's commands in one shell, with what
// they need before and what is to be done after, and stops at the first that
// fails. It prints the place of each command before it runs, which Check looks for.
func (p *Page) Script() string {
	var b strings.Builder
	b.WriteString("set -eo pipefail\n")
	// What is done after is done also after a failure, and its own failures do not
	// hide that.
	b.WriteString("after() {\n  code=$?\n  set +e\n")
	fmt.Fprintf(&b, "echo; echo %s\n", quote(mark+p.Path+": after"))
	for _, a := range p.After {
		fmt.Fprintf(&b, "%s\n", p.words(a))
	}
	b.WriteString("  exit $code\n}\ntrap after EXIT\n")
	for _, block := range p.Blocks {
		if block.Why != "" {
			continue
		}
		if block.Before != "" {
			fmt.Fprintf(&b, "echo; echo %s\n%s\n", quote(fmt.Sprintf("%s%s:%d: before", mark, p.Path, block.Line)), p.words(block.Before))
		}
		for i, c := range block.Commands {
			fmt.Fprintf(&b, "echo; echo %s\n", quote(p.mark(c)))
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

// Runs returns how many commands Script runs, how many others do, and how many no test
// does.
func (p *Page) Runs() (here, elsewhere, nowhere int) {
	for _, b := range p.Blocks {
		switch {
		case b.Why == "":
			here += len(b.Commands)
		case b.By != "":
			elsewhere += len(b.Commands)
		default:
			nowhere += len(b.Commands)
		}
	}
	return here, elsewhere, nowhere
}

// mark begins the line that names a place of the page. An output that ends within a
// line has an end of line added before it.
const mark = "== "

func (p *Page) mark(c Command) string {
	return fmt.Sprintf("%s%s:%d: %s", mark, p.Path, c.Line, c.Text)
}

// Find returns the first of the page's commands with that text.
func (p *Page) Find(text string) (Command, error) {
	for _, b := range p.Blocks {
		for _, c := range b.Commands {
			if c.Text == text {
				return c, nil
			}
		}
	}
	return Command{}, fmt.Errorf("%s has no command %s", p.Path, text)
}

// words puts in what the page's words stand for, once: what was put in is left as it
// is.
func (p *Page) words(command string) string {
	var b strings.Builder
	at := 0
	for _, found := range p.findWords(command) {
		b.WriteString(command[at:found[0]] + p.Words[command[found[0]:found[1]]])
		at = found[1]
	}
	return b.String() + command[at:]
}

// findWords returns where the page's words begin and end in a text.
func (p *Page) findWords(text string) [][]int {
	if len(p.Words) == 0 {
		return nil
	}
	var all []string
	for _, word := range slices.Sorted(maps.Keys(p.Words)) {
		all = append(all, regexp.QuoteMeta(word))
	}
	// Words of a command are longer than those of a text: paths and options are one.
	candidate := regexp.MustCompile(`[\w-]*(?:` + strings.Join(all, "|") + `)[\w-]*`)
	return slices.DeleteFunc(candidate.FindAllStringIndex(text, -1), func(found []int) bool {
		_, ok := p.Words[text[found[0]:found[1]]]
		return !ok
	})
}

func quote(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" }
