package vendorsim_test

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// Structs of the vendor's interface.
type (
	efmlInfo struct {
		Name                                          [128]byte
		Vendor, Device, Domain, Bus, Dev, Func, Logic uint32
	}
	efmlMem struct {
		Total     uint64
		Used, Pad uint32
	}
	efmlEvent struct {
		ID   uint32
		Type int32
		Msg  [128]byte
	}
	efmlProcess struct {
		PID            uint32
		Device, System uint64
	}
)

// efml is a copy of the stand-in with a topology of its own, loaded.
type efml struct {
	standIn

	Init        func(noDriver bool) int32
	Shutdown    func() int32
	ErrorString func(int32, *byte) int32
	DriverVer   func(*byte) int32
	LibVer      func(*byte) int32
	Count       func(*uint32) int32
	Name        func(uint32, *byte) int32
	UUID        func(uint32, *byte) int32
	Sn          func(uint32, *byte) int32
	SKU         func(uint32, *byte) int32
	Info        func(uint32, *efmlInfo) int32
	Mem         func(uint32, *efmlMem) int32
	Health      func(uint32, *bool) int32
	IsHealth    func(uint32, *bool) int32
	NUMA        func(uint32, *int32) int32
	Event       func(int32, *efmlEvent) int32
	EventV2     func(uint32, *efmlEvent) int32
	Processes   func(card uint32, count *uint32, _ *efmlProcess) int32
}

func load(t testing.TB, topology vendorsim.Topology) *efml {
	t.Helper()
	l := &efml{}
	l.standIn = loadStandIn(t, vendorsim.Enflame, purego.RTLD_LAZY|purego.RTLD_GLOBAL, topology, map[string]any{
		"EfmlInit":           &l.Init,
		"EfmlShutdown":       &l.Shutdown,
		"EfmlErrorString":    &l.ErrorString,
		"EfmlGetDriverVer":   &l.DriverVer,
		"EfmlGetLibVer":      &l.LibVer,
		"EfmlGetDevCount":    &l.Count,
		"EfmlGetDevName":     &l.Name,
		"EfmlGetDevUuid":     &l.UUID,
		"EfmlGetDevSn":       &l.Sn,
		"EfmlGetDevSKU":      &l.SKU,
		"EfmlGetDevInfo":     &l.Info,
		"EfmlGetDevMem":      &l.Mem,
		"EfmlGetDevHealth":   &l.Health,
		"EfmlGetDevIsHealth": &l.IsHealth,
		"EfmlGetNumaNode":    &l.NUMA,
		"EfmlGetEvent":       &l.Event,
		"EfmlGetEventV2":     &l.EventV2,
		"EfmlGetProcessInfo": &l.Processes,
	})
	return l
}

func (l *efml) errorString(code int32) string {
	var b [128]byte
	l.ErrorString(code, &b[0])
	return text(b[:])
}

func (l *efml) mustInit(t testing.TB) {
	t.Helper()
	wantCode(t, "EfmlInit", l.Init(false), 0)
}

func TestStructSizes(t *testing.T) {
	if i, m, e := unsafe.Sizeof(efmlInfo{}), unsafe.Sizeof(efmlMem{}), unsafe.Sizeof(efmlEvent{}); i != 156 || m != 16 || e != 136 {
		t.Errorf("info, mem and event have %d, %d and %d bytes, want 156, 16 and 136", i, m, e)
	}
}

