package backend

import (
	"strings"

	"github.com/divvy-gpu/divvy/internal/accel"
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

// MostFrequent returns the first device of the model that most devices are of;
// among models with equally many, of the one that comes first. It is what
// describes a node in labels, which have room for one model. There must be at
// least one device.
func MostFrequent(devices []accel.Device) accel.Device {
	count := map[string]int{}
	for _, d := range devices {
		count[d.Model]++
	}
	best := devices[0]
	for _, d := range devices {
		if count[d.Model] > count[best.Model] {
			best = d
		}
	}
	return best
}
