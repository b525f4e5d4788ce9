package nvidia

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/dl"
	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/callqueue"
	"github.com/divvy-gpu/divvy/internal/node/backend/libfile"
	"github.com/divvy-gpu/divvy/internal/node/backend/libloader"
	"github.com/divvy-gpu/divvy/internal/node/backend/nvidia/memlimit"
	"github.com/divvy-gpu/divvy/internal/node/backend/nvidia/nvmltable"
)

// The functions of NVML without which there is no discovery, and those that
// some releases lack. Nothing else of NVML may be called: whether a library has a
// function is looked up once, when it is loaded.
var (
	requiredFunctions = []string{
		"nvmlInit_v2", "nvmlShutdown", "nvmlErrorString",
		"nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID",
		"nvmlDeviceGetName", "nvmlDeviceGetMinorNumber", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetPciInfo_v3",
	}
	optionalFunctions = []string{
		"nvmlSystemGetDriverVersion", "nvmlSystemGetCudaDriverVersion_v2",
		"nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetMigMode",
		"nvmlDeviceGetRemappedRows", "nvmlDeviceGetMemoryAffinity",
		"nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetNvLinkState", "nvmlDeviceGetNvLinkRemotePciInfo_v2",
		"nvmlEventSetCreate", "nvmlEventSetFree", "nvmlEventSetWait_v2",
		"nvmlDeviceGetSupportedEventTypes", "nvmlDeviceRegisterEvents",
		"nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetGpuInstanceId",
		"nvmlDeviceGetComputeInstanceId", "nvmlDeviceGetAttributes_v2", "nvmlDeviceGetGpuInstanceById", "nvmlGpuInstanceGetInfo",
		"nvmlGpuInstanceGetComputeInstanceById", "nvmlComputeInstanceGetInfo_v2", "nvmlDeviceGetGpuInstanceProfileInfo",
		"nvmlGpuInstanceGetComputeInstanceProfileInfo",
		"nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3",
		"nvmlDeviceGetMPSComputeRunningProcesses_v3", "nvmlDeviceGetProcessUtilization",
		"nvmlDeviceGetPersistenceMode", memlimit.SetFunction, memlimit.GetFunction,
	}
)

// library is NVML, loaded. Its functions run on the queues of a Backend only.
type library struct {
	libfile.File
	api    nvml.Interface
	has    map[string]bool // the functions that it has
	handle *dl.DynamicLibrary
	// users is how many backends use it; bound guards it.
	users int
}

// bound is the library of this process. The binding has room for one, so all backends
// of the process use the same.
var bound struct {
	sync.Mutex
	lib *library // nil for none
	// stuck is a library that the dynamic loader did not unload.
	stuck *libfile.File
}

// load returns NVML, loaded from one of the places. Another file than the one that is
// loaded takes its place, unless another backend uses that one. With an error it returns
// old, if that is still loaded. Its error is a *backend.RestartNeededError when only another
// process can load what is there now.
func load(p libfile.Places, old *library) (*library, error) {
	bound.Lock()
	defer bound.Unlock()
	if lib := bound.lib; lib != nil {
		candidates, err := p.Candidates()
		if err != nil {
			return old, err
		}
		switch {
		case slices.Contains(candidates, lib.Path) && (!strings.Contains(lib.Path, "/") || lib.Unchanged(lib.Path)):
			if old != lib {
				lib.users++
			}
			return lib, nil
		case !slices.ContainsFunc(candidates, func(c string) bool { return strings.Contains(c, "/") && isFile(c) }):
			// The driver is not installed now. What comes next decides.
			return old, p.NotFound()
		case old != lib || lib.users > 1:
			return old, replaced(lib.Path, "and another backend of this process uses it")
		}
		if err := lib.release(); err != nil {
			return nil, replaced(lib.Path, err.Error())
		}
	}
	lib, err := libfile.Open(p, nil, examine)
	if err != nil {
		return nil, err
	}
	if bound.stuck != nil && !bound.stuck.Unchanged(lib.Path) {
		return nil, errors.Join(replaced(bound.stuck.Path, "and cannot be unloaded"), lib.Close())
	}
	if err := nvmltable.Bind(lib.Path); err != nil {
		return nil, errors.Join(err, lib.Close())
	}
	lib.api = nvml.New(nvml.WithLibraryPath(lib.Path))
	lib.users = 1
	bound.lib, bound.stuck = lib, nil
	return lib, nil
}

