package vendorsim_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/ebitengine/purego"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// Structs of NVML's interface.
type (
	nvmlSetLimits struct {
		NameSpace  *byte
		Soft, Hard uint64
	}
	nvmlGetLimits struct {
		NameSpace        *byte
		Soft, Hard, Used uint64
	}
)

const (
	mib      = 1 << 20
	limitMax = ^uint64(0)
	groupA   = "/kubepods/pod1/a"
	groupB   = "/kubepods/pod1/b"
	groupC   = "/kubepods/pod2/c"
)

// limits is a driver that limits memory, as a daemon beside the processes that allocate
// sees it.
type limits struct {
	*nvml
	topology vendorsim.Topology
	alloc    string // the program
	gpu      uintptr

	Set   func(uintptr, *nvmlSetLimits) int32
	Get   func(uintptr, *nvmlGetLimits) int32
	MIGAt func(uintptr, uint32, *uintptr) int32
	Alloc func(string, uint64) int32
}

// allocatorProgram is compiled once.
var allocatorProgram = sync.OnceValues(func() ([]byte, error) {
	dir, err := os.MkdirTemp("", "alloc-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }() // in the temporary folder
	file, err := vendorsim.BuildAllocator(context.Background(), dir)
	if err != nil {
		return nil, err
	}
	return os.ReadFile(file)
})

// newLimits loads a driver with a view of control groups, and with two GPUs of 10000 MiB.
func newLimits(t *testing.T, accounting vendorsim.MemoryAccounting) *limits {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: only root may set limits")
	}
	l := &limits{nvml: &nvml{}, topology: vendorsim.Topology{
		Driver:        vendorsim.Driver{MemoryAccounting: accounting, Persistence: true},
		Cards:         vendorsim.GPUs(2, 10000),
		ControlGroups: vendorsim.ControlGroups{Root: "cgroup", Proc: "proc"},
	}}
	l.load(t, vendorsim.NVIDIA, purego.RTLD_LAZY|purego.RTLD_LOCAL, l.topology, map[string]any{
		"nvmlDeviceSetMemoryLimits_v1":            &l.Set,
		"nvmlDeviceGetMemoryLimits_v1":            &l.Get,
		"nvmlDeviceGetPersistenceMode":            &l.Persistence,
		"nvmlDeviceGetComputeRunningProcesses_v3": &l.Processes,
		"nvmlDeviceGetMigDeviceHandleByIndex":     &l.MIGAt,
		"sim_alloc":                               &l.Alloc,
	})
	program, err := allocatorProgram()
	if err != nil {
		t.Fatal(err)
	}
	l.alloc = filepath.Join(l.dir, "alloc")
	if err := os.WriteFile(l.alloc, program, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{groupA, groupB, groupC} {
		l.group(t, path)
	}
	wantCode(t, "nvmlInit_v2", l.Init(), 0)
	l.gpu = l.at(t, 0)
	return l
}

// group makes a control group and returns its folder.
func (l *limits) group(t *testing.T, path string) string {
	t.Helper()
	folder, err := l.topology.ControlGroups.Make(l.dir, path, l.topology.Driver.MemoryAccounting == vendorsim.MemoryAccountingDmem)
	if err != nil {
		t.Fatal(err)
	}
	return folder
}

// cString returns a text as C has it.
func cString(s string) *byte {
	b, err := unix.BytePtrFromString(s)
	if err != nil {
		panic(err) // no test has a NUL in a path
	}
	return b
}

// set limits a folder of GPU 0, in MiB.
func (l *limits) set(folder string, soft, hard uint64) int32 {
	if hard != limitMax {
		hard *= mib
	}
	return l.Set(l.gpu, &nvmlSetLimits{cString(folder), soft * mib, hard})
}

// limit makes a control group with a hard limit in MiB.
func (l *limits) limit(t *testing.T, path string, hard uint64) {
	t.Helper()
	wantCode(t, "nvmlDeviceSetMemoryLimits_v1", l.set(l.group(t, path), 0, hard), 0)
}

// wantLimit checks the limit of a control group and what is charged to it, in MiB.
func (l *limits) wantLimit(t *testing.T, path string, hard, used uint64) {
	t.Helper()
	got := nvmlGetLimits{NameSpace: cString(l.group(t, path))}
	wantCode(t, "nvmlDeviceGetMemoryLimits_v1", l.Get(l.gpu, &got), 0)
	if got.Soft != 0 || got.Hard != hard*mib || got.Used != used*mib {
		t.Errorf("%s has limits %d and %d, and %d in use; want 0, %d and %d MiB", path, got.Soft, got.Hard, got.Used, hard, used)
	}
}

func (l *limits) wantNoLimit(t *testing.T, path string) {
	t.Helper()
	wantCode(t, "nvmlDeviceGetMemoryLimits_v1 without a limit", l.Get(l.gpu, &nvmlGetLimits{NameSpace: cString(l.group(t, path))}), 3)
}

// allocator is a process that runs alloc.
type allocator struct {
	cmd *exec.Cmd
	out *bufio.Scanner
}

// start starts alloc in a control group. It allocates only once it is in there, as a
// container's process does: it is a shell before.
func (l *limits) start(t *testing.T, path string, change func(*exec.Cmd), args ...string) *allocator {
	t.Helper()
	args = append([]string{"-c", `read -r _ && exec "$0" "$@"`, l.alloc, "--library", filepath.Join(l.dir, "libnvidia-ml.so.1")}, args...)
	a := &allocator{cmd: exec.Command("/bin/sh", args...)}
	a.cmd.Stderr = os.Stderr
	in, err := a.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := a.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	a.out = bufio.NewScanner(out)
	if change != nil {
		change(a.cmd)
	}
	if err := a.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.end(t) })
	pid := a.cmd.Process.Pid
	if attributes := a.cmd.SysProcAttr; attributes != nil && attributes.Cloneflags&syscall.CLONE_NEWPID != 0 {
		pid = 1
	}
	if err := l.topology.ControlGroups.Place(l.dir, pid, path); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(in, "\n"); err != nil {
		t.Fatal(err)
	}
	return a
}

