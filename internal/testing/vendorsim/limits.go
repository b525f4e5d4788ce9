package vendorsim

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// MemoryAccounting says how the driver limits the memory that the processes of a control
// group allocate on a device, if at all.
type MemoryAccounting string

// The ways to limit memory. Only NVIDIA's driver has any.
const (
	MemoryAccountingOff  MemoryAccounting = "off"
	MemoryAccountingMisc MemoryAccounting = "misc" // in the driver, by the nearest limited group
	MemoryAccountingDmem MemoryAccounting = "dmem" // in the kernel, by each group above a process
)

func checkMemoryAccounting(value string) error {
	switch MemoryAccounting(value) {
	case MemoryAccountingOff, MemoryAccountingMisc, MemoryAccountingDmem:
		return nil
	}
	return fmt.Errorf("memacct = \"%s\" is not dmem, misc or off", value)
}

// ControlGroups are what stands for the file systems of control groups (version 2), for
// machines on which those cannot be written. Relative paths start at the folder of the
// topology file. The zero value is the machine's own file systems.
//
// Everything that says in which group a process is comes from the topology file or the
// kernel. A process cannot choose it by its arguments or environment.
type ControlGroups struct {
	// Root is the folder that stands for /sys/fs/cgroup; each folder below it is a group.
	Root string
	// Proc stands for /proc: Proc/PID/cgroup names the group of a process, whose pid is
	// that in its own namespace. "" is /proc itself.
	Proc string
	// Hierarchy names a controller of version 1, such as "devices", or "name=systemd": the
	// path of a process there is that of its group below Root. "" is version 2.
	Hierarchy string
}

func (g ControlGroups) check() []error {
	if g == (ControlGroups{}) {
		return nil
	}
	errs := []error{checkPath("root", g.Root), checkWritable("hierarchy", g.Hierarchy)}
	if g.Proc != "" {
		errs = append(errs, checkPath("proc", g.Proc))
	}
	return errs
}

func (g ControlGroups) encode(b *strings.Builder) {
	if g == (ControlGroups{}) {
		return
	}
	fmt.Fprintf(b, "\n[cgroup]\nroot = %s\n", g.Root)
	for _, text := range []struct{ key, value string }{{"proc", g.Proc}, {"hierarchy", g.Hierarchy}} {
		if text.value != "" {
			fmt.Fprintf(b, "%s = %s\n", text.key, text.value)
		}
	}
}

// StateFiles are the files that programs make of the state of NVIDIA's driver, once there
// is any. dir is the folder of the topology file. Removing them is as good as a driver that
// was loaded again.
func (t Topology) StateFiles(dir string) []string {
	run := below(dir, t.DriverOf(NVIDIA).Run)
	return []string{filepath.Join(run, NVIDIA+"-driver.state"), filepath.Join(run, NVIDIA+"-driver.clients")}
}

// dmemFiles are the files of a control group that has the dmem controller.
var dmemFiles = []string{"dmem.current", "dmem.max", "dmem.min"}

// Make makes the control group at path, such as "/kubepods/pod1/c1", and those above it,
// and returns its folder. dir is the folder of the topology file. The group has the files
// of the dmem controller if dmem is set; the root never has.
func (g ControlGroups) Make(dir, path string, dmem bool) (string, error) {
	root := below(dir, g.Root)
	group := filepath.Join(root, path)
	if err := os.MkdirAll(group, 0o755); err != nil {
		return "", fmt.Errorf("make a control group: %w", err)
	}
	for at := group; dmem && at != root; at = filepath.Dir(at) {
		for _, name := range dmemFiles {
			if err := os.WriteFile(filepath.Join(at, name), nil, 0o644); err != nil {
				return "", fmt.Errorf("make a control group: %w", err)
			}
		}
	}
	return group, nil
}