func replaced(path, why string) error {
	return &backend.RestartNeededError{Reason: path + ", which is loaded, was replaced or is no longer the driver's, " + why}
}

func isFile(path string) bool {
	_, err := libfile.Stat(path)
	return err == nil
}

// unload lets go of the library for one backend, which shut it down. The last one takes
// it out of the process.
func unload(l *library) error {
	bound.Lock()
	defer bound.Unlock()
	if l.users > 1 {
		l.users--
		return nil
	}
	return l.release()
}

// release takes the library out of the process. Its error says that it stays. The
// caller has bound.
func (l *library) release() error {
	bound.lib, l.users = nil, 0
	nvmltable.Unbind()
	err := l.Close()
	if !nvmltable.Unload(l.Path) {
		bound.stuck = &l.File
		return errors.Join(fmt.Errorf("%s cannot be unloaded from this process", l.Path), err)
	}
	return nil
}

// examine loads the library at path, so that the binding does not call it yet:
// one that lacks functions must be able to go again. Its error names all that
// are missing.
func examine(path string) (*library, error) {
	file, err := libfile.Stat(path)
	if err != nil {
		return nil, err
	}
	l := &library{File: file, has: map[string]bool{}, handle: dl.New(path, dl.RTLD_LAZY|dl.RTLD_LOCAL)}
	if err := l.handle.Open(); err != nil {
		return nil, err
	}
	var missing []string
	for _, name := range requiredFunctions {
		if l.handle.Lookup(name) != nil {
			missing = append(missing, name)
		}
		l.has[name] = true
	}
	if len(missing) > 0 {
		return nil, errors.Join(fmt.Errorf("%s lacks %s", path, strings.Join(missing, ", ")), l.Close())
	}
	for _, name := range optionalFunctions {
		l.has[name] = l.handle.Lookup(name) == nil
	}
	return l, nil
}

// Close closes this package's own handle of the library.
func (l *library) Close() error { return l.handle.Close() }

func (l *library) init() nvml.Return { return l.api.Init() }

func (l *library) shutdown() nvml.Return { return l.api.Shutdown() }

// check turns a return code into an error, a *libloader.CodeError. It asks the
// library for words, so it runs on the queue of the call.
func (l *library) check(call string, code nvml.Return) error {
	if code == nvml.SUCCESS {
		return nil
	}
	text := strings.TrimSpace(l.api.ErrorString(code))
	return &libloader.CodeError{Call: call, Code: int32(code), Text: strings.ToValidUTF8(strings.ToLower(text), "?")}
}

// unsupported reports whether err says that something does not exist, in this
// release of the library or for this GPU.
func unsupported(err error) bool {
	return libloader.HasCode(err, nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND)
}

// query runs a call of one of the library's functions. A function that the
// library lacks is not supported.
func query[T any](ctx context.Context, b *Backend, lib *library, function string, call func() (T, nvml.Return)) (T, error) {
	return queryOn(ctx, b, b.loader.Calls, lib, function, noGPU, call)
}

// queryGPU is query for a function about one GPU.
func queryGPU[T any](ctx context.Context, b *Backend, lib *library, function string, index int, call func() (T, nvml.Return)) (T, error) {
	return queryOn(ctx, b, b.loader.Calls, lib, function, index, call)
}

// noGPU is the index for functions that are about no GPU.
const noGPU = callqueue.Library

// queryOn is queryGPU on that queue.
func queryOn[T any](ctx context.Context, b *Backend, on *callqueue.Queue, lib *library, function string, index int,
	call func() (T, nvml.Return)) (T, error) {
	name := function
	if index != noGPU {
		name = fmt.Sprintf("%s(%d)", function, index)
	}
	return libloader.Call(ctx, b.loader, on, lib, index, name, func() (T, error) {
		if !lib.has[function] {
			var none T
			return none, &libloader.CodeError{
				Call: name, Code: int32(nvml.ERROR_FUNCTION_NOT_FOUND), Text: lib.Path + " has no such function",
			}
		}
		value, code := call()
		return value, lib.check(name, code)
	})
}
