// Package atomicfile replaces files so that a crash or a power failure leaves the
// old content or the new one, never a part of either.
package atomicfile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// Suffix is what Replace appends to the name of a file while it writes it. A
// crash leaves at most one such file, which the next Replace overwrites.
const Suffix = ".new"

// RemovedError is the error of Replace in a folder that exists as a mount only:
// it was removed where it was mounted from, so no file can be created in it
// until it is mounted again.
type RemovedError struct{ Dir string }

func (e *RemovedError) Error() string {
	return fmt.Sprintf("folder %s was removed from the host while it is mounted here", e.Dir)
}

// Replace writes data to a file beside path, syncs it, renames it to path and
// syncs the folder, which must exist. Without the last step a power failure may
// bring the old file back after Replace returned. It describes the file that it wrote,
// for Same. The text of an error is the same each time that the same thing fails.
func Replace(path string, data []byte, mode fs.FileMode) (info fs.FileInfo, err error) {
	dir, next := filepath.Dir(path), path+Suffix
	// O_NOFOLLOW: the name is known beforehand, and a link in its place must not
	// make this program write somewhere else.
	f, err := os.OpenFile(next, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|syscall.O_NOFOLLOW, mode)
	if errors.Is(err, fs.ErrNotExist) {
		if info, statErr := os.Stat(dir); statErr == nil && info.IsDir() {
			return nil, &RemovedError{Dir: dir}
		}
	}
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = f.Close() // a second time in some cases, which does no harm
			_ = os.Remove(next)
		}
	}()
	if _, err = f.Write(data); err != nil {
		return nil, err
	}
	if err = f.Sync(); err != nil {
		return nil, err
	}
	if info, err = f.Stat(); err != nil {
		return nil, err
	}
	if err = f.Close(); err != nil {
		return nil, err
	}
	if err = os.Rename(next, path); err != nil {
		return nil, err
	}
	return info, SyncDir(dir)
}

// Same reports whether a file that was described before is still the same, with
// the same content; before may be nil for one that was not there.
func Same(before, now fs.FileInfo) bool {
	return before != nil && os.SameFile(before, now) && before.Size() == now.Size() && before.ModTime().Equal(now.ModTime())
}

// SyncDir makes the names in a folder durable. File systems that have no such
// operation are no error.
func SyncDir(dir string) (err error) {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := f.Sync(); err != nil && !errors.Is(err, syscall.EINVAL) && !errors.Is(err, errors.ErrUnsupported) {
		return err
	}
	return nil
}
