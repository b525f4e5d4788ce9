package cause

import (
	"slices"
	"testing"
)

func TestMessageOf(t *testing.T) {
	const control = ", 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }"
	for message, want := range map[string]Message{
		"0/3 nodes are available: 3 Insufficient enflame.com/gcu-memory.":                     {Short: true},
		"0/3 nodes are available: 3 insufficient GCU Memory in one gcu device.":               {Short: true, Asked: 3},
		"0/3 nodes are available: 3 insufficient GCU Memory in 2 gcu devices.":                {Short: true, Asked: 3},
		"0/2 nodes are available: 2 isolation driver required, device states none.":           {Short: true},
		"0/12 nodes are available: 11 Insufficient enflame.com/gcu-memory" + control + ".":    {Short: true, Closed: 1},
		"0/3 nodes are available: 2 Insufficient cpu, 3 Insufficient enflame.com/gcu-memory.": {Short: true, Closed: 2},
		"0/3 nodes are available: 3 Insufficient enflame.com/gcu-memory-2.":                   {Closed: 3},
		"0/3 nodes are available: 3 Insufficient nvidia.com/gpu-memory, 1 too much.":          {Closed: 4},
		"0/3 nodes are unavailable: 3 Insufficient enflame.com/gcu-memory.":                   {},
		"waits: 3 Insufficient enflame.com/gcu-memory":                                        {},
		"": {},
		"0/4 nodes are available: 1 Insufficient enflame.com/gcu-memory, 1 insufficient GCU Memory in one gcu device" + control +
			", 1 node(s) didn't match Pod's node affinity/selector. preemption: 0/4 nodes are available: 2 No preemption victims found " +
			"for incoming pod, 2 Preemption is not helpful for scheduling.": {Short: true, Asked: 1, Closed: 2},
	} {
		if got := MessageOf(message, "enflame.com/gcu-memory"); got != want {
			t.Errorf("%q: %+v, want %+v", message, got, want)
		}
	}
}

// TestReasonsWithCommas stay whole.
func TestReasonsWithCommas(t *testing.T) {
	got := Reasons("0/3 nodes are available: 1 isolation driver required, device states none, 2 Insufficient cpu. preemption: none.")
	if want := []string{"1 isolation driver required, device states none", "2 Insufficient cpu"}; !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
}
