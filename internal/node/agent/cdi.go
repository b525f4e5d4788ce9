package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"

	"go.yaml.in/yaml/v3"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/platform/atomicfile"
)

// CDIPrefix begins the names of this program's specification files.
const CDIPrefix = "divvy-"

// cdiWriter keeps the CDI specifications of the devices of all parts, one file
// per kind. Every part says which devices it is made of, again and again; a file
// is written when it does not describe them. It is safe for concurrent use.
//
// A device that a part is made of no more is described as long as another part
// wants it, or until all parts have spoken: kubelet starts a container again with
// the names that it got at first.
type cdiWriter struct {
	dir string

	mu sync.Mutex // guards what follows
	// wanted are the devices of each part by kind and name, nil while the part has
	// not spoken.
	wanted map[*pool]map[string]cdiDevices
	// files are those that were written or found, by kind.
	files map[string]cdiOnDisk
	// tidied is true once files of kinds that are not used were removed.
	tidied bool
}

// cdiDevices are devices of a kind by name.
type cdiDevices map[string]cdispecs.Device

// cdiOnDisk is a file's content and its description, to notice when it is lost.
type cdiOnDisk struct {
	devices cdiDevices
	info    fs.FileInfo
}

func newCDIWriter(dir string) *cdiWriter {
	return &cdiWriter{dir: dir, wanted: map[*pool]map[string]cdiDevices{}, files: map[string]cdiOnDisk{}}
}

// specifier returns what describes the devices of a part, nil for a part whose
// containers are not given CDI names, or names of specifications that others
// write. It returns why devices are not described.
func (w *cdiWriter) specifier(p *pool, vendor config.Vendor) func([]accel.Device) map[accel.DeviceID]error {
	if p.backend == nil || !p.inject.cdi() || vendor.CDIKind != "" {
		return nil
	}
	w.wanted[p] = nil
	return func(devices []accel.Device) map[accel.DeviceID]error { return w.specify(p, p.backend, devices) }
}

// specify makes the files describe the devices of a part beside those of the
// others. It returns those that they do not describe, with the reason.
//
// Every device's name is defined with its device nodes alone; the environment
// names all devices of a container together and travels in kubelet's answer.
func (w *cdiWriter) specify(p *pool, b backend.Backend, devices []accel.Device) map[accel.DeviceID]error {
	w.mu.Lock()
	defer w.mu.Unlock()
	failed := map[accel.DeviceID]error{}
	names := map[accel.DeviceID][]backend.CDIDevice{}
	mine := map[string]cdiDevices{}
	for _, d := range devices {
		edits, err := b.Edits(d.ID)
		if err != nil {
			continue // away since before this program started: no container gets it
		}
		for _, name := range edits.CDIDevices {
			if err := parser.ValidateDeviceName(name.Name); err != nil {
				failed[d.ID] = fmt.Errorf("describe device %s in CDI: %w", d.ID, err)
				continue
			}
			if mine[name.Kind] == nil {
				mine[name.Kind] = cdiDevices{}
			}
			mine[name.Kind][name.Name] = cdiDevice(name.Name, edits.DeviceNodes)
			names[d.ID] = append(names[d.ID], name)
		}
	}
	w.wanted[p] = mine
	problems := map[string]error{}
	for kind := range mine {
		if err := w.ensure(kind); err != nil {
			problems[kind] = fmt.Errorf("write the CDI specification of %s: %w", kind, err)
		}
	}
	for id, some := range names {
		for _, name := range some {
			// What an earlier run wrote serves those that it describes.
			if err := problems[name.Kind]; err != nil &&
				!reflect.DeepEqual(w.files[name.Kind].devices[name.Name], mine[name.Kind][name.Name]) {
				failed[id] = err
			}
		}
	}
	return failed
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

// ensure makes the file of a kind hold what the parts want. The caller holds mu.
func (w *cdiWriter) ensure(kind string) error {
	path := filepath.Join(w.dir, cdiFile(kind)+".yaml")
	if info, err := os.Lstat(path); err != nil || !atomicfile.Same(w.files[kind].info, info) {
		w.files[kind] = readCDI(path)
	}
	all := cdiDevices{}
	if w.silent() {
		maps.Copy(all, w.files[kind].devices)
	}
	for _, kinds := range w.wanted {
		maps.Copy(all, kinds[kind])
	}
	if reflect.DeepEqual(all, w.files[kind].devices) {
		return nil
	}
	spec := cdispecs.Spec{Version: CDIVersion, Kind: kind}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		spec.Devices = append(spec.Devices, all[name])
	}
	data, err := yaml.Marshal(spec)
	if err != nil {
		return err
	}
	// The mode is the one that kubelet gives the folder.
	if err := os.MkdirAll(w.dir, 0o755); err != nil {
		return err
	}
	if _, err := atomicfile.Replace(path, append([]byte("---\n"), data...), 0o600); err != nil {
		return err
	}
	w.files[kind] = readCDI(path)
	return nil
}

// readCDI returns what a file of this program describes; nothing where there is
// none that can be read.
func readCDI(path string) cdiOnDisk {
	info, err := os.Lstat(path)
	if err != nil {
		return cdiOnDisk{}
	}
	spec, err := cdi.ReadSpec(path, 0)
	if err != nil || spec.Version != CDIVersion {
		return cdiOnDisk{}
	}
	devices := cdiDevices{}
	for _, d := range spec.Devices {
		devices[d.Name] = d
	}
	return cdiOnDisk{devices: devices, info: info}
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
	used := map[string]bool{}
	for _, kinds := range w.wanted {
		for kind := range kinds {
			used[cdiFile(kind)] = true
		}
	}
	var failed []error
	for _, path := range files {
		if name := filepath.Base(path); used[strings.TrimSuffix(name, filepath.Ext(name))] {
			continue
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			failed = append(failed, fmt.Errorf("remove a CDI specification that is not used any more: %w", err))
		}
	}
	w.tidied = len(failed) == 0
	return errors.Join(failed...)
}

// cdiFile is the name of a kind's file, without the extension.
func cdiFile(kind string) string { return CDIPrefix + strings.ReplaceAll(kind, "/", "-") }

// OwnCDISpec reports whether a file of that name and content is a specification
// that this program wrote: its name follows from its kind. One that a crash left
// half-written is none.
func OwnCDISpec(name string, content []byte) bool {
	name = strings.TrimSuffix(name, atomicfile.Suffix)
	spec, err := cdi.ParseSpec(content)
	return err == nil && strings.TrimSuffix(name, filepath.Ext(name)) == cdiFile(spec.Kind)
}

// CDIVersion is the oldest version of the specification that has all that is
// used, so that older runtimes read it.
const CDIVersion = "0.5.0"

func cdiDevice(name string, nodes []backend.DeviceNode) cdispecs.Device {
	d := cdispecs.Device{Name: name}
	for _, n := range nodes {
		d.ContainerEdits.DeviceNodes = append(d.ContainerEdits.DeviceNodes, &cdispecs.DeviceNode{
			Path: n.Path, HostPath: n.HostPath, Permissions: n.Permissions,
		})
	}
	return d
}
