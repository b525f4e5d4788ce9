package pool

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
)

// maxText is what one element of a command may hold: Linux takes 128 KiB with
// the byte that ends it, and kubelet may still put in values of variables.
const maxText = 96 << 10

// Wrap returns the command of a container put behind the client, and the
// arguments that remain. command and args are the container's; a container
// without a command has the image's entrypoint, which the caller must know.
//
// A command of one element with blanks is shell text, as the guides write it.
// Text of one simple command, and lists of words, follow the client directly;
// other text is given to a shell behind the client, so that all of it runs on the
// pool. Words are quoted, so none is ever read as shell text. Elements with
// $(NAME), which kubelet replaces, are kept as elements of their own.
//
// A command that calls the client already is returned as it is, with called true.
func (c *Client) Wrap(r Request, filters, command, args []string) (newCommand, newArgs []string, called bool, err error) {
	if len(command) == 0 {
		return nil, nil, false, errors.New("the container has no command")
	}
	for _, list := range [][]string{command, args} {
		for _, element := range list {
			if strings.IndexByte(element, 0) >= 0 {
				return nil, nil, false, fmt.Errorf("%q contains a NUL character, which a command cannot", short(element))
			}
		}
	}
	if c.calledBy(command, args) {
		return slices.Clone(command), slices.Clone(args), true, nil
	}
	words, err := c.words(r, filters)
	if err != nil {
		return nil, nil, false, err
	}
	p, err := c.payload(command, args)
	if err != nil {
		return nil, nil, false, err
	}
	if len(c.Command.Separator) == 0 {
		for _, begin := range []string{p.first(), p.text} {
			// An option would change what the client takes; so may what kubelet puts in
			// place of $(NAME).
			if strings.HasPrefix(begin, "-") || strings.HasPrefix(begin, "$(") {
				return nil, nil, false, fmt.Errorf("the command begins with %q, which the client would interpret as its own option; "+
					"begin with a program", short(begin))
			}
		}
	}
	if c.Command.Shell == "" {
		return slices.Concat([]string{c.Binary}, words.list(), c.Command.Separator, p.words), nil, false, nil
	}
	head := Quote(c.Binary) + " " + words.text(c.Command.Padded)
	for _, w := range c.Command.Separator {
		head += " " + Quote(w)
	}
	if text := head + " " + p.text; p.text != "" && len(text) <= maxText {
		return []string{c.Command.Shell, "-c", text}, nil, false, nil
	}
	// The elements reach the client through the shell's parameters, so kubelet's
	// replacements, and more than one element may hold, are no shell text.
	return append([]string{c.Command.Shell, "-c", head + ` "$@"`, path.Base(c.Command.Shell)}, p.words...), nil, false, nil
}

// clientWords are the words between the binary and the separator.
type clientWords struct {
	request []string
	memory  bool
	filters []string
}

func (w clientWords) list() []string { return slices.Concat(w.request, w.filters) }

func (w clientWords) text(padded bool) string {
	var b strings.Builder
	writeWords := func(words []string) {
		for _, word := range words {
			if b.Len() > 0 {
				b.WriteByte(' ')
			}
			b.WriteString(Quote(word))
		}
	}
	writeWords(w.request)
	switch {
	case padded && !w.memory:
		b.WriteString(" ")
	case padded && len(w.filters) > 0:
		b.WriteString("  ")
	}
	writeWords(w.filters)
	return b.String()
}

// words fills the client's command line in.
func (c *Client) words(r Request, filters []string) (clientWords, error) {
	w := clientWords{memory: r.Percent == 0}
	form, name, other := c.Command.Percent, PercentResource, MemoryResource
	if w.memory {
		form, name, other = c.Command.Memory, MemoryResource, PercentResource
	}
	switch {
	case r.Amount < 1 || r.Percent < 0 || r.Percent > 100 || w.memory && r.MemoryBytes < bytesPerMB:
		return w, errors.New("the request was not validated")
	case len(form) == 0:
		return w, fmt.Errorf("%s: client %s for %s does not support requests of this kind; use %s", name, c.Version, c.OS, other)
	case len(filters) > 0 && len(c.Command.Filter) == 0:
		return w, fmt.Errorf("annotation %s: client %s for %s does not support filters; remove it, or select another version with "+
			"annotation %s",
			FilterAnnotation, c.Version, c.OS, VersionAnnotation)
	}
	values := []string{
		"${amount}", strconv.FormatInt(r.Amount, 10),
		"${units}", strconv.FormatInt(r.Units, 10),
		"${percent}", strconv.FormatInt(r.Percent, 10),
		"${fraction}", fmt.Sprintf("%d.%02d0000", r.Percent/100, r.Percent%100),
		"${megabytes}", strconv.FormatInt(r.MemoryMB(), 10),
	}
	fill := strings.NewReplacer(values...)
	for _, word := range form {
		w.request = append(w.request, fill.Replace(word))
	}
	for _, filter := range filters {
		fill := strings.NewReplacer(append(slices.Clone(values), "${filter}", filter)...)
		for _, word := range c.Command.Filter {
			w.filters = append(w.filters, fill.Replace(word))
		}
	}
	return w, nil
}

