// Package hardware puts simulated cards on the machine as the vendors' driver
// packages would: each vendor's library under its real name, a character device
// for each card, and one topology file that says what there is of all vendors
// and that may be changed at any time. It never touches hardware software that
// it did not put there.
package hardware

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// Simulated is a machine with simulated cards.
type Simulated struct {
	// topology is the file that describes the cards of all vendors.
	topology string
	// deviceDir holds the device nodes.
	deviceDir string
	// recordPath remembers what was put on the machine.
	recordPath string
	places     []place

	// root is the root of the machine, and driverFiles the folder where the kernel shows
	// what drivers say of their devices; it is hidden by a mount while cards are cut.
	root, driverFiles string

	mknod   func(path string) error
	isNode  func(path string) bool
	mount   func(path string) error
	unmount func(path string) error
}

// TopologyPath is the file that describes the cards; the libraries read it
// again whenever it changes.
func (s *Simulated) TopologyPath() string { return s.topology }

// Install puts the cards of a topology on the machine, in place of simulated
// ones that are there. It refuses to replace a real library or device.
func (s *Simulated) Install(ctx context.Context, path string) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("read the topology: %w", err)
	}
	topology, err := vendorsim.Parse(path, data)
	if err != nil {
		return fmt.Errorf("topology: %w", err)
	}
	if err := s.claimAll(topology); err != nil {
		return err
	}
	for _, p := range s.placesOf(topology) {
		// A library of an earlier checkout is replaced.
		if err := s.installLibrary(ctx, p, topology); err != nil {
			return err
		}
	}
	return s.setTopology(topology, data)
}

// SetTopology changes the cards while programs use them: libraries of vendors
// that are new, then device nodes, then the topology file in one step.
func (s *Simulated) SetTopology(ctx context.Context, data []byte) error {
	topology, err := vendorsim.Parse(vendorsim.TopologyName, data)
	if err != nil {
		return fmt.Errorf("topology: %w", err)
	}
	if err := s.claimAll(topology); err != nil {
		return err
	}
	for _, p := range s.placesOf(topology) {
		if _, err := os.Stat(p.library); err == nil {
			continue
		}
		if err := s.installLibrary(ctx, p, topology); err != nil {
			return err
		}
	}
	return s.setTopology(topology, data)
}

// placesOf returns the places of the vendors that a topology has cards of. The
// others keep what they have: a driver stays when the last card is unplugged.
func (s *Simulated) placesOf(topology vendorsim.Topology) []place {
	var found []place
	for _, p := range s.places {
		if slices.ContainsFunc(topology.Cards, func(c vendorsim.Card) bool { return c.Vendor == p.vendor }) {
			found = append(found, p)
		}
	}
	return found
}

// claimAll notes all that a topology puts on the machine before any of it is
// made, and refuses where something of that is not the lab's.
func (s *Simulated) claimAll(topology vendorsim.Topology) error {
	paths := []string{s.topology}
	r, err := s.load()
	if err != nil {
		return err
	}
	for _, p := range s.placesOf(topology) {
		for _, path := range p.real {
			if _, err := os.Lstat(path); err == nil && !r.hides(path) {
				return fmt.Errorf("%s exists: this machine seems to have the real driver of %s, beside which the lab puts no simulated one",
					path, p.vendor)
			}
		}
		for _, l := range p.links {
			paths = append(paths, l.path)
		}
		paths = append(paths, p.library, p.topology())
	}
	for _, node := range topology.CapabilityNodes() {
		paths = append(paths, filepath.Dir(s.capability(node)))
	}
	for _, path := range s.nodes(topology) {
		if _, err := os.Lstat(path); err == nil && !slices.Contains(r.Devices, path) {
			return fmt.Errorf("%s exists and is not the lab's: this machine seems to have a real card", path)
		}
	}
	for _, path := range paths {
		if err := s.claim(path); err != nil {
			return err
		}
	}
	return nil
}

func (s *Simulated) installLibrary(ctx context.Context, p place, topology vendorsim.Topology) error {
	lacks := vendorsim.Without(topology.LibraryOf(p.vendor).Lacks...)
	if _, err := vendorsim.Build(ctx, p.vendor, filepath.Dir(p.library), lacks); err != nil {
		return fmt.Errorf("install the library of %s: %w", p.vendor, err)
	}
	// A container sees the machine below some folder, where an absolute link
	// would lead out of it.
	target, err := filepath.Rel(filepath.Dir(p.library), s.topology)
	if err != nil {
		return fmt.Errorf("install the library of %s: %w", p.vendor, err)
	}
	for _, l := range append([]link{{p.topology(), target}}, p.links...) {
		if err := replaceLink(l); err != nil {
			return fmt.Errorf("install the library of %s: %w", p.vendor, err)
		}
	}
	return nil
}

// replaceLink makes a symbolic link in one step, in place of one that is there.
func replaceLink(l link) error {
	temporary := l.path + ".divvy-lab"
	if err := os.Remove(temporary); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Symlink(l.target, temporary); err != nil {
		return err
	}
	return os.Rename(temporary, l.path)
}

func (s *Simulated) setTopology(topology vendorsim.Topology, data []byte) error {
	if err := s.syncDevices(s.nodes(topology)); err != nil {
		return err
	}
	if err := s.syncDriverFiles(topology); err != nil {
		return err
	}
	temporary := s.topology + ".tmp"
	if err := os.WriteFile(temporary, data, 0o644); err != nil {
		return fmt.Errorf("write the topology: %w", err)
	}
	if err := os.Rename(temporary, s.topology); err != nil {
		return fmt.Errorf("write the topology: %w", err)
	}
	return nil
}

// syncDriverFiles writes what NVIDIA's driver says of MIG devices, once there are some.
func (s *Simulated) syncDriverFiles(topology vendorsim.Topology) error {
	r, err := s.load()
	if err != nil {
		return err
	}
	if len(r.Mounts) == 0 {
		if !slices.ContainsFunc(topology.Cards, func(c vendorsim.Card) bool { return c.MIG == vendorsim.MIGEnabled }) {
			return nil
		}
		r.Mounts = []string{s.driverFiles}
		if err := s.save(r); err != nil {
			return err
		}
		if err := s.mount(s.driverFiles); err != nil {
			return fmt.Errorf("show MIG devices in %s: %w", s.driverFiles, err)
		}
	}
	return topology.WriteCapabilities(s.root, s.makeNode)
}

// nodes returns the device nodes that a machine with these cards has.
func (s *Simulated) nodes(topology vendorsim.Topology) []string {
	var paths []string
	for _, p := range s.placesOf(topology) {
		for _, name := range p.control {
			paths = append(paths, filepath.Join(s.deviceDir, name))
		}
		for i, c := range topology.Cards {
			if c.Vendor != p.vendor {
				continue
			}
			paths = append(paths, p.node(s.deviceDir, topology.MinorOf(i)))
		}
	}
	for _, node := range topology.CapabilityNodes() {
		paths = append(paths, s.capability(node))
	}
	slices.Sort(paths)
	return slices.Compact(paths)
}

// capability returns the place of a device node of vendorsim's CapabilityNodes.
func (s *Simulated) capability(node string) string {
	return filepath.Join(s.deviceDir, strings.TrimPrefix(node, "/dev"))
}

// makeNode makes a device node, if there is none, and the folder that it is in.
func (s *Simulated) makeNode(path string) error {
	err := os.MkdirAll(filepath.Dir(path), 0o755)
	if err == nil {
		err = s.mknod(path)
	}
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make the simulated card %s: %w", path, err)
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
		if err := s.makeNode(path); err != nil {
			return err
		}
	}
	if len(r.Mounts) == 0 {
		return nil
	}
	data, err := os.ReadFile(s.topology)
	if err != nil {
		return fmt.Errorf("read the topology: %w", err)
	}
	topology, err := vendorsim.Parse(s.topology, data)
	if err != nil {
		return fmt.Errorf("topology: %w", err)
	}
	r.Mounts = nil
	if err := s.save(r); err != nil {
		return err
	}
	return s.syncDriverFiles(topology)
}

