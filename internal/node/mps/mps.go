// Package mps runs NVIDIA's multi-process service: one control daemon for each GPU whose
// containers share it by the isolation cooperative. It also decides whether what a daemon
// reports is what was promised.
//
// Two programs take part. The node's daemon writes a Wish: the GPUs that need a control
// daemon. The service of this package, in a pod of its own so that programs that use a GPU
// outlive an upgrade of the node's daemon, follows the wish and writes a Report, which the
// node's daemon judges. Both are files in Dir.
package mps

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/platform/atomicfile"
)

// Dir is the folder of the host for the files and pipes of this package.
const Dir = "/run/divvy/mps"

// Backend is the name of what enforces the tier, see accel.Isolation.
const Backend = "mps2"

// Interval is the time between two passes of the service.
const Interval = 10 * time.Second

// maxAge is how old a report may be: one pass may be late.
const maxAge = 3 * Interval

const (
	wishFile   = "wish.json"
	reportFile = "report.json"
)

// Wish is what the node's daemon wants of the service.
type Wish struct {
	// Devices are the UUIDs of the GPUs that need a control daemon, sorted.
	Devices []accel.DeviceID `json:"devices"`
	// DriverRoot is the folder of the driver's installation on the host.
	DriverRoot string `json:"driverRoot"`
}

// Report is what the service found in its last pass.
type Report struct {
	Time    time.Time                        `json:"time"`
	Devices map[accel.DeviceID]*DeviceReport `json:"devices"`
}

// DeviceReport is what a pass found of a GPU.
type DeviceReport struct {
	// Problem is why the GPU's control daemon does not serve, "" if it does.
	Problem string `json:"problem,omitempty"`
	// Exclusive is true if the compute mode was EXCLUSIVE_PROCESS when the pass began.
	Exclusive bool     `json:"exclusive"`
	Servers   []Server `json:"servers,omitempty"`
}

// Server is an MPS server: a process that has the only context of a GPU, for its clients.
type Server struct {
	PID int `json:"pid"`
	// State is as the control daemon reports it, such as ACTIVE.
	State string `json:"state"`
	// Clients are the ids of the processes that it serves, in the host's PID namespace.
	Clients []int `json:"clients,omitempty"`
}

// daemonFolder is the folder of a GPU's pipes, where its control daemon makes them. It stays for as
// long as the host runs: containers have it mounted.
const daemonFolder = "daemon"

// PipeDir is where containers get a GPU's pipes from, in the folder of all: a link to them that is
// there while the control daemon answers. Without it a container cannot be created.
func PipeDir(dir string, id accel.DeviceID) string { return filepath.Join(dir, string(id), "pipe") }

// daemonDir is the folder of a GPU's pipes as its control daemon knows it.
func daemonDir(dir string, id accel.DeviceID) string {
	return filepath.Join(dir, string(id), daemonFolder)
}

// LogDir is the folder of the logs of a GPU's control daemon and servers.
func LogDir(dir string, id accel.DeviceID) string { return filepath.Join(dir, string(id), "log") }

// SharedMemoryDir is the folder that servers and clients of a node have as /dev/shm.
func SharedMemoryDir(dir string) string { return filepath.Join(dir, "shm") }

// WriteWish makes the service follow a wish.
func WriteWish(dir string, w Wish) error { return write(dir, wishFile, w) }

// ReadWish returns the last wish; the zero value if there is none.
func ReadWish(dir string) (w Wish, err error) {
	if err = read(dir, wishFile, &w); errors.Is(err, fs.ErrNotExist) {
		return Wish{}, nil
	}
	return w, err
}

// WriteReport makes the node's daemon judge a report.
func WriteReport(dir string, r Report) error { return write(dir, reportFile, r) }

// ErrNotRunning says that nothing serves the node.
var ErrNotRunning = fmt.Errorf("DaemonSet divvy-mps has reported nothing for %v: its pod does not run on the node (the chart has none if "+
	"only node.existingConfigMap asks for it), or the driver does not respond", maxAge)

// ReadReport returns the last report. The error is ErrNotRunning if there is none that is
// current. One from the future is not: it would stay current for as long as the clock was wrong.
func ReadReport(dir string, now time.Time) (r Report, err error) {
	err = read(dir, reportFile, &r)
	if errors.Is(err, fs.ErrNotExist) || err == nil && (now.Sub(r.Time) > maxAge || r.Time.Sub(now) > Interval) {
		return Report{}, ErrNotRunning
	}
	return r, err
}

func write(dir, name string, content any) error {
	data, err := json.Marshal(content)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil { // containers of any user reach their pipes through it
		return err
	}
	_, err = atomicfile.Replace(filepath.Join(dir, name), data, 0o600)
	return err
}

func read(dir, name string, into any) error {
	data, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, into); err != nil {
		return fmt.Errorf("read %s: %w", filepath.Join(dir, name), err)
	}
	return nil
}

// Percent returns the share of a GPU's multiprocessors that belongs to a share of its
// memory: rounded, from 1 to 100.
func Percent(bytes, total uint64) int {
	if total == 0 {
		return 100
	}
	return int(min(max((bytes*200+total)/(2*total), 1), 100))
}
