// Package version says what a program was built from and which interfaces it
// has. The build sets the variables with
//
//	-ldflags "-X github.com/divvy-gpu/divvy/internal/platform/version.Version=v1.2.3
//	          -X github.com/divvy-gpu/divvy/internal/platform/version.Commit=abcdef0"
//
// and a build without them says so by itself.
package version

import (
	"encoding/json"
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"

	"sigs.k8s.io/yaml"
)

// Set by the linker; see the package comment.
var (
	// Version is the release, such as "v1.2.3".
	Version = "v0.0.0-dev"
	// Commit is the abbreviated or full hash of the commit.
	Commit = ""
)

// String returns a program's name, the release, the commit and the Go release
// that compiled it, in one line.
func String(program string) string { return Of(program).line() }

// A Use says what a program does with an interface.
type Use string

// The uses: others call a program's interface, it calls another's, and it reads
// or writes documents of a format.
const (
	Serves Use = "serves"
	Calls  Use = "calls"
	Reads  Use = "reads"
	Writes Use = "writes"
)

// An API is an interface or a format, in the versions that a program knows. Each
// version stands as a constant beside the code that speaks it; programs collect
// them.
type API struct {
	Use Use `json:"use"`
	// Name is an API group or, where the interface is in none, the name that its
	// documentation uses.
	Name     string   `json:"name"`
	Versions []string `json:"versions"`
}

// Info is what a program says of itself.
type Info struct {
	Program string `json:"program"`
	Version string `json:"version"`
	Commit  string `json:"commit"`
	// Go is the release that compiled the program, such as "go1.26.1".
	Go string `json:"go"`
	// Platform is the operating system and the architecture, "linux/amd64".
	Platform string `json:"platform"`
	APIs     []API  `json:"apis,omitempty"`
}

// Of returns what a program says of itself.
func Of(program string, apis ...API) Info {
	return Info{
		Program: program, Version: Version, Commit: commit(), Go: runtime.Version(),
		Platform: runtime.GOOS + "/" + runtime.GOARCH, APIs: apis,
	}
}

// Formats are the names that Format knows.
var Formats = []string{"text", "json", "yaml"}

// Format writes the information in one of Formats, with a line's end.
func (i Info) Format(name string) (string, error) {
	switch name {
	case "text":
		return i.Text(), nil
	case "json":
		out, err := json.MarshalIndent(i, "", "  ")
		if err != nil {
			return "", fmt.Errorf("write the version as JSON: %w", err)
		}
		return string(out) + "\n", nil
	case "yaml":
		out, err := yaml.Marshal(i)
		if err != nil {
			return "", fmt.Errorf("write the version as YAML: %w", err)
		}
		return string(out), nil
	default:
		return "", fmt.Errorf("no output format %q: must be one of %s", name, strings.Join(Formats, ", "))
	}
}

// Text is the line of String and under it one for each interface.
func (i Info) Text() string {
	var b strings.Builder
	b.WriteString(i.line() + "\n")
	for _, api := range i.APIs {
		fmt.Fprintf(&b, "  %-6s %s %s\n", api.Use, api.Name, strings.Join(api.Versions, ", "))
	}
	return b.String()
}

func (i Info) line() string {
	return fmt.Sprintf("%s %s (commit %s, %s, %s)", i.Program, i.Version, i.Commit, i.Go, i.Platform)
}

// commit falls back to what the Go tool recorded, so that "go install" of a
// checkout still tells where it came from.
func commit() string {
	if Commit != "" {
		return Commit
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && s.Value != "" {
			return s.Value
		}
	}
	return "unknown"
}
