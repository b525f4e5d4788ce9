package host_test

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/lab/internal/host"
)

func TestClaimAndRelease(t *testing.T) {
	dir := t.TempDir()
	absent, empty := filepath.Join(dir, "absent"), filepath.Join(dir, "empty")
	mkdir(t, empty)
	record := host.NewRecord(filepath.Join(dir, "state", "record.json"))
	if err := record.Claim(absent, empty); err != nil {
		t.Fatal(err)
	}
	if err := record.Save(); err != nil {
		t.Fatal(err)
	}
	mkdir(t, filepath.Join(absent, "pods"))
	mkdir(t, filepath.Join(empty, "pods"))

	loaded, err := host.LoadRecord(filepath.Join(dir, "state", "record.json"))
	if err != nil {
		t.Fatal(err)
	}
	// What the record knows is the lab's, however full it is by now.
	if err := loaded.Claim(absent, empty); err != nil {
		t.Errorf("claiming again: %v", err)
	}
	if diff := cmp.Diff([]string{absent, empty}, loaded.Remaining()); diff != "" {
		t.Errorf("remaining before the release (-want +got):\n%s", diff)
	}
	if err := loaded.Release(); err != nil {
		t.Fatal(err)
	}
	if left := loaded.Remaining(); len(left) > 0 {
		t.Errorf("remaining after the release: %v", left)
	}
	if _, err := os.Stat(empty); err != nil {
		t.Errorf("a folder that was there before is gone: %v", err)
	}
	if _, err := os.Stat(absent); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a folder that was made is still there: %v", err)
	}
}

func TestClaimRefusesWhatIsNotTheLabs(t *testing.T) {
	dir := t.TempDir()
	used, file, fresh := filepath.Join(dir, "used"), filepath.Join(dir, "file"), filepath.Join(dir, "fresh")
	mkdir(t, filepath.Join(used, "manifests"))
	if err := os.Symlink("nowhere", file); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{used, file} {
		record := host.NewRecord(filepath.Join(dir, "record.json"))
		if err := record.Claim(fresh, path); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("claiming %s: %v; want an error that names it", path, err)
		}
	}
	if _, err := os.Stat(filepath.Join(used, "manifests")); err != nil {
		t.Error("refusing changed something")
	}
}

func TestNoteLeavesWhatExists(t *testing.T) {
	dir := t.TempDir()
	record := host.NewRecord(filepath.Join(dir, "record.json"))
	record.Note(dir, filepath.Join(dir, "new"))
	if diff := cmp.Diff([]string{filepath.Join(dir, "new")}, record.Made); diff != "" {
		t.Errorf("made (-want +got):\n%s", diff)
	}
}

func TestLoadRecord(t *testing.T) {
	path := filepath.Join(t.TempDir(), "record.json")
	if _, err := host.LoadRecord(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without a record: %v, want that it does not exist", err)
	}
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := host.LoadRecord(path); err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("damaged record: %v", err)
	}
}

func TestCheckPortFree(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	if err := host.CheckPortFree(address, "etcd"); err == nil || !strings.Contains(err.Error(), address) {
		t.Errorf("a port in use: %v", err)
	}
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	if err := host.CheckPortFree(address, "etcd"); err != nil {
		t.Errorf("a free port: %v", err)
	}
}

func TestCheckNetworks(t *testing.T) {
	if err := host.CheckNetworks("", "127.0.0.0/24"); err == nil || !strings.Contains(err.Error(), "lo") {
		t.Errorf("a range within the loopback interface's: %v", err)
	}
	if err := host.CheckNetworks("lo", "127.0.0.0/24"); err != nil {
		t.Errorf("the same, that interface excepted: %v", err)
	}
}

func TestMountsBelow(t *testing.T) {
	points, err := host.MountsBelow("/")
	if err != nil {
		t.Fatal(err)
	}
	for i := 1; i < len(points); i++ {
		if strings.HasPrefix(points[i], points[i-1]+"/") {
			t.Errorf("%s comes after %s, on which it lies", points[i], points[i-1])
		}
	}
	if none, err := host.MountsBelow(t.TempDir()); err != nil || len(none) > 0 {
		t.Errorf("below a fresh folder: %v, %v", none, err)
	}
}

func mkdir(t *testing.T, path string) {
	t.Helper()
	if err := os.MkdirAll(path, 0o755); err != nil {
		t.Fatal(err)
	}
}
