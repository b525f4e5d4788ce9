package agent

import (
	"fmt"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// guardedPaths are folders of the host through which a container reaches devices, limits, the
// hook that sets them and the vendor's services beside what it was given; the host's /var/run
// is /run.
var guardedPaths = []string{"/dev", "/sys/fs/cgroup", "/run/nvidia", "/run/nvidia-persistenced", "/run/divvy", "/run/cdi", "/etc/cdi",
	"/run/containerd", "/run/crio", "/var/lib/divvy", "/var/lib/kubelet/device-plugins"}

// harmlessPaths are below guardedPaths and lead to no device.
var harmlessPaths = []string{"/dev/shm", "/dev/mqueue", "/dev/hugepages"}

// wayAround returns how the containers of a pod can get around limits that the driver or a
// service of the vendor sets, "" if none can. What a container can only do together with
// another one of the pod counts as well. A volume counts whether or not a container mounts it.
// What a claim is bound to is not known here.
func wayAround(spec *corev1.PodSpec) string {
	for _, c := range slices.Concat(spec.InitContainers, spec.Containers) {
		if s := c.SecurityContext; s != nil && s.Privileged != nil && *s.Privileged {
			return fmt.Sprintf("container %s is privileged", c.Name)
		}
		if added := addedCapability(&c, "SYS_PTRACE", "SYS_ADMIN"); spec.HostPID && added != "" {
			return fmt.Sprintf("container %s has the host's process IDs and the capability %s", c.Name, added)
		}
	}
	for i := range spec.Volumes {
		v := &spec.Volumes[i]
		if v.HostPath == nil {
			continue
		}
		if guarded := guardedBy(v.HostPath.Path); guarded != "" {
			return fmt.Sprintf("volume %s is %s of the host, which leads to %s", v.Name, v.HostPath.Path, guarded)
		}
	}
	return ""
}

// addedCapability returns the first of the capabilities that the container adds, "" for none.
func addedCapability(c *corev1.Container, capabilities ...string) string {
	if c.SecurityContext == nil || c.SecurityContext.Capabilities == nil {
		return ""
	}
	for _, added := range c.SecurityContext.Capabilities.Add {
		name := strings.TrimPrefix(strings.ToUpper(string(added)), "CAP_")
		if name == "ALL" || slices.Contains(capabilities, name) {
			return name
		}
	}
	return ""
}

// guardedBy returns the guarded folder that a folder of the host leads to: it is that folder,
// or one above or below; "" for none.
func guardedBy(hostPath string) string {
	clean := path.Clean("/" + hostPath)
	if rest, ok := strings.CutPrefix(clean+"/", "/var/run/"); ok {
		clean = path.Clean("/run/" + rest)
	}
	if slices.ContainsFunc(harmlessPaths, func(p string) bool { return within(clean, p) }) {
		return ""
	}
	for _, guarded := range guardedPaths {
		if within(clean, guarded) || within(guarded, clean) {
			return guarded
		}
	}
	return ""
}

// within reports whether a clean path is a folder or below it.
func within(p, folder string) bool {
	return p == folder || strings.HasPrefix(p, strings.TrimSuffix(folder, "/")+"/")
}

// hostPaths are the volumes that wayAround reads, without what it does not.
func hostPaths(volumes []corev1.Volume) []corev1.Volume {
	var out []corev1.Volume
	for i := range volumes {
		if h := volumes[i].HostPath; h != nil {
			out = append(out, corev1.Volume{Name: volumes[i].Name,
				VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: h.Path}}})
		}
	}
	return out
}
