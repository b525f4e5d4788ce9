package usage

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/backend"
)

const (
	gib = 1 << 30

	trainUID  = "6c0f7a11-9a2b-4c3d-8e4f-5061728394a5"
	outerUID  = "0a1b2c3d-0000-4000-8000-00000000000f" // of no pod of the node
	otherUID  = "0a1b2c3d-0000-4000-8000-000000000002"
	staticUID = "0a1b2c3d-0000-4000-8000-000000000003"
	hash      = "5f3b6d2c1a0e4f7d8c9b0a1f2e3d4c5b" // of the static pod

	resource = accel.Resource("nvidia.com/gpu-memory")
)

// id returns the id of a container by its number.
func id(n int) string { return fmt.Sprintf("%064x", n) }

// group returns the text of the cgroup file of a process in a container.
func group(podUID string, container int) string {
	return "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + strings.ReplaceAll(podUID, "-", "_") +
		".slice/cri-containerd-" + id(container) + ".scope\n"
}

const service = "0::/system.slice/nvidia-mps.service\n"

// tree is a host's processes and control groups, as files.
type tree struct {
	tb            testing.TB
	proc, cgroups string
}

// newTree returns a tree in which this process is on the host.
func newTree(tb testing.TB) *tree {
	tb.Helper()
	root := tb.TempDir()
	tr := &tree{tb, filepath.Join(root, "proc"), filepath.Join(root, "cgroup")}
	tr.self(initPIDNamespace, "")
	return tr
}

func (tr *tree) write(path, text string) {
	tr.tb.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		tr.tb.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		tr.tb.Fatal(err)
	}
}

func (tr *tree) link(target, path string) {
	tr.tb.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		tr.tb.Fatal(err)
	}
	if err := os.Symlink(target, path); err != nil {
		tr.tb.Fatal(err)
	}
}

// self makes this process, of PID 4242, with its PID namespace and its status.
func (tr *tree) self(namespace, status string) {
	tr.tb.Helper()
	for _, path := range []string{"self", "4242/ns/pid"} {
		if err := os.RemoveAll(filepath.Join(tr.proc, path)); err != nil {
			tr.tb.Fatal(err)
		}
	}
	tr.link("4242", filepath.Join(tr.proc, "self"))
	tr.link(namespace, filepath.Join(tr.proc, "4242/ns/pid"))
	tr.write(filepath.Join(tr.proc, "4242/status"), "Name:\tdivvy-node\n"+status)
}

// process makes a process with the text of its cgroup file.
func (tr *tree) process(pid int, state string, start uint64, cgroup string) {
	tr.tb.Helper()
	tr.write(tr.file(pid, "stat"), stat(pid, state, start))
	tr.write(tr.file(pid, "cgroup"), cgroup)
}

func (tr *tree) file(pid int, name string) string {
	return filepath.Join(tr.proc, strconv.Itoa(pid), name)
}

// stat is the text of /proc/<pid>/stat as Linux writes it.
func stat(pid int, state string, start uint64) string {
	return fmt.Sprintf("%d (python3 (x)) %s 1 4242 4242 0 -1 4194560 12345 0 0 0 250 90 0 0 20 0 9 0 %d 1234567890 4096 "+
		"18446744073709551615 1 1 0 0 0 0 0 4096 17663 0 0 0 17 3 0 0 0 0 0 0 0 0 0 0 0 0 0\n", pid, state, start)
}

// fake is a backend.Meter that knows its devices.
type fake map[accel.DeviceID]func(context.Context) (backend.Measured, error)

func (f fake) Measure(ctx context.Context, id accel.DeviceID) (backend.Measured, error) {
	return f[id](ctx)
}

// measured returns a device that always measures the same.
func measured(used uint64, processes ...backend.Process) func(context.Context) (backend.Measured, error) {
	return func(context.Context) (backend.Measured, error) {
		return backend.Measured{UsedBytes: used, Processes: processes}, nil
	}
}

// uses returns a process that uses memory, in GiB.
func uses(pid int, amount uint64) backend.Process {
	return backend.Process{PID: pid, Memory: new(amount * gib)}
}

