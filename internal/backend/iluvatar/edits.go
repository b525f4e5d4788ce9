package iluvatar

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

// cdiKind is the kind of GPUs in the Container Device Interface, unless the
// configuration has another.
const cdiKind = "iluvatar.com/gpu"

// The variables in which the vendor's software expects the container's chips,
// and the ids that kubelet gave. Images exist for the names of either release:
// 4.4 and later, and those before.
var (
	visibleDevices = []string{"ILUVATAR_COREX_VISIBLE_DEVICES", "IX_VISIBLE_DEVICES"}
	replicaDevices = []string{"ILUVATAR_COREX_REPLICA_DEVICES", "IX_REPLICA_DEVICES"}
)

// controlDevice is a device file that all containers share, on drivers that
// have it.
const controlDevice = "dev/itrctl"

// Edits returns what a container needs to reach the chips. Device files have
// the number in the container that they have on the host, and the variables
// name every chip, whether the container gets some of the node's chips or all.
func (b *Backend) Edits(ids ...accel.DeviceID) (backend.Edits, error) {
	chosen, err := b.chosen(ids)
	if err != nil {
		return backend.Edits{}, err
	}
	e := backend.Edits{Env: map[string]string{}, ReplicaEnv: slices.Clone(replicaDevices)}
	var names []string
	for _, c := range chosen {
		if b.options.IndexInEnv {
			names = append(names, strconv.Itoa(c.index))
		} else {
			names = append(names, string(c.id))
		}
		e.DeviceNodes = append(e.DeviceNodes, b.node(fmt.Sprintf("dev/iluvatar%d", c.minor)))
		e.CDIDevices = append(e.CDIDevices, backend.CDIDevice{
			Kind: cmp.Or(b.options.CDIKind, cdiKind),
			Name: string(c.id),
		})
	}
	for _, variable := range visibleDevices {
		e.Env[variable] = strings.Join(names, ",")
	}
	if b.exists(controlDevice) {
		e.DeviceNodes = append(e.DeviceNodes, b.node(controlDevice))
	}
	return e, nil
}

type wanted struct {
	known
	id accel.DeviceID
}

// chosen returns the chips of ids, in the order of their index, each once.
func (b *Backend) chosen(ids []accel.DeviceID) ([]wanted, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil, backend.ErrClosed
	}
	if len(ids) == 0 {
		return nil, errors.New("iluvatar: no device is asked for")
	}
	var chosen []wanted
	for _, id := range ids {
		c, ok := b.chips[id]
		if !ok {
			return nil, fmt.Errorf("iluvatar: device %s was never found on this node", id)
		}
		// The driver numbers chips anew when one is gone.
		if now := b.at[c.index]; now != id {
			return nil, fmt.Errorf("iluvatar: device %s was chip %d, which is %s now", id, c.index, now)
		}
		if now := b.owner[c.minor]; now != id {
			return nil, fmt.Errorf("iluvatar: device %s had /dev/iluvatar%d, which %s has now", id, c.minor, now)
		}
		chosen = append(chosen, wanted{c, id})
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