// want checks the next lines of the process.
func (a *allocator) want(t *testing.T, lines ...string) *allocator {
	t.Helper()
	for _, want := range lines {
		if !a.out.Scan() {
			t.Fatalf("the process ended instead of writing %q", want)
		}
		if got := a.out.Text(); got != want {
			t.Errorf("the process wrote %q, want %q", got, want)
		}
	}
	return a
}

// end kills the process and waits until it is gone.
func (a *allocator) end(t *testing.T) {
	t.Helper()
	if a.cmd.ProcessState != nil {
		return
	}
	if err := a.cmd.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = a.cmd.Wait() // it was killed
}

// took and refused are lines of alloc: an amount, and all so far, in MiB.
func took(n, all int) string { return fmt.Sprintf("allocated %d MiB, %d MiB in all", n, all) }

func refused(n, all int) string {
	return fmt.Sprintf("refused %d MiB, %d MiB in all: out of memory, code 2", n, all)
}

func failed(n, code int) string {
	return fmt.Sprintf("refused %d MiB, 0 MiB in all: failed, code %d", n, code)
}

// forEachAccounting runs a test for both ways to limit memory.
func forEachAccounting(t *testing.T, f func(*testing.T, *limits)) {
	t.Helper()
	for _, accounting := range []vendorsim.MemoryAccounting{vendorsim.MemoryAccountingMisc, vendorsim.MemoryAccountingDmem} {
		t.Run(string(accounting), func(t *testing.T) { f(t, newLimits(t, accounting)) })
	}
}

func TestLimitHolds(t *testing.T) {
	forEachAccounting(t, func(t *testing.T, l *limits) {
		l.limit(t, groupA, 3000)
		l.limit(t, groupB, 500)
		first := l.start(t, groupA, nil, "--mib", "2000", "--mib", "990", "--mib", "11", "--mib", "10", "--mib", "1", "--hold").
			want(t, took(2000, 2000), took(990, 2990), refused(11, 2990), took(10, 3000), refused(1, 3000))
		l.wantLimit(t, groupA, 3000, 3000)
		l.start(t, groupA, nil, "--mib", "1", "--hold").want(t, refused(1, 0))
		l.start(t, groupB, nil, "--mib", "500", "--mib", "1", "--hold").want(t, took(500, 500), refused(1, 500))
		l.wantLimit(t, groupB, 500, 500)
		l.start(t, groupA, nil, "--device", "1", "--mib", "3001", "--hold").want(t, took(3001, 3001)) // its limit is for GPU 0
		first.end(t)
		l.wantLimit(t, groupA, 3000, 0)
		l.start(t, groupA, nil, "--fork", "--mib", "1500", "--mib", "1500", "--mib", "1", "--hold").
			want(t, took(1500, 1500), took(1500, 3000), refused(1, 3000))
	})
}

