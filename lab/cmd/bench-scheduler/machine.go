package main

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/prometheus/procfs"
)

// Machine is what a result depends on besides the code.
type Machine struct {
	CPU   string `json:"cpu"`
	Cores int    `json:"cores"`
	// MemoryGB is in GB of 10^9 bytes.
	MemoryGB float64 `json:"memoryGB"`
	Linux    string  `json:"linux"`
	// Load is how many processes ran or waited in the minute before the run.
	Load       float64 `json:"loadBefore"`
	Go         string  `json:"go"`
	Kubernetes string  `json:"kubernetes"`
	Etcd       string  `json:"etcd"`
}

// busy is how long all processors together have computed for programs of this machine,
// and how long they were given to others by the machine below.
type busy struct{ used, stolen time.Duration }

// busyNow reads both.
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

// describe looks at this machine.
func describe() (Machine, error) {
	m := Machine{Cores: runtime.NumCPU(), Go: runtime.Version()}
	fs, err := procfs.NewDefaultFS()
	if err != nil {
		return m, fmt.Errorf("describe this machine: %w", err)
	}
	cpus, err := fs.CPUInfo()
	if err != nil {
		return m, fmt.Errorf("describe this machine: %w", err)
	}
	if len(cpus) > 0 {
		m.CPU = cpus[0].ModelName
	}
	memory, err := fs.Meminfo()
	if err != nil {
		return m, fmt.Errorf("describe this machine: %w", err)
	}
	if memory.MemTotal != nil {
		m.MemoryGB = float64(*memory.MemTotal) * 1024 / 1e9
	}
	load, err := fs.LoadAvg()
	if err != nil {
		return m, fmt.Errorf("describe this machine: %w", err)
	}
	m.Load = load.Load1
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return m, fmt.Errorf("describe this machine: %w", err)
	}
	m.Linux = strings.TrimSpace(string(release))
	return m, nil
}
