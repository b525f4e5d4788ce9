package vendorsim

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Files of NVIDIA's driver about MIG devices, below the root of a machine.
const (
	minorsFile       = "proc/driver/nvidia-caps/mig-minors"
	capabilitiesDir  = "proc/driver/nvidia/capabilities"
	capabilityDir    = "dev/nvidia-caps"
	capabilityPrefix = "nvidia-cap"
)

// Minors of the capabilities that are about no instance.
const (
	configCapability  = 1
	monitorCapability = 2
)

// gpuCapability returns the minor of the device file of a GPU instance: after
// config and monitor come those of all instances that a GPU can have.
func gpuCapability(minor, gi int) int {
	return monitorCapability + 1 + (minor*gpuInstances+gi)*(1+computeInstances)
}

func computeCapability(minor, gi, ci int) int { return gpuCapability(minor, gi) + 1 + ci }

// CapabilityNodes returns the device files of capabilities that exist, with
// absolute paths, in ascending order of their minors. There are none without a
// card that MIG can divide.
func (t Topology) CapabilityNodes() []string {
	minors := []int{configCapability, monitorCapability}
	capable := false
	for i, c := range t.Cards {
		capable = capable || c.migCapable()
		for _, m := range t.MIGInstances(i) {
			if !m.Caps.Missing {
				minors = append(minors, m.Caps.GPUInstance, m.Caps.ComputeInstance)
			}
		}
	}
	if !capable {
		return nil
	}
	slices.Sort(minors)
	var paths []string
	for _, minor := range slices.Compact(minors) {
		paths = append(paths, "/"+filepath.Join(capabilityDir, capabilityPrefix+strconv.Itoa(minor)))
	}
	return paths
}

// minors returns the text of minorsFile. The kernel lists the capabilities of all
// instances that can be.
func (t Topology) minors() string {
	var b strings.Builder
	fmt.Fprintf(&b, "config %d\nmonitor %d\n", configCapability, monitorCapability)
	for i, c := range t.Cards {
		if !c.migCapable() {
			continue
		}
		minor := t.MinorOf(i)
		given := map[[2]int]MIGInstance{}
		ofGPU := map[int]int{}
		for _, m := range t.MIGInstances(i) {
			given[[2]int{m.GI, m.CI}] = m
			ofGPU[m.GI] = m.Caps.GPUInstance
		}
		for gi := range gpuInstances {
			number, ok := ofGPU[gi]
			if !ok {
				number = gpuCapability(minor, gi)
			}
			fmt.Fprintf(&b, "gpu%d/gi%d/access %d\n", minor, gi, number)
			for ci := range computeInstances {
				number := computeCapability(minor, gi, ci)
				if m, ok := given[[2]int{gi, ci}]; ok {
					number = m.Caps.ComputeInstance
				}
				fmt.Fprintf(&b, "gpu%d/gi%d/ci%d/access %d\n", minor, gi, ci, number)
			}
		}
	}
	return b.String()
}

// accessFiles returns the files in capabilitiesDir, relative to it, with the
// minors that they name.
func (t Topology) accessFiles() map[string]int {
	files := map[string]int{"mig/config": configCapability, "mig/monitor": monitorCapability}
	for i := range t.Cards {
		for _, m := range t.MIGInstances(i) {
			dir := fmt.Sprintf("gpu%d/mig/gi%d", t.MinorOf(i), m.GI)
			files[dir+"/access"] = m.Caps.GPUInstance
			files[fmt.Sprintf("%s/ci%d/access", dir, m.CI)] = m.Caps.ComputeInstance
		}
	}
	return files
}

// WriteCapabilities makes the files of NVIDIA's driver about MIG devices below
// root, the root of a machine, in place of those that it made before:
// proc/driver/nvidia-caps/mig-minors, proc/driver/nvidia/capabilities and
// CapabilityNodes. makeNode makes a device file in a folder that exists; a file
// that is there already is left alone. A machine without a card that MIG can
// divide has none of these files.
func (t Topology) WriteCapabilities(root string, makeNode func(path string) error) error {
	if err := t.writeCapabilities(root, makeNode); err != nil {
		return fmt.Errorf("write capabilities: %w", err)
	}
	return nil
}

func (t Topology) writeCapabilities(root string, makeNode func(path string) error) error {
	if err := os.RemoveAll(filepath.Join(root, capabilitiesDir)); err != nil {
		return err
	}
	nodes := t.CapabilityNodes()
	present, err := filepath.Glob(filepath.Join(root, capabilityDir, capabilityPrefix+"*"))
	if err != nil {
		return err
	}
	for _, path := range present {
		if name, _ := filepath.Rel(root, path); slices.Contains(nodes, "/"+name) {
			continue
		}
		if err := os.Remove(path); err != nil {
			return err
		}
	}
	if nodes == nil {
		return errors.Join(os.RemoveAll(filepath.Join(root, filepath.Dir(minorsFile))), os.RemoveAll(filepath.Join(root, capabilityDir)))
	}
	for name, minor := range t.accessFiles() {
		text := fmt.Sprintf("DeviceFileMinor: %d\nDeviceFileMode: %d\nDeviceFileModify: 1\n", minor, 0o444)
		if err := replaceFile(filepath.Join(root, capabilitiesDir, name), []byte(text)); err != nil {
			return err
		}
	}
	for _, node := range nodes {
		path := filepath.Join(root, node)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if slices.Contains(present, path) {
			continue
		}
		if err := makeNode(path); err != nil {
			return err
		}
	}
	return replaceFile(filepath.Join(root, minorsFile), []byte(t.minors()))
}

// replaceFile writes a file in one step, and the folders that it needs. One that
// has the data is left alone.
func replaceFile(path string, data []byte) error {
	present, err := os.ReadFile(path)
	if err == nil && bytes.Equal(present, data) {
		return nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", data, 0o444); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}