type payload struct {
	words []string
	// text is the same as text of the client's shell; "" where that must not or
	// cannot be.
	text string
}

func (p payload) first() string { return p.words[0] }

// list is a payload of words, of which none is shell text.
func list(words []string) payload {
	p := payload{words: words}
	quoted := make([]string, len(words))
	for i, w := range words {
		if replaced(w) {
			return p
		}
		quoted[i] = Quote(w)
	}
	p.text = strings.Join(quoted, " ")
	return p
}

func (c *Client) payload(command, args []string) (payload, error) {
	shell := c.shell()
	text, isText := "", false
	switch {
	case len(command) == 1 && strings.ContainsAny(command[0], " \t\n"):
		text, isText = command[0], true
	case len(command)+len(args) == 3:
		words := slices.Concat(command, args)
		if path.Base(shell) == "bash" && (words[0] == "bash" || words[0] == "/bin/bash") && words[1] == "-c" {
			// The client's shell may do what this one would.
			text, isText, shell, args = words[2], true, words[0], nil
		}
	}
	if !isText {
		return list(slices.Concat(command, args)), nil
	}

	s := parseText(text, path.Base(shell) == "bash")
	if len(args) == 0 {
		return c.textPayload(shell, text, s), nil
	}
	if !s.single {
		return payload{}, fmt.Errorf("the command is shell text of more than one simple command, so args (%q...) belong to none of them; "+
			`write the arguments in the text, or the command as a list: [%q, "-c", "TEXT", "NAME"], with "$@" in TEXT where the `+
			`arguments belong`,
			short(args[0]), shell)
	}
	if !s.asIs {
		return list(slices.Concat([]string{shell, "-c", s.command + ` "$@"`, path.Base(shell)}, args)), nil
	}
	p := list(args)
	words := s.words
	if words == nil {
		p.words = slices.Concat([]string{shell, "-c", s.command + ` "$@"`, path.Base(shell)}, args)
	} else {
		p.words = slices.Concat(words, args)
	}
	if p.text != "" {
		p.text = s.command + " " + p.text
	}
	return p, nil
}

// textPayload is the payload of shell text without arguments.
func (c *Client) textPayload(shell, text string, s shellText) payload {
	switch {
	case !s.asIs:
		return list([]string{shell, "-c", text})
	case s.words != nil:
		return payload{words: s.words, text: s.command}
	}
	return payload{words: []string{shell, "-c", text}, text: s.command}
}

// shell is the shell for text of users: the client's own, and for a client that
// needs none the one that most images have.
func (c *Client) shell() string {
	if c.Command.Shell != "" {
		return c.Command.Shell
	}
	return "/bin/sh"
}

// calledBy reports whether a command calls the client already: as its first word,
// or as the first word of the text that it gives to a shell.
func (c *Client) calledBy(command, args []string) bool {
	name := path.Base(c.Binary)
	words := slices.Concat(command, args)
	if len(command) == 1 && strings.ContainsAny(command[0], " \t\n") {
		return path.Base(parseText(command[0], true).first) == name
	}
	if path.Base(words[0]) == name {
		return true
	}
	text, ok := givenText(words)
	return ok && path.Base(parseText(text, true).first) == name
}

// givenText returns the text that a command gives to a shell, as in bash -lc TEXT
// or sh -e -c TEXT.
func givenText(words []string) (string, bool) {
	if !slices.Contains([]string{"sh", "bash", "dash", "ash"}, path.Base(words[0])) {
		return "", false
	}
	for i := 1; i+1 < len(words) && strings.HasPrefix(words[i], "-"); i++ {
		switch option := words[i]; {
		case strings.HasPrefix(option, "--"):
		case strings.Contains(option, "c"):
			return words[i+1], true
		case strings.HasSuffix(option, "o"):
			i++ // the name of a setting, as in -o pipefail
		}
	}
	return "", false
}

// replaced reports whether kubelet may put something in place of a part of the
// element.
func replaced(element string) bool { return strings.Contains(element, "$(") }

// Quote returns a word as a shell's text for it.
func Quote(word string) string {
	safe := word != ""
	for i := 0; safe && i < len(word); i++ {
		safe = isSafe(word[i])
	}
	if safe {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}

// isSafe reports whether a character means nothing to any shell, wherever it
// stands in the word of an argument.
func isSafe(b byte) bool {
	return 'a' <= b && b <= 'z' || 'A' <= b && b <= 'Z' || '0' <= b && b <= '9' || strings.IndexByte("@%+=:,./_-", b) >= 0
}