// TestWithoutALimit is what makes of TestLimitHolds a test: it is the limit that refuses.
func TestWithoutALimit(t *testing.T) {
	for _, accounting := range []vendorsim.MemoryAccounting{
		vendorsim.MemoryAccountingMisc, vendorsim.MemoryAccountingDmem, vendorsim.MemoryAccountingOff,
	} {
		t.Run(string(accounting), func(t *testing.T) {
			l := newLimits(t, accounting)
			a := l.start(t, groupA, nil, "--mib", "3000", "--mib", "1", "--mib", "6999", "--mib", "7000", "--hold")
			a.want(t, took(3000, 3000), took(1, 3001), took(6999, 10000), refused(7000, 10000))
			if accounting == vendorsim.MemoryAccountingOff {
				wantCode(t, "nvmlDeviceSetMemoryLimits_v1 without a backend", l.set(l.group(t, groupA), 0, 1), 3)
			}
			l.wantNoLimit(t, groupA)
		})
	}
}

func TestExitStatusOfAllocator(t *testing.T) {
	l := newLimits(t, vendorsim.MemoryAccountingMisc)
	l.limit(t, groupA, 10)
	for _, tt := range []struct {
		args []string
		want int
	}{
		{[]string{"--mib", "1"}, 0}, {[]string{"--fork", "--mib", "11"}, 2}, {[]string{"--device", "7", "--mib", "1"}, 1},
		{[]string{"--mib", "11", "--mib", "1"}, 2}, {[]string{"--mib", "0"}, 1}, {[]string{"--hold"}, 1}, {[]string{"--mib"}, 1},
		{[]string{"--device", l.topology.Cards[1].UUID, "--mib", "11"}, 0}, {[]string{"--mib", "1", "--library", "/none"}, 1},
	} {
		a := l.start(t, groupA, func(c *exec.Cmd) { c.Stderr = nil }, tt.args...)
		_ = a.cmd.Wait() // its status says how it ended
		if got := a.cmd.ProcessState.ExitCode(); got != tt.want {
			t.Errorf("alloc %s ends with %d, want %d", strings.Join(tt.args, " "), got, tt.want)
		}
	}
	l.wantLimit(t, groupA, 10, 0)
}

func TestLimitsOfAncestors(t *testing.T) {
	forEachAccounting(t, func(t *testing.T, l *limits) {
		l.limit(t, "/kubepods/pod1", 1000)
		l.wantLimit(t, groupA, 1000, 0) // it is inherited
		l.start(t, groupA, nil, "--mib", "700", "--hold").want(t, took(700, 700))
		l.start(t, groupB, nil, "--mib", "301", "--mib", "200", "--hold").want(t, refused(301, 0), took(200, 200))
		l.start(t, groupC, nil, "--mib", "2000", "--hold").want(t, took(2000, 2000))
		l.limit(t, groupA, 3000)
		second := l.start(t, groupA, nil, "--mib", "2300", "--hold")
		if l.topology.Driver.MemoryAccounting == vendorsim.MemoryAccountingDmem {
			second.want(t, refused(2300, 0)) // each ancestor counts
			l.wantLimit(t, groupA, 3000, 700)
			return
		}
		second.want(t, took(2300, 2300)) // limits do not nest
		l.wantLimit(t, groupA, 3000, 2300)
		l.wantLimit(t, "/kubepods/pod1", 1000, 900)
	})
}

func TestLaterLimit(t *testing.T) {
	forEachAccounting(t, func(t *testing.T, l *limits) {
		l.start(t, groupA, nil, "--mib", "2000", "--hold").want(t, took(2000, 2000))
		l.limit(t, groupA, 1000)
		late := l.start(t, groupA, nil, "--mib", "1000", "--mib", "1", "--hold")
		if l.topology.Driver.MemoryAccounting == vendorsim.MemoryAccountingDmem {
			late.want(t, refused(1000, 0), refused(1, 0))
			l.wantLimit(t, groupA, 1000, 2000)
			wantCode(t, "lowering below what is used", l.set(l.group(t, groupA), 0, 1), 0)
			return
		}
		late.want(t, took(1000, 1000), refused(1, 1000)) // it counts from zero
		l.wantLimit(t, groupA, 1000, 1000)
		wantCode(t, "lowering below what is used", l.set(l.group(t, groupA), 0, 999), 2)
		wantCode(t, "raising", l.set(l.group(t, groupA), 0, 1001), 0)
		l.wantLimit(t, groupA, 1001, 1000)
		wantCode(t, "clearing", l.set(l.group(t, groupA), 0, limitMax), 0)
		l.wantNoLimit(t, groupA)
		l.limit(t, groupA, 5)
		l.wantLimit(t, groupA, 5, 0) // what the cleared limit counted is forgotten
	})
}

