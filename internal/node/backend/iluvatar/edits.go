package iluvatar

import (
	"slices"
	"strings"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
)

// The variables in which the vendor's software expects the container's chips,
// and the ids that kubelet gave. Images exist for the names of either release:
// 4.4 and later, and those before.
var (
	visibleDevices = []string{"ILUVATAR_COREX_VISIBLE_DEVICES", "IX_VISIBLE_DEVICES"}
	replicaDevices = []string{"ILUVATAR_COREX_REPLICA_DEVICES", "IX_REPLICA_DEVICES"}
)

// Edits returns what a container needs to reach the chips. Device files have
// the number in the container that they have on the host, and the variables
// name every chip, whether the container gets some of the node's chips or all.
func (b *Backend) Edits(ids ...accel.DeviceID) (backend.Edits, error) {
	if _, err := b.loader.Current(); err != nil {
		return backend.Edits{}, err
	}
	e, names, err := b.table.Edits(ids...)
	if err != nil {
		return backend.Edits{}, err
	}
	e.Env = map[string]string{}
	for _, variable := range visibleDevices {
		e.Env[variable] = strings.Join(names, ",")
	}
	e.ReplicaEnv = slices.Clone(replicaDevices)
	return e, nil
}
