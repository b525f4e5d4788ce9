package runtimesetup

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// stockSpecs are the names of the specification that NVIDIA's device plugin writes and never
// removes.
var stockSpecs = []string{"k8s.device-plugin.nvidia.com-gpu.json", "k8s.device-plugin.nvidia.com-gpu.yaml"}

// maxNamed is how many devices a finding names.
const maxNamed = 3

// Findings returns what is worth knowing, in a fixed order.
func Findings(h Host, f Facts) []wire.SetupFinding {
	var out []wire.SetupFinding
	for _, folder := range cdiFolders {
		owner, clashes := map[string]string{}, map[string][]string{}
		for _, name := range cdiFiles(h, folder) {
			if slices.Contains(stockSpecs, path.Base(name)) {
				out = append(out, wire.SetupFinding{Kind: wire.StaleCDI, What: fmt.Sprintf(
					"%s was written by NVIDIA's device plugin, and nothing updates it while that plugin is off", name)})
			}
			data, err := h.read(name)
			if err != nil {
				continue // the runtime does not read it either
			}
			spec, err := cdi.ParseSpec(data)
			if err != nil || spec == nil { // an empty file has none, and is no error
				continue
			}
			for _, d := range spec.Devices {
				qualified := spec.Kind + "=" + d.Name
				if other, taken := owner[qualified]; taken {
					key := other + " and " + name
					clashes[key] = append(clashes[key], qualified)
					continue
				}
				owner[qualified] = name
			}
		}
		for _, files := range slices.Sorted(maps.Keys(clashes)) {
			devices := clashes[files]
			more := ""
			if len(devices) > maxNamed {
				more = fmt.Sprintf(" and %d more", len(devices)-maxNamed)
				devices = devices[:maxNamed]
			}
			out = append(out, wire.SetupFinding{Kind: wire.ConflictingCDI, What: fmt.Sprintf(
				"%s define the same devices, so the runtime finds none of them: %s%s", files, strings.Join(devices, ", "), more)})
		}
	}
	if f.NVIDIADefault && f.EnvironmentUnprivileged {
		where := f.Toolkit
		if where == "" {
			where = "the default of NVIDIA's container toolkit"
		}
		out = append(out, wire.SetupFinding{Kind: wire.OpenEnvironment, What: "NVIDIA's runtime is the default of " + f.Runtime +
			", and any container gets the GPUs that its own variable NVIDIA_VISIBLE_DEVICES names " +
			"(accept-nvidia-visible-devices-envvar-when-unprivileged, " + where + ")"})
	}
	return out
}