func TestMovedProcess(t *testing.T) {
	l := newLimits(t, vendorsim.MemoryAccountingMisc)
	l.limit(t, groupA, 100)
	l.limit(t, groupC, 200)
	wantCode(t, "sim_alloc in no group of the view", l.Alloc("0", 1), 999)
	for _, to := range []string{groupA, groupC, groupA} {
		if err := l.topology.ControlGroups.Place(l.dir, os.Getpid(), to); err != nil {
			t.Fatal(err)
		}
		wantCode(t, "sim_alloc", l.Alloc(l.topology.Cards[0].UUID, 50*mib), 0)
	}
	wantCode(t, "sim_alloc above the limit", l.Alloc("0", 1), 2)
	l.wantLimit(t, groupA, 100, 100)
	l.wantLimit(t, groupC, 200, 50)
	if err := l.topology.ControlGroups.Place(l.dir, os.Getpid(), "/nowhere"); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		device string
		bytes  uint64
		want   int32
	}{{"0", 1, 999}, {"", 1, 101}, {"2", 1, 101}, {"-1", 1, 101}, {"GPU-none", 1, 101}, {"0", 0, 1}, {"0", 1 << 63, 1}} {
		wantCode(t, fmt.Sprintf("sim_alloc(%q, %d)", tt.device, tt.bytes), l.Alloc(tt.device, tt.bytes), tt.want)
	}
}

func TestCodesOfLimits(t *testing.T) {
	forEachAccounting(t, func(t *testing.T, l *limits) {
		dmem := l.topology.Driver.MemoryAccounting == vendorsim.MemoryAccountingDmem
		root, a := l.group(t, "/"), l.group(t, groupA)
		without := filepath.Join(root, "without") // files of the dmem controller
		if err := os.Mkdir(without, 0o755); err != nil {
			t.Fatal(err)
		}
		code := func(ifMisc, ifDmem int32) int32 {
			if dmem {
				return ifDmem
			}
			return ifMisc
		}
		const total = 10000 * mib
		for name, tt := range map[string]struct {
			path       string
			soft, hard uint64
			want       int32
		}{
			"a limit":                            {a, 0, mib, 0},
			"nothing at all":                     {a, 0, 0, 0},
			"the whole device":                   {a, total, total, 0},
			"only a soft limit":                  {a, mib, limitMax, 0},
			"clearing":                           {a, 0, limitMax, 0},
			"clearing what is not there":         {l.group(t, groupB), 0, limitMax, 0},
			"soft above hard":                    {a, 2, 1, 2},
			"hard above the device":              {a, 0, total + 1, 2},
			"soft above the device":              {a, total + 1, limitMax, 2},
			"almost no limit":                    {a, 0, limitMax - 1, 2},
			"a missing path":                     {filepath.Join(root, "none"), 0, mib, 17},
			"a path outside of control groups":   {l.dir, 0, mib, 17},
			"a file":                             {l.topologyPath(), 0, mib, 17},
			"a relative path":                    {"cgroup", 0, mib, 2},
			"the root":                           {root, 0, mib, code(3, 6)},
			"a group without files of dmem":      {without, 0, mib, code(0, 6)},
			"a path with a way back, and a link": {filepath.Join(a, "..", "b") + "/./", 0, mib, 0},
		} {
			wantCode(t, "set "+name, l.Set(l.gpu, &nvmlSetLimits{cString(tt.path), tt.soft, tt.hard}), tt.want)
		}
		wantCode(t, "set without a path", l.Set(l.gpu, &nvmlSetLimits{}), 2)
		wantCode(t, "set without a struct", l.Set(l.gpu, nil), 2)
		wantCode(t, "set without a device", l.Set(0, &nvmlSetLimits{NameSpace: cString(a)}), 2)

		get := func(path string) int32 { return l.Get(l.gpu, &nvmlGetLimits{NameSpace: cString(path)}) }
		wantCode(t, "clear b", l.set(l.group(t, groupB), 0, limitMax), 0)
		wantCode(t, "clear a", l.set(a, 0, limitMax), 0)
		wantCode(t, "clear the other", l.set(without, 0, limitMax), code(0, 6))
		wantCode(t, "get without a limit", get(a), 3)
		wantCode(t, "get of a missing path", get(filepath.Join(root, "none")), 17)
		wantCode(t, "get without files of dmem", get(without), code(3, 6))
		l.limit(t, groupA, 7)
		below := filepath.Join(a, "below")
		if err := os.Mkdir(below, 0o755); err != nil {
			t.Fatal(err)
		}
		wantCode(t, "get below a limit", get(below), 0)
		wantCode(t, "get without a struct", l.Get(l.gpu, nil), 2)
		wantCode(t, "get without a path", l.Get(l.gpu, &nvmlGetLimits{}), 2)

		l.withoutRoot(t, func() {
			wantCode(t, "set without root", l.set(a, 0, 1), 4)
			wantCode(t, "get without root", get(a), 0)
		})
		// As where the file system is mounted read-only: reading goes on.
		for _, file := range l.topology.StateFiles(l.dir) {
			if err := os.Chmod(file, 0o444); err != nil {
				t.Fatal(err)
			}
		}
		l.withoutRoot(t, func() { wantCode(t, "get where nothing can be written", get(a), 0) })

		topology := l.topology.Clone()
		topology.Cards[0].MemoryMiB = 40960
		topology.Cards[0] = vendorsim.Partition(topology.Cards[0], "7g.40gb")
		l.write(t, topology)
		var partition uintptr
		wantCode(t, "nvmlDeviceGetMigDeviceHandleByIndex", l.MIGAt(l.gpu, 0, &partition), 0)
		wantCode(t, "set of a MIG device", l.Set(partition, &nvmlSetLimits{cString(a), 0, mib}), 2)
		wantCode(t, "get of a MIG device", l.Get(partition, &nvmlGetLimits{NameSpace: cString(a)}), 2)
		wantCode(t, "set of a GPU in MIG mode", l.set(a, 0, 1), 3)
		wantCode(t, "get of a GPU in MIG mode", get(a), 3)
		l.write(t, l.topology)
		wantCode(t, "nvmlShutdown", l.Shutdown(), 0)
		wantCode(t, "set after nvmlShutdown", l.set(a, 0, 1), 1)
		wantCode(t, "get after nvmlShutdown", get(a), 1)
	})
}