// pods are those that the tests know: "train" with two containers, "other", and the
// static pod "static".
var pods = Pods{
	ByUID: map[string]PodName{
		trainUID: {"team", "train"}, otherUID: {"team", "other"}, staticUID: {"kube-system", "static"}, hash: {"kube-system", "static"},
	},
	ByContainer: map[string]ContainerName{
		id(1): {"team", "train", "main"}, id(2): {"team", "train", "sidecar"}, id(3): {"team", "other", "main"},
		id(4): {"kube-system", "static", "main"},
	},
}

// holds returns what a container of "train" holds of device "a", in GiB; 0 for all of it.
func holds(container string, amount uint64) Container {
	return Container{
		Namespace: "team", Pod: "train", PodUID: trainUID, Name: container, Resource: resource, Device: "a", Bytes: amount * gib,
	}
}

// usage returns the usage of a container of "train", in GiB; -1 for nil.
func usage(container string, allocated, used, processes int) wire.ContainerUsage {
	u := wire.ContainerUsage{Namespace: "team", Pod: "train", Container: container, Resource: resource, Processes: processes}
	if allocated >= 0 {
		u.AllocatedBytes = new(uint64(allocated) * gib)
	}
	if used >= 0 {
		u.UsedBytes = new(uint64(used) * gib)
	}
	return u
}

// withoutUIDs leaves the UIDs out of a comparison of rows; TestPodUIDs is about these.
var withoutUIDs = cmpopts.IgnoreFields(wire.ContainerUsage{}, "PodUID")

