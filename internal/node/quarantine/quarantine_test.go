package quarantine

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/state"
)

func entry(id accel.DeviceID, minute int) accel.Quarantine {
	return accel.Quarantine{
		Device: id, Vendor: "nvidia", Index: 1, Cause: "xid-79", Reason: "critical error XID 79",
		Since: time.Date(2026, 7, 1, 10, minute, 0, 0, time.UTC),
	}
}

// opened is what a program finds that starts now and whose node shows these devices.
func opened(t *testing.T, dir string, shown ...accel.Quarantine) *List {
	t.Helper()
	l := Open(t.Context(), dir)
	l.Adopt(shown)
	return l
}

func want(t *testing.T, l *List, entries ...accel.Quarantine) {
	t.Helper()
	if entries == nil {
		entries = []accel.Quarantine{}
	}
	if diff := cmp.Diff(entries, l.All()); diff != "" {
		t.Errorf("in quarantine (-want +got):\n%s", diff)
	}
	for _, q := range entries {
		if got, ok := l.Of(q.Device); !ok || got != q {
			t.Errorf("Of(%s) = %+v, %v", q.Device, got, ok)
		}
	}
}

func TestQuarantineOutlivesThePrograms(t *testing.T) {
	dir := t.TempDir()
	l := opened(t, dir)
	want(t, l)
	l.Add(entry("b", 2))
	l.Add(entry("a", 1))
	l.Add(entry("a", 3)) // it stays as it is
	want(t, l, entry("a", 1), entry("b", 2))
	l = opened(t, dir, entry("c", 1)) // the file decides
	want(t, l, entry("a", 1), entry("b", 2))
	if !l.Release("a") || l.Release("a") || l.Release("c") {
		t.Error("Release says of a device in quarantine that it is not, or of another one that it is")
	}
	want(t, opened(t, dir), entry("b", 2))
	l.Release("b")
	want(t, opened(t, dir, entry("b", 2)))
	if err := l.Sync(); err != nil {
		t.Errorf("Sync: %v", err)
	}
}

// TestFileThatCannotBeRead: what the node's object shows is taken.
func TestFileThatCannotBeRead(t *testing.T) {
	for name, spoil := range map[string]func(path string) error{
		"no file":    os.Remove,
		"empty":      func(path string) error { return os.Truncate(path, 0) },
		"cut":        func(path string) error { return os.Truncate(path, 20) },
		"other text": func(path string) error { return os.WriteFile(path, []byte("hello"), 0o600) },
		"a folder": func(path string) error {
			return errors.Join(os.Remove(path), os.MkdirAll(filepath.Join(path, "x"), 0o700))
		},
		"other content": func(path string) error {
			return state.NewDocument[string](filepath.Dir(path), FileName).Save("a")
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			l := opened(t, dir)
			l.Add(entry("a", 1))
			if err := spoil(filepath.Join(dir, FileName)); err != nil {
				t.Fatal(err)
			}
			l.Add(entry("b", 2)) // what runs has lost nothing
			want(t, l, entry("a", 1), entry("b", 2))
			if err := spoil(filepath.Join(dir, FileName)); err != nil && name != "a folder" {
				t.Fatal(err)
			}
			l = Open(t.Context(), dir)
			if !l.Doubt() {
				t.Error("the file is believed")
			}
			l.Add(entry("c", 3)) // before the node's object is known
			l.Adopt([]accel.Quarantine{entry("a", 1), entry("c", 9)})
			want(t, l, entry("a", 1), entry("c", 3))
			l.Adopt([]accel.Quarantine{entry("d", 1)}) // once
			want(t, l, entry("a", 1), entry("c", 3))
			if name != "a folder" {
				want(t, opened(t, dir), entry("a", 1), entry("c", 3))
			}
		})
	}
}

// TestAnOldFile: what the node's object shows since the file was written could not be
// written; what it shows from before was released since.
func TestAnOldFile(t *testing.T) {
	dir := t.TempDir()
	l := opened(t, dir)
	l.Add(entry("a", 1))
	at := entry("", 5).Since.Add(300 * time.Millisecond)
	if err := os.Chtimes(filepath.Join(dir, FileName), at, at); err != nil {
		t.Fatal(err)
	}
	l = Open(t.Context(), dir)
	l.Adopt([]accel.Quarantine{entry("a", 1), entry("b", 2), entry("c", 5), entry("d", 6)})
	want(t, l, entry("a", 1), entry("c", 5), entry("d", 6))
	want(t, opened(t, dir), entry("a", 1), entry("c", 5), entry("d", 6))
}

// TestRestore: a predecessor's list counts, whatever the file has.
func TestRestore(t *testing.T) {
	dir := t.TempDir()
	l := opened(t, dir)
	l.Add(entry("a", 1))
	l.Restore([]accel.Quarantine{entry("b", 2)})
	l.Adopt([]accel.Quarantine{entry("c", 3)})
	want(t, l, entry("b", 2))
	want(t, opened(t, dir), entry("b", 2))
}

// TestFileThatCannotBeWritten: nothing is lost while the program runs, and the file is
// written when that is possible.
func TestFileThatCannotBeWritten(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	l := opened(t, dir)
	l.Add(entry("a", 1))
	// Whoever runs the test, nothing can be made below a file.
	if err := os.Rename(dir, dir+".aside"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	l.Add(entry("b", 2))
	want(t, l, entry("a", 1), entry("b", 2))
	if err := l.Sync(); err == nil || !strings.Contains(err.Error(), dir) {
		t.Errorf("Sync: %v, want why the file cannot be written", err)
	}
	if err := errors.Join(os.Remove(dir), os.Rename(dir+".aside", dir)); err != nil {
		t.Fatal(err)
	}
	if err := l.Sync(); err != nil {
		t.Errorf("Sync: %v", err)
	}
	want(t, opened(t, dir), entry("a", 1), entry("b", 2))
}

func TestTextsAndNumbersAreBounded(t *testing.T) {
	l := opened(t, t.TempDir())
	q := entry("a", 1)
	q.Reason = "two\nlines \xff " + strings.Repeat("é", wire.MaxReason)
	l.Add(q)
	got, _ := l.Of("a")
	if len(got.Reason) > wire.MaxReason || !strings.HasPrefix(got.Reason, "two lines ? é") || !strings.HasSuffix(got.Reason, "é...") {
		t.Errorf("the reason is %q", got.Reason)
	}
	l = New()
	l.Add(entry("a", 1))
	for i := range wire.MaxQuarantined + 5 {
		l.Add(entry(accel.DeviceID(fmt.Sprint("d", i)), 2+i))
	}
	if n := len(l.All()); n != wire.MaxQuarantined {
		t.Errorf("%d devices are in quarantine", n)
	}
	if _, there := l.Of("a"); there {
		t.Error("the oldest entry is there")
	}
}

func TestMemoryAlone(t *testing.T) {
	l := New()
	l.Adopt([]accel.Quarantine{entry("b", 1)})
	l.Add(entry("a", 1))
	want(t, l, entry("a", 1))
	if err := l.Sync(); err != nil {
		t.Errorf("Sync: %v", err)
	}
}
