package nvidia_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/nvidia/cdispec"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// generators are what the test's program does as the generator of a specification,
// by its first argument; each returns the exit code.
var generators = map[string]func() int{
	"generate": func() int {
		if err := cdispec.Serve(os.Stdin, os.Stdout, os.Stderr); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return 0
	},
	"hang": func() int { time.Sleep(time.Minute); return 0 },
	"crash": func() int {
		fmt.Fprintln(os.Stderr, "about to crash")
		_ = syscall.Kill(os.Getpid(), syscall.SIGSEGV)
		time.Sleep(time.Minute)
		return 0
	},
	"symbol": func() int {
		fmt.Fprintln(os.Stderr, "divvy-node: symbol lookup error: undefined symbol: nvmlNew")
		return 127
	},
	"noise": func() int { fmt.Println("hello"); return 0 },
	"flood": func() int {
		line := bytes.Repeat([]byte("x"), 1<<20)
		for range 20 {
			if _, err := os.Stdout.Write(line); err != nil {
				return 1
			}
		}
		return 0
	},
	"other-kind":   altered(func(r *cdispec.Result) { r.Spec.Kind = "nvidia.com/gpu" }),
	"no-spec":      altered(func(r *cdispec.Result) { r.Spec = nil }),
	"other-device": altered(func(r *cdispec.Result) { r.Spec.Devices[0].Name = "GPU-x" }),
	"own-path": altered(func(r *cdispec.Result) {
		r.Spec.ContainerEdits.Mounts[0].HostPath = filepath.Join(os.Getenv("HOST_ROOT"), "usr/lib/x")
	}),
	"own-path-in-hook": altered(func(r *cdispec.Result) {
		r.Spec.Devices[0].ContainerEdits.Hooks = []*cdispecs.Hook{{HookName: "createContainer", Path: "/hook",
			Args: []string{"hook", "--link", "../x::" + os.Getenv("HOST_ROOT") + "/dev/dri/x"}}}
	}),
	"invalid-edits": altered(func(r *cdispec.Result) { r.Spec.ContainerEdits.Env = []string{"no value"} }),
	"device-lacking": altered(func(r *cdispec.Result) {
		r.Spec.Devices, r.Failed = r.Spec.Devices[1:], map[string]string{r.Spec.Devices[0].Name: "it is odd"}
	}),
}

// altered is the generator with something wrong in its answer.
func altered(change func(*cdispec.Result)) func() int {
	return func() int {
		var out bytes.Buffer
		if err := cdispec.Serve(os.Stdin, &out, os.Stderr); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		var r cdispec.Result
		if err := json.Unmarshal(out.Bytes(), &r); err != nil {
			return 1
		}
		change(&r)
		if err := json.NewEncoder(os.Stdout).Encode(r); err != nil {
			return 1
		}
		return 0
	}
}

const driverVersion = "550.54.15"

// A host has a driver in a folder of its own and the device nodes of some GPUs.
type host struct {
	t    *testing.T
	root string // where this process sees it
}

const hookOfOperator = "usr/local/nvidia/toolkit/nvidia-cdi-hook"

func newHost(t *testing.T) host {
	t.Helper()
	h := host{t, t.TempDir()}
	for _, file := range []string{
		"usr/lib/x86_64-linux-gnu/libcuda.so." + driverVersion,
		"usr/lib/x86_64-linux-gnu/libnvidia-ml.so." + driverVersion,
		"usr/lib/x86_64-linux-gnu/libnvidia-ptxjitcompiler.so." + driverVersion,
		"lib/firmware/nvidia/" + driverVersion + "/gsp_ga10x.bin",
	} {
		put(t, h.root, filepath.Join("run/nvidia/driver", file), "")
	}
	h.program("run/nvidia/driver/usr/bin/nvidia-smi")
	h.program(hookOfOperator)
	for i, name := range []string{"nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"} {
		h.node(name, i)
	}
	return h
}

func (h host) program(path string) {
	h.t.Helper()
	put(h.t, h.root, path, "#!/bin/sh\n")
	if err := os.Chmod(filepath.Join(h.root, path), 0o755); err != nil {
		h.t.Fatal(err)
	}
}

