package agent

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

func TestWaysAround(t *testing.T) {
	mounts := func(path string) corev1.PodSpec {
		return corev1.PodSpec{Volumes: []corev1.Volume{
			{Name: "data", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
			{Name: "host", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: path}}},
		}}
	}
	with := func(hostPID bool, s corev1.SecurityContext) corev1.PodSpec {
		return corev1.PodSpec{HostPID: hostPID, Containers: []corev1.Container{{Name: "plain"}, {Name: "c", SecurityContext: &s}}}
	}
	adds := func(names ...corev1.Capability) corev1.SecurityContext {
		return corev1.SecurityContext{Capabilities: &corev1.Capabilities{Add: names}}
	}
	const leads, to = "volume host is ", " of the host, which leads to "
	const tracing = "container c has the host's process IDs and the capability "
	for name, tt := range map[string]struct {
		spec corev1.PodSpec
		want string
	}{
		"a plain pod":                {corev1.PodSpec{Containers: []corev1.Container{{Name: "c"}}}, ""},
		"privileged":                 {with(false, corev1.SecurityContext{Privileged: ptr.To(true)}), "container c is privileged"},
		"not privileged":             {with(false, corev1.SecurityContext{Privileged: ptr.To(false)}), ""},
		"capabilities alone":         {with(false, adds("SYS_PTRACE", "SYS_ADMIN")), ""},
		"process IDs alone":          {with(true, corev1.SecurityContext{}), ""},
		"harmless capabilities":      {with(true, adds("NET_ADMIN", "IPC_LOCK")), ""},
		"tracing":                    {with(true, adds("IPC_LOCK", "SYS_PTRACE")), tracing + "SYS_PTRACE"},
		"administration":             {with(true, adds("SYS_ADMIN")), tracing + "SYS_ADMIN"},
		"with a prefix":              {with(true, adds("cap_sys_admin")), tracing + "SYS_ADMIN"},
		"all capabilities":           {with(true, adds("ALL")), tracing + "ALL"},
		"another folder":             {mounts("/data/dev"), ""},
		"a name that begins so":      {mounts("/devices"), ""},
		"devices":                    {mounts("/dev"), leads + "/dev" + to + "/dev"},
		"devices, written otherwise": {mounts("/data/..//dev/"), leads + "/data/..//dev/" + to + "/dev"},
		"one device":                 {mounts("/dev/nvidia0"), leads + "/dev/nvidia0" + to + "/dev"},
		"shared memory":              {mounts("/dev/shm"), ""},
		"the root":                   {mounts("/"), leads + "/" + to + "/dev"},
		"no path":                    {mounts(""), leads + "" + to + "/dev"},
		"control groups":             {mounts("/sys/fs/cgroup/kubepods"), leads + "/sys/fs/cgroup/kubepods" + to + "/sys/fs/cgroup"},
		"above control groups":       {mounts("/sys"), leads + "/sys" + to + "/sys/fs/cgroup"},
		"beside control groups":      {mounts("/sys/fs/bpf"), ""},
		"the driver":                 {mounts("/run/nvidia/driver"), leads + "/run/nvidia/driver" + to + "/run/nvidia"},
		"the driver by a link":       {mounts("/var/run/nvidia"), leads + "/var/run/nvidia" + to + "/run/nvidia"},
		"above the driver":           {mounts("/var/run"), leads + "/var/run" + to + "/run/nvidia"},
		"above the link":             {mounts("/var"), leads + "/var" + to + "/var/lib/divvy"},
		"the hook":                   {mounts("/var/lib"), leads + "/var/lib" + to + "/var/lib/divvy"},
		"records of limits":          {mounts("/run/divvy/limits"), leads + "/run/divvy/limits" + to + "/run/divvy"},
		"logs":                       {mounts("/var/log"), ""},
		"beside the driver":          {mounts("/run/nvidia-topologyd"), ""},
	} {
		t.Run(name, func(t *testing.T) {
			if got := wayAround(&tt.spec); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
			// The watch keeps as much of the pod as is needed.
			kept, err := strip(&corev1.Pod{Spec: tt.spec})
			if err != nil {
				t.Fatal(err)
			}
			if pod, ok := kept.(*corev1.Pod); !ok || wayAround(&pod.Spec) != tt.want {
				t.Errorf("of the stripped pod: %+v", kept)
			}
		})
	}
	init := corev1.PodSpec{InitContainers: []corev1.Container{
		{Name: "i", SecurityContext: &corev1.SecurityContext{Privileged: ptr.To(true)}},
	}}
	if got := wayAround(&init); got != "container i is privileged" {
		t.Errorf("an init container: %q", got)
	}
}
