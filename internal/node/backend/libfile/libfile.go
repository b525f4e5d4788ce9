// Package libfile finds the file of a vendor's library among the places where
// its releases put it, and notices when another file is there.
package libfile

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	securejoin "github.com/cyphar/filepath-securejoin"
)

// Places says where a vendor's library can be.
type Places struct {
	// Names are the library's file names, best first. The first one is what
	// errors call the library.
	Names []string
	// Folders are where to look, best first.
	Folders []string
	// Releases are folders to look in after Folders, of which one element has a
	// "*" that stands for the version of a release, as in
	// "/usr/local/efsmi/efsmi-*/lib". Newer releases come first.
	Releases []string
	// LoaderLast makes the dynamic loader's own search come after Folders, not
	// before them.
	LoaderLast bool

	// Root is the folder that this process sees the driver's installation in.
	// Symbolic links are followed inside it.
	Root string
	// Path is the only file to try, used as it is; "" for all places.
	Path string
}

// Candidates returns what to load, best first: bare names, which the dynamic
// loader searches for, and existing files with all links resolved inside Root.
func (p Places) Candidates() ([]string, error) {
	if p.Path != "" {
		return []string{p.Path}, nil
	}
	folders, err := p.folders()
	if err != nil {
		return nil, fmt.Errorf("search for %s: %w", p.Names[0], err)
	}
	var files []string
	for _, folder := range folders {
		for _, name := range p.Names {
			file, err := securejoin.SecureJoin(p.Root, filepath.Join(folder, name))
			if err != nil {
				return nil, fmt.Errorf("search for %s: %w", p.Names[0], err)
			}
			if info, err := os.Stat(file); err == nil && info.Mode().IsRegular() && !slices.Contains(files, file) {
				files = append(files, file)
			}
		}
	}
	switch {
	case !p.loaderSearches():
		return files, nil
	case p.LoaderLast:
		return append(files, p.Names...), nil
	}
	return append(slices.Clone(p.Names), files...), nil
}

// loaderSearches reports whether bare names are tried. The dynamic loader
// searches in this process's own root, so only if that is the driver root.
func (p Places) loaderSearches() bool { return filepath.Clean(p.Root) == "/" }

// folders returns the folders to look in, as paths in Root.
func (p Places) folders() ([]string, error) {
	folders := slices.Clone(p.Folders)
	for _, pattern := range p.Releases {
		found, err := p.releases(pattern)
		if err != nil {
			return nil, err
		}
		folders = append(folders, found...)
	}
	return folders, nil
}

// releases returns the folders that a pattern of Releases stands for.
func (p Places) releases(pattern string) ([]string, error) {
	before, after, _ := strings.Cut(pattern, "*")
	parent, prefix := path.Split(before)
	suffix, rest, _ := strings.Cut(after, "/")
	folder, err := securejoin.SecureJoin(p.Root, parent)
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(folder)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var versions []string
	for _, e := range entries {
		version, ok := strings.CutPrefix(e.Name(), prefix)
		version, end := strings.CutSuffix(version, suffix)
		if ok && end {
			versions = append(versions, version)
		}
	}
	slices.SortFunc(versions, func(a, b string) int { return compareVersions(b, a) })
	for i, v := range versions {
		versions[i] = filepath.Join(parent, prefix+v+suffix, rest)
	}
	return versions, nil
}

// NotFound is the error for when no candidate is there. It names the places.
func (p Places) NotFound() error {
	if p.Path != "" {
		return fmt.Errorf("%s not found", p.Path)
	}
	places := slices.Concat(p.Folders, p.Releases)
	for i, place := range places {
		places[i] = filepath.Join(p.Root, place)
	}
	const loader = "the dynamic loader's path"
	switch {
	case !p.loaderSearches():
	case p.LoaderLast:
		places = append(places, loader)
	default:
		places = append([]string{loader}, places...)
	}
	return fmt.Errorf("%s not found; looked in %s for %s",
		p.Names[0], strings.Join(places, ", "), strings.Join(p.Names, ", "))
}

