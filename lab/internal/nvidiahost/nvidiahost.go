// Package nvidiahost makes of the lab's node one on which NVIDIA's driver and container
// toolkit are installed, as the GPU operator or an administrator leaves it. The toolkit's
// programs are NVIDIA's own, built from its Go module. Of the driver there are the
// stand-in for its management library, and a libcuda without a GPU behind it.
package nvidiahost

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/divvy-gpu/divvy/internal/testing/mpssim"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
	"github.com/divvy-gpu/divvy/lab/internal/build"
	"github.com/divvy-gpu/divvy/lab/internal/hardware"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
)

// Where the operator's driver and toolkit lie.
const (
	DriverRoot  = "/run/nvidia/driver"
	ToolkitDir  = "/usr/local/nvidia/toolkit"
	Validations = "/run/nvidia/validations"
)

// Where the packages of the toolkit put its programs and their configuration.
const (
	PackageDir       = "/usr/bin"
	PackageConfigDir = "/etc/nvidia-container-runtime"
)

// module is the Go module of the toolkit, whose version lab/go.mod says.
const module = "github.com/NVIDIA/nvidia-container-toolkit"

// Libraries is the folder of the driver's libraries below its root, and in a container.
var Libraries = filepath.Join("/usr/lib", hardware.Multiarch())

// InstallDriver puts a driver of that version below root, for the cards of a topology.
func InstallDriver(ctx context.Context, root, version string, topology []byte) error {
	cards, err := vendorsim.Parse(vendorsim.TopologyName, topology)
	if err != nil {
		return err
	}
	dir := filepath.Join(root, Libraries)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	management, err := vendorsim.Build(ctx, vendorsim.NVIDIA, dir, vendorsim.Without(cards.LibraryOf(vendorsim.NVIDIA).Lacks...))
	if err != nil {
		return err
	}
	versioned := filepath.Join(dir, "libnvidia-ml.so."+version)
	if err := os.Rename(management, versioned); err != nil {
		return err
	}
	if err := os.Symlink(filepath.Base(versioned), management); err != nil {
		return err
	}
	if err := SetTopology(root, topology); err != nil {
		return err
	}
	if err := makeDevices(root, cards); err != nil {
		return err
	}
	if err := InstallCUDA(ctx, dir, version); err != nil {
		return err
	}
	smi := filepath.Join(root, "usr/bin/nvidia-smi")
	if err := os.MkdirAll(filepath.Dir(smi), 0o755); err != nil {
		return err
	}
	return os.WriteFile(smi, []byte("#!/bin/sh\necho NVIDIA-SMI "+version+"\n"), 0o755)
}

// makeDevices makes the device nodes of a topology's GPUs, as the driver's container has
// them in its own /dev: devices that anybody may open.
func makeDevices(root string, topology vendorsim.Topology) error {
	dir := filepath.Join(root, "dev")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	names := []string{"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"}
	for i, card := range topology.Cards {
		if card.Vendor == vendorsim.NVIDIA {
			names = append(names, fmt.Sprint("nvidia", topology.MinorOf(i)))
		}
	}
	for _, name := range names {
		path := filepath.Join(dir, name)
		if err := unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))); err != nil { //nolint:gosec // a small number
			return fmt.Errorf("make %s: %w", path, err)
		}
	}
	return nil
}

// SetTopology changes the cards of a driver.
func SetTopology(root string, topology []byte) error {
	path := filepath.Join(root, Libraries, vendorsim.TopologyName)
	if err := os.WriteFile(path+".new", topology, 0o644); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// CUDA is the file of a driver's libcuda of that version in its folder.
func CUDA(dir, version string) string { return filepath.Join(dir, "libcuda.so."+version) }

// InstallCUDA puts a driver's libcuda into its folder of libraries.
func InstallCUDA(ctx context.Context, dir, version string) error {
	path := CUDA(dir, version)
	cmd := exec.CommandContext(ctx, "cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", path, "-x", "c", "-")
	cmd.Stdin = strings.NewReader("int cuInit(unsigned flags) { return flags; }")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("compile %s: %w: %s", path, err, out)
	}
	return nil
}

// MPSControl is where the stand-in for nvidia-cuda-mps-control is on the node.
const MPSControl = "/usr/local/bin/" + mpssim.Program

