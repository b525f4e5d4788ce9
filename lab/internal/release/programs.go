// Package release builds what Divvy is delivered as: programs, container images
// and all that a release consists of. The lab runs images of the same
// specifications. The same checkout, Go and C compiler give the same bytes,
// wherever and whenever they are built.
package release

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/divvy-gpu/divvy/lab/internal/build"
	"github.com/divvy-gpu/divvy/lab/internal/host"
)

// module is the import path of the product.
const module = "github.com/divvy-gpu/divvy"

// The programs.
const (
	Node    = "divvy-node"
	Control = "divvy-control"
	// Hook is in the image of Node, which installs it on the host.
	Hook    = "divvy-hook"
	Kubectl = "kubectl-divvy"
)

// Schedulers are divvy-scheduler, one for each minor of Kubernetes that it is built for, newest
// first.
var Schedulers = []string{"divvy-scheduler-1.37", "divvy-scheduler-1.36", "divvy-scheduler-1.35"}

// Stamp is what is written into programs and images of a build.
type Stamp struct {
	// Version is the release or what git makes of the commit, Commit its hash.
	Version, Commit string
	// Time is the commit's; images have it, in place of the time of the build.
	Time time.Time
}

// ReadStamp asks git about a checkout. Where that says nothing, as in an unpacked
// archive of the sources, the stamp says "unknown". The environment variable
// SOURCE_DATE_EPOCH (seconds) goes before the commit's time.
func ReadStamp(ctx context.Context, repository string) (Stamp, error) {
	git := func(args ...string) string {
		cmd := exec.CommandContext(ctx, "git", args...)
		cmd.Dir = repository
		out, err := cmd.Output()
		if err != nil {
			return ""
		}
		return strings.TrimSpace(string(out))
	}
	s := Stamp{
		Version: cmp.Or(git("describe", "--tags", "--always", "--dirty"), "dev"),
		Commit:  cmp.Or(git("rev-parse", "--short=12", "HEAD"), "unknown"),
	}
	seconds := cmp.Or(os.Getenv("SOURCE_DATE_EPOCH"), git("log", "-1", "--format=%ct"), "0")
	n, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil || n < 0 {
		return Stamp{}, fmt.Errorf("the time of the build is %q: SOURCE_DATE_EPOCH must be seconds since 1970", seconds)
	}
	s.Time = time.Unix(n, 0).UTC()
	return s, nil
}

// Platform is an operating system and an architecture, as Go calls them.
type Platform struct{ OS, Arch string }

func (p Platform) String() string { return p.OS + "/" + p.Arch }

// Linux is the platform of nodes with an architecture.
func Linux(arch string) Platform { return Platform{OS: "linux", Arch: arch} }

// Host is the platform of this machine.
func Host() Platform { return Platform{OS: runtime.GOOS, Arch: runtime.GOARCH} }

// recipe says how a program is compiled. The Makefile and the Dockerfile say the
// same, which a test compares, and the Makefile has the reasons.
type recipe struct {
	cgo                   bool
	cflags, tags, ldflags string
	// folder is that of the program's module, whose root has the program; "" for one of the
	// root's commands. kubernetes is the version that its module has.
	folder, kubernetes string
}

var recipes = map[string]recipe{
	Node:    {cgo: true, cflags: "-g -O2 -Wno-deprecated-declarations", tags: "netgo,osusergo", ldflags: "-extldflags=-Wl,-z,lazy"},
	Control: {},
	Hook:    {},
	Kubectl: {},

	Schedulers[0]: {folder: "scheduler", kubernetes: "v1.37.1"},
	Schedulers[1]: {folder: "scheduler/k136", kubernetes: "v1.36.3"},
	Schedulers[2]: {folder: "scheduler/k135", kubernetes: "v1.35.4"},
}

