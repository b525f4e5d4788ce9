package iluvatar

import (
	"context"
	"fmt"
	"strings"

	"github.com/ebitengine/purego"

	"github.com/divvy-gpu/divvy/internal/node/backend/callqueue"
	"github.com/divvy-gpu/divvy/internal/node/backend/libfile"
	"github.com/divvy-gpu/divvy/internal/node/backend/libloader"
)

// Return codes of libixml, which are those of NVML.
const (
	codeSuccess          = 0
	codeUninitialised    = 1
	codeInvalidArgument  = 2
	codeNotSupported     = 3
	codeNoPermission     = 4
	codeNotFound         = 6
	codeInsufficientSize = 7
	codeDriverNotLoaded  = 9
	codeTimeout          = 10
	codeLibraryNotFound  = 12
	codeFunctionNotFound = 13
	codeLost             = 15
	codeResetRequired    = 16
	codeUnknown          = 999
)

// maxChips is more than a machine has slots for. A library that counts more
// is out of its mind.
const maxChips = 256

// Sizes of the texts that the library fills in, as its header names them.
const (
	versionSize = 80
	uuidSize    = 80
	nameSize    = 64
)

// text has room for any of them.
type text [128]byte

// pciInfo is what nvmlDeviceGetPciInfo_v3 fills: 68 bytes. Both texts are
// padded with NULs; the first fills its 16 bytes with them.
type pciInfo struct {
	BusIDLegacy             [16]byte
	Domain, Bus, Device     uint32
	PCIDevice, PCISubsystem uint32
	BusID                   [32]byte
}

// memoryInfo is what nvmlDeviceGetMemoryInfo fills: 24 bytes, all of them
// bytes of memory.
type memoryInfo struct {
	Total, Free, Used uint64
}

// memoryInfoV2 is what nvmlDeviceGetMemoryInfo_v2 fills: 40 bytes. Version must
// be memoryVersion2 before the call.
type memoryInfoV2 struct {
	Version                     uint32
	_                           uint32
	Total, Reserved, Free, Used uint64
}

// memoryVersion2 is the version of memoryInfoV2: NVML puts the size of a struct
// into the lower bits.
const memoryVersion2 = 40 | 2<<24

// process is one of those that nvmlDeviceGetComputeRunningProcesses lists: 16 bytes. The
// amount is in bytes, as the vendor's header says.
type process struct {
	PID uint32
	_   uint32
	// Used is of the chip's memory, all ones if that is not known.
	Used uint64
}

// anyProcess is one of those that ixmlDeviceGetComputeAllProcesses lists: 32 bytes.
type anyProcess struct {
	process
	GPUInstance, ComputeInstance uint32
	UsedProtected                uint64
}

// event is what nvmlEventSetWait_v2 fills: 32 bytes.
type event struct {
	Device                       uintptr
	Type, Data                   uint64
	GPUInstance, ComputeInstance uint32
}

func (t text) String() string { return libfile.CString(t[:]) }

// library is a loaded libixml. Its functions run on the queues of a loader only.
type library struct {
	libfile.Loaded

	init, shutdown func() int32
	count          func(*uint32) int32
	// The functions that a release may lack are nil in these: all but those of bind's first
	// list and either of memory and memoryV2.
	driverVersion func(_ *text, size uint32) int32
	cudaVersion   func(*int32) int32
	chip          chipFunctions
	board         boardFunctions
	events        eventFunctions
}

// chipFunctions describe a chip.
type chipFunctions struct {
	at       func(index uint32, chip *uintptr) int32
	uuid     func(chip uintptr, _ *text, size uint32) int32
	name     func(chip uintptr, _ *text, size uint32) int32
	minor    func(uintptr, *uint32) int32
	memory   func(uintptr, *memoryInfo) int32
	memoryV2 func(uintptr, *memoryInfoV2) int32
	pci      func(uintptr, *pciInfo) int32
	health   func(uintptr, *uint64) int32
	// Both are given in count how much room there is, and set it to how many there are.
	processes    func(_ uintptr, count *uint32, _ *process) int32
	allProcesses func(_ uintptr, count *uint32, _ *anyProcess) int32
}

// boardFunctions say which chips are near each other.
type boardFunctions struct {
	position func(uintptr, *uint32) int32
	id       func(uintptr, *uint32) int32
	multi    func(uintptr, *uint32) int32
	same     func(a, b uintptr, same *int32) int32
	ancestor func(a, b uintptr, level *int32) int32
}

