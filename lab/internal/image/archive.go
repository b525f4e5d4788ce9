package image

import (
	"archive/tar"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
)

// annotationName is where containerd looks for an image's name on import, and
// annotationTag where others look for its tag.
const (
	annotationName = "io.containerd.image.name"
	annotationTag  = "org.opencontainers.image.ref.name"
)

// NameAnnotations are the annotations by which programs that read an archive or
// a layout find out the name of an image in it, name:tag.
func NameAnnotations(name, tag string) map[string]string {
	return map[string]string{annotationName: name + ":" + tag, annotationTag: tag}
}

// WriteArchive writes the image as an archive to a new file. It is an OCI
// archive, which keeps the image's digest and may carry several names, and at the
// same time one that every "docker load" reads.
func WriteArchive(img v1.Image, archive string, names ...string) (err error) {
	dir, err := os.MkdirTemp(filepath.Dir(archive), ".oci-")
	if err != nil {
		return fmt.Errorf("write image archive: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	index, err := layout.Write(dir, empty.Index)
	if err != nil {
		return fmt.Errorf("write image archive: %w", err)
	}
	for _, name := range names {
		annotations := layout.WithAnnotations(map[string]string{annotationName: name})
		if err := index.AppendImage(img, annotations); err != nil {
			return fmt.Errorf("write image archive: %w", err)
		}
	}
	if err := writeDockerManifest(dir, img, names); err != nil {
		return fmt.Errorf("write image archive: %w", err)
	}
	return Pack(dir, archive)
}

// writeDockerManifest adds the file by which docker finds an image in an archive.
func writeDockerManifest(dir string, img v1.Image, names []string) error {
	manifest, err := img.Manifest()
	if err != nil {
		return err
	}
	blob := func(h v1.Hash) string { return "blobs/" + h.Algorithm + "/" + h.Hex }
	type entry struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	e := entry{Config: blob(manifest.Config.Digest), RepoTags: names}
	for _, l := range manifest.Layers {
		e.Layers = append(e.Layers, blob(l.Digest))
	}
	content, err := json.Marshal([]entry{e})
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "manifest.json"), content, 0o600)
}

// Pack writes the files of an OCI layout as an archive to a new file. The same
// files give the same archive.
func Pack(dir, archive string) error {
	temporary := archive + ".tmp"
	if err := tarFolder(dir, temporary); err != nil {
		return errors.Join(fmt.Errorf("write image archive: %w", err), remove(temporary))
	}
	if err := os.Rename(temporary, archive); err != nil {
		return errors.Join(fmt.Errorf("write image archive: %w", err), remove(temporary))
	}
	return nil
}

func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func tarFolder(dir, archive string) (err error) {
	file, err := os.Create(archive)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	w := tar.NewWriter(file)
	err = filepath.WalkDir(dir, func(name string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		relative, err := filepath.Rel(dir, name)
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		header := &tar.Header{Name: relative, Mode: 0o644, Size: info.Size(), ModTime: epoch, Typeflag: tar.TypeReg}
		if err := w.WriteHeader(header); err != nil {
			return err
		}
		source, err := os.Open(name)
		if err != nil {
			return err
		}
		_, err = io.Copy(w, source)
		return errors.Join(err, source.Close())
	})
	return errors.Join(err, w.Close())
}