func TestEFMLProcesses(t *testing.T) {
	topology := vendorsim.Topology{Cards: append(vendorsim.GPUs(1, 1024), vendorsim.GCUs(2, 16384)...)}
	topology.Cards[2].UsedMiB = 100
	l := load(t, topology)
	var got [64]efmlProcess
	count := uint32(7)
	wantCode(t, "EfmlGetProcessInfo before EfmlInit", l.Processes(1, &count, &got[0]), 254)
	l.mustInit(t)
	wantCode(t, "EfmlGetProcessInfo of none", l.Processes(1, &count, &got[0]), 0)
	if count != 0 {
		t.Errorf("%d processes, want none", count)
	}
	topology.Processes = []vendorsim.Process{
		{Card: 2, PID: 4711, MemoryMiB: 300}, {Card: 1, PID: 9, MemoryMiB: 1}, {Card: 2, PID: 4712, MemoryMiB: vendorsim.UnknownMemory},
	}
	l.write(t, topology)
	// What count is before the call means nothing.
	wantCode(t, "EfmlGetProcessInfo", l.Processes(1, &count, &got[0]), 0)
	if want := [3]efmlProcess{{4711, 300 << 20, 0}, {4712, ^uint64(0), 0}}; count != 2 || [3]efmlProcess(got[:3]) != want {
		t.Errorf("%d processes: %+v, want %+v", count, got[:3], want)
	}
	var mem efmlMem
	wantCode(t, "EfmlGetDevMem", l.Mem(1, &mem), 0)
	if mem.Used != 400 {
		t.Errorf("%d MiB are used, want the processes' among them", mem.Used)
	}
	for i := range 70 {
		topology.Processes = append(topology.Processes, vendorsim.Process{Card: 2, PID: 5000 + i, MemoryMiB: 1})
	}
	l.write(t, topology)
	wantCode(t, "EfmlGetProcessInfo of many", l.Processes(1, &count, &got[0]), 0)
	if count != 64 || got[63].PID != 5061 {
		t.Errorf("%d processes, the last is %+v; want 64", count, got[63])
	}
	wantCode(t, "EfmlGetProcessInfo without a count", l.Processes(1, nil, &got[0]), 254)
	wantCode(t, "EfmlGetProcessInfo without a list", l.Processes(1, &count, nil), 254)
	wantCode(t, "EfmlGetProcessInfo of no card", l.Processes(2, &count, &got[0]), 254)
}

func TestDescribesCards(t *testing.T) {
	topology := vendorsim.Topology{
		Driver: vendorsim.Driver{Version: "1.3.0"},
		Cards: []vendorsim.Card{
			{Vendor: "nvidia", Model: "T4", UUID: "other", MemoryMiB: 1},
			{Vendor: "enflame", Model: "S60", UUID: "U53000090104", MemoryMiB: 16384, UsedMiB: 512, NUMA: 1, Minor: new(7)},
			{Vendor: "enflame", Model: "S60", UUID: "U53000090105", MemoryMiB: 49152, NUMA: -1, Unhealthy: true},
		},
	}
	l := load(t, topology)
	l.mustInit(t)

	var count uint32
	wantCode(t, "EfmlGetDevCount", l.Count(&count), 0)
	if count != 2 {
		t.Errorf("%d cards, want the 2 of Enflame", count)
	}
	var b [128]byte
	for _, c := range []struct {
		call string
		code int32
		want string
	}{
		{"EfmlGetDriverVer", l.DriverVer(&b[0]), "1.3.0"},
		{"EfmlGetDevName", l.Name(0, &b[0]), "S60"},
		{"EfmlGetDevSKU", l.SKU(0, &b[0]), "S60"},
		{"EfmlGetDevSn", l.Sn(0, &b[0]), "SN-U53000090104"},
		{"EfmlGetDevUuid", l.UUID(0, &b[0]), "U53000090104"},
	} {
		wantCode(t, c.call, c.code, 0)
	}
	if got := text(b[:]); got != "U53000090104" {
		t.Errorf("uuid of card 0 is %q", got)
	}
	wantCode(t, "EfmlGetLibVer", l.LibVer(&b[0]), 0)
	if text(b[:]) == "" {
		t.Error("no library version")
	}

	var info efmlInfo
	wantCode(t, "EfmlGetDevInfo", l.Info(0, &info), 0)
	if text(info.Name[:]) != "S60" || info.Logic != 7 || info.Bus != 0x11 {
		t.Errorf("info of card 0: name %q, logic %d, bus %#x", text(info.Name[:]), info.Logic, info.Bus)
	}
	wantCode(t, "EfmlGetDevInfo", l.Info(1, &info), 0)
	if info.Logic != 2 {
		t.Errorf("logic of a card without minor is %d, want its number in the file, 2", info.Logic)
	}
	var mem efmlMem
	wantCode(t, "EfmlGetDevMem", l.Mem(0, &mem), 0)
	if mem != (efmlMem{Total: 16384 << 20, Used: 512}) {
		t.Errorf("memory of card 0: %+v", mem)
	}
	var numa int32
	wantCode(t, "EfmlGetNumaNode", l.NUMA(0, &numa), 0)
	if numa != 1 {
		t.Errorf("NUMA node of card 0 is %d", numa)
	}
	wantCode(t, "EfmlGetNumaNode", l.NUMA(1, &numa), 0)
	if numa != -1 {
		t.Errorf("NUMA node of card 1 is %d", numa)
	}
	for name, health := range map[string]func(uint32, *bool) int32{"EfmlGetDevHealth": l.Health, "EfmlGetDevIsHealth": l.IsHealth} {
		for index, want := range []bool{true, false} {
			var ok bool
			wantCode(t, name, health(uint32(index), &ok), 0)
			if ok != want {
				t.Errorf("%s(%d) says %v", name, index, ok)
			}
		}
	}
	wantCode(t, "EfmlGetDevMem of a card that is not there", l.Mem(2, &mem), 254)
	wantCode(t, "EfmlGetDevMem into nothing", l.Mem(0, nil), 254)
	wantCode(t, "EfmlShutdown", l.Shutdown(), 0)
	wantCode(t, "EfmlGetDevCount after EfmlShutdown", l.Count(&count), 254)
}

