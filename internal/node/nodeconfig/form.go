package nodeconfig

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"

	yaml "go.yaml.in/yaml/v3"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
)

// Form is what a file is written for.
type Form string

// The forms that are read.
const (
	// FormDivvy is this program's own, api/config/v1alpha1.
	FormDivvy Form = "NodeConfig"
	// FormIX is the file of Iluvatar's device plugin, key ix-config of the
	// ConfigMap ix-config.
	FormIX Form = "configuration of the IX device plugin"
	// FormNVIDIA is the file of NVIDIA's device plugin, "version: v1".
	FormNVIDIA Form = "configuration of NVIDIA's device plugin"
)

// ixFileName is what Iluvatar's device plugin calls its file.
const ixFileName = "ix-config"

// nvidiaVersion is how NVIDIA numbers the versions of its file; of those that
// there may be one is read.
var nvidiaVersion = regexp.MustCompile(`^v[0-9]`)

// formOf tells by its content what a file is written for; the name only decides
// about one that says nothing.
func formOf(path string, root *yaml.Node) (Form, error) {
	has := func(keys ...string) bool { return find(root, keys...) != nil }
	if has("apiVersion") || has("kind") {
		return FormDivvy, nil
	}
	version := ""
	if n := find(root, "version"); n != nil {
		version = n.Value
	}
	if n := find(root, "resources"); n != nil && n.Kind == yaml.SequenceNode && version == "" {
		return FormDivvy, nil // its head was forgotten, NVIDIA's file has keys there
	}
	ix := has("resourceName") || has("flags", "splitboard") || has("flags", "usevolcano") || has("flags", "reset_gpu") ||
		has("sharing", "timeSlicing", "replicas") || has("sharing", "mps", "replicas")
	nvidia := nvidiaVersion.MatchString(version) || has("resources") || has("imex") || has("sharing", "timeSlicing", "resources") ||
		has("sharing", "mps", "resources")
	if flags := find(root, "flags"); flags != nil && flags.Kind == yaml.MappingNode {
		known := keysOf(reflect.TypeFor[nvidiaFlags](), map[string]string{})
		for i := 0; i < len(flags.Content); i += 2 {
			_, ok := known[strings.ToLower(flags.Content[i].Value)]
			nvidia = nvidia || ok
		}
	}
	switch {
	case ix && nvidia:
		return "", errors.New("the file has keys of the IX device plugin and of NVIDIA's; give each its own file")
	case nvidia:
		return FormNVIDIA, nil
	case ix, filepath.Base(path) == ixFileName, version != "":
		return FormIX, nil
	case has("flags"), has("sharing"):
		return "", errors.New("the file may be one of the IX device plugin or of NVIDIA's; add version: v1 for NVIDIA's, " +
			`version: "4.2.0" for the IX device plugin's`)
	}
	return FormDivvy, nil
}

// find returns the value that the keys lead to, nil if there is none. Old files
// were read without regard to the case of letters.
func find(n *yaml.Node, keys ...string) *yaml.Node {
	for n != nil && n.Kind == yaml.DocumentNode && len(n.Content) > 0 {
		n = n.Content[0]
	}
	for _, key := range keys {
		n = valueOf(n, key)
	}
	return n
}

// valueOf returns the value of a key, nil if n has none.
func valueOf(n *yaml.Node, key string) *yaml.Node {
	if n == nil || n.Kind != yaml.MappingNode {
		return nil
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		if strings.EqualFold(n.Content[i].Value, key) {
			return n.Content[i+1]
		}
	}
	return nil
}

var unknownKey = regexp.MustCompile(`^line \d+: field (\S+) not found in type `)

