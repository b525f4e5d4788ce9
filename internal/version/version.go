// Package version says what a program was built from. The build sets the
// variables with
//
//	-ldflags "-X github.com/divvy-gpu/divvy/internal/version.Version=v1.2.3
//	          -X github.com/divvy-gpu/divvy/internal/version.Commit=abcdef0"
//
// and a build without them says so by itself.
package version

import (
	"fmt"
	"runtime"
	"runtime/debug"
)

// Set by the linker; see the package comment.
var (
	// Version is the release, such as "v1.2.3".
	Version = "v0.0.0-dev"
	// Commit is the abbreviated or full hash of the commit.
	Commit = ""
)

// String returns the line that a program prints for --version: its name, the
// release, the commit and the Go release that compiled it.
func String(program string) string {
	return fmt.Sprintf("%s %s (commit %s, %s, %s/%s)",
		program, Version, commit(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
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
