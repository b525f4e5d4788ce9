package sharing

import (
	"testing"

	"github.com/divvy-gpu/divvy/internal/accel"
)

func TestSelector(t *testing.T) {
	card := Card{Device: accel.Device{Index: 3, ID: "GPU-a", Model: "NVIDIA A100-SXM4-80GB"}, Chips: []accel.DeviceID{"GPU-a", "GPU-b"}}
	for name, tt := range map[string]struct {
		s    *Selector
		want bool
	}{
		"none":                      {nil, true},
		"empty":                     {&Selector{}, true},
		"the model":                 {&Selector{Models: []string{"NVIDIA A100-SXM4-80GB"}}, true},
		"a part of it":              {&Selector{Models: []string{"A100"}}, false},
		"a pattern":                 {&Selector{Models: []string{"*A100*"}}, true},
		"any":                       {&Selector{Models: []string{"*"}}, true},
		"front and end":             {&Selector{Models: []string{"NVIDIA*80GB"}}, true},
		"another end":               {&Selector{Models: []string{"NVIDIA*40GB"}}, false},
		"overlapping ends":          {&Selector{Models: []string{"NVIDIA A100-SXM4-80*80GB"}}, false},
		"the id":                    {&Selector{IDs: []accel.DeviceID{"GPU-x", "GPU-a"}}, true},
		"the id of a chip":          {&Selector{IDs: []accel.DeviceID{"GPU-b"}}, true},
		"the index":                 {&Selector{Indexes: []int{3}}, true},
		"other ones":                {&Selector{Models: []string{"*H100*"}, IDs: []accel.DeviceID{"GPU-x"}, Indexes: []int{0}}, false},
		"any of three":              {&Selector{Models: []string{"*H100*"}, IDs: []accel.DeviceID{"GPU-x"}, Indexes: []int{3}}, true},
		"all but this":              {&Selector{Except: &Selector{Indexes: []int{3}}}, false},
		"all but others":            {&Selector{Except: &Selector{Indexes: []int{4}}}, true},
		"but not, except after all": {&Selector{Except: &Selector{Models: []string{"*"}, Except: &Selector{IDs: []accel.DeviceID{"GPU-a"}}}}, true},
	} {
		if got := tt.s.Matches(card); got != tt.want {
			t.Errorf("%s: got %t", name, got)
		}
	}
}

func TestTheFirstRuleOfReplicasCounts(t *testing.T) {
	rules := []ReplicaRule{
		{Devices: Selector{Indexes: []int{1}}, Replicas: 1},
		{Devices: Selector{Models: []string{"T4"}}, Replicas: 8},
		{Devices: Selector{Indexes: []int{1, 2}}, Replicas: 3},
	}
	for index, want := range []int{8, 1, 8} {
		if got := Replicas(Card{Device: accel.Device{Index: index, Model: "T4"}}, rules, 4); got != want {
			t.Errorf("index %d: got %d, want %d", index, got, want)
		}
	}
	if got := Replicas(Card{Device: accel.Device{Index: 2}}, rules, 4); got != 3 {
		t.Errorf("got %d, want 3", got)
	}
	if got := Replicas(Card{Device: accel.Device{Index: 5}}, rules, 4); got != 4 {
		t.Errorf("got %d, want the number for all", got)
	}
}
