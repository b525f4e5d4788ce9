package extender

import (
	"encoding/json"
	"slices"
	"strconv"
	"sync"

	"github.com/divvy-gpu/divvy/internal/core/ledger"
)

// refusal is one node on which the pod does not fit.
type refusal struct {
	node, reason string
	unresolvable bool
}

// filterResult is an ExtenderFilterResult before it is written.
type filterResult struct {
	// fits are positions in args.names.
	fits     []int
	refusals []refusal
}

// scratch is the memory in which one answer is made. It is used again: at 5000 nodes it
// is more than all else that an answer takes.
type scratch struct {
	names    []string
	verdicts []ledger.Verdict
	scores   []int64
	result   filterResult
}

var scratches = sync.Pool{New: func() any { return new(scratch) }}

func takeScratch() *scratch {
	r, ok := scratches.Get().(*scratch)
	if !ok {
		return new(scratch)
	}
	return r
}

// giveBack ends the use of all that is in it. One that was made for more nodes
// than keepScratch goes.
func (r *scratch) giveBack() {
	if max(cap(r.names), cap(r.verdicts), cap(r.scores), cap(r.result.fits), cap(r.result.refusals)) > keepScratch {
		return
	}
	clear(r.names) // they share memory with the request, as the refusals do
	clear(r.result.refusals)
	r.result.fits, r.result.refusals = r.result.fits[:0], r.result.refusals[:0]
	scratches.Put(r)
}

// keepScratch is for how many nodes memory is kept for the next answer.
const keepScratch = 20_000

// sized returns buf with n items of any value.
func sized[T any](buf *[]T, n int) []T {
	*buf = slices.Grow((*buf)[:0], n)[:n]
	return *buf
}

// appendFilterResult writes the result as JSON, with the fields that package
// k8s.io/kube-scheduler/extender/v1 has, answering whole nodes with whole nodes
// and names with names. Writing it by hand saves building two maps and sorting
// them.
func appendFilterResult(b []byte, args filterArgs, r filterResult) []byte {
	if args.nodes != nil {
		b = append(b, `{"Nodes":{"metadata":{},"items":[`...)
		for i, pos := range r.fits {
			if i > 0 {
				b = append(b, ',')
			}
			b = append(b, args.nodes[pos]...)
		}
		b = append(b, `]},"NodeNames":null`...)
	} else {
		b = append(b, `{"Nodes":null,"NodeNames":[`...)
		for i, pos := range r.fits {
			if i > 0 {
				b = append(b, ',')
			}
			b = appendString(b, args.names[pos])
		}
		b = append(b, ']')
	}
	b = append(b, `,"FailedNodes":`...)
	b = appendRefusals(b, r.refusals, false)
	b = append(b, `,"FailedAndUnresolvableNodes":`...)
	b = appendRefusals(b, r.refusals, true)
	return append(b, `,"Error":""}`...)
}

func appendRefusals(b []byte, refusals []refusal, unresolvable bool) []byte {
	b = append(b, '{')
	first := true
	for _, r := range refusals {
		if r.unresolvable != unresolvable {
			continue
		}
		if !first {
			b = append(b, ',')
		}
		first = false
		b = appendString(b, r.node)
		b = append(b, ':')
		b = appendString(b, r.reason)
	}
	return append(b, '}')
}

// appendPriorities writes a HostPriorityList as JSON.
func appendPriorities(b []byte, names []string, scores []int64) []byte {
	b = append(b, '[')
	for i, name := range names {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, `{"Host":`...)
		b = appendString(b, name)
		b = append(b, `,"Score":`...)
		b = strconv.AppendInt(b, scores[i], 10)
		b = append(b, '}')
	}
	return append(b, ']')
}

func appendString(b []byte, s string) []byte {
	for i := range len(s) {
		if !plain(s[i]) {
			// Marshalling a string cannot fail.
			quoted, _ := json.Marshal(s)
			return append(b, quoted...)
		}
	}
	b = append(b, '"')
	b = append(b, s...)
	return append(b, '"')
}
