package fragmentation

// traffic tells whether pods leave the cluster, by what is free on its nodes each
// time that it is looked at.
type traffic struct {
	before []float64
	// freed and taken are how many devices, or parts, came free and were taken, of
	// which earlier ones count less.
	freed, taken float64
	leaving      bool
}

const (
	// recalled is what the traffic of one look before counts.
	recalled = 0.9
	// Pods leave when this part, or more, of what is taken comes free, until it is
	// less than the other.
	leavingFrom, leavingTo = 1.0 / 8, 1.0 / 32
)

// look takes in what is free per node, in devices. It goes by the differences, so
// what comes free and is taken again on a node in between does not count, nor does
// anything when nodes came or went.
func (t *traffic) look(free []float64) {
	if len(free) == len(t.before) {
		t.freed, t.taken = t.freed*recalled, t.taken*recalled
		for i, now := range free {
			if d := now - t.before[i]; d > 0 {
				t.freed += d
			} else {
				t.taken -= d
			}
		}
	}
	t.before = append(t.before[:0], free...)
	switch {
	case t.freed > t.taken*leavingFrom:
		t.leaving = true
	case t.freed < t.taken*leavingTo:
		t.leaving = false
	}
}