// InstallMPS builds the stand-in for nvidia-cuda-mps-control, which runs with any C library.
func InstallMPS(ctx context.Context, labDir string) error {
	return build.RunGo(ctx, labDir, []string{"CGO_ENABLED=0"}, func(string) {}, "build", "-o", MPSControl, "./cmd/mps-control")
}

// Toolkit is how a container toolkit is set up.
type Toolkit struct {
	// DriverRoot is the root of the driver that its runtime adds.
	DriverRoot string
	// Packages installs it as its packages do, not as the operator.
	Packages bool
	// VolumeMounts makes its runtime take GPUs from mounts, and from the environment
	// of privileged containers alone.
	VolumeMounts bool
}

// Programs are those of the toolkit that are installed.
var Programs = []string{"nvidia-cdi-hook", "nvidia-container-runtime", "nvidia-ctk"}

// places are the folders of the toolkit's programs and of their configuration.
func (o Toolkit) places() (programs, configs string) {
	if o.Packages {
		return PackageDir, PackageConfigDir
	}
	return ToolkitDir, filepath.Join(ToolkitDir, ".config/nvidia-container-runtime")
}

// InstallToolkit builds NVIDIA's programs and configures them. With the operator's toolkit,
// a script in place of each program says where the configuration is.
func InstallToolkit(ctx context.Context, labDir, binDir string, o Toolkit) error {
	programs, configs := o.places()
	if err := os.MkdirAll(programs, 0o755); err != nil {
		return err
	}
	for _, name := range Programs {
		path := filepath.Join(programs, name)
		binary := path
		if !o.Packages {
			binary += ".real"
		}
		if err := build.RunGo(ctx, labDir, []string{"CGO_ENABLED=1"}, nil,
			"build", "-buildvcs=false", "-o", binary, module+"/cmd/"+name); err != nil {
			return fmt.Errorf("build %s: %w", name, err)
		}
		if o.Packages {
			continue
		}
		script := fmt.Sprintf("#!/bin/sh\nXDG_CONFIG_HOME=%s PATH=%s:$PATH exec %s \"$@\"\n", filepath.Dir(configs), programs, binary)
		if err := os.WriteFile(path, []byte(script), 0o755); err != nil {
			return err
		}
	}
	return ConfigureToolkit(binDir, o)
}

// ConfigureToolkit writes the configuration of the toolkit's programs.
func ConfigureToolkit(binDir string, o Toolkit) error {
	programs, configs := o.places()
	if err := os.MkdirAll(configs, 0o755); err != nil {
		return err
	}
	config := fmt.Sprintf(`accept-nvidia-visible-devices-as-volume-mounts = %t
accept-nvidia-visible-devices-envvar-when-unprivileged = %t

[nvidia-container-cli]
root = %q

[nvidia-container-runtime]
mode = "auto"
runtimes = [%q]

[nvidia-ctk]
path = %q
`, o.VolumeMounts, !o.VolumeMounts, o.DriverRoot, filepath.Join(binDir, "runc"), filepath.Join(programs, "nvidia-ctk"))
	return os.WriteFile(filepath.Join(configs, "config.toml"), []byte(config), 0o644)
}

// Runtime is a change of containerd's configuration.
type Runtime struct {
	// NVIDIADefault makes NVIDIA's runtime in ToolkitDir the default one.
	NVIDIADefault bool
	// NRI serves NRI plugins.
	NRI bool
}

// Configure returns containerd's configuration with the changes that the operator's
// toolkit makes.
func (r Runtime) Configure(config string) (string, error) {
	replace := func(old, changed string) error {
		if strings.Count(config, old) != 1 {
			return fmt.Errorf("containerd's configuration does not have %q once", old)
		}
		config = strings.Replace(config, old, changed, 1)
		return nil
	}
	var errs []error
	if r.NVIDIADefault {
		errs = append(errs, replace(`default_runtime_name = "runc"`, `default_runtime_name = "nvidia"`))
		config += fmt.Sprintf(`
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia]
  runtime_type = "io.containerd.runc.v2"

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia.options]
  BinaryName = "%s/nvidia-container-runtime"
  Root = "%s/runc"
  SystemdCgroup = false
`, ToolkitDir, layout.RunDir)
	}
	if r.NRI {
		errs = append(errs, replace("[plugins.'io.containerd.nri.v1.nri']\n  disable = true",
			"[plugins.'io.containerd.nri.v1.nri']\n  disable = false\n  socket_path = \"/var/run/nri/nri.sock\""))
	}
	return config, errors.Join(errs...)
}
