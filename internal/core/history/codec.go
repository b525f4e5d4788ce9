package history

import (
	"encoding/binary"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/place"
)

// Kinds of entries, the first byte of each.
const (
	kindDecision byte = iota
	kindBound
	kindEnded
)

// archive writes values to b, or reads them from it: one function for each type does both,
// so that they cannot differ. What is read was written by this process.
type archive struct {
	b       []byte
	reading bool
}

func number[T ~int | ~int32 | ~int64](a *archive, v *T) {
	if !a.reading {
		a.b = binary.AppendVarint(a.b, int64(*v))
		return
	}
	n, size := binary.Varint(a.b)
	*v, a.b = T(n), a.b[max(size, 0):]
}

func text[T ~string](a *archive, v *T) {
	n := len(*v)
	number(a, &n)
	if !a.reading {
		a.b = append(a.b, *v...)
		return
	}
	n = min(n, len(a.b))
	*v, a.b = T(a.b[:n]), a.b[n:]
}

func list[T any](a *archive, v *[]T, each func(*archive, *T)) {
	n := len(*v)
	number(a, &n)
	if a.reading && n > 0 {
		*v = make([]T, min(n, len(a.b)))
	}
	for i := range *v {
		each(a, &(*v)[i])
	}
}

func instant(a *archive, v *time.Time) {
	n := v.UnixMilli()
	if number(a, &n); a.reading {
		*v = time.UnixMilli(n).UTC()
	}
}

// flags are up to eight booleans.
func flags(a *archive, vs ...*bool) {
	var bits int
	for i, v := range vs {
		if *v {
			bits |= 1 << i
		}
	}
	number(a, &bits)
	for i, v := range vs {
		*v = bits&(1<<i) != 0
	}
}

// archiveName is the beginning of archive, and of each entry after its kind.
func (p *Pod) archiveName(a *archive) {
	text(a, &p.Namespace)
	text(a, &p.Name)
}

func (p *Pod) archive(a *archive) {
	p.archiveName(a)
	text(a, &p.UID)
}

func (r *Request) archive(a *archive) {
	text(a, &r.Resource)
	number(a, &r.Units)
	number(a, &r.Devices)
	number(a, &r.CPU)
	number(a, &r.Memory)
	number(a, &r.Priority)
	text(a, &r.Policy)
	selects := r.Selection != nil
	if flags(a, &selects); !selects {
		return
	}
	if a.reading {
		r.Selection = &Selection{}
	}
	s := r.Selection
	for _, names := range []*[]string{&s.UseModels, &s.AvoidModels, &s.UseIDs, &s.AvoidIDs} {
		list(a, names, text)
	}
	text(a, &s.Isolation)
}

// archive has the names of terms only where they are not those of the candidate before.
func (c *Candidate) archive(a *archive, before []place.Term) {
	text(a, &c.Node)
	number(a, &c.Rating)
	number(a, &c.CPU)
	number(a, &c.Memory)
	number(a, &c.Cores)
	model := "" // of the slot before: most nodes have devices of one
	list(a, &c.Slots, func(a *archive, s *Slot) {
		number(a, &s.Index)
		number(a, &s.Total)
		number(a, &s.Free)
		same := s.Model == model
		if flags(a, &s.Unhealthy, &s.Excluded, &same, &s.WouldGet); same {
			s.Model = model
			return
		}
		text(a, &s.Model)
		model = s.Model
	})
	list(a, &c.Terms, func(a *archive, t *place.Term) {
		number(a, &t.Value)
		name := ""
		if len(before) > 0 {
			name, before = before[0].Name, before[1:]
		}
		same := t.Name == name
		if flags(a, &same); same {
			t.Name = name
			return
		}
		text(a, &t.Name)
	})
}

func (d *Decision) archive(a *archive) {
	d.Pod.archive(a)
	instant(a, &d.At)
	d.Request.archive(a)
	number(a, &d.Offered)
	list(a, &d.Only, text)
	number(a, &d.Fits)
	text(a, &d.Chosen)
	list(a, &d.Rejected, func(a *archive, r *Rejected) {
		text(a, &r.Code)
		number(a, &r.Nodes)
		list(a, &r.Named, text)
	})
	var terms []place.Term
	list(a, &d.Candidates, func(a *archive, c *Candidate) {
		c.archive(a, terms)
		terms = c.Terms
	})
}

func (p *Placement) archive(a *archive) {
	p.Pod.archive(a)
	instant(a, &p.At)
	text(a, &p.Node)
	text(a, &p.Resource)
	number(a, &p.Units)
	list(a, &p.Devices, func(a *archive, d *Device) {
		number(a, &d.Index)
		text(a, &d.ID)
	})
}

// decode reads an entry.
func decode(b []byte) Entry {
	a := archive{b: b[1:], reading: true}
	switch b[0] {
	case kindDecision:
		d := new(Decision)
		d.archive(&a)
		return Entry{Decision: d}
	case kindBound:
		p := new(Placement)
		p.archive(&a)
		return Entry{Bound: p}
	}
	p := new(Placement)
	p.archive(&a)
	return Entry{Ended: p}
}
