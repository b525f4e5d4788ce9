package cluster

import (
	"crypto/sha256"
	"slices"
)

// Offering returns the nodes that publish something, in the order of their names.
func (b *Books) Offering() []string {
	b.mu.RLock()
	defer b.mu.RUnlock()
	out := make([]string, 0, len(b.nodes))
	for name, n := range b.nodes {
		if n.digest != [sha256.Size]byte{} {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}
