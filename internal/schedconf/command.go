package schedconf

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
	"mvdan.cc/sh/v3/syntax"

	"github.com/divvy-gpu/divvy/internal/schedconf/yamledit"
)

// A command is how a container starts kube-scheduler: a list of words in command
// and args, or one script of a shell.
type command struct {
	// found is set when kube-scheduler itself is named.
	found bool
	// opaque is set when there is a command, but none of kube-scheduler.
	opaque bool
	list   []word
	flags  []option
	// program is the last word in list that belongs to the program's name, -1 for
	// the image's own. In a script it is where the script is.
	program int
	// script is set when the words are those of a shell's script. programEnd is
	// where in it the program's name ends.
	script     bool
	programEnd int
}

// A word is one element of command or args.
type word struct {
	path []any
	text string
}

// An option is a flag on kube-scheduler's command line. The place is where in list its
// name and its value are, and in a script the bytes that they take.
type option struct {
	name, value     string
	at, valueAt     int
	from, to        int
	valueFrom       int
	unclear         string // why the value cannot be told
	valueIsSeparate bool
}

// noValue is why a value cannot be told that is not there. The library for flags
// takes whatever comes next for it, even another flag.
const noValue = "it has no value"

// switches are the flags that take no value unless it is written with "=".
var switches = []string{"leader-elect", "profiling", "contention-profiling", "use-legacy-policy-config", "logtostderr", "alsologtostderr",
	"skip-headers", "skip-log-headers", "one-output", "authentication-skip-lookup", "authentication-tolerate-lookup-failure", "help", "permit-address-sharing",
	"permit-port-sharing"}

func (c command) words() []string {
	out := make([]string, len(c.list))
	for i, w := range c.list {
		out[i] = w.text
	}
	return out
}

// readCommand reads the command of one container. Its result is of use with an
// error, too, but for the flags.
func readCommand(doc *yamledit.Doc, container int) (command, error) {
	c := command{program: -1}
	for _, field := range []string{"command", "args"} {
		p := []any{"spec", "containers", container, field}
		n := doc.At(p...)
		if yamledit.IsNull(n) {
			continue
		}
		if n.Kind != yaml.SequenceNode {
			return c, fmt.Errorf("line %d: %s of the container is not a list", n.Line, field)
		}
		for i, e := range n.Content {
			e = yamledit.Resolve(e)
			if e.Kind != yaml.ScalarNode {
				return c, fmt.Errorf("line %d: %s[%d] of the container is not a text", e.Line, field, i)
			}
			c.list = append(c.list, word{append(slices.Clone(p), i), e.Value})
		}
		c.opaque = c.opaque || field == "command" && len(n.Content) > 0
	}
	for i, w := range c.list {
		switch base := path.Base(w.text); {
		case base == "kube-scheduler":
			c.program, c.found = i, true
		case base == "scheduler" && i > 0 && path.Base(c.list[i-1].text) == "hyperkube":
			c.program, c.found = i, true
		default:
			continue
		}
		c.readList(i + 1)
		return c, nil
	}
	if i := c.scriptAt(); i >= 0 {
		err := c.readScript(i)
		return c, err
	}
	if !c.opaque {
		c.readList(0)
	}
	return c, nil
}

// scriptAt returns where the script of a shell is, or -1.
func (c *command) scriptAt() int {
	if len(c.list) < 3 || !slices.Contains([]string{"sh", "bash", "ash", "dash"}, path.Base(c.list[0].text)) {
		return -1
	}
	for i, w := range c.list[1 : len(c.list)-1] {
		if !strings.HasPrefix(w.text, "-") {
			return -1
		}
		if !strings.HasPrefix(w.text, "--") && strings.Contains(w.text, "c") {
			return i + 2
		}
	}
	return -1
}

// readFlags reads flags from words of the command line as the library for flags of
// Kubernetes does: a dash and an underscore in a name are the same, and the last of
// several counts. Word returns a word and why its text cannot be told; places in what
// it returns are numbers of words.
func readFlags(first, end int, word func(i int) (text, unclear string)) []option {
	var flags []option
	for i := first; i < end; i++ {
		text, unclear := word(i)
		if text == "--" {
			break
		}
		long, ok := strings.CutPrefix(text, "--")
		if !ok {
			if text == "-v" {
				i++
			}
			continue
		}
		name, value, has := strings.Cut(long, "=")
		f := option{name: strings.ReplaceAll(name, "_", "-"), value: value, at: i, valueAt: i, unclear: unclear}
		switch {
		case has:
		case slices.Contains(switches, f.name):
			f.value = "true"
		case i+1 == end:
			f.unclear = noValue
		default:
			next, why := word(i + 1)
			if strings.HasPrefix(next, "-") {
				f.unclear = noValue
				break
			}
			i++
			f.value, f.valueAt, f.unclear, f.valueIsSeparate = next, i, why, true
		}
		flags = append(flags, f)
	}
	return flags
}

// readList reads the flags in list, from the first on.
func (c *command) readList(first int) {
	c.flags = append(c.flags, readFlags(first, len(c.list), func(i int) (string, string) { return c.list[i].text, "" })...)
	for i := range c.flags {
		if strings.Contains(c.flags[i].value, "$(") {
			c.flags[i].unclear = "kubelet puts an environment variable into it"
		}
	}
}

