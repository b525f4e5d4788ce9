package nvidia

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	securejoin "github.com/cyphar/filepath-securejoin"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/backend"
)

const (
	// cdiKind is the kind of GPUs in the Container Device Interface, unless the
	// configuration has another: that of NVIDIA's own device plugin.
	cdiKind = "k8s.device-plugin.nvidia.com/gpu"
	// visibleDevices is the variable in which NVIDIA's container runtime
	// expects the container's GPUs.
	visibleDevices = "NVIDIA_VISIBLE_DEVICES"
	// devicesFolder is where the runtime looks for mounts that name GPUs, when
	// the variable has this folder as its value.
	devicesFolder = "/var/run/nvidia-container-devices"
)

// controlDevices are device files that all containers with a GPU share, as far
// as the node has them.
var controlDevices = []string{"dev/nvidiactl", "dev/nvidia-uvm", "dev/nvidia-uvm-tools", "dev/nvidia-modeset"}

// Edits returns what a container needs to reach the GPUs.
func (b *Backend) Edits(ids ...accel.DeviceID) (backend.Edits, error) {
	chosen, err := b.chosen(ids)
	if err != nil {
		return backend.Edits{}, err
	}
	var e backend.Edits
	var names []string
	mounts := &backend.ByMounts{Env: map[string]string{visibleDevices: devicesFolder}}
	for _, g := range chosen {
		name := string(g.id)
		if b.options.IndexInEnv {
			name = strconv.Itoa(g.index)
		}
		names = append(names, name)
		mounts.Mounts = append(mounts.Mounts, backend.Mount{
			Path:     filepath.Join(devicesFolder, name),
			HostPath: os.DevNull,
		})
		e.DeviceNodes = append(e.DeviceNodes, b.node(fmt.Sprintf("dev/nvidia%d", g.minor)))
		e.CDIDevices = append(e.CDIDevices, backend.CDIDevice{
			Kind: cmp.Or(b.options.CDIKind, cdiKind),
			Name: string(g.id),
		})
	}
	e.Env = map[string]string{visibleDevices: strings.Join(names, ",")}
	e.ByMounts = mounts
	for _, file := range controlDevices {
		if b.exists(file) {
			e.DeviceNodes = append(e.DeviceNodes, b.node(file))
		}
	}
	return e, nil
}

type wanted struct {
	known
	id accel.DeviceID
}

// chosen returns the GPUs of ids, in the order of their index, each once.
func (b *Backend) chosen(ids []accel.DeviceID) ([]wanted, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil, backend.ErrClosed
	}
	if len(ids) == 0 {
		return nil, errors.New("nvidia: no device is asked for")
	}
	var chosen []wanted
	for _, id := range ids {
		g, ok := b.gpus[id]
		if !ok {
			return nil, fmt.Errorf("nvidia: device %s was never found on this node", id)
		}
		// The driver numbers GPUs anew when one is gone.
		if now := b.at[g.index]; now != id {
			return nil, fmt.Errorf("nvidia: device %s was GPU %d, which is %s now", id, g.index, now)
		}
		if now := b.owner[g.minor]; now != id {
			return nil, fmt.Errorf("nvidia: device %s had /dev/nvidia%d, which %s has now", id, g.minor, now)
		}
		chosen = append(chosen, wanted{g, id})
	}
	slices.SortFunc(chosen, func(a, b wanted) int { return cmp.Compare(a.index, b.index) })
	return slices.Compact(chosen), nil
}

// node is the device file of that path, which has no slash in front.
func (b *Backend) node(file string) backend.DeviceNode {
	return backend.DeviceNode{
		Path:        "/" + file,
		HostPath:    filepath.Join(b.options.HostDriverRoot, file),
		Permissions: "rw",
	}
}

// exists reports whether there is such a file in the driver root.
func (b *Backend) exists(file string) bool {
	path, err := securejoin.SecureJoin(b.options.DriverRoot, file)
	if err != nil {
		return false
	}
	_, err = os.Stat(path)
	return err == nil
}
