package usage

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
)

// BenchmarkPass makes passes over 8 devices, each with 64 processes of 16 containers,
// and reports the processor time of one. "first" knows no process yet. "kernel" reads
// the real /proc instead of files, of this process again and again; it is in no container,
// so all is read each time.
func BenchmarkPass(b *testing.B) {
	const devices, containers, processes = 8, 16, 64
	b.Run("files", func(b *testing.B) {
		w := newWorld(b, devices, containers, processes)
		m := NewMeter(w.tree.proc, w.tree.cgroups)
		w.pass(b, m)
		timed(b, func() { w.pass(b, m) })
	})
	b.Run("files, first", func(b *testing.B) {
		w := newWorld(b, devices, containers, processes)
		timed(b, func() { w.pass(b, NewMeter(w.tree.proc, w.tree.cgroups)) })
	})
	b.Run("kernel", func(b *testing.B) {
		if err := HostPIDs("/proc"); err != nil {
			b.Skip(err)
		}
		w := newWorld(b, devices, containers, 0)
		for d := range w.devices {
			id := w.devices[d].ID
			list := make([]backend.Process, processes)
			for i := range list {
				list[i] = uses(os.Getpid(), 1)
			}
			w.backends["v"].(fake)[id] = measured(80*gib, list...)
		}
		timed(b, func() { w.pass(b, NewMeter("/proc", "/sys/fs/cgroup")) })
	})
}

// timed runs a benchmark and reports the processor time of one round, of all threads.
func timed(b *testing.B, round func()) {
	b.Helper()
	b.ReportAllocs()
	before := processorTime(b)
	for b.Loop() {
		round()
	}
	b.ReportMetric(float64((processorTime(b)-before).Microseconds())/float64(b.N)/1000, "cpu-ms/pass")
}

// processorTime returns what this process has used so far.
func processorTime(b *testing.B) time.Duration {
	b.Helper()
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// world is a node for benchmarks.
type world struct {
	tree       *tree
	backends   map[string]backend.Meter
	devices    []Device
	containers []Container
	pods       Pods
}

// newWorld returns a node with devices of one vendor, on each of which pods with one
// container have processes.
func newWorld(b *testing.B, devices, containers, processes int) *world {
	b.Helper()
	f := fake{}
	w := &world{tree: newTree(b), backends: map[string]backend.Meter{"v": f},
		pods: Pods{ByUID: map[string]PodName{}, ByContainer: map[string]ContainerName{}}}
	// What /proc/<pid>/cgroup has on a node with version 1 is the longest.
	const group = "12:pids:%[1]s\n11:cpuset:%[1]s\n10:memory:%[1]s\n9:hugetlb:%[1]s\n8:devices:%[1]s\n7:perf_event:%[1]s\n6:blkio:%[1]s\n" +
		"5:freezer:%[1]s\n4:net_cls,net_prio:%[1]s\n3:rdma:%[1]s\n2:cpu,cpuacct:%[1]s\n1:name=systemd:%[1]s\n0::/\n"
	pid := 1000
	for d := range devices {
		id := accel.DeviceID(fmt.Sprintf("GPU-%d", d))
		w.devices = append(w.devices, Device{Vendor: "v", ID: id, Index: d, MemoryBytes: 80 * gib})
		var list []backend.Process
		for c := range containers {
			n := d*containers + c + 1
			uid, pod := fmt.Sprintf("6c0f7a11-9a2b-4c3d-8e4f-%012x", n), fmt.Sprintf("pod-%d", n)
			w.pods.ByUID[uid] = PodName{"team", pod}
			w.pods.ByContainer[fmt.Sprintf("%064x", n)] = ContainerName{"team", pod, "main"}
			w.containers = append(w.containers, Container{
				Namespace: "team", Pod: pod, PodUID: uid, Name: "main", Resource: resource, Device: id, Bytes: 4 * gib,
			})
			path := fmt.Sprintf("/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod%s.slice/cri-containerd-%064x.scope",
				strings.ReplaceAll(uid, "-", "_"), n)
			for range processes / containers {
				pid++
				w.tree.process(pid, "S", uint64(pid), fmt.Sprintf(group, path))
				list = append(list, uses(pid, 1))
			}
		}
		f[id] = measured(80*gib, list...)
	}
	return w
}

// pass makes a pass and checks that all was attributed.
func (w *world) pass(b *testing.B, m *Meter) {
	b.Helper()
	for _, d := range m.Pass(b.Context(), w.backends, w.devices, w.containers, w.pods) {
		if known := d.UsedBytes - d.UnknownBytes; d.Problem != "" || known != 64*gib {
			b.Fatalf("device %s: %d of %d bytes are known: %s", d.Device, known, d.UsedBytes, d.Problem)
		}
	}
}
