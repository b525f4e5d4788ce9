package libfile

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/ebitengine/purego"
)

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

// Symbol returns the address of a function, and whether the library has it.
func (s Shared) Symbol(name string) (address uintptr, ok bool) {
	address, err := purego.Dlsym(s.handle, name)
	return address, err == nil
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
