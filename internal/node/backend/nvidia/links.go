package nvidia

import (
	"context"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/go-logr/logr"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend/libloader"
	"github.com/divvy-gpu/divvy/internal/node/backend/links"
)

// nearness is what the library answered about connections.
type nearness struct {
	// levels are the scores of the way over PCIe; 0 when a pair has none.
	levels links.Memo[links.Pair, int]
	// lanes count the lanes (NVLink) of each GPU by the address of the GPU at
	// their other end.
	lanes links.Memo[accel.DeviceID, map[string]int]
}

// levels are the scores of the levels of nvmlDeviceGetTopologyCommonAncestor.
var levels = map[nvml.GpuTopologyLevel]int{
	nvml.TOPOLOGY_INTERNAL:   accel.LinkBoard,
	nvml.TOPOLOGY_SINGLE:     accel.LinkSwitch,
	nvml.TOPOLOGY_MULTIPLE:   accel.LinkSwitches,
	nvml.TOPOLOGY_HOSTBRIDGE: accel.LinkHostBridge,
	nvml.TOPOLOGY_NODE:       accel.LinkNode,
	nvml.TOPOLOGY_SYSTEM:     accel.LinkSystem,
}

// links asks how closely the GPUs are connected. Its error is one that
// libloader.IsFatal.
func (b *Backend) links(ctx context.Context, lib *library, gpus []*gpu) ([]accel.Link, error) {
	if len(gpus) < 2 {
		return nil, nil
	}
	slots := links.Slots(gpus)
	b.during.near.levels.For(slots)
	b.during.near.lanes.For(slots)
	lanes := map[accel.DeviceID]map[string]int{}
	for _, g := range gpus {
		var err error
		lanes[g.ID], err = b.during.near.lanes.Get(g.ID, func() (map[string]int, bool, error) { return b.lanes(ctx, lib, g) })
		if err != nil {
			return nil, err
		}
	}
	return links.Between(gpus, func(one, two *gpu) (int, error) {
		score, err := b.during.near.levels.Get(links.Pair{one.ID, two.ID}, func() (int, bool, error) { return b.level(ctx, lib, one, two) })
		// Each end counts the lanes; one of them may not know its own.
		return score + accel.LinkLane*max(lanes[one.ID][two.PCI], lanes[two.ID][one.PCI]), err
	})
}

// level asks for the score of the way between two GPUs over PCIe, 0 when there
// is none. One direction is enough; the other is asked when the first one fails.
// It is not known when both do. Its error is one that libloader.IsFatal.
func (b *Backend) level(ctx context.Context, lib *library, one, two *gpu) (score int, known bool, err error) {
	for _, way := range [][2]*gpu{{one, two}, {two, one}} {
		from, to := way[0], way[1]
		var level nvml.GpuTopologyLevel
		level, err = queryGPU(ctx, b, lib, "nvmlDeviceGetTopologyCommonAncestor", from.Index, func() (nvml.GpuTopologyLevel, nvml.Return) {
			return from.described.handle.GetTopologyCommonAncestor(to.described.handle)
		})
		switch {
		case libloader.IsFatal(err):
			return 0, false, err
		case err == nil:
			return levels[level], true, nil // 0 for a level that is not known
		}
	}
	if unsupported(err) {
		return 0, true, nil
	}
	logr.FromContextOrDiscard(ctx).V(2).Info("The link between two GPUs is unknown",
		"vendor", Vendor, "devices", links.Pair{one.ID, two.ID}, "err", err)
	return 0, false, nil
}

// lanes counts the lanes of a GPU that are up, by the address of the GPU at
// their other end. They are not all known when the library fails to tell where
// one leads. Its error is one that libloader.IsFatal.
func (b *Backend) lanes(ctx context.Context, lib *library, g *gpu) (lanes map[string]int, known bool, err error) {
	lanes, known = map[string]int{}, true
	for lane := range nvml.NVLINK_MAX_LINKS {
		peer, err := b.peer(ctx, lib, g, lane)
		switch {
		case libloader.IsFatal(err):
			return nil, false, err
		case libloader.HasCode(err, nvml.ERROR_INVALID_ARGUMENT, nvml.ERROR_FUNCTION_NOT_FOUND): // there are no more
			return lanes, true, nil
		case unsupported(err):
		case err != nil:
			known = false
			logr.FromContextOrDiscard(ctx).V(2).Info("Where a lane of a GPU leads is not known",
				"vendor", Vendor, "device", g.ID, "lane", lane, "err", err)
		case peer != "":
			lanes[peer]++
		}
	}
	return lanes, known, nil
}

// peer returns the address of what is at the other end of a lane, "" when the
// lane is down.
func (b *Backend) peer(ctx context.Context, lib *library, g *gpu, lane int) (string, error) {
	state, err := queryGPU(ctx, b, lib, "nvmlDeviceGetNvLinkState", g.Index, func() (nvml.EnableState, nvml.Return) {
		return g.described.handle.GetNvLinkState(lane)
	})
	if err != nil || state != nvml.FEATURE_ENABLED {
		return "", err
	}
	pci, err := queryGPU(ctx, b, lib, "nvmlDeviceGetNvLinkRemotePciInfo_v2", g.Index, func() (nvml.PciInfo, nvml.Return) {
		return g.described.handle.GetNvLinkRemotePciInfo(lane)
	})
	if err != nil {
		return "", err
	}
	return address(pci), nil
}
