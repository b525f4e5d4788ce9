package enflame

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	"github.com/ebitengine/purego"

	"github.com/divvy-gpu/divvy/internal/node/backend/callqueue"
	"github.com/divvy-gpu/divvy/internal/node/backend/libfile"
	"github.com/divvy-gpu/divvy/internal/node/backend/libloader"
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

// maxProcesses is the most processes that EfmlGetProcessInfo lists of a card, as
// libefml's header says.
const maxProcesses = 64

// process is one of those that EfmlGetProcessInfo lists: 24 bytes.
//
// The header gives no unit of the amounts. They are taken for bytes: they have 64 bits, as
// the amounts have that the header's other functions give in bytes, while what is in MiB
// has 32; and the newer interface gives bytes. If they are in a larger unit, what a process
// uses is reported as far too little, so that no process is wrongly said to use too much.
type process struct {
	PID uint32
	_   uint32
	// Device is of the card's memory, System of the host's.
	Device, System uint64
}

// processList is what EfmlGetProcessInfo fills. Its count is output only, so the list
// is longer than the library should need.
type processList struct {
	Count   uint32
	Entries [4 * maxProcesses]process
}

// event is what EfmlGetEvent fills: 136 bytes.
type event struct {
	Card    uint32
	Type    int32
	Message [128]byte
}

// text is what the functions fill that return a string.
type text [textSize]byte

func (t text) String() string { return libfile.CString(t[:]) }

// library is a loaded libefml. Its functions run on the queues of a loader only.
type library struct {
	libfile.Loaded

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
	processes     func(card uint32, count *uint32, _ *process) int32
	// health fills a C bool. Its name differs between releases.
	health struct {
		name string
		of   func(uint32, *byte) int32
	}
}

// load loads the file at path, or the library of that bare name.
func load(path string) (*library, error) {
	l := &library{}
	if err := l.Load(path, purego.RTLD_LAZY|purego.RTLD_GLOBAL, l.bind); err != nil {
		return nil, err
	}
	return l, nil
}

// bind looks up all functions. Its error names all that are missing of those
// that must be there.
func (l *library) bind() error {
	if missing := l.Bind(libfile.Symbols{
		{&l.init, "EfmlInit"},
		{&l.shutdown, "EfmlShutdown"},
		{&l.count, "EfmlGetDevCount"},
		{&l.uuid, "EfmlGetDevUuid"},
		{&l.info, "EfmlGetDevInfo"},
		{&l.memory, "EfmlGetDevMem"},
	}); missing != nil {
		return fmt.Errorf("%s lacks %s", l.Path, strings.Join(missing, ", "))
	}
	l.Bind(libfile.Symbols{
		{&l.errorString, "EfmlErrorString"},
		{&l.driverVersion, "EfmlGetDriverVer"},
		{&l.name, "EfmlGetDevName"},
		{&l.numa, "EfmlGetNumaNode"},
		{&l.event, "EfmlGetEvent"},
		{&l.processes, "EfmlGetProcessInfo"},
	})
	for _, name := range []string{"EfmlGetDevHealth", "EfmlGetDevIsHealth"} {
		if l.Bind(libfile.Symbols{{&l.health.of, name}}) == nil {
			l.health.name = name
			break
		}
	}
	return nil
}

// check turns a return code into an error, a *libloader.CodeError. It asks the
// library for words, so it runs on the queue of the call.
func (l *library) check(call string, code int32) error {
	if code == codeSuccess {
		return nil
	}
	var t text
	if l.errorString != nil && l.errorString(code, &t) != codeSuccess {
		t = text{}
	}
	return &libloader.CodeError{Call: call, Code: code, Text: cmp.Or(t.String(), codeText(code))}
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

// query runs a function that fills a T, and returns the T.
func query[T any](ctx context.Context, b *Backend, lib *library, name string, f func(*T) int32) (T, error) {
	return queryOn(ctx, b, b.loader.Calls, lib, callqueue.Library, name, f)
}

// queryOn is query on that queue, about the card of that index or callqueue.Library.
func queryOn[T any](ctx context.Context, b *Backend, on *callqueue.Queue, lib *library, about int, name string, f func(*T) int32) (T,
	error) {
	return libloader.Call(ctx, b.loader, on, lib, about, name, func() (T, error) {
		var out T
		err := lib.check(name, f(&out))
		return out, err
	})
}

// queryCard is query for a function about one card.
func queryCard[T any](ctx context.Context, b *Backend, lib *library, name string, index int, f func(uint32, *T) int32) (T, error) {
	return queryOn(ctx, b, b.loader.Calls, lib, index, fmt.Sprintf("%s(%d)", name, index), func(out *T) int32 {
		return f(uint32(index), out) //nolint:gosec // below the count of cards, which is 128 at most
	})
}