// withoutRoot runs f in a thread whose effective user is not root.
func (l *limits) withoutRoot(t *testing.T, f func()) {
	t.Helper()
	for _, folder := range []string{filepath.Dir(l.dir), l.dir} {
		if err := os.Chmod(folder, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // for ever: the thread is not used again
		const keep = ^uintptr(0)
		if _, _, e := syscall.RawSyscall(syscall.SYS_SETRESUID, keep, 65534, keep); e != 0 {
			t.Errorf("give root up: %v", e)
			return
		}
		f()
	}()
	<-done
}

func TestLimitsAreLost(t *testing.T) {
	tests := map[string]struct {
		do   func(*testing.T, *limits)
		lost bool
	}{
		"an allocator ends, with persistence": {func(t *testing.T, l *limits) {
			t.Helper()
			l.start(t, groupC, nil, "--mib", "1", "--hold").want(t, took(1, 1)).end(t)
		}, false},
		"the last allocator ends, without persistence": {func(t *testing.T, l *limits) {
			t.Helper()
			l.topology.Driver.Persistence = false
			l.write(t, l.topology)
			first := l.start(t, groupC, nil, "--mib", "1", "--hold").want(t, took(1, 1))
			second := l.start(t, groupA, nil, "--mib", "1", "--hold").want(t, took(1, 1))
			first.end(t)
			l.wantLimit(t, groupA, 100, 1) // there is another
			second.end(t)
		}, true},
		"the driver is unloaded": {func(t *testing.T, l *limits) {
			t.Helper()
			driver := l.topology.Driver
			l.topology.Driver.State = vendorsim.DriverAbsent
			l.write(t, l.topology)
			l.start(t, groupA, nil, "--mib", "1").want(t, failed(1, 100))
			l.topology.Driver = driver
			l.write(t, l.topology)
			wantCode(t, "nvmlInit_v2", l.Init(), 0)
		}, true},
		"the driver is loaded for another backend": {func(t *testing.T, l *limits) {
			t.Helper()
			l.topology.Driver.MemoryAccounting = vendorsim.MemoryAccountingDmem
			l.write(t, l.topology)
			l.group(t, groupA) // with the files of dmem
		}, true},
		"the driver is broken": {func(t *testing.T, l *limits) {
			t.Helper()
			topology := l.topology.Clone()
			topology.Driver.State = vendorsim.DriverBroken
			l.write(t, topology)
			l.start(t, groupA, nil, "--mib", "1").want(t, failed(1, 999))
			l.write(t, l.topology)
			wantCode(t, "nvmlInit_v2", l.Init(), 0)
		}, false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			l := newLimits(t, vendorsim.MemoryAccountingMisc)
			l.limit(t, groupA, 100)
			tt.do(t, l)
			if tt.lost {
				l.wantNoLimit(t, groupA)
				l.start(t, groupA, nil, "--mib", "101", "--hold").want(t, took(101, 101))
				return
			}
			l.wantLimit(t, groupA, 100, 0)
		})
	}
}

func TestPersistenceMode(t *testing.T) {
	l := newLimits(t, vendorsim.MemoryAccountingMisc)
	for _, want := range []bool{true, false} {
		l.topology.Driver.Persistence = want
		l.write(t, l.topology)
		mode := int32(7)
		wantCode(t, "nvmlDeviceGetPersistenceMode", l.Persistence(l.gpu, &mode), 0)
		if (mode == 1) != want || mode > 1 {
			t.Errorf("persistence mode is %d with persistence %t", mode, want)
		}
	}
}

