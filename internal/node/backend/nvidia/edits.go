package nvidia

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
)

const (
	// visibleDevices is the variable in which NVIDIA's container runtime
	// expects the container's GPUs.
	visibleDevices = "NVIDIA_VISIBLE_DEVICES"
	// devicesFolder is where the runtime looks for mounts that name GPUs, when
	// the variable has this folder as its value.
	devicesFolder = "/var/run/nvidia-container-devices"
)

// Edits returns what a container needs to reach the GPUs.
func (b *Backend) Edits(ids ...accel.DeviceID) (backend.Edits, error) {
	if _, err := b.loader.Current(); err != nil {
		return backend.Edits{}, err
	}
	e, names, err := b.table.Edits(ids...)
	if err != nil {
		return backend.Edits{}, err
	}
	e.Env = map[string]string{visibleDevices: strings.Join(names, ",")}
	e.ByMounts = &backend.ByMounts{Env: map[string]string{visibleDevices: devicesFolder}}
	for _, name := range names {
		e.ByMounts.Mounts = append(e.ByMounts.Mounts, backend.Mount{
			Path:     filepath.Join(devicesFolder, name),
			HostPath: os.DevNull,
		})
	}
	return e, nil
}
