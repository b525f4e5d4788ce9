package enflame

import (
	"slices"
	"strconv"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
)

var _ backend.Labeler = (*Backend)(nil)

// labelPrefix begins the labels. The vendor has no feature discovery of its
// own; these are named as those of the other vendors' are.
const labelPrefix = "enflame.com/gcu."

// Labels describes the node's cards. On a node with several models, product and
// memory (in MiB) are those of the most frequent one, of the lowest index among
// equals, and the count is that of all cards.
func (b *Backend) Labels(backend.Sharing) map[string]string {
	last := b.table.Last()
	cards := slices.DeleteFunc(slices.Clone(last.Devices), func(d accel.Device) bool { return d.Parent != "" })
	if len(cards) == 0 {
		return nil
	}
	model := backend.MostFrequent(cards)
	return backend.Labels(labelPrefix, map[string]string{
		"present":        "true",
		"count":          strconv.Itoa(len(cards)),
		"product":        model.Model,
		"memory":         strconv.FormatInt(model.MemoryBytes>>20, 10),
		"driver-version": last.Driver,
	})
}
