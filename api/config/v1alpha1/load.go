package v1alpha1

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	yaml "go.yaml.in/yaml/v3"
)

// maxFileBytes bounds what is read; a configuration is a few KiB.
const maxFileBytes = 1 << 20

// MistakesError lists everything that is wrong with a configuration, so that
// it can be mended in one go.
type MistakesError struct {
	// Source names the file.
	Source string
	// Mistakes are sentences that name a line or a field each.
	Mistakes []string
}

func (e *MistakesError) Error() string {
	noun := "mistakes"
	if len(e.Mistakes) == 1 {
		noun = "mistake"
	}
	return fmt.Sprintf("%s: %d %s:\n  %s", e.Source, len(e.Mistakes), noun, strings.Join(e.Mistakes, "\n  "))
}

// ReadFile returns what is in a configuration file, unless it is too large to
// be one.
func ReadFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	defer f.Close() //nolint:errcheck // opened for reading
	data, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err != nil {
		return nil, fmt.Errorf("read configuration %s: %w", path, err)
	}
	if len(data) > maxFileBytes {
		return nil, fmt.Errorf("configuration %s is larger than %d bytes", path, maxFileBytes)
	}
	return data, nil
}

// Parse is Load for a configuration that is in memory; source names it in
// errors. All mistakes are reported at once in a *MistakesError.
func Parse(data []byte, source string, vendors []string) (NodeConfig, error) {
	c := Base()
	mistakes, err := Decode(data, &c)
	if err != nil {
		return NodeConfig{}, &MistakesError{Source: source, Mistakes: []string{err.Error()}}
	}
	Complete(&c)
	if mistakes = append(mistakes, Validate(c, vendors)...); len(mistakes) > 0 {
		return NodeConfig{}, &MistakesError{Source: source, Mistakes: mistakes}
	}
	return c, nil
}

// Base returns what configurations are decoded over: the defaults without
// resources, as these hold only where no file names any.
func Base() NodeConfig {
	c := Default()
	c.Resources = nil
	return c
}

// Decode reads one document strictly over c: keys that it has replace what c
// has, lists and the entries of maps as a whole, the others stay. It returns
// the mistakes of form, each with its line; what could be read is in c all the
// same. An error means that the data is no YAML, so nothing was read.
func Decode(data []byte, c *NodeConfig) (mistakes []string, err error) {
	c.APIVersion, c.Kind = "", ""
	var root yaml.Node
	if err := yaml.Unmarshal(data, &root); err != nil {
		return nil, errors.New(strings.TrimPrefix(err.Error(), "yaml: "))
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	dec.KnownFields(true)
	if err := dec.Decode(c); err != nil && !errors.Is(err, io.EOF) {
		var typeErr *yaml.TypeError
		if !errors.As(err, &typeErr) {
			return nil, errors.New(strings.TrimPrefix(err.Error(), "yaml: "))
		}
		for _, m := range typeErr.Errors {
			mistakes = append(mistakes, plain(m))
		}
	}
	mistakes = append(mistakes, Fractions(&root, c)...)
	if err := dec.Decode(new(yaml.Node)); err == nil {
		mistakes = append(mistakes, "the file holds more than one YAML document; one is read")
	}
	if c.APIVersion != APIVersion {
		mistakes = append(mistakes, fmt.Sprintf("apiVersion: %q is not served; write %s", c.APIVersion, APIVersion))
	}
	if c.Kind != Kind {
		mistakes = append(mistakes, fmt.Sprintf("kind: %q is not known; write %s", c.Kind, Kind))
	}
	return mistakes, nil
}

// Complete fills in what the configuration leaves to defaults that depend on
// the rest of it.
func Complete(c *NodeConfig) {
	c.APIVersion, c.Kind = APIVersion, Kind
	if c.Resources == nil {
		c.Resources = Default().Resources
	}
	for i := range c.Resources {
		r := &c.Resources[i]
		if r.Mode == "" {
			r.Mode = ModeMemory
		}
		if r.MemoryUnit == "" && r.Mode == ModeMemory {
			r.MemoryUnit = "1"
		}
	}
}

var unknownField = regexp.MustCompile(`^(line \d+): field (\S+) not found in type v1alpha1\.(\S+)$`)

// plain turns the decoder's words into the file's: Go type names mean nothing
// to the person who wrote it.
func plain(m string) string {
	if g := unknownField.FindStringSubmatch(m); g != nil {
		return fmt.Sprintf("%s: unknown key %q", g[1], g[2])
	}
	said, goType, ok := strings.Cut(m, " into ")
	if !ok {
		return m
	}
	switch {
	case goType == "int":
		return said + ", where a whole number is expected"
	case goType == "bool":
		return said + ", where true or false is expected"
	case goType == "string", scalarType(goType):
		return said + ", where a text is expected"
	case strings.HasPrefix(goType, "[]"):
		return said + ", where a list is expected"
	}
	return said + ", where keys are expected"
}

// scalarType reports whether a Go type of the file is a text.
func scalarType(goType string) bool {
	return slices.Contains([]string{"v1alpha1.Injection", "v1alpha1.Mode", "v1alpha1.Allocation", "v1alpha1.LabelPolicy",
		"v1alpha1.MigStrategy", "v1alpha1.UsageMetrics"}, goType)
}

// UnmarshalYAML reads a Go duration.
func (d *Duration) UnmarshalYAML(n *yaml.Node) error {
	v, err := time.ParseDuration(n.Value)
	if err != nil || n.Kind != yaml.ScalarNode {
		return &yaml.TypeError{Errors: []string{fmt.Sprintf("line %d: %q is not a duration; write it as 5s or 1m30s", n.Line, n.Value)}}
	}
	*d = Duration(v)
	return nil
}

// MarshalYAML writes the duration as UnmarshalYAML reads it.
func (d Duration) MarshalYAML() (any, error) { return time.Duration(d).String(), nil }

// String is the duration as in Go.
func (d Duration) String() string { return time.Duration(d).String() }
