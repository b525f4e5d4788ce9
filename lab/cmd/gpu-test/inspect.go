package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// inspectPart is the part that asks NVML what the node daemon does not.
const inspectPart = "inspect-nvml"

// limitFunctions set and read the limit of a cgroup's memory on a GPU. Drivers have them
// from release firstWithLimits on.
var limitFunctions = []string{"nvmlDeviceSetMemoryLimits_v1", "nvmlDeviceGetMemoryLimits_v1"}

const firstWithLimits = 615

// inspection is what NVML reports.
type inspection struct {
	Driver, NVML string
	// Exported has the limitFunctions that the library has.
	Exported map[string]bool
	GPUs     []inspectedGPU
}

type inspectedGPU struct {
	Index int
	UUID  string
	// Persistence, MIG and Compute are modes, or why they are not known.
	Persistence, MIG, Compute mode
	// Memory is what nvmlDeviceGetMemoryInfo_v2 reports, in bytes.
	Memory memoryInfo
	Lists  []processList
}

// inMIGMode reports whether the GPU cannot be used as a whole.
func (gpu inspectedGPU) inMIGMode() bool { return strings.HasPrefix(gpu.MIG.Text, "on") }

// mode is a setting of a GPU in words.
type mode struct {
	Text  string
	Known bool
}

type memoryInfo struct {
	Total, Reserved, Used, Free uint64
	// Err is why nothing else is known, "" if it is.
	Err string
}

// processList is one of NVML's lists of processes.
type processList struct {
	Name string
	// Err is why there is no list, "" if there is one.
	Err       string
	Processes []process
}

type process struct {
	PID uint32
	// Bytes is the memory that it uses, if Known.
	Bytes uint64
	Known bool
}

// gpu returns the GPU with that UUID, the zero value if there is none.
func (in inspection) gpu(uuid string) inspectedGPU {
	for _, gpu := range in.GPUs {
		if gpu.UUID == uuid {
			return gpu
		}
	}
	return inspectedGPU{}
}

// inspect runs the part for the library that this process has loaded.
func inspect(ctx context.Context) (inspection, error) {
	library, err := loadedLibrary()
	if err != nil {
		return inspection{}, err
	}
	var out inspection
	if err := ask(ctx, &out, self, inspectPart, library); err != nil {
		return inspection{}, fmt.Errorf("ask NVML: %w", err)
	}
	return out, nil
}

func inspectCommand(args []string) error {
	if len(args) != 1 {
		return errors.New(inspectPart + " needs NVML's file")
	}
	out, err := inspectNVML(nvml.New(nvml.WithLibraryPath(args[0])))
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(out)
}

func inspectNVML(api nvml.Interface) (inspection, error) {
	if code := api.Init(); code != nvml.SUCCESS {
		return inspection{}, fmt.Errorf("initialise NVML: %w", code)
	}
	defer api.Shutdown() //nolint:errcheck // the process ends
	out := inspection{Exported: map[string]bool{}}
	for _, name := range limitFunctions {
		out.Exported[name] = api.Extensions().LookupSymbol(name) == nil
	}
	out.Driver, _ = api.SystemGetDriverVersion()
	out.NVML, _ = api.SystemGetNVMLVersion()
	count, code := api.DeviceGetCount()
	if code != nvml.SUCCESS {
		return out, fmt.Errorf("count the GPUs: %w", code)
	}
	for i := range count {
		device, code := api.DeviceGetHandleByIndex(i)
		if code != nvml.SUCCESS {
			continue // discovery has reported it
		}
		gpu := inspectGPU(device)
		gpu.Index = i
		out.GPUs = append(out.GPUs, gpu)
	}
	return out, nil
}

func inspectGPU(device nvml.Device) inspectedGPU {
	uuid, _ := device.GetUUID()
	persistence, persistenceCode := device.GetPersistenceMode()
	mig, pending, migCode := device.GetMigMode()
	compute, computeCode := device.GetComputeMode()
	gpu := inspectedGPU{
		UUID:        uuid,
		Persistence: modeOf(persistenceCode, onOff(int(persistence))),
		MIG:         modeOf(migCode, onOff(mig)),
		Compute:     modeOf(computeCode, computeMode(compute)),
	}
	if pending != mig {
		gpu.MIG.Text += ", " + onOff(pending) + " after a reset"
	}
	memory, code := device.GetMemoryInfo_v2()
	gpu.Memory = memoryInfo{Total: memory.Total, Reserved: memory.Reserved, Used: memory.Used, Free: memory.Free, Err: failure(code)}
	for _, list := range []struct {
		name string
		get  func() ([]nvml.ProcessInfo, nvml.Return)
	}{
		{"compute", device.GetComputeRunningProcesses},
		{"graphics", device.GetGraphicsRunningProcesses},
		{"MPS", device.GetMPSComputeRunningProcesses},
	} {
		infos, code := list.get()
		gpu.Lists = append(gpu.Lists, processList{Name: list.name, Err: failure(code), Processes: processesOf(infos)})
	}
	return gpu
}

func processesOf(infos []nvml.ProcessInfo) (out []process) {
	const notAvailable = ^uint64(0)
	for _, info := range infos {
		out = append(out, process{PID: info.Pid, Bytes: info.UsedGpuMemory, Known: info.UsedGpuMemory != notAvailable})
	}
	return out
}

// modeOf is a mode if code is that of a success. A mode that the GPU does not have is
// known as well.
func modeOf(code nvml.Return, text string) mode {
	if err := failure(code); err != "" {
		return mode{Text: err, Known: code == nvml.ERROR_NOT_SUPPORTED}
	}
	return mode{Text: text, Known: true}
}

// failure is a code in words, "" for success.
func failure(code nvml.Return) string {
	if code == nvml.SUCCESS {
		return ""
	}
	return strings.ToLower(strings.TrimSpace(nvml.ErrorString(code)))
}

func onOff(state int) string {
	if state == int(nvml.FEATURE_ENABLED) {
		return "on"
	}
	return "off"
}

func computeMode(m nvml.ComputeMode) string {
	switch m {
	case nvml.COMPUTEMODE_DEFAULT:
		return "default"
	case nvml.COMPUTEMODE_EXCLUSIVE_THREAD:
		return "exclusive thread"
	case nvml.COMPUTEMODE_EXCLUSIVE_PROCESS:
		return exclusiveProcess
	case nvml.COMPUTEMODE_PROHIBITED:
		return prohibited
	default:
		return fmt.Sprintf("unknown (%d)", m)
	}
}

// The compute modes in which a CUDA context may be impossible.
const (
	exclusiveProcess = "exclusive process"
	prohibited       = "prohibited"
)
