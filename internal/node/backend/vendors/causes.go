package vendors

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
)

// UnknownCauses names the causes of ill health in a configuration that no
// device can be unhealthy for. They are no mistakes: a newer library or driver
// may have them, and a configuration is kept when the program is rolled back.
func UnknownCauses(c config.NodeConfig) []string {
	var out []string
	for _, vendor := range slices.Sorted(maps.Keys(c.Vendors)) {
		health, known := c.Vendors[vendor].Health, Causes(vendor)
		for _, list := range []struct {
			key      string
			patterns []string
			words    []string
		}{
			{"ignore", health.Ignore, []string{"all", "default"}},
			{"heed", health.Heed, nil},
			{"neverRecover", health.NeverRecover, []string{"default"}},
		} {
			for _, p := range list.patterns {
				if !slices.Contains(list.words, p) && !names(p, known) {
					out = append(out, fmt.Sprintf("vendors.%s.health.%s: %q names no cause of ill health; %s has %s",
						vendor, list.key, p, vendor, strings.Join(known, ", ")))
				}
			}
		}
	}
	return out
}

// names reports whether a pattern names one of the known causes, or some of a
// family of them, such as "xid-7*" does of "xid-*".
func names(pattern string, known []string) bool {
	return slices.ContainsFunc(known, func(cause string) bool {
		named, _ := path.Match(pattern, cause)
		family, _ := path.Match(cause, pattern)
		return named || family
	})
}
