package inspect

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// Format is a way to print a report.
type Format string

// The formats.
const (
	Table Format = "table"
	Wide  Format = "wide"
	JSON  Format = "json"
	YAML  Format = "yaml"
)

var formats = []Format{Table, Wide, JSON, YAML}

// ParseFormat reads the name of a format.
func ParseFormat(name string) (Format, error) {
	if f := Format(name); slices.Contains(formats, f) {
		return f, nil
	}
	names := make([]string, len(formats))
	for i, f := range formats {
		names[i] = string(f)
	}
	return "", fmt.Errorf("output format %q: must be one of %s", name, strings.Join(names, ", "))
}

// Print writes a report that has details. JSON and YAML are in the guide's
// form, without them.
func Print(w io.Writer, r Report, f Format) error {
	switch f {
	case Table, Wide:
		return writeTable(w, r, f == Wide)
	case JSON, YAML:
		return PrintDetails(w, r.Guide(), f)
	}
	return fmt.Errorf("output format %q is not known", f)
}

// PrintDetails writes a report as JSON or YAML with its details.
func PrintDetails(w io.Writer, r Report, f Format) error {
	body, err := Marshal(r)
	if f == YAML {
		body, err = yaml.Marshal(r)
	}
	if err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	_, err = w.Write(body)
	return err
}

// Marshal writes a report as JSON that people can read, and that is the same
// wherever it comes from.
func Marshal(r Report) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false) // names are shown as they are
	e.SetIndent("", "    ")
	err := e.Encode(r)
	return b.Bytes(), err
}

// Stream writes the same JSON as Marshal, node by node, so that the report of a
// large cluster is never in memory as a whole.
func Stream(w io.Writer, nodes iter.Seq[Node]) error {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("        ", "    ")
	before, after := "{\n    \"nodes\": [", "]\n}\n"
	for n := range nodes {
		b.Reset()
		b.WriteString(before)
		b.WriteString("\n        ")
		if err := e.Encode(n); err != nil {
			return fmt.Errorf("write the report: %w", err)
		}
		b.Truncate(b.Len() - 1) // Encode ends the line
		if _, err := w.Write(b.Bytes()); err != nil {
			return fmt.Errorf("write the report: %w", err)
		}
		before, after = ",", "\n    ]\n}\n"
	}
	if after == "]\n}\n" {
		after = before + after
	}
	if _, err := io.WriteString(w, after); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}
