package agent

import (
	"testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
)

func TestSelector(t *testing.T) {
	card := sharing.Card{Device: accel.Device{Index: 3, ID: "GPU-a", Model: "NVIDIA A100-SXM4-80GB"},
		Chips: []accel.DeviceID{"GPU-a", "GPU-b"}}
	for name, tt := range map[string]struct {
		s    *selector
		want bool
	}{
		"none":             {nil, true},
		"empty":            {&selector{}, true},
		"the model":        {&selector{Models: []string{"NVIDIA A100-SXM4-80GB"}}, true},
		"a part of it":     {&selector{Models: []string{"A100"}}, false},
		"a pattern":        {&selector{Models: []string{"*A100*"}}, true},
		"any":              {&selector{Models: []string{"*"}}, true},
		"front and end":    {&selector{Models: []string{"NVIDIA*80GB"}}, true},
		"another end":      {&selector{Models: []string{"NVIDIA*40GB"}}, false},
		"overlapping ends": {&selector{Models: []string{"NVIDIA A100-SXM4-80*80GB"}}, false},
		"the id":           {&selector{IDs: []accel.DeviceID{"GPU-x", "GPU-a"}}, true},
		"the id of a chip": {&selector{IDs: []accel.DeviceID{"GPU-b"}}, true},
		"the index":        {&selector{Indexes: []int{3}}, true},
		"other ones":       {&selector{Models: []string{"*H100*"}, IDs: []accel.DeviceID{"GPU-x"}, Indexes: []int{0}}, false},
		"any of three":     {&selector{Models: []string{"*H100*"}, IDs: []accel.DeviceID{"GPU-x"}, Indexes: []int{3}}, true},
		"all but this":     {&selector{Except: &selector{Indexes: []int{3}}}, false},
		"all but others":   {&selector{Except: &selector{Indexes: []int{4}}}, true},
		"but not, except after all": {&selector{Except: &selector{Models: []string{"*"},
			Except: &selector{IDs: []accel.DeviceID{"GPU-a"}}}}, true},
	} {
		if got := tt.s.matches(card); got != tt.want {
			t.Errorf("%s: got %t", name, got)
		}
	}
}

func TestTheFirstRuleOfReplicasCounts(t *testing.T) {
	rules := []replicaRule{
		{Devices: selector{Indexes: []int{1}}, Replicas: 1},
		{Devices: selector{Models: []string{"T4"}}, Replicas: 8},
		{Devices: selector{Indexes: []int{1, 2}}, Replicas: 3},
	}
	for index, want := range []int{8, 1, 8} {
		if got := replicasFor(sharing.Card{Device: accel.Device{Index: index, Model: "T4"}}, rules, 4); got != want {
			t.Errorf("index %d: got %d, want %d", index, got, want)
		}
	}
	if got := replicasFor(sharing.Card{Device: accel.Device{Index: 2}}, rules, 4); got != 3 {
		t.Errorf("got %d, want 3", got)
	}
	if got := replicasFor(sharing.Card{Device: accel.Device{Index: 5}}, rules, 4); got != 4 {
		t.Errorf("got %d, want the number for all", got)
	}
}