// readScript reads the flags of the one kube-scheduler that a script starts.
func (c *command) readScript(at int) error {
	script := c.list[at].text
	file, err := syntax.NewParser(syntax.Variant(syntax.LangBash)).Parse(strings.NewReader(script), "")
	if err != nil {
		return fmt.Errorf("the container's script cannot be read: %w", err)
	}
	var calls [][]*syntax.Word
	syntax.Walk(file, func(n syntax.Node) bool {
		call, ok := n.(*syntax.CallExpr)
		if !ok {
			return true
		}
		for i, w := range call.Args {
			text, unclear := wordText(script, w)
			base := path.Base(text)
			if unclear == "" && (base == "kube-scheduler" || base == "scheduler" && i > 0 && path.Base(call.Args[i-1].Lit()) == "hyperkube") {
				calls = append(calls, call.Args[i:])
				break
			}
		}
		return true
	})
	switch len(calls) {
	case 0:
		return nil
	case 1:
	default:
		return fmt.Errorf("the container's script starts kube-scheduler %d times", len(calls))
	}
	c.found, c.script, c.program = true, true, at
	args := calls[0]
	c.programEnd = byteAt(args[0].End())
	c.flags = append(c.flags, readFlags(1, len(args), func(i int) (string, string) { return wordText(script, args[i]) })...)
	for i := range c.flags {
		f := &c.flags[i]
		f.from, f.valueFrom, f.to = byteAt(args[f.at].Pos()), byteAt(args[f.valueAt].Pos()), byteAt(args[f.valueAt].End())
		f.at, f.valueAt = at, at
	}
	return nil
}

func byteAt(p syntax.Pos) int { return int(p.Offset()) }

// wordText returns what a shell makes of a word, and why that cannot be told.
// What is in front of the part that cannot be told is returned in any case.
func wordText(script string, w *syntax.Word) (text, unclear string) {
	var b strings.Builder
	var parts func(list []syntax.WordPart, quoted bool) string
	parts = func(list []syntax.WordPart, quoted bool) string {
		for _, part := range list {
			switch part := part.(type) {
			case *syntax.Lit:
				b.WriteString(unescape(part.Value, quoted))
			case *syntax.SglQuoted:
				if part.Dollar {
					return script[byteAt(part.Pos()):byteAt(part.End())]
				}
				b.WriteString(part.Value)
			case *syntax.DblQuoted:
				if why := parts(part.Parts, true); why != "" {
					return why
				}
			default:
				return script[byteAt(part.Pos()):byteAt(part.End())]
			}
		}
		return ""
	}
	if why := parts(w.Parts, false); why != "" {
		return b.String(), "the shell puts " + why + " into it"
	}
	return b.String(), ""
}

// unescape takes the backslashes out of a literal, as a shell does.
func unescape(s string, quoted bool) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+1 < len(s) && (!quoted || strings.IndexByte("$`\"\\\n", s[i+1]) >= 0) {
			i++
			if s[i] == '\n' {
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// flag returns the one of a name that counts, which is the last.
func (c command) flag(name string) (option, bool) {
	for _, f := range slices.Backward(c.flags) {
		if f.name == name {
			return f, true
		}
	}
	return option{}, false
}

var safeWord = regexp.MustCompile(`^[A-Za-z0-9/._+@=:,-]+$`)

// shellWord returns a text as one word of a shell.
func shellWord(s string) string {
	if safeWord.MatchString(s) {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// setFlag gives a flag a value. One that is not there comes first.
func (p *pod) setFlag(name, value string) (*pod, error) {
	c := p.command
	f, ok := c.flag(name)
	full := "--" + name + "=" + value
	var doc *yamledit.Doc
	var err error
	switch {
	case ok && f.value == value && f.unclear == "":
		return p, nil
	case c.script:
		script := c.list[c.program]
		text := script.text[:c.programEnd] + " " + shellWord(full) + script.text[c.programEnd:]
		if ok {
			if f.valueIsSeparate {
				full = value
			}
			text = script.text[:f.valueFrom] + shellWord(full) + script.text[f.to:]
		}
		doc, err = p.doc.Replace(script.path, text)
	case ok:
		if f.valueIsSeparate {
			full = value
		}
		doc, err = p.doc.Replace(c.list[f.valueAt].path, full)
	case c.program >= 0:
		at := c.list[c.program].path
		position, _ := at[len(at)-1].(int)
		doc, err = p.doc.Insert(at[:len(at)-1], position+1, full)
	default:
		args := p.at("args")
		if n := p.doc.At(args...); n != nil && len(n.Content) > 0 {
			doc, err = p.doc.Insert(args, 0, full)
		} else {
			doc, err = push(p.doc, args, full)
		}
	}
	if err != nil {
		return nil, p.errorf("%w", err)
	}
	return p.with(doc)
}

// dropFlag takes a flag out.
func (p *pod) dropFlag(name string) (*pod, error) {
	c := p.command
	f, ok := c.flag(name)
	if !ok {
		return p, nil
	}
	if c.script {
		script := c.list[c.program]
		from := strings.TrimRight(script.text[:f.from], " \t")
		doc, err := p.doc.Replace(script.path, from+script.text[f.to:])
		if err != nil {
			return nil, p.errorf("%w", err)
		}
		return p.with(doc)
	}
	places := []int{f.at}
	if f.valueIsSeparate {
		places = []int{f.valueAt, f.at}
	}
	for _, i := range places {
		at := c.list[i].path
		position, _ := at[len(at)-1].(int)
		var err error
		if p, err = p.pull(at[:len(at)-1], position); err != nil {
			return nil, err
		}
	}
	return p, nil
}
