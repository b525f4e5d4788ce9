// Package install puts the program of the hook that limits containers onto the host, where
// container runtimes run it, and finds out whether it works there.
package install

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	securejoin "github.com/cyphar/filepath-securejoin"
	"golang.org/x/sys/unix"

	"github.com/divvy-gpu/divvy/internal/platform/atomicfile"
)

// Options say what is installed where.
type Options struct {
	// Program is the file of the hook, as this process sees it.
	Program string
	// HostRoot is where this process sees the host's root.
	HostRoot string
	// Dir is the folder on the host that gets the program. It must be writable as this
	// process sees it.
	Dir string
	// DriverRoot is the folder of the driver's installation on the host.
	DriverRoot string
	// Timeout bounds the test run, DefaultTimeout when zero.
	Timeout time.Duration
}

// Where the hook is in the image of the daemon, and which folder of the host gets it.
const (
	DefaultProgram = "/usr/bin/divvy-hook"
	DefaultDir     = "/var/lib/divvy/hook"
)

// DefaultTimeout is the limit of the test run, which loads and initialises the driver's library.
const DefaultTimeout = 30 * time.Second

// prefix begins the names of installed programs; what follows is a part of their checksum, so
// that a program never changes under its name.
const prefix = "divvy-hook-"

// Name matches the names of installed programs, also of one that a crash left half-written.
var Name = regexp.MustCompile("^" + prefix + "[0-9a-f]{16}(" + regexp.QuoteMeta(atomicfile.Suffix) + ")?$")

// Install installs the program and runs it on the host as a test. It returns its path on the
// host. A program that is installed already is only tested. The error says why containers
// cannot be limited on this node.
func Install(ctx context.Context, o Options) (string, error) {
	program, err := os.ReadFile(o.Program)
	if err != nil {
		return "", fmt.Errorf("read the hook: %w", err)
	}
	sum := sha256.Sum256(program)
	installed := path.Join(o.Dir, prefix+hex.EncodeToString(sum[:8]))
	dir, err := securejoin.SecureJoin(o.HostRoot, o.Dir)
	if err == nil {
		err = os.MkdirAll(dir, 0o755) // a runtime of another user may have to read it
	}
	if err != nil {
		return "", fmt.Errorf("install the hook in %s of the host: %w", o.Dir, err)
	}
	if err := usable(dir, o.Dir); err != nil {
		return "", err
	}
	file := filepath.Join(dir, path.Base(installed))
	if !same(file, program) {
		if _, err := atomicfile.Replace(file, program, 0o755); err != nil {
			return "", fmt.Errorf("install the hook in %s of the host: %w", o.Dir, err)
		}
		// The mode of a new file is less the process's mask.
		if err := os.Chmod(file, 0o755); err != nil {
			return "", fmt.Errorf("install the hook in %s of the host: %w", o.Dir, err)
		}
	}
	if err := try(ctx, o, installed); err != nil {
		return "", fmt.Errorf("test run of the hook %s on the host: %w", installed, err)
	}
	return installed, nil
}

// same reports whether a file is the program, and may be run.
func same(file string, program []byte) bool {
	info, err := os.Lstat(file)
	if err != nil || !info.Mode().IsRegular() || info.Mode().Perm() != 0o755 || info.Size() != int64(len(program)) {
		return false
	}
	data, err := os.ReadFile(file)
	return err == nil && bytes.Equal(data, program)
}

// usable returns why no program can be installed in a folder and be run.
func usable(dir, onHost string) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return fmt.Errorf("folder %s of the host: %w", onHost, err)
	}
	return problem(onHost, fs.Flags)
}

// problem returns why a file system with these flags of statfs is not usable.
func problem(onHost string, flags int64) error {
	switch {
	case flags&unix.ST_RDONLY != 0:
		return fmt.Errorf("folder %s of the host is read-only, so the hook cannot be installed; choose another one", onHost)
	case flags&unix.ST_NOEXEC != 0:
		return fmt.Errorf("folder %s of the host is mounted with noexec, so the hook cannot run there; choose another one", onHost)
	}
	return nil
}

// try runs the program on the host's files as a container runtime would.
func try(ctx context.Context, o Options, installed string) error {
	limit := o.Timeout
	if limit == 0 {
		limit = DefaultTimeout
	}
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	// A process that another goroutine is starting may still have the file open for writing.
	const tries = 20
	for n := 1; ; n++ {
		var out bytes.Buffer
		cmd := exec.CommandContext(limited, installed, "check", "--driver-root="+o.DriverRoot)
		cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr, cmd.WaitDelay = "/", []string{}, &out, &out, time.Second
		if filepath.Clean(o.HostRoot) != "/" {
			cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: o.HostRoot}
		}
		err := cmd.Run()
		switch {
		case err == nil:
			return nil
		case errors.Is(err, syscall.ETXTBSY) && n < tries:
			select {
			case <-limited.Done():
			case <-time.After(10 * time.Millisecond):
			}
			continue
		case limited.Err() != nil && ctx.Err() == nil:
			return fmt.Errorf("it did not end within %v: the driver does not respond", limit)
		case errors.Is(err, fs.ErrNotExist):
			return fmt.Errorf("%w; the host may have no C library (glibc)", err)
		}
		if why := strings.TrimSpace(out.String()); why != "" {
			return errors.New(strings.ToValidUTF8(why[:min(len(why), 1000)], "?"))
		}
		return err
	}
}

// Tidy removes the programs that earlier releases installed and that no file in the folder
// of CDI specifications names. current is the path that Install returned.
func Tidy(o Options, current, cdiDir string) error {
	dir, err := securejoin.SecureJoin(o.HostRoot, o.Dir)
	if err != nil {
		return err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("remove former hooks: %w", err)
	}
	var former []string
	for _, e := range entries {
		if Name.MatchString(e.Name()) && e.Name() != path.Base(current) {
			former = append(former, e.Name())
		}
	}
	if len(former) == 0 {
		return nil
	}
	specs, err := os.ReadDir(cdiDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove former hooks: %w", err)
	}
	for _, s := range specs {
		if !s.Type().IsRegular() {
			continue
		}
		text, err := os.ReadFile(filepath.Join(cdiDir, s.Name()))
		if err != nil {
			return fmt.Errorf("remove former hooks: %w", err)
		}
		former = slices.DeleteFunc(former, func(f string) bool { return bytes.Contains(text, []byte(f)) })
	}
	var failed []error
	for _, f := range former {
		if err := os.Remove(filepath.Join(dir, f)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			failed = append(failed, err)
		}
	}
	return errors.Join(failed...)
}
