// Package yamledit changes single values of a YAML or JSON text and keeps every
// other byte of it: comments, blank lines, indentation, quoting, line ends and
// the order of keys. An encoder would lay the whole text out anew.
//
// Each change is made in the text, at the places that the parser reports, and is
// then proved: the text is parsed again and must be what the parsed document
// becomes when the same change is made there. A text that is too unusual to be
// changed this way gives an error, never a wrong text.
//
// Anchors and aliases are kept, but nothing at or below one is changed.
package yamledit

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// A Doc is one document, and the text that it was parsed from. Nodes belong to
// the Doc that they were taken from; a changed Doc is another one.
type Doc struct {
	bom   bool
	text  string // without the byte order mark
	eol   string
	lines []int // offsets of the lines' first bytes
	root  *yaml.Node
}

const bom = "\ufeff"

// Parse reads a text that holds one document, a mapping in which no key occurs
// twice. Errors name the line.
func Parse(data []byte) (*Doc, error) {
	text, hasBOM := strings.CutPrefix(string(data), bom)
	d := &Doc{bom: hasBOM, text: text, eol: "\n"}
	if i := strings.IndexByte(text, '\n'); i > 0 && text[i-1] == '\r' {
		d.eol = "\r\n"
	}
	if !utf8.ValidString(text) {
		return nil, errors.New("not text in UTF-8")
	}
	dec := yaml.NewDecoder(strings.NewReader(text))
	var doc yaml.Node
	if err := dec.Decode(&doc); errors.Is(err, io.EOF) {
		return nil, errors.New("empty")
	} else if err != nil {
		return nil, unreadable(text, err)
	}
	var second yaml.Node
	if err := dec.Decode(&second); err == nil {
		return nil, fmt.Errorf("line %d begins a second document; there may be one only", second.Line)
	} else if !errors.Is(err, io.EOF) {
		return nil, unreadable(text, err)
	}
	if len(doc.Content) != 1 || doc.Content[0].Kind != yaml.MappingNode {
		return nil, errors.New("not a mapping of keys to values")
	}
	d.root = doc.Content[0]
	if err := duplicateKeys(d.root); err != nil {
		return nil, err
	}
	d.lines = lineStarts(text)
	return d, nil
}

// unreadable says why a text cannot be parsed, in one line.
func unreadable(text string, err error) error {
	why := strings.Join(strings.Fields(strings.TrimPrefix(err.Error(), "yaml: ")), " ")
	for i, line := range strings.Split(text, "\n") {
		if strings.HasPrefix(why, fmt.Sprintf("line %d:", i+1)) && strings.HasPrefix(strings.TrimLeft(line, " "), "\t") {
			why += " (the line begins with a tab; indent with spaces)"
		}
	}
	return fmt.Errorf("neither YAML nor JSON: %s", why)
}

// Bytes returns the text.
func (d *Doc) Bytes() []byte {
	if d.bom {
		return append([]byte(bom), d.text...)
	}
	return []byte(d.text)
}

// Equal reports whether the text is the same as another.
func (d *Doc) Equal(data []byte) bool { return bytes.Equal(d.Bytes(), data) }

// Root returns the document's mapping. It must not be changed.
func (d *Doc) Root() *yaml.Node { return d.root }

// At returns what a path leads to, or nil. Steps are keys (string) and
// positions in sequences (int). Aliases are followed.
func (d *Doc) At(path ...any) *yaml.Node {
	n := d.root
	for _, step := range path {
		n = child(Resolve(n), step)
		if n == nil {
			return nil
		}
	}
	return Resolve(n)
}

// IsFlow reports whether the document is written in braces, as JSON is.
func (d *Doc) IsFlow() bool { return isFlow(d.root) }

