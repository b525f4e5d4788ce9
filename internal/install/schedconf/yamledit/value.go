package yamledit

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"
)

// A Map is a value to be put in: keys in the order in which they are written.
// The values of keys, and the elements of a List, are Map, List, string, bool,
// int, int64 and Number.
type Map []Field

// A Field is one key of a Map.
type Field struct {
	Key   string
	Value any
}

// A List is a sequence to be put in.
type List []any

// A Number is a number as it is to be written.
type Number string

// block returns the lines of a value in block style, for the column that its
// first line is put at. Lists and Maps are not empty.
func block(v any) []string {
	switch v := v.(type) {
	case Map:
		if len(v) == 0 {
			return []string{"{}"}
		}
		var lines []string
		for _, f := range v {
			lines = append(lines, entry(f)...)
		}
		return lines
	case List:
		if len(v) == 0 {
			return []string{"[]"}
		}
		var lines []string
		for _, e := range v {
			lines = append(lines, item(e)...)
		}
		return lines
	}
	return []string{scalar(v)}
}

// item returns the lines of an element of a list.
func item(v any) []string {
	lines := block(v)
	for i := range lines {
		if i == 0 {
			lines[i] = "- " + lines[i]
		} else {
			lines[i] = "  " + lines[i]
		}
	}
	return lines
}

// entry returns the lines of a key and its value.
func entry(f Field) []string {
	key := scalar(f.Key) + ":"
	nested := ""
	switch v := f.Value.(type) {
	case Map:
		if len(v) > 0 {
			nested = "  "
		}
	case List:
		if len(v) == 0 {
			break
		}
		return append([]string{key}, block(v)...)
	}
	lines := block(f.Value)
	if nested == "" {
		return []string{key + " " + lines[0]}
	}
	for i := range lines {
		lines[i] = nested + lines[i]
	}
	return append([]string{key}, lines...)
}

// flow returns a value as JSON with spaces, which is YAML as well.
func flow(v any) string {
	switch v := v.(type) {
	case Map:
		parts := make([]string, len(v))
		for i, f := range v {
			parts[i] = quote(f.Key) + ": " + flow(f.Value)
		}
		return "{" + strings.Join(parts, ", ") + "}"
	case List:
		parts := make([]string, len(v))
		for i, e := range v {
			parts[i] = flow(e)
		}
		return "[" + strings.Join(parts, ", ") + "]"
	case string:
		return quote(v)
	}
	return scalar(v)
}

var (
	// plain strings need no quotes, neither in YAML 1.1, which Kubernetes reads,
	// nor in 1.2.
	plain = regexp.MustCompile(`^(--)?[A-Za-z/][A-Za-z0-9/._+@=-]*(:[A-Za-z0-9/._+@=-]+)*$`)
	words = regexp.MustCompile(`(?i)^(y|n|yes|no|on|off|true|false|null)$`)
)

func scalar(v any) string {
	s, ok := v.(string)
	if !ok {
		return fmt.Sprint(v)
	}
	if plain.MatchString(s) && !words.MatchString(s) {
		return s
	}
	return quote(s)
}

// quote returns a string in double quotes, as both JSON and YAML read it.
func quote(s string) string {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(s); err != nil {
		return `""` // a string can always be encoded
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// node returns a value as the parser would.
func node(v any) *yaml.Node {
	switch v := v.(type) {
	case Map:
		n := &yaml.Node{Kind: yaml.MappingNode}
		for _, f := range v {
			n.Content = append(n.Content, node(f.Key), node(f.Value))
		}
		return n
	case List:
		n := &yaml.Node{Kind: yaml.SequenceNode}
		for _, e := range v {
			n.Content = append(n.Content, node(e))
		}
		return n
	case string:
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: v}
	case bool:
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!bool", Value: fmt.Sprint(v)}
	case Number:
		return &yaml.Node{Kind: yaml.ScalarNode, Value: string(v)}
	}
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!int", Value: fmt.Sprint(v)}
}

// same reports whether two documents hold the same: kinds, keys in their order,
// and values. Anchors and aliases are compared by name.
func same(a, b *yaml.Node) bool {
	if a.Kind != b.Kind || len(a.Content) != len(b.Content) || a.Anchor != b.Anchor {
		return false
	}
	switch a.Kind {
	case yaml.ScalarNode:
		if a.Value != b.Value || a.ShortTag() != b.ShortTag() {
			return false
		}
	case yaml.AliasNode:
		return a.Value == b.Value
	}
	for i := range a.Content {
		if !same(a.Content[i], b.Content[i]) {
			return false
		}
	}
	return true
}

// Encode returns a value as a document in block style.
func Encode(m Map) []byte {
	return []byte(strings.Join(block(m), "\n") + "\n")
}

// Equal reports whether a node is what a value would be parsed as; the order of
// keys does not matter.
func Equal(n *yaml.Node, value any) bool {
	var a, b any
	if n == nil || n.Decode(&a) != nil {
		return false
	}
	if yaml.Unmarshal([]byte(strings.Join(block(value), "\n")), &b) != nil {
		return false
	}
	return reflect.DeepEqual(a, b)
}
