package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
	"github.com/divvy-gpu/divvy/lab/internal/checks"
	"github.com/divvy-gpu/divvy/lab/internal/nvidiahost"
)

// Nothing may take a machine without a GPU for a successful test.
func TestWithoutAGPU(t *testing.T) {
	var out strings.Builder
	report := filepath.Join(t.TempDir(), "report.md")
	err := run(t.Context(), &out, options{root: t.TempDir(), watch: time.Second, report: report})
	if !errors.Is(err, errNoGPU) || exitCode(err) != 3 {
		t.Errorf("got exit code %d, %v; want 3 and that there is no GPU\n%s", exitCode(err), err, &out)
	}
	if _, err := os.Stat(report); !os.IsNotExist(err) {
		t.Errorf("there is a report of nothing: %v", err)
	}
}

// A driver that does not answer although there is a GPU is a failure.
func TestWithABrokenDriver(t *testing.T) {
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "dev"), 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(root, "dev/nvidia0"), "", 0o600)
	var out strings.Builder
	if err := run(t.Context(), &out, options{root: root, watch: time.Second}); exitCode(err) != 1 {
		t.Errorf("got exit code %d, %v; want 1\n%s", exitCode(err), err, &out)
	}
}

// The versions of simulated drivers.
const (
	withoutLimits = "595.91.07"
	withLimits    = "615.71.09" // which the library here does not go with: it lacks the functions
)

// machine is a simulated machine with GPUs.
type machine struct {
	t        *testing.T
	topology vendorsim.Topology
	options  options
}

// newMachine installs NVIDIA's driver for four GPUs, one of which a process uses.
func newMachine(t *testing.T) *machine {
	t.Helper()
	m := &machine{t: t, topology: vendorsim.Topology{
		Driver:    vendorsim.Driver{Version: withoutLimits},
		Library:   vendorsim.Library{Lacks: limitFunctions},
		Cards:     vendorsim.GPUs(4, 40<<10),
		Processes: []vendorsim.Process{{Card: 1, PID: os.Getpid(), MemoryMiB: 500}},
	}}
	m.topology.Cards[1].UsedMiB = 100
	data, err := m.topology.Encode()
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	if err := nvidiahost.InstallDriver(t.Context(), root, withoutLimits, data); err != nil {
		if os.Getuid() != 0 {
			t.Skipf("only root can make device nodes: %v", err)
		}
		t.Fatal(err)
	}
	library := filepath.Join(root, nvidiahost.Libraries, vendorsim.LibraryName(vendor))
	m.options = options{
		root: root, library: library, watch: time.Second, simulated: true,
		libcuda: filepath.Join(root, "no-libcuda.so.1"), nvidiaCTK: filepath.Join(root, "no-nvidia-ctk"),
		report: filepath.Join(root, "report.md"),
	}
	m.put("proc/driver/nvidia/params",
		"ModifyDeviceFiles: 1\nRegistryDwords: \"\"\nExcludedGpus: \""+m.topology.Cards[3].UUID+"\"\n", 0o444)
	m.put("sys/fs/cgroup/cgroup.controllers", "cpu io memory pids dmem\n", 0o444)
	m.put("etc/os-release", "NAME=Linux\nPRETTY_NAME=\"Simulated Linux 1\"\n", 0o444)
	return m
}

func (m *machine) put(path, text string, mode os.FileMode) {
	m.t.Helper()
	path = filepath.Join(m.options.root, path)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		m.t.Fatal(err)
	}
	write(m.t, path, text, mode)
}

// run runs the whole test with the topology as it is now and returns what it prints, its
// report and its error.
func (m *machine) run(o options) (out, report string, err error) {
	return m.with(o, func(text *strings.Builder) error { return run(m.t.Context(), text, o) })
}

// driver is run without kubelet.
func (m *machine) driver() (out, report string, err error) {
	o := m.options
	return m.with(o, func(text *strings.Builder) error {
		tt := &test{options: o, record: record{out: text, checks: checks.Checks{Out: text}}}
		err := tt.driver(m.t.Context())
		return errors.Join(err, tt.backend.Close(), tt.write(o.report, time.Now(), "all"), tt.checks.Err())
	})
}

func (m *machine) with(o options, do func(*strings.Builder) error) (out, report string, err error) {
	m.t.Helper()
	data, err := m.topology.Encode()
	if err != nil {
		m.t.Fatal(err)
	}
	if err := nvidiahost.SetTopology(o.root, data); err != nil {
		m.t.Fatal(err)
	}
	var text strings.Builder
	err = do(&text)
	if errors.Is(err, errNoGPU) {
		return text.String(), "", err
	}
	page, readErr := os.ReadFile(o.report)
	if readErr != nil {
		m.t.Errorf("%v\n%s", readErr, &text)
	}
	return text.String(), string(page), err
}

