package host

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/divvy-gpu/divvy/internal/install/schedconf"
)

// Status is how a node is, as its files say.
type Status struct {
	schedconf.State
	Manifest string
	// Backup is the original's file, "" when there is none.
	Backup string
	// Pending is true when a change began and is not known to be good.
	Pending bool
	// Failure is the last change that was rolled back, nil if none was since the
	// last that went well.
	Failure *Failure
}

// Status reads how the node is.
func (h *Host) Status() (Status, error) {
	s := Status{Manifest: h.files.paths.Manifest}
	m, err := h.files.readManifest()
	if err != nil {
		return s, err
	}
	if s.State, err = schedconf.Inspect(h.files.input(m.content)); err != nil {
		return s, err
	}
	j, err := h.files.loadJournal()
	if err != nil {
		return s, err
	}
	s.Pending, s.Failure = j.Pending != nil, j.Failure
	switch _, err := h.files.fs.Stat(h.files.paths.Backup); {
	case err == nil:
		s.Backup = h.files.paths.Backup
	case !errors.Is(err, fs.ErrNotExist):
		return s, fmt.Errorf("check for the backup: %w", err)
	}
	return s, nil
}

// Want is what Await is asked for by Install where nothing is to change.
func (h *Host) Want() (Want, error) {
	m, err := h.files.readManifest()
	if err != nil {
		return Want{}, err
	}
	return WantOf(m.content)
}
