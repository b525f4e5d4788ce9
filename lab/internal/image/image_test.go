package image

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/v1/layout"
)

func testSpec(t *testing.T) Spec {
	t.Helper()
	program := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(program, []byte("#!/bin/sh\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return Spec{
		Name: "example.com/x:dev", Entrypoint: []string{"/usr/bin/program"}, User: "1:1", Env: []string{"A=b"},
		Files: []File{
			{Path: "/usr/bin/program", Source: program},
			{Path: "/bin/sh", Target: "program"},
			{Path: "/etc/x", Content: []byte("x"), Mode: 0o644},
			{Path: "/tmp", Dir: true, Mode: 0o777 | os.ModeSticky},
		},
	}
}

// The digest depends on content only: not on when the files were written, nor
// on their order.
func TestBuildIsReproducible(t *testing.T) {
	spec, other := testSpec(t), testSpec(t)
	slices.Reverse(other.Files)
	first, second := digest(t, spec), digest(t, other)
	if first != second {
		t.Errorf("two builds of the same files differ: %s and %s", first, second)
	}
	other.Files = append(other.Files, File{Path: "/new", Content: []byte("y")})
	if digest(t, other) == first {
		t.Error("a new file does not change the digest")
	}
}

func TestBuildContent(t *testing.T) {
	img, err := Build(testSpec(t))
	if err != nil {
		t.Fatal(err)
	}
	layers, err := img.Layers()
	if err != nil || len(layers) != 1 {
		t.Fatalf("got %d layers, %v; want 1", len(layers), err)
	}
	content, err := layers[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for r := tar.NewReader(content); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if !h.ModTime.Equal(epoch) || h.Uid != 0 {
			t.Errorf("%s: time %v, owner %d", h.Name, h.ModTime, h.Uid)
		}
		got = append(got, strings.TrimSpace(h.FileInfo().Mode().String()+" "+h.Name+" "+h.Linkname))
	}
	want := []string{
		"drwxr-xr-x bin/", "Lrwxr-xr-x bin/sh program", "drwxr-xr-x etc/", "-rw-r--r-- etc/x",
		"dtrwxrwxrwx tmp/", "drwxr-xr-x usr/", "drwxr-xr-x usr/bin/", "-rwxr-xr-x usr/bin/program",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if c := config.Config; c.User != "1:1" || !slices.Contains(c.Env, "A=b") || c.Entrypoint[0] != "/usr/bin/program" {
		t.Errorf("configuration %+v", c)
	}
	diffID, err := layers[0].DiffID()
	if err != nil || len(config.RootFS.DiffIDs) != 1 || config.RootFS.DiffIDs[0] != diffID {
		t.Errorf("the configuration names layers %v, want %v (%v)", config.RootFS.DiffIDs, diffID, err)
	}
}

func TestBuildRefusesAPathGivenTwice(t *testing.T) {
	_, err := Build(Spec{Name: "x", Files: []File{{Path: "/a"}, {Path: "//a"}}})
	if err == nil || !strings.Contains(err.Error(), "given twice") {
		t.Errorf("got %v", err)
	}
}

func TestWriteArchiveKeepsTheDigest(t *testing.T) {
	img, err := Build(testSpec(t))
	if err != nil {
		t.Fatal(err)
	}
	want, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	archive := filepath.Join(t.TempDir(), "x.tar")
	if err := WriteArchive(img, archive, "example.com/x:dev", "example.com/x:other"); err != nil {
		t.Fatal(err)
	}
	path, err := layout.FromPath(unpack(t, archive))
	if err != nil {
		t.Fatal(err)
	}
	index, err := path.ImageIndex()
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, m := range manifest.Manifests {
		names = append(names, m.Annotations[annotationName])
		if m.Digest != want {
			t.Errorf("digest in the archive is %s, want %s", m.Digest, want)
		}
	}
	if diff := cmp.Diff([]string{"example.com/x:dev", "example.com/x:other"}, names); diff != "" {
		t.Errorf("names (-want +got):\n%s", diff)
	}
	left, err := os.ReadDir(filepath.Dir(archive))
	if err != nil || len(left) != 1 {
		t.Errorf("beside the archive: %v, %v", left, err)
	}
}

func TestLibrariesOfThisSystem(t *testing.T) {
	const program = "/bin/ls"
	loader, err := Interpreter(program)
	if err != nil || loader == "" {
		t.Skipf("%s is no dynamic program here: %v", program, err)
	}
	files, err := Libraries(program, "libm.so.6", "libno-such-thing.so.1")
	if err != nil {
		t.Fatal(err)
	}
	has := func(name string) bool {
		return slices.ContainsFunc(files, func(f File) bool {
			info, err := os.Stat(f.Source)
			return filepath.Base(f.Path) == name && err == nil && info.Mode().IsRegular()
		})
	}
	for _, name := range []string{filepath.Base(loader), "libc.so.6", "libm.so.6"} {
		if !has(name) {
			t.Errorf("%s is missing from %+v", name, files)
		}
	}
	if files[0].Path != loader {
		t.Errorf("the loader lies at %s, the program looks for it at %s", files[0].Path, loader)
	}
}

func TestLibrariesOfAStaticProgram(t *testing.T) {
	files, err := Libraries("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	if loader, _ := Interpreter("/proc/self/exe"); loader == "" && len(files) > 0 {
		t.Errorf("a static program needs %+v", files)
	}
	if _, err := Libraries("/no/such/program"); err == nil {
		t.Error("no error for a program that does not exist")
	}
}

func TestParseImageList(t *testing.T) {
	out := "REF                    TYPE            DIGEST         SIZE   PLATFORMS   LABELS\n" +
		"example.com/x:dev application/vnd.oci.image.manifest.v1+json sha256:0123 65.0 MiB linux/amd64 io.cri-containerd.image=managed\n" +
		"sha256:45 application/x sha256:67 1 B - -\n"
	want := map[string]string{"example.com/x:dev": "sha256:0123", "sha256:45": "sha256:67"}
	if diff := cmp.Diff(want, parseImageList(out)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func digest(t *testing.T, spec Spec) string {
	t.Helper()
	img, err := Build(spec)
	if err != nil {
		t.Fatal(err)
	}
	d, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	return d.String()
}

func unpack(t *testing.T, archive string) string {
	t.Helper()
	data, err := os.ReadFile(archive)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for r := tar.NewReader(bytes.NewReader(data)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return dir
		}
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, h.Name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}
