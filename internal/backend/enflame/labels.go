package enflame

import (
	"strconv"

	"github.com/divvy-gpu/divvy/internal/backend"
)

var _ backend.Labeler = (*Backend)(nil)

// labelPrefix begins the labels. The vendor has no feature discovery of its
// own; these are named as those of the other vendors' are.
const labelPrefix = "enflame.com/gcu."

// Labels describes the node's cards. On a node with several models, product and
// memory (in MiB) are those of the most frequent one, of the lowest index among
// equals, and the count is that of all cards.
func (b *Backend) Labels(backend.Sharing) map[string]string {
	b.mu.Lock()
	driver, devices := b.driver, b.listed
	b.mu.Unlock()
	if len(devices) == 0 {
		return nil
	}
	model := backend.MostFrequent(devices)
	labels := map[string]string{}
	for key, value := range map[string]string{
		"present":        "true",
		"count":          strconv.Itoa(len(devices)),
		"product":        model.Model,
		"memory":         strconv.FormatInt(model.MemoryBytes>>20, 10),
		"driver-version": driver,
	} {
		if value = backend.LabelValue(value); value != "" {
			labels[labelPrefix+key] = value
		}
	}
	return labels
}
