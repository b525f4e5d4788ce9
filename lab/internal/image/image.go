// Package image makes container images from programs on disk, without a
// container engine. The same files give the same image, byte for byte: every
// timestamp is fixed and files are in order.
package image

import (
	"archive/tar"
	"bytes"
	"cmp"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"runtime"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
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
	// Base are files of a layer of their own below Files, which images of other
	// programs and later versions share.
	Base []File
	// Entrypoint, Cmd, Env and User are as in a container file.
	Entrypoint, Cmd, Env []string
	User                 string
	Labels               map[string]string
	// Architecture is as Go calls it; empty means this machine's.
	Architecture string
	// Created is the image's time; zero means epoch. Files always have epoch, so
	// that a layer with the same files stays the same.
	Created time.Time
	// Compress layers, for images that leave this machine.
	Compress bool
}

// epoch is the time of every file and of the image.
var epoch = time.Date(2000, time.January, 1, 0, 0, 0, 0, time.UTC)

// Build makes the image in memory.
func Build(spec Spec) (v1.Image, error) {
	created := v1.Time{Time: epoch}
	if !spec.Created.IsZero() {
		created.Time = spec.Created.UTC()
	}
	img := mutate.MediaType(empty.Image, types.OCIManifestSchema1)
	img = mutate.ConfigMediaType(img, types.OCIConfigJSON)
	for _, files := range [][]File{spec.Base, spec.Files} {
		if len(files) == 0 {
			continue
		}
		added, err := newLayer(files, spec.Compress)
		if err == nil {
			img, err = mutate.Append(img, mutate.Addendum{
				Layer: added, History: v1.History{Created: v1.Time{Time: epoch}, CreatedBy: "divvy"},
			})
		}
		if err != nil {
			return nil, fmt.Errorf("image %s: %w", spec.Name, err)
		}
	}
	config, err := img.ConfigFile()
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", spec.Name, err)
	}
	config = config.DeepCopy()
	config.Created = created
	config.OS, config.Architecture = "linux", cmp.Or(spec.Architecture, runtime.GOARCH)
	config.Config = v1.Config{
		Entrypoint: spec.Entrypoint,
		Cmd:        spec.Cmd,
		Env:        append([]string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, spec.Env...),
		User:       spec.User,
		Labels:     spec.Labels,
		WorkingDir: "/",
	}
	img, err = mutate.ConfigFile(img, config)
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", spec.Name, err)
	}
	return img, nil
}

func newLayer(files []File, compress bool) (v1.Layer, error) {
	content, err := layer(files)
	if err != nil {
		return nil, err
	}
	if !compress {
		return static.NewLayer(content, types.OCIUncompressedLayer), nil
	}
	open := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(content)), nil }
	return tarball.LayerFromOpener(open, tarball.WithMediaType(types.OCILayer), tarball.WithCompressedCaching)
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
