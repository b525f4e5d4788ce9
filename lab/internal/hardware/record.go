package hardware

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
)

// record holds everything that Remove takes away.
type record struct {
	Paths   []string `json:"paths"`
	Devices []string `json:"devices"`
	Mounts  []string `json:"mounts,omitempty"`
}

// hides reports whether a mount of the lab's is over the path.
func (r record) hides(path string) bool {
	return slices.ContainsFunc(r.Mounts, func(m string) bool { return strings.HasPrefix(path, m+"/") })
}

func (s *Simulated) load() (record, error) {
	var r record
	data, err := os.ReadFile(s.recordPath)
	if errors.Is(err, fs.ErrNotExist) {
		return r, nil
	}
	if err != nil {
		return r, fmt.Errorf("read the record of simulated hardware: %w", err)
	}
	if err := json.Unmarshal(data, &r); err != nil {
		return r, fmt.Errorf("the record of simulated hardware %s is damaged: %w", s.recordPath, err)
	}
	return r, nil
}

func (s *Simulated) save(r record) error {
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("encode the record of simulated hardware: %w", err)
	}
	temporary := s.recordPath + ".tmp"
	if err := errors.Join(os.WriteFile(temporary, append(data, '\n'), 0o644), os.Rename(temporary, s.recordPath)); err != nil {
		return fmt.Errorf("write the record of simulated hardware: %w", err)
	}
	return nil
}