// eventFunctions wait for events of chips in a set.
type eventFunctions struct {
	newSet  func(set *uintptr) int32
	freeSet func(set uintptr) int32
	types   func(chip uintptr, types *uint64) int32
	listen  func(chip uintptr, types uint64, set uintptr) int32
	wait    func(set uintptr, _ *event, milliseconds uint32) int32
}

// load loads the file at path, or the library of that bare name.
func load(path string) (*library, error) {
	l := &library{}
	if err := l.Load(path, openFlags, l.bind); err != nil {
		return nil, err
	}
	return l, nil
}

// openFlags load the library so that neither it nor NVIDIA's, which exports most
// of the same names and may be in this process too, gets in the other's way.
// RTLD_LOCAL keeps its names from answering NVIDIA's binding, which looks its
// functions up in the whole process. RTLD_DEEPBIND keeps calls that the library
// makes of its own exported functions from landing in NVIDIA's library when that
// was loaded first and for the whole process.
const (
	openFlags = purego.RTLD_LAZY | purego.RTLD_LOCAL | deepBind
	deepBind  = 0x8 // RTLD_DEEPBIND of <dlfcn.h>
)

// bind looks up all functions. Its error names all that are missing of those
// that must be there.
func (l *library) bind() error {
	missing := l.Bind(libfile.Symbols{
		{&l.init, "nvmlInit_v2"},
		{&l.shutdown, "nvmlShutdown"},
		{&l.count, "nvmlDeviceGetCount_v2"},
		{&l.chip.at, "nvmlDeviceGetHandleByIndex_v2"},
		{&l.chip.uuid, "nvmlDeviceGetUUID"},
		{&l.chip.minor, "nvmlDeviceGetMinorNumber"},
	})
	noMemory := l.Bind(libfile.Symbols{{&l.chip.memory, "nvmlDeviceGetMemoryInfo"}})
	if l.Bind(libfile.Symbols{{&l.chip.memoryV2, "nvmlDeviceGetMemoryInfo_v2"}}) != nil {
		missing = append(missing, noMemory...)
	}
	if len(missing) > 0 {
		return fmt.Errorf("%s lacks %s", l.Path, strings.Join(missing, ", "))
	}
	l.Bind(libfile.Symbols{
		{&l.driverVersion, "nvmlSystemGetDriverVersion"},
		{&l.cudaVersion, "nvmlSystemGetCudaDriverVersion"},
		{&l.cudaVersion, "nvmlSystemGetCudaDriverVersion_v2"}, // the better one wins
		{&l.chip.name, "nvmlDeviceGetName"},
		{&l.chip.pci, "nvmlDeviceGetPciInfo_v3"},
		{&l.chip.health, "ixmlDeviceGetHealth"},
		{&l.chip.processes, "nvmlDeviceGetComputeRunningProcesses"},
		{&l.chip.allProcesses, "ixmlDeviceGetComputeAllProcesses"},
		{&l.board.position, "ixmlDeviceGetBoardPosition"},
		{&l.board.id, "nvmlDeviceGetBoardId"},
		{&l.board.multi, "nvmlDeviceGetMultiGpuBoard"},
		{&l.board.same, "nvmlDeviceOnSameBoard"},
		{&l.board.ancestor, "nvmlDeviceGetTopologyCommonAncestor"},
		{&l.events.newSet, "nvmlEventSetCreate"},
		{&l.events.freeSet, "nvmlEventSetFree"},
		{&l.events.types, "nvmlDeviceGetSupportedEventTypes"},
		{&l.events.listen, "nvmlDeviceRegisterEvents"},
		{&l.events.wait, "nvmlEventSetWait_v2"},
	})
	return nil
}

// check turns a return code into an error, a *libloader.CodeError.
func check(call string, code int32) error {
	if code == codeSuccess {
		return nil
	}
	return &libloader.CodeError{Call: call, Code: code, Text: codeText(code)}
}

func codeText(code int32) string {
	switch code {
	case codeUninitialised:
		return "the library is not initialised"
	case codeInvalidArgument:
		return "invalid argument"
	case codeNotSupported:
		return "not supported"
	case codeNoPermission:
		return "no permission"
	case codeNotFound:
		return "not found"
	case codeInsufficientSize:
		return "insufficient size"
	case codeDriverNotLoaded:
		return "driver not loaded"
	case codeTimeout:
		return "timeout"
	case codeLibraryNotFound:
		return "library not found"
	case codeFunctionNotFound:
		return "the library lacks this function"
	case codeLost:
		return "the GPU is lost"
	case codeResetRequired:
		return "the GPU must be reset"
	case codeUnknown:
		return "unknown error"
	}
	return "unknown code"
}

