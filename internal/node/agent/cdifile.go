package agent

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/dra"
	"github.com/divvy-gpu/divvy/internal/platform/atomicfile"
)

// CDIPrefix begins the names of this program's specification files.
const CDIPrefix = "divvy-"

// CDIVersion is the oldest version of the specification that a file has: older
// runtimes read it. A file that uses more has the oldest version that has that.
const CDIVersion = "0.5.0"

// kubeletCheckpoint is the file in kubelet's folder of device plugins in which it
// keeps the answers of device plugins for the containers that have devices.
const kubeletCheckpoint = "kubelet_internal_checkpoint"

// cdiDevices are devices of a kind by name.
type cdiDevices map[string]cdispecs.Device

// cdiKinds are devices by kind.
type cdiKinds map[string]cdiDevices

// put adds a device.
func (k cdiKinds) put(kind string, d cdispecs.Device) {
	if k[kind] == nil {
		k[kind] = cdiDevices{}
	}
	k[kind][d.Name] = d
}

// cdiOnDisk is a file's content and its description, to notice when it is lost.
type cdiOnDisk struct {
	kind    string
	common  cdispecs.ContainerEdits
	devices cdiDevices
	data    []byte
	info    fs.FileInfo
}

// readCDI returns what a file describes; nothing where there is none that can be
// read.
func readCDI(path string) cdiOnDisk {
	info, err := os.Lstat(path)
	if err != nil {
		return cdiOnDisk{}
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return cdiOnDisk{}
	}
	spec, err := cdi.ReadSpec(path, 0)
	if err != nil {
		return cdiOnDisk{}
	}
	devices := cdiDevices{}
	for _, d := range spec.Devices {
		devices[d.Name] = d
	}
	return cdiOnDisk{kind: spec.Kind, common: spec.ContainerEdits, devices: devices, data: data, info: info}
}

// renderCDI returns the content of a kind's file.
func renderCDI(kind string, common cdispecs.ContainerEdits, devices cdiDevices) ([]byte, error) {
	spec := cdispecs.Spec{Version: CDIVersion, Kind: kind, ContainerEdits: common}
	for _, name := range slices.Sorted(maps.Keys(devices)) {
		spec.Devices = append(spec.Devices, devices[name])
	}
	if cdispecs.ValidateVersion(&spec) != nil {
		needed, err := cdispecs.MinimumRequiredVersion(&spec)
		if err != nil {
			return nil, err
		}
		spec.Version = needed
	}
	data, err := yaml.Marshal(spec)
	return append([]byte("---\n"), data...), err
}

// sameYAML reports whether two parts of a specification are written in the same way.
// A value that was read from a file may have an empty list where another has none.
func sameYAML(a, b any) bool {
	x, err1 := yaml.Marshal(a)
	y, err2 := yaml.Marshal(b)
	return err1 == nil && err2 == nil && bytes.Equal(x, y)
}

// elsewhere returns the devices of a kind that files of other programs in the folder
// define, with the file. The caller holds mu.
func (w *cdiWriter) elsewhere(kind string) map[string]string {
	out := map[string]string{}
	entries, err := os.ReadDir(w.dir)
	if err != nil {
		return out // nothing is in conflict with files that cannot be read
	}
	seen := map[string]cdiOnDisk{}
	for _, e := range entries {
		path := filepath.Join(w.dir, e.Name())
		if ext := filepath.Ext(path); ext != ".json" && ext != ".yaml" || path == w.path(kind) {
			continue
		}
		file := w.others[path]
		if info, err := os.Lstat(path); err != nil || !atomicfile.Same(file.info, info) {
			file = readCDI(path)
		}
		seen[path] = file
		if file.kind != kind {
			continue
		}
		for name := range file.devices {
			out[name] = path
		}
	}
	w.others = seen
	return out
}

// isHeld reports whether containers may have names of a kind that an earlier release
// gave them: its file is still in the folder, which is lost with the node's memory, or
// kubelet would give them the names again. The caller holds mu.
func (w *cdiWriter) isHeld(kind string) bool {
	held, known := w.former[kind]
	if !known {
		held = w.onDisk(kind).kind == kind || checkpointed(w.checkpoint, kind)
		w.former[kind] = held
	}
	return held
}

// withdraw removes the file of a kind. The caller holds mu.
func (w *cdiWriter) withdraw(kind string) {
	_ = os.Remove(w.path(kind)) // where that fails, the next file cannot be written either, which is reported
	delete(w.files, kind)
}

// checkpointed reports whether kubelet's checkpoint has CDI names of a kind. A file
// that cannot be read, or is not of the known form, has none.
func checkpointed(path, kind string) bool {
	names, _ := checkpointedNames(path)
	for name := range names {
		if strings.HasPrefix(name, kind+"=") {
			return true
		}
	}
	return false
}

// checkpointedNames returns the CDI names "<kind>=<name>" that kubelet's checkpoint has, which it
// gives to containers that start again. With an error, they are those that could be read.
func checkpointedNames(path string) (map[string]bool, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var file struct {
		Data struct {
			// AllocResp is the plugin's answer.
			PodDeviceEntries []struct{ AllocResp []byte }
		}
	}
	if err := json.Unmarshal(data, &file); err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	names := map[string]bool{}
	var unread []error
	for _, e := range file.Data.PodDeviceEntries { // those of all device plugins
		var answer pluginapi.ContainerAllocateResponse
		if err := proto.Unmarshal(e.AllocResp, &answer); err != nil {
			unread = append(unread, fmt.Errorf("read an answer of a device plugin in %s: %w", path, err))
			continue
		}
		for _, d := range answer.GetCdiDevices() {
			names[d.GetName()] = true
		}
		_, annotated, err := cdi.ParseAnnotations(answer.GetAnnotations())
		if err != nil {
			unread = append(unread, fmt.Errorf("read an answer of a device plugin in %s: %w", path, err))
		}
		for _, name := range annotated {
			names[name] = true
		}
	}
	return names, errors.Join(unread...)
}

// cdiFile is the name of a kind's file, without the extension.
func cdiFile(kind string) string { return CDIPrefix + strings.ReplaceAll(kind, "/", "-") }

// OwnCDISpec reports whether a file of that name and content is a specification
// that this program wrote: its name follows from its kind, or it is a claim's. One that a crash left
// half-written is none.
func OwnCDISpec(name string, content []byte) bool {
	name = strings.TrimSuffix(name, atomicfile.Suffix)
	spec, err := cdi.ParseSpec(content)
	if err != nil || spec == nil {
		return false
	}
	vendor, _, claims := strings.Cut(spec.Kind, wire.Driver("")+"/")
	return strings.TrimSuffix(name, filepath.Ext(name)) == cdiFile(spec.Kind) ||
		claims && spec.Kind == dra.Kind(vendor) && strings.HasPrefix(name, dra.SpecPrefix+vendor+"-")
}

// cdiDevice describes a device by its device nodes alone.
func cdiDevice(name string, nodes []backend.DeviceNode) cdispecs.Device {
	d := cdispecs.Device{Name: name}
	for _, n := range nodes {
		d.ContainerEdits.DeviceNodes = append(d.ContainerEdits.DeviceNodes, &cdispecs.DeviceNode{
			Path: n.Path, HostPath: n.HostPath, Permissions: n.Permissions,
		})
	}
	return d
}
