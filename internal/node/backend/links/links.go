// Package links asks how closely the devices of a node are connected, and
// remembers the answers: they are the same for as long as the same devices are
// in the same slots, and there are many pairs.
package links

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend/devicelist"
)

// Pair is two devices, the lower id first.
type Pair [2]accel.DeviceID

// Between returns the links between devices, in the order that backend.Found
// wants, by asking for the score of each pair; 0 is none. It ends with the
// first error.
func Between[E devicelist.Entry](devices []E, score func(one, two E) (int, error)) ([]accel.Link, error) {
	sorted := slices.SortedFunc(slices.Values(devices), func(a, b E) int {
		return cmp.Compare(a.Entry().ID, b.Entry().ID)
	})
	var links []accel.Link
	for i, one := range sorted {
		for _, two := range sorted[i+1:] {
			score, err := score(one, two)
			if err != nil {
				return nil, err
			}
			if score > 0 {
				links = append(links, accel.Link{A: one.Entry().ID, B: two.Entry().ID, Score: score})
			}
		}
	}
	return links, nil
}

// Memo remembers answers of the library about devices, by K. The zero value
// remembers none. It is not safe for concurrent use.
type Memo[K comparable, V any] struct {
	slots   string // which devices in which slots
	answers map[K]V
}

// Slots says which devices are in which slots, for Memo.
func Slots[E devicelist.Entry](devices []E) string {
	var slots []string
	for _, e := range devices {
		d := e.Entry()
		slots = append(slots, fmt.Sprintf("%s@%s/%s", d.ID, d.PCI, d.Board))
	}
	slices.Sort(slots)
	return strings.Join(slots, " ")
}

// For forgets all answers unless they were given for the same slots.
func (m *Memo[K, V]) For(slots string) {
	if m.answers == nil || m.slots != slots {
		*m = Memo[K, V]{slots, map[K]V{}}
	}
}

// Get returns the answer that is remembered, or asks. An answer that is not
// known, since the library failed to tell, is used and asked for again next
// time. The error is that of ask.
func (m *Memo[K, V]) Get(k K, ask func() (answer V, known bool, err error)) (V, error) {
	if v, ok := m.answers[k]; ok {
		return v, nil
	}
	v, known, err := ask()
	if err == nil && known {
		m.answers[k] = v
	}
	return v, err
}
