package runtimesetup

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	securejoin "github.com/cyphar/filepath-securejoin"
	"github.com/pelletier/go-toml/v2"
	"k8s.io/apimachinery/pkg/util/version"

	"github.com/divvy-gpu/divvy/internal/node/backend"
)

// Facts are what the host's files say.
type Facts struct {
	// Runtime is the container runtime, and Config the file of its configuration; both "" if none
	// is known.
	Runtime, Config string
	// NVIDIADefault is true if NVIDIA's runtime is the default one.
	NVIDIADefault bool
	// CDI is true if the runtime adds CDI devices to containers.
	CDI bool

	// Toolkit is the configuration file of NVIDIA's container toolkit, "" for none.
	Toolkit string
	// Mode is that of NVIDIA's runtime: "auto", "legacy", "cdi" and others; "" for the default.
	Mode string
	// EnvironmentUnprivileged is true if any container gets the GPUs that its environment names,
	// and VolumeMounts if it gets those that its mounts name.
	EnvironmentUnprivileged, VolumeMounts bool
	// Hook is the program that CDI specifications of the toolkit call, "" if it is not installed.
	Hook string

	// Unreadable are files that exist and cannot be read, with the reason.
	Unreadable []string
}

// Host is the host's file system as this process sees it: links are followed inside it.
type Host string

// path returns where a file of the host is seen.
func (h Host) path(name string) (string, error) { return securejoin.SecureJoin(string(h), name) }

func (h Host) exists(name string) bool {
	full, err := h.path(name)
	if err != nil {
		return false
	}
	_, err = os.Stat(full)
	return err == nil
}

// first returns the first of the files that exists, "" if none does.
func (h Host) first(names ...string) string {
	if i := slices.IndexFunc(names, h.exists); i >= 0 {
		return names[i]
	}
	return ""
}

// maxFile is more than a configuration file of a runtime has.
const maxFile = 4 << 20

func (h Host) read(name string) ([]byte, error) {
	full, err := h.path(name)
	if err != nil {
		return nil, err
	}
	info, err := os.Stat(full)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxFile {
		return nil, fmt.Errorf("%s is not a file of at most %d bytes", name, maxFile)
	}
	return os.ReadFile(full)
}

// glob returns the files that match, in the order of their names.
func (h Host) glob(pattern string) []string {
	folder, base := path.Split(pattern)
	full, err := h.path(folder)
	if err != nil {
		return nil
	}
	entries, _ := os.ReadDir(full) // a folder that is missing has no files
	var out []string
	for _, e := range entries {
		if ok, _ := path.Match(base, e.Name()); ok {
			out = append(out, path.Join(folder, e.Name()))
		}
	}
	return out
}

// Files and folders of the host.
var (
	containerdConfigs = []string{"/etc/containerd/config.toml", "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
		"/var/lib/rancher/rke2/agent/etc/containerd/config.toml"}
	crioSockets = []string{"/run/crio/crio.sock", "/var/run/crio/crio.sock"}
	// toolkitConfigs has the operator's toolkit first: it is the one that its runtime reads.
	toolkitConfigs = []string{"/usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml",
		"/etc/nvidia-container-runtime/config.toml"}
	// cdiFolders are where runtimes read CDI specifications; a later folder takes precedence.
	cdiFolders = []string{"/etc/cdi", "/var/run/cdi"}
)

// Read reads the host's files. hook is the program that hooks run where the configuration names
// one, else "". runtime is the container runtime as the node reports it, such as
// "containerd://2.1.4", or "" where that is not known.
func Read(h Host, hook, runtime string) Facts {
	var f Facts
	switch {
	case h.first(crioSockets...) != "":
		f.crio(h)
	case h.exists("/run/cri-dockerd.sock") || h.exists("/var/run/cri-dockerd.sock"):
		f.docker(h)
	default:
		f.containerd(h, runtime)
	}
	f.toolkit(h)
	if f.Hook = h.first(backend.CDIHookPlaces...); hook != "" {
		f.Hook = h.first(hook)
	}
	return f
}

// document is a TOML document.
type document map[string]any

// at returns the value below a path of keys, nil if there is none.
func (d document) at(keys ...string) any {
	var value any = map[string]any(d)
	for _, key := range keys {
		table, ok := value.(map[string]any)
		if !ok {
			return nil
		}
		value = table[key]
	}
	return value
}

func (d document) text(keys ...string) string {
	s, _ := d.at(keys...).(string)
	return s
}

// merge puts other over d, table by table.
func merge(d, other map[string]any) {
	for key, value := range other {
		mine, isTable := d[key].(map[string]any)
		theirs, also := value.(map[string]any)
		if isTable && also {
			merge(mine, theirs)
			continue
		}
		d[key] = value
	}
}

