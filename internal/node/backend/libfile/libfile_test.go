package libfile

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func write(t *testing.T, path string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
}

func places(root string) Places {
	return Places{
		Names:    []string{"libx.so", "libx.so.1"},
		Folders:  []string{"/usr/lib", "/usr/lib64"},
		Releases: []string{"/opt/x-*/lib"},
		Root:     root,
	}
}

func TestCandidates(t *testing.T) {
	root := t.TempDir()
	for _, f := range []string{
		"/usr/lib64/libx.so", "/usr/lib/libx.so.1", "/opt/x-1.9/lib/libx.so", "/opt/x-1.10/lib/libx.so", "/opt/y-2/lib/libx.so",
	} {
		write(t, filepath.Join(root, f))
	}
	if err := os.Symlink("/usr/lib64/libx.so", filepath.Join(root, "usr/lib/libx.so")); err != nil {
		t.Fatal(err)
	}
	got, err := places(root).Candidates()
	if err != nil {
		t.Fatal(err)
	}
	for i := range got {
		got[i] = strings.TrimPrefix(got[i], root)
	}
	want := []string{"/usr/lib64/libx.so", "/usr/lib/libx.so.1", "/opt/x-1.10/lib/libx.so", "/opt/x-1.9/lib/libx.so"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("candidates (-want +got):\n%s", diff)
	}
}

func TestNotFoundNamesThePlaces(t *testing.T) {
	const where = "/usr/lib, /usr/lib64, /opt/x-*/lib"
	tests := map[string]struct {
		change func(*Places)
		want   string
	}{
		"in a root": {
			func(p *Places) { p.Root = "/host" },
			"libx.so not found; looked in /host/usr/lib, /host/usr/lib64, /host/opt/x-*/lib for libx.so, libx.so.1",
		},
		"loader first": {func(*Places) {}, "libx.so not found; looked in the dynamic loader's path, " + where + " for libx.so, libx.so.1"},
		"loader last": {
			func(p *Places) { p.LoaderLast = true },
			"libx.so not found; looked in " + where + ", the dynamic loader's path for libx.so, libx.so.1",
		},
		"one file": {func(p *Places) { p.Path = "/opt/libx.so" }, "/opt/libx.so not found"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			p := places("/")
			tt.change(&p)
			if got := p.NotFound().Error(); got != tt.want {
				t.Errorf("error is %q, want %q", got, tt.want)
			}
		})
	}
}

func TestCompareVersions(t *testing.T) {
	ordered := []string{"1", "1.2", "1.9.0", "1.10.0", "1.14.0-beta", "1.14.0", "2.0.0"}
	sign := func(n int) int { return max(-1, min(1, n)) }
	for i, a := range ordered {
		for j, b := range ordered {
			if got, want := sign(compareVersions(a, b)), sign(i-j); got != want {
				t.Errorf("compareVersions(%s, %s) = %d, want %d", a, b, got, want)
			}
		}
	}
}
