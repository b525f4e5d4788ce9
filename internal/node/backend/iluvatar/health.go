package iluvatar

import (
	"context"
	"fmt"
	"math/bits"
	"slices"
	"strings"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/libloader"
)

// healthCauses are the causes of ill health by their bit in the mask of
// ixmlDeviceGetHealth.
var healthCauses = [...]string{
	0: "syshub",
	1: "memory-controller",
	2: "over-temperature",
	3: "over-voltage",
	4: "ecc",
	5: "memory",
	6: "pcie",
}

// FatalByDefault are the causes after which a chip is put into quarantine unless the
// configuration says otherwise: those of its memory. The library takes a bit back when
// the driver was loaded again, which repairs no memory. The others name what may pass:
// heat, voltage, a link.
var FatalByDefault = []string{"memory-controller", "ecc", "memory"}

// Causes returns the causes that a device of the vendor can be unhealthy for, as
// patterns with "*".
func Causes() []string {
	return append(slices.Clone(healthCauses[:]), "health-bit-*", accel.CauseUnreachable, accel.CauseLost)
}

// causesOf returns the causes that a mask stands for, lowest bit first. Bits
// that are not known are named by their number, "health-bit-7": a newer
// library's word that something is wrong must not be lost.
func causesOf(mask uint64) []string {
	var causes []string
	for ; mask != 0; mask &= mask - 1 {
		bit := bits.TrailingZeros64(mask)
		if bit < len(healthCauses) {
			causes = append(causes, healthCauses[bit])
		} else {
			causes = append(causes, fmt.Sprintf("health-bit-%d", bit))
		}
	}
	return causes
}

// health asks how a chip is. A chip that the library cannot tell about takes no
// new pods; without a function to ask, all chips are well. Causes that the
// configuration ignores do not count. Its error is one that libloader.IsFatal.
func (b *Backend) health(ctx context.Context, lib *library, c handle) (accel.Health, error) {
	mask, err := queryChip(ctx, b, lib, "ixmlDeviceGetHealth", c, lib.chip.health)
	switch {
	case libloader.IsFatal(err):
		return accel.Health{}, err
	case unsupported(err):
		return accel.Health{}, nil
	case err != nil:
		return unreachable(b.options, err), nil
	}
	var counting []string
	for _, cause := range causesOf(mask) {
		if b.options.Counts(cause) {
			counting = append(counting, cause)
		}
	}
	if len(counting) == 0 {
		return accel.Health{}, nil
	}
	return accel.Health{
		Unhealthy: true,
		Cause:     counting[b.options.Gravest(counting, FatalByDefault...)],
		Reason:    fmt.Sprintf("ixmlDeviceGetHealth reports %s (%#x)", strings.Join(counting, ", "), mask),
	}, nil
}

// unreachable is the health of a chip about which a call failed.
func unreachable(o backend.Options, err error) accel.Health {
	cause := accel.CauseUnreachable
	if libloader.HasCode(err, codeLost) {
		cause = accel.CauseLost
	}
	if !o.Counts(cause) {
		return accel.Health{}
	}
	return accel.Health{Unhealthy: true, Cause: cause, Reason: oneLine(err)}
}
