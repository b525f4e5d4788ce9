package history

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// RecordKind is the kind of a Record.
const RecordKind = "DecisionRecord"

// Record is what a Log had at one time.
type Record struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Extent
	// Held is what pods held when it was written.
	Held []Placement `json:"held"`
	// Entries are in the order in which they were made.
	Entries []Entry `json:"entries"`
}

// Write writes what the log has as a Record, entry by entry, and what pods hold.
func Write(to io.Writer, l *Log, held []Placement) error {
	head, err := json.Marshal(struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
		Extent
		Held []Placement `json:"held"`
	}{APIVersion, RecordKind, l.Extent(), append([]Placement{}, held...)})
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(to, "%s,\"entries\":[", head[:len(head)-1]); err != nil {
		return err
	}
	separator := "\n"
	for e := range l.Each {
		one, err := json.Marshal(e)
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintf(to, "%s%s", separator, one); err != nil {
			return err
		}
		separator = ",\n"
	}
	_, err = io.WriteString(to, "\n]}\n")
	return err
}

// Validate says what is wrong with a record that was read.
func (r *Record) Validate() error {
	switch {
	case r.Kind != RecordKind:
		return fmt.Errorf("it is of kind %q, not %s", r.Kind, RecordKind)
	case r.APIVersion != APIVersion:
		return fmt.Errorf("its apiVersion is %q: this release reads %s; use the release of kubectl-divvy that wrote it", r.APIVersion,
			APIVersion)
	}
	for i := range r.Held {
		if err := (&Entry{Bound: &r.Held[i]}).validate(); err != nil {
			return fmt.Errorf("held %d: %w", i, err)
		}
	}
	for i := range r.Entries {
		e := &r.Entries[i]
		if err := e.validate(); err != nil {
			return fmt.Errorf("entry %d: %w", i, err)
		}
	}
	return nil
}

// maxUnits is more than any device has.
const maxUnits = 1 << 40

func (e *Entry) validate() error {
	set := 0
	for _, is := range []bool{e.Decision != nil, e.Bound != nil, e.Ended != nil} {
		if is {
			set++
		}
	}
	if set != 1 {
		return errors.New("it must have exactly one of decision, bound and ended")
	}
	if e.Ended != nil && e.Ended.Node == "" && e.Ended.Pod.UID != "" {
		return nil // it waited
	}
	if pod := e.Pod(); pod.Namespace == "" || pod.Name == "" || pod.UID == "" {
		return errors.New("its pod has no namespace, no name or no UID")
	}
	if d := e.Decision; d != nil {
		r := &d.Request
		if r.Resource == "" || r.Units <= 0 || r.Units > maxUnits || r.Devices < 1 || r.Devices > 1<<10 ||
			int64(r.Units)%int64(r.Devices) != 0 {
			return fmt.Errorf("its request of %d units of %q on %d devices is none that a pod can have", r.Units, r.Resource, r.Devices)
		}
		return nil
	}
	p := e.Bound
	if p == nil {
		p = e.Ended
	}
	if p.Node == "" || p.Resource == "" || p.Units <= 0 || p.Units > maxUnits || len(p.Devices) == 0 ||
		int64(p.Units)%int64(len(p.Devices)) != 0 {
		return fmt.Errorf("pod %q has no node, no devices, or an amount of units that they cannot have", p.Pod.Namespace+"/"+p.Pod.Name)
	}
	return nil
}
