package cause

import (
	"regexp"
	"strconv"
	"strings"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

var counted = regexp.MustCompile(`^[0-9]+ `)

// Reasons splits kube-scheduler's message into its reasons, such as "2 Insufficient cpu". What
// it says of preemption is left out.
func Reasons(message string) []string {
	text := message
	if _, rest, ok := strings.Cut(text, "nodes are available: "); ok {
		text = rest
	}
	for _, after := range []string{" preemption: ", " no new claims to deallocate", " still not schedulable"} {
		text, _, _ = strings.Cut(text, after)
	}
	text = strings.TrimSuffix(strings.TrimSpace(text), ".")
	if text == "" {
		return nil
	}
	if !counted.MatchString(text) {
		return []string{text}
	}
	// A reason may have commas in it; the next one begins with a number.
	var out []string
	for part := range strings.SplitSeq(text, ", ") {
		if counted.MatchString(part) {
			out = append(out, part)
			continue
		}
		out[len(out)-1] += ", " + part
	}
	return out
}

// Message is what kube-scheduler's message says of the nodes for a pod that waits.
type Message struct {
	// Short is true where devices are short on some node: by kube-scheduler's own sum, or
	// quoting the extender.
	Short bool
	// Asked is on how many nodes the sum is enough and the extender found no device, and
	// Closed is how many nodes, at most, other reasons keep the pod from.
	Asked, Closed int
}

// MessageOf reads kube-scheduler's message about a pod that requests the resource. A message
// without numbers, which other schedulers write, says nothing.
func MessageOf(message string, r accel.Resource) (m Message) {
	units := string(r)
	if v := accel.VendorOfMemory(r); v != nil {
		units = v.MemoryText
	}
	for _, reason := range Reasons(message) {
		number, text, _ := strings.Cut(reason, " ")
		nodes, err := strconv.Atoi(number)
		switch {
		case err != nil:
		case text == "Insufficient "+string(r), strings.HasPrefix(text, "isolation "):
			m.Short = true
		case strings.HasPrefix(text, "insufficient "+units+" in "):
			m.Short = true
			m.Asked += nodes
		default:
			m.Closed += nodes
		}
	}
	return m
}

// foreignSchedulers do not call the extender.
var foreignSchedulers = map[string]string{
	"volcano": "Volcano", "yunikorn": "YuniKorn", "kai-scheduler": "KAI", "koord-scheduler": "Koordinator", "hami-scheduler": "HAMi",
}

// ForeignScheduler returns the system whose scheduler has that name and does not call the
// extender, "" for any other name.
func ForeignScheduler(name string) string { return foreignSchedulers[name] }
