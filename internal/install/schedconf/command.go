package schedconf

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/divvy-gpu/divvy/internal/install/schedconf/yamledit"
)

// A command is how a container starts kube-scheduler: the words of command and
// args.
type command struct {
	// found is set when kube-scheduler itself is named.
	found bool
	// opaque is set when there is a command, but none of kube-scheduler.
	opaque bool
	list   []word
	flags  []option
	// program is the place of kube-scheduler in list, -1 for the image's own.
	program int
}

// A word is one element of command or args.
type word struct {
	path []any
	text string
}

// An option is a flag on kube-scheduler's command line, with the places of its name
// and its value in list.
type option struct {
	name, value     string
	at, valueAt     int
	unclear         string // why the value cannot be told
	valueIsSeparate bool
}

// noValue is why a value cannot be told that is not there. The library for flags
// takes whatever comes next for it, even another flag.
const noValue = "it has no value"

// switches are the flags that take no value unless it is written with "=".
var switches = []string{"leader-elect", "profiling", "contention-profiling", "authentication-skip-lookup",
	"authentication-tolerate-lookup-failure", "help", "permit-address-sharing",
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
	if !c.inShell() {
		c.program = slices.IndexFunc(c.list, func(w word) bool { return path.Base(w.text) == "kube-scheduler" })
		c.found = c.program >= 0
	}
	if c.found || !c.opaque {
		c.readFlags(c.program + 1)
	}
	return c, nil
}

// inShell reports whether the words are a script for a shell: what it starts, and
// with which flags, is not read. Images of kube-scheduler have had no shell since 1.19.
func (c command) inShell() bool {
	return len(c.list) > 1 && slices.Contains([]string{"sh", "bash", "ash", "dash"}, path.Base(c.list[0].text)) &&
		strings.HasPrefix(c.list[1].text, "-")
}

// readFlags reads the flags in list, from the first word on, as the library for flags of
// Kubernetes does: a dash and an underscore in a name are the same, and the last of
// several counts.
func (c *command) readFlags(first int) {
	for i := first; i < len(c.list); i++ {
		if c.list[i].text == "--" {
			break
		}
		long, ok := strings.CutPrefix(c.list[i].text, "--")
		if !ok {
			if c.list[i].text == "-v" {
				i++
			}
			continue
		}
		name, value, has := strings.Cut(long, "=")
		f := option{name: strings.ReplaceAll(name, "_", "-"), value: value, at: i, valueAt: i}
		switch {
		case has:
		case slices.Contains(switches, f.name):
			f.value = "true"
		case i+1 == len(c.list) || strings.HasPrefix(c.list[i+1].text, "-"):
			f.unclear = noValue
		default:
			i++
			f.value, f.valueAt, f.valueIsSeparate = c.list[i].text, i, true
		}
		if strings.Contains(f.value, "$(") {
			f.unclear = "kubelet puts an environment variable into it"
		}
		c.flags = append(c.flags, f)
	}
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