// wants fails the test unless the report has the texts, and the run the outcome.
func wants(t *testing.T, out, report string, err error, failed bool, texts ...string) {
	t.Helper()
	if (err != nil) != failed || errors.Is(err, errNoGPU) {
		t.Errorf("got %v\n%s", err, out)
	}
	for _, text := range texts {
		if !strings.Contains(report, text) {
			t.Errorf("the report has no %q:\n%s", text, report)
		}
	}
}

// The whole test on simulated GPUs, and some that must fail.
func TestOnSimulatedGPUs(t *testing.T) {
	m := newMachine(t)
	t.Run("a lab on the machine does not look like success", func(t *testing.T) {
		o := m.options
		o.simulated = false
		if out, _, err := m.run(o); exitCode(err) != exitNoGPU {
			t.Errorf("got exit code %d, %v; want %d\n%s", exitCode(err), err, exitNoGPU, out)
		}
	})
	t.Run("healthy, without NVIDIA's toolkit and without CUDA", func(t *testing.T) {
		out, report, err := m.run(m.options)
		wants(t, out, report, err, false,
			"| operating system | Simulated Linux 1, ", "| driver | 595.91.07 |", "| cgroup | version 2 |", "| dmem among them | true |",
			"| ModifyDeviceFiles | 1 |", "| ExcludedGpus | \"GPU-a1000000...\" |", "| 3 | off | off | default |",
			"| nvmlDeviceSetMemoryLimits_v1 | false |", "because the driver 595.91.07 is older than 615", "(isolation tier none) | ok |",
			"| GPU 1 uses at least what its processes use: 500 MiB of processes, 600 MiB used | ok |",
			"| 1 | 1 | 0 | 0 | 0 | 0 | 500 | 600 | 0 | 40360 | 40960 |", "MPS is not running", "pid namespace",
			"The size of a CUDA context was not measured: ", "Divvy's specification has no hooks: the program",
			"There is no nvidia-ctk", "No container was started: the GPUs are simulated.", "MPS was not started: the GPUs are simulated.",
			": all are right.")
		for _, secret := range []string{m.topology.Cards[0].UUID, m.topology.Cards[0].Serial} {
			if strings.Contains(report, secret) {
				t.Errorf("the report has %s:\n%s", secret, report)
			}
		}
		if strings.Contains(report, "**") {
			t.Errorf("the report has a difference:\n%s", report)
		}
	})
	t.Run("one is lost", func(t *testing.T) {
		m.topology.Cards[2].Lost = true
		defer func() { m.topology.Cards[2].Lost = false }()
		if out, _, err := m.run(m.options); err == nil || errors.Is(err, errNoGPU) {
			t.Errorf("got %v\n%s", err, out)
		}
	})
	t.Run("a new driver without the functions that limit memory", func(t *testing.T) {
		m.topology.Driver.Version = withLimits
		defer func() { m.topology.Driver.Version = withoutLimits }()
		out, report, err := m.driver()
		wants(t, out, report, err, true, "although the driver 615.71.09 is not older than 615 | **differs** |")
	})
}

// A process with a context, and a driver whose list of processes lacks it.
func TestContextOnSimulatedGPUs(t *testing.T) {
	m := newMachine(t)
	m.options.libcuda = buildCUDA(t, m)
	namespace, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		t.Fatal(err)
	}
	const notMeasured = "The size of a CUDA context was not measured: "
	for how, tt := range map[string]struct {
		failed bool
		text   string
	}{
		"listed":   {false, "| 0 | 12.8 | 132 | 300 | 300 |"},
		"unlisted": {namespace == hostPIDs, "| 0 | 12.8 | 132 | not listed | 0 |"},
		"busy":     {false, notMeasured + "the GPU is in use: cuCtxCreate returns 46."},
		"fault":    {true, "| a process creates a CUDA context: cuCtxCreate returns 999 | **differs** |"},
		"crash":    {true, "| a process creates a CUDA context: "},
	} {
		t.Run(how, func(t *testing.T) {
			t.Setenv("SIMULATED_CONTEXT", how)
			out, report, err := m.driver()
			wants(t, out, report, err, tt.failed, tt.text)
		})
	}
	if err := os.Remove(filepath.Join(m.options.root, "dev/nvidia-uvm")); err != nil {
		t.Fatal(err)
	}
	out, report, err := m.driver()
	wants(t, out, report, err, false, notMeasured+"there is no /dev/nvidia-uvm")
}

