package enflame

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"

	"github.com/ebitengine/purego"

	"github.com/divvy-gpu/divvy/internal/backend"
	"github.com/divvy-gpu/divvy/internal/backend/lane"
	"github.com/divvy-gpu/divvy/internal/backend/libfile"
)

// Return codes of libefml's older interface.
const (
	codeSuccess         = 0
	codeNotSupported    = 3
	codeDriverNotLoaded = 6
	codeTimeout         = 253
	codeFailure         = 254
)

// maxCards is the most cards that libefml's header allows.
const maxCards = 128

// textSize is the room for a text. The library's texts have 128 bytes at most,
// which only the header of one function says; the rest is caution.
const textSize = 1024

// cardInfo is what EfmlGetDevInfo fills: 156 bytes.
type cardInfo struct {
	Name                          [128]byte
	PCIVendor, PCIDevice          uint32
	Domain, Bus, Device, Function uint32
	Logic                         uint32 // N of /dev/gcuN
}

// cardMemory is what EfmlGetDevMem fills: 16 bytes.
type cardMemory struct {
	TotalBytes uint64
	UsedMiB    uint32
	_          uint32
}

// event is what EfmlGetEvent fills: 136 bytes.
type event struct {
	Card    uint32
	Type    int32
	Message [128]byte
}

// text is what the functions fill that return a string.
type text [textSize]byte

func cString(b []byte) string {
	before, _, _ := bytes.Cut(b, []byte{0})
	return strings.ToValidUTF8(strings.TrimSpace(string(before)), "?")
}

// library is a loaded libefml. Its functions run on the lanes of a Backend
// only; the fields that change are guarded as their comments say.
type library struct {
	libfile.File
	shared libfile.Shared

	// initialised is true from a successful EfmlInit to EfmlShutdown.
	initialised atomic.Bool
	// closed is true once the handle is closed and no function may be called.
	// It is read on either lane, and written on both.
	closed bool

	// The functions that every release has.
	init     func(noDriver bool) int32
	shutdown func() int32
	count    func(*uint32) int32
	uuid     func(uint32, *text) int32
	info     func(uint32, *cardInfo) int32
	memory   func(uint32, *cardMemory) int32

	// The functions that some releases lack; nil in these.
	errorString   func(int32, *text) int32
	driverVersion func(*text) int32
	name          func(uint32, *text) int32
	numa          func(uint32, *int32) int32
	event         func(milliseconds int32, _ *event) int32
	// health fills a C bool. Its name differs between releases.
	health     func(uint32, *byte) int32
	healthName string
}

// load loads the file at path, or the library of that bare name.
func load(path string) (*library, error) {
	file, err := libfile.Stat(path)
	if err != nil {
		return nil, err
	}
	shared, err := libfile.LoadShared(path, purego.RTLD_LAZY|purego.RTLD_GLOBAL)
	if err != nil {
		return nil, err
	}
	l := &library{File: file, shared: shared}
	if err := l.bind(); err != nil {
		return nil, errors.Join(err, shared.Close())
	}
	return l, nil
}

// bind looks up all functions. Its error names all that are missing.
func (l *library) bind() error {
	find := func(function any, name string) bool {
		address, ok := l.shared.Symbol(name)
		if !ok {
			return false
		}
		purego.RegisterFunc(function, address)
		return true
	}

	var missing []string
	for _, f := range []struct {
		function any
		name     string
	}{
		{&l.init, "EfmlInit"},
		{&l.shutdown, "EfmlShutdown"},
		{&l.count, "EfmlGetDevCount"},
		{&l.uuid, "EfmlGetDevUuid"},
		{&l.info, "EfmlGetDevInfo"},
		{&l.memory, "EfmlGetDevMem"},
	} {
		if !find(f.function, f.name) {
			missing = append(missing, f.name)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("%s lacks %s", l.Path, strings.Join(missing, ", "))
	}

	find(&l.errorString, "EfmlErrorString")
	find(&l.driverVersion, "EfmlGetDriverVer")
	find(&l.name, "EfmlGetDevName")
	find(&l.numa, "EfmlGetNumaNode")
	find(&l.event, "EfmlGetEvent")
	for _, name := range []string{"EfmlGetDevHealth", "EfmlGetDevIsHealth"} {
		if find(&l.health, name) {
			l.healthName = name
			break
		}
	}
	return nil
}

// Close shuts the library down and unloads it. Both lanes are the caller's.
func (l *library) Close() error {
	if l.closed {
		return nil
	}
	l.end()
	l.closed = true
	return l.shared.Close()
}

// end shuts the library down. Both lanes are the caller's. What EfmlShutdown
// returns is of no use: it refuses when the driver is gone, and the library is
// to be initialised anew just the same.
func (l *library) end() {
	if l.initialised.Swap(false) {
		l.shutdown()
	}
}

// codeError is a call that returned another code than success.
type codeError struct {
	call string
	code int32
	text string
}

func (e *codeError) Error() string { return fmt.Sprintf("%s: %s (%d)", e.call, e.text, e.code) }

// check turns a return code into an error, a *codeError. It asks the library
// for words, so it runs on the lane of the call.
func (l *library) check(call string, code int32) error {
	if code == codeSuccess {
		return nil
	}
	e := &codeError{call: call, code: code}
	if l.errorString != nil {
		var t text
		if l.errorString(code, &t) == codeSuccess {
			e.text = cString(t[:])
		}
	}
	if e.text == "" {
		e.text = codeText(code)
	}
	return e
}

func codeText(code int32) string {
	switch code {
	case codeNotSupported:
		return "not supported"
	case codeDriverNotLoaded:
		return "driver not loaded"
	case codeTimeout:
		return "timeout"
	case codeFailure:
		return "failure"
	}
	return "unknown code"
}

// hasCode reports whether err is a call that returned code.
func hasCode(err error, code int32) bool {
	var e *codeError
	return errors.As(err, &e) && e.code == code
}

// query runs a function that fills a T on the lane, and returns the T.
func query[T any](ctx context.Context, on *lane.Lane, lib *library, name string, f func(*T) int32) (T, error) {
	return lane.Run(ctx, on, name, func() (T, error) {
		var out T
		if lib.closed {
			return out, backend.ErrClosed
		}
		err := lib.check(name, f(&out))
		return out, err
	})
}

// queryCard is query for a function about one card.
func queryCard[T any](ctx context.Context, on *lane.Lane, lib *library, name string, index int, f func(uint32, *T) int32) (T, error) {
	return query(ctx, on, lib, fmt.Sprintf("%s(%d)", name, index), func(out *T) int32 {
		return f(uint32(index), out) //nolint:gosec // below the count of cards, which is 128 at most
	})
}
