package host

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/divvy-gpu/divvy/internal/platform/atomicfile"
)

// FS is what this package does with files of the host. Its methods name the file
// in their errors, as those of package os do.
type FS interface {
	ReadFile(name string) ([]byte, error)
	// Stat follows links.
	Stat(name string) (Attributes, error)
	// Resolve returns the path of the file behind all links.
	Resolve(name string) (string, error)
	// Write makes the file, or empties it, writes and syncs it.
	Write(name string, data []byte, a Attributes) error
	Rename(from, to string) error
	// Mkdir makes a folder, and returns nil where there is one.
	Mkdir(name string) error
	// Remove removes a file or an empty folder. It returns nil where there is no such file.
	Remove(name string) error
	// Sync makes changed names in a folder durable.
	Sync(dir string) error
	// Lock takes an advisory lock on a folder, or returns ErrLocked at once. It
	// ends with unlock or the process.
	Lock(dir string, shared bool) (unlock func() error, err error)
}

// ErrLocked says that another process holds the lock.
var ErrLocked = errors.New("another schedconf is running on this node")

// Attributes of a file.
type Attributes struct {
	Mode     fs.FileMode // permission bits
	UID, GID int
}

// Disk is the FS of the machine.
type Disk struct {
	// hasty, in tests of many steps, leaves it to the machine when content and
	// names become durable.
	hasty bool
}

// ReadFile implements FS.
func (Disk) ReadFile(name string) ([]byte, error) { return os.ReadFile(name) }

// Stat implements FS.
func (Disk) Stat(name string) (Attributes, error) {
	info, err := os.Stat(name)
	if err != nil {
		return Attributes{}, err
	}
	if !info.Mode().IsRegular() {
		return Attributes{}, &fs.PathError{Op: "stat", Path: name, Err: errors.New("not a regular file")}
	}
	a := Attributes{Mode: info.Mode().Perm()}
	if sys, ok := info.Sys().(*syscall.Stat_t); ok {
		a.UID, a.GID = int(sys.Uid), int(sys.Gid)
	}
	return a, nil
}

// Resolve implements FS.
func (Disk) Resolve(name string) (string, error) { return filepath.EvalSymlinks(name) }

// Write implements FS.
func (d Disk) Write(name string, data []byte, a Attributes) (err error) {
	// O_NOFOLLOW: the names are ours, and one that is a link was put there to
	// make this program write somewhere else.
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if _, err := f.Write(data); err != nil {
		return err
	}
	if err := f.Chmod(a.Mode); err != nil {
		return err
	}
	// Where it is right already, no privilege is needed.
	if now, err := d.Stat(name); err != nil {
		return err
	} else if now.UID != a.UID || now.GID != a.GID {
		if err := f.Chown(a.UID, a.GID); err != nil {
			return fmt.Errorf("change owner to user %d and group %d: %w", a.UID, a.GID, err)
		}
	}
	if d.hasty {
		return nil
	}
	return f.Sync()
}

// Rename implements FS.
func (Disk) Rename(from, to string) error { return os.Rename(from, to) }

// Mkdir implements FS.
func (Disk) Mkdir(name string) error {
	if err := os.Mkdir(name, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// Remove implements FS.
func (Disk) Remove(name string) error {
	if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Sync implements FS.
func (d Disk) Sync(dir string) error {
	if d.hasty {
		return nil
	}
	return atomicfile.SyncDir(dir)
}

// Lock implements FS.
func (Disk) Lock(dir string, shared bool) (func() error, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	how := syscall.LOCK_EX
	if shared {
		how = syscall.LOCK_SH
	}
	if err := syscall.Flock(int(f.Fd()), how|syscall.LOCK_NB); err != nil {
		closed := f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, ErrLocked
		}
		return nil, errors.Join(&fs.PathError{Op: "lock", Path: dir, Err: err}, closed)
	}
	return f.Close, nil
}
