package runtimesetup

import (
	"strings"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
)

// Decision is how the daemon answers kubelet.
type Decision struct {
	Injection config.Injection
	// Why says what was found, for people.
	Why string
}

// after returns d, or the way that was in use before where d has none that brings NVIDIA's
// libraries: the operator's toolkit takes its configuration away while it is replaced, and a
// container that starts meanwhile with the device nodes alone would run without them.
func (d Decision) after(last *Report) Decision {
	if last == nil || last.Pinned || d.Injection != config.InjectDeviceNodes || last.Detected.Injection == config.InjectDeviceNodes {
		return d
	}
	return Decision{last.Detected.Injection, "as before, since nothing better is found now: " + d.Why}
}

// Decide returns how a container that requests a GPU gets it on a node with these facts.
func Decide(f Facts) Decision {
	runtime := f.Runtime
	// In mode cdi the runtime looks GPU ids up in a specification that does not have them.
	legacy := f.Mode != "cdi"
	switch {
	case f.NVIDIADefault && legacy && f.VolumeMounts && !f.EnvironmentUnprivileged:
		return Decision{config.InjectVolumeMounts, "NVIDIA's runtime is the default of " + runtime + ", and " + f.Toolkit +
			" accepts volume mounts and not the environment"}
	case f.NVIDIADefault && legacy && f.EnvironmentUnprivileged:
		return Decision{config.InjectEnvironment, "NVIDIA's runtime is the default of " + runtime + " and reads the environment"}
	case f.CDI && (f.Hook != "" || f.Toolkit != ""):
		return Decision{config.InjectCDI, runtime + " adds CDI devices (" + f.Config + "), and NVIDIA's container toolkit is installed"}
	case f.NVIDIADefault:
		because := " in mode " + f.Mode + ", which reads no GPU ids from the environment"
		if legacy {
			because = ", and " + f.Toolkit + " accepts neither the environment nor volume mounts"
		}
		return Decision{config.InjectDeviceNodes, "NVIDIA's runtime is the default of " + runtime + because + ", and " + runtime +
			" adds no CDI devices"}
	}
	if f.Runtime == "" {
		return Decision{config.InjectEnvironment, "no configuration of a container runtime was found in the usual places, so NVIDIA's " +
			"runtime is assumed to be the default"}
	}
	var lacks []string
	if !f.NVIDIADefault {
		lacks = append(lacks, "NVIDIA's runtime is not the default of "+runtime)
	}
	if !f.CDI {
		lacks = append(lacks, "CDI is not enabled")
	} else {
		lacks = append(lacks, "NVIDIA's container toolkit was not found")
	}
	why := strings.Join(lacks, ", and ")
	if len(f.Unreadable) > 0 {
		why += "; could not read " + strings.Join(f.Unreadable, "; ")
	}
	return Decision{config.InjectDeviceNodes, why + ": containers get the device nodes alone, without NVIDIA's libraries"}
}
