package kubetest

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"
)

// MountedConfigMap is a folder as kubelet mounts a ConfigMap: its one file is a link
// to a link to a folder, and a change swaps the link in the middle.
type MountedConfigMap struct {
	t         *testing.T
	dir, name string
	count     int
}

// MountConfigMap mounts a ConfigMap with one file.
func MountConfigMap(t *testing.T, name, content string) *MountedConfigMap {
	t.Helper()
	m := &MountedConfigMap{t: t, dir: t.TempDir(), name: name}
	m.Write(content)
	if err := os.Symlink(filepath.Join("..data", name), m.File()); err != nil {
		t.Fatal(err)
	}
	return m
}

// File is the path of the file.
func (m *MountedConfigMap) File() string { return filepath.Join(m.dir, m.name) }

// Write changes the content of the file.
func (m *MountedConfigMap) Write(content string) {
	m.t.Helper()
	m.count++
	folder := "..of_" + strconv.Itoa(m.count)
	if err := os.Mkdir(filepath.Join(m.dir, folder), 0o755); err != nil {
		m.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(m.dir, folder, m.name), []byte(content), 0o644); err != nil {
		m.t.Fatal(err)
	}
	link := filepath.Join(m.dir, "..data")
	before, _ := os.Readlink(link)
	if err := os.Symlink(folder, link+"_tmp"); err != nil {
		m.t.Fatal(err)
	}
	if err := os.Rename(link+"_tmp", link); err != nil {
		m.t.Fatal(err)
	}
	if before != "" {
		if err := os.RemoveAll(filepath.Join(m.dir, before)); err != nil {
			m.t.Fatal(err)
		}
	}
}
