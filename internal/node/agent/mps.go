package agent

import (
	"fmt"
	"strconv"
	"strings"

	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/limits"
	"github.com/divvy-gpu/divvy/internal/node/mps"
)

// mpsKind is the kind of the CDI devices that make a container's programs clients of MPS, and
// nothing else. Their names are "<GPU>.<percent>.<MiB>".
const mpsKind = "divvy.dev/gpu-mps"

// Paths in a container. The pipes are not in /tmp, which entrypoints empty.
const (
	mpsPipesInside        = "/run/nvidia-mps"
	mpsSharedMemoryInside = "/dev/shm"
)

// mpsDesk has what the last pass over MPS has found. A container of a resource with the isolation
// cooperative is a client of MPS whether or not that serves: one that is not could not use the
// device when it does. It is safe for concurrent use.
type mpsDesk struct{ proof }

func newMPSDesk(c config.NodeConfig) *mpsDesk {
	d := &mpsDesk{proof: newProof(c, config.IsolationCooperative)}
	d.stated.Compute, d.stated.Backend = accel.TierCooperative, mps.Backend
	return d
}

// kind implements sized.
func (*mpsDesk) kind() string { return mpsKind }

// limited implements sized.
func (d *mpsDesk) limited(p *pool, device accel.Device) bool {
	return d.proves(p) && device.Parent == "" && !device.Partitioned
}

// devices implements sized.
func (d *mpsDesk) devices(p *pool, device accel.Device) []cdispecs.Device {
	var out []cdispecs.Device
	for n := range p.config.Unit.Units(device.MemoryBytes) {
		if mib := limitMiB(p.config.Unit.Bytes(n+1, device.MemoryBytes)); mib > 0 {
			one, _ := d.of(p, device, mib, 0)
			out = append(out, one)
		}
	}
	return out
}

// of implements sized.
func (*mpsDesk) of(_ *pool, device accel.Device, mib uint64, percent int) (cdispecs.Device, bool) {
	if percent == 0 {
		percent = mps.Percent(mib*limits.MiB, uint64(max(device.MemoryBytes, 0)))
	}
	mount := func(host, inside, access string) *cdispecs.Mount {
		return &cdispecs.Mount{HostPath: host, ContainerPath: inside, Options: []string{access, "nosuid", "nodev", "rbind", "rprivate"}}
	}
	return cdispecs.Device{
		Name: fmt.Sprintf("%s.%d.%d", device.ID, percent, mib),
		ContainerEdits: cdispecs.ContainerEdits{
			// The container has this GPU alone, which therefore is number 0.
			Env: []string{
				"CUDA_MPS_PIPE_DIRECTORY=" + mpsPipesInside,
				fmt.Sprintf("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=%d", percent),
				fmt.Sprintf("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=%dM", mib),
			},
			Mounts: []*cdispecs.Mount{
				// A socket can be connected to, and a pipe opened for writing, where no file can be made or removed.
				mount(mps.PipeDir(mps.Dir, device.ID), mpsPipesInside, "ro"),
				mount(mps.SharedMemoryDir(mps.Dir), mpsSharedMemoryInside, "rw"),
			},
		},
	}, true
}

// renewed implements sized.
func (d *mpsDesk) renewed(p *pool, device accel.Device, before cdispecs.Device) cdispecs.Device {
	percentText, mibText, _ := strings.Cut(before.Name[len(device.ID)+1:], ".")
	percent, err := strconv.Atoi(percentText)
	mib, mibErr := strconv.ParseUint(mibText, 10, 64)
	if err != nil || mibErr != nil || percent < 1 {
		return before
	}
	now, _ := d.of(p, device, mib, percent)
	return now
}
