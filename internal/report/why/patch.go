package why

import (
	"encoding/json"
	"strings"
)

// Patch is a change of one object as the API server takes it.
type Patch struct {
	// Object is the object, as kubectl takes it: "pod/train-0". Namespace is "" for a node.
	Object    string `json:"object"`
	Namespace string `json:"namespace,omitempty"`
	// Type is one of the constants.
	Type string `json:"type"`
	// Patch is the content, an object or a list of operations.
	Patch json.RawMessage `json:"patch"`
}

// The types of patches, as kubectl names them.
const (
	patchJSON      = "json"
	patchMerge     = "merge"
	patchStrategic = "strategic"
)

// operation is one of a JSON patch.
type operation struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value,omitempty"`
}

// textOf are the operations of a JSON patch.
func textOf(ops []operation) string {
	text, _ := json.Marshal(ops) // of texts, quantities and tolerations
	return string(text)
}

// nested is a document with one value at a path of fields.
func nested(value any, path ...string) map[string]any {
	for i := len(path) - 1; i > 0; i-- {
		value = map[string]any{path[i]: value}
	}
	return map[string]any{path[0]: value}
}

// patches adds a patch to a change that has commands. One that cannot be written in a command
// is no patch either.
func (c *Change) patches(kind, namespace, name, of string, content any) {
	if len(c.Commands) == 0 {
		return
	}
	text, err := json.Marshal(content)
	if err != nil {
		return // of texts, quantities and tolerations
	}
	c.Patch = append(c.Patch, Patch{Object: kind + "/" + name, Namespace: namespace, Type: of, Patch: text})
}

// renamed returns the change for another pod of the same controller. A pod is named in
// commands behind its namespace, and as the file that it is written to.
func (c *Change) renamed(namespace, from, to string) Change {
	out := *c
	out.Commands, out.Patch = nil, nil
	for _, command := range c.Commands {
		words := strings.Split(command, " ")
		for i, word := range words {
			switch {
			case word == from+".json":
				words[i] = to + ".json"
			case word == from && i > 1 && words[i-1] == namespace && words[i-2] == "-n":
				words[i] = to
			}
		}
		out.Commands = append(out.Commands, strings.Join(words, " "))
	}
	for _, p := range c.Patch {
		if p.Namespace == namespace && p.Object == "pod/"+from {
			p.Object = "pod/" + to
		}
		out.Patch = append(out.Patch, p)
	}
	return out
}
