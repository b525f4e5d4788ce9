package dra

import (
	"time"

	"github.com/divvy-gpu/divvy/internal/node/alloc"
)

// orderInterval is the least time between two orders of the devices: each is a write of a slice, which
// kube-scheduler reads.
const orderInterval = 10 * time.Second

// order remembers how much of the devices was used when they were put in order last.
type order struct {
	used map[string]float64
	at   time.Time
}

// keep makes devices be as much used as they were at the last order, unless that is too long ago. It
// returns when they are to be put in order again, the zero time for not before they change.
func (o *order) keep(devices []alloc.ClaimDevice, now time.Time) time.Time {
	renew, differs := now.Sub(o.at) >= orderInterval, false
	before := o.used
	if renew {
		o.used = map[string]float64{}
	}
	for i := range devices {
		d := &devices[i]
		last, known := before[d.Name]
		differs = differs || known && last != d.Used
		if known && !renew {
			d.Used = last
		}
		o.used[d.Name] = d.Used
	}
	switch {
	case renew && differs:
		o.at = now
	case !renew && differs:
		return o.at.Add(orderInterval)
	}
	return time.Time{}
}