// Library is a library that is loaded.
type Library interface {
	comparable
	// LoadedFrom is the path or name that it was loaded from. File has it.
	LoadedFrom() string
	// Unchanged reports whether it was loaded from the file at path, and that
	// file is the same as it was then. File has it.
	Unchanged(path string) bool
	// Close unloads it.
	Close() error
}

// Open loads the first candidate that can be used. It returns old when that is
// the one; else old, which may be nil, is closed first: two releases of a
// library in one process might get in each other's way. With an error, nothing
// is loaded, unless old could not be closed.
func Open[L Library](p Places, old L, load func(path string) (L, error)) (L, error) {
	var none L
	closeOld := func() error {
		if old == none {
			return nil
		}
		if err := old.Close(); err != nil {
			return fmt.Errorf("unload %s: %w", p.Names[0], err)
		}
		return nil
	}
	candidates, err := p.Candidates()
	if err != nil {
		return none, errors.Join(err, closeOld())
	}
	if old != none && len(candidates) > 0 && old.Unchanged(first(candidates)) {
		return old, nil
	}
	if err := closeOld(); err != nil {
		return none, err
	}
	var failures []string
	for _, c := range candidates {
		lib, err := load(c)
		switch {
		case err == nil:
			return lib, nil
		case errors.Is(err, fs.ErrNotExist) || isLoaderMiss(c, err):
		default:
			failures = append(failures, err.Error())
		}
	}
	if len(failures) == 0 {
		return none, p.NotFound()
	}
	return none, fmt.Errorf("%s cannot be loaded: %s", p.Names[0], strings.Join(failures, "; "))
}

// first returns the first file among the candidates: those that the dynamic
// loader would have found had been loaded under their bare names.
func first(candidates []string) string {
	i := slices.IndexFunc(candidates, filepath.IsAbs)
	return candidates[max(i, 0)]
}

// isLoaderMiss tells a bare name that the dynamic loader did not find from one
// that it found but could not load, say for a missing dependency, whose name
// would be in the error.
func isLoaderMiss(name string, err error) bool {
	return !filepath.IsAbs(name) && strings.HasPrefix(err.Error(), name+": cannot open shared object file")
}

// File is a file as it was when a library was loaded from it.
type File struct {
	// Path is the file, or a bare name that the dynamic loader searched for.
	Path string
	info os.FileInfo // nil for a bare name
}

// Stat returns the file at path as it is now. A bare name need not be there.
func Stat(path string) (File, error) {
	if !strings.Contains(path, "/") {
		return File{Path: path}, nil
	}
	info, err := os.Stat(path)
	if err != nil {
		return File{}, err
	}
	return File{Path: path, info: info}, nil
}

// LoadedFrom returns Path, for whoever knows a library but not its type.
func (f File) LoadedFrom() string { return f.Path }

// String names the file and everything that Unchanged compares.
func (f File) String() string {
	if f.info == nil {
		return f.Path
	}
	inode := uint64(0)
	if stat, ok := f.info.Sys().(*syscall.Stat_t); ok {
		inode = stat.Ino
	}
	return fmt.Sprintf("%s inode %d, %d bytes of %d", f.Path, inode, f.info.Size(), f.info.ModTime().UnixNano())
}

// Unchanged reports whether the file at path is f, and as it was.
func (f File) Unchanged(path string) bool {
	if f.info == nil || path != f.Path {
		return false
	}
	now, err := os.Stat(path)
	return err == nil && os.SameFile(now, f.info) && now.Size() == f.info.Size() && now.ModTime().Equal(f.info.ModTime())
}

// compareVersions compares versions such as 1.9.0 and 1.14.0 number by number.
// What is no number, as in 1.14.0-beta, comes before all that is.
func compareVersions(a, b string) int {
	number := func(s string) int {
		if n, err := strconv.Atoi(s); err == nil {
			return n
		}
		return -1
	}
	return slices.CompareFunc(strings.Split(a, "."), strings.Split(b, "."), func(x, y string) int {
		return cmp.Or(cmp.Compare(number(x), number(y)), cmp.Compare(x, y))
	})
}
