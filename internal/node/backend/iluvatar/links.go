package iluvatar

import (
	"context"

	"github.com/go-logr/logr"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend/libloader"
	"github.com/divvy-gpu/divvy/internal/node/backend/links"
)

// scores are the scores of the levels of nvmlDeviceGetTopologyCommonAncestor.
var scores = map[int32]int{
	0:  accel.LinkBoard,
	10: accel.LinkSwitch,
	20: accel.LinkSwitches,
	30: accel.LinkHostBridge,
	40: accel.LinkNode,
	50: accel.LinkSystem,
}

// links asks how closely the chips are connected. Its error is one that
// libloader.IsFatal.
func (b *Backend) links(ctx context.Context, lib *library, chips []*chip) ([]accel.Link, error) {
	b.near.For(links.Slots(chips))
	return links.Between(chips, func(one, two *chip) (int, error) {
		return b.near.Get(links.Pair{one.ID, two.ID}, func() (score int, known bool, err error) {
			return b.score(ctx, lib, one, two)
		})
	})
}

// score asks for the score of the link between two chips, 0 when there is none.
// It is not known when the library fails to tell. Its error is one that
// libloader.IsFatal.
func (b *Backend) score(ctx context.Context, lib *library, one, two *chip) (score int, known bool, err error) {
	if one.Board != "" && one.Board == two.Board {
		return accel.LinkBoard, true, nil
	}
	level, err := eitherWay(ctx, b, lib, "nvmlDeviceGetTopologyCommonAncestor", one.handle, two.handle, lib.board.ancestor)
	switch {
	case libloader.IsFatal(err):
		return 0, false, err
	case err == nil:
		return scores[level], true, nil // 0 for a level that is not known
	case unsupported(err):
		return 0, true, nil
	}
	logr.FromContextOrDiscard(ctx).V(2).Info("The link between two chips is unknown",
		"vendor", Vendor, "devices", links.Pair{one.ID, two.ID}, "err", err)
	return 0, false, nil
}
