package yamledit

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// A patch puts text in the place of a part of the document's.
type patch struct {
	from, to int
	text     string
}

// Put gives a key of the mapping at a path a value, which is a Map, a List or a
// scalar. A key that is not there comes last.
func (d *Doc) Put(path []any, key string, value any) (*Doc, error) {
	where := append(slices.Clone(path), key)
	m, want, err := d.copyTo(path, where)
	if err != nil {
		return nil, err
	}
	if m.Kind != yaml.MappingNode {
		return nil, fmt.Errorf("line %d: %s is not a mapping", m.Line, place(path))
	}
	target := follow(want, path)
	i := keyIndex(m, key)
	if i >= 0 {
		target.Content[i+1] = node(value)
		if m.Content[i+1].Anchor != "" {
			return nil, anchored(m.Content[i+1], where)
		}
	} else {
		target.Content = append(target.Content, node(key), node(value))
	}
	f := Field{key, value}
	var tries [][]patch
	switch {
	case i >= 0:
		tries, err = d.replaceValue(m, i, f)
	case isFlow(m):
		tries, err = d.insertFlow(m, len(m.Content)/2, quote(key)+": "+flow(value))
	default:
		tries, err = d.appendBlock(m, len(m.Content)-1, entry(f))
	}
	return d.proved(tries, want, where, err)
}

// Insert puts an element into the sequence at a path, in front of the element
// that is at a position, or last.
func (d *Doc) Insert(path []any, position int, value any) (*Doc, error) {
	s, want, err := d.copyTo(path, path)
	if err != nil {
		return nil, err
	}
	if s.Kind != yaml.SequenceNode || position < 0 || position > len(s.Content) {
		return nil, fmt.Errorf("line %d: %s is not a sequence of %d elements", s.Line, place(path), position)
	}
	target := follow(want, path)
	target.Content = slices.Insert(target.Content, position, node(value))
	var tries [][]patch
	switch {
	case isFlow(s):
		tries, err = d.insertFlow(s, position, flow(value))
	case position == 0:
		var at int
		if at, err = d.offset(s); err == nil {
			lines := append(item(value), "")
			tries = [][]patch{{{at, at, d.join(lines, d.column(at))}}}
		}
	default:
		tries, err = d.appendBlock(s, position-1, item(value))
	}
	return d.proved(tries, want, path, err)
}

// Replace puts a value in the place of the one that a path leads to. A scalar
// keeps its way of quoting if it can.
func (d *Doc) Replace(path []any, value any) (*Doc, error) {
	n, want, err := d.copyTo(path, path)
	if err != nil {
		return nil, err
	}
	if len(path) == 0 {
		return nil, errors.New("the whole document cannot be replaced")
	}
	if key, ok := path[len(path)-1].(string); ok && n.Kind != yaml.ScalarNode {
		return d.Put(path[:len(path)-1], key, value)
	}
	*follow(want, path) = *node(value)
	from, err := d.offset(n)
	if err != nil {
		return nil, err
	}
	to, err := d.end(n)
	if err != nil {
		return nil, err
	}
	var tries [][]patch
	s, isString := value.(string)
	switch {
	case isString && n.Kind == yaml.ScalarNode:
		for _, text := range d.restyle(n, from, to, s) {
			tries = append(tries, []patch{{from, to, text}})
		}
	case isFlow(n) || n.Kind == yaml.ScalarNode:
	default:
		tries = append(tries, []patch{{from, to, d.join(block(value), d.column(from))}})
	}
	tries = append(tries, []patch{{from, to, flow(value)}})
	return d.proved(tries, want, path, nil)
}

// Delete takes out the key or the element that a path leads to.
func (d *Doc) Delete(path ...any) (*Doc, error) {
	if len(path) == 0 {
		return nil, errors.New("the whole document cannot be deleted")
	}
	parentPath, step := path[:len(path)-1], path[len(path)-1]
	parent, want, err := d.copyTo(parentPath, path)
	if err != nil {
		return nil, err
	}
	if child(parent, step) == nil {
		return nil, fmt.Errorf("line %d: no %s", parent.Line, place(path))
	}
	target := follow(want, parentPath)
	width, first := 1, 0
	if key, ok := step.(string); ok {
		width, first = 2, keyIndex(parent, key)
	} else if position, ok := step.(int); ok {
		first = position
	}
	for _, n := range parent.Content[first : first+width] {
		if n.Anchor != "" || n.Kind == yaml.AliasNode {
			return nil, anchored(n, path)
		}
	}
	target.Content = slices.Delete(target.Content, first, first+width)
	var p patch
	if isFlow(parent) {
		p, err = d.deleteFlow(parent, first, width)
	} else {
		p, err = d.deleteBlock(parent, first, width)
	}
	return d.proved([][]patch{{p}}, want, path, err)
}