func TestDriverStates(t *testing.T) {
	topology := vendorsim.Topology{Cards: vendorsim.GCUs(1, 1024)}
	topology.Driver.State = vendorsim.DriverAbsent
	l := load(t, topology)
	wantCode(t, "EfmlInit without a driver", l.Init(false), 6)
	if got := l.errorString(6); got != "driver not loaded" {
		t.Errorf("EfmlErrorString(6) is %q", got)
	}
	wantCode(t, "EfmlInit with no_driver", l.Init(true), 0)
	var count uint32
	wantCode(t, "EfmlGetDevCount without a driver", l.Count(&count), 6)

	topology.Driver.State = vendorsim.DriverBroken
	l.write(t, topology)
	wantCode(t, "EfmlInit with a broken driver", l.Init(false), 254)

	topology.Driver.State = vendorsim.DriverLoaded
	l.write(t, topology)
	wantCode(t, "EfmlGetDevCount before EfmlInit", l.Count(&count), 254)
	l.mustInit(t)
	wantCode(t, "EfmlGetDevCount", l.Count(&count), 0)

	topology.Driver.State = vendorsim.DriverAbsent
	l.write(t, topology)
	wantCode(t, "EfmlGetDevCount after the driver went", l.Count(&count), 6)
	topology.Driver.State = vendorsim.DriverLoaded
	l.write(t, topology)
	wantCode(t, "EfmlGetDevCount after the driver came back", l.Count(&count), 254)
	l.mustInit(t)
	wantCode(t, "EfmlGetDevCount after another EfmlInit", l.Count(&count), 0)
}

