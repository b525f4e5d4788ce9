package backend

import (
	"cmp"
	"slices"
	"strings"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// maxLabelValue is how many characters the value of a label may have.
const maxLabelValue = 63

// LabelValue returns the text as the value of a label: what a value may not
// hold becomes "-", it has at most 63 characters, and begins and ends with a
// letter or digit. It is "" when nothing is left.
func LabelValue(text string) string {
	letter := func(c rune) bool {
		return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
	}
	value := strings.Map(func(c rune) rune {
		if letter(c) || c == '.' || c == '_' {
			return c
		}
		return '-'
	}, strings.TrimSpace(text))
	edge := func(c rune) bool { return !letter(c) }
	value = strings.TrimLeftFunc(value, edge)
	return strings.TrimRightFunc(value[:min(len(value), maxLabelValue)], edge)
}

// Labels returns labels whose keys are prefix and a key of values, with each
// value as LabelValue has it, and without those of which nothing is left.
func Labels(prefix string, values map[string]string) map[string]string {
	labels := map[string]string{}
	for key, value := range values {
		if value = LabelValue(value); value != "" {
			labels[prefix+key] = value
		}
	}
	return labels
}

// VersionLabels adds the first parts of a version to values, as far as it has
// them, under prefix and the names of the parts.
func VersionLabels(values map[string]string, prefix, version string, parts ...string) {
	numbers := strings.Split(version, ".")
	for i, part := range parts[:min(len(parts), len(numbers))] {
		values[prefix+part] = numbers[i]
	}
}

// Whole returns the devices that are no partitions of others.
func Whole(devices []accel.Device) []accel.Device {
	return slices.DeleteFunc(slices.Clone(devices), func(d accel.Device) bool { return d.Parent != "" })
}

// MostFrequent returns the device of the lowest index of the model that most devices are of;
// among models with equally many, of the lowest index of all. It is what describes a node in
// labels, which have room for one model. There must be at least one device.
func MostFrequent(devices []accel.Device) accel.Device {
	count := map[string]int{}
	for _, d := range devices {
		count[d.Model]++
	}
	return slices.MinFunc(devices, func(a, b accel.Device) int {
		return cmp.Or(cmp.Compare(count[b.Model], count[a.Model]), cmp.Compare(a.Index, b.Index))
	})
}