func (h host) node(name string, minor int) {
	h.t.Helper()
	dir := filepath.Join(h.root, "dev")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		h.t.Fatal(err)
	}
	err := unix.Mknod(filepath.Join(dir, name), unix.S_IFCHR|0o666, int(unix.Mkdev(195, uint32(minor))))
	if os.Getuid() != 0 || err == unix.EPERM {
		h.t.Skip("device nodes can be made by root only")
	}
	if err != nil {
		h.t.Fatal(err)
	}
}

func (h host) remove(path string) {
	h.t.Helper()
	if err := os.RemoveAll(filepath.Join(h.root, path)); err != nil {
		h.t.Fatal(err)
	}
}

// options are those of a backend for the host, with that generator.
func (h host) options(generator string) backend.Options {
	h.t.Helper()
	h.t.Setenv("HOST_ROOT", h.root)
	return backend.Options{
		DriverRoot:     filepath.Join(h.root, "run/nvidia/driver"),
		HostRoot:       h.root,
		HostDriverRoot: "/",
		LibraryPath:    filepath.Join(driverRoot, libraryFolder, vendorsim.LibraryName(vendorsim.NVIDIA)),
		CDI:            backend.CDIOptions{Generator: []string{"/proc/self/exe", generator}},
	}
}

// machine returns a backend that has found two GPUs.
func (h host) machine(o backend.Options) *machine {
	h.t.Helper()
	m := newMachine(h.t, o, vendorsim.GPUs(2, 1024)...)
	m.change(func(t *vendorsim.Topology) {
		t.Drivers = map[string]vendorsim.Driver{vendorsim.NVIDIA: {Version: driverVersion}}
	})
	m.found()
	return m
}

// lines are the edits as texts, each with its kind before it.
func lines(e cdispecs.ContainerEdits) []string {
	var out []string
	for _, env := range e.Env {
		out = append(out, "env "+env)
	}
	for _, n := range e.DeviceNodes {
		out = append(out, "node "+n.Path+" from "+n.HostPath)
	}
	for _, m := range e.Mounts {
		out = append(out, "mount "+m.ContainerPath+" from "+m.HostPath)
	}
	for _, h := range e.Hooks {
		out = append(out, "hook "+h.HookName+" "+h.Path+" "+strings.Join(h.Args, " "))
	}
	return out
}

func TestCompleteSpecification(t *testing.T) {
	h := newHost(t)
	m := h.machine(h.options("generate"))
	got, err := m.Specify(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Failed) > 0 {
		t.Errorf("not described: %v", got.Failed)
	}
	common := lines(got.Common)
	for _, want := range []string{
		"env NVIDIA_VISIBLE_DEVICES=void",
		"node /dev/nvidiactl from ",
		"node /dev/nvidia-uvm from ",
		"mount /usr/lib/x86_64-linux-gnu/libcuda.so." + driverVersion + " from /run/nvidia/driver/usr/lib/x86_64-linux-gnu/libcuda.so." +
			driverVersion,
		"mount /usr/bin/nvidia-smi from /run/nvidia/driver/usr/bin/nvidia-smi",
		"mount /lib/firmware/nvidia/" + driverVersion + "/gsp_ga10x.bin from /run/nvidia/driver/lib/firmware/nvidia/" + driverVersion +
			"/gsp_ga10x.bin",
		"hook createContainer /" + hookOfOperator + " nvidia-cdi-hook update-ldcache --folder /usr/lib/x86_64-linux-gnu",
	} {
		if !slices.ContainsFunc(common, func(line string) bool { return strings.HasPrefix(line, want) }) {
			t.Errorf("the common edits have no %q; they are\n%s", want, strings.Join(common, "\n"))
		}
	}
	for i, d := range m.found().Devices {
		want := fmt.Sprintf("node /dev/nvidia%d from ", i)
		if got := lines(got.Devices[d.ID]); len(got) != 1 || !strings.HasPrefix(got[0], want) {
			t.Errorf("device %d has %q, want %q alone: no limits of memory, nothing of the other", i, got, want)
		}
	}
	if all := fmt.Sprint(common, got.Devices); strings.Contains(all, h.root) {
		t.Errorf("a path of this process is left: %s", all)
	}
}

