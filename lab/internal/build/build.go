// Package build makes the programs of a Kubernetes from Go modules and keeps
// them in a cache folder. A program in the cache is always whole: it is built
// under another name and renamed, so a build may be interrupted at any moment
// and goes on where it was.
package build

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gofrs/flock"

	"github.com/divvy-gpu/divvy/lab/internal/progress"
)

// Builder builds Components into a cache folder.
type Builder struct {
	// Dir is the folder of the lab's module. The module that pins the versions
	// of the components lies in ModuleDir(Dir).
	Dir string
	// CacheDir is the folder that holds one folder per Key.
	CacheDir string
	// Components are what is to be built.
	Components []Component
	// Wanted are the names of those that are built now, all when it is empty. A program
	// is in the same folder whatever is built beside it.
	Wanted []string
	// Out receives the progress.
	Out io.Writer
}

// ModuleDir returns the folder of the Go module that requires the components,
// below the folder of the lab's module.
func ModuleDir(labDir string) string { return filepath.Join(labDir, "components") }

// Run builds what is missing and returns the folder of the programs. Two
// builders of one cache folder take turns.
func (b *Builder) Run(ctx context.Context) (string, error) {
	bin, err := b.BinDir(ctx)
	if err != nil {
		return "", err
	}
	if len(b.missing(bin)) == 0 {
		return bin, nil
	}
	if err := os.MkdirAll(bin, 0o755); err != nil {
		return "", fmt.Errorf("make the cache folder: %w", err)
	}
	lock := flock.New(filepath.Join(filepath.Dir(bin), "lock"))
	locked, err := lock.TryLock()
	if err == nil && !locked {
		fmt.Fprintln(b.Out, "Another build of the lab is running; waiting for it.")
		locked, err = lock.TryLockContext(ctx, time.Second)
	}
	if err != nil || !locked {
		return "", fmt.Errorf("lock the cache folder: %w", errors.Join(err, ctx.Err()))
	}
	defer lock.Unlock() //nolint:errcheck // the lock goes with the process anyway

	versions, err := ReadVersions(ModuleDir(b.Dir))
	if err != nil {
		return "", err
	}
	missing := b.missing(bin)
	if len(missing) == 0 {
		return bin, nil
	}
	if err := removeUnfinished(bin); err != nil {
		return "", err
	}
	report := progress.New(b.Out, len(missing))
	report.Printf("Building %d of %d programs into %s (a first build of all takes 10 to 20 minutes on 2 cores).",
		len(missing), len(b.Components), bin)
	started := time.Now()
	for _, c := range missing {
		task := report.Begin(c.Name)
		if err := b.build(ctx, c, versions, bin, task.Detail); err != nil {
			task.Failed()
			return "", err
		}
		task.Done()
	}
	report.Printf("Built %d programs in %s.", len(missing), progress.Elapsed(time.Since(started)))
	return bin, nil
}

// BinDir returns the folder that Run fills, without building anything.
func (b *Builder) BinDir(ctx context.Context) (string, error) {
	goSum, err := os.ReadFile(filepath.Join(ModuleDir(b.Dir), "go.sum"))
	if err != nil {
		return "", fmt.Errorf("read the components' checksums: %w", err)
	}
	cmd := exec.CommandContext(ctx, "go", "env", "GOVERSION")
	cmd.Dir = ModuleDir(b.Dir)
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("ask Go for its version: %w", err)
	}
	key := Key(goSum, b.Components, strings.TrimSpace(string(out)))
	return filepath.Join(b.CacheDir, key, "bin"), nil
}

func (b *Builder) missing(bin string) []Component {
	var missing []Component
	for _, c := range b.Components {
		if len(b.Wanted) > 0 && !slices.Contains(b.Wanted, c.Name) {
			continue
		}
		if info, err := os.Stat(filepath.Join(bin, c.Name)); err != nil || !info.Mode().IsRegular() {
			missing = append(missing, c)
		}
	}
	return missing
}

// temporaryPrefix marks a program that is still being built.
const temporaryPrefix = ".building-"