// unsupported reports whether err says that the library, the driver or the
// chip has no such thing, be it that the function is missing altogether.
func unsupported(err error) bool {
	return libloader.HasCode(err, codeNotSupported, codeFunctionNotFound)
}

// query runs a function that fills a T, and returns the T. has is false when the
// library lacks the function; f is not called then.
func query[T any](ctx context.Context, b *Backend, lib *library, name string, has bool, f func(*T) int32) (T, error) {
	return queryOn(ctx, b, b.loader.Calls, lib, callqueue.Library, name, has, f)
}

// queryOn is query on that queue, about the chip of that index or callqueue.Library.
func queryOn[T any](ctx context.Context, b *Backend, on *callqueue.Queue, lib *library, about int, name string, has bool,
	f func(*T) int32) (T, error) {
	var out T
	if !has {
		return out, check(name, codeFunctionNotFound)
	}
	return libloader.Call(ctx, b.loader, on, lib, about, name, func() (T, error) {
		var out T
		err := check(name, f(&out))
		return out, err
	})
}

// queryChip is query for a function about one chip.
func queryChip[T any](ctx context.Context, b *Backend, lib *library, name string, c handle, f func(uintptr, *T) int32) (T, error) {
	return queryChipOn(ctx, b, b.loader.Calls, lib, name, c, f)
}

// queryChipOn is queryChip on that queue.
func queryChipOn[T any](ctx context.Context, b *Backend, on *callqueue.Queue, lib *library, name string, c handle,
	f func(uintptr, *T) int32) (T, error) {
	return queryOn(ctx, b, on, lib, c.index, fmt.Sprintf("%s(%d)", name, c.index), f != nil, func(out *T) int32 {
		if c.stale(b) {
			return codeUninitialised
		}
		return f(c.value, out)
	})
}

// queryText is queryChip for a function that fills a text of that size.
func queryText(ctx context.Context, b *Backend, lib *library, name string, c handle, size uint32,
	f func(uintptr, *text, uint32) int32) (string, error) {
	t, err := queryOn(ctx, b, b.loader.Calls, lib, c.index, fmt.Sprintf("%s(%d)", name, c.index), f != nil, func(out *text) int32 {
		if c.stale(b) {
			return codeUninitialised
		}
		return f(c.value, out, size)
	})
	return t.String(), err
}

// queryPair is queryChip for a function about two chips; it is the first that it is
// about.
func queryPair[T any](ctx context.Context, b *Backend, lib *library, name string, one, two handle, f func(_, _ uintptr, _ *T) int32) (T,
	error) {
	return queryOn(ctx, b, b.loader.Calls, lib, one.index, fmt.Sprintf("%s(%d, %d)", name, one.index, two.index), f != nil,
		func(out *T) int32 {
			return f(one.value, two.value, out)
		})
}

// eitherWay asks about a pair in one direction and, if that fails, in the
// other: the answer is the same, and a driver may know one direction alone. Its
// error is that of the first, unless libloader.IsFatal.
func eitherWay[T any](ctx context.Context, b *Backend, lib *library, name string, one, two handle, f func(_, _ uintptr, _ *T) int32) (T,
	error) {
	v, err := queryPair(ctx, b, lib, name, one, two, f)
	if err == nil || libloader.IsFatal(err) || libloader.HasCode(err, codeFunctionNotFound) {
		return v, err
	}
	v, other := queryPair(ctx, b, lib, name, two, one, f)
	switch {
	case other == nil:
		return v, nil
	case libloader.IsFatal(other):
		return v, other
	}
	return v, err
}

// handle is a chip as the library numbers and knows it, until it is shut down.
type handle struct {
	index int
	value uintptr
	// session is that of the loader if the library may be shut down meanwhile; 0 for a
	// discovery, during which it is not.
	session uint64
}

// stale reports whether the library was initialised again since it returned the handle. It
// is for a queue of the loader.
func (c handle) stale(b *Backend) bool { return c.session != 0 && c.session != b.loader.Session() }

// oneLine is the text of errors that were joined, on one line.
func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }
