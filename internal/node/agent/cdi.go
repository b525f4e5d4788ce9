package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"time"

	"tags.cncf.io/container-device-interface/pkg/parser"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/dra"
	"github.com/divvy-gpu/divvy/internal/platform/atomicfile"
)

// cdiWriter keeps the CDI specifications of the devices of all parts, one file
// per kind. Every part says which devices it is made of, again and again; a file
// is written when it does not describe them. It is safe for concurrent use.
//
// A device that a part is made of no more is described as long as another part
// wants it, or until all parts have spoken: kubelet starts a container again with
// the names that it got at first.
type cdiWriter struct {
	dir string
	// checkpoint is the file in which kubelet keeps what containers were given.
	checkpoint string
	// describers have the complete descriptions, by vendor, for vendors that have
	// any. The map is fixed once the agent is built.
	describers map[string]*describer
	// limits and mps have the CDI devices that bound what containers get.
	limits *limitDesk
	mps    *mpsDesk

	mu sync.Mutex // guards what follows
	// wanted are the devices of each part by kind and name, nil while the part has
	// not spoken.
	wanted map[*pool]cdiKinds
	// common is what a describer says of all devices of a kind.
	common map[string]cdispecs.ContainerEdits
	// files are those that were written or found, by kind.
	files map[string]cdiOnDisk
	// ensured are what the files were to have when that was looked at last, by kind.
	ensured map[string]cdiOnDisk
	// others are the files of other programs by path.
	others map[string]cdiOnDisk
	// former says of the kinds of earlier releases whether containers may have
	// names of them.
	former map[string]bool
	// known are the devices that parts have described.
	known map[accel.DeviceID]accel.Device
	// lasting are the names with amounts that stay whether or not a container has them, and given
	// is when a container was last given a name, as far as forget needs it.
	lasting map[*pool]cdiKinds
	given   map[backend.CDIDevice]time.Time
	// looked is when forget last looked.
	looked time.Time
	// tidied is true once files of kinds that are not used were removed.
	tidied bool
}

// newCDIWriter returns a writer of files in the folder of a configuration.
func newCDIWriter(c config.NodeConfig, o LimitOptions) *cdiWriter {
	return &cdiWriter{
		dir: c.CDIDir, checkpoint: filepath.Join(c.KubeletDir, "device-plugins", kubeletCheckpoint), describers: map[string]*describer{},
		limits: newLimitDesk(o, c), mps: newMPSDesk(c),
		known: map[accel.DeviceID]accel.Device{}, lasting: map[*pool]cdiKinds{}, given: map[backend.CDIDevice]time.Time{},
		wanted: map[*pool]cdiKinds{}, common: map[string]cdispecs.ContainerEdits{}, files: map[string]cdiOnDisk{},
		ensured: map[string]cdiOnDisk{}, former: map[string]bool{},
	}
}

// specifier returns what describes the devices of a part, nil for a part whose
// containers are not given CDI names, or names of specifications that others
// write. It returns why devices are not described.
func (w *cdiWriter) specifier(p *pool, vendor config.Vendor) func([]accel.Device) map[accel.DeviceID]error {
	if p.backend == nil || !p.inject.cdi() || vendor.CDIKind != "" {
		return nil
	}
	if s, ok := p.backend.(backend.Specifier); ok && w.describers[p.config.Vendor] == nil {
		w.describers[p.config.Vendor] = newDescriber(p.config.Vendor, s, p.withdrawn)
	}
	w.wanted[p] = nil
	return func(devices []accel.Device) map[accel.DeviceID]error { return w.specify(p, p.backend, devices) }
}

// describesFor makes complete descriptions of a vendor's devices available if it has any; changed is
// called when there are others.
func (w *cdiWriter) describesFor(vendor string, b backend.Backend, changed func()) {
	d := w.describers[vendor]
	if d == nil {
		s, ok := b.(backend.Specifier)
		if !ok {
			return
		}
		d = newDescriber(vendor, s, func() {})
		w.describers[vendor] = d
	}
	before := d.changed
	d.changed = func() {
		before()
		changed()
	}
}

// await waits until it is known what containers need of a vendor's devices that were
// found, or why that cannot be known, for a limited time. Without it each start of the
// daemon would begin with devices that are not described.
func (w *cdiWriter) await(ctx context.Context, vendor string) {
	if d := w.describers[vendor]; d != nil {
		d.await(ctx)
	}
}

// specify makes the files describe the devices of a part beside those of the
// others. It returns those that they do not describe, with the reason.
//
// Every device's name is defined with what a describer says, or else with its device
// nodes alone; the environment names all devices of a container together and travels
// in kubelet's answer.
func (w *cdiWriter) specify(p *pool, b backend.Backend, devices []accel.Device) map[accel.DeviceID]error {
	w.mu.Lock()
	defer w.mu.Unlock()
	failed := map[accel.DeviceID]error{}
	names := map[accel.DeviceID][]backend.CDIDevice{}
	mine := cdiKinds{}
	for _, d := range devices {
		edits, err := b.Edits(d.ID)
		if err != nil {
			continue // away since before this program started: no container gets it
		}
		for _, name := range edits.CDIDevices {
			device, err := w.describe(w.describers[p.config.Vendor], d.ID, name, edits.DeviceNodes)
			if err == nil {
				mine.put(name.Kind, device)
				names[d.ID] = append(names[d.ID], name)
				continue
			}
			failed[d.ID] = err
			// A container that has the device starts again as it did before.
			if before, ok := w.onDisk(name.Kind).devices[name.Name]; ok {
				mine.put(name.Kind, before)
			}
		}
		for _, name := range edits.FormerCDIDevices {
			if w.isHeld(name.Kind) {
				mine.put(name.Kind, cdiDevice(name.Name, edits.DeviceNodes))
			}
		}
	}
	for _, s := range w.sized() {
		w.specifySized(s, p, devices, mine)
	}
	w.wanted[p] = mine
	problems, elsewhere := map[string]error{}, map[string]map[string]string{}
	for kind := range mine {
		elsewhere[kind] = w.elsewhere(kind)
		if w.former[kind] && len(elsewhere[kind]) > 0 {
			// The names are resolved by the file of another program, and would not be
			// by either beside this one.
			w.withdraw(kind)
		} else if err := w.ensure(kind); err != nil {
			problems[kind] = fmt.Errorf("write the CDI specification of %s: %w", kind, err)
		}
	}
	for _, s := range w.sized() {
		for _, d := range devices {
			if err := problems[s.kind()]; err != nil && s.limited(p, d) {
				failed[d.ID] = err
			}
		}
	}
	for id, some := range names {
		for _, name := range some {
			if file, ok := elsewhere[name.Kind][name.Name]; ok {
				failed[id] = fmt.Errorf("CDI device %s is in %s as well, so container runtimes find neither; remove that file", name, file)
			}
			// What an earlier run wrote serves those that it describes.
			if err := problems[name.Kind]; err != nil && !w.describes(name, mine[name.Kind][name.Name]) {
				failed[id] = err
			}
		}
	}
	return failed
}

// describe returns how a device is to be described. The caller holds mu.
func (w *cdiWriter) describe(complete *describer, id accel.DeviceID, name backend.CDIDevice, nodes []backend.DeviceNode) (cdispecs.Device,
	error) {
	if err := parser.ValidateDeviceName(name.Name); err != nil {
		return cdispecs.Device{}, fmt.Errorf("describe device %s in CDI: %w", id, err)
	}
	if complete == nil {
		return cdiDevice(name.Name, nodes), nil
	}
	common, edits, err := complete.edits(id)
	if err != nil {
		return cdispecs.Device{}, err
	}
	w.common[name.Kind] = common
	return cdispecs.Device{Name: name.Name, ContainerEdits: edits}, nil
}

// describes reports whether the file on the disk has the device as it is to be, with
// what is common to all. The caller holds mu.
func (w *cdiWriter) describes(name backend.CDIDevice, device cdispecs.Device) bool {
	file := w.files[name.Kind]
	common, ok := w.common[name.Kind]
	return sameYAML(file.devices[name.Name], device) && (!ok || sameYAML(file.common, common))
}

// silent reports whether a part has not said yet which devices it is made of. The
// caller holds mu.
func (w *cdiWriter) silent() bool {
	for _, kinds := range w.wanted {
		if kinds == nil {
			return true
		}
	}
	return false
}

// onDisk returns what the file of a kind has now. The caller holds mu.
func (w *cdiWriter) onDisk(kind string) cdiOnDisk {
	path := w.path(kind)
	if info, err := os.Lstat(path); err != nil || !atomicfile.Same(w.files[kind].info, info) {
		w.files[kind] = readCDI(path)
	}
	return w.files[kind]
}

// path is the file of a kind.
func (w *cdiWriter) path(kind string) string { return filepath.Join(w.dir, cdiFile(kind)+".yaml") }

// ensure makes the file of a kind hold what the parts want. The caller holds mu.
func (w *cdiWriter) ensure(kind string) error {
	file := w.onDisk(kind)
	all := cdiDevices{}
	if w.silent() || w.isSized(kind) {
		maps.Copy(all, file.devices)
	}
	for _, kinds := range w.wanted {
		maps.Copy(all, kinds[kind])
	}
	common, ok := w.common[kind]
	if !ok {
		common = file.common
	}
	// Comparing is cheaper than writing a text of thousands of devices in each turn.
	if last := w.ensured[kind]; last.data != nil && bytes.Equal(last.data, file.data) && reflect.DeepEqual(last.common, common) &&
		reflect.DeepEqual(last.devices, all) {
		return nil
	}
	data, err := renderCDI(kind, common, all)
	if err != nil {
		return err
	}
	if !bytes.Equal(data, file.data) {
		// The mode is the one that kubelet gives the folder.
		if err := os.MkdirAll(w.dir, 0o755); err != nil {
			return err
		}
		if _, err := atomicfile.Replace(w.path(kind), data, 0o600); err != nil {
			return err
		}
		w.files[kind] = readCDI(w.path(kind))
	}
	w.ensured[kind] = cdiOnDisk{common: common, devices: all, data: data}
	return nil
}

// tidy removes the files of kinds that no part uses, once in the life of the agent. It is for
// when it is certain that no container holds anything.
func (w *cdiWriter) tidy() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.tidied || w.silent() {
		return nil
	}
	files, err := filepath.Glob(filepath.Join(w.dir, CDIPrefix+"*"))
	if err != nil {
		return fmt.Errorf("read the CDI folder %s: %w", w.dir, err)
	}
	for kind := range w.former {
		w.former[kind] = false
	}
	used := map[string]bool{}
	for _, kinds := range w.wanted {
		for kind := range kinds {
			if _, former := w.former[kind]; !former {
				used[cdiFile(kind)] = true
			}
		}
	}
	var failed []error
	for _, path := range files {
		name := filepath.Base(path)
		if used[strings.TrimSuffix(name, filepath.Ext(name))] || strings.HasPrefix(name, dra.SpecPrefix) {
			continue // those of claims have an owner of their own
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			failed = append(failed, fmt.Errorf("remove a CDI specification that is not used any more: %w", err))
		}
	}
	w.tidied = len(failed) == 0
	return errors.Join(failed...)
}
