package extender

import "encoding/json"

// refusal is one refused node.
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

// appendString writes s as a JSON string.
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