func TestFailuresAndLoss(t *testing.T) {
	topology := vendorsim.Topology{Cards: vendorsim.GCUs(2, 1024)}
	topology.Library.Fail = vendorsim.Failures{"EfmlGetNumaNode": 3}
	topology.Cards[1].Calls.Fail = vendorsim.Failures{"EfmlGetDevMem": 253}
	l := load(t, topology)
	l.mustInit(t)
	var mem efmlMem
	var numa int32
	wantCode(t, "EfmlGetNumaNode, ordered to fail", l.NUMA(0, &numa), 3)
	wantCode(t, "EfmlGetDevMem(0)", l.Mem(0, &mem), 0)
	wantCode(t, "EfmlGetDevMem(1), ordered to fail", l.Mem(1, &mem), 253)

	topology.Library.Fail = nil
	topology.Cards[1].Calls.Fail = nil
	topology.Cards[0].Lost = true
	l.write(t, topology)
	var count uint32
	wantCode(t, "EfmlGetDevCount", l.Count(&count), 0)
	if count != 2 {
		t.Errorf("%d cards, want 2: a lost card is still counted", count)
	}
	wantCode(t, "EfmlGetDevMem(0) of a lost card", l.Mem(0, &mem), 254)
	wantCode(t, "EfmlGetDevMem(1)", l.Mem(1, &mem), 0)
}

func TestBrokenTopology(t *testing.T) {
	topology := vendorsim.Topology{Cards: vendorsim.GCUs(1, 1024)}
	l := load(t, topology)
	l.mustInit(t)
	if err := os.WriteFile(l.topologyPath(), []byte("[driver]\ncolour = red\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	var count uint32
	wantCode(t, "EfmlGetDevCount", l.Count(&count), 254)
	if got, want := l.errorString(254), `/topology.ini:2: unknown key "colour" in [driver]`; !strings.HasPrefix(got, "failure: ") ||
		!strings.HasSuffix(got, want) {
		t.Errorf("EfmlErrorString(254) is %q, want failure: ...%s", got, want)
	}
	if err := os.Remove(l.topologyPath()); err != nil {
		t.Fatal(err)
	}
	wantCode(t, "EfmlGetDevCount without a file", l.Count(&count), 254)
	if got, want := l.errorString(254), "/topology.ini: No such file or directory"; !strings.HasSuffix(got, want) {
		t.Errorf("EfmlErrorString(254) is %q, want ...%s", got, want)
	}
	l.write(t, topology)
	wantCode(t, "EfmlGetDevCount after the repair", l.Count(&count), 0)
	if got := l.errorString(254); got != "failure" {
		t.Errorf("EfmlErrorString(254) is %q, want failure", got)
	}
}

func TestDelay(t *testing.T) {
	topology := vendorsim.Topology{Cards: vendorsim.GCUs(1, 1024)}
	l := load(t, topology)
	l.mustInit(t)
	var count uint32

	topology.Library.Delay = 60 * time.Millisecond
	l.write(t, topology)
	start := time.Now()
	wantCode(t, "EfmlGetDevCount", l.Count(&count), 0)
	if d := time.Since(start); d < topology.Library.Delay {
		t.Errorf("a call took %v, want at least %v", d, topology.Library.Delay)
	}

	topology.Library.Delay = time.Hour
	l.write(t, topology)
	done := make(chan int32)
	go func() { done <- l.Count(&count) }()
	select {
	case <-done:
		t.Fatal("a call that takes an hour is over")
	case <-time.After(50 * time.Millisecond):
	}
	topology.Library.Delay = 0
	l.write(t, topology)
	select {
	case code := <-done:
		wantCode(t, "EfmlGetDevCount", code, 0)
	case <-time.After(2 * time.Minute):
		t.Fatal("a waiting call did not notice that the delay is gone")
	}
}

func TestEvents(t *testing.T) {
	topology := vendorsim.Topology{Cards: vendorsim.GCUs(3, 1024)}
	l := load(t, topology)
	l.mustInit(t)
	var e efmlEvent
	wantCode(t, "EfmlGetEvent of calm", l.Event(20, &e), 253)

	change := func(f func([]vendorsim.Card)) {
		f(topology.Cards)
		l.write(t, topology)
	}
	expect := func(card uint32, kind int32, message string) {
		t.Helper()
		wantCode(t, "EfmlGetEvent", l.Event(10_000, &e), 0)
		if e.ID != card || e.Type != kind || text(e.Msg[:]) != message {
			t.Errorf("event of card %d, type %d, %q; want card %d, type %d, %q", e.ID, e.Type, text(e.Msg[:]), card, kind, message)
		}
	}
	change(func(c []vendorsim.Card) { c[1].Unhealthy = true })
	expect(1, 3, "card 1 suspended: unhealthy")
	change(func(c []vendorsim.Card) { c[1].Unhealthy, c[2].Lost = false, true })
	expect(1, 11, "card 1 reset finished: healthy")
	expect(2, 3, "card 2 suspended: lost")
	change(func(c []vendorsim.Card) { c[0].Unhealthy, c[2].Lost = true, false })
	wantCode(t, "EfmlGetEventV2(2)", l.EventV2(2, &e), 0)
	if e.ID != 2 || e.Type != 11 {
		t.Errorf("event of card %d, type %d; want card 2, type 11", e.ID, e.Type)
	}
	wantCode(t, "EfmlGetEventV2(2) of calm", l.EventV2(2, &e), 253)
	expect(0, 3, "card 0 suspended: unhealthy")

	// A change that comes while a call waits for it.
	got := make(chan int32)
	go func() { got <- l.Event(10_000, &e) }()
	time.Sleep(30 * time.Millisecond)
	change(func(c []vendorsim.Card) { c[0].Unhealthy = false })
	wantCode(t, "EfmlGetEvent", <-got, 0)
	if e.ID != 0 || e.Type != 11 {
		t.Errorf("event of card %d, type %d; want card 0, type 11", e.ID, e.Type)
	}

	topology.Driver.State = vendorsim.DriverAbsent
	l.write(t, topology)
	wantCode(t, "EfmlGetEvent without a driver", l.Event(10_000, &e), 6)
}

func TestManyThreads(t *testing.T) {
	topology := vendorsim.Topology{Cards: vendorsim.GCUs(4, 1024)}
	l := load(t, topology)
	l.mustInit(t)
	stop := make(chan struct{})
	var callers sync.WaitGroup
	for i := range 2 * runtime.NumCPU() {
		callers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				var b [128]byte
				index := uint32(i % 4)
				if code := l.UUID(index, &b[0]); code != 0 || text(b[:]) != topology.Cards[index].UUID {
					t.Errorf("EfmlGetDevUuid(%d) = %d, %q", index, code, text(b[:]))
					return
				}
				var e efmlEvent
				if code := l.Event(0, &e); code != 0 && code != 253 {
					t.Errorf("EfmlGetEvent = %d", code)
					return
				}
			}
		})
	}
	for i := range 100 {
		next := topology.Clone()
		next.Cards[i%4].Unhealthy = i%2 == 0
		l.write(t, next)
		time.Sleep(time.Millisecond)
	}
	close(stop)
	callers.Wait()
}

