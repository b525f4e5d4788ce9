package schedconf

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
	k8syaml "sigs.k8s.io/yaml"
)

// maxSize of a manifest or a configuration, in bytes. Those of real clusters
// have some thousands.
const maxSize = 1 << 20

// A document is a YAML or JSON text that holds one mapping, as a tree that changes are
// made in. Nothing at or below an anchor or an alias is changed, because it stands for
// other places as well.
type document struct {
	name string // of the file, for errors; "" for none
	text []byte
	top  *yaml.Node // the document with its comments
	root *yaml.Node // its mapping
}

// read is parse of a file, which the errors name.
func read(name string, data []byte) (*document, error) {
	d, err := parse(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	d.name = name
	return d, nil
}

func (d *document) errorf(format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	if d.name == "" {
		return err
	}
	return fmt.Errorf("%s: %w", d.name, err)
}

// parse reads a text. No key may occur twice in a mapping, because readers differ in which
// of the two counts. Errors name the line.
func parse(data []byte) (*document, error) {
	if len(data) > maxSize {
		return nil, fmt.Errorf("%d bytes, but a file of kube-scheduler has at most %d", len(data), maxSize)
	}
	if !utf8.Valid(data) {
		return nil, errors.New("not text in UTF-8")
	}
	d := &document{text: data, top: &yaml.Node{}}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	if err := dec.Decode(d.top); errors.Is(err, io.EOF) {
		return nil, errors.New("empty")
	} else if err != nil {
		return nil, unreadable(data, err)
	}
	var second yaml.Node
	if err := dec.Decode(&second); err == nil {
		return nil, fmt.Errorf("line %d begins a second document; there may be one only", second.Line)
	} else if !errors.Is(err, io.EOF) {
		return nil, unreadable(data, err)
	}
	if len(d.top.Content) != 1 || d.top.Content[0].Kind != yaml.MappingNode {
		return nil, errors.New("not a mapping of keys to values")
	}
	d.root = d.top.Content[0]
	return d, checkKeys(d.root)
}

// unreadable says why a text cannot be parsed, in one line.
func unreadable(data []byte, err error) error {
	why := strings.Join(strings.Fields(strings.TrimPrefix(err.Error(), "yaml: ")), " ")
	for i, line := range strings.Split(string(data), "\n") {
		if strings.HasPrefix(why, fmt.Sprintf("line %d:", i+1)) && strings.HasPrefix(strings.TrimLeft(line, " "), "\t") {
			why += " (the line begins with a tab; indent with spaces)"
		}
	}
	return fmt.Errorf("neither YAML nor JSON: %s", why)
}

func checkKeys(n *yaml.Node) error {
	if n.Kind == yaml.MappingNode {
		first := map[string]int{}
		for i := 0; i < len(n.Content); i += 2 {
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
		if err := checkKeys(c); err != nil {
			return err
		}
	}
	return nil
}

// bytes returns the text, which is the one that was parsed while nothing differs from it.
func (d *document) bytes() ([]byte, error) {
	was, err := parse(d.text)
	if err != nil {
		return nil, err
	}
	if equal(was.root, d.root) {
		return d.text, nil
	}
	unchanged, err := was.encode()
	if err != nil {
		return nil, err
	}
	text, err := d.encode()
	if err != nil {
		return nil, err
	}
	if got, err := parse(text); err != nil || !equal(got.root, d.root) || !readsAs(unchanged, d.text) || !readsAs(text, text) {
		return nil, d.errorf("written in a form that cannot be changed without changing the rest; write it in block style, " +
			"without anchors and tags")
	}
	return text, nil
}

// encode lays the tree out.
func (d *document) encode() ([]byte, error) {
	if d.root.Style&yaml.FlowStyle != 0 {
		// JSON, of which the encoder keeps the braces, but not the quotes.
		unfold(d.root)
	}
	liftComments(d.root)
	var b bytes.Buffer
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	enc.CompactSeqIndent() // as kubeadm writes it
	if err := errors.Join(enc.Encode(d.top), enc.Close()); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// liftComments moves the head comments of flow collections that are values to their keys. The
// encoder writes such a comment on a line of its own and the collection, not indented, on the
// next, which is not YAML.
func liftComments(n *yaml.Node) {
	if n.Kind == yaml.MappingNode {
		for i := 1; i < len(n.Content); i += 2 {
			if k, v := n.Content[i-1], n.Content[i]; v.HeadComment != "" && v.Style&yaml.FlowStyle != 0 {
				k.HeadComment = strings.TrimPrefix(k.HeadComment+"\n"+v.HeadComment, "\n")
				v.HeadComment = ""
			}
		}
	}
	for _, c := range n.Content {
		liftComments(c)
	}
}

// readsAs reports whether kubelet and kube-scheduler read the same from two texts. Their library
// implements YAML 1.1, in which yes is a boolean and "yes" is a string.
func readsAs(a, b []byte) bool {
	x, errX := k8syaml.YAMLToJSON(a)
	y, errY := k8syaml.YAMLToJSON(b)
	return errX == nil && errY == nil && bytes.Equal(x, y)
}

func unfold(n *yaml.Node) {
	n.Style &^= yaml.FlowStyle
	for _, c := range n.Content {
		unfold(c)
	}
}

// equal reports whether two nodes hold the same; the order of keys does not matter.
func equal(a, b *yaml.Node) bool {
	var x, y any
	return a.Decode(&x) == nil && b.Decode(&y) == nil && reflect.DeepEqual(x, y)
}

// sameReading reports whether kubelet and kube-scheduler read the same from two documents.
func sameReading(d, other *document) bool {
	a, errA := d.bytes()
	b, errB := other.bytes()
	return errA == nil && errB == nil && readsAs(a, b)
}

// covers reports whether a document holds the same as another, and all comments of that one.
func covers(d, other *document) bool {
	all := comments(d.top)
	return sameReading(d, other) &&
		!slices.ContainsFunc(comments(other.top), func(c string) bool { return !slices.Contains(all, c) })
}

func comments(n *yaml.Node) []string {
	var out []string
	for line := range strings.Lines(n.HeadComment + "\n" + n.LineComment + "\n" + n.FootComment) {
		if line = strings.TrimSpace(line); line != "" {
			out = append(out, line)
		}
	}
	for _, c := range n.Content {
		out = append(out, comments(c)...)
	}
	return out
}

// at returns what a path of keys and positions leads to, or nil. Aliases are followed.
func (d *document) at(path ...any) *yaml.Node { return get(d.root, path...) }

func get(n *yaml.Node, path ...any) *yaml.Node {
	n = resolve(n)
	for _, step := range path {
		n = resolve(child(n, step))
	}
	return n
}

func resolve(n *yaml.Node) *yaml.Node {
	if n != nil && n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

// child returns the value at a step, itself an alias perhaps, or nil.
func child(n *yaml.Node, step any) *yaml.Node {
	if n == nil {
		return nil
	}
	switch step := step.(type) {
	case string:
		if i := keyIndex(n, step); i >= 0 {
			return n.Content[i+1]
		}
		return inherited(n, step)
	case int:
		if n.Kind == yaml.SequenceNode && step < len(n.Content) {
			return n.Content[step]
		}
	}
	return nil
}

// keyIndex returns where in a mapping's Content a key is, or -1.
func keyIndex(n *yaml.Node, key string) int {
	if n.Kind == yaml.MappingNode {
		for i := 0; i < len(n.Content); i += 2 {
			if n.Content[i].Value == key {
				return i
			}
		}
	}
	return -1
}

// inherited returns the value that a mapping has for a key by merge keys (<<), or nil.
func inherited(n *yaml.Node, key string) *yaml.Node {
	seen := map[*yaml.Node]bool{} // a mapping may merge itself
	var find func(n *yaml.Node) *yaml.Node
	find = func(n *yaml.Node) *yaml.Node {
		i := keyIndex(n, "<<")
		if i < 0 || n.Content[i].ShortTag() != "!!merge" || seen[n] {
			return nil
		}
		seen[n] = true
		from := []*yaml.Node{n.Content[i+1]}
		if list := resolve(from[0]); list.Kind == yaml.SequenceNode {
			from = list.Content
		}
		for _, m := range from {
			m = resolve(m)
			if i := keyIndex(m, key); i >= 0 {
				return m.Content[i+1]
			}
			if v := find(m); v != nil {
				return v
			}
		}
		return nil
	}
	return find(n)
}

// notInherited returns an error where a merge key has a key that is about to be changed: readers
// differ in which of the two counts.
func (d *document) notInherited(n *yaml.Node, path []any) error {
	if key, ok := path[len(path)-1].(string); ok && inherited(n, key) != nil {
		return d.errorf("line %d: %s comes from a merge key (<<); write it out", n.Line, place(path))
	}
	return nil
}

func isNull(n *yaml.Node) bool {
	return n == nil || n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null"
}

// scalarAt returns the text of the scalar at a path, and nothing for all else.
func scalarAt(n *yaml.Node, path ...any) string {
	if n = get(n, path...); isNull(n) || n.Kind != yaml.ScalarNode {
		return ""
	}
	return n.Value
}

// mappings returns the elements of an optional list of mappings.
func (d *document) mappings(path ...any) ([]*yaml.Node, error) {
	name := path[len(path)-1]
	n := d.at(path...)
	switch {
	case isNull(n):
		return nil, nil
	case n.Kind != yaml.SequenceNode:
		return nil, d.errorf("line %d: %v is not a list", n.Line, name)
	}
	out := make([]*yaml.Node, len(n.Content))
	for i := range n.Content {
		if out[i] = resolve(n.Content[i]); out[i].Kind != yaml.MappingNode {
			return nil, d.errorf("line %d: %v[%d] is not a mapping", out[i].Line, name, i)
		}
	}
	return out, nil
}

// owned returns the node at a path for a change of this kind of node. Mappings that are
// missing, and the node itself, are made.
func (d *document) owned(kind yaml.Kind, path ...any) (*yaml.Node, error) {
	n := d.root
	for i := 0; ; i++ {
		if n.Kind == yaml.AliasNode || n.Anchor != "" {
			return nil, d.errorf("line %d: %s is an anchor or an alias, which stands for other places as well; write it out",
				n.Line, place(path[:i]))
		}
		if i == len(path) {
			break
		}
		if err := d.notInherited(n, path[:i+1]); err != nil {
			return nil, err
		}
		next := child(n, path[i])
		if isNull(next) {
			key, ok := path[i].(string)
			if !ok || n.Kind != yaml.MappingNode {
				return nil, d.errorf("line %d: no %s", n.Line, place(path[:i+1]))
			}
			next = &yaml.Node{Kind: yaml.MappingNode}
			if i == len(path)-1 {
				next.Kind = kind
			}
			set(n, key, next)
		}
		n = next
	}
	if n.Kind != kind {
		return nil, d.errorf("line %d: %s is of another type", n.Line, place(path))
	}
	return n, nil
}

// put gives a key of the mapping at a path a value, which is a node or what encodes as one.
// A key that is not there comes last.
func (d *document) put(path []any, key string, value any) error {
	m, err := d.owned(yaml.MappingNode, path...)
	if err == nil {
		err = d.notInherited(m, append(slices.Clone(path), key))
	}
	if err != nil {
		return err
	}
	n, err := nodeOf(value)
	if err == nil {
		set(m, key, n)
	}
	return err
}

func set(m *yaml.Node, key string, value *yaml.Node) {
	if len(m.Content) == 0 {
		m.Style &^= yaml.FlowStyle
	}
	i := keyIndex(m, key)
	if i < 0 {
		m.Content = append(m.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: key}, value)
		return
	}
	beside := &m.Content[i].LineComment
	if value.Kind == yaml.ScalarNode {
		beside = &value.LineComment
	}
	if old := m.Content[i+1].LineComment; old != "" {
		*beside = old
	}
	m.Content[i+1] = value
}

// insert puts an element into the sequence at a path, which is made if it is missing; at a
// position, or last where that is negative.
func (d *document) insert(path []any, position int, value any) error {
	list, err := d.owned(yaml.SequenceNode, path...)
	if err != nil {
		return err
	}
	n, err := nodeOf(value)
	if err != nil {
		return err
	}
	if len(list.Content) == 0 {
		list.Style &^= yaml.FlowStyle
	}
	if position < 0 {
		position = len(list.Content)
	}
	list.Content = slices.Insert(list.Content, position, n)
	return nil
}

// remove takes out the key or the element that a path leads to, and a collection with the
// last that is in it. Comments in front of it and behind it stay.
func (d *document) remove(path ...any) error {
	last := len(path) - 1
	kind, width := yaml.MappingNode, 2
	position, isPosition := path[last].(int)
	if isPosition {
		kind, width = yaml.SequenceNode, 1
	}
	parent, err := d.owned(kind, path[:last]...)
	if err == nil {
		err = d.notInherited(parent, path)
	}
	if err != nil {
		return err
	}
	if key, ok := path[last].(string); ok {
		position = keyIndex(parent, key)
	}
	switch {
	case position < 0:
	case len(parent.Content) == width && last > 0:
		return d.remove(path[:last]...)
	default:
		drop(parent, position, width)
	}
	return nil
}

// drop takes out one child, of a key and a value or an element.
func drop(parent *yaml.Node, first, width int) {
	var around []string
	for _, n := range parent.Content[first : first+width] {
		around = append(around, surroundings(n)...)
	}
	parent.Content = slices.Delete(parent.Content, first, first+width)
	text := strings.Join(around, "\n")
	switch {
	case text == "":
	case first > 0:
		n := parent.Content[first-width]
		for n.Style&yaml.FlowStyle == 0 && len(n.Content) > 0 {
			// The encoder would write the foot comment of a block into what follows it.
			last := len(n.Content) - 1
			if n.Kind == yaml.MappingNode {
				last-- // the key
			}
			n = n.Content[last]
		}
		n.FootComment = strings.TrimPrefix(n.FootComment+"\n"+text, "\n")
	case len(parent.Content) > 0:
		n := parent.Content[0]
		n.HeadComment = strings.TrimSuffix(text+"\n"+n.HeadComment, "\n")
	}
}

// surroundings returns the comments of a tree but those beside values.
func surroundings(n *yaml.Node) []string {
	var out []string
	for _, text := range []string{n.HeadComment, n.FootComment} {
		if text != "" {
			out = append(out, text)
		}
	}
	for _, c := range n.Content {
		out = append(out, surroundings(c)...)
	}
	return out
}

func nodeOf(value any) (*yaml.Node, error) {
	if n, ok := value.(*yaml.Node); ok {
		return n, nil
	}
	n := &yaml.Node{}
	err := n.Encode(value)
	return n, err
}

func place(path []any) string {
	var b strings.Builder
	for _, step := range path {
		switch step := step.(type) {
		case string:
			b.WriteString("." + step)
		case int:
			b.WriteString("[" + strconv.Itoa(step) + "]")
		}
	}
	return strings.TrimPrefix(b.String(), ".")
}

func orNothing(s string) string {
	if s == "" {
		return "nothing"
	}
	return strconv.Quote(s)
}
