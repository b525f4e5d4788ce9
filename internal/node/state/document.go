package state

import (
	"path/filepath"
	"time"
)

// Document keeps a value of the node in a file of the state folder, in the form of
// the state files of resources: versioned, with a checksum, replaced at once. It is
// not safe for concurrent use.
type Document[T any] struct{ stateFile }

// NewDocument returns the document of that file name below dir. The name must not be
// that of a resource's state.
func NewDocument[T any](dir, name string) *Document[T] {
	return &Document[T]{stateFile{path: filepath.Join(dir, name)}}
}

// Load returns the saved value, false when there is none. A damaged file is an error
// that wraps ErrDamaged.
func (d *Document[T]) Load() (value T, exists bool, err error) {
	exists, err = d.load(&value)
	if err != nil {
		var none T
		return none, false, err
	}
	return value, exists, nil
}

// Written returns when the file was written that was loaded or saved last; the zero time
// where there is none.
func (d *Document[T]) Written() time.Time {
	if d.info == nil {
		return time.Time{}
	}
	return d.info.ModTime()
}

// Save replaces the saved value at once: a crash leaves the old file or the new one.
func (d *Document[T]) Save(value T) error { return d.save(value) }