func TestPassAttribution(t *testing.T) {
	withUtilization := func(p backend.Process, u float64) backend.Process {
		p.Utilization = &u
		return p
	}
	withoutMemory := func(pid int) backend.Process { return backend.Process{PID: pid} }
	utilized := func(u wire.ContainerUsage, part float64) wire.ContainerUsage {
		u.Utilization = &part
		return u
	}
	of := func(u wire.ContainerUsage, namespace, pod string) wire.ContainerUsage {
		u.Namespace, u.Pod = namespace, pod
		return u
	}
	for name, tt := range map[string]struct {
		// groups are the texts of the cgroup files of processes, which are those that the library lists unless it
		// lists others.
		groups     map[int]string
		used       uint64
		processes  []backend.Process
		containers []Container
		want       wire.DeviceUsage // Containers, and sums in GiB
	}{
		"containers of a pod, and what the driver uses": {
			groups: map[int]string{10: group(trainUID, 1), 11: group(trainUID, 1), 12: group(trainUID, 2)},
			used:   9, processes: []backend.Process{uses(10, 2), uses(11, 3), uses(12, 1)},
			containers: []Container{holds("sidecar", 2), holds("main", 4)},
			want: wire.DeviceUsage{Containers: []wire.ContainerUsage{usage("main", 4, 5, 2), usage("sidecar", 2, 1, 1)},
				UnknownBytes: 3},
		},
		"no processes": {
			used: 1, containers: []Container{holds("main", 4)},
			want: wire.DeviceUsage{Containers: []wire.ContainerUsage{usage("main", 4, 0, 0)}, UnknownBytes: 1},
		},
		"a whole device": {
			groups: map[int]string{10: group(trainUID, 1)}, used: 2, processes: []backend.Process{uses(10, 2)},
			containers: []Container{holds("main", 0)},
			want:       wire.DeviceUsage{Containers: []wire.ContainerUsage{usage("main", -1, 2, 1)}},
		},
		"a container that is not known yet": {
			groups: map[int]string{10: group(trainUID, 1), 11: group(trainUID, 77), 12: group(trainUID, 78)},
			used:   9, processes: []backend.Process{uses(10, 2), uses(11, 3), uses(12, 4)},
			containers: []Container{holds("main", 4)},
			want:       wire.DeviceUsage{Containers: []wire.ContainerUsage{usage("", -1, 7, 2), usage("main", 4, 2, 1)}},
		},
		"a container beside the one that holds the device": {
			groups: map[int]string{12: group(trainUID, 2)}, used: 3, processes: []backend.Process{uses(12, 3)},
			containers: []Container{holds("main", 4)},
			want:       wire.DeviceUsage{Containers: []wire.ContainerUsage{usage("", -1, 3, 1), usage("main", 4, 0, 0)}},
		},
		"a container that is another pod's by the statuses": {
			groups: map[int]string{12: group(trainUID, 3)}, used: 3, processes: []backend.Process{uses(12, 3)},
			containers: []Container{holds("main", 4)},
			want:       wire.DeviceUsage{Containers: []wire.ContainerUsage{usage("", -1, 3, 1), usage("main", 4, 0, 0)}},
		},
		"a process of the pod that is in no container": {
			groups: map[int]string{12: "0::/kubepods/pod" + trainUID + "/crio-conmon-" + id(1) + "\n"},
			used:   3, processes: []backend.Process{uses(12, 3)}, containers: []Container{holds("main", 4)},
			want: wire.DeviceUsage{Containers: []wire.ContainerUsage{usage("", -1, 3, 1), usage("main", 4, 0, 0)}},
		},
		"pods that hold nothing of it": {
			groups: map[int]string{10: group(otherUID, 3), 11: group(outerUID, 9)},
			used:   5, processes: []backend.Process{uses(10, 2), uses(11, 1)}, containers: []Container{holds("main", 4)},
			want: wire.DeviceUsage{Containers: []wire.ContainerUsage{usage("main", 4, 0, 0)}, ForeignBytes: 3, UnknownBytes: 2},
		},
		"outside of pods": {
			groups: map[int]string{10: service, 11: "0::/\n"}, used: 5, processes: []backend.Process{uses(10, 2), uses(11, 1)},
			want: wire.DeviceUsage{SystemBytes: 3, UnknownBytes: 2},
		},
		"a process that does not exist": {
			used: 5, processes: []backend.Process{uses(10, 4)}, containers: []Container{holds("main", 4)},
			want: wire.DeviceUsage{Containers: []wire.ContainerUsage{usage("main", 4, 0, 0)}, UnknownBytes: 5},
		},
		"memory that is not known": {
			groups: map[int]string{10: group(trainUID, 1), 11: group(trainUID, 1), 12: group(trainUID, 2), 13: group(otherUID, 3),
				14: service},
			used:       9,
			processes:  []backend.Process{uses(10, 2), withoutMemory(11), uses(12, 1), withoutMemory(13), withoutMemory(14)},
			containers: []Container{holds("main", 4), holds("sidecar", 2)},
			want: wire.DeviceUsage{Containers: []wire.ContainerUsage{usage("main", 4, -1, 2), usage("sidecar", 2, 1, 1)},
				UnknownBytes: 8},
		},
		"known sums above what is in use": {
			groups: map[int]string{10: group(trainUID, 1), 11: service}, used: 3, processes: []backend.Process{uses(10, 2), uses(11, 2)},
			containers: []Container{holds("main", 4)},
			want:       wire.DeviceUsage{Containers: []wire.ContainerUsage{usage("main", 4, 2, 1)}, SystemBytes: 2},
		},
		"utilization": {
			groups: map[int]string{10: group(trainUID, 1), 11: group(trainUID, 1), 12: group(trainUID, 1), 13: group(trainUID, 2)},
			used:   4,
			processes: []backend.Process{withUtilization(uses(10, 1), 0.25), withUtilization(uses(11, 1), 0.5), uses(12, 1),
				uses(13, 1)},
			containers: []Container{holds("main", 4), holds("sidecar", 4)},
			want: wire.DeviceUsage{Containers: []wire.ContainerUsage{utilized(usage("main", 4, 3, 3), 0.75),
				usage("sidecar", 4, 1, 1)}},
		},
		"utilization above all of it": {
			groups: map[int]string{10: group(trainUID, 1), 11: group(trainUID, 1)},
			used:   2, processes: []backend.Process{withUtilization(uses(10, 1), 0.75), withUtilization(uses(11, 1), 0.5)},
			containers: []Container{holds("main", 4)},
			want:       wire.DeviceUsage{Containers: []wire.ContainerUsage{utilized(usage("main", 4, 2, 2), 1)}},
		},
		"a static pod": {
			groups: map[int]string{10: group(hash, 4), 11: group(hash, 5)}, used: 3, processes: []backend.Process{uses(10, 2), uses(11, 1)},
			containers: []Container{{Namespace: "kube-system", Pod: "static", PodUID: staticUID, Name: "main", Resource: resource,
				Device: "a", Bytes: 4 * gib}},
			want: wire.DeviceUsage{Containers: []wire.ContainerUsage{
				of(usage("", -1, 1, 1), "kube-system", "static"), of(usage("main", 4, 2, 1), "kube-system", "static"),
			}},
		},
		"a pod that replaced one of the same name": {
			groups: map[int]string{10: group(otherUID, 9), 11: group(trainUID, 1)},
			used:   3, processes: []backend.Process{uses(10, 2), uses(11, 1)},
			containers: []Container{holds("main", 4), {Namespace: "team", Pod: "train", PodUID: otherUID, Name: "main", Resource: resource,
				Device: "a", Bytes: 2 * gib}},
			want: wire.DeviceUsage{Containers: []wire.ContainerUsage{
				usage("", -1, 2, 1), usage("main", 2, 0, 0), usage("main", 4, 1, 1),
			}},
		},
		"a holder whose UID is not known": {
			groups: map[int]string{10: group(trainUID, 1)}, used: 2, processes: []backend.Process{uses(10, 2)},
			containers: []Container{{Namespace: "team", Pod: "train", Name: "main", Resource: resource, Device: "a", Bytes: 4 * gib}},
			want:       wire.DeviceUsage{Containers: []wire.ContainerUsage{usage("main", 4, 2, 1)}},
		},
		"by two resources": {
			groups: map[int]string{10: group(trainUID, 1)}, used: 2, processes: []backend.Process{uses(10, 2)},
			containers: []Container{
				{Namespace: "team", Pod: "train", PodUID: trainUID, Name: "main", Resource: "x.example/old", Device: "a", Bytes: gib},
				holds("main", 2), holds("main", 1),
			},
			want: wire.DeviceUsage{Containers: []wire.ContainerUsage{usage("main", 4, 2, 1)}},
		},
		"by two resources, one of which has all of it": {
			groups: map[int]string{10: group(trainUID, 1)}, used: 2, processes: []backend.Process{uses(10, 2)},
			containers: []Container{holds("main", 2), holds("main", 0)},
			want:       wire.DeviceUsage{Containers: []wire.ContainerUsage{usage("main", -1, 2, 1)}},
		},
		"a node in a pod of another cluster": {
			groups: map[int]string{10: strings.TrimSpace(group(outerUID, 9)) + "/kubepods/pod" + trainUID + "/" + id(1)},
			used:   2, processes: []backend.Process{uses(10, 2)}, containers: []Container{holds("main", 4)},
			want: wire.DeviceUsage{Containers: []wire.ContainerUsage{usage("main", 4, 2, 1)}},
		},
		"a container that named a group like another pod": {
			groups: map[int]string{10: strings.TrimSpace(group(otherUID, 3)) + "/kubepods/pod" + trainUID + "/" + id(1)},
			used:   2, processes: []backend.Process{uses(10, 2)}, containers: []Container{holds("main", 4)},
			want: wire.DeviceUsage{Containers: []wire.ContainerUsage{usage("main", 4, 0, 0)}, ForeignBytes: 2},
		},
	} {
		t.Run(name, func(t *testing.T) {
			tr := newTree(t)
			for pid, text := range tt.groups {
				tr.process(pid, "S", 5, text)
			}
			tt.want.Vendor, tt.want.Device, tt.want.Index, tt.want.MemoryBytes, tt.want.UsedBytes = "v", "a", 3, 80*gib, tt.used*gib
			tt.want.SystemBytes *= gib
			tt.want.ForeignBytes *= gib
			tt.want.UnknownBytes *= gib
			m := NewMeter(tr.proc, tr.cgroups)
			backends := map[string]backend.Meter{"v": fake{"a": measured(tt.used*gib, tt.processes...)}}
			elsewhere := holds("main", 1)
			elsewhere.Device = "b"
			containers := append([]Container{elsewhere}, tt.containers...)
			for _, turn := range []string{"first", "second"} { // which has found the processes before
				got := m.Pass(t.Context(), backends, []Device{{Vendor: "v", ID: "a", Index: 3, MemoryBytes: 80 * gib}}, containers, pods)
				if diff := cmp.Diff([]wire.DeviceUsage{tt.want}, got, withoutUIDs); diff != "" {
					t.Errorf("%s pass: %s", turn, diff)
				}
			}
		})
	}
}

