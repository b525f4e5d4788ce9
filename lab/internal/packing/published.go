package packing

import (
	"errors"
	"fmt"
	"io"
	"strconv"
)

// Published is one result that somebody published.
type Published struct {
	Workload, Policy string
	// Arrived is the arrived demand in percent of the cluster's units.
	Arrived int
	// Allocated is what was allocated in the mean, in percent of the cluster's
	// units.
	Allocated float64
}

// ReadPublished reads a table with the columns workload, policy,
// arrived_percent and allocated_percent_mean. The file's name is for errors, as
// in ReadNodes.
func ReadPublished(r io.Reader, file string) ([]Published, error) {
	t, err := openTable(r, file, []string{"workload", "policy", "arrived_percent", "allocated_percent_mean"})
	if err != nil {
		return nil, err
	}
	var out []Published
	for t.next() {
		p := Published{Workload: t.text("workload"), Policy: t.text("policy")}
		arrived, ok := t.number("arrived_percent", 0, 10000)
		mean := t.text("allocated_percent_mean")
		if p.Allocated, err = strconv.ParseFloat(mean, 64); err != nil || !(p.Allocated >= 0 && p.Allocated <= 100) { // NaN is neither
			t.fail("allocated_percent_mean", "%q is not a number from 0 to 100", mean)
			continue
		}
		if !ok {
			continue
		}
		p.Arrived = int(arrived)
		out = append(out, p)
	}
	if len(t.errs) > 0 {
		return nil, errors.Join(t.errs...)
	}
	if len(out) == 0 {
		return nil, &LineError{file, 1, "", fmt.Errorf("there are no results below the header")}
	}
	return out, nil
}