// copyTo returns the node at a path, which holds no alias and no anchor, and a
// copy of the document to make the change in.
func (d *Doc) copyTo(path, where []any) (*yaml.Node, *yaml.Node, error) {
	n := d.root
	for i := 0; ; i++ {
		if n.Kind == yaml.AliasNode || n.Anchor != "" {
			return nil, nil, anchored(n, path[:i])
		}
		if i == len(path) {
			break
		}
		next := child(n, path[i])
		if next == nil {
			return nil, nil, fmt.Errorf("line %d: no %s", n.Line, place(where[:i+1]))
		}
		n = next
	}
	return n, clone(d.root), nil
}

func anchored(n *yaml.Node, path []any) error {
	return fmt.Errorf("line %d: %s is an anchor or an alias, which stands for other places as well; write it out",
		n.Line, place(path))
}

// follow returns the node at a path that is there and holds no alias.
func follow(n *yaml.Node, path []any) *yaml.Node {
	for _, step := range path {
		n = child(n, step)
	}
	return n
}

func clone(n *yaml.Node) *yaml.Node {
	c := *n
	c.Content = make([]*yaml.Node, len(n.Content))
	for i := range n.Content {
		c.Content[i] = clone(n.Content[i])
	}
	return &c
}

// proved returns the first text, of those tried, that holds what is wanted.
func (d *Doc) proved(tries [][]patch, want *yaml.Node, path []any, err error) (*Doc, error) {
	if err != nil {
		return nil, err
	}
	for _, patches := range tries {
		text := d.text
		slices.SortFunc(patches, func(a, b patch) int { return b.from - a.from })
		for _, p := range patches {
			text = text[:p.from] + p.text + text[p.to:]
		}
		if d.bom {
			text = bom + text
		}
		if got, err := Parse([]byte(text)); err == nil && same(got.root, want) {
			return got, nil
		}
	}
	return nil, fmt.Errorf("%s is written in a form that cannot be changed without changing the rest; "+
		"write it in block style, each entry on its own lines", place(path))
}

// column returns how many characters of its line are in front of an offset.
func (d *Doc) column(at int) int {
	return len([]rune(d.text[d.lineStart(at):at]))
}

// join returns lines as text that begins at a column and continues there.
func (d *Doc) join(lines []string, column int) string {
	return strings.Join(lines, d.eol+strings.Repeat(" ", column))
}

// appendBlock puts lines behind the last line of a block collection's child.
func (d *Doc) appendBlock(n *yaml.Node, after int, lines []string) ([][]patch, error) {
	start, err := d.offset(n)
	if err != nil {
		return nil, err
	}
	end, err := d.end(n.Content[after])
	if err != nil {
		return nil, err
	}
	at, column := d.lineEnd(end), d.column(start)
	text := d.eol + strings.Repeat(" ", column) + d.join(lines, column)
	tries := [][]patch{{{at, at, text}}}
	if after == len(n.Content)-1 {
		// Behind what looks like the end may be blank lines that belong to a value.
		tries = append(tries, []patch{{len(d.text), len(d.text), strings.TrimPrefix(text, d.eol) + d.eol}})
	}
	return tries, nil
}

// insertFlow puts the text of a child into a flow collection.
func (d *Doc) insertFlow(n *yaml.Node, position int, text string) ([][]patch, error) {
	width := 1
	if n.Kind == yaml.MappingNode {
		width = 2
	}
	if len(n.Content) == 0 {
		at, err := d.offset(n)
		if err != nil {
			return nil, err
		}
		at = d.skipProperties(at) + 1
		return [][]patch{{{at, at, text}}}, nil
	}
	if position == 0 {
		at, err := d.offset(n.Content[0])
		if err != nil {
			return nil, err
		}
		return [][]patch{{{at, at, text + ", "}}}, nil
	}
	before, err := d.offset(n.Content[(position-1)*width])
	if err != nil {
		return nil, err
	}
	end, err := d.end(n.Content[position*width-1])
	if err != nil {
		return nil, err
	}
	lead := " "
	if indent := d.text[d.lineStart(before):before]; strings.TrimSpace(indent) == "" {
		lead = d.eol + indent
	}
	return [][]patch{{{end, end, "," + lead + text}}}, nil
}