// one returns what a pass finds of device "a", of which "main" of "train" holds 4 GiB
// and process 10 uses 2 of 3 GiB.
func one(t *testing.T, m *Meter) wire.DeviceUsage {
	t.Helper()
	got := m.Pass(t.Context(), map[string]backend.Meter{"v": fake{"a": measured(3*gib, uses(10, 2))}}, []Device{{Vendor: "v", ID: "a"}},
		[]Container{holds("main", 4)}, pods)
	if len(got) != 1 || got[0].Problem != "" || len(got[0].Containers) == 0 {
		t.Fatalf("Pass = %+v", got)
	}
	return got[0]
}

// ofMain returns the bytes that the container uses, and its processes.
func ofMain(t *testing.T, u wire.DeviceUsage) (used uint64, processes int) {
	t.Helper()
	last := u.Containers[len(u.Containers)-1]
	if last.Container != "main" || last.UsedBytes == nil {
		t.Fatalf("rows: %+v", u.Containers)
	}
	return *last.UsedBytes, last.Processes
}

func TestReusedPID(t *testing.T) {
	t.Run("while its groups are read", func(t *testing.T) {
		tr := newTree(t)
		tr.process(10, "S", 5, "")
		// The reader of the groups waits for their text, and meanwhile the process ends.
		file := tr.file(10, "cgroup")
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Mkfifo(file, 0o600); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() {
			pipe, err := os.OpenFile(file, os.O_WRONLY, 0)
			if err == nil {
				err = errors.Join(os.WriteFile(tr.file(10, "stat"), []byte(stat(10, "S", 6)), 0o600), writeString(pipe, group(trainUID, 1)),
					pipe.Close())
			}
			done <- err
		}()
		got := one(t, NewMeter(tr.proc, tr.cgroups))
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if used, processes := ofMain(t, got); used != 0 || processes != 0 || got.UnknownBytes != 3*gib {
			t.Errorf("Pass = %+v", got)
		}
	})
	t.Run("between passes", func(t *testing.T) {
		tr := newTree(t)
		m := NewMeter(tr.proc, tr.cgroups)
		tr.process(10, "S", 5, group(trainUID, 1))
		if used, _ := ofMain(t, one(t, m)); used != 2*gib {
			t.Errorf("first pass: %d", used)
		}
		tr.process(10, "S", 6, service)
		if got := one(t, m); got.SystemBytes != 2*gib {
			t.Errorf("second pass: %+v", got)
		}
	})
}

