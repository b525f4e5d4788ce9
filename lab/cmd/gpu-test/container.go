package main

import (
	"context"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	corev1 "k8s.io/api/core/v1"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
)

// programInside is where this program is in a container.
const programInside = "/gpu-test"

// byCDI makes containers reach their devices by specifications alone.
var byCDI = []config.Injection{config.InjectCDI}

// containers are the parts of the test that start containers.
type containers struct{ *test }

// program runs a CUDA program in a container that has nothing of the driver but what the
// CDI devices of its pod put there.
func (t containers) program(ctx context.Context) (err error) {
	t.title("A CUDA program in a container")
	if why := t.withoutContainers(); why != "" {
		t.note("No container was started: %s.", why)
		return nil
	}
	if err := t.node.offerBy(byCDI, byGB); err != nil {
		return err
	}
	t.offered(ctx, memory, t.units(), t.units())
	pod, err := t.node.run(ctx, memory, t.units()/t.gpus()/2)
	if err != nil {
		return err
	}
	defer t.node.kubelet.Remove(pod)
	c, err := t.start(ctx, pod, 1)
	if err != nil {
		t.checks.NoError("a container finds "+libcuda+" and creates a CUDA context", err)
		return nil
	}
	defer c.end()
	t.allocated(c, 1, cudaSuccess)
	return t.listed(ctx, c)
}

// withoutContainers returns why no CUDA program can run in a container, "" if one can.
func (t containers) withoutContainers() (why string) {
	switch {
	case t.simulated:
		return "the GPUs are simulated"
	case os.Geteuid() != 0:
		return "that needs root"
	case findProgram([]string{"runc"}) == "":
		return "there is no runc"
	}
	// Without hooks the dynamic loader of a container does not find the driver's libraries.
	if specifier, ok := t.backend.(backend.Specifier); !ok {
		return "the backend describes no devices in CDI"
	} else if _, cause := specifier.SpecCause(); cause != nil {
		return cause.Error()
	}
	_, why = gpuForContext(t.root, t.inspected)
	return why
}

// allocated checks with which code of CUDA a container's allocation has ended.
func (t containers) allocated(c heldContext, mib int, code int32) {
	t.checks.Equal(fmt.Sprintf("code of the allocation of %d MiB", mib), c.answer.Allocated, code)
}

// listed checks that the driver lists a container's process by its pid on the host.
func (t containers) listed(ctx context.Context, c heldContext) error {
	after, err := inspect(ctx)
	if err != nil {
		return err
	}
	now := after.gpu(string(c.gpu))
	found, is := now.process(c.pid)
	what := "the list of compute processes has the container's, by its pid on the host"
	if t.seesAllProcesses {
		t.checks.True(what, is, mib(found.Bytes)+" MiB")
	} else {
		t.note("Whether %s was not checked outside of the host's pid namespace: %t.", what, is)
	}
	return nil
}

// start creates a CUDA context in a container of a pod, and allocates so much memory there.
func (t containers) start(ctx context.Context, pod *corev1.Pod, mib int) (c heldContext, err error) {
	names := t.node.kubelet.Container(pod.UID, "app").CDIDevices
	if len(names) == 0 {
		return c, errors.New("divvy-node returned no CDI device for the container")
	}
	t.note("The container has the CDI devices %s.", strings.Join(names, ", "))
	dir, err := os.MkdirTemp("", "gpu")
	if err != nil {
		return c, fmt.Errorf("make a folder: %w", err)
	}
	clean := func() error { return os.RemoveAll(dir) }
	if err := makeBundle(dir, filepath.Join(t.node.dir, "cdi"), names, contextPart, libcuda, strconv.Itoa(mib)); err != nil {
		return c, errors.Join(err, clean())
	}
	pidFile := filepath.Join(dir, "pid")
	c, err = startContext(ctx, func(ctx context.Context) *exec.Cmd {
		return exec.CommandContext(ctx, "runc", "--root", filepath.Join(dir, "state"), "run", "--bundle", dir, "--pid-file", pidFile,
			filepath.Base(dir))
	})
	if err != nil {
		return c, errors.Join(err, clean())
	}
	end := c.end
	c.end = func() { end(); _ = clean() } // what stays is in the folder for temporary files
	_, device, _ := strings.Cut(names[0], "=")
	c.gpu = accel.DeviceID(device)
	if err = c.answer.err(); err == nil {
		var text []byte
		if text, err = os.ReadFile(pidFile); err == nil {
			c.pid, err = strconv.Atoi(string(text))
		}
	}
	if err != nil {
		c.end()
	}
	return c, err
}

// makeBundle makes a container that runs this program with CDI devices.
func makeBundle(dir, specs string, devices []string, args ...string) error {
	program, err := os.Executable()
	if err != nil {
		return fmt.Errorf("look for this program: %w", err)
	}
	files, err := cLibrary(program)
	if err != nil {
		return err
	}
	c := oci.Spec{
		Version: oci.Version,
		Root:    &oci.Root{Path: "rootfs"},
		Process: &oci.Process{Cwd: "/", Args: append([]string{programInside}, args...), NoNewPrivileges: true},
		Mounts: []oci.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "mode=755"}},
			readOnly(program, programInside),
		},
		Linux: &oci.Linux{
			Namespaces: []oci.LinuxNamespace{{Type: oci.PIDNamespace}, {Type: oci.MountNamespace}, {Type: oci.IPCNamespace}},
			Resources:  &oci.LinuxResources{Devices: []oci.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}},
		},
	}
	for _, file := range files {
		c.Mounts = append(c.Mounts, readOnly(file, file))
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(specs), cdi.WithAutoRefresh(false))
	if err != nil {
		return fmt.Errorf("read the CDI specifications: %w", err)
	}
	if unresolved, err := cache.InjectDevices(&c, devices...); err != nil {
		return fmt.Errorf("inject the CDI devices %v of %v: %w", unresolved, devices, err)
	}
	data, err := json.Marshal(c)
	if err != nil {
		return err
	}
	return errors.Join(
		os.MkdirAll(filepath.Join(dir, "rootfs/etc"), 0o755), // for the loader's cache, which a hook writes
		os.WriteFile(filepath.Join(dir, "config.json"), data, 0o600))
}

func readOnly(from, to string) oci.Mount {
	return oci.Mount{Destination: to, Source: from, Type: "bind", Options: []string{"bind", "ro"}}
}

// cLibrary returns the dynamic loader of a program, and those of the C library's files
// that the program and the driver's libraries need.
func cLibrary(program string) ([]string, error) {
	file, err := elf.Open(program)
	if err != nil {
		return nil, fmt.Errorf("read this program: %w", err)
	}
	defer file.Close() //nolint:errcheck // it was read
	section := file.Section(".interp")
	if section == nil {
		return nil, fmt.Errorf("%s names no dynamic loader", program)
	}
	loader, err := section.Data()
	if err != nil {
		return nil, fmt.Errorf("read this program: %w", err)
	}
	files := []string{strings.TrimRight(string(loader), "\x00")}
	mapped, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return nil, fmt.Errorf("look for the C library: %w", err)
	}
	for line := range strings.Lines(string(mapped)) {
		path := strings.TrimSpace(line[max(0, strings.Index(line, "/")):])
		if filepath.Base(path) != "libc.so.6" {
			continue
		}
		for _, name := range []string{"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"} {
			files = append(files, filepath.Join(filepath.Dir(path), name))
		}
		return files, nil
	}
	return nil, errors.New("look for the C library: this program has loaded none")
}