// Remove takes everything away that Install put on the machine.
func (s *Simulated) Remove() error {
	r, err := s.load()
	if err != nil {
		return err
	}
	var errs []error
	for _, path := range r.Mounts {
		if err := s.unmount(path); err != nil {
			errs = append(errs, fmt.Errorf("remove simulated hardware: %w", err))
		}
	}
	for _, device := range r.Devices {
		if err := os.Remove(device); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("remove a simulated card: %w", err))
		}
	}
	for _, p := range append(s.stateFiles(), r.Paths...) {
		if err := os.RemoveAll(p); err != nil {
			errs = append(errs, fmt.Errorf("remove simulated hardware: %w", err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if err := os.Remove(s.recordPath); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("forget simulated hardware: %w", err)
	}
	return nil
}

// stateFiles returns what programs have made of the state of the drivers.
func (s *Simulated) stateFiles() []string {
	topology, err := vendorsim.Read(s.topology)
	if err != nil {
		return nil // no library has worked with it
	}
	return topology.StateFiles(filepath.Dir(s.topology))
}

// Installed returns what is on the machine of simulated hardware, whether it
// is remembered or not.
func (s *Simulated) Installed() ([]string, error) {
	var found []string
	for _, p := range s.places {
		for _, l := range p.links {
			if target, err := os.Readlink(l.path); err == nil && target == l.target {
				found = append(found, l.path)
			}
		}
		// Nobody else puts a file of this name there.
		if _, err := os.Lstat(p.topology()); err == nil {
			found = append(found, p.topology())
		}
		candidates, err := filepath.Glob(filepath.Join(s.deviceDir, p.card+"[0-9]*"))
		if err != nil {
			return nil, fmt.Errorf("look for simulated cards: %w", err)
		}
		for _, name := range p.control {
			candidates = append(candidates, filepath.Join(s.deviceDir, name))
		}
		capabilities, err := filepath.Glob(filepath.Join(s.deviceDir, p.card+"-caps", "*"))
		if err != nil {
			return nil, fmt.Errorf("look for simulated capabilities: %w", err)
		}
		candidates = append(candidates, capabilities...)
		for _, path := range candidates {
			if s.isNode(path) {
				found = append(found, path)
			}
		}
	}
	if _, err := os.Lstat(s.topology); err == nil {
		found = append(found, s.topology)
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
		return fmt.Errorf("%s exists and is not the lab's: this machine seems to have the vendor's real software, which the lab will not "+
			"replace", path)
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

// syncDevices makes the device nodes that are wanted, which nobody else has, and
// removes others of the lab's.
func (s *Simulated) syncDevices(wanted []string) error {
	r, err := s.load()
	if err != nil {
		return err
	}
	for _, path := range wanted {
		if !slices.Contains(r.Devices, path) {
			r.Devices = append(r.Devices, path)
		}
	}
	if err := s.save(r); err != nil {
		return err
	}
	for _, path := range slices.Clone(r.Devices) {
		if slices.Contains(wanted, path) {
			if err := s.makeNode(path); err != nil {
				return err
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

// mountFiles hides a folder behind an empty one, unless that is done.
func mountFiles(path string) error {
	if isMounted(path) {
		return nil
	}
	return unix.Mount("divvy-lab", path, "tmpfs", 0, "mode=755")
}

func unmountFiles(path string) error {
	if !isMounted(path) {
		return nil // a reboot took it away
	}
	return unix.Unmount(path, 0)
}

func isMounted(path string) bool {
	var at, above unix.Stat_t
	return unix.Stat(path, &at) == nil && unix.Stat(filepath.Dir(path), &above) == nil && at.Dev != above.Dev
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

func isNullDevice(path string) bool {
	var stat unix.Stat_t
	return unix.Stat(path, &stat) == nil && stat.Rdev == nullDevice
}