func writeString(f *os.File, text string) error {
	_, err := f.WriteString(text)
	return err
}

// TestPodUIDs: a row has the UID of its pod, also that of processes whose container is not
// known.
func TestPodUIDs(t *testing.T) {
	tr := newTree(t)
	tr.process(10, "S", 5, group(trainUID, 77))
	got := one(t, NewMeter(tr.proc, tr.cgroups))
	if len(got.Containers) != 2 || got.Containers[0].PodUID != trainUID || got.Containers[1].PodUID != trainUID {
		t.Errorf("rows: %+v", got.Containers)
	}
}

func TestLeastProcess(t *testing.T) {
	const uptime = "100.05 350.00\n" // 10005 ticks; what started after 4005 may not have its context yet
	both := []backend.Process{uses(10, 3), uses(11, 2)}
	for name, tt := range map[string]struct {
		uptime    string
		starts    map[int]uint64 // by PID
		processes []backend.Process
		want      *uint64
	}{
		"the least":               {uptime, map[int]uint64{10: 5, 11: 6}, both, new(uint64(2 * gib))},
		"one that started lately": {uptime, map[int]uint64{10: 5, 11: 4005}, both, new(uint64(3 * gib))},
		"one without memory": {uptime, map[int]uint64{10: 5, 11: 6}, []backend.Process{uses(10, 3), {PID: 11, Memory: new(uint64)}},
			new(uint64(3 * gib))},
		"one whose memory is not known": {uptime, map[int]uint64{10: 5}, []backend.Process{{PID: 10}}, nil},
		"just started":                  {uptime, map[int]uint64{10: 4006}, []backend.Process{uses(10, 3)}, nil},
		"a machine that just started":   {"30.00 9.00\n", map[int]uint64{10: 5}, []backend.Process{uses(10, 3)}, nil},
		"no uptime":                     {"", map[int]uint64{10: 5}, []backend.Process{uses(10, 3)}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			tr := newTree(t)
			if tt.uptime != "" {
				tr.write(filepath.Join(tr.proc, "uptime"), tt.uptime)
			}
			for pid, start := range tt.starts {
				tr.process(pid, "S", start, group(trainUID, 1))
			}
			tr.process(20, "S", 5, service)            // no container's
			tr.process(21, "S", 5, group(otherUID, 3)) // of a pod that holds nothing of the device
			backends := map[string]backend.Meter{"v": fake{"a": measured(9*gib, append(tt.processes, uses(20, 1), uses(21, 1))...)}}
			got := NewMeter(tr.proc, tr.cgroups).Pass(t.Context(), backends, []Device{{Vendor: "v", ID: "a"}},
				[]Container{holds("main", 4)}, pods)
			if diff := cmp.Diff(tt.want, got[0].LeastProcessBytes); diff != "" {
				t.Errorf("least (-want +got):\n%s", diff)
			}
		})
	}
}

