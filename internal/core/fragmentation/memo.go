package fragmentation

import (
	"slices"
	"sync/atomic"
)

// memoSize is how many states a memo remembers at most, each in some 200 bytes.
const memoSize = 1 << 15

// memo remembers what the potential of a state depends on beside prices: there
// are far fewer different states than nodes times devices times asks. It gives
// the same answers as computing them again, only faster. Of two states with
// equal hashes the last one stays. It needs no lock.
type memo struct {
	entries [memoSize]atomic.Pointer[remembered]
}

// remembered is what is known of a state. It does not change.
type remembered struct {
	state
	value int64
	slots []slotCount // of each group
}

func newMemo() *memo { return new(memo) }

// of returns what is known of a state, which it finds out if need be.
func (m *memo) of(s *statics, st *state) *remembered {
	at := &m.entries[st.hash()%memoSize]
	if r := at.Load(); r != nil && st.equal(r) {
		return r
	}
	r := &remembered{state: state{st.cpu, st.memory, slices.Clone(st.cells)}, value: s.fixed(st), slots: s.slots(st)}
	at.Store(r)
	return r
}
