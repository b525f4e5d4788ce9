package extender

import (
	"encoding/json"
	"strconv"
	"sync"

	"github.com/divvy-gpu/divvy/internal/scheduler/decision"
)

// answers are the memory in which answers are made. It is used again: at 5000 nodes it is
// more than all else that an answer takes.
var answers = sync.Pool{New: func() any { return new(decision.Answer) }}

func takeAnswer() *decision.Answer {
	a, ok := answers.Get().(*decision.Answer)
	if !ok {
		return new(decision.Answer)
	}
	return a
}

// giveBack ends the use of all that is in an answer. One that was made for more nodes than
// keepAnswer goes.
func giveBack(a *decision.Answer) {
	if a.Cap() > keepAnswer {
		return
	}
	a.Reset()
	answers.Put(a)
}

// keepAnswer is for how many nodes memory is kept for the next answer.
const keepAnswer = 20_000

// appendFilterResult writes the result as JSON, with the fields that package
// k8s.io/kube-scheduler/extender/v1 has, answering whole nodes with whole nodes
// and names with names. Writing it by hand saves building two maps and sorting
// them.
func appendFilterResult(b []byte, args filterArgs, r *decision.Answer) []byte {
	if args.nodes != nil {
		b = append(b, `{"Nodes":{"metadata":{},"items":[`...)
		for i, pos := range r.Fits {
			if i > 0 {
				b = append(b, ',')
			}
			b = append(b, args.nodes[pos]...)
		}
		b = append(b, `]},"NodeNames":null`...)
	} else {
		b = append(b, `{"Nodes":null,"NodeNames":[`...)
		for i, pos := range r.Fits {
			if i > 0 {
				b = append(b, ',')
			}
			b = appendString(b, args.names[pos])
		}
		b = append(b, ']')
	}
	b = append(b, `,"FailedNodes":`...)
	b = appendRefusals(b, r.Refusals, false)
	b = append(b, `,"FailedAndUnresolvableNodes":`...)
	b = appendRefusals(b, r.Refusals, true)
	return append(b, `,"Error":""}`...)
}

func appendRefusals(b []byte, refusals []decision.Refusal, unresolvable bool) []byte {
	b = append(b, '{')
	first := true
	for _, r := range refusals {
		if r.Unresolvable != unresolvable {
			continue
		}
		if !first {
			b = append(b, ',')
		}
		first = false
		b = appendString(b, r.Node)
		b = append(b, ':')
		b = appendString(b, r.Reason)
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

// plain reports whether the byte stands for itself in a JSON string.
func plain(c byte) bool { return c >= 0x20 && c < 0x7f && !isSpecial[c] }

// isSpecial are the printable bytes that JSON, or Go's encoder for the sake of
// HTML, writes as an escape.
var isSpecial = [256]bool{'"': true, '\\': true, '<': true, '>': true, '&': true}