func TestProcessThatExits(t *testing.T) {
	tr := newTree(t)
	m := NewMeter(tr.proc, tr.cgroups)
	tr.process(10, "Z", 5, "0::/\n") // version 1 takes it out of its groups
	if got := one(t, m); got.SystemBytes != 0 || got.UnknownBytes != 3*gib {
		t.Errorf("not in a pod any more: %+v", got)
	}
	tr.process(10, "Z", 5, group(trainUID, 1))
	if used, _ := ofMain(t, one(t, m)); used != 2*gib {
		t.Errorf("still in its pod: %d", used)
	}
	if err := os.RemoveAll(filepath.Join(tr.proc, "10")); err != nil {
		t.Fatal(err)
	}
	if got := one(t, m); got.UnknownBytes != 3*gib {
		t.Errorf("ended: %+v", got)
	}
}

// TestGroupsReadOnce: the groups of a process in a container are read by the first pass
// alone, and those of others again.
func TestGroupsReadOnce(t *testing.T) {
	tr := newTree(t)
	m := NewMeter(tr.proc, tr.cgroups)
	tr.process(10, "S", 5, service)
	if got := one(t, m); got.SystemBytes != 2*gib {
		t.Errorf("outside of pods: %+v", got)
	}
	tr.process(10, "S", 5, "0::/kubepods/pod"+trainUID+"\n")
	if got := one(t, m); got.Containers[0].Container != "" || got.Containers[0].Processes != 1 {
		t.Errorf("in a pod: %+v", got)
	}
	tr.process(10, "S", 5, group(trainUID, 1))
	one(t, m)
	if err := os.Remove(tr.file(10, "cgroup")); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if used, processes := ofMain(t, one(t, m)); used != 2*gib || processes != 1 {
			t.Errorf("in a container: %d bytes, %d processes", used, processes)
		}
	}
}

func TestPrivateCgroupNamespace(t *testing.T) {
	tr := newTree(t)
	m := NewMeter(tr.proc, tr.cgroups)
	tr.process(10, "S", 5, "0::/../cri-containerd-"+id(1)+".scope\n")
	if got := one(t, m); got.UnknownBytes != 3*gib {
		t.Errorf("without the host's groups: %+v", got)
	}
	tr.write(filepath.Join(tr.cgroups, "cgroup.controllers"), "cpu memory pids\n")
	tr.write(filepath.Join(tr.cgroups, "kubepods/burstable/pod"+trainUID, id(1), "cgroup.procs"), "10\n")
	if used, _ := ofMain(t, one(t, m)); used != 2*gib {
		t.Errorf("in a container: %d", used)
	}
	tr.process(10, "S", 6, "0::/../../../../system.slice/mps.service\n")
	tr.write(filepath.Join(tr.cgroups, "kubepods/burstable/pod"+trainUID, id(1), "cgroup.procs"), "11\n")
	if got := one(t, m); got.SystemBytes != 2*gib {
		t.Errorf("outside of pods: %+v", got)
	}
}

