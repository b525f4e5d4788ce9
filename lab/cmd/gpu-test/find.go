package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/nvidia/cdispec"
	"github.com/divvy-gpu/divvy/internal/node/backend/vendors"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

const vendor = "nvidia"

// loadedLibrary returns the NVML that this process has loaded.
func loadedLibrary() (string, error) {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return "", fmt.Errorf("look for the NVML that was loaded: %w", err)
	}
	for line := range strings.Lines(string(maps)) {
		at := strings.Index(line, "/")
		if at < 0 {
			continue
		}
		library := strings.TrimSpace(line[at:])
		if strings.HasPrefix(filepath.Base(library), "libnvidia-ml.so") {
			return library, nil
		}
	}
	return "", errors.New("look for the NVML that was loaded: there is none")
}

// standIn returns the NVML that this process has loaded if it is a stand-in,
// which has its topology beside it; else "".
func standIn() (string, error) {
	library, err := loadedLibrary()
	if err != nil {
		return "", err
	}
	if _, err := os.Stat(filepath.Join(filepath.Dir(library), vendorsim.TopologyName)); err != nil {
		return "", nil //nolint:nilerr // NVIDIA's own has no such file
	}
	return library, nil
}

// backendOptions are those of the node daemon for this machine.
func (t *test) backendOptions() backend.Options {
	return backend.Options{
		DriverRoot: t.root, HostRoot: t.root, LibraryPath: t.library,
		CDI: backend.CDIOptions{Generator: []string{self, cdispec.Command}},
	}
}

// discover finds the GPUs and prints them.
func (t *test) discover(ctx context.Context) error {
	t.title("Discovery through NVML")
	nodes, err := filepath.Glob(filepath.Join(t.root, "dev/nvidia[0-9]*"))
	if err != nil {
		return fmt.Errorf("look for device nodes: %w", err)
	}
	t.backend, err = vendors.New(vendor, t.backendOptions())
	if err != nil {
		return err
	}
	begun := time.Now()
	t.found, err = t.backend.Discover(ctx)
	took := time.Since(begun)
	unavailable := new(backend.UnavailableError)
	switch {
	// A driver that fails although there are cards is a failure.
	case errors.As(err, &unavailable) && len(nodes) == 0 && t.library == "":
		return fmt.Errorf("%w: %w", errNoGPU, err)
	case err != nil:
		return fmt.Errorf("the machine has the device nodes %v: %w", nodes, err)
	case len(t.found.Devices)+len(t.found.Faults) == 0:
		return fmt.Errorf("%w: NVML counts none", errNoGPU)
	}
	standIn, err := standIn()
	switch {
	case err != nil:
		return err
	case standIn != "" && !t.simulated:
		return fmt.Errorf("%w: %s is the stand-in of a lab, and its GPUs are simulated", errNoGPU, standIn)
	}
	t.note("Driver %s, CUDA %s; %d GPUs in %s.", t.found.Driver, t.found.CUDA, len(t.found.Devices),
		took.Round(time.Millisecond))
	rows := [][]string{}
	for _, d := range t.found.Devices {
		health := "healthy"
		if d.Health.Unhealthy {
			health = fmt.Sprintf("UNHEALTHY (%s: %s)", d.Health.Cause, d.Health.Reason)
		}
		rows = append(rows, []string{fmt.Sprint(d.Index), d.Model, string(d.ID), fmt.Sprint(d.MemoryBytes >> 20), d.PCI,
			fmt.Sprint(d.NUMANode), health})
	}
	t.table(table{Head: []string{"GPU", "model", "uuid", "memory, MiB", "PCI", "NUMA node", "health"}, Rows: rows})
	for _, l := range t.found.Links {
		t.note("Link %s - %s: %d.", l.A, l.B, l.Score)
	}
	for _, f := range t.found.Faults {
		t.note("Fault of GPU %d: %v.", f.Index, f.Err)
	}
	t.checks.Equal("GPUs that cannot be used", len(t.found.Faults), 0)
	t.checks.True("driver and CUDA versions", t.found.Driver != "" && t.found.CUDA != "", t.found.Driver+", "+t.found.CUDA)
	for _, d := range t.found.Devices {
		t.device(d)
	}
	n := len(t.found.Devices)
	t.checks.Equal("links, one for each pair of GPUs", len(t.found.Links), n*(n-1)/2)
	again, err := t.backend.Discover(ctx)
	if err != nil {
		return err
	}
	t.checks.Equal("a second discovery finds the same", ids(again), ids(t.found))
	t.compareWithSMI(ctx)
	return nil
}