func TestCopiesAreApart(t *testing.T) {
	one := load(t, vendorsim.Topology{Cards: vendorsim.GCUs(1, 1024)})
	two := load(t, vendorsim.Topology{Cards: vendorsim.GCUs(2, 1024)})
	for want, l := range map[uint32]*efml{1: one, 2: two} {
		l.mustInit(t)
		var count uint32
		wantCode(t, "EfmlGetDevCount", l.Count(&count), 0)
		if count != want {
			t.Errorf("%d cards in the copy that has %d", count, want)
		}
	}
}

func TestBuildErrors(t *testing.T) {
	t.Run("the compiler's words", func(t *testing.T) {
		t.Setenv("CC", "cc -include no-such-header.h")
		_, err := vendorsim.Build(t.Context(), vendorsim.Enflame, t.TempDir())
		if err == nil || !strings.Contains(err.Error(), "no-such-header.h") ||
			!strings.Contains(err.Error(), "build libefml.so.1.0.0: cc: ") {
			t.Errorf("error is %v, want one that holds what the compiler wrote", err)
		}
	})
	t.Run("no compiler", func(t *testing.T) {
		t.Setenv("CC", "no-such-compiler")
		_, err := vendorsim.Build(t.Context(), vendorsim.Enflame, t.TempDir())
		if err == nil || !strings.Contains(err.Error(), "no-such-compiler") {
			t.Errorf("error is %v, want one that names the compiler", err)
		}
	})
	t.Run("nothing left behind", func(t *testing.T) {
		t.Setenv("CC", "cc -Werror -Wconversion")
		dir := filepath.Join(t.TempDir(), "made", "on", "the", "way")
		path, err := vendorsim.Build(t.Context(), vendorsim.Enflame, dir)
		if err != nil {
			t.Fatal(err)
		}
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		if len(entries) != 1 || filepath.Join(dir, entries[0].Name()) != path {
			t.Errorf("the folder holds %v, want only %s", entries, path)
		}
	})
}