// Other words of the configuration reach NVIDIA's library.
func TestSpecificationWithoutHooks(t *testing.T) {
	h := newHost(t)
	h.remove(hookOfOperator)
	o := h.options("generate")
	o.CDI.DisabledHooks = []string{"all"}
	got, err := h.machine(o).Specify(t.Context())
	if err != nil || len(got.Common.Hooks) > 0 || len(got.Common.Mounts) == 0 {
		t.Errorf("hooks %v, %d mounts, %v; want mounts and no hooks", got.Common.Hooks, len(got.Common.Mounts), err)
	}
}

// A generator that fails, in whatever way, is an error with its cause; the backend
// itself goes on, and can generate again.
func TestGeneratorThatFails(t *testing.T) {
	for name, want := range map[string]string{
		"hang":             "exceeded its time limit of 3s and was killed",
		"crash":            "SIGSEGV: segmentation violation",
		"symbol":           "exit status 127: divvy-node: symbol lookup error: undefined symbol: nvmlNew",
		"noise":            "read the generator's answer",
		"flood":            "exceeds 16777216 bytes",
		"other-kind":       `of kind "nvidia.com/gpu", not "nvidia.divvy.dev/gpu"`,
		"no-spec":          "has no specification",
		"other-device":     `describes "GPU-x", which is no device of this node`,
		"own-path":         "usr/lib/x, which is no path of the host",
		"invalid-edits":    `invalid environment variable`,
		"no such command!": "unknown command",
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			o := h.options(name)
			switch name {
			case "hang":
				o.CDI.Timeout = 3 * time.Second
			case "no such command!":
				o.CDI.Generator = []string{"/bin/sh", "-c", "echo unknown command >&2; exit 2"}
			}
			m := h.machine(o)
			start := time.Now()
			got, err := m.Specify(t.Context())
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("Specify = %v, %v; want an error with %q", got, err, want)
			}
			if took := time.Since(start); took > patience {
				t.Errorf("it took %v", took)
			}
			if n := len(m.found().Devices); n != 2 {
				t.Errorf("%d devices afterwards", n)
			}
		})
	}
}

// What is wrong with one device does not affect the other.
func TestDeviceThatCannotBeSpecified(t *testing.T) {
	for name, tt := range map[string]struct {
		generator, want string
		change          func(host)
	}{
		"the library fails":        {"device-lacking", "it is odd", nil},
		"a path of this container": {"own-path-in-hook", "which is no path of the host", nil},
		"its node is missing":      {"generate", "/dev lacks a device node of it", func(h host) { h.remove("dev/nvidia0") }},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			m := h.machine(h.options(tt.generator))
			if tt.change != nil {
				tt.change(h)
			}
			got, err := m.Specify(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			devices := m.found().Devices
			if err := got.Failed[devices[0].ID]; err == nil || !strings.Contains(err.Error(), tt.want) || len(got.Failed) != 1 {
				t.Errorf("not described: %v; want the first with %q", got.Failed, tt.want)
			}
			if _, ok := got.Devices[devices[1].ID]; !ok || len(got.Devices) != 1 {
				t.Errorf("described: %v; want the second alone", got.Devices)
			}
		})
	}
}

