package devicelist

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	securejoin "github.com/cyphar/filepath-securejoin"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
)

// Edits returns the device files and CDI names of the devices, and the names
// that the vendor's variables have for them: ids, or indices if the options say
// so. All are in the order of the devices' Index, each device once, whatever
// the order of ids.
func (r *Table) Edits(ids ...accel.DeviceID) (e backend.Edits, names []string, err error) {
	chosen, err := r.choose(ids)
	if err != nil {
		return backend.Edits{}, nil, fmt.Errorf("%s: %w", r.kind.Vendor, err)
	}
	seen, host := r.options.DeviceRoot()
	files := []string{}
	for _, d := range chosen {
		name := string(d.id)
		if r.options.IndexInEnv {
			name = accel.IndexText(d.index)
		}
		names = append(names, name)
		for _, file := range append([]string{fmt.Sprintf("%s%d", r.kind.File, d.minor)}, d.nodes...) {
			if !slices.Contains(files, file) { // partitions of one device have its file in common
				files = append(files, file)
				e.DeviceNodes = append(e.DeviceNodes, node(host, file))
			}
		}
		e.CDIDevices = append(e.CDIDevices, backend.CDIDevice{
			Kind: cmp.Or(r.options.CDIKind, r.kind.CDI),
			Name: string(d.id),
		})
		if r.kind.FormerCDI != "" && r.options.CDIKind == "" {
			e.FormerCDIDevices = append(e.FormerCDIDevices, backend.CDIDevice{Kind: r.kind.FormerCDI, Name: string(d.id)})
		}
	}
	for _, file := range r.kind.Shared {
		if exists(seen, file) {
			e.DeviceNodes = append(e.DeviceNodes, node(host, file))
		}
	}
	return e, names, nil
}

// choose returns the devices of ids, in the order of their index, each once.
func (r *Table) choose(ids []accel.DeviceID) ([]known, error) {
	if len(ids) == 0 {
		return nil, errors.New("no device is asked for")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	var chosen []known
	for _, id := range ids {
		d, ok := r.known[id]
		if !ok {
			return nil, fmt.Errorf("device %s was never found on this node", id)
		}
		// The driver renumbers devices when one is gone.
		if now := r.at[d.index]; now != id {
			return nil, fmt.Errorf("device %s was %s %s, which is %s now", id, r.kind.Noun, accel.IndexText(d.index), now)
		}
		if now := r.owner[d.minor]; now != d.owner {
			return nil, fmt.Errorf("device %s had /%s%d, which %s has now", id, r.kind.File, d.minor, now)
		}
		chosen = append(chosen, d)
	}
	slices.SortFunc(chosen, func(a, b known) int { return cmp.Compare(a.index, b.index) })
	return slices.CompactFunc(chosen, func(a, b known) bool { return a.id == b.id }), nil
}

// node is the device file of that path, which has no slash in front, below that folder of
// the host.
func node(host, file string) backend.DeviceNode {
	return backend.DeviceNode{
		Path:        "/" + file,
		HostPath:    filepath.Join(host, file),
		Permissions: "rw",
	}
}

// Exists reports whether there is such a device file.
func (r *Table) Exists(file string) bool {
	seen, _ := r.options.DeviceRoot()
	return exists(seen, file)
}

func exists(root, file string) bool {
	path, err := securejoin.SecureJoin(root, file)
	if err != nil {
		return false
	}
	_, err = os.Stat(path)
	return err == nil
}