func TestWithout(t *testing.T) {
	path, err := vendorsim.Build(t.Context(), vendorsim.Enflame, t.TempDir(), vendorsim.Without("EfmlGetEvent"))
	if err != nil {
		t.Fatal(err)
	}
	handle, err := purego.Dlopen(path, purego.RTLD_LAZY)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]bool{"EfmlGetEvent": false, "EfmlGetEventV2": true, "EfmlInit": true} {
		if _, err := purego.Dlsym(handle, name); (err == nil) != want {
			t.Errorf("%s is there: %v, want %v", name, err == nil, want)
		}
	}
}

// FuzzTopology holds the parser in Go and the one in C together: they accept
// the same files, and the mistake that C stops at is one that Go tells.
func FuzzTopology(f *testing.F) {
	for _, seed := range brokenFiles {
		f.Add([]byte(seed.text))
	}
	f.Add([]byte(briefExample))
	f.Add([]byte("[card 1]\nvendor=enflame\nuuid=\nmemory_mib=0\n[ card \t0 ]\r\nvendor = nvidia\nuuid = a#b # c\nmemory_mib = 007\nfail " +
		"= a : 1 , b:999\n"))
	f.Add([]byte("[library]\nfail =\n[driver]\nversion = " + strings.Repeat("v", 63)))
	l := load(f, vendorsim.Topology{})
	f.Fuzz(func(t *testing.T, data []byte) {
		temp := filepath.Join(l.dir, "next")
		if err := os.WriteFile(temp, data, 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(temp, l.topologyPath()); err != nil {
			t.Fatal(err)
		}
		l.Init(false)
		said, broken := strings.CutPrefix(l.errorString(254), "failure: ")
		_, err := vendorsim.Parse(l.topologyPath(), data)
		if broken != (err != nil) {
			t.Fatalf("C says %q, Go says %v", said, err)
		}
		if !broken {
			return
		}
		for line := range strings.SplitSeq(err.Error(), "\n") {
			if len(line) > 200 || strings.HasSuffix(line, said) { // C cuts long texts
				return
			}
		}
		t.Errorf("C says %q, which is not among what Go says:\n%v", said, err)
	})
}

func ExampleTopology_Encode() {
	topology := vendorsim.Topology{
		Driver: vendorsim.Driver{Version: "1.3.0"},
		Cards:  []vendorsim.Card{{Vendor: vendorsim.Enflame, Model: "S60", UUID: "U53000090104", MemoryMiB: 16384}},
	}
	data, err := topology.Encode()
	fmt.Print(string(data), err)
	// Output:
	// # Simulated hardware. docs/simulated-hardware.md describes this file.
	// [driver]
	// state = loaded
	// version = 1.3.0
	//
	// [library]
	// delay_ms = 0
	//
	// [card 0]
	// vendor = enflame
	// model = S60
	// uuid = U53000090104
	// memory_mib = 16384
	// numa = 0
	// health = healthy
	// lost = false
	// used_mib = 0
	// <nil>
}
