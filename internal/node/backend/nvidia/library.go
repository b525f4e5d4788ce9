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
)

// places returns where NVML can be: where distributions and NVIDIA's driver
// container put it. The dynamic loader comes last, so that what was loaded is a
// file that can be looked at again.
func places(o backend.Options) libfile.Places {
	return libfile.Places{
		Names: []string{"libnvidia-ml.so.1"},
		Folders: []string{
			"/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu",
			"/lib64", "/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu",
		},
		LoaderLast: true,
		Root:       o.DriverRoot,
		Path:       o.LibraryPath,
	}
}

// The functions of NVML without which there is no discovery, and those that
// some releases lack. Nothing else of NVML may be called: the binding resolves
// a function when it is called first, and ends the process if that fails.
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
	}
)

// library is NVML, loaded. Its functions run on the queues of a Backend only.
type library struct {
	libfile.File
	api nvml.Interface
	has map[string]bool // the functions that it has
}

// bound is the library of this process. The binding calls C functions by names
// that the dynamic loader resolves once, so the first library that was loaded
// is the only one for as long as the process lives, whatever is loaded later.
var bound struct {
	sync.Mutex
	lib *library
}

// load returns NVML, loaded from one of the places; with an error it returns
// old. Its error is a *backend.RestartNeededError when what was loaded is no
// longer what is there.
func load(p libfile.Places, old *library) (*library, error) {
	bound.Lock()
	defer bound.Unlock()
	if bound.lib == nil {
		lib, err := libfile.Open(p, nil, examine)
		if err == nil {
			err = lib.bind()
		}
		if err != nil {
			return old, err
		}
		bound.lib = lib.library
		return bound.lib, nil
	}

	candidates, err := p.Candidates()
	if err != nil {
		return old, err
	}
	path := bound.lib.Path
	switch {
	case slices.Contains(candidates, path) && (!strings.Contains(path, "/") || bound.lib.Unchanged(path)):
		return bound.lib, nil
	case !slices.ContainsFunc(candidates, func(c string) bool { return strings.Contains(c, "/") && isFile(c) }):
		// The driver is not installed now. What comes next decides.
		return old, p.NotFound()
	}
	return old, &backend.RestartNeededError{Reason: path + ", which is loaded, was replaced or is no longer the driver's"}
}

func isFile(path string) bool {
	_, err := libfile.Stat(path)
	return err == nil
}

// candidate is a library that is loaded for this package alone, to look at it.
type candidate struct {
	*library
	handle *dl.DynamicLibrary
}

// examine loads the library at path, so that the binding does not see it yet:
// one that lacks functions must be able to go again. Its error names all that
// are missing.
func examine(path string) (*candidate, error) {
	file, err := libfile.Stat(path)
	if err != nil {
		return nil, err
	}
	c := &candidate{
		library: &library{File: file, has: map[string]bool{}},
		handle:  dl.New(path, dl.RTLD_LAZY|dl.RTLD_LOCAL),
	}
	if err := c.handle.Open(); err != nil {
		return nil, err
	}
	var missing []string
	for _, name := range requiredFunctions {
		if c.handle.Lookup(name) != nil {
			missing = append(missing, name)
		}
		c.has[name] = true
	}
	if len(missing) > 0 {
		return nil, errors.Join(fmt.Errorf("%s lacks %s", path, strings.Join(missing, ", ")), c.Close())
	}
	for _, name := range optionalFunctions {
		c.has[name] = c.handle.Lookup(name) == nil
	}
	return c, nil
}

// Close unloads a library that was not bound.
func (c *candidate) Close() error { return c.handle.Close() }

// bind makes the library the one that the binding calls, for good: the binding
// unloads it at nvmlShutdown, and would call into nothing when it is loaded to
// another address later.
func (c *candidate) bind() error {
	keep := dl.New(c.Path, dl.RTLD_LAZY|dl.RTLD_GLOBAL|dl.RTLD_NODELETE)
	if err := keep.Open(); err != nil {
		return errors.Join(err, c.Close())
	}
	c.api = nvml.New(nvml.WithLibraryPath(c.Path))
	return c.Close()
}

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
