package enflame

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	securejoin "github.com/cyphar/filepath-securejoin"
)

// The names and folders in which the vendor's own binding looks, in its order.
var (
	libraryNames = []string{
		"libefml.so", "libefml.so.1", "libefml.so.2", "libefml.so.2.1", "libefml.so.2.0", "libefml.so.1.0.0",
	}
	libraryFolders = []string{
		"/usr/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu",
	}
)

// toolsFolder has a folder efsmi-VERSION for each installed release of the
// vendor's tools, with the library in its folder lib. /usr/lib/libefml.so is a
// link there; it is searched in case the link was not made.
const toolsFolder = "/usr/local/efsmi"

// finder knows where libefml can be.
type finder struct {
	// root is the driver root.
	root string
	// path is the only file to try, "" for all known places.
	path string
}

// candidates returns what to load, best first: bare names, which the dynamic
// loader searches for, and existing files with all links resolved inside root.
func (f finder) candidates() ([]string, error) {
	if f.path != "" {
		return []string{f.path}, nil
	}
	var found []string
	if f.loaderSearches() {
		found = append(found, libraryNames...)
	}
	folders, err := f.folders()
	if err != nil {
		return nil, err
	}
	for _, folder := range folders {
		for _, name := range libraryNames {
			path, err := securejoin.SecureJoin(f.root, filepath.Join(folder, name))
			if err != nil {
				return nil, err
			}
			if info, err := os.Stat(path); err != nil || !info.Mode().IsRegular() || slices.Contains(found, path) {
				continue
			}
			found = append(found, path)
		}
	}
	return found, nil
}

// loaderSearches reports whether bare names are tried. The dynamic loader
// searches in this process's own root, so only if that is the driver root.
func (f finder) loaderSearches() bool { return f.root == "/" }

// folders returns the folders to look in, as paths in the driver root; newer
// releases of the vendor's tools come first.
func (f finder) folders() ([]string, error) {
	tools, err := securejoin.SecureJoin(f.root, toolsFolder)
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(tools)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var releases []string
	for _, e := range entries {
		if version, ok := strings.CutPrefix(e.Name(), "efsmi-"); ok {
			releases = append(releases, version)
		}
	}
	slices.SortFunc(releases, func(a, b string) int { return compareVersions(b, a) })
	folders := slices.Clone(libraryFolders)
	for _, version := range releases {
		folders = append(folders, filepath.Join(toolsFolder, "efsmi-"+version, "lib"))
	}
	return folders, nil
}

// notFound is the error for when no candidate is there.
func (f finder) notFound() error {
	if f.path != "" {
		return fmt.Errorf("%s not found", f.path)
	}
	places := slices.Concat(libraryFolders, []string{toolsFolder + "/efsmi-*/lib"})
	for i, p := range places {
		places[i] = filepath.Join(f.root, p)
	}
	if f.loaderSearches() {
		places = append([]string{"the dynamic loader's path"}, places...)
	}
	return fmt.Errorf("libefml.so not found; looked in %s for %s",
		strings.Join(places, ", "), strings.Join(libraryNames, ", "))
}

// open loads the first candidate that can be used. It returns old when that is
// the one; else old, which may be nil, is closed first: two releases of the
// library in one process might get in each other's way.
func (f finder) open(old *library) (*library, error) {
	candidates, err := f.candidates()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("search for libefml.so: %w", err), closeOld(old))
	}
	if old != nil && len(candidates) > 0 && old.unchanged(first(candidates)) {
		return old, nil
	}
	if err := closeOld(old); err != nil {
		return nil, err
	}
	var errs []error
	for _, c := range candidates {
		lib, err := load(c)
		switch {
		case err == nil:
			return lib, nil
		case errors.Is(err, fs.ErrNotExist) || isLoaderMiss(c, err):
		default:
			errs = append(errs, err)
		}
	}
	if len(errs) == 0 {
		return nil, f.notFound()
	}
	return nil, fmt.Errorf("libefml.so cannot be loaded: %s", joinLine(errs))
}

// first returns the first file among the candidates: those that the dynamic
// loader would have found had been loaded under their bare names.
func first(candidates []string) string {
	i := slices.IndexFunc(candidates, filepath.IsAbs)
	return candidates[max(i, 0)]
}

func closeOld(old *library) error {
	if old == nil {
		return nil
	}
	if err := old.close(); err != nil {
		return fmt.Errorf("unload %s: %w", old.path, err)
	}
	return nil
}

// isLoaderMiss tells a bare name that the dynamic loader did not find from one
// that it found but could not load, say for a missing dependency, whose name
// would be in the error.
func isLoaderMiss(name string, err error) bool {
	return !filepath.IsAbs(name) && strings.HasPrefix(err.Error(), name+": cannot open shared object file")
}

func joinLine(errs []error) string {
	texts := make([]string, len(errs))
	for i, err := range errs {
		texts[i] = err.Error()
	}
	return strings.Join(texts, "; ")
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
