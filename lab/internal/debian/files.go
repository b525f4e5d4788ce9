package debian

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"strings"
	"time"

	"github.com/divvy-gpu/divvy/lab/internal/image"
)

// lockRetry is how often a folder is tried that another program uses.
const lockRetry = time.Second

// StatusDir is where an image without dpkg describes its packages; those who
// scan images for vulnerabilities read it.
const StatusDir = "/var/lib/dpkg/status.d"

// merged are folders that lie below /usr on every Debian by now, but for the
// packages, which have them at the top.
var merged = []string{"/bin/", "/sbin/", "/lib/", "/lib64/"}

// Merged are the links from the old places of folders to those below /usr, for an
// image with files of packages.
func Merged() []image.File {
	files := make([]image.File, 0, len(merged))
	for _, dir := range merged {
		name := strings.TrimSuffix(dir, "/")
		files = append(files, image.File{Path: name, Target: "usr" + name})
	}
	return files
}

// Files returns the files of a package whose paths keep accepts, below /usr where
// Debian has them, and its description in StatusDir. Folders are left out; an
// image has those that its files lie in.
func (p Package) Files(ctx context.Context, keep func(path string) bool) ([]image.File, error) {
	archive, err := output(ctx, "dpkg-deb", "--fsys-tarfile", p.Path)
	if err != nil {
		return nil, fmt.Errorf("unpack %s: %w", p.Name, err)
	}
	files := []image.File{{Path: path.Join(StatusDir, p.Name), Content: []byte(p.Control), Mode: 0o644}}
	for r := tar.NewReader(bytes.NewReader(archive)); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files, nil
		}
		if err != nil {
			return nil, fmt.Errorf("unpack %s: %w", p.Name, err)
		}
		f := image.File{Path: place(header.Name), Mode: header.FileInfo().Mode() & (fs.ModePerm &^ 0o022)}
		if header.Typeflag == tar.TypeDir || !keep(f.Path) {
			continue
		}
		switch header.Typeflag {
		case tar.TypeReg:
			if f.Content, err = io.ReadAll(r); err != nil {
				return nil, fmt.Errorf("unpack %s of %s: %w", f.Path, p.Name, err)
			}
		case tar.TypeSymlink:
			f.Target = header.Linkname
		case tar.TypeLink:
			f.Same = place(header.Linkname)
		default:
			return nil, fmt.Errorf("unpack %s of %s: a file of type %q has no place in an image", f.Path, p.Name, header.Typeflag)
		}
		files = append(files, f)
	}
}

// place is where a file of a package lies in an image.
func place(name string) string {
	name = path.Clean("/" + name)
	for _, dir := range merged {
		if strings.HasPrefix(name, dir) {
			return "/usr" + name
		}
	}
	return name
}
