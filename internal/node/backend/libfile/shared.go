package libfile

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/ebitengine/purego"
)

// Loaded is a shared library with the file that it was loaded from. With a
// vendor's functions beside it, it is a Library.
type Loaded struct {
	File
	Shared
}

// Load is LoadShared for a file that may be replaced later, whose functions bind looks up. A
// library that lacks some is closed.
func (l *Loaded) Load(path string, flags int, bind func() error) (err error) {
	if l.File, err = Stat(path); err != nil {
		return err
	}
	if l.Shared, err = LoadShared(path, flags); err != nil {
		return err
	}
	if err := bind(); err != nil {
		return errors.Join(err, l.Close())
	}
	return nil
}

// CString is the text that a library filled in, up to the first NUL, made fit to be shown.
func CString(b []byte) string {
	before, _, _ := bytes.Cut(b, []byte{0})
	return strings.ToValidUTF8(strings.TrimSpace(string(before)), "?")
}

// Shared is a shared library that is loaded. The zero value is none.
type Shared struct {
	handle uintptr
	// beside are the libraries that it needs and that were loaded for it.
	beside []uintptr
}

// maxBeside is how many libraries are loaded for one that needs them: more than
// any vendor has.
const maxBeside = 32

// LoadShared loads the library of that path or bare name with these flags of
// dlopen. Libraries that it needs and that the dynamic loader does not find are
// taken from its own folder: a vendor that keeps its libraries in one folder
// counts on the loader's path leading there, which it does not in a container
// that sees the host's files somewhere else.
func LoadShared(path string, flags int) (_ Shared, err error) {
	// dlerror's text belongs to the thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var s Shared
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	wanted := []string{path} // the last is loaded first, for the one before it
	for {
		last := wanted[len(wanted)-1]
		handle, err := purego.Dlopen(last, flags)
		if err != nil {
			need := missing(err)
			file := filepath.Join(filepath.Dir(path), need)
			info, statErr := os.Stat(file)
			if need == "" || !filepath.IsAbs(path) || statErr != nil || !info.Mode().IsRegular() ||
				slices.Contains(wanted, file) || len(s.beside) == maxBeside {
				return s, err
			}
			wanted = append(wanted, file)
			continue
		}
		if len(wanted) == 1 {
			s.handle = handle
			return s, nil
		}
		s.beside = append(s.beside, handle)
		wanted = wanted[:len(wanted)-1]
	}
}

// missing returns the bare name of the library that the dynamic loader did not
// find, "" when err is another one.
func missing(err error) string {
	name, _, ok := strings.Cut(err.Error(), ": cannot open shared object file")
	if !ok || strings.Contains(name, "/") {
		return ""
	}
	return name
}

// Symbols are functions of a library, and the Go functions that are to call
// them.
type Symbols []struct {
	Function any // a pointer to a variable of a function type
	Name     string
}

// Bind makes the variables call the library's functions. It returns the names
// of those that the library lacks, whose variables stay as they are.
func (s Shared) Bind(symbols Symbols) (missing []string) {
	for _, symbol := range symbols {
		address, err := purego.Dlsym(s.handle, symbol.Name)
		if err != nil {
			missing = append(missing, symbol.Name)
			continue
		}
		purego.RegisterFunc(symbol.Function, address)
	}
	return missing
}

// Close unloads the library and those that were loaded for it.
func (s Shared) Close() error {
	var errs []error
	if s.handle != 0 {
		errs = append(errs, purego.Dlclose(s.handle))
	}
	for _, handle := range slices.Backward(s.beside) {
		errs = append(errs, purego.Dlclose(handle))
	}
	return errors.Join(errs...)
}
