package v1alpha1

import (
	"fmt"
	"math"
	"reflect"
	"strings"

	yaml "go.yaml.in/yaml/v3"
)

// Fractions returns a mistake for each number of a document that is to be a
// whole one and is not. The decoder would cut 2.9 replicas off to 2 without a
// word. root is the document, and out points to what it is decoded into; keys
// that out does not have are left to the decoder. Call it for a document that the
// decoder has read: it relies on aliases that lead nowhere in a circle.
func Fractions(root *yaml.Node, out any) []string {
	return fractions(root, reflect.TypeOf(out).Elem())
}

var unmarshaler = reflect.TypeFor[yaml.Unmarshaler]()

func fractions(n *yaml.Node, t reflect.Type) (mistakes []string) {
	for n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if n.Kind == yaml.DocumentNode {
		for _, inner := range n.Content {
			mistakes = append(mistakes, fractions(inner, t)...)
		}
		return mistakes
	}
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if reflect.PointerTo(t).Implements(unmarshaler) {
		return nil
	}
	switch {
	case n.Kind == yaml.ScalarNode && t.Kind() == reflect.Int:
		var f float64
		if n.ShortTag() == "!!float" && (n.Decode(&f) != nil || f != math.Trunc(f) || math.IsInf(f, 0)) {
			mistakes = append(mistakes, fmt.Sprintf("line %d: %s is not a whole number", n.Line, n.Value))
		}
	case n.Kind == yaml.SequenceNode && t.Kind() == reflect.Slice:
		for _, item := range n.Content {
			mistakes = append(mistakes, fractions(item, t.Elem())...)
		}
	case n.Kind == yaml.MappingNode && t.Kind() == reflect.Map:
		for i := 1; i < len(n.Content); i += 2 {
			mistakes = append(mistakes, fractions(n.Content[i], t.Elem())...)
		}
	case n.Kind == yaml.MappingNode && t.Kind() == reflect.Struct:
		for i := 0; i+1 < len(n.Content); i += 2 {
			mistakes = append(mistakes, fractionsOfKey(n.Content[i], n.Content[i+1], t)...)
		}
	}
	return mistakes
}

// fractionsOfKey looks at the value of one key of a struct, or at what the merge
// key brings in.
func fractionsOfKey(key, value *yaml.Node, t reflect.Type) (mistakes []string) {
	if key.ShortTag() == "!!merge" {
		for value.Kind == yaml.AliasNode {
			value = value.Alias
		}
		if value.Kind != yaml.SequenceNode {
			return fractions(value, t)
		}
		for _, one := range value.Content {
			mistakes = append(mistakes, fractions(one, t)...)
		}
		return mistakes
	}
	for f := range t.Fields() {
		if name, _, _ := strings.Cut(f.Tag.Get("yaml"), ","); name == key.Value {
			return fractions(value, f.Type)
		}
	}
	return nil
}