// TestProcessCannotChooseItsLimit: what a pod sets is of no use to it.
func TestProcessCannotChooseItsLimit(t *testing.T) {
	l := newLimits(t, vendorsim.MemoryAccountingMisc)
	l.limit(t, groupA, 100)
	elsewhere := t.TempDir()
	other := l.topology.Clone()
	other.Driver.MemoryAccounting, other.ControlGroups = vendorsim.MemoryAccountingOff, vendorsim.ControlGroups{}
	if err := other.Write(filepath.Join(elsewhere, vendorsim.TopologyName)); err != nil {
		t.Fatal(err)
	}
	l.start(t, groupA, func(c *exec.Cmd) {
		c.Dir = elsewhere
		c.Env = append(os.Environ(),
			"NVIDIA_GPU_MEMORY_LIMIT=5000", "NVIDIA_GPU_MEMORY_REQUEST=5000", "NVIDIA_VISIBLE_DEVICES=all",
			"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=4G", "CUDA_MPS_PIPE_DIRECTORY="+elsewhere, "CUDA_VISIBLE_DEVICES=1",
			"DIVVY_SIM_TOPOLOGY="+filepath.Join(elsewhere, vendorsim.TopologyName), "TMPDIR="+elsewhere, "XDG_RUNTIME_DIR="+elsewhere)
	}, "--mib", "100", "--mib", "1", "--hold").want(t, took(100, 100), refused(1, 100))
	l.wantLimit(t, groupA, 100, 100)
}

// TestManyProcesses: the sum of what they get is the limit, exactly.
func TestManyProcesses(t *testing.T) {
	forEachAccounting(t, func(t *testing.T, l *limits) {
		const processes, limit = 20, 3000
		l.limit(t, groupA, limit)
		args := append(slices.Repeat([]string{"--mib", "70"}, 5), slices.Repeat([]string{"--mib", "1"}, 20)...)
		var all []*allocator
		for range processes {
			all = append(all, l.start(t, groupA, nil, append(args, "--hold")...))
		}
		var total [processes]int
		var wait sync.WaitGroup
		for i, a := range all {
			wait.Go(func() {
				for range len(args) / 2 {
					var n int
					if !a.out.Scan() {
						t.Errorf("process %d ended", i)
					} else if _, err := fmt.Sscanf(a.out.Text(), "allocated %d MiB, %d", &n, &total[i]); err != nil &&
						!strings.HasSuffix(a.out.Text(), ": out of memory, code 2") {
						t.Errorf("process %d wrote %q", i, a.out.Text())
					}
				}
			})
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			wait.Wait()
		}()
		for running := true; running; { // the daemon reads meanwhile
			got := nvmlGetLimits{NameSpace: cString(l.group(t, groupA))}
			wantCode(t, "nvmlDeviceGetMemoryLimits_v1", l.Get(l.gpu, &got), 0)
			if got.Used > limit*mib {
				t.Errorf("%d bytes are in use", got.Used)
			}
			select {
			case <-done:
				running = false
			case <-time.After(10 * time.Millisecond):
			}
		}
		sum := 0
		for _, n := range total {
			sum += n
		}
		if sum != limit {
			t.Errorf("the processes got %d MiB of %d", sum, limit)
		}
		l.wantLimit(t, groupA, limit, limit)
		for _, a := range all {
			a.end(t)
		}
		l.wantLimit(t, groupA, limit, 0)
	})
}

func TestMemoryIsCapped(t *testing.T) {
	forEachAccounting(t, func(t *testing.T, l *limits) {
		memory := func() nvmlMemoryV2 {
			t.Helper()
			m := nvmlMemoryV2{Version: uint32(unsafe.Sizeof(nvmlMemoryV2{})) | 2<<24}
			wantCode(t, "nvmlDeviceGetMemoryInfo_v2", l.MemoryV2(l.gpu, &m), 0)
			return nvmlMemoryV2{Total: m.Total / mib, Free: m.Free / mib, Used: m.Used / mib}
		}
		want := func(when string, total, free uint64) {
			t.Helper()
			if diff := cmp.Diff(nvmlMemoryV2{Total: total, Free: free, Used: total - free}, memory()); diff != "" {
				t.Errorf("%s (-want +got):\n%s", when, diff)
			}
		}
		place := func(path string) {
			t.Helper()
			if err := l.topology.ControlGroups.Place(l.dir, os.Getpid(), path); err != nil {
				t.Fatal(err)
			}
		}
		place(groupA)
		want("without limits", 10000, 10000)
		l.limit(t, groupA, 3000)
		l.start(t, groupA, nil, "--mib", "1000", "--hold").want(t, took(1000, 1000))
		want("inside", 3000, 2000)
		full := l.start(t, groupC, nil, "--mib", "8500", "--hold").want(t, took(8500, 8500))
		want("inside, and the device is almost full", 3000, 500)
		full.end(t)
		place(groupC)
		want("outside", 10000, 9000)
		var m nvmlMemory
		wantCode(t, "nvmlDeviceGetMemoryInfo", l.Memory(l.gpu, &m), 0)
		if m != (nvmlMemory{Total: 10000 * mib, Free: 9000 * mib, Used: 1000 * mib}) {
			t.Errorf("memory: %+v", m)
		}
	})
}