// replaceValue puts another value behind a key.
func (d *Doc) replaceValue(m *yaml.Node, key int, f Field) ([][]patch, error) {
	k, v := m.Content[key], m.Content[key+1]
	keyStart, err := d.offset(k)
	if err != nil {
		return nil, err
	}
	keyEnd, err := d.end(k)
	if err != nil {
		return nil, err
	}
	from, err := d.offset(v)
	if err != nil {
		return nil, err
	}
	to, err := d.end(v)
	if err != nil {
		return nil, err
	}
	space := ""
	if from > 0 && d.text[from-1] == ':' {
		space = " "
	}
	inPlace := []patch{{from, to, space + flow(f.Value)}}
	if isFlow(m) {
		return [][]patch{inPlace}, nil
	}
	column := d.column(keyStart)
	switch f.Value.(type) {
	case Map, List:
		lines := entry(f)
		if len(lines) == 1 {
			break
		}
		below := d.eol + strings.Repeat(" ", column) + d.join(lines[1:], column)
		colon := strings.IndexByte(d.text[keyEnd:], ':')
		if colon < 0 || !IsNull(v) && len(v.Content) > 0 {
			// What is there has lines of its own.
			return [][]patch{{{keyStart, to, d.join(lines, column)}}, inPlace}, nil
		}
		gap := keyEnd + colon + 1
		at := max(d.lineEnd(to), gap)
		return [][]patch{{{gap, max(to, gap), ""}, {at, at, below}}, inPlace}, nil
	}
	return [][]patch{{{keyStart, to, d.join(entry(f), column)}}, inPlace}, nil
}

// restyle returns a string's text in the way in which the scalar is written
// that it replaces, if there is such a way, and the sure way last.
func (d *Doc) restyle(n *yaml.Node, from, to int, s string) []string {
	var out []string
	switch {
	case n.Style&yaml.DoubleQuotedStyle != 0:
	case n.Style&yaml.SingleQuotedStyle != 0:
		if !strings.ContainsAny(s, "\n\r") {
			out = append(out, "'"+strings.ReplaceAll(s, "'", "''")+"'")
		}
	case n.Style&yaml.LiteralStyle != 0:
		header, body, ok := strings.Cut(d.text[from:to], d.eol)
		if !ok {
			break
		}
		indent := body[:len(body)-len(strings.TrimLeft(body, " "))]
		text := header
		for line := range strings.SplitSeq(strings.TrimSuffix(s, "\n"), "\n") {
			text += d.eol
			if line != "" {
				text += indent + line
			}
		}
		out = append(out, text)
	case n.Style&yaml.FoldedStyle != 0:
	default:
		if s != "" && !strings.ContainsAny(s, "\n\r") {
			out = append(out, s)
		}
	}
	return append(out, quote(s))
}

// deleteBlock takes whole lines out, or, of what begins behind a dash, the part
// up to what follows.
func (d *Doc) deleteBlock(parent *yaml.Node, first, width int) (patch, error) {
	last := parent.Content[first+width-1]
	from, err := d.offset(parent.Content[first])
	if err != nil {
		return patch{}, err
	}
	to, err := d.end(last)
	if err != nil {
		return patch{}, err
	}
	start := d.lineStart(from)
	lead := d.text[start:from]
	if parent.Kind == yaml.SequenceNode {
		lead = strings.TrimSuffix(strings.TrimRight(lead, " \t"), "-")
	}
	if strings.TrimSpace(lead) == "" {
		to = d.lineEnd(to)
		if start == 0 {
			return patch{0, to + breakLen(d.text[to:]), ""}, nil
		}
		// With the break in front, so that the text ends as it did.
		return patch{d.breakBefore(start), to, ""}, nil
	}
	if first+width < len(parent.Content) {
		next, err := d.offset(parent.Content[first+width])
		if err != nil {
			return patch{}, err
		}
		return patch{from, next, ""}, nil
	}
	return patch{}, fmt.Errorf("line %d: cannot be taken out", last.Line)
}

// breakBefore returns where the line break begins that ends at an offset.
func (d *Doc) breakBefore(start int) int {
	for _, n := range []int{3, 2, 1} {
		if start >= n && breakLen(d.text[start-n:start]) == n {
			return start - n
		}
	}
	return start
}

// deleteFlow takes out a child with the comma that parted it from the others.
func (d *Doc) deleteFlow(parent *yaml.Node, first, width int) (patch, error) {
	from, err := d.offset(parent.Content[first])
	if err != nil {
		return patch{}, err
	}
	to, err := d.end(parent.Content[first+width-1])
	if err != nil {
		return patch{}, err
	}
	switch {
	case first > 0:
		if from, err = d.end(parent.Content[first-1]); err != nil {
			return patch{}, err
		}
	case first+width < len(parent.Content):
		if to, err = d.offset(parent.Content[first+width]); err != nil {
			return patch{}, err
		}
	}
	return patch{from, to, ""}, nil
}
