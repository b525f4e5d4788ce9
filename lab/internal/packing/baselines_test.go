package packing

import (
	"fmt"
	"slices"
	"testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/report/simulate"
)

// node makes a node with these free units on its devices, of 1000 each.
func node(cpu int64, model string, free ...accel.Units) *place.Node {
	n := &place.Node{CPU: cpu, Memory: place.Unlimited}
	for i, f := range free {
		n.Slots = append(n.Slots, place.Slot{ID: accel.DeviceID(fmt.Sprint(i)), Index: i, Model: model, Total: 1000, Free: f})
	}
	return n
}

// twoNodes is a cluster whose largest node has 100000 millicores and 4000
// units.
func twoNodes() *simulate.Cluster {
	c := &simulate.Cluster{}
	for _, n := range []struct {
		model   string
		devices int
	}{{"A", 4}, {"B", 2}} {
		node := simulate.Node{Name: n.model, CPU: 25000 * int64(n.devices), Memory: 1 << 20}
		for i := range n.devices {
			node.Devices = append(node.Devices, accel.Share{Device: accel.Device{ID: accel.DeviceID(fmt.Sprint(n.model, i)), Index: i,
				Model: n.model}, Units: 1000})
		}
		c.Nodes = append(c.Nodes, node)
	}
	return c
}

func TestBaselines(t *testing.T) {
	part := place.Ask{Devices: 1, Units: 200, CPU: 10000}
	whole := place.Ask{Devices: 1, Units: 1000, CPU: 10000}
	pair := place.Ask{Devices: 2, Units: 1000, CPU: 10000}
	plain := place.Ask{CPU: 10000}
	tests := map[string]struct {
		policy place.Policy
		node   *place.Node
		ask    place.Ask
		slots  []int
		rating int64
		refuse bool
	}{
		// 40 of 100 cores and 2300 of 4000 units are left: half of each is lost.
		"BestFit counts CPU and units": {newBestFit(twoNodes()), node(50000, "A", 1000, 700, 800, 0), part, []int{1}, 51, false},
		"BestFit rates a plain pod":    {newBestFit(twoNodes()), node(50000, "A", 0, 0), plain, nil, 80, false},
		"BestFit takes the first whole GPUs": {newBestFit(twoNodes()), node(10000, "A", 900, 1000, 1000, 1000), pair, []int{1, 2}, 76,
			false},
		"BestFit refuses without CPU":        {newBestFit(twoNodes()), node(9999, "A", 1000), part, nil, 0, true},
		"BestFit refuses without whole GPUs": {newBestFit(twoNodes()), node(90000, "A", 1000, 999), pair, nil, 0, true},
		"GpuPacking shares a used GPU": {gpuPacking{baseline{GpuPacking}}, node(50000, "A", 1000, 400, 300), part, []int{2}, 97,
			false},
		"GpuPacking opens a GPU of a used node": {gpuPacking{baseline{GpuPacking}}, node(50000, "A", 1000, 100, 1000), whole, []int{0}, 49,
			false},
		"GpuPacking opens two": {gpuPacking{baseline{GpuPacking}}, node(50000, "A", 1000, 100, 1000), pair, []int{0, 2},
			48, false},
		"GpuPacking opens a node last": {gpuPacking{baseline{GpuPacking}}, node(50000, "A", 1000, 1000), whole, []int{0}, 31,
			false},
		"GpuPacking does not rate plain pods": {gpuPacking{baseline{GpuPacking}}, node(50000, "A", 1000, 100), plain, nil, 0, false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			slots, rating, ok := tt.policy.Choose(tt.node, &tt.ask, nil)
			if ok == tt.refuse {
				t.Fatalf("fits: %t", ok)
			}
			if ok && (!slices.Equal(slots, tt.slots) || rating != tt.rating) {
				t.Errorf("devices %v rated %d, want %v rated %d", slots, rating, tt.slots, tt.rating)
			}
		})
	}
}

func TestFGD(t *testing.T) {
	// Of four pods two take half a GPU, one a whole, one none.
	pods := []simulate.Pod{
		{Ask: place.Ask{Devices: 1, Units: 500, CPU: 1000}}, {Ask: place.Ask{Devices: 1, Units: 500, CPU: 1000, Memory: 1}},
		{Ask: place.Ask{Devices: 1, Units: 1000, CPU: 20000, Only: &accel.Selection{UseModels: []string{"B"}}}},
		{Ask: place.Ask{CPU: 1000}},
	}
	p, ok := newFGD(twoNodes(), pods).(*fgd)
	if !ok {
		t.Fatal("FGD is something else")
	}
	for _, tt := range []struct {
		model string
		cpu   int64
		left  []accel.Units
		want  float64
	}{
		// Half of the pods can use 900 of 1200 on A; the others nothing.
		{"A", 50000, []accel.Units{300, 900}, 0.5*300 + 0.5*1200},
		{"A", 500, []accel.Units{300, 900}, 1200},
		{"B", 50000, []accel.Units{300, 1000}, 0.5*300 + 0.25*300 + 0.25*1300},
		{"B", 10000, []accel.Units{300, 1000}, 0.5*300 + 0.25*1300 + 0.25*1300},
	} {
		if got := p.byModel[tt.model].fragmentation(tt.cpu, tt.left); got != tt.want {
			t.Errorf("fragmentation of %v on %s with %d millicores is %g, want %g", tt.left, tt.model, tt.cpu, got, tt.want)
		}
	}
	// 900 and 500 are free. On the first, 300 pods' halves are left of 800; on
	// the second all that is left is lost.
	slots, rating, fits := p.Choose(node(50000, "A", 900, 600), &place.Ask{Devices: 1, Units: 200, CPU: 1000}, nil)
	// Before: 0.5*1500. On the first 700 and 600 are left: 0.5*1300. The fall of
	// 100 is a sigmoid of 0.1. On the second 400 of 1300 is lost to halves:
	// 0.5*1300 + 0.5*400, a rise.
	if !fits || !slices.Equal(slots, []int{0}) || rating != 52 {
		t.Errorf("a pod of 200 gets %v rated %d, want the first rated 52", slots, rating)
	}
	// Typical are the most frequent shapes up to 95 %: with one of each hundred
	// left out.
	many := make([]simulate.Pod, 0, 100)
	for i := range 100 {
		ask := place.Ask{Devices: 1, Units: 500}
		if i == 0 {
			ask.Units = 1
		}
		many = append(many, simulate.Pod{Ask: ask})
	}
	if shapes := typical(many); len(shapes) != 1 || shapes[0].weight != 1 || shapes[0].ask.Units != 500 {
		t.Errorf("typical shapes are %+v", shapes)
	}
}