func removeUnfinished(bin string) error {
	leftovers, err := filepath.Glob(filepath.Join(bin, temporaryPrefix+"*"))
	if err != nil {
		return fmt.Errorf("look for unfinished builds: %w", err)
	}
	for _, path := range leftovers {
		if err := os.Remove(path); err != nil {
			return fmt.Errorf("remove an unfinished build: %w", err)
		}
	}
	return nil
}

func (b *Builder) build(ctx context.Context, c Component, versions Versions, bin string, detail func(string)) error {
	ldflags, err := c.LinkerFlags(versions)
	if err != nil {
		return err
	}
	temporary := filepath.Join(bin, temporaryPrefix+c.Name)
	// Version control is not stamped in: git refuses to read a checkout that
	// belongs to another user, as with sudo.
	args := []string{"build", "-v", "-buildvcs=false", "-ldflags", ldflags, "-o", temporary}
	if c.Tags != "" {
		args = append(args, "-tags", c.Tags)
	}
	cgo := "0"
	if c.CGO {
		cgo = "1"
	}
	if err := RunGo(ctx, ModuleDir(b.Dir), []string{"CGO_ENABLED=" + cgo}, detail, append(args, c.Package)...); err != nil {
		return fmt.Errorf("build %s: %w", c.Name, err)
	}
	if err := syncFile(temporary); err != nil {
		return fmt.Errorf("build %s: %w", c.Name, err)
	}
	if err := os.Rename(temporary, filepath.Join(bin, c.Name)); err != nil {
		return fmt.Errorf("build %s: %w", c.Name, err)
	}
	return nil
}

// RunGo runs the go command in dir with more environment variables. Each line
// that it prints becomes a detail of the progress; when it fails, the error
// holds the last lines.
func RunGo(ctx context.Context, dir string, env []string, detail func(string), args ...string) error {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), env...)
	// A group of its own, so that an interrupt reaches the compilers too, once.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) }
	cmd.WaitDelay = 10 * time.Second
	watch := &outputWatcher{detail: detail}
	cmd.Stdout, cmd.Stderr = watch, watch
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("interrupted: %w", ctx.Err())
		}
		return fmt.Errorf("go %s: %w\n%s", args[0], err, watch.tail())
	}
	return nil
}

// tailLines is how much of a failed command's output an error shows.
const tailLines = 30

// outputWatcher turns the output of "go build -v" into details: it counts what
// is compiled and downloaded, and keeps the last lines.
type outputWatcher struct {
	detail func(string)

	mu         sync.Mutex
	partial    []byte
	last       []string
	compiled   int
	downloaded int
}

func (w *outputWatcher) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.partial = append(w.partial, p...)
	for {
		line, rest, found := bytes.Cut(w.partial, []byte("\n"))
		if !found {
			return len(p), nil
		}
		w.partial = rest
		w.line(string(line))
	}
}

func (w *outputWatcher) line(line string) {
	w.last = append(w.last, line)
	if len(w.last) > tailLines {
		w.last = w.last[1:]
	}
	switch {
	case strings.HasPrefix(line, "go: downloading "):
		w.downloaded++
		w.show(fmt.Sprintf("%d modules downloaded", w.downloaded))
	case strings.Contains(line, " "): // a compiler's message
	default:
		w.compiled++
		w.show(fmt.Sprintf("%d packages compiled", w.compiled))
	}
}

func (w *outputWatcher) show(text string) {
	if w.detail != nil {
		w.detail(text)
	}
}

func (w *outputWatcher) tail() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	scanner := bufio.NewScanner(bytes.NewReader(w.partial))
	lines := slices.Clone(w.last)
	for scanner.Scan() {
		lines = append(lines, scanner.Text())
	}
	return strings.Join(lines, "\n")
}

// syncFile makes a file's content durable, so that a rename never gives its
// name to an empty file after a power cut.
func syncFile(path string) error {
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	if err := file.Sync(); err != nil {
		return errors.Join(err, file.Close())
	}
	return file.Close()
}

func sortedKeys(m map[string]string) []string {
	return slices.Sorted(maps.Keys(m))
}
