package iluvatar

import (
	"strconv"
	"strings"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/backend"
)

var _ backend.Labeler = (*Backend)(nil)

// facts are what the last discovery found for Labels.
type facts struct {
	driver, cuda string
	machine      string // the DMI product name
	devices      []accel.Device
	places       []place
}

// labelPrefix is the domain of the labels.
const labelPrefix = "iluvatar.com/"

// Labels describes the node by the labels of the vendor's ix-feature-discovery,
// but for its time stamp, which would make the node change every minute. On a
// node with several models, product and memory are those of the most frequent
// one, of the lowest index among equals, and the count is that of all chips.
func (b *Backend) Labels(backend.Sharing) map[string]string {
	b.mu.Lock()
	f := b.facts
	b.mu.Unlock()
	if len(f.devices) == 0 {
		return nil
	}
	model := backend.MostFrequent(f.devices)
	labels := map[string]string{
		"gpu.present": "true",
		"gpu.machine": f.machine,
		"gpu.count":   strconv.Itoa(len(f.devices)),
		"gpu.product": product(model.Model),
		"gpu.memory":  strconv.FormatInt(model.MemoryBytes>>20, 10), // MiB
	}
	version(labels, "ix.driver-version", f.driver, "major", "minor", "revision")
	version(labels, "cuda.runtime-version", f.cuda, "major", "minor")
	out := map[string]string{}
	for key, value := range labels {
		if value = backend.LabelValue(value); value != "" {
			out[labelPrefix+key] = value
		}
	}
	return out
}

// version adds a version and its first parts, as far as it has them.
func version(labels map[string]string, key, version string, parts ...string) {
	labels[key+".full"] = version
	numbers := strings.Split(version, ".")
	for i, part := range parts[:min(len(parts), len(numbers))] {
		labels[key+"."+part] = numbers[i]
	}
}

// product is the model without the vendor's name in front of it: of "Iluvatar
// BI-V150S" the discovery shows BI-V150S.
func product(model string) string {
	return strings.TrimPrefix(model, "Iluvatar ")
}
