package v1alpha1

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	yaml "go.yaml.in/yaml/v3"
)

// Encode writes a configuration as a file that Parse reads: its resources, and
// of the rest what differs from the defaults. Empty keys are left out, except
// for lists that say "none" by being empty.
func Encode(c NodeConfig) ([]byte, error) {
	top := &yaml.Node{Kind: yaml.MappingNode}
	value, defaults := reflect.ValueOf(c), reflect.ValueOf(Default())
	for i := range value.NumField() {
		field := value.Type().Field(i)
		switch field.Name {
		case "APIVersion", "Kind", "Resources":
		default:
			if reflect.DeepEqual(value.Field(i).Interface(), defaults.Field(i).Interface()) {
				continue
			}
		}
		if err := addField(top, field, value.Field(i)); err != nil {
			return nil, err
		}
	}
	out, err := yaml.Marshal(top)
	if err != nil {
		return nil, fmt.Errorf("encode the configuration: %w", err)
	}
	return out, nil
}

// encode returns the node of a value whose structs show their set fields only.
func encode(v reflect.Value) (*yaml.Node, error) {
	switch v.Kind() {
	case reflect.Pointer:
		return encode(v.Elem())
	case reflect.Struct:
		out := &yaml.Node{Kind: yaml.MappingNode}
		for i := range v.NumField() {
			if v.Field(i).IsZero() {
				continue
			}
			if err := addField(out, v.Type().Field(i), v.Field(i)); err != nil {
				return nil, err
			}
		}
		if len(out.Content) == 0 {
			out.Style = yaml.FlowStyle
		}
		return out, nil
	case reflect.Slice:
		out := &yaml.Node{Kind: yaml.SequenceNode}
		for i := range v.Len() {
			item, err := encode(v.Index(i))
			if err != nil {
				return nil, err
			}
			out.Content = append(out.Content, item)
		}
		if k := v.Type().Elem().Kind(); v.Len() == 0 || k != reflect.Struct {
			out.Style = yaml.FlowStyle
		}
		return out, nil
	case reflect.Map:
		out := &yaml.Node{Kind: yaml.MappingNode}
		for _, key := range slices.SortedFunc(slices.Values(v.MapKeys()), func(a, b reflect.Value) int {
			return strings.Compare(a.String(), b.String())
		}) {
			item, err := encode(v.MapIndex(key))
			if err != nil {
				return nil, err
			}
			out.Content = append(out.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: key.String()}, item)
		}
		return out, nil
	default:
		out := &yaml.Node{}
		if err := out.Encode(v.Interface()); err != nil {
			return nil, fmt.Errorf("encode the configuration: %w", err)
		}
		return out, nil
	}
}

func addField(to *yaml.Node, field reflect.StructField, v reflect.Value) error {
	node, err := encode(v)
	if err != nil {
		return err
	}
	to.Content = append(to.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: field.Tag.Get("yaml")}, node)
	return nil
}
