package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// machine reports what the driver and the kernel are and how they are set.
func (t *test) machine(ctx context.Context) (err error) {
	t.title("Driver, kernel and modes")
	if t.inspected, err = inspect(ctx); err != nil {
		return err
	}
	t.checks.Equal("driver that another process sees", t.inspected.Driver, t.found.Driver)
	cgroups := cgroupsOf(t.root)
	t.table(table{Head: []string{"", ""}, Rows: [][]string{
		{"operating system", osName(t.root) + ", " + runtime.GOARCH},
		{"kernel", kernelRelease()},
		{"driver", t.found.Driver},
		{"NVML", t.inspected.NVML},
		{"CUDA of the driver", t.found.CUDA},
		{"cgroup", cgroups.String()},
		{"controllers", cmp.Or(strings.Join(cgroups.Controllers, " "), "none")},
		{"dmem among them", strconv.FormatBool(slices.Contains(cgroups.Controllers, "dmem"))},
	}})
	if !t.simulated {
		t.checks.True("the version of cgroup is known", cgroups.Version != 0, cgroups.String())
	}
	rows := [][]string{}
	for _, gpu := range t.inspected.GPUs {
		rows = append(rows, []string{fmt.Sprint(gpu.Index), gpu.Persistence.Text, gpu.MIG.Text, gpu.Compute.Text})
		t.checks.True(fmt.Sprintf("GPU %d has a persistence mode, a MIG mode and a compute mode", gpu.Index),
			gpu.Persistence.Known && gpu.MIG.Known && gpu.Compute.Known,
			strings.Join([]string{gpu.Persistence.Text, gpu.MIG.Text, gpu.Compute.Text}, "; "))
	}
	t.table(table{Head: []string{"GPU", "persistence mode", "MIG mode", "compute mode"}, Rows: rows})
	parameters, err := os.ReadFile(filepath.Join(t.root, "proc/driver/nvidia/params"))
	if err != nil {
		t.note("The parameters of the kernel module are not known: %v", errors.Unwrap(err))
		return nil
	}
	t.table(table{Head: []string{"parameter of the module nvidia", "value"}, Rows: moduleParameters(string(parameters))})
	return nil
}

// moduleParameters are the lines "name: value" of the driver's file.
func moduleParameters(text string) (rows [][]string) {
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(line, ":"); ok {
			rows = append(rows, []string{strings.TrimSpace(name), strings.TrimSpace(value)})
		}
	}
	return rows
}

// cgroups says which control groups the kernel offers.
type cgroups struct {
	// Version is 1 or 2, 0 if it is not known.
	Version int
	// Controllers are those of version 2.
	Controllers []string
	// Below is true if the process does not see the root of the hierarchy, which may have
	// more controllers.
	Below bool
}

// cgroupsOf reads the cgroup file system of a machine.
func cgroupsOf(root string) cgroups {
	dir := filepath.Join(root, "sys/fs/cgroup")
	controllers, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	switch {
	case err == nil:
		// The root of the hierarchy has no type.
		_, err := os.Stat(filepath.Join(dir, "cgroup.type"))
		return cgroups{Version: 2, Controllers: strings.Fields(string(controllers)), Below: err == nil}
	case errors.Is(err, fs.ErrNotExist):
		if entries, err := os.ReadDir(dir); err == nil && len(entries) > 0 {
			return cgroups{Version: 1}
		}
	}
	return cgroups{}
}

// String is the version in words.
func (c cgroups) String() string {
	switch {
	case c.Version == 0:
		return "unknown"
	case c.Below:
		return fmt.Sprintf("version %d, seen from below the root: the kernel may have more controllers", c.Version)
	default:
		return fmt.Sprintf("version %d", c.Version)
	}
}

func kernelRelease() string {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return "unknown: " + err.Error()
	}
	return unix.ByteSliceToString(name.Release[:])
}

// osName is the name of the distribution.
func osName(root string) string {
	data, err := os.ReadFile(filepath.Join(root, "etc/os-release"))
	if err == nil {
		for line := range strings.Lines(string(data)) {
			if name, ok := strings.CutPrefix(strings.TrimSpace(line), "PRETTY_NAME="); ok {
				return strings.Trim(name, `"'`)
			}
		}
	}
	return "unknown"
}

// memoryLimits reports whether the driver can limit memory.
func (t *test) memoryLimits(context.Context) error {
	t.title("Memory limits of the driver")
	var rows [][]string
	for _, name := range limitFunctions {
		rows = append(rows, []string{name, strconv.FormatBool(t.inspected.Exported[name])})
	}
	t.table(table{Head: []string{"function", "exported by libnvidia-ml"}, Rows: rows})
	text, right := limitsVerdict(t.found.Driver, t.inspected.Exported)
	t.checks.True("the functions that limit memory match the driver's release", right, text)
	return nil
}

// limitsVerdict says what it means that these of the limitFunctions are exported, and
// whether it goes with the driver's release.
func limitsVerdict(driver string, exported map[string]bool) (text string, right bool) {
	major, _, _ := strings.Cut(driver, ".")
	release, err := strconv.Atoi(major)
	var missing []string
	for _, name := range limitFunctions {
		if !exported[name] {
			missing = append(missing, name)
		}
	}
	switch {
	case len(missing) == 0:
		return "both are exported", true
	case len(missing) < len(limitFunctions):
		return "only " + strings.Join(missing, ", ") + " is missing", false
	case err != nil:
		return fmt.Sprintf("both are missing, and the driver's version %q has no number", driver), false
	case release < firstWithLimits:
		return fmt.Sprintf("both are missing because the driver %s is older than %d; it enforces no limit of memory "+
			"(isolation tier none)", driver, firstWithLimits), true
	default:
		return fmt.Sprintf("both are missing, although the driver %s is not older than %d", driver, firstWithLimits), false
	}
}
