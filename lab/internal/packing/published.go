package packing

import (
	"io"
	"strconv"
)

// Published is one published result.
type Published struct {
	Workload, Policy string
	// Arrived is the arrived demand in percent of the cluster's units.
	Arrived int
	// Allocated is what was allocated in the mean, in percent of the cluster's
	// units.
	Allocated float64
}

// ReadPublished reads a table with the columns workload, policy,
// arrived_percent and allocated_percent_mean. The file's name is for errors.
func ReadPublished(r io.Reader, file string) ([]Published, error) {
	t, err := openTable(r, file, "workload", "policy", "arrived_percent", "allocated_percent_mean")
	if err != nil {
		return nil, err
	}
	var out []Published
	for t.next() {
		p := Published{Workload: t.text("workload"), Policy: t.text("policy"), Arrived: int(t.number("arrived_percent", 0, 10000))}
		mean := t.text("allocated_percent_mean")
		if p.Allocated, err = strconv.ParseFloat(mean, 64); err != nil || !(p.Allocated >= 0 && p.Allocated <= 100) { // NaN is neither
			t.fail("allocated_percent_mean", "%q is not a number from 0 to 100", mean)
		}
		out = append(out, p)
	}
	if t.err != nil {
		return nil, t.err
	}
	return out, nil
}