// command returns the environment and the arguments of the go command that
// compiles a program into a folder.
func (s Stamp) command(program, dir string, p Platform) (env, args []string) {
	r := recipes[program]
	ldflags := fmt.Sprintf("-s -w -X %[1]s/internal/platform/version.Version=%[2]s -X %[1]s/internal/platform/version.Commit=%[3]s",
		module, s.Version, s.Commit)
	if r.ldflags != "" {
		ldflags += " " + r.ldflags
	}
	if r.kubernetes != "" {
		numbers := strings.Split(r.kubernetes, ".")
		for _, value := range []string{"gitVersion=" + r.kubernetes, "gitMajor=1", "gitMinor=" + numbers[1]} {
			ldflags += " -X k8s.io/component-base/version." + value
		}
	}
	// What could come from the environment of whoever builds is set, too.
	env = []string{"GOOS=" + p.OS, "GOARCH=" + p.Arch, "GOFLAGS=", "GOWORK=off", "GOEXPERIMENT=", "GOAMD64=v1", "GOARM64=v8.0",
		"CGO_ENABLED=0"}
	if r.cgo {
		env = append(env, "CGO_ENABLED=1", "CGO_CFLAGS="+r.cflags, "CGO_CPPFLAGS=", "CGO_LDFLAGS=-O2 -g")
		if c, cross := crossCompilers[p.Arch]; cross && p.Arch != runtime.GOARCH {
			env = append(env, "CC="+c.program)
		}
	}
	args = []string{"build", "-buildvcs=false", "-trimpath"}
	if r.tags != "" {
		args = append(args, "-tags", r.tags)
	}
	args = append(args, "-ldflags", ldflags, "-o")
	if r.folder != "" {
		return env, append(args, filepath.Join(dir, program), ".")
	}
	return env, append(args, dir+"/", "./cmd/"+program)
}

// Build compiles programs of a checkout for a platform into a folder. A program
// with C code for another architecture needs a compiler for it; see
// EnsureCompiler.
func Build(ctx context.Context, repository, dir string, s Stamp, p Platform, programs ...string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make a folder for programs: %w", err)
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return fmt.Errorf("make a folder for programs: %w", err)
	}
	for _, program := range programs {
		env, args := s.command(program, dir, p)
		if err := build.RunGo(ctx, filepath.Join(repository, recipes[program].folder), env, nil, args...); err != nil {
			return fmt.Errorf("build %s for %s: %w", program, p, err)
		}
	}
	return nil
}

func fileName(program string, p Platform) string {
	if p.OS == "windows" {
		return program + ".exe"
	}
	return program
}

// crossCompiler is a C compiler for another architecture as Debian and Ubuntu
// have it.
type crossCompiler struct {
	program  string
	packages []string
}

var crossCompilers = map[string]crossCompiler{
	"amd64": {"x86_64-linux-gnu-gcc", []string{"gcc-x86-64-linux-gnu", "libc6-dev-amd64-cross"}},
	"arm64": {"aarch64-linux-gnu-gcc", []string{"gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross"}},
}

// EnsureCompiler makes sure that C can be compiled for an architecture. On Debian
// and its relatives it installs what is missing, which needs root, and says so
// through report.
func EnsureCompiler(ctx context.Context, arch string, report func(string)) error {
	if arch == runtime.GOARCH {
		if _, err := exec.LookPath("gcc"); err != nil {
			return fmt.Errorf("divvy-node needs a C compiler: %w: install gcc and the headers of the C library", err)
		}
		return nil
	}
	c, known := crossCompilers[arch]
	if !known {
		return fmt.Errorf("there are no images for architecture %s: must be amd64 or arm64", arch)
	}
	if _, err := exec.LookPath(c.program); err == nil {
		return nil
	}
	if os.Geteuid() != 0 {
		return fmt.Errorf("divvy-node for %s needs the compiler %s: run \"sudo apt-get install --no-install-recommends %s\", or this as "+
			"root, which does the same",
			arch, c.program, strings.Join(c.packages, " "))
	}
	var packages []host.Package
	for _, name := range c.packages {
		packages = append(packages, host.Package{Name: name, Purpose: "divvy-node for " + arch})
	}
	return host.InstallPackages(ctx, packages, func(format string, args ...any) { report(fmt.Sprintf(format, args...)) })
}
