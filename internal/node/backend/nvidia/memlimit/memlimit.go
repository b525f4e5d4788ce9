// Package memlimit reaches the limits that NVIDIA's driver keeps of the device memory of a
// control group, through NVML. It is for a program that does nothing else and must start
// fast on any host: it loads the library without C and without the binding that the daemon
// uses. What both make of the library's answers is in Outcome.
package memlimit

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"

	"github.com/ebitengine/purego"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/libfile"
	"github.com/divvy-gpu/divvy/internal/node/backend/libloader"
)

// The functions of NVML that set and read a limit, which releases before Release lack.
const (
	SetFunction = "nvmlDeviceSetMemoryLimits_v1"
	GetFunction = "nvmlDeviceGetMemoryLimits_v1"
)

// Release is the first release of the driver that has limits.
const Release = "615"

// Unlimited is the hard limit that clears a limit.
const Unlimited = ^uint64(0)

// Return codes of NVML.
const (
	codeSuccess          = 0
	codeNoPermission     = 4
	codeNotSupported     = 3
	codeNotFound         = 6
	codeFunctionNotFound = 13
	codeOperatingSystem  = 17
)

// Places returns where NVML can be: where distributions and NVIDIA's driver
// container put it. The dynamic loader comes last, so that what was loaded is a
// file that can be looked at again.
func Places(o backend.Options) libfile.Places {
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

// Missing returns the error for a library that lacks functions; driver is the version of
// the driver, "" if it is not known.
func Missing(driver string, functions ...string) error {
	return fmt.Errorf("driver %s has no memory limits: its library lacks %s, which driver %s and later have: %w",
		cmp.Or(driver, "of unknown version"), strings.Join(functions, " and "), Release, errors.ErrUnsupported)
}

// Outcome turns the error of a call of SetFunction or GetFunction, a *libloader.CodeError,
// into one that backend.Limiter documents. The library has one code for a group without a
// limit and for a driver that has no place for limits: which one it is shows only a limit
// that was set and is read back.
func Outcome(err error) error {
	var code *libloader.CodeError
	if !errors.As(err, &code) {
		return err
	}
	get := strings.HasPrefix(code.Call, GetFunction)
	switch code.Code {
	case codeNotSupported:
		if get {
			return fmt.Errorf("%w: %w", backend.ErrNoLimit, err)
		}
		return fmt.Errorf("the driver keeps no limit here; it needs control groups v2 with the dmem or the misc controller, "+
			"and no MIG: %w", err)
	case codeNotFound:
		if get {
			return fmt.Errorf("%w: %w", backend.ErrNoLimit, err)
		}
		return fmt.Errorf("%w: %w", backend.ErrNoController, err)
	case codeFunctionNotFound:
		return fmt.Errorf("%w: %w", errors.ErrUnsupported, err)
	case codeNoPermission:
		return fmt.Errorf("only root may set limits: %w", err)
	case codeOperatingSystem:
		return fmt.Errorf("the driver cannot open the control group: %w", err)
	}
	return err
}

// setLimits and getLimits are what the two functions take: 24 and 32 bytes.
type setLimits struct {
	Group      *byte
	Soft, Hard uint64
}

type getLimits struct {
	Group            *byte
	Soft, Hard, Used uint64
}

// handle is the library's name of a device.
type handle uintptr

// Library is NVML, loaded and initialised. It is for one goroutine.
type Library struct {
	libfile.Loaded
	init, shutdown func() int32
	errorString    func(code int32) string
	driverVersion  func(text *byte, size uint32) int32
	handleByUUID   func(uuid string, device *handle) int32
	set            func(device handle, limits *setLimits) int32
	get            func(device handle, limits *getLimits) int32
	mode           func(device handle, mode *int32) int32
	setMode        func(device handle, mode int32) int32
}

// Open loads NVML from one of the places and initialises it. The error wraps
// errors.ErrUnsupported if the library has no limits.
func Open(p libfile.Places) (*Library, error) {
	l, err := OpenAny(p)
	if err != nil {
		return nil, err
	}
	if l.set == nil || l.get == nil {
		var lacks []string
		if l.set == nil {
			lacks = append(lacks, SetFunction)
		}
		if l.get == nil {
			lacks = append(lacks, GetFunction)
		}
		return nil, errors.Join(Missing(l.Driver(), lacks...), l.Close())
	}
	return l, nil
}

// OpenAny loads NVML from one of the places and initialises it, also of a driver without
// limits, whose functions must not be called then.
func OpenAny(p libfile.Places) (*Library, error) {
	l, err := libfile.Open(p, nil, load)
	if err != nil {
		return nil, err
	}
	if err := l.check("nvmlInit_v2", l.init()); err != nil {
		return nil, errors.Join(err, l.Loaded.Close())
	}
	return l, nil
}

func load(path string) (*Library, error) {
	l := &Library{}
	err := l.Load(path, purego.RTLD_LAZY|purego.RTLD_LOCAL, func() error {
		missing := l.Bind(libfile.Symbols{
			{Function: &l.init, Name: "nvmlInit_v2"}, {Function: &l.shutdown, Name: "nvmlShutdown"},
			{Function: &l.errorString, Name: "nvmlErrorString"}, {Function: &l.driverVersion, Name: "nvmlSystemGetDriverVersion"},
			{Function: &l.handleByUUID, Name: "nvmlDeviceGetHandleByUUID"},
			{Function: &l.set, Name: SetFunction}, {Function: &l.get, Name: GetFunction},
			{Function: &l.mode, Name: modeFunction}, {Function: &l.setMode, Name: setModeFunction},
		})
		missing = slices.DeleteFunc(missing, func(name string) bool {
			return slices.Contains([]string{SetFunction, GetFunction, modeFunction, setModeFunction}, name)
		})
		if len(missing) > 0 {
			return fmt.Errorf("%s lacks %s", path, strings.Join(missing, ", "))
		}
		return nil
	})
	return l, err
}

// Close shuts the library down and unloads it.
func (l *Library) Close() error {
	return errors.Join(l.check("nvmlShutdown", l.shutdown()), l.Loaded.Close())
}

// Driver returns the version of the driver, "" if the library does not know it.
func (l *Library) Driver() string {
	var text [96]byte
	if l.driverVersion(&text[0], uint32(len(text))) != codeSuccess {
		return ""
	}
	return libfile.CString(text[:])
}

// SetLimit is that of backend.Limiter.
func (l *Library) SetLimit(_ context.Context, id accel.DeviceID, group string, bytes uint64) error {
	device, err := l.find(id)
	if err != nil {
		return err
	}
	var pinned runtime.Pinner
	defer pinned.Unpin()
	limits := &setLimits{Group: cString(group, &pinned), Hard: bytes}
	return Outcome(l.check(call(SetFunction, id), l.set(device, limits)))
}

// ClearLimit is that of backend.Limiter.
func (l *Library) ClearLimit(ctx context.Context, id accel.DeviceID, group string) error {
	return l.SetLimit(ctx, id, group, Unlimited)
}

// Limit is that of backend.Limiter.
func (l *Library) Limit(_ context.Context, id accel.DeviceID, group string) (backend.MemoryLimit, error) {
	device, err := l.find(id)
	if err != nil {
		return backend.MemoryLimit{}, err
	}
	var pinned runtime.Pinner
	defer pinned.Unpin()
	limits := &getLimits{Group: cString(group, &pinned)}
	if err := Outcome(l.check(call(GetFunction, id), l.get(device, limits))); err != nil {
		return backend.MemoryLimit{}, err
	}
	return Read(limits.Hard, limits.Used)
}

// Read returns a limit as the library reported it. The error wraps backend.ErrNoLimit if
// the group has none.
func Read(hard, used uint64) (backend.MemoryLimit, error) {
	if hard == Unlimited {
		return backend.MemoryLimit{}, backend.ErrNoLimit
	}
	return backend.MemoryLimit{Bytes: hard, UsedBytes: used}, nil
}

func (l *Library) find(id accel.DeviceID) (device handle, err error) {
	code := l.handleByUUID(string(id), &device)
	return device, l.check(call("nvmlDeviceGetHandleByUUID", id), code)
}

// check turns a return code into an error, a *libloader.CodeError.
func (l *Library) check(call string, code int32) error {
	if code == codeSuccess {
		return nil
	}
	return &libloader.CodeError{Call: call, Code: code, Text: strings.ToLower(libfile.CString([]byte(l.errorString(code))))}
}

func call(function string, id accel.DeviceID) string { return fmt.Sprintf("%s(%s)", function, id) }

// cString returns a text for C, which stays where it is until it is unpinned.
func cString(s string, pinned *runtime.Pinner) *byte {
	text := append(bytes.Clone([]byte(s)), 0)
	pinned.Pin(&text[0])
	return &text[0]
}
