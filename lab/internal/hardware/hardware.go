// Package hardware puts simulated cards on the machine as a vendor's driver
// package would: the vendor's library under its real name, a character device
// for each card, and a topology file that says what there is and that may be
// changed at any time. It never touches hardware software that it did not put
// there.
package hardware

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/divvy-gpu/divvy/internal/vendorsim"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
)

// Simulated is a set of simulated Enflame cards.
type Simulated struct {
	// Library is the file of the vendor's library, Link the name by which
	// programs find it.
	Library, Link string
	// DeviceDir holds the cards' device nodes gcu0, gcu1, ...
	DeviceDir string
	// RecordPath remembers what was put on the machine.
	RecordPath string

	mknod func(path string) error
}

// Default is the place where Enflame's own packages install themselves.
var Default = &Simulated{
	Library:    "/usr/local/efsmi/efsmi-1.14.0/lib/libefml.so.1.0.0",
	Link:       "/usr/lib/libefml.so",
	DeviceDir:  "/dev",
	RecordPath: filepath.Join(layout.StateDir, "hardware.json"),
	mknod:      makeNullDevice,
}

// record holds everything that Remove takes away.
type record struct {
	Paths   []string `json:"paths"`
	Devices []string `json:"devices"`
}

// TopologyPath is the file that describes the cards; the library reads it again
// whenever it changes.
func (s *Simulated) TopologyPath() string {
	return filepath.Join(filepath.Dir(s.Library), vendorsim.TopologyName)
}

// Install puts the cards of a topology on the machine, in place of simulated
// ones that are there. It refuses to replace a real library or device.
func (s *Simulated) Install(ctx context.Context, topology string) error {
	data, err := os.ReadFile(topology)
	if err != nil {
		return fmt.Errorf("read the topology: %w", err)
	}
	if _, err := vendorsim.Parse(topology, data); err != nil {
		return fmt.Errorf("topology: %w", err)
	}
	if err := s.claim(s.Link); err != nil {
		return err
	}
	if err := s.claim(s.Library); err != nil {
		return err
	}
	if _, err := vendorsim.Build(ctx, filepath.Dir(s.Library)); err != nil {
		return fmt.Errorf("install the vendor's library: %w", err)
	}
	if err := s.SetTopology(data); err != nil {
		return err
	}
	temporary := s.Link + ".divvy-lab"
	if err := os.Remove(temporary); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("install the vendor's library: %w", err)
	}
	if err := errors.Join(os.Symlink(s.Library, temporary), os.Rename(temporary, s.Link)); err != nil {
		return fmt.Errorf("install the vendor's library: %w", err)
	}
	return nil
}

// SetTopology changes the cards while programs use them: device nodes first,
// then the topology file in one step.
func (s *Simulated) SetTopology(data []byte) error {
	if err := s.syncDevices(minors(string(data))); err != nil {
		return err
	}
	temporary := filepath.Join(filepath.Dir(s.Library), ".topology.tmp")
	if err := os.WriteFile(temporary, data, 0o644); err != nil {
		return fmt.Errorf("write the topology: %w", err)
	}
	if err := os.Rename(temporary, s.TopologyPath()); err != nil {
		return fmt.Errorf("write the topology: %w", err)
	}
	return nil
}

// Restore makes the device nodes again that Install made: they do not outlive
// a reboot, unlike the files.
func (s *Simulated) Restore() error {
	r, err := s.load()
	if err != nil {
		return err
	}
	for _, path := range r.Devices {
		if err := s.mknod(path); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("make the simulated card %s: %w", path, err)
		}
	}
	return nil
}