// TestSpecCause: it changes with what the specification depends on, and with nothing
// else; what is missing is named, and found once it appears.
func TestSpecCause(t *testing.T) {
	h := newHost(t)
	m := h.machine(h.options("generate"))
	cause := func() string {
		t.Helper()
		c, err := m.SpecCause()
		if err != nil || c == "" {
			t.Fatalf("SpecCause = %q, %v", c, err)
		}
		return c
	}
	first := cause()
	m.found()
	if again := cause(); again != first {
		t.Errorf("without a change: %s, then %s", first, again)
	}
	for _, step := range []struct {
		name   string
		change func()
	}{
		{"driver version", func() {
			m.change(func(t *vendorsim.Topology) { t.Drivers[vendorsim.NVIDIA] = vendorsim.Driver{Version: "560.1"} })
		}},
		{"set of devices", func() { m.change(func(t *vendorsim.Topology) { t.Cards = t.Cards[:1] }) }},
		{"a device node that appears", func() { h.node("nvidia-modeset", 9) }},
		{"another hook", func() { h.remove(hookOfOperator); h.program("usr/bin/nvidia-ctk") }},
	} {
		step.change()
		m.found()
		now := cause()
		if now == first {
			t.Errorf("%s: the cause is the same", step.name)
		}
		first = now
	}
	h.remove("usr/bin/nvidia-ctk")
	want := "the program that runs NVIDIA's CDI hooks is not on the host"
	if c, err := m.SpecCause(); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("SpecCause = %q, %v; want %q", c, err, want)
	}
	if _, err := m.Specify(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("Specify = %v; want %q", err, want)
	}
	h.program("usr/bin/nvidia-cdi-hook")
	if c := cause(); !strings.Contains(c, `"/usr/bin/nvidia-cdi-hook"`) {
		t.Errorf("cause %s", c)
	}
}

// The driver's files may appear after NVML: until then the error says what lacks.
func TestDriverFilesThatAppearLater(t *testing.T) {
	h := newHost(t)
	m := h.machine(h.options("generate"))
	libcuda := "run/nvidia/driver/usr/lib/x86_64-linux-gnu/libcuda.so." + driverVersion
	h.remove(libcuda)
	if _, err := m.Specify(t.Context()); err == nil || !strings.Contains(err.Error(), "/run/nvidia/driver has no libcuda.so") {
		t.Errorf("Specify = %v", err)
	}
	put(t, h.root, libcuda, "")
	if _, err := m.Specify(t.Context()); err != nil {
		t.Error(err)
	}
}

// Before a GPU is found there is nothing to describe.
func TestSpecCauseWithoutDevices(t *testing.T) {
	h := newHost(t)
	m := newMachine(t, h.options("generate"))
	if c, err := m.SpecCause(); c != "" || err != nil {
		t.Errorf("SpecCause = %q, %v", c, err)
	}
	m.found()
	if c, err := m.SpecCause(); c != "" || err != nil {
		t.Errorf("SpecCause without GPUs = %q, %v", c, err)
	}
}

// The names of the present and of earlier releases stand beside each other, unless
// another program writes the specification.
func TestNamesOfCDI(t *testing.T) {
	for kind, want := range map[string]string{
		"":               "[nvidia.divvy.dev/gpu=%[1]s] [k8s.device-plugin.nvidia.com/gpu=%[1]s]",
		"nvidia.com/gpu": "[nvidia.com/gpu=%[1]s] []",
	} {
		m := newMachine(t, backend.Options{CDIKind: kind}, vendorsim.GPUs(1, 1024)...)
		id := m.found().Devices[0].ID
		e, err := m.Edits(id)
		if err != nil {
			t.Fatal(err)
		}
		if got, want := fmt.Sprint(e.CDIDevices, " ", e.FormerCDIDevices), fmt.Sprintf(want, id); got != want {
			t.Errorf("with the kind %q: names %s, want %s", kind, got, want)
		}
	}
}

// The generator holds the driver, so it ends when a pause begins.
func TestPauseStopsTheGenerator(t *testing.T) {
	h := newHost(t)
	o := h.options("hang")
	o.Pause = backend.NewPause(accel.Health{})
	m := h.machine(o)
	ended := make(chan error, 1)
	go func() {
		_, err := m.Specify(t.Context())
		ended <- err
	}()
	time.Sleep(500 * time.Millisecond)
	o.Pause.Set(upgrading)
	select {
	case err := <-ended:
		if err == nil || !strings.Contains(err.Error(), "must not be used now") {
			t.Errorf("Specify = %v", err)
		}
	case <-time.After(patience):
		t.Error("the generator runs on during the pause")
	}
	if _, err := m.SpecCause(); err == nil || !strings.Contains(err.Error(), upgrading.Reason) {
		t.Errorf("SpecCause = %v, want the reason of the pause", err)
	}
}
