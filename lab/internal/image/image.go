// Package image makes container images from programs on disk, without a
// container engine. The same files give the same image, byte for byte: every
// timestamp is fixed and files are in order.
package image

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// File is one file of an image: a copy of a file on disk, a link, a folder, or
// given content.
type File struct {
	// Path is the absolute place in the image.
	Path string
	// Source is the file on disk whose content it gets. Without it the content
	// is Content, Target makes it a symbolic link, Same another name of a file of
	// the image whose path sorts before its own, and Dir a folder.
	Source  string
	Content []byte
	Target  string
	Same    string
	Dir     bool
	// Mode is the permission; 0 means 0755.
	Mode fs.FileMode
}

// Spec describes an image.
type Spec struct {
	// Name is the full name with tag.
	Name  string
	Files []File
	// Entrypoint, Cmd, Env and User are as in a container file.
	Entrypoint, Cmd, Env []string
	User                 string
	Labels               map[string]string
}

// epoch is the time of every file and of the image.
var epoch = time.Date(2000, time.January, 1, 0, 0, 0, 0, time.UTC)

// Build makes the image in memory.
func Build(spec Spec) (v1.Image, error) {
	content, err := layer(spec.Files)
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", spec.Name, err)
	}
	img := mutate.MediaType(empty.Image, types.OCIManifestSchema1)
	img = mutate.ConfigMediaType(img, types.OCIConfigJSON)
	img, err = mutate.Append(img, mutate.Addendum{
		// Not compressed: it never leaves this machine.
		Layer:   static.NewLayer(content, types.OCIUncompressedLayer),
		History: v1.History{Created: v1.Time{Time: epoch}, CreatedBy: "divvy lab"},
	})
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", spec.Name, err)
	}
	img, err = mutate.ConfigFile(img, configFile(img, spec))
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", spec.Name, err)
	}
	return img, nil
}

func configFile(img v1.Image, spec Spec) *v1.ConfigFile {
	config := &v1.ConfigFile{}
	if existing, err := img.ConfigFile(); err == nil {
		config = existing.DeepCopy()
	}
	config.Created = v1.Time{Time: epoch}
	config.OS, config.Architecture = "linux", runtime.GOARCH
	config.Config = v1.Config{
		Entrypoint: spec.Entrypoint,
		Cmd:        spec.Cmd,
		Env:        append([]string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, spec.Env...),
		User:       spec.User,
		Labels:     spec.Labels,
		WorkingDir: "/",
	}
	return config
}

// layer writes the files as a tar archive, each folder above them once.
func layer(files []File) ([]byte, error) {
	all := map[string]File{}
	for _, f := range files {
		clean := path.Clean("/" + f.Path)
		if _, twice := all[clean]; twice {
			return nil, fmt.Errorf("%s is given twice", clean)
		}
		all[clean] = f
	}
	for name := range all {
		for dir := path.Dir(name); dir != "/"; dir = path.Dir(dir) {
			if _, given := all[dir]; !given {
				all[dir] = File{Path: dir, Dir: true}
			}
		}
	}
	names := make([]string, 0, len(all))
	for name := range all {
		names = append(names, name)
	}
	slices.Sort(names)

	var buffer bytes.Buffer
	w := tar.NewWriter(&buffer)
	for _, name := range names {
		if err := addFile(w, name, all[name]); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, fmt.Errorf("write layer: %w", err)
	}
	return buffer.Bytes(), nil
}

func addFile(w *tar.Writer, name string, f File) error {
	mode := f.Mode
	if mode == 0 {
		mode = 0o755
	}
	header := &tar.Header{
		Name: strings.TrimPrefix(name, "/"), Mode: int64(mode.Perm()), ModTime: epoch, Format: tar.FormatPAX,
	}
	if mode&fs.ModeSticky != 0 {
		header.Mode |= 0o1000
	}
	content := f.Content
	switch {
	case f.Dir:
		header.Typeflag, header.Name, content = tar.TypeDir, header.Name+"/", nil
	case f.Target != "":
		header.Typeflag, header.Linkname, content = tar.TypeSymlink, f.Target, nil
	case f.Same != "":
		if f.Same >= name {
			return fmt.Errorf("%s is to be the same as %s, which comes after it", name, f.Same)
		}
		header.Typeflag, header.Linkname, content = tar.TypeLink, strings.TrimPrefix(f.Same, "/"), nil
	default:
		header.Typeflag = tar.TypeReg
		if f.Source != "" {
			data, err := os.ReadFile(f.Source)
			if err != nil {
				return fmt.Errorf("read a file of the image: %w", err)
			}
			content = data
		}
		header.Size = int64(len(content))
	}
	if err := w.WriteHeader(header); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	if _, err := w.Write(content); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

// annotationName is where containerd looks for an image's name on import.
const annotationName = "io.containerd.image.name"

// WriteArchive writes the image as an OCI archive, which keeps its digest, to
// a new file. It may carry several names.
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
	temporary := archive + ".tmp"
	if err := tarFolder(dir, temporary); err != nil {
		return fmt.Errorf("write image archive: %w", err)
	}
	if err := os.Rename(temporary, archive); err != nil {
		return fmt.Errorf("write image archive: %w", err)
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
