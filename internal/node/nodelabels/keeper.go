package nodelabels

import (
	"slices"
	"strings"
)

// maxLost is how often somebody else may change a label of Divvy's before it is
// theirs. More than once, since a copy of the node that lags behind may look as
// if somebody had.
const maxLost = 3

// Keeper merges again and again, and gives up the labels that somebody else
// keeps changing: a feature discovery that starts after Divvy would write its
// values, and Divvy its own, for ever. The zero value is ready. It is not safe for
// concurrent use.
type Keeper struct {
	// kept are the values that the node was seen with, as they were wanted.
	kept map[string]string
	// lost counts how often a label that was kept had another value then.
	lost map[string]int
}

// Merge is the function Merge, but for labels that were given up: those count as
// somebody else's from then on, until they are gone from the node.
func (k *Keeper) Merge(current map[string]string, owned string, wanted map[string]string) Change {
	if k.kept == nil {
		k.kept, k.lost = map[string]string{}, map[string]int{}
	}
	for key := range k.lost {
		if _, there := current[key]; !there {
			delete(k.lost, key)
		}
	}
	ours := slices.DeleteFunc(strings.Split(owned, ","), func(key string) bool {
		value, there := current[key]
		want, still := wanted[key]
		kept, seen := k.kept[key]
		switch {
		case !there || !still:
			delete(k.kept, key)
		case value == want:
			k.kept[key] = value
		case seen && kept == want: // what is wanted has not changed, so somebody else changed it
			delete(k.kept, key)
			k.lost[key]++
		}
		return k.lost[key] >= maxLost
	})
	c := Merge(current, strings.Join(ours, ","), wanted)
	c.before = owned
	return c
}
