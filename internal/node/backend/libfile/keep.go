package libfile

import (
	"slices"
	"strings"
	"sync"

	"github.com/divvy-gpu/divvy/internal/node/backend"
)

// Kept keeps a vendor's libraries that were initialised in the process for as long
// as it lives, one for each installation. Such a library may have left threads
// behind, which run its code, so it is never unloaded; and another release of it
// beside those threads might get in their way. The zero value keeps none.
type Kept[L Library] struct {
	mu   sync.Mutex
	libs map[string]L
}

// Open is the function Open for an installation of which nothing is kept. Else it
// returns what is kept, and an error when that is not what is there now, a
// *backend.RestartNeededError if something else is.
func (k *Kept[L]) Open(p Places, old L, load func(path string) (L, error)) (L, error) {
	lib, ok := k.of(p)
	if !ok {
		return Open(p, old, load)
	}
	candidates, err := p.Candidates()
	if err != nil {
		return lib, err
	}
	files := slices.DeleteFunc(slices.Clone(candidates), func(c string) bool { return !strings.Contains(c, "/") || !exists(c) })
	bare := !strings.Contains(lib.LoadedFrom(), "/") && slices.Contains(candidates, lib.LoadedFrom())
	switch {
	case bare, len(files) > 0 && lib.Unchanged(files[0]):
		return lib, nil
	case len(files) == 0:
		return lib, p.NotFound() // the driver is not installed now; what comes next decides
	}
	return lib, &backend.RestartNeededError{Reason: lib.LoadedFrom() + ", which is loaded, was replaced or is no longer the driver's"}
}

// Keep keeps a library that was initialised.
func (k *Kept[L]) Keep(p Places, lib L) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.libs == nil {
		k.libs = map[string]L{}
	}
	k.libs[p.installation()] = lib
}

// Close unloads a library that is not kept.
func (k *Kept[L]) Close(p Places, lib L) error {
	if kept, ok := k.of(p); ok && kept == lib {
		return nil
	}
	return lib.Close()
}

func (k *Kept[L]) of(p Places) (L, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	lib, ok := k.libs[p.installation()]
	return lib, ok
}

// installation tells one installation of a vendor's driver from another.
func (p Places) installation() string { return p.Root + "\x00" + p.Path }

func exists(path string) bool {
	_, err := Stat(path)
	return err == nil
}