// buildCUDA compiles a libcuda whose contexts NVML's stand-in lists.
func buildCUDA(t *testing.T, m *machine) string {
	t.Helper()
	topology := filepath.Join(m.options.root, nvidiahost.Libraries, vendorsim.TopologyName)
	source := fmt.Sprintf(`
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int cuInit(unsigned flags) { return flags ? 1 : 0; }
int cuDriverGetVersion(int *out) { *out = 12080; return 0; }
int cuDeviceGet(int *out, int number)
{
	*out = 7;
	return number == 0 && strncmp(getenv("CUDA_VISIBLE_DEVICES"), "GPU-", 4) == 0 ? 0 : 101;
}
int cuDeviceGetAttribute(int *out, int which, int device) { *out = 132; return which == 16 && device == 7 ? 0 : 1; }
int cuMemAlloc_v2(void **out, size_t bytes) { (void)out; (void)bytes; return 999; }
int cuCtxCreate_v2(void **out, unsigned flags, int device)
{
	const char *how = getenv("SIMULATED_CONTEXT");
	FILE *f;

	(void)flags;
	*out = &device;
	if (device != 7)
		return 101;
	if (strcmp(how, "busy") == 0)
		return 46;
	if (strcmp(how, "fault") == 0)
		return 999;
	if (strcmp(how, "crash") == 0)
		abort();
	if (strcmp(how, "unlisted") == 0)
		return 0;
	f = fopen(%q, "a");
	if (!f)
		return 999;
	fprintf(f, "\n[process 99]\ncard = 0\npid = %%d\nmib = 300\n", getpid());
	fclose(f);
	return 0;
}
`, topology)
	path := filepath.Join(m.options.root, "libcuda.so.1")
	cmd := exec.CommandContext(t.Context(), "cc", "-shared", "-fPIC", "-o", path, "-x", "c", "-")
	cmd.Stdin = strings.NewReader(source)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return path
}

// NVIDIA's own program describes the GPUs, and another one that describes more.
func TestSpecificationOnSimulatedGPUs(t *testing.T) {
	m := newMachine(t)
	toolkit := filepath.Join(t.TempDir(), "nvidia-ctk")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", toolkit, toolkitModule+"/cmd/nvidia-ctk")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	m.put("usr/bin/nvidia-cdi-hook", "#!/bin/sh\n", 0o755)
	m.options.nvidiaCTK = filepath.Join(m.options.root, "usr/bin/nvidia-ctk")
	// The program sees the simulated root as one, and is to describe it as the host's.
	script := func(release, more string) {
		m.put("usr/bin/nvidia-ctk", fmt.Sprintf(`#!/bin/sh -e
root=%[1]s
if [ "$1" = --version ]; then echo "NVIDIA Container Toolkit CLI version %[3]s"; exit; fi
%[2]s "$@" --driver-root=$root --nvidia-cdi-hook-path=/usr/bin/nvidia-cdi-hook >$root/spec.json
sed "s#$root##g; %[4]s" $root/spec.json
`, m.options.root, toolkit, release, more), 0o755)
	}
	const (
		everything = ""
		oneMore    = `s#\"NVIDIA_VISIBLE_DEVICES=void\"#&,\"SURPRISE=1\"#`
	)
	for name, tt := range map[string]struct {
		release, change string
		failed          bool
		texts           []string
	}{
		"the same release": {libraryRelease(), everything, false, []string{
			"| Divvy | kind nvidia.divvy.dev/gpu | a kind of its own", "| nvidia-ctk | device all | Divvy names each device",
			"| nvidia-ctk | device 3 | Divvy names devices by UUID alone", "apply-cuda-memory-limits", "Divvy disables this hook",
			"every difference from nvidia-ctk's specification is explained: "}},
		"another variable": {libraryRelease(), oneMore, true, []string{
			"| nvidia-ctk | variable SURPRISE=1 | **unexplained** |"}},
		"another variable of another release": {"1.17.8", oneMore, false, []string{
			"| nvidia-ctk | variable SURPRISE=1 | nvidia-ctk 1.17.8 is another"}},
	} {
		t.Run(name, func(t *testing.T) {
			script(tt.release, tt.change)
			out, report, err := m.driver()
			wants(t, out, report, err, tt.failed, tt.texts...)
		})
	}
	t.Run("nvidia-ctk fails", func(t *testing.T) {
		m.put("usr/bin/nvidia-ctk", "#!/bin/sh\necho 1.2.3\n[ \"$1\" = --version ] || { echo no driver >&2; exit 1; }\n", 0o755)
		out, report, err := m.driver()
		wants(t, out, report, err, true, "| nvidia-ctk cdi generate: exit status 1: no driver | **differs** |")
	})
}

// write writes a file, in the place of one that is there.
func write(t *testing.T, path, text string, mode os.FileMode) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
}
