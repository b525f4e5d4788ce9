package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
)

// hostPIDs is the link of the initial pid namespace, whose number is fixed in the kernel.
const hostPIDs = "pid:[4026531836]"

// processes compares the lists of processes with the memory in use.
func (t *test) processes(context.Context) error {
	t.title("Processes and memory")
	namespace, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		return fmt.Errorf("look up the pid namespace: %w", err)
	}
	t.seesAllProcesses = namespace == hostPIDs
	if t.seesAllProcesses {
		t.note("gpu-test is in the host's pid namespace (%s).", namespace)
	} else {
		t.note("gpu-test is not in the host's pid namespace (%s): the driver leaves out the processes of others, and sums are too low.",
			namespace)
	}
	mps := mpsRuns(t.root, t.inspected.GPUs)
	if !mps {
		t.note("MPS is not running, so nothing was measured with it.")
	}
	rows := [][]string{}
	for _, gpu := range t.inspected.GPUs {
		t.compareMemory(gpu)
		row := []string{fmt.Sprint(gpu.Index)}
		for _, list := range gpu.Lists {
			row = append(row, cmp.Or(list.Err, fmt.Sprint(len(list.Processes))))
		}
		use := useOf(gpu.Lists)
		row = append(row, fmt.Sprint(use.withoutEntry), fmt.Sprint(use.unknown), mib(use.bytes))
		if gpu.Memory.Err != "" {
			row = append(row, gpu.Memory.Err, "", "", "")
		} else {
			row = append(row, mib(gpu.Memory.Used), mib(gpu.Memory.Reserved), mib(gpu.Memory.Free), mib(gpu.Memory.Total))
		}
		rows = append(rows, row)
	}
	t.table(table{Head: []string{"GPU", "compute", "graphics", "MPS", "without /proc entry", "memory unknown", "sum, MiB",
		"used, MiB", "reserved", "free", "total"}, Rows: rows})
	return nil
}

// compareMemory checks what NVML reports about the memory of a GPU.
func (t *test) compareMemory(gpu inspectedGPU) {
	what := fmt.Sprintf("GPU %d ", gpu.Index)
	for _, list := range gpu.Lists {
		if list.Name == "compute" {
			t.checks.True(what+"lists its compute processes", list.Err == "", cmp.Or(list.Err, fmt.Sprint(len(list.Processes))))
		}
	}
	if gpu.Memory.Err != "" {
		t.note("GPU %d: nvmlDeviceGetMemoryInfo_v2: %s. There is nothing to compare the processes' memory with.", gpu.Index, gpu.Memory.Err)
		return
	}
	use := useOf(gpu.Lists)
	t.checks.True(what+"uses at least what its processes use", fits(use.bytes, gpu.Memory.Used),
		fmt.Sprintf("%s MiB of processes, %s MiB used", mib(use.bytes), mib(gpu.Memory.Used)))
}

// fits reports whether a sum over processes goes with the memory in use. The two are not
// taken at the same time, and a sum that is a little too high proves nothing.
func fits(sum, used uint64) bool { return sum <= used+used/20 }

// use is what the processes of a GPU use.
type use struct {
	bytes uint64
	// unknown counts those of which no amount is known, withoutEntry those that /proc does
	// not show here.
	unknown, withoutEntry int
}

// useOf sums the lists of a GPU up.
func useOf(lists []processList) (u use) {
	for _, p := range merged(lists) {
		u.bytes += p.Bytes
		if !p.Known {
			u.unknown++
		}
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", p.PID)); err != nil {
			u.withoutEntry++
		}
	}
	return u
}

// merged are the processes of all lists, each once, with the largest amount that is known.
func merged(lists []processList) []process {
	byPID := map[uint32]process{}
	for _, list := range lists {
		for _, p := range list.Processes {
			if !p.Known {
				p.Bytes = 0
			}
			had := byPID[p.PID]
			byPID[p.PID] = process{PID: p.PID, Bytes: max(p.Bytes, had.Bytes), Known: p.Known || had.Known}
		}
	}
	var out []process
	for _, p := range byPID {
		out = append(out, p)
	}
	slices.SortFunc(out, func(a, b process) int { return cmp.Compare(a.PID, b.PID) })
	return out
}

// mpsRuns reports whether NVIDIA's multi-process service runs: it has clients, or its
// control socket is in a usual place.
func mpsRuns(root string, gpus []inspectedGPU) bool {
	for _, gpu := range gpus {
		if slices.ContainsFunc(gpu.Lists, func(l processList) bool { return l.Name == "MPS" && len(l.Processes) > 0 }) {
			return true
		}
	}
	for _, dir := range []string{os.Getenv("CUDA_MPS_PIPE_DIRECTORY"), "/tmp/nvidia-mps", "/run/nvidia-mps"} {
		if dir == "" {
			continue
		}
		if _, err := os.Stat(filepath.Join(root, dir, "control")); err == nil {
			return true
		}
	}
	return false
}

func mib(bytes uint64) string { return fmt.Sprint(bytes >> 20) }

// process returns the process with that id on the GPU.
func (gpu inspectedGPU) process(pid int) (process, bool) {
	for _, p := range merged(gpu.Lists) {
		if int(p.PID) == pid {
			return p, true
		}
	}
	return process{}, false
}
