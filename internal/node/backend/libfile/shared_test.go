package libfile

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ebitengine/purego"
)

// compile makes liba.so, which needs libb.so, which needs libc1.so.
func compile(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	for _, source := range []struct{ file, text string }{
		{"a.c", "int b(void); int a(void) { return b() + 1; }"},
		{"b.c", "int c(void); int b(void) { return c() + 1; }"},
		{"c.c", "int c(void) { return 1; }"},
	} {
		if err := os.WriteFile(filepath.Join(dir, source.file), []byte(source.text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, args := range [][]string{
		{"-Wl,-soname,libc1.so", "-o", "libc1.so", "c.c"},
		{"-Wl,-soname,libb.so", "-o", "libb.so", "b.c", "-L.", "-lc1"},
		{"-Wl,-soname,liba.so", "-o", "liba.so", "a.c", "-L.", "-lb", "-Wl,-rpath-link,."},
	} {
		cc := exec.CommandContext(t.Context(), "cc", append([]string{"-shared", "-fPIC"}, args...)...)
		cc.Dir = dir
		if out, err := cc.CombinedOutput(); err != nil {
			t.Fatalf("cc: %v\n%s", err, out)
		}
	}
	return dir
}

func TestNeededLibrariesAreTakenFromTheSameFolder(t *testing.T) {
	dir := compile(t)
	for range 2 {
		s, err := LoadShared(filepath.Join(dir, "liba.so"), purego.RTLD_LAZY|purego.RTLD_LOCAL)
		if err != nil {
			t.Fatal(err)
		}
		var a, none func() int32
		missing := s.Bind(Symbols{{&none, "no_such_function"}, {&a, "a"}})
		if !slices.Equal(missing, []string{"no_such_function"}) || none != nil || a == nil {
			t.Fatalf("missing are %q, want the one that is", missing)
		}
		if got := a(); got != 3 {
			t.Errorf("the function returns %d, want 3", got)
		}
		if err := s.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	}
}

func TestNeededLibraryIsNowhere(t *testing.T) {
	dir := compile(t)
	if err := os.Remove(filepath.Join(dir, "libc1.so")); err != nil {
		t.Fatal(err)
	}
	_, err := LoadShared(filepath.Join(dir, "liba.so"), purego.RTLD_LAZY|purego.RTLD_LOCAL)
	if err == nil || !strings.HasPrefix(err.Error(), "libc1.so: cannot open shared object file") {
		t.Errorf("error is %v, want one that names libc1.so", err)
	}
	if err := (Shared{}).Close(); err != nil {
		t.Errorf("Close of nothing: %v", err)
	}
}
