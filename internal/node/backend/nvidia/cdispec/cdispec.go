// Package cdispec generates complete CDI specifications of NVIDIA's GPUs with
// NVIDIA's own library, nvcdi: the driver's libraries, firmware, programs and
// sockets, hooks, control devices, and the device nodes of each GPU and MIG device.
//
// nvcdi initialises NVML and shuts it down, loads a second library of the driver,
// and calls functions without looking them up, which ends the process where the
// driver lacks one. So Generate is for a process of its own, which
// package nvidia starts, bounds in time and mistrusts. Nothing else imports nvcdi.
package cdispec

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi/spec"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi/transform"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi/transform/root"
	"tags.cncf.io/container-device-interface/pkg/parser"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"
)

// Request says what to describe and where everything is. Paths are absolute. Those
// of the host are as the container runtime sees them, all others as this process
// does.
type Request struct {
	// Kind is the CDI vendor and class of the devices.
	Kind string `json:"kind"`
	// Devices are the UUIDs of GPUs and MIG devices. They become the names.
	Devices []string `json:"devices"`
	// Library is the file of NVML, or a bare name for the dynamic loader.
	Library string `json:"library"`
	// DriverRoot has the driver's files, and DevRoot the dev folder with the
	// device nodes.
	DriverRoot     string `json:"driverRoot"`
	HostDriverRoot string `json:"hostDriverRoot"`
	DevRoot        string `json:"devRoot"`
	HostDevRoot    string `json:"hostDevRoot"`
	// HookPath is nvidia-cdi-hook, or nvidia-ctk, on the host.
	HookPath string `json:"hookPath"`
	// DisabledHooks and FeatureFlags are nvcdi's words.
	DisabledHooks []string `json:"disabledHooks"`
	FeatureFlags  []string `json:"featureFlags"`
}

// Result is the outcome of Generate.
type Result struct {
	// Spec has paths of the host only.
	Spec *cdispecs.Spec `json:"spec"`
	// Failed are the devices that Spec does not describe, with the reason.
	Failed map[string]string `json:"failed"`
}

// Generate describes the devices of the request. A device that cannot be described
// does not affect the others. Warnings of the library go to log, a line each.
func Generate(r Request, log io.Writer) (Result, error) {
	library := nvml.New(nvml.WithLibraryPath(r.Library))
	if code := library.Init(); code != nvml.SUCCESS {
		return Result{}, fmt.Errorf("initialise %s: %w", r.Library, code)
	}
	// nvcdi initialises NVML for each device again, which costs nothing meanwhile.
	defer library.Shutdown() //nolint:errcheck // the process ends
	namer, err := nvcdi.NewDeviceNamer(nvcdi.DeviceNameStrategyUUID)
	if err != nil {
		return Result{}, err
	}
	vendor, class := parser.ParseQualifier(r.Kind)
	generator, err := nvcdi.New(
		nvcdi.WithLogger(logger{log}),
		nvcdi.WithMode(nvcdi.ModeNvml),
		nvcdi.WithNvmlLib(library),
		nvcdi.WithDriverRoot(r.DriverRoot),
		nvcdi.WithDevRoot(r.DevRoot),
		nvcdi.WithNVIDIACDIHookPath(r.HookPath),
		nvcdi.WithDeviceNamers(namer),
		nvcdi.WithVendor(vendor),
		nvcdi.WithClass(class),
		nvcdi.WithDisabledHooks(r.DisabledHooks...),
		nvcdi.WithFeatureFlags(r.FeatureFlags...),
	)
	if err != nil {
		return Result{}, err
	}
	common, err := generator.GetCommonEdits()
	if err != nil {
		return Result{}, err
	}
	out := Result{Failed: map[string]string{}}
	var devices []cdispecs.Device
	for _, id := range r.Devices {
		some, err := generator.GetDeviceSpecsByID(id)
		if err == nil && len(some) == 0 {
			err = errors.New("the library describes no such device")
		}
		if err != nil {
			out.Failed[id] = err.Error()
			continue
		}
		devices = append(devices, some...)
	}
	made, err := spec.New(spec.WithVendor(vendor), spec.WithClass(class), spec.WithDeviceSpecs(devices),
		spec.WithEdits(*common.ContainerEdits))
	if err != nil {
		return Result{}, err
	}
	out.Spec = made.Raw()
	return out, toHost(r).Transform(out.Spec)
}

// toHost puts the host's paths in the place of those that this process sees.
func toHost(r Request) transform.Transformer {
	return transform.Merge(
		root.NewDriverTransformer(
			root.WithDriverRoot(r.DriverRoot), root.WithTargetDriverRoot(r.HostDriverRoot),
			root.WithDevRoot(r.DevRoot), root.WithTargetDevRoot(r.HostDevRoot),
		),
		// The links that hooks create below /dev/dri/by-path have the device root in
		// front, and hooks that run in the container are none of the host's paths.
		root.New(root.WithRoot(filepath.Join(r.DevRoot, "dev")), root.WithTargetRoot("/dev"), root.WithRelativeTo("container")),
	)
}

// logger writes the library's warnings and errors.
type logger struct{ out io.Writer }

func (l logger) Debugf(string, ...any) {}
func (l logger) Infof(string, ...any)  {}
func (l logger) Tracef(string, ...any) {}

func (l logger) Warningf(format string, args ...any) { l.line(format, args...) }
func (l logger) Errorf(format string, args ...any)   { l.line(format, args...) }

func (l logger) line(format string, args ...any) {
	fmt.Fprintf(l.out, format+"\n", args...)
}
