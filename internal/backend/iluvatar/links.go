package iluvatar

import (
	"cmp"
	"context"
	"slices"
	"strings"

	"github.com/go-logr/logr"

	"github.com/divvy-gpu/divvy/internal/accel"
)

// nearness remembers the answers about pairs of chips, which are the same for
// as long as the same chips are in the same slots. Pairs about which the
// library failed are not in it, and are asked about again.
type nearness struct {
	chips  string       // which chips in which slots
	scores map[pair]int // by pair; 0 when the two have no link
}

// pair is two chips, the lower id first.
type pair [2]accel.DeviceID

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
// isFatal.
func (b *Backend) links(ctx context.Context, lib *library, chips []*chip) ([]accel.Link, error) {
	chips = slices.SortedFunc(slices.Values(chips), func(a, b *chip) int { return cmp.Compare(a.ID, b.ID) })
	var where strings.Builder
	for _, c := range chips {
		where.WriteString(string(c.ID) + "@" + c.PCI + "/" + c.Board + " ")
	}
	if b.near.chips != where.String() {
		b.near = nearness{chips: where.String(), scores: map[pair]int{}}
	}
	var links []accel.Link
	for i, one := range chips {
		for _, two := range chips[i+1:] {
			score, err := b.score(ctx, lib, one, two)
			if err != nil {
				return nil, err
			}
			if score > 0 {
				links = append(links, accel.Link{A: one.ID, B: two.ID, Score: score})
			}
		}
	}
	return links, nil
}

// score is the score of the link between two chips, 0 when none is known. Its
// error is one that isFatal.
func (b *Backend) score(ctx context.Context, lib *library, one, two *chip) (int, error) {
	p := pair{one.ID, two.ID}
	if score, ok := b.near.scores[p]; ok {
		return score, nil
	}
	if one.Board != "" && one.Board == two.Board {
		b.near.scores[p] = accel.LinkBoard
		return accel.LinkBoard, nil
	}
	level, err := eitherWay(ctx, b.calls, lib, "nvmlDeviceGetTopologyCommonAncestor", one.handle, two.handle, lib.ancestor)
	switch {
	case isFatal(err):
		return 0, err
	case err == nil:
		b.near.scores[p] = scores[level] // 0 for a level that is not known
	case unsupported(err):
		b.near.scores[p] = 0
	default:
		logr.FromContextOrDiscard(ctx).V(2).Info("How two chips are connected is not known",
			"vendor", Vendor, "devices", p, "err", err)
	}
	return b.near.scores[p], nil
}