func TestAllocatorsAreListed(t *testing.T) {
	l := newLimits(t, vendorsim.MemoryAccountingMisc)
	l.topology.Processes = []vendorsim.Process{{PID: 4711, MemoryMiB: vendorsim.UnknownMemory}}
	l.write(t, l.topology)
	list := func() []nvmlProcess {
		t.Helper()
		got := make([]nvmlProcess, 4)
		n := uint32(len(got))
		wantCode(t, "nvmlDeviceGetComputeRunningProcesses_v3", l.Processes(l.gpu, &n, &got[0]), 0)
		return got[:n]
	}
	a := l.start(t, groupA, nil, "--mib", "10", "--mib", "20", "--hold").want(t, took(10, 10), took(20, 30))
	// In a pid namespace of its own it has number 1, and here another.
	b := l.start(t, groupB, func(c *exec.Cmd) { c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID} },
		"--mib", "40", "--hold").want(t, took(40, 40))
	l.start(t, groupA, nil, "--device", "1", "--mib", "5", "--hold").want(t, took(5, 5))
	const none = ^uint32(0)
	want := []nvmlProcess{
		{4711, ^uint64(0), none, none}, {uint32(a.cmd.Process.Pid), 30 * mib, none, none}, {uint32(b.cmd.Process.Pid), 40 * mib, none, none},
	}
	if diff := cmp.Diff(want, list()); diff != "" {
		t.Errorf("processes (-want +got):\n%s", diff)
	}
	n := uint32(2)
	wantCode(t, "nvmlDeviceGetComputeRunningProcesses_v3 into too little", l.Processes(l.gpu, &n, &make([]nvmlProcess, 2)[0]), 7)
	if n != 3 {
		t.Errorf("%d processes, want 3", n)
	}
	b.end(t)
	if diff := cmp.Diff(want[:2], list()); diff != "" {
		t.Errorf("processes after one ended (-want +got):\n%s", diff)
	}
}

// TestHierarchyOfVersion1: the kernel says where a process is, in a hierarchy of version 1.
func TestHierarchyOfVersion1(t *testing.T) {
	data, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Skip(err)
	}
	var hierarchy, path string
	for line := range strings.Lines(string(data)) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(fields) == 3 && fields[1] != "" && fields[2] != "/" && !strings.Contains(fields[2], "..") {
			controllers := strings.Split(fields[1], ",")
			hierarchy, path = controllers[len(controllers)-1], fields[2]
		}
	}
	if hierarchy == "" {
		t.Skip("this process is in no control group of version 1 below the root")
	}
	l := newLimits(t, vendorsim.MemoryAccountingMisc)
	l.topology.ControlGroups = vendorsim.ControlGroups{Root: "cgroup", Hierarchy: hierarchy}
	l.write(t, l.topology)
	start := func() *allocator {
		t.Helper()
		a := &allocator{cmd: exec.Command(l.alloc, "--library", filepath.Join(l.dir, "libnvidia-ml.so.1"), "--mib", "101", "--hold")}
		out, err := a.cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		a.out = bufio.NewScanner(out)
		if err := a.cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { a.end(t) })
		return a
	}
	start().want(t, failed(101, 999)) // the view does not have its group
	folder := l.group(t, path)
	a := start().want(t, took(101, 101))
	a.end(t)
	wantCode(t, "nvmlDeviceSetMemoryLimits_v1", l.set(folder, 0, 100), 0)
	start().want(t, refused(101, 0))
}

