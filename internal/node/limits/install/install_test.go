package install

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/divvy-gpu/divvy/internal/platform/atomicfile"
)

// program is a hook that does what its test run needs.
func program(t *testing.T, script string) Options {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "divvy-hook")
	if err := os.WriteFile(file, []byte("#!/bin/sh\n"+script), 0o600); err != nil {
		t.Fatal(err)
	}
	return Options{Program: file, HostRoot: "/", Dir: filepath.Join(dir, "host/hook"), DriverRoot: "/driver"}
}

func TestInstall(t *testing.T) {
	o := program(t, `[ "$*" = "check --driver-root=/driver" ] && [ "$PWD" = / ]`)
	file, err := Install(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(file)
	if err != nil || info.Mode() != 0o755 || filepath.Dir(file) != o.Dir || !Name.MatchString(filepath.Base(file)) {
		t.Errorf("installed %s: %v, %v", file, info, err)
	}
	if again, err := Install(t.Context(), o); err != nil || again != file {
		t.Errorf("again: %s, %v", again, err)
	} else if after, err := os.Stat(file); err != nil || !os.SameFile(info, after) {
		t.Errorf("it was written again: %v", err)
	}
	for what, spoil := range map[string]func() error{
		"its content": func() error { return os.WriteFile(file, []byte("x"), 0o755) },
		"its mode":    func() error { return os.Chmod(file, 0o600) },
		"all of it":   func() error { return os.Remove(file) },
	} {
		if err := spoil(); err != nil {
			t.Fatal(err)
		}
		if got, err := Install(t.Context(), o); err != nil || got != file {
			t.Errorf("after a change of %s: %s, %v", what, got, err)
		}
	}
}

func TestInstallFails(t *testing.T) {
	for name, tt := range map[string]struct {
		script string
		change func(*Options)
		want   string
	}{
		"the driver is too old": {"echo 'divvy-hook: driver 595 has no memory limits' >&2; exit 1", nil, "driver 595 has no memory limits"},
		"it says nothing":       {"exit 3", nil, "exit status 3"},
		"it does not end":       {"sleep 60", func(o *Options) { o.Timeout = 200 * time.Millisecond }, "did not end within 200ms"},
		"no program":            {"", func(o *Options) { o.Program += "x" }, "read the hook"},
		"no folder": {"", func(o *Options) { o.Dir = filepath.Join(o.Program, "x") },
			"install the hook in "},
		"no interpreter": {"", func(o *Options) {
			if err := os.WriteFile(o.Program, []byte("#!/nowhere/ld-linux\n"), 0o600); err != nil {
				panic(err)
			}
		}, "the host may have no C library"},
	} {
		t.Run(name, func(t *testing.T) {
			o := program(t, tt.script)
			if tt.change != nil {
				tt.change(&o)
			}
			if file, err := Install(t.Context(), o); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Install = %q, %v, want %q", file, err, tt.want)
			}
		})
	}
}

func TestFileSystemThatIsNotUsable(t *testing.T) {
	for name, tt := range map[string]struct {
		flags int64
		want  string
	}{
		"one that is usable": {unix.ST_NODEV | unix.ST_NOSUID, ""},
		"read-only":          {unix.ST_RDONLY, "folder /x of the host is read-only"},
		"noexec":             {unix.ST_NOEXEC, "folder /x of the host is mounted with noexec"},
	} {
		if err := problem("/x", tt.flags); (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", name, err, tt.want)
		}
	}
	if err := usable(t.TempDir(), "/x"); err != nil {
		t.Errorf("a temporary folder: %v", err)
	}
}

func TestTidy(t *testing.T) {
	o := program(t, "exit 0")
	cdi := t.TempDir()
	if err := os.MkdirAll(o.Dir, 0o750); err != nil {
		t.Fatal(err)
	}
	const used, unused = "divvy-hook-0123456789abcdef", "divvy-hook-00000000000000ff"
	for file, text := range map[string]string{
		filepath.Join(o.Dir, used): "", filepath.Join(o.Dir, unused): "", filepath.Join(o.Dir, unused+atomicfile.Suffix): "",
		filepath.Join(o.Dir, "another"): "", filepath.Join(cdi, "divvy-x.yaml"): "path: /x/" + used + "\n",
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	file, err := Install(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if err := Tidy(o, file, cdi); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(o.Dir)
	if err != nil {
		t.Fatal(err)
	}
	var left []string
	for _, e := range entries {
		left = append(left, e.Name())
	}
	want := []string{"another", used, filepath.Base(file)}
	slices.Sort(want)
	if !slices.Equal(left, want) {
		t.Errorf("left are %q, want %q", left, want)
	}
	if err := Tidy(o, file, filepath.Join(cdi, "missing")); err != nil {
		t.Errorf("without CDI specifications: %v", err)
	}
	if _, err := os.Stat(filepath.Join(o.Dir, used)); !os.IsNotExist(err) {
		t.Errorf("what no specification names stays: %v", err)
	}
}
