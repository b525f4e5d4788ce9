package build

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestComponentsAreImported(t *testing.T) {
	imports, err := os.ReadFile("../../components/components.go")
	if err != nil {
		t.Fatal(err)
	}
	versions, err := ReadVersions("../../components")
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, c := range Components() {
		if names[c.Name] {
			t.Errorf("%s is listed twice", c.Name)
		}
		names[c.Name] = true
		if !strings.Contains(string(imports), `"`+c.Package+`"`) {
			t.Errorf("components.go does not import %s, so go.sum may lack what it needs", c.Package)
		}
		if versions[c.Module] == "" {
			t.Errorf("go.mod does not require %s directly", c.Module)
		}
		if _, err := c.LinkerFlags(versions); err != nil {
			t.Error(err)
		}
	}
}

func TestLinkerFlags(t *testing.T) {
	c := Component{Name: "x", Module: "m", Stamp: map[string]string{"p.full": "v", "p.major": "major", "p.minor": "minor",
		"p.plain": "plain"}}
	got, err := c.LinkerFlags(Versions{"m": "v1.37.2"})
	if err != nil {
		t.Fatal(err)
	}
	if want := "-s -w -X p.full=v1.37.2 -X p.major=1 -X p.minor=37 -X p.plain=1.37.2"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	for name, versions := range map[string]Versions{
		"no such module": {}, "no version": {"m": "latest"},
	} {
		if _, err := c.LinkerFlags(versions); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	c.Stamp = map[string]string{"p.x": "unheard of"}
	if _, err := c.LinkerFlags(Versions{"m": "v1.2.3"}); err == nil {
		t.Error("unknown part of a version: no error")
	}
}

func TestKeyChangesWithWhatMatters(t *testing.T) {
	sum, components := []byte("a v1 h1:x\n"), Components()
	base := Key(sum, components, "go1.26.8")
	if again := Key(sum, Components(), "go1.26.8"); again != base {
		t.Error("the key is not stable")
	}
	tagged := Components()
	tagged[0].Tags = "other"
	for name, key := range map[string]string{
		"go.sum":     Key([]byte("a v2 h1:x\n"), components, "go1.26.8"),
		"compiler":   Key(sum, components, "go1.26.9"),
		"components": Key(sum, components[1:], "go1.26.8"),
		"build tags": Key(sum, tagged, "go1.26.8"),
	} {
		if key == base {
			t.Errorf("another %s, but the same key", name)
		}
	}
}

// testBuilder returns a Builder of two small programs of a module of its own.
func testBuilder(t *testing.T) (*Builder, *bytes.Buffer) {
	t.Helper()
	dir := t.TempDir()
	files := map[string]string{
		"go.mod": "module example.com/programs\n\ngo 1.26\n\n" +
			"require example.com/stamped v1.2.3\n\nreplace example.com/stamped => ./stamped\n",
		"stamped/go.mod": "module example.com/stamped\n\ngo 1.26\n",
		"go.sum":         "",
		"one/main.go":    "package main\n\nvar version = \"none\"\n\nfunc main() { print(version) }\n",
		"two/main.go":    "package main\n\nfunc main() {}\n",
		"bad/main.go":    "package main\n\nfunc main() { undefined() }\n",
	}
	for name, content := range files {
		path := filepath.Join(ModuleDir(dir), name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	out := &bytes.Buffer{}
	return &Builder{
		Dir: dir, CacheDir: t.TempDir(), Out: out,
		Components: []Component{
			{Name: "one", Package: "./one", Module: "example.com/stamped", Stamp: map[string]string{"main.version": "v"}},
			{Name: "two", Package: "./two"},
		},
	}, out
}

func TestRunBuildsWhatIsMissing(t *testing.T) {
	b, out := testBuilder(t)
	bin, err := b.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	printed, err := exec.CommandContext(t.Context(), filepath.Join(bin, "one")).CombinedOutput()
	if err != nil || string(printed) != "v1.2.3" {
		t.Errorf("the program printed %q (%v), want its version", printed, err)
	}
	if !strings.Contains(out.String(), "[2/2] two") || !strings.Contains(out.String(), "none left") {
		t.Errorf("progress is not shown:\n%s", out)
	}

	// A leftover of an interrupted build goes; what is whole is not built again.
	before := modTime(t, filepath.Join(bin, "one"))
	leftover := filepath.Join(bin, temporaryPrefix+"two")
	if err := os.Rename(filepath.Join(bin, "two"), leftover); err != nil {
		t.Fatal(err)
	}
	out.Reset()
	if _, err := b.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !modTime(t, filepath.Join(bin, "one")).Equal(before) {
		t.Error("a finished program was built again")
	}
	if !strings.Contains(out.String(), "Building 1 of 2") {
		t.Errorf("did not build just what was missing:\n%s", out)
	}
	if _, err := os.Stat(leftover); err == nil {
		t.Error("the unfinished program is still there")
	}
	out.Reset()
	if _, err := b.Run(t.Context()); err != nil || out.Len() > 0 {
		t.Errorf("a complete cache made noise or failed: %v\n%s", err, out)
	}
}

// What is not wanted may be impossible to build here.
func TestRunBuildsOnlyWhatIsWanted(t *testing.T) {
	b, out := testBuilder(t)
	b.Components = append(b.Components, Component{Name: "bad", Package: "./bad"})
	b.Wanted = []string{"two"}
	bin, err := b.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "Building 1 of 3") {
		t.Errorf("it was to build one of three:\n%s", out)
	}
	if left := b.missing(bin); len(left) > 0 {
		t.Errorf("after it these are missing: %v", left)
	}
	b.Wanted = nil
	if left := b.missing(bin); len(left) != 2 {
		t.Errorf("where all are wanted these are missing: %v", left)
	}
}

func TestRunReportsTheCompilersMessage(t *testing.T) {
	b, _ := testBuilder(t)
	b.Components = []Component{{Name: "bad", Package: "./bad"}}
	_, err := b.Run(t.Context())
	if err == nil || !strings.Contains(err.Error(), "undefined: undefined") {
		t.Fatalf("got error %v, want the compiler's message", err)
	}
	bin, err := b.BinDir(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(bin, "bad")); err == nil {
		t.Error("a failed build left a program")
	}
}

func TestRunStopsWhenInterrupted(t *testing.T) {
	b, _ := testBuilder(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if _, err := b.Run(ctx); !errors.Is(err, context.DeadlineExceeded) && !strings.Contains(err.Error(), "killed") {
		t.Errorf("got %v, want an interruption", err)
	}
}

func TestOutputWatcher(t *testing.T) {
	var details []string
	w := &outputWatcher{detail: func(s string) { details = append(details, s) }}
	for _, chunk := range []string{"go: downloading k8s.io/api v0.37.1\nstd/", "pkg\n", "./x.go:1:2: wrong\n"} {
		if _, err := w.Write([]byte(chunk)); err != nil {
			t.Fatal(err)
		}
	}
	if got, want := strings.Join(details, "; "), "1 modules downloaded; 1 packages compiled"; got != want {
		t.Errorf("details %q, want %q", got, want)
	}
	if !strings.HasSuffix(w.tail(), "./x.go:1:2: wrong") {
		t.Errorf("tail is %q", w.tail())
	}
}

func modTime(t *testing.T, path string) time.Time {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return info.ModTime()
}
