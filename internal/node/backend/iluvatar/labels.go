package iluvatar

import (
	"strconv"
	"strings"

	"github.com/divvy-gpu/divvy/internal/node/backend"
)

var _ backend.Labeler = (*Backend)(nil)

// labelPrefix is the domain of the labels.
const labelPrefix = "iluvatar.com/"

// Labels describes the node by the labels of the vendor's ix-feature-discovery,
// but for its time stamp, which would make the node change every minute. On a
// node with several models, product and memory are those of the most frequent
// one, of the lowest index among equals, and the count is that of all chips.
func (b *Backend) Labels(backend.Sharing) map[string]string {
	last := b.table.Last()
	if len(last.Devices) == 0 {
		return nil
	}
	model := backend.MostFrequent(last.Devices)
	labels := map[string]string{
		"gpu.present":               "true",
		"gpu.machine":               last.Machine,
		"gpu.count":                 strconv.Itoa(len(last.Devices)),
		"gpu.product":               product(model.Model),
		"gpu.memory":                strconv.FormatInt(model.MemoryBytes>>20, 10), // MiB
		"ix.driver-version.full":    last.Driver,
		"cuda.runtime-version.full": last.CUDA,
	}
	backend.VersionLabels(labels, "ix.driver-version.", last.Driver, "major", "minor", "revision")
	backend.VersionLabels(labels, "cuda.runtime-version.", last.CUDA, "major", "minor")
	return backend.Labels(labelPrefix, labels)
}

// product is the model without the vendor's name in front of it: of "Iluvatar
// BI-V150S" the discovery shows BI-V150S.
func product(model string) string {
	return strings.TrimPrefix(model, "Iluvatar ")
}
