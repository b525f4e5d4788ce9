package usage

import (
	"strings"
	"testing"
)

func TestHostPIDs(t *testing.T) {
	const private = "pid:[4026532999]"
	const daemonUID = "0a1b2c3d-0000-4000-8000-00000000000d"
	daemon := group(daemonUID, 20)
	nested := strings.TrimSpace(group(otherUID, 3)) + "/" + strings.TrimPrefix(daemon, "0::/")
	for name, tt := range map[string]struct {
		namespace, status string
		own, first        string
		err               string
	}{
		"the machine's namespace":                   {initPIDNamespace, "", daemon, daemon, ""},
		"below the namespace of procRoot":           {private, "NSpid:\t4242\t1\n", daemon, "0::/init.scope\n", "hostPID: true"},
		"a pod's namespace":                         {private, "NSpid:\t4242\n", daemon, daemon, "hostPID: true"},
		"a pod's namespace that it shares":          {private, "NSpid:\t4242\n", daemon, group(daemonUID, 21), "hostPID: true"},
		"a pod's namespace, its groups hidden":      {private, "NSpid:\t4242\n", "0::/\n", "0::/\n", "hostPID: true"},
		"a node that is a container":                {private, "NSpid:\t4242\n", daemon, "0::/init.scope\n", ""},
		"a node that is a container, groups hidden": {private, "NSpid:\t4242\n", "0::/\n", "0::/../../../../init.scope\n", ""},
		"a node that is a pod":                      {private, "NSpid:\t4242\n", nested, group(otherUID, 3), ""},
		"no groups of its own":                      {private, "", "", "0::/\n", "control group of divvy-node"},
		"no groups of the first process":            {private, "", daemon, "", "control group of the first process"},
		"a kernel without NSpid, and a pod":         {private, "", daemon, daemon, "hostPID: true"},
	} {
		t.Run(name, func(t *testing.T) {
			tr := newTree(t)
			tr.self(tt.namespace, tt.status)
			tr.write(tr.file(4242, "cgroup"), tt.own)
			tr.write(tr.file(1, "cgroup"), tt.first)
			err := HostPIDs(tr.proc)
			if tt.err == "" && err != nil || tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) {
				t.Errorf("hostPIDs: %v, want %q", err, tt.err)
			}
		})
	}
	if err := HostPIDs(t.TempDir()); err == nil || !strings.Contains(err.Error(), "PID namespace of divvy-node") {
		t.Errorf("without processes: %v", err)
	}
	if err := HostPIDs("/proc"); err != nil && !strings.Contains(err.Error(), "hostPID: true") {
		t.Errorf("on this machine: %v", err)
	}
}
