package docscript

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
)

// forms are texts that differ from one cluster and moment to the next: where a page
// shows one, any other of the same form may be printed. Of two that begin at the same
// place the first applies.
var forms = []form{
	// What a page leaves out: the rest of a hash, the rest of a line.
	{regexp.MustCompile(`\b[0-9a-f]{4,}(?:\.\.\.|…)`), `[0-9a-f][0-9a-f-]*`},
	{regexp.MustCompile(`\.\.\.|…`), `.*`},
	same(`\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z`),
	same(`\b\d{4}-\d\d-\d\d\b`),
	same(`\b\d\d:\d\d:\d\d\b`),
	same(`\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b`),
	// Digests.
	same(`\b[0-9a-f]{40,}\b`),
	// Addresses. Their ports are compared: most are fixed.
	same(`\b\d{1,3}(?:\.\d{1,3}){3}\b`),
	// Versions. A build of a checkout without tags is named after its commit, one
	// without git "dev".
	{regexp.MustCompile(`\bv\d+\.\d+\.\d+(?:[.+-]?\w+)*`), `(?:v\d+\.\d+\.\d+(?:[.+-]?\w+)*|[0-9a-f]{7,}(?:-dirty)?|dev)`},
	// Ages and durations.
	same(`\b(?:\d+(?:\.\d+)?(?:ns|us|µs|ms|s|m|h|d))+\b`),
	same(`\b\d+(?:\.\d+)? (?:ms|s)\b`),
	// Ends of names that Kubernetes makes: it uses no vowels, so that they are no words.
	same(`-[b-df-hj-np-tv-xz2456789]{5,10}\b`),
}

type form struct {
	shown *regexp.Regexp
	// printed is an expression for what may be there.
	printed string
}

func same(expression string) form { return form{regexp.MustCompile(expression), expression} }

var spaces = regexp.MustCompile(`[ \t]+`)

// Check compares what the script printed with what the page shows. The error has
// the place and a diff for each command whose output differs.
func (p *Page) Check(printed string) error {
	var errs []error
	for _, b := range p.Blocks {
		if b.Why != "" {
			continue
		}
		for _, c := range b.Commands {
			_, rest, ran := strings.Cut(printed, p.mark(c))
			if !ran {
				errs = append(errs, fmt.Errorf("%s:%d: the command did not run: %s", p.Path, c.Line, c.Text))
				continue
			}
			output, _, _ := strings.Cut(rest, "\n"+mark+p.Path+":")
			errs = append(errs, p.CheckOutput(c, output))
			printed = rest
		}
	}
	return errors.Join(errs...)
}

// CheckOutput compares what a command printed with what the page shows below it; it
// returns nil where the page shows nothing.
func (p *Page) CheckOutput(c Command, printed string) error {
	if len(c.Output) == 0 {
		return nil
	}
	if diff := p.diff(c.Output, lines(printed)); diff != "" {
		return fmt.Errorf("%s:%d: %s: the page shows (-), the command printed (+):\n%s", p.Path, c.Line, c.Text, diff)
	}
	return nil
}

// CheckFile compares a file's content with the fence that shows it.
func (p *Page) CheckFile(e Excerpt, content string) error {
	if diff := p.diff(e.Shown, lines(content)); diff != "" {
		return fmt.Errorf("%s:%d: the page shows (-), %s has (+):\n%s", p.Path, e.Line, e.File, diff)
	}
	return nil
}

// lines are those of an output, without empty ones at its begin and end.
func lines(output string) []string {
	output = strings.TrimRight(output, " \t\r\n")
	for {
		first, rest, more := strings.Cut(output, "\n")
		if !more || strings.TrimSpace(first) != "" {
			break
		}
		output = rest
	}
	if output == "" {
		return nil
	}
	return strings.Split(output, "\n")
}

// diff returns the shortest way from what is shown to what was printed, "" if they
// agree.
func (p *Page) diff(page, printed []string) string {
	shown := make([]*regexp.Regexp, len(page)) // nil for lines that are left out
	for i, line := range page {
		if text := strings.TrimSpace(line); text != "..." && text != "…" {
			shown[i] = p.pattern(line)
		}
	}
	// edits[i][j] is the number of lines that differ between shown[i:] and printed[j:].
	edits := make([][]int, len(shown)+1)
	for i := range edits {
		edits[i] = make([]int, len(printed)+1)
	}
	agree := func(i, j int) bool {
		return i < len(shown) && j < len(printed) && shown[i] != nil && shown[i].MatchString(printed[j])
	}
	for i := len(shown); i >= 0; i-- {
		for j := len(printed); j >= 0; j-- {
			left := i < len(shown) && shown[i] == nil
			switch {
			case i == len(shown) && j == len(printed):
			case left && j == len(printed):
				edits[i][j] = edits[i+1][j]
			case left:
				edits[i][j] = min(edits[i+1][j], edits[i][j+1])
			case agree(i, j):
				edits[i][j] = edits[i+1][j+1]
			case i == len(shown):
				edits[i][j] = 1 + edits[i][j+1]
			case j == len(printed):
				edits[i][j] = 1 + edits[i+1][j]
			default:
				edits[i][j] = 1 + min(edits[i+1][j], edits[i][j+1])
			}
		}
	}
	if edits[0][0] == 0 {
		return ""
	}
	var b strings.Builder
	for i, j := 0, 0; i < len(shown) || j < len(printed); {
		switch left := i < len(shown) && shown[i] == nil; {
		case left && edits[i][j] == edits[i+1][j]:
			b.WriteString("  ...\n")
			i++
		case left:
			j++
		case agree(i, j):
			fmt.Fprintf(&b, "  %s\n", printed[j])
			i, j = i+1, j+1
		case i < len(shown) && edits[i][j] == 1+edits[i+1][j]:
			fmt.Fprintf(&b, "- %s\n", page[i])
			i++
		default:
			fmt.Fprintf(&b, "+ %s\n", printed[j])
			j++
		}
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// pattern matches the lines that may be printed where a page shows this one. Of
// spaces only those at the begin count: the width of columns depends on what varies.
func (p *Page) pattern(line string) *regexp.Regexp {
	text := strings.TrimLeft(line, " \t")
	var b strings.Builder
	b.WriteString("^" + regexp.QuoteMeta(line[:len(line)-len(text)]))
	at := 0
	for _, found := range p.findWords(text) {
		varying(&b, text[at:found[0]])
		// The page may show the word as its commands have it, or what it stands for.
		word := text[found[0]:found[1]]
		fmt.Fprintf(&b, "(?:%s|%s)", regexp.QuoteMeta(word), regexp.QuoteMeta(p.Words[word]))
		at = found[1]
	}
	varying(&b, strings.TrimRight(text[at:], " \t"))
	b.WriteString(`\s*$`)
	return regexp.MustCompile(b.String())
}

// varying writes an expression for a text: of its forms, and literally else.
func varying(b *strings.Builder, text string) {
	for text != "" {
		first, printed := []int{len(text), len(text)}, ""
		for _, f := range forms {
			if found := f.shown.FindStringIndex(text); len(found) == 2 && found[0] < first[0] {
				first, printed = found, f.printed
			}
		}
		b.WriteString(spaces.ReplaceAllString(regexp.QuoteMeta(text[:first[0]]), `[ \t]+`))
		b.WriteString(printed)
		text = text[first[1]:]
	}
}