// device checks what must be true of any GPU.
func (t *test) device(d accel.Device) {
	what := fmt.Sprintf("GPU %d ", d.Index)
	t.checks.True(what+"has a uuid of NVIDIA's form", strings.HasPrefix(string(d.ID), "GPU-") &&
		len(d.ID) == len("GPU-00000000-0000-0000-0000-000000000000"), string(d.ID))
	t.checks.True(what+"has a model", d.Model != "", d.Model)
	t.checks.True(what+"has memory", d.MemoryBytes > 1<<30, fmt.Sprintf("%d MiB", d.MemoryBytes>>20))
	t.checks.Equal(what+"is unhealthy", d.Health.Unhealthy, false)
	var domain, bus, device, function int
	_, err := fmt.Sscanf(d.PCI, "%04x:%02x:%02x.%x", &domain, &bus, &device, &function)
	t.checks.True(what+"has a PCI address", err == nil, d.PCI)
	if data, err := os.ReadFile(filepath.Join("/sys/bus/pci/devices", d.PCI, "numa_node")); err == nil && t.library == "" {
		want := accel.NoNUMA
		if _, err := fmt.Sscan(string(data), &want); err != nil || want < 0 {
			want = accel.NoNUMA
		}
		t.checks.Equal(what+"has the NUMA node that sysfs reports", d.NUMANode, want)
	}
	edits, err := t.backend.Edits(d.ID)
	if err != nil {
		t.checks.NoError(what+"can be given to a container", err)
		return
	}
	t.checks.Equal(what+"is named in NVIDIA_VISIBLE_DEVICES", edits.Env["NVIDIA_VISIBLE_DEVICES"], string(d.ID))
	var paths []string
	for _, node := range edits.DeviceNodes {
		paths = append(paths, node.HostPath)
		if t.library != "" {
			continue // simulated cards have nodes elsewhere, if at all
		}
		info, err := os.Stat(node.HostPath)
		if err == nil && info.Mode()&os.ModeCharDevice == 0 {
			err = fmt.Errorf("it is no character device: %v", info.Mode())
		}
		t.checks.NoError(what+"has the device node "+node.HostPath, err)
	}
	t.checks.True(what+"has its own device node and nvidiactl", slices.Contains(paths, "/dev/nvidiactl") &&
		slices.ContainsFunc(paths, func(p string) bool { return cardNode.MatchString(p) }), fmt.Sprint(paths))
}

// compareWithSMI compares with NVIDIA's own program, where it is.
func (t *test) compareWithSMI(ctx context.Context) {
	program, err := exec.LookPath("nvidia-smi")
	if err != nil || t.library != "" {
		t.note("nvidia-smi was not run.")
		return
	}
	out, err := exec.CommandContext(ctx, program, "--query-gpu=index,uuid,name,memory.total,driver_version",
		"--format=csv,noheader,nounits").Output()
	if err != nil {
		t.checks.NoError("nvidia-smi", err)
		return
	}
	var want, got []string
	for line := range strings.Lines(string(out)) {
		want = append(want, strings.TrimSpace(line))
	}
	for _, d := range t.found.Devices {
		got = append(got, fmt.Sprintf("%d, %s, %s, %d, %s", d.Index, d.ID, d.Model, d.MemoryBytes>>20, t.found.Driver))
	}
	t.checks.Equal("nvidia-smi reports the same", got, want)
}

func ids(found backend.Found) []accel.DeviceID {
	var out []accel.DeviceID
	for _, d := range found.Devices {
		out = append(out, d.ID)
	}
	return out
}