// parse reads a TOML file over what was read before. A file that does not exist is empty.
func (f *Facts) parse(h Host, name string, into document) (read document) {
	data, err := h.read(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	read = document{}
	if err == nil {
		err = toml.Unmarshal(data, &read)
	}
	if err != nil {
		f.Unreadable = append(f.Unreadable, fmt.Sprintf("%s: %v", name, err))
		return nil
	}
	merge(into, read)
	return read
}

// isNVIDIA reports whether a runtime, by its name and program, is NVIDIA's.
func isNVIDIA(name, program string) bool {
	if program != "" {
		return strings.HasPrefix(path.Base(program), "nvidia-container-runtime")
	}
	return name == "nvidia" || strings.HasPrefix(name, "nvidia-")
}

// isContainerd2 reports whether a container runtime, as a node reports it, is containerd 2 or later.
func isContainerd2(runtime string) bool {
	text, isContainerd := strings.CutPrefix(runtime, "containerd://")
	v, err := version.ParseGeneric(text)
	return isContainerd && err == nil && v.Major() >= 2
}

// withoutCRI reports whether a containerd with this configuration serves no kubelet, like that
// of Docker's packages, which may be beside the one of k3s.
func withoutCRI(d document) bool {
	off, _ := d.at("disabled_plugins").([]any)
	return slices.ContainsFunc(off, func(plugin any) bool {
		return plugin == "cri" || plugin == "io.containerd.grpc.v1.cri" || plugin == "io.containerd.cri.v1.runtime"
	})
}

// containerd reads the configuration of containerd with the files that it imports.
func (f *Facts) containerd(h Host, reported string) {
	var name string
	var all, root document
	for _, one := range containerdConfigs {
		if !h.exists(one) {
			continue
		}
		name, all = one, document{}
		if root = f.parse(h, name, all); !withoutCRI(root) {
			break
		}
	}
	if name == "" {
		return
	}
	f.Runtime, f.Config = "containerd", name
	imports, _ := root.at("imports").([]any)
	for _, pattern := range imports {
		text, _ := pattern.(string)
		if text == "" {
			continue
		}
		if !path.IsAbs(text) {
			text = path.Join(path.Dir(name), text)
		}
		for _, file := range h.glob(text) {
			f.parse(h, file, all)
		}
	}
	plugins := []string{"io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri", "cri"}
	// Version 3 is that of containerd 2, which reads older ones as well.
	format, _ := root.at("version").(int64)
	f.CDI = format >= 3 || isContainerd2(reported) // the default of containerd 2
	for _, plugin := range plugins {
		if on, ok := all.at("plugins", plugin, "enable_cdi").(bool); ok {
			f.CDI = on
			break
		}
	}
	for _, plugin := range plugins {
		if runtime := all.text("plugins", plugin, "containerd", "default_runtime_name"); runtime != "" {
			program := all.text("plugins", plugin, "containerd", "runtimes", runtime, "options", "BinaryName")
			f.NVIDIADefault = isNVIDIA(runtime, program)
			return
		}
	}
}

// crio reads the configuration of CRI-O, which knows CDI in all releases that are supported.
func (f *Facts) crio(h Host) {
	f.Runtime, f.Config, f.CDI = "cri-o", "/etc/crio/crio.conf", true
	all := document{}
	f.parse(h, f.Config, all)
	for _, file := range h.glob("/etc/crio/crio.conf.d/*") {
		f.parse(h, file, all)
	}
	runtime := all.text("crio", "runtime", "default_runtime")
	f.NVIDIADefault = isNVIDIA(runtime, all.text("crio", "runtime", "runtimes", runtime, "runtime_path"))
}

// docker reads the configuration of Docker, which cri-dockerd uses. cri-dockerd is not known to
// pass CDI devices on.
func (f *Facts) docker(h Host) {
	f.Runtime, f.Config = "docker", "/etc/docker/daemon.json"
	data, err := h.read(f.Config)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	var c struct {
		Default  string `json:"default-runtime"`
		Runtimes map[string]struct {
			Path string `json:"path"`
		} `json:"runtimes"`
	}
	if err == nil {
		err = json.Unmarshal(data, &c)
	}
	if err != nil {
		f.Unreadable = append(f.Unreadable, fmt.Sprintf("%s: %v", f.Config, err))
		return
	}
	f.NVIDIADefault = isNVIDIA(c.Default, c.Runtimes[c.Default].Path)
}

// toolkit reads the configuration of NVIDIA's container toolkit.
func (f *Facts) toolkit(h Host) {
	f.EnvironmentUnprivileged = true // the toolkit's default
	name := h.first(toolkitConfigs...)
	if name == "" {
		return
	}
	f.Toolkit = name
	c := document{}
	f.parse(h, name, c)
	if on, ok := c.at("accept-nvidia-visible-devices-envvar-when-unprivileged").(bool); ok {
		f.EnvironmentUnprivileged = on
	}
	f.VolumeMounts, _ = c.at("accept-nvidia-visible-devices-as-volume-mounts").(bool)
	f.Mode = c.text("nvidia-container-runtime", "mode")
}

// cdiFiles returns the CDI specifications of a folder, in the order of their names.
func cdiFiles(h Host, folder string) []string {
	return slices.DeleteFunc(h.glob(folder+"/*"), func(name string) bool {
		ext := filepath.Ext(name)
		return ext != ".json" && ext != ".yaml"
	})
}