// decodeOld reads an old file into the struct that out points to, as its plugin
// did: letters of keys may be of either case, and unknown keys are no mistakes.
// Those are returned as warnings.
func decodeOld(data []byte, root *yaml.Node, out any) (warnings, mistakes []string) {
	mistakes = furtherDocuments(data)
	if spell(root, keysOf(reflect.TypeOf(out).Elem(), map[string]string{})) {
		respelt, err := yaml.Marshal(root)
		if err != nil {
			return nil, []string{err.Error()}
		}
		data = respelt
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	dec.KnownFields(true)
	err := dec.Decode(out)
	var wrong *yaml.TypeError
	switch {
	case err == nil || errors.Is(err, io.EOF):
	case !errors.As(err, &wrong):
		mistakes = append(mistakes, strings.TrimPrefix(err.Error(), "yaml: "))
	default:
		for _, m := range wrong.Errors {
			if g := unknownKey.FindStringSubmatch(m); g != nil {
				warnings = append(warnings, fmt.Sprintf("line %d: the key %q is not known and has no effect; is it misspelt?",
					lineOf(root, g[1]), g[1]))
				continue
			}
			mistakes = append(mistakes, plain(m))
		}
	}
	if err == nil || wrong != nil {
		mistakes = append(mistakes, config.Fractions(root, out)...)
	}
	return warnings, mistakes
}

// plain says what is expected in place of the decoder's Go types, which mean
// nothing to the person who wrote the file.
func plain(m string) string {
	said, goType, ok := strings.Cut(m, " into ")
	if !ok {
		return m
	}
	switch {
	case strings.HasPrefix(goType, "[]"):
		return said + ", where a list is expected"
	case goType == "int":
		return said + ", where a whole number is expected"
	case goType == "bool":
		return said + ", where true or false is expected"
	case goType == "string":
		return said + ", where a text is expected"
	case strings.HasPrefix(goType, "struct") || strings.Contains(goType, "."):
		return said + ", where keys are expected"
	}
	return m
}

// furtherDocuments refuses what stands after the first document, which alone is
// read.
func furtherDocuments(data []byte) (mistakes []string) {
	dec := yaml.NewDecoder(bytes.NewReader(data))
	if err := dec.Decode(new(yaml.Node)); err != nil {
		return nil // the caller finds out
	}
	var next any
	switch err := dec.Decode(&next); {
	case errors.Is(err, io.EOF), err == nil && next == nil:
		return nil
	case err != nil && !isTypeError(err):
		return []string{strings.TrimPrefix(err.Error(), "yaml: ")}
	}
	return []string{"the file holds more than one YAML document; one is read"}
}

func isTypeError(err error) bool {
	var wrong *yaml.TypeError
	return errors.As(err, &wrong)
}

// spell gives the keys of a document the case of letters that the decoder
// expects, and reports whether that changed any.
func spell(n *yaml.Node, known map[string]string) bool {
	changed := false
	if n.Kind == yaml.MappingNode {
		for i := 0; i < len(n.Content); i += 2 {
			if right, ok := known[strings.ToLower(n.Content[i].Value)]; ok && right != n.Content[i].Value {
				n.Content[i].Value, changed = right, true
			}
		}
	}
	for _, inner := range n.Content {
		changed = spell(inner, known) || changed
	}
	return changed
}

// lineOf returns the line of the first key of that name. The decoder's is that
// of the text that it was given, which may be spelt anew.
func lineOf(n *yaml.Node, key string) int {
	if n.Kind == yaml.MappingNode {
		for i := 0; i < len(n.Content); i += 2 {
			if n.Content[i].Value == key {
				return n.Content[i].Line
			}
		}
	}
	for _, inner := range n.Content {
		if line := lineOf(inner, key); line > 0 {
			return line
		}
	}
	return 0
}

// keysOf collects the keys of a struct and of all below it, by their lower-case
// spelling.
func keysOf(t reflect.Type, into map[string]string) map[string]string {
	for slices.Contains([]reflect.Kind{reflect.Pointer, reflect.Slice, reflect.Map}, t.Kind()) {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct {
		return into
	}
	for f := range t.Fields() {
		if key, ok := f.Tag.Lookup("yaml"); ok {
			into[strings.ToLower(key)] = key
			keysOf(f.Type, into)
		}
	}
	return into
}
