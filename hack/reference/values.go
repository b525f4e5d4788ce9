package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	yaml "go.yaml.in/yaml/v3"
)

// schema is the part of a JSON schema that says what a value may be.
type schema struct {
	Ref         string             `json:"$ref"`
	Description string             `json:"description"`
	Type        any                `json:"type"`
	Enum        []any              `json:"enum"`
	Pattern     string             `json:"pattern"`
	Minimum     *float64           `json:"minimum"`
	Maximum     *float64           `json:"maximum"`
	AnyOf       []*schema          `json:"anyOf"`
	OneOf       []*schema          `json:"oneOf"`
	Items       *schema            `json:"items"`
	Properties  map[string]*schema `json:"properties"`
	Definitions map[string]*schema `json:"definitions"`
}

// values writes the values of the chart: comments and defaults of values.yaml, and
// what values.schema.json lets them be.
func values(root string, w *strings.Builder) error {
	text, err := os.ReadFile(filepath.Join(root, "charts/divvy/values.yaml"))
	if err != nil {
		return err
	}
	var document yaml.Node
	if err := yaml.Unmarshal(text, &document); err != nil {
		return err
	}
	rules, err := os.ReadFile(filepath.Join(root, "charts/divvy/values.schema.json"))
	if err != nil {
		return err
	}
	var s schema
	if err := json.Unmarshal(rules, &s); err != nil {
		return err
	}
	v := valueTable{w: w, definitions: s.Definitions}
	w.WriteString("The schema of the chart checks them: a misspelt key is an error. [configuration.md](../configuration.md) explains how " +
		"they\n" +
		"work together.\n")
	top := document.Content[0]
	for i := 0; i+1 < len(top.Content); i += 2 {
		key, value := top.Content[i], top.Content[i+1]
		section := ""
		// yaml gives the first heading to the whole document.
		if m := sectionHead.FindStringSubmatch(document.HeadComment + "\n" + top.HeadComment + "\n" + key.HeadComment); i == 0 && m != nil {
			section = m[1]
		} else if m := sectionHead.FindStringSubmatch(key.HeadComment); m != nil {
			section = m[1]
		}
		if section != "" || i == 0 {
			if section == "" {
				section = "Values"
			}
			fmt.Fprintf(w, "\n## %s\n\n", section)
			table(w, "value", "default", "may be", "meaning")
		}
		v.add(key.Value, key, value, s.Properties[key.Value])
	}
	return nil
}

// sectionHead is a heading in the comments: "# -- Images ------".
var sectionHead = regexp.MustCompile(`(?m)^# -- (.+?) -+$`)

type valueTable struct {
	w           *strings.Builder
	definitions map[string]*schema
}

// add writes the rows of one value and of those below it.
func (v *valueTable) add(path string, key, value *yaml.Node, s *schema) {
	described := about(key, s)
	s = v.resolve(s)
	if described == "" && s != nil {
		described = s.Description
	}
	if value.Kind == yaml.MappingNode && len(value.Content) > 0 && s != nil && len(s.Properties) > 0 {
		if described != "" {
			row(v.w, code(path), "", "", described)
		}
		for i := 0; i+1 < len(value.Content); i += 2 {
			name := value.Content[i].Value
			v.add(path+"."+name, value.Content[i], value.Content[i+1], s.Properties[name])
		}
		return
	}
	if value.Kind == yaml.SequenceNode && len(value.Content) > 0 && value.Content[0].Kind == yaml.MappingNode && s != nil &&
		s.Items != nil && len(v.resolve(s.Items).Properties) > 0 {
		row(v.w, code(path), "", "list", described)
		first, item := value.Content[0], v.resolve(s.Items)
		for i := 0; i+1 < len(first.Content); i += 2 {
			name := first.Content[i].Value
			v.add(path+"[]."+name, first.Content[i], first.Content[i+1], item.Properties[name])
			delete(item.Properties, name)
		}
		// Those that the default leaves out.
		for _, name := range slices.Sorted(maps.Keys(item.Properties)) {
			s := item.Properties[name]
			text := s.Description
			if s = v.resolve(s); text == "" {
				text = s.Description
			}
			row(v.w, code(path+"[]."+name), "", v.may(s), escape(text))
		}
		return
	}
	row(v.w, code(path), flow(value), v.may(s), described)
}

func (v *valueTable) resolve(s *schema) *schema {
	for s != nil && s.Ref != "" {
		s = v.definitions[strings.TrimPrefix(s.Ref, "#/definitions/")]
	}
	return s
}

// may says what a value may be.
func (v *valueTable) may(s *schema) string {
	s = v.resolve(s)
	if s == nil {
		return ""
	}
	if len(s.Enum) > 0 {
		var words []string
		for _, e := range s.Enum {
			words = append(words, code(fmt.Sprintf("%v", e)))
		}
		return strings.Join(words, ", ")
	}
	var parts []string
	for _, one := range append(append([]*schema(nil), s.AnyOf...), s.OneOf...) {
		if text := v.may(one); text != "" && !slices.Contains(parts, text) {
			parts = append(parts, text)
		}
	}
	if len(parts) > 0 {
		return strings.Join(parts, " or ")
	}
	names := map[string]string{"string": "text", "integer": "number", "number": "number", "boolean": "true or false",
		"array": "list", "object": "map", "null": "null"}
	switch t := s.Type.(type) {
	case string:
		parts = append(parts, names[t])
	case []any:
		for _, one := range t {
			parts = append(parts, names[fmt.Sprint(one)])
		}
	}
	text := strings.Join(parts, " or ")
	if s.Minimum != nil && s.Maximum != nil {
		text += fmt.Sprintf(", %v to %v", *s.Minimum, *s.Maximum)
	} else if s.Minimum != nil {
		text += fmt.Sprintf(", %v or more", *s.Minimum)
	}
	return text
}

// comment is what stands above a key, without headings and what is commented out.
func comment(key *yaml.Node) string {
	var lines []string
	for line := range strings.Lines(key.HeadComment) {
		line = strings.TrimSpace(line)
		switch {
		case line == "":
			lines = nil // what stands above a blank line is about something else
		case sectionHead.MatchString(line), commentedOut.MatchString(line):
		default:
			lines = append(lines, strings.TrimSpace(strings.TrimPrefix(line, "#")))
		}
	}
	text := strings.Join(lines, " ")
	return escape(text)
}

// about is the comment of a value, or else what the schema says of it.
func about(key *yaml.Node, s *schema) string {
	if text := comment(key); text != "" || s == nil {
		return text
	}
	return escape(s.Description)
}

// commentedOut is an example, which is indented.
var commentedOut = regexp.MustCompile(`^#  `)

// flow is a default on one line.
func flow(value *yaml.Node) string {
	copied := *value
	strip(&copied)
	copied.Style |= yaml.FlowStyle
	text, err := yaml.Marshal(&copied)
	if err != nil {
		return ""
	}
	return code(strings.Join(strings.Fields(string(text)), " "))
}

// strip takes the comments out.
func strip(n *yaml.Node) {
	n.HeadComment, n.LineComment, n.FootComment = "", "", ""
	content := make([]*yaml.Node, len(n.Content))
	for i, c := range n.Content {
		inner := *c
		strip(&inner)
		content[i] = &inner
	}
	n.Content = content
}