// Place puts a process into the control group at path, in the folder that stands for
// /proc. dir is the folder of the topology file. Later allocations of the process are
// charged to that group.
func (g ControlGroups) Place(dir string, pid int, path string) error {
	of := filepath.Join(below(dir, g.Proc), fmt.Sprint(pid))
	if err := os.MkdirAll(of, 0o755); err != nil {
		return fmt.Errorf("place a process: %w", err)
	}
	// In one step: the process may be reading it.
	file := filepath.Join(of, "cgroup")
	if err := os.WriteFile(file+".new", []byte("0::"+path+"\n"), 0o644); err != nil {
		return fmt.Errorf("place a process: %w", err)
	}
	if err := os.Rename(file+".new", file); err != nil {
		return fmt.Errorf("place a process: %w", err)
	}
	return nil
}

// below returns a path of a topology file in folder dir.
func below(dir, path string) string {
	if filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(dir, path)
}

func (p *parser) beginControlGroups() error {
	p.section = "[cgroup]"
	if p.groups != 0 {
		return errors.New("section [cgroup] is given twice")
	}
	p.groups, p.inGroups = p.line, true
	p.key = p.controlGroupsKey
	return nil
}

func (p *parser) controlGroupsKey(key, value string) error {
	g := &p.topology.ControlGroups
	switch key {
	case "root":
		g.Root = value
		return checkPathSize(key, value)
	case "proc":
		g.Proc = value
		return checkPathSize(key, value)
	case "hierarchy":
		g.Hierarchy = value
		return checkText(key, value)
	}
	return p.unknownKey(key)
}

// limitsKey sets what a [driver] section says about limits; known is false for another key.
func (d *Driver) limitsKey(key, value string) (known bool, err error) {
	switch key {
	case "memacct":
		d.MemoryAccounting = MemoryAccounting(value)
		return true, checkMemoryAccounting(value)
	case "persistence":
		d.Persistence = value == "on"
		if !d.Persistence && value != "off" {
			return true, fmt.Errorf("persistence = \"%s\" is not on or off", value)
		}
		return true, nil
	case "run":
		d.Run = value
		return true, checkPathSize(key, value)
	}
	return false, nil
}

func (d Driver) checkLimits() []error {
	var errs []error
	if d.MemoryAccounting != "" {
		errs = append(errs, checkMemoryAccounting(string(d.MemoryAccounting)))
	}
	if d.Run != "" {
		errs = append(errs, checkPath("run", d.Run))
	}
	return errs
}

func (d Driver) encodeLimits(b *strings.Builder) {
	if d.MemoryAccounting != "" {
		fmt.Fprintf(b, "memacct = %s\n", d.MemoryAccounting)
	}
	if d.Persistence {
		b.WriteString("persistence = on\n")
	}
	if d.Run != "" {
		fmt.Fprintf(b, "run = %s\n", d.Run)
	}
}

func parseLacks(value string) ([]string, error) {
	if value == "" {
		return nil, nil
	}
	var names []string
	for name := range strings.SplitSeq(value, ",") {
		names = append(names, trim(name))
	}
	return names, checkLacks(names)
}

func checkLacks(names []string) error {
	for i, name := range names {
		switch {
		case !isFunctionName(name):
			return fmt.Errorf("lacks names \"%s\", which is no function", name)
		case slices.Contains(names[:i], name):
			return fmt.Errorf("lacks names %s twice", name)
		case i == maxCalls:
			return fmt.Errorf("lacks has more than %d functions", maxCalls)
		}
	}
	return nil
}

func checkPathSize(key, value string) error {
	switch {
	case value == "":
		return fmt.Errorf("%s is empty", key)
	case len(value) > maxPath:
		return fmt.Errorf("%s is longer than %d bytes", key, maxPath)
	}
	return nil
}

// checkPath refuses paths that would not read back as they are.
func checkPath(key, value string) error {
	return cmp.Or(checkPathSize(key, value), checkReadsBack(key, value))
}
