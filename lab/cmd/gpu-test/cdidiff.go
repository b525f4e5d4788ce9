package main

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	cdispecs "tags.cncf.io/container-device-interface/specs-go"
)

// difference is something that one of two CDI specifications has.
type difference struct {
	// In names the specification, and What what it has.
	In, What string
	// Why explains it, "" if nothing does.
	Why string
}

// The specifications.
const (
	inDivvys = "Divvy"
	inTheirs = "nvidia-ctk"
)

// comparison is what explains differences between Divvy's specification and nvidia-ctk's.
type comparison struct {
	// hooks is false if Divvy's has none because the host lacks the program for them.
	hooks bool
	// driver is the version in the names of the driver's files.
	driver string
	// release is that of the library in Divvy, theirRelease that of nvidia-ctk.
	release, theirRelease string
	// names are nvidia-ctk's names of GPUs, with the UUIDs.
	names map[string]string
	// inMIGMode has the UUIDs of the GPUs in MIG mode.
	inMIGMode map[string]bool
}

// compare returns the differences: first of the whole, then of each device.
func (c comparison) compare(divvys, theirs *cdispecs.Spec) (out []difference) {
	if divvys.Kind != theirs.Kind {
		const why = "a kind of its own keeps Divvy's names apart from those in other files"
		out = append(out, difference{inDivvys, "kind " + divvys.Kind, why}, difference{inTheirs, "kind " + theirs.Kind, why})
	}
	if a, b := hookProgram(divvys), hookProgram(theirs); a != b && a != "" && b != "" {
		const why = "either program runs the hooks; Divvy prefers the GPU operator's"
		out = append(out, difference{inDivvys, "hooks run by " + a, why}, difference{inTheirs, "hooks run by " + b, why})
	}
	out = append(out, c.edits("", divvys.ContainerEdits, theirs.ContainerEdits)...)
	counterparts := map[string]cdispecs.ContainerEdits{}
	for _, d := range theirs.Devices {
		uuid, known := c.names[d.Name]
		if _, had := counterparts[uuid]; known && (!had || uuid == d.Name) {
			counterparts[uuid] = d.ContainerEdits
		}
		if uuid != d.Name {
			out = append(out, difference{inTheirs, "device " + d.Name, explainName(d.Name, known)})
		}
	}
	for _, d := range divvys.Devices {
		edits, ok := counterparts[d.Name]
		if ok {
			out = append(out, c.edits("device "+d.Name+": ", d.ContainerEdits, edits)...)
			continue
		}
		why := ""
		if c.inMIGMode[d.Name] {
			why = "the GPU is in MIG mode, and nvidia-ctk describes its MIG devices alone"
		}
		out = append(out, difference{inDivvys, "device " + d.Name, why})
	}
	return out
}

// explainName explains a name that nvidia-ctk gives a device and Divvy does not. known is
// true for a GPU.
func explainName(name string, known bool) string {
	switch {
	case known:
		return "Divvy names devices by UUID alone, as an index may be another GPU's after a restart"
	case name == "all":
		return "Divvy names each device of a container"
	case strings.HasPrefix(name, "MIG-") || strings.Contains(name, ":"):
		return "gpu-test runs Divvy with the MIG strategy none, which has no MIG devices"
	default:
		return ""
	}
}

// edits compares what two specifications do to a container.
func (c comparison) edits(where string, divvys, theirs cdispecs.ContainerEdits) (out []difference) {
	a, b := linesOf(divvys), linesOf(theirs)
	for _, side := range []struct {
		in           string
		lines, other []string
	}{{inDivvys, a, b}, {inTheirs, b, a}} {
		for _, line := range side.lines {
			if !slices.Contains(side.other, line) {
				out = append(out, difference{side.in, where + line, c.explain(side.in, line)})
			}
		}
	}
	return out
}

// explain explains why one specification has a line and the other does not, "" if nothing
// does.
func (c comparison) explain(in, line string) string {
	hook := strings.HasPrefix(line, "hook ")
	switch {
	case in == inTheirs && hook && strings.Contains(line, " apply-cuda-memory-limits"):
		return "Divvy disables this hook: it sets limits from variables that the pod can write"
	case in == inTheirs && hook && !c.hooks:
		return "the program for hooks is where Divvy does not look for it"
	case strings.HasPrefix(line, "node ") || strings.Contains(line, ".so."+c.driver):
		return "" // what no release may leave out
	case c.release != c.theirRelease:
		return fmt.Sprintf("nvidia-ctk %s is another release than the library in Divvy, %s", c.theirRelease, c.release)
	default:
		return ""
	}
}

// linesOf are the edits as texts, which begin with their kind. Programs of hooks are left
// out.
func linesOf(e cdispecs.ContainerEdits) (out []string) {
	for _, env := range e.Env {
		out = append(out, "variable "+env)
	}
	for _, n := range e.DeviceNodes {
		line := "node " + n.Path
		if n.HostPath != "" && n.HostPath != n.Path {
			line += " from " + n.HostPath
		}
		out = append(out, line)
	}
	for _, m := range e.Mounts {
		line := "mount " + m.ContainerPath
		if m.HostPath != m.ContainerPath {
			line += " from " + m.HostPath
		}
		out = append(out, line+" ("+strings.Join(m.Options, ",")+")")
	}
	for _, h := range e.Hooks {
		out = append(out, strings.Join(slices.Concat([]string{"hook", h.HookName}, hookArgs(h), h.Env), " "))
	}
	return out
}

// hookArgs are the arguments of a hook without what depends on the program: nvidia-ctk has
// the hooks in a subcommand.
func hookArgs(h *cdispecs.Hook) []string {
	args := h.Args
	if len(args) > 0 {
		args = args[1:]
	}
	if len(args) > 0 && args[0] == "hook" && filepath.Base(h.Path) == "nvidia-ctk" {
		args = args[1:]
	}
	return args
}

// hookProgram is the program of a specification's hooks, "" without hooks.
func hookProgram(s *cdispecs.Spec) string {
	for _, h := range s.ContainerEdits.Hooks {
		return h.Path
	}
	return ""
}
