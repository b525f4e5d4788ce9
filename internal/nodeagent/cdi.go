package nodeagent

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/pkg/cdi"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/backend"
)

// CDIPrefix begins the names of this program's specification files.
const CDIPrefix = "divvy-"

// cdiWriter keeps the CDI specifications of the devices, one file per kind. Only
// the agent's loop uses it.
type cdiWriter struct {
	dir string
	// written are the specifications on disk, by kind. The devices' ids would
	// not do to tell whether they changed: a device that was not found yet has
	// no specification, and a driver may number its files anew.
	written map[string]*cdiSpec
	// tidied is true once files of kinds that are not used were removed.
	tidied bool
}

func newCDIWriter(dir string) *cdiWriter { return &cdiWriter{dir: dir, written: map[string]*cdiSpec{}} }

// specify writes the specifications of the devices of all resources that are
// reached by CDI names, but for vendors whose specifications are somebody
// else's, and removes those of kinds that are not used any more. As long as
// containers hold something, the latter stay: kubelet starts a container anew
// with the names that it got at first.
func (a *Agent) specify() error {
	specs := map[string]*cdiSpec{}
	held := false
	for _, r := range a.offerings {
		for _, p := range r.parts {
			held = held || !p.idle()
		}
		inject, err := newInjector(&a.o.Config, r.vendor, r.name)
		if err != nil {
			return err
		}
		if b := a.o.Backends[r.vendor]; b != nil && inject.cdi() && a.o.Config.Vendors[r.vendor].CDIKind == "" {
			for _, p := range r.parts {
				describe(specs, b, p.chips())
			}
		}
	}
	return a.cdi.write(specs, !held)
}

// describe adds the devices to the specifications. Every device's name is
// defined with its device nodes alone; the environment names all devices of a
// container together and travels in kubelet's answer.
func describe(specs map[string]*cdiSpec, b backend.Backend, devices []accel.Device) {
	for _, d := range devices {
		edits, err := b.Edits(d.ID)
		if err != nil {
			continue // away since before this program started: nobody gets it
		}
		for _, name := range edits.CDIDevices {
			spec := specs[name.Kind]
			if spec == nil {
				spec = &cdiSpec{Version: CDIVersion, Kind: name.Kind}
				specs[name.Kind] = spec
			}
			if !slices.ContainsFunc(spec.Devices, func(known cdispecs.Device) bool { return known.Name == name.Name }) {
				spec.Devices = append(spec.Devices, cdiDevice(name.Name, edits.DeviceNodes))
			}
		}
	}
}

// write writes the specifications that changed. It removes the files of other
// kinds if tidy is true.
func (w *cdiWriter) write(specs map[string]*cdiSpec, tidy bool) error {
	for kind, spec := range specs {
		if reflect.DeepEqual(w.written[kind], spec) {
			continue
		}
		registry, err := cdi.NewCache(cdi.WithSpecDirs(w.dir), cdi.WithAutoRefresh(false))
		if err != nil {
			return fmt.Errorf("open the CDI folder %s: %w", w.dir, err)
		}
		if err := registry.WriteSpec(spec, cdiFile(kind)); err != nil {
			return fmt.Errorf("write the CDI specification of %s: %w", kind, err)
		}
		w.written[kind] = spec
	}
	if w.tidied || !tidy {
		return nil
	}
	files, err := filepath.Glob(filepath.Join(w.dir, CDIPrefix+"*"))
	if err != nil {
		return fmt.Errorf("read the CDI folder %s: %w", w.dir, err)
	}
	used := map[string]bool{}
	for kind := range specs {
		used[cdiFile(kind)] = true
	}
	for _, path := range files {
		if name := filepath.Base(path); used[strings.TrimSuffix(name, filepath.Ext(name))] {
			continue
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove a CDI specification that is not used any more: %w", err)
		}
	}
	w.tidied = true
	return nil
}

// cdiFile is the name of a kind's file, without the extension.
func cdiFile(kind string) string { return CDIPrefix + strings.ReplaceAll(kind, "/", "-") }

// OwnCDISpec reports whether a file of that name and content is a specification
// that this program wrote: its name follows from its kind.
func OwnCDISpec(name string, content []byte) bool {
	spec, err := cdi.ParseSpec(content)
	return err == nil && strings.TrimSuffix(name, filepath.Ext(name)) == cdiFile(spec.Kind)
}

type cdiSpec = cdispecs.Spec

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
