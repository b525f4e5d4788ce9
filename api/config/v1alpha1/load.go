package v1alpha1

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
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

// Load reads, decodes strictly, completes with defaults and validates the file
// at path. vendors are the names of the backends that this program has.
func Load(path string, vendors []string) (NodeConfig, error) {
	f, err := os.Open(path)
	if err != nil {
		return NodeConfig{}, fmt.Errorf("read configuration: %w", err)
	}
	defer f.Close() //nolint:errcheck // opened for reading
	data, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err != nil {
		return NodeConfig{}, fmt.Errorf("read configuration %s: %w", path, err)
	}
	if len(data) > maxFileBytes {
		return NodeConfig{}, fmt.Errorf("configuration %s is larger than %d bytes", path, maxFileBytes)
	}
	return Parse(data, path, vendors)
}

// Parse is Load for a configuration that is in memory; source names it in
// errors. All mistakes are reported at once in a *MistakesError.
func Parse(data []byte, source string, vendors []string) (NodeConfig, error) {
	c := Default()
	defaults := c.Resources
	c.APIVersion, c.Kind, c.Resources = "", "", nil

	var mistakes []string
	dec := yaml.NewDecoder(strings.NewReader(string(data)))
	dec.KnownFields(true)
	if err := dec.Decode(&c); err != nil && !errors.Is(err, io.EOF) {
		var typeErr *yaml.TypeError
		if !errors.As(err, &typeErr) {
			// Not YAML: nothing that follows would be worth reading.
			return NodeConfig{}, &MistakesError{Source: source, Mistakes: []string{strings.TrimPrefix(err.Error(), "yaml: ")}}
		}
		for _, m := range typeErr.Errors {
			mistakes = append(mistakes, plain(m))
		}
	}
	if err := dec.Decode(new(yaml.Node)); err == nil {
		mistakes = append(mistakes, "the file holds more than one YAML document; one is read")
	}
	if c.Resources == nil {
		c.Resources = defaults
	}
	for i := range c.Resources {
		if c.Resources[i].Mode == "" {
			c.Resources[i].Mode = ModeMemory
		}
		if c.Resources[i].MemoryUnit == "" && c.Resources[i].Mode == ModeMemory {
			c.Resources[i].MemoryUnit = "1"
		}
	}
	mistakes = append(mistakes, validate(&c, vendors)...)
	if len(mistakes) > 0 {
		return NodeConfig{}, &MistakesError{Source: source, Mistakes: mistakes}
	}
	return c, nil
}

var unknownField = regexp.MustCompile(`^(line \d+): field (\S+) not found in type v1alpha1\.(\S+)$`)

// plain turns the decoder's words into the file's: Go type names mean nothing
// to the person who wrote it.
func plain(m string) string {
	if g := unknownField.FindStringSubmatch(m); g != nil {
		return fmt.Sprintf("%s: unknown key %q", g[1], g[2])
	}
	return strings.ReplaceAll(m, "v1alpha1.", "")
}

// MemoryUnits are the sizes in GB that a unit of memory sharing may have.
var MemoryUnits = []string{"1", "0.1", "0.01", "0.001"}

var (
	domainPattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)+$`)
	namePattern   = regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$`)
)

func validate(c *NodeConfig, vendors []string) []string {
	var out []string
	wrong := func(field, format string, args ...any) {
		out = append(out, field+": "+fmt.Sprintf(format, args...))
	}
	oneOf := func(field, got string, allowed ...string) {
		if !slices.Contains(allowed, got) {
			wrong(field, "%q is not known; use one of %s", got, strings.Join(allowed, ", "))
		}
	}
	if c.APIVersion != APIVersion {
		wrong("apiVersion", "%q is not served; write %s", c.APIVersion, APIVersion)
	}
	if c.Kind != Kind {
		wrong("kind", "%q is not known; write %s", c.Kind, Kind)
	}
	for _, p := range []struct{ field, path string }{
		{"driverRoot", c.DriverRoot}, {"kubeletDir", c.KubeletDir}, {"stateDir", c.StateDir},
		{"cdiDir", c.CDIDir}, {"grantKeyFile", c.GrantKeyFile},
	} {
		if !filepath.IsAbs(p.path) {
			wrong(p.field, "%q is not an absolute path", p.path)
		}
	}
	if c.LogFile != "" && !filepath.IsAbs(c.LogFile) {
		wrong("logFile", "%q is not an absolute path", c.LogFile)
	}
	oneOf("logLevel", c.LogLevel, "error", "warn", "info", "debug")
	if _, port, err := net.SplitHostPort(c.Listen); err != nil {
		wrong("listen", "%q is not host:port", c.Listen)
	} else if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		wrong("listen", "%q is not a port from 1 to 65535", port)
	}
	oneOf("injection", string(c.Injection), string(InjectEnvironment), string(InjectDeviceNodes), string(InjectCDI))
	if d := time.Duration(c.HealthInterval); d < 100*time.Millisecond || d > time.Hour {
		wrong("healthInterval", "%v is out of range; use 100ms to 1h", d)
	}
	for vendor, path := range c.Libraries {
		oneOf("libraries", vendor, vendors...)
		if !filepath.IsAbs(path) {
			wrong("libraries."+vendor, "%q is not an absolute path", path)
		}
	}
	if len(c.Resources) == 0 {
		wrong("resources", "the list is empty; name at least one resource or leave the key out")
	}
	seen := map[string]int{}
	name := func(field string, i int, value string) {
		domain, base, ok := strings.Cut(value, "/")
		if !ok || !domainPattern.MatchString(domain) || !namePattern.MatchString(base) {
			wrong(field, "%q is not the name of an extended resource; write domain/name, such as enflame.com/gcu-memory", value)
		} else if domain == "kubernetes.io" || strings.HasSuffix(domain, ".kubernetes.io") {
			wrong(field, "%q is in a domain that Kubernetes keeps for itself", value)
		}
		if first, dup := seen[value]; dup {
			wrong(field, "%q is used by resources[%d] already", value, first)
		} else {
			seen[value] = i
		}
	}
	sharedBy := map[string]int{}
	for i, r := range c.Resources {
		at := fmt.Sprintf("resources[%d].", i)
		if first, dup := sharedBy[r.Vendor]; dup {
			// Each resource would hand out the same memory once more.
			wrong(at+"vendor", "resources[%d] shares the devices of %q already", first, r.Vendor)
		} else {
			sharedBy[r.Vendor] = i
		}
		name(at+"name", i, r.Name)
		oneOf(at+"vendor", r.Vendor, vendors...)
		oneOf(at+"mode", string(r.Mode), string(ModeMemory))
		if !slices.Contains(MemoryUnits, r.MemoryUnit) {
			wrong(at+"memoryUnit", "%q is not known; use one of %s", r.MemoryUnit, strings.Join(MemoryUnits, ", "))
		}
		if r.CountResource != "" {
			name(at+"countResource", i, r.CountResource)
		}
	}
	return out
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