// Remove takes everything away that Install put on the machine.
func (s *Simulated) Remove() error {
	r, err := s.load()
	if err != nil {
		return err
	}
	var errs []error
	for _, device := range r.Devices {
		if err := os.Remove(device); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("remove a simulated card: %w", err))
		}
	}
	for _, p := range r.Paths {
		if err := os.RemoveAll(p); err != nil {
			errs = append(errs, fmt.Errorf("remove simulated hardware: %w", err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if err := os.Remove(s.RecordPath); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("forget simulated hardware: %w", err)
	}
	return nil
}

// Installed returns what is on the machine of simulated hardware, whether it
// is remembered or not.
func (s *Simulated) Installed() ([]string, error) {
	var found []string
	if target, err := os.Readlink(s.Link); err == nil && target == s.Library {
		found = append(found, s.Link)
	}
	if _, err := os.Stat(s.TopologyPath()); err == nil {
		found = append(found, s.TopologyPath())
	}
	devices, err := filepath.Glob(filepath.Join(s.DeviceDir, "gcu[0-9]*"))
	if err != nil {
		return nil, fmt.Errorf("look for simulated cards: %w", err)
	}
	for _, device := range devices {
		var stat unix.Stat_t
		if err := unix.Stat(device, &stat); err == nil && stat.Rdev == nullDevice {
			found = append(found, device)
		}
	}
	return found, nil
}

// claim notes the topmost folder that has to be made for a path, or the path
// itself, as something to remove later.
func (s *Simulated) claim(path string) error {
	r, err := s.load()
	if err != nil {
		return err
	}
	for _, known := range r.Paths {
		if path == known || strings.HasPrefix(path, known+"/") {
			return nil
		}
	}
	if _, err := os.Lstat(path); err == nil {
		return fmt.Errorf("%s exists and is not the lab's: this machine seems to have the vendor's real software, which the lab will not replace", path)
	}
	top := path
	for {
		parent := filepath.Dir(top)
		if _, err := os.Stat(parent); err == nil {
			break
		}
		top = parent
	}
	r.Paths = append(r.Paths, top)
	return s.save(r)
}

// syncDevices makes the device nodes of the minor numbers and removes those of
// others.
func (s *Simulated) syncDevices(wanted []int) error {
	r, err := s.load()
	if err != nil {
		return err
	}
	var paths []string
	for _, minor := range wanted {
		paths = append(paths, filepath.Join(s.DeviceDir, "gcu"+strconv.Itoa(minor)))
	}
	for _, path := range paths {
		if slices.Contains(r.Devices, path) {
			continue
		}
		if _, err := os.Lstat(path); err == nil {
			return fmt.Errorf("%s exists and is not the lab's: this machine seems to have a real card", path)
		}
		r.Devices = append(r.Devices, path)
	}
	if err := s.save(r); err != nil {
		return err
	}
	for _, path := range slices.Clone(r.Devices) {
		if slices.Contains(paths, path) {
			if err := s.mknod(path); err != nil && !errors.Is(err, fs.ErrExist) {
				return fmt.Errorf("make the simulated card %s: %w", path, err)
			}
			continue
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove a simulated card: %w", err)
		}
		r.Devices = slices.DeleteFunc(r.Devices, func(p string) bool { return p == path })
	}
	return s.save(r)
}

func (s *Simulated) load() (record, error) {
	var r record
	data, err := os.ReadFile(s.RecordPath)
	if errors.Is(err, fs.ErrNotExist) {
		return r, nil
	}
	if err != nil {
		return r, fmt.Errorf("read the record of simulated hardware: %w", err)
	}
	if err := json.Unmarshal(data, &r); err != nil {
		return r, fmt.Errorf("the record of simulated hardware %s is damaged: %w", s.RecordPath, err)
	}
	return r, nil
}

func (s *Simulated) save(r record) error {
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("encode the record of simulated hardware: %w", err)
	}
	temporary := s.RecordPath + ".tmp"
	if err := errors.Join(os.WriteFile(temporary, append(data, '\n'), 0o644), os.Rename(temporary, s.RecordPath)); err != nil {
		return fmt.Errorf("write the record of simulated hardware: %w", err)
	}
	return nil
}

// nullDevice is the number of /dev/null, major 1 and minor 3: a device that
// anybody may open.
const nullDevice = 1<<8 | 3

func makeNullDevice(path string) error {
	if err := unix.Mknod(path, unix.S_IFCHR|0o666, nullDevice); err != nil {
		return &fs.PathError{Op: "mknod", Path: path, Err: err}
	}
	return os.Chmod(path, 0o666) // past the umask
}

// minors returns the minor number of every card of a topology: its "minor", or
// else its index. Lines that mean nothing to it are the library's concern.
func minors(topology string) []int {
	var cards []int
	inCard := false
	for line := range strings.Lines(topology) {
		line, _, _ = strings.Cut(line, "#")
		line = strings.TrimSpace(line)
		if section, ok := strings.CutPrefix(line, "["); ok {
			kind, index, _ := strings.Cut(strings.TrimSuffix(section, "]"), " ")
			n, err := strconv.Atoi(strings.TrimSpace(index))
			if inCard = kind == "card" && err == nil && n >= 0; inCard {
				cards = append(cards, n)
			}
			continue
		}
		key, value, _ := strings.Cut(line, "=")
		if !inCard || strings.TrimSpace(key) != "minor" {
			continue
		}
		if n, err := strconv.Atoi(strings.TrimSpace(value)); err == nil && n >= 0 {
			cards[len(cards)-1] = n
		}
	}
	slices.Sort(cards)
	return slices.Compact(cards)
}