// Resolve follows an alias.
func Resolve(n *yaml.Node) *yaml.Node {
	if n != nil && n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

// Get returns the value of a key of a mapping, or nil.
func Get(n *yaml.Node, key string) *yaml.Node { return Resolve(child(Resolve(n), key)) }

// IsNull reports whether a node is missing or null.
func IsNull(n *yaml.Node) bool {
	n = Resolve(n)
	return n == nil || n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null"
}

func isFlow(n *yaml.Node) bool { return n.Style&yaml.FlowStyle != 0 }

// child returns the value at a step, itself an alias perhaps.
func child(n *yaml.Node, step any) *yaml.Node {
	if n == nil {
		return nil
	}
	switch step := step.(type) {
	case string:
		if i := keyIndex(n, step); i >= 0 {
			return n.Content[i+1]
		}
	case int:
		if n.Kind == yaml.SequenceNode && step >= 0 && step < len(n.Content) {
			return n.Content[step]
		}
	}
	return nil
}

// keyIndex returns where in a mapping's Content a key is, or -1.
func keyIndex(n *yaml.Node, key string) int {
	if n.Kind != yaml.MappingNode {
		return -1
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		if k := n.Content[i]; k.Kind == yaml.ScalarNode && k.Value == key {
			return i
		}
	}
	return -1
}

// duplicateKeys finds a key that a mapping has twice: readers differ in which
// of the two counts.
func duplicateKeys(n *yaml.Node) error {
	if n.Kind == yaml.MappingNode {
		first := map[string]int{}
		for i := 0; i+1 < len(n.Content); i += 2 {
			k := n.Content[i]
			if k.Kind != yaml.ScalarNode {
				return fmt.Errorf("line %d: a key is a mapping or a sequence", k.Line)
			}
			if line, ok := first[k.Value]; ok {
				return fmt.Errorf("line %d: duplicate key %q, first in line %d", k.Line, k.Value, line)
			}
			first[k.Value] = k.Line
		}
	}
	for _, c := range n.Content {
		if err := duplicateKeys(c); err != nil {
			return err
		}
	}
	return nil
}

// lineStarts returns where lines begin, by what the parser takes for a line's
// end.
func lineStarts(text string) []int {
	starts := []int{0}
	for i := 0; i < len(text); {
		n := breakLen(text[i:])
		if n == 0 {
			i++
			continue
		}
		i += n
		starts = append(starts, i)
	}
	return starts
}

// breakLen returns the length of the line break that a text begins with, or 0.
func breakLen(s string) int {
	switch {
	case strings.HasPrefix(s, "\r\n"):
		return 2
	case strings.HasPrefix(s, "\n"), strings.HasPrefix(s, "\r"):
		return 1
	case strings.HasPrefix(s, "\u0085"):
		return 2
	case strings.HasPrefix(s, "\u2028"), strings.HasPrefix(s, "\u2029"):
		return 3
	}
	return 0
}

// offset returns where a node begins.
func (d *Doc) offset(n *yaml.Node) (int, error) {
	if n.Line < 1 || n.Line > len(d.lines) || n.Column < 1 {
		return 0, fmt.Errorf("line %d: cannot be found in the text", n.Line)
	}
	at := d.lines[n.Line-1]
	for range n.Column - 1 {
		if at >= len(d.text) {
			return 0, fmt.Errorf("line %d, column %d: cannot be found in the text", n.Line, n.Column)
		}
		_, size := utf8.DecodeRuneInString(d.text[at:])
		at += size
	}
	return at, nil
}

// lineEnd returns where the line that holds an offset ends, before its break.
func (d *Doc) lineEnd(at int) int {
	for at < len(d.text) && breakLen(d.text[at:]) == 0 {
		at++
	}
	return at
}

// lineStart returns where the line that holds an offset begins.
func (d *Doc) lineStart(at int) int {
	start := 0
	for _, s := range d.lines {
		if s > at {
			break
		}
		start = s
	}
	return start
}

// end returns where a node ends: behind its last character, comments and blank
// lines not counted.
func (d *Doc) end(n *yaml.Node) (int, error) {
	at, err := d.offset(n)
	if err != nil {
		return 0, err
	}
	if n.Kind == yaml.AliasNode {
		return at + len("*") + len(n.Value), nil
	}
	at = d.skipProperties(at)
	switch n.Kind {
	case yaml.ScalarNode:
		return d.scalarEnd(n, at)
	case yaml.MappingNode, yaml.SequenceNode:
	default:
		return 0, fmt.Errorf("line %d: of an unknown kind", n.Line)
	}
	inner := at + 1
	if len(n.Content) > 0 {
		if inner, err = d.end(n.Content[len(n.Content)-1]); err != nil {
			return 0, err
		}
	}
	if !isFlow(n) {
		return inner, nil
	}
	closer := byte('}')
	if n.Kind == yaml.SequenceNode {
		closer = ']'
	}
	for inner < len(d.text) {
		switch d.text[inner] {
		case closer:
			return inner + 1, nil
		case '#':
			inner = d.lineEnd(inner)
		default:
			inner++
		}
	}
	return 0, fmt.Errorf("line %d: its end cannot be found", n.Line)
}

// skipProperties skips a tag and an anchor in front of a value.
func (d *Doc) skipProperties(at int) int {
	for at < len(d.text) && (d.text[at] == '!' || d.text[at] == '&') {
		for at < len(d.text) && d.text[at] != ' ' && d.text[at] != '\t' && breakLen(d.text[at:]) == 0 {
			at++
		}
		for at < len(d.text) && (d.text[at] == ' ' || d.text[at] == '\t') {
			at++
		}
	}
	return at
}

func (d *Doc) scalarEnd(n *yaml.Node, at int) (int, error) {
	lost := fmt.Errorf("line %d: the end of the value cannot be found", n.Line)
	switch {
	case n.Style&yaml.DoubleQuotedStyle != 0:
		for i := at + 1; i < len(d.text); i++ {
			switch d.text[i] {
			case '\\':
				i++
			case '"':
				return i + 1, nil
			}
		}
		return 0, lost
	case n.Style&yaml.SingleQuotedStyle != 0:
		for i := at + 1; i < len(d.text); i++ {
			if d.text[i] != '\'' {
				continue
			}
			if i+1 < len(d.text) && d.text[i+1] == '\'' {
				i++
				continue
			}
			return i + 1, nil
		}
		return 0, lost
	case n.Style&(yaml.LiteralStyle|yaml.FoldedStyle) != 0:
		return d.blockScalarEnd(at), nil
	}
	// Plain: where its last character is, spaces and breaks aside.
	end := at
	for _, r := range n.Value {
		if r == ' ' || r == '\t' || r == '\n' {
			continue
		}
		i := strings.IndexRune(d.text[end:], r)
		if i < 0 || strings.TrimSpace(d.text[end:end+i]) != "" {
			return 0, lost
		}
		end += i + utf8.RuneLen(r)
	}
	return end, nil
}

// blockScalarEnd returns the end of the last line of a literal or folded value
// whose indicator is at an offset.
func (d *Doc) blockScalarEnd(at int) int {
	end := d.lineEnd(at)
	indent := -1
	for next := end; next < len(d.text); {
		next += breakLen(d.text[next:])
		stop := d.lineEnd(next)
		line := d.text[next:stop]
		trimmed := strings.TrimLeft(line, " ")
		if trimmed != "" {
			if indent < 0 {
				indent = len(line) - len(trimmed)
				if indent == 0 {
					break
				}
			}
			if len(line)-len(trimmed) < indent {
				break
			}
			end = stop
		}
		next = stop
		if next >= len(d.text) {
			break
		}
	}
	return end
}

// place says where a path leads, for messages.
func place(path []any) string {
	var b strings.Builder
	for _, step := range path {
		switch step := step.(type) {
		case string:
			if b.Len() > 0 {
				b.WriteByte('.')
			}
			b.WriteString(step)
		case int:
			b.WriteString("[" + strconv.Itoa(step) + "]")
		}
	}
	return b.String()
}
