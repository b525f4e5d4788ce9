package atomicfile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func names(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	out := []string{}
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

func TestReplace(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "state.json")
	for _, content := range []string{"a longer first content", "second"} {
		info, err := Replace(path, []byte(content), 0o600)
		if err != nil {
			t.Fatal(err)
		}
		if now, err := os.Lstat(path); err != nil || !Same(info, now) {
			t.Errorf("it wrote %v, and %v is there, %v", info, now, err)
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != content {
			t.Errorf("read %q, %v; want %q", got, err, content)
		}
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v; want 0600", info.Mode(), err)
	}
	// What a crash left is overwritten.
	if err := os.WriteFile(path+Suffix, []byte("half of a much longer content than the next"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Replace(path, []byte("third"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != "third" {
		t.Errorf("read %q, %v; want %q", got, err, "third")
	}
	if diff := cmp.Diff([]string{"state.json"}, names(t, dir)); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
}

// TestReplaceFails: the old content stays, nothing else does, and the text of the
// error does not vary.
func TestReplaceFails(t *testing.T) {
	tests := map[string]struct {
		prepare func(path string) error
		left    []string
	}{
		"the target is a folder": {func(path string) error {
			return os.MkdirAll(filepath.Join(path, "inside"), 0o700)
		}, []string{"state.json"}},
		"the name beside it is a link": {func(path string) error {
			return os.Symlink("elsewhere", path+Suffix)
		}, []string{"state.json.new"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "state.json")
			if err := tt.prepare(path); err != nil {
				t.Fatal(err)
			}
			_, first := Replace(path, []byte("new"), 0o600)
			_, second := Replace(path, []byte("new"), 0o600)
			if first == nil || second == nil || first.Error() != second.Error() {
				t.Errorf("first %v, then %v; want the same error", first, second)
			}
			if diff := cmp.Diff(tt.left, names(t, dir)); diff != "" {
				t.Errorf("files (-want +got):\n%s", diff)
			}
		})
	}
}

// TestReplaceInARemovedFolder: a process whose working folder was removed sees it
// as a container sees a mounted folder that was removed from the host.
func TestReplaceInARemovedFolder(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Chdir(dir)
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	var removed *RemovedError
	if _, err := Replace("state.json", nil, 0o600); !errors.As(err, &removed) || removed.Dir != "." {
		t.Errorf("%v, want that the folder was removed", err)
	}
	if _, err := Replace(filepath.Join(dir, "state.json"), nil, 0o600); !errors.Is(err, fs.ErrNotExist) || errors.As(err, &removed) {
		t.Errorf("%v, want that the folder does not exist", err)
	}
}
