package main

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/prometheus/procfs"
)

// Machine is what a result depends on besides the code.
type Machine struct {
	CPU   string
	Cores int
	// MemoryGB is in GB of 10^9 bytes.
	MemoryGB float64
	Linux    string
	// Load is how many processes ran or waited in the minute before the run.
	Load       float64
	Go         string
	Kubernetes string
	Etcd       string
}

// busy is how long all processors together have computed for programs of this machine,
// and how long they were given to others by the machine below.
type busy struct{ used, stolen time.Duration }

func busyNow() (busy, error) {
	fs, err := procfs.NewDefaultFS()
	if err != nil {
		return busy{}, fmt.Errorf("how busy this machine is: %w", err)
	}
	stat, err := fs.Stat()
	if err != nil {
		return busy{}, fmt.Errorf("how busy this machine is: %w", err)
	}
	c := stat.CPUTotal
	seconds := func(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
	return busy{seconds(c.User + c.Nice + c.System + c.IRQ + c.SoftIRQ), seconds(c.Steal)}, nil
}

func describe() (Machine, error) {
	m := Machine{Cores: runtime.NumCPU(), Go: runtime.Version()}
	fs, err := procfs.NewDefaultFS()
	cpus, cpuErr := fs.CPUInfo()
	memory, memoryErr := fs.Meminfo()
	load, loadErr := fs.LoadAvg()
	release, releaseErr := os.ReadFile("/proc/sys/kernel/osrelease")
	if err := errors.Join(err, cpuErr, memoryErr, loadErr, releaseErr); err != nil {
		return m, fmt.Errorf("describe this machine: %w", err)
	}
	if len(cpus) > 0 {
		m.CPU = cpus[0].ModelName
	}
	if memory.MemTotal != nil {
		m.MemoryGB = float64(*memory.MemTotal) * 1024 / 1e9
	}
	m.Load, m.Linux = load.Load1, strings.TrimSpace(string(release))
	return m, nil
}