// TestControlGroupsOfTheMachine: without a view, and without version 2 there, nothing can be limited.
func TestControlGroupsOfTheMachine(t *testing.T) {
	var system unix.Statfs_t
	if err := unix.Statfs("/sys/fs/cgroup", &system); err != nil || system.Type == unix.CGROUP2_SUPER_MAGIC {
		t.Skip("this machine has control groups of version 2")
	}
	l := newLimits(t, vendorsim.MemoryAccountingMisc)
	l.topology.ControlGroups = vendorsim.ControlGroups{}
	l.write(t, l.topology)
	for _, path := range []string{"/sys/fs/cgroup", filepath.Join(l.dir, "cgroup", groupA)} {
		wantCode(t, "nvmlDeviceSetMemoryLimits_v1 of "+path, l.set(path, 0, 100), 17)
	}
	l.start(t, groupA, nil, "--mib", "101", "--hold").want(t, took(101, 101))
}

func TestStateThatIsBroken(t *testing.T) {
	l := newLimits(t, vendorsim.MemoryAccountingMisc)
	l.limit(t, groupA, 100)
	l.limit(t, groupB, 100)
	file := l.topology.StateFiles(l.dir)[0]
	whole, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	write := func(data []byte) {
		t.Helper()
		if err := os.WriteFile(file, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	// A process that is killed while it writes leaves one copy behind: here the newer is spoilt.
	torn := slices.Clone(whole)
	second := 1 << 20
	torn[second+60] ^= 1
	write(torn)
	l.wantLimit(t, groupA, 100, 0)
	l.wantNoLimit(t, groupB)
	torn[60] ^= 1
	for name, data := range map[string][]byte{"both copies": torn, "text": []byte("no state\n"), "a part": whole[:50]} {
		write(data)
		path := l.group(t, groupA)
		wantCode(t, "get with "+name, l.Get(l.gpu, &nvmlGetLimits{NameSpace: cString(path)}), 999)
		wantCode(t, "set with "+name, l.set(path, 0, 1), 999)
		l.start(t, groupA, nil, "--mib", "1").want(t, failed(1, 999))
		var n uint32
		wantCode(t, "processes with "+name, l.Processes(l.gpu, &n, nil), 999)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	l.wantNoLimit(t, groupA)
	l.limit(t, groupA, 100)
	l.start(t, groupA, nil, "--mib", "101", "--hold").want(t, refused(101, 0))
}

// TestKilledWhileAllocating: processes that die at any moment take nothing with them and leave nothing behind.
func TestKilledWhileAllocating(t *testing.T) {
	l := newLimits(t, vendorsim.MemoryAccountingMisc)
	l.limit(t, groupA, 1000)
	for i := range 20 {
		a := l.start(t, groupA, nil, slices.Repeat([]string{"--mib", "1"}, 60)...)
		time.Sleep(time.Duration(i%10) * time.Millisecond)
		a.end(t)
	}
	l.wantLimit(t, groupA, 1000, 0)
	l.start(t, groupA, nil, "--mib", "1000", "--mib", "1", "--hold").want(t, took(1000, 1000), refused(1, 1000))
}

// TestStateElsewhere: the driver's folder is where the topology says.
func TestStateElsewhere(t *testing.T) {
	l := newLimits(t, vendorsim.MemoryAccountingMisc)
	l.topology.Driver.Run = filepath.Join(t.TempDir(), "run")
	l.write(t, l.topology)
	wantCode(t, "set without the folder", l.set(l.group(t, groupA), 0, 1), 999)
	if err := os.Mkdir(l.topology.Driver.Run, 0o755); err != nil {
		t.Fatal(err)
	}
	l.limit(t, groupA, 100)
	l.start(t, groupA, nil, "--mib", "100", "--mib", "1", "--hold").want(t, took(100, 100), refused(1, 100))
	l.wantLimit(t, groupA, 100, 100)
}

func TestLibraryWithoutLimits(t *testing.T) {
	topology := vendorsim.Topology{Library: vendorsim.Library{Lacks: []string{"nvmlDeviceSetMemoryLimits_v1"}}}
	file, err := vendorsim.Build(t.Context(), vendorsim.NVIDIA, t.TempDir(),
		vendorsim.Without(topology.LibraryOf(vendorsim.NVIDIA).Lacks...))
	if err != nil {
		t.Fatal(err)
	}
	handle, err := purego.Dlopen(file, purego.RTLD_LAZY|purego.RTLD_LOCAL)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := purego.Dlsym(handle, "nvmlDeviceSetMemoryLimits_v1"); err == nil {
		t.Error("the library has a function that it lacks")
	}
	if _, err := purego.Dlsym(handle, "nvmlDeviceGetMemoryLimits_v1"); err != nil {
		t.Error(err)
	}
}

func TestStructsOfLimits(t *testing.T) {
	if s, g := unsafe.Sizeof(nvmlSetLimits{}), unsafe.Sizeof(nvmlGetLimits{}); s != 24 || g != 32 {
		t.Errorf("the structs have %d and %d bytes, want 24 and 32", s, g)
	}
}
