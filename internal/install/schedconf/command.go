package schedconf

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
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

type word struct {
	field    string
	position int
	text     string
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
func readCommand(container *yaml.Node) (command, error) {
	c := command{program: -1}
	for _, field := range []string{"command", "args"} {
		n := get(container, field)
		if isNull(n) {
			continue
		}
		if n.Kind != yaml.SequenceNode {
			return c, fmt.Errorf("line %d: %s of the container is not a list", n.Line, field)
		}
		for i, e := range n.Content {
			if e = resolve(e); e.Kind != yaml.ScalarNode {
				return c, fmt.Errorf("line %d: %s[%d] of the container is not a text", e.Line, field, i)
			}
			c.list = append(c.list, word{field, i, e.Value})
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
func (p *pod) setFlag(name, value string) error {
	c := p.command
	f, ok := c.flag(name)
	full := "--" + name + "=" + value
	var err error
	switch {
	case ok && f.value == value && f.unclear == "":
		return nil
	case ok:
		if f.valueIsSeparate {
			full = value
		}
		w := c.list[f.valueAt]
		var n *yaml.Node
		if n, err = p.doc.owned(yaml.ScalarNode, p.at(w.field, w.position)...); err == nil {
			n.SetString(full)
		}
	case c.program >= 0:
		w := c.list[c.program]
		err = p.doc.insert(p.at(w.field), w.position+1, full)
	default:
		err = p.doc.insert(p.at("args"), 0, full)
	}
	return p.reread(err)
}

func (p *pod) dropFlag(name string) error {
	f, _ := p.command.flag(name)
	err := p.doc.remove(p.at(p.command.list[f.valueAt].field, p.command.list[f.valueAt].position)...)
	if err == nil && f.valueIsSeparate {
		err = p.doc.remove(p.at(p.command.list[f.at].field, p.command.list[f.at].position)...)
	}
	return p.reread(err)
}

func (p *pod) reread(err error) error {
	if err != nil {
		return err
	}
	if p.command, err = readCommand(p.doc.at(p.at()...)); err != nil {
		return p.doc.errorf("%w", err)
	}
	return nil
}
