package nvidia

import (
	"cmp"
	"context"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/go-logr/logr"

	"github.com/divvy-gpu/divvy/internal/accel"
)

// nearness remembers what the library answered about connections, which is the
// same for as long as the same GPUs are in the same slots. What the library
// failed to answer is not in it, and is asked again.
type nearness struct {
	gpus string // which GPUs in which slots
	// levels are the scores of the way over PCIe, by pair; 0 when the two have
	// none.
	levels map[pair]int
	// lanes count the lanes (NVLink) of each GPU by the address of the GPU at
	// their other end.
	lanes map[accel.DeviceID]map[string]int
}

// pair is two GPUs, the lower id first.
type pair [2]accel.DeviceID

// levels are the scores of the levels of nvmlDeviceGetTopologyCommonAncestor.
var levels = map[nvml.GpuTopologyLevel]int{
	nvml.TOPOLOGY_INTERNAL:   accel.LinkBoard,
	nvml.TOPOLOGY_SINGLE:     accel.LinkSwitch,
	nvml.TOPOLOGY_MULTIPLE:   accel.LinkSwitches,
	nvml.TOPOLOGY_HOSTBRIDGE: accel.LinkHostBridge,
	nvml.TOPOLOGY_NODE:       accel.LinkNode,
	nvml.TOPOLOGY_SYSTEM:     accel.LinkSystem,
}

// links asks how closely the GPUs are connected. Its error is one that isFatal.
func (b *Backend) links(ctx context.Context, lib *library, gpus []*gpu) ([]accel.Link, error) {
	if len(gpus) < 2 {
		return nil, nil
	}
	gpus = slices.SortedFunc(slices.Values(gpus), func(a, b *gpu) int { return cmp.Compare(a.ID, b.ID) })
	var where strings.Builder
	for _, g := range gpus {
		where.WriteString(string(g.ID) + "@" + g.PCI + " ")
	}
	if b.near.gpus != where.String() {
		b.near = nearness{gpus: where.String(), levels: map[pair]int{}, lanes: map[accel.DeviceID]map[string]int{}}
	}
	lanes := map[accel.DeviceID]map[string]int{}
	for _, g := range gpus {
		var err error
		if lanes[g.ID], err = b.lanes(ctx, lib, g); err != nil {
			return nil, err
		}
	}
	var links []accel.Link
	for i, one := range gpus {
		for _, two := range gpus[i+1:] {
			score, err := b.level(ctx, lib, one, two)
			if err != nil {
				return nil, err
			}
			// Each end counts the lanes; one of them may not know its own.
			score += accel.LinkLane * max(lanes[one.ID][two.PCI], lanes[two.ID][one.PCI])
			if score > 0 {
				links = append(links, accel.Link{A: one.ID, B: two.ID, Score: score})
			}
		}
	}
	return links, nil
}

// level is the score of the way between two GPUs over PCIe, 0 when none is
// known. One direction is enough; the other is asked when the first one fails.
// Its error is one that isFatal.
func (b *Backend) level(ctx context.Context, lib *library, one, two *gpu) (int, error) {
	p := pair{one.ID, two.ID}
	if score, ok := b.near.levels[p]; ok {
		return score, nil
	}
	var err error
	for _, way := range [][2]*gpu{{one, two}, {two, one}} {
		from, to := way[0], way[1]
		var level nvml.GpuTopologyLevel
		level, err = queryGPU(ctx, b, b.calls, lib, "nvmlDeviceGetTopologyCommonAncestor", from.Index, func() (nvml.GpuTopologyLevel, nvml.Return) {
			return from.handle.GetTopologyCommonAncestor(to.handle)
		})
		switch {
		case isFatal(err):
			return 0, err
		case err == nil:
			b.near.levels[p] = levels[level] // 0 for a level that is not known
			return levels[level], nil
		}
	}
	if unsupported(err) {
		b.near.levels[p] = 0
		return 0, nil
	}
	logr.FromContextOrDiscard(ctx).V(2).Info("How two GPUs are connected is not known",
		"vendor", Vendor, "devices", p, "err", err)
	return 0, nil
}

// lanes counts the lanes of a GPU that are up, by the address of the GPU at
// their other end. Its error is one that isFatal.
func (b *Backend) lanes(ctx context.Context, lib *library, g *gpu) (map[string]int, error) {
	if lanes, ok := b.near.lanes[g.ID]; ok {
		return lanes, nil
	}
	lanes := map[string]int{}
	complete := true
	for lane := range nvml.NVLINK_MAX_LINKS {
		peer, err := b.peer(ctx, lib, g, lane)
		switch {
		case isFatal(err):
			return nil, err
		case hasCode(err, nvml.ERROR_INVALID_ARGUMENT, nvml.ERROR_FUNCTION_NOT_FOUND): // there are no more
			b.near.lanes[g.ID] = lanes
			return lanes, nil
		case unsupported(err):
		case err != nil:
			complete = false
			logr.FromContextOrDiscard(ctx).V(2).Info("Where a lane of a GPU leads is not known",
				"vendor", Vendor, "device", g.ID, "lane", lane, "err", err)
		case peer != "":
			lanes[peer]++
		}
	}
	if complete {
		b.near.lanes[g.ID] = lanes
	}
	return lanes, nil
}

// peer returns the address of what is at the other end of a lane, "" when the
// lane is down.
func (b *Backend) peer(ctx context.Context, lib *library, g *gpu, lane int) (string, error) {
	state, err := queryGPU(ctx, b, b.calls, lib, "nvmlDeviceGetNvLinkState", g.Index, func() (nvml.EnableState, nvml.Return) {
		return g.handle.GetNvLinkState(lane)
	})
	if err != nil || state != nvml.FEATURE_ENABLED {
		return "", err
	}
	pci, err := queryGPU(ctx, b, b.calls, lib, "nvmlDeviceGetNvLinkRemotePciInfo_v2", g.Index, func() (nvml.PciInfo, nvml.Return) {
		return g.handle.GetNvLinkRemotePciInfo(lane)
	})
	if err != nil {
		return "", err
	}
	return address(pci), nil
}