func TestPassProblems(t *testing.T) {
	tr := newTree(t)
	devices := []Device{{Vendor: "w", ID: "c"}, {Vendor: "v", ID: "b", Index: 1}, {Vendor: "v", ID: "a"}, {Vendor: "x", ID: "d"}}
	backends := map[string]backend.Meter{
		"v": fake{"a": func(context.Context) (backend.Measured, error) { return backend.Measured{}, errors.New("GPU is lost") },
			"b": measured(gib)},
		"w": fake{"c": func(context.Context) (backend.Measured, error) {
			return backend.Measured{}, fmt.Errorf("EfmlGetProcessInfo: %w", errors.ErrUnsupported)
		}},
	}
	containers := []Container{holds("main", 4)}
	unsupported := "the vendor's library does not report what is in use of this device"
	want := []wire.DeviceUsage{
		{Vendor: "v", Device: "a", Problem: "GPU is lost", Containers: []wire.ContainerUsage{usage("main", 4, -1, 0)}},
		{Vendor: "v", Device: "b", Index: 1, UsedBytes: gib, UnknownBytes: gib},
		{Vendor: "w", Device: "c", Problem: unsupported + ": EfmlGetProcessInfo: unsupported operation"},
		{Vendor: "x", Device: "d", Problem: unsupported},
	}
	m := NewMeter(tr.proc, tr.cgroups)
	if diff := cmp.Diff(want, m.Pass(t.Context(), backends, devices, containers, pods), withoutUIDs); diff != "" {
		t.Error(diff)
	}
	if devices[0].ID != "c" {
		t.Error("the caller's devices were sorted")
	}

	// In a PID namespace of its own, nothing is measured.
	tr.self("pid:[4026532999]", "NSpid:\t4242\t1\n")
	for _, got := range m.Pass(t.Context(), backends, devices, containers, pods) {
		if !strings.Contains(got.Problem, "hostPID: true") || got.UsedBytes != 0 || got.UnknownBytes != 0 ||
			len(got.Containers) > 0 && got.Containers[0].UsedBytes != nil {
			t.Errorf("without hostPID: %+v", got)
		}
	}
	if got := m.Pass(t.Context(), nil, nil, nil, Pods{}); len(got) != 0 {
		t.Errorf("no devices: %+v", got)
	}
}

// TestVendorsAtTheSameTime: a device of one vendor that hangs delays no other vendor's.
func TestVendorsAtTheSameTime(t *testing.T) {
	tr := newTree(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	other := make(chan struct{})
	var once sync.Once
	backends := map[string]backend.Meter{
		"v": fake{"a": func(ctx context.Context) (backend.Measured, error) {
			select {
			case <-other: // the other vendor's device was measured meanwhile
				return backend.Measured{}, errors.New("no answer in 5s")
			case <-ctx.Done():
				return backend.Measured{}, ctx.Err()
			}
		}},
		"w": fake{"c": func(context.Context) (backend.Measured, error) {
			once.Do(func() { close(other) })
			return backend.Measured{UsedBytes: gib}, nil
		}},
	}
	got := NewMeter(tr.proc, tr.cgroups).Pass(ctx, backends, []Device{{Vendor: "v", ID: "a"}, {Vendor: "w", ID: "c"}}, nil, Pods{})
	want := []wire.DeviceUsage{
		{Vendor: "v", Device: "a", Problem: "no answer in 5s"}, {Vendor: "w", Device: "c", UsedBytes: gib, UnknownBytes: gib},
	}
	if diff := cmp.Diff(want, got, withoutUIDs); diff != "" {
		t.Error(diff)
	}
}

// TestKernel measures real processes: this one, which is in the group that the kernel
// says, and one that has ended.
func TestKernel(t *testing.T) {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	f := &finder{proc: "/proc", cgroups: "/sys/fs/cgroup", found: map[int]member{}}
	owners, err := f.owners()(os.Getpid())
	switch {
	case strings.Contains(string(text), "/.."):
		t.Skip("the test runs in a cgroup namespace of its own")
	case err != nil:
		t.Fatal(err)
	case len(owners) > 0 != strings.Contains(string(text), "pod"):
		t.Errorf("owners = %v of %q", owners, text)
	}
	limit, err := os.ReadFile("/proc/sys/kernel/pid_max")
	if err != nil {
		t.Fatal(err)
	}
	above, err := strconv.Atoi(strings.TrimSpace(string(limit)))
	if err != nil {
		t.Fatal(err)
	}
	if owners, err := f.owners()(above + 1); err == nil {
		t.Errorf("a process that cannot exist: %v", owners)
	}
}
