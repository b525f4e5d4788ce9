package iluvatar

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/go-logr/logr"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend/libloader"
)

// seat is where a chip is on its board.
type seat struct {
	board string // the id of the chip at position 0
	chip  int    // the position
}

// seats have the board of each chip that was ever known. Chips are soldered on, so it is true
// for good.
type seats map[accel.DeviceID]seat

// member is a chip that the library gives a position on a board.
type member struct {
	chip     *chip
	position int
	// id is the library's number of the board; it means nothing unless hasID.
	id    uint32
	hasID bool
}

// assignBoards sets Board and Chip of chips. The library tells each chip's
// position and whether two chips are on one board; the chip at position 0 gives
// the board its name. A board has as many chips as there are. failed are chips
// that cannot be used but have an id, so that those beside them keep their
// board. Its error is one that libloader.IsFatal.
func (b *Backend) assignBoards(ctx context.Context, lib *library, chips, failed []*chip) error {
	var firsts, others []member
	for _, c := range slices.Concat(chips, failed) {
		position, err := queryChip(ctx, b, lib, "ixmlDeviceGetBoardPosition", c.handle, lib.board.position)
		switch {
		case libloader.IsFatal(err):
			return err
		case unsupported(err): // a card with this chip alone
			continue
		case err != nil:
			b.keepSeat(ctx, c, err)
			continue
		}
		m := member{chip: c, position: int(position)}
		m.id, err = queryChip(ctx, b, lib, "nvmlDeviceGetBoardId", c.handle, lib.board.id)
		if libloader.IsFatal(err) {
			return err
		}
		m.hasID = err == nil
		if m.position == 0 {
			firsts = append(firsts, m)
		} else {
			others = append(others, m)
		}
	}
	if err := b.seatFirsts(ctx, lib, firsts); err != nil {
		return err
	}
	orphans, err := b.seatOthers(ctx, lib, firsts, others)
	if err != nil {
		return err
	}
	return b.seatOrphans(ctx, lib, orphans)
}

// seatFirsts gives those at position 0 a board of their own name if the board
// has more chips, now or before, as far as the library tells without them.
// Those of whom a chip beside them is found get theirs by seatOthers.
func (b *Backend) seatFirsts(ctx context.Context, lib *library, firsts []member) error {
	for _, m := range firsts {
		if b.seats[m.chip.ID].board != "" {
			b.seats.sit(m, string(m.chip.ID))
			continue
		}
		multi, err := queryChip(ctx, b, lib, "nvmlDeviceGetMultiGpuBoard", m.chip.handle, lib.board.multi)
		if libloader.IsFatal(err) {
			return err
		}
		if err == nil && multi != 0 {
			b.seats.sit(m, string(m.chip.ID))
		}
	}
	return nil
}

// seatOthers puts chips at other positions beside the chip at position 0 of
// their board, and returns those that found none.
func (b *Backend) seatOthers(ctx context.Context, lib *library, firsts, others []member) (orphans []member, _ error) {
	for _, m := range others {
		first, failure, err := b.firstOf(ctx, lib, firsts, m)
		switch {
		case err != nil:
			return nil, err
		case first != nil:
			b.seats.sit(*first, string(first.chip.ID))
			b.seats.sit(m, string(first.chip.ID))
		case failure != nil:
			b.keepSeat(ctx, m.chip, failure)
		case b.seats[m.chip.ID].board != "":
			m.chip.Board, m.chip.Chip = b.seats[m.chip.ID].board, m.position
		default:
			// A number that a chip on another board has too is not the board's.
			m.hasID = m.hasID && !slices.ContainsFunc(firsts, func(f member) bool { return f.hasID && f.id == m.id })
			orphans = append(orphans, m)
		}
	}
	return orphans, nil
}

// firstOf finds the chip at position 0 of m's board, nil when it is not among
// firsts. A failure tells why it may be among them nevertheless. Its error is
// one that libloader.IsFatal.
func (b *Backend) firstOf(ctx context.Context, lib *library, firsts []member, m member) (first *member, failure, _ error) {
	var failures []error
	var alike []*member // that the library fails to tell of, with the same number of their board
	for i := range firsts {
		same, err := eitherWay(ctx, b, lib, "nvmlDeviceOnSameBoard", m.chip.handle, firsts[i].chip.handle, lib.board.same)
		switch {
		case libloader.IsFatal(err):
			return nil, nil, err
		case err != nil:
			failures = append(failures, err)
			if m.hasID && firsts[i].hasID && m.id == firsts[i].id {
				alike = append(alike, &firsts[i])
			}
		case same != 0:
			return &firsts[i], nil, nil
		}
	}
	if len(alike) == 1 {
		return alike[0], nil, nil
	}
	return nil, errors.Join(failures...), nil
}

// seatOrphans names the boards whose chip at position 0 is missing and was
// never seen: after the library's number of the board, or, where it has none,
// after the chip that is there at the lowest position.
func (b *Backend) seatOrphans(ctx context.Context, lib *library, orphans []member) error {
	slices.SortStableFunc(orphans, func(a, b member) int { return cmp.Compare(a.position, b.position) })
	for i, m := range orphans {
		samePlace := func(o member) bool {
			return o.chip.ID != m.chip.ID && o.hasID && o.id == m.id && o.position == m.position
		}
		if m.hasID && !slices.ContainsFunc(orphans, samePlace) {
			m.chip.Board, m.chip.Chip = fmt.Sprintf("board-%d", m.id), m.position
			continue
		}
		m.chip.Board, m.chip.Chip = string(m.chip.ID), m.position
		for _, lower := range orphans[:i] {
			same, err := eitherWay(ctx, b, lib, "nvmlDeviceOnSameBoard", m.chip.handle, lower.chip.handle, lib.board.same)
			if libloader.IsFatal(err) {
				return err
			}
			if err != nil {
				b.keepSeat(ctx, m.chip, err)
				break
			}
			if same != 0 {
				m.chip.Board = lower.chip.Board
				break
			}
		}
	}
	return nil
}

// sit puts a chip on a board for good.
func (s seats) sit(m member, board string) {
	m.chip.Board, m.chip.Chip = board, m.position
	s[m.chip.ID] = seat{board, m.position}
}

// keepBoards leaves chips where they were found last, without asking the library.
func (b *Backend) keepBoards(ctx context.Context, chips []*chip) {
	last := b.table.Last().Devices
	for _, c := range chips {
		i := slices.IndexFunc(last, func(d accel.Device) bool { return d.ID == c.ID })
		if i < 0 {
			b.keepSeat(ctx, c, errors.New("the library does not answer"))
			continue
		}
		c.Board, c.Chip = last[i].Board, last[i].Chip
	}
}

// keepSeat leaves a chip, about whose board the library fails to tell, where it
// was. One that never had a place takes no pods: it might be given out as a
// card of its own while its board is given to another.
func (b *Backend) keepSeat(ctx context.Context, c *chip, err error) {
	if s, ok := b.seats[c.ID]; ok {
		logr.FromContextOrDiscard(ctx).V(2).Info("Could not get the board of a chip; keeping the last one",
			"vendor", Vendor, "device", c.ID, "board", s.board, "err", err)
		c.Board, c.Chip = s.board, s.chip
		return
	}
	if !c.Health.Unhealthy {
		c.Health = unreachable(b.options, fmt.Errorf("get its board: %w", err))
	}
}
