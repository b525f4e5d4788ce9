package audit

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestUnitNumber(t *testing.T) {
	tests := map[string]int64{
		"0": 0, "A": 10, "_": 63, "00": 64, "01": 65, "0_": 127, "10": 128, "__": 64 + 64*64 - 1, "000": 64 + 64*64,
		"___": 64 + 64*64 + 64*64*64 - 1,
	}
	for id, want := range tests {
		if got, ok := unitNumber(id); !ok || got != want {
			t.Errorf("unit %q is number %d, %t; want %d", id, got, ok, want)
		}
	}
	for _, id := range []string{"", "!", "0!", "GCU 0", "aaaaaaaaa"} {
		if got, ok := unitNumber(id); ok {
			t.Errorf("%q is no unit, but was read as number %d", id, got)
		}
	}
}

func TestReadUnits(t *testing.T) {
	path := filepath.Join(t.TempDir(), "units.json")
	state := `{"version":1,"sum":1,"state":{"unit":"1","ranges":[` +
		`{"device":"GCU-A","index":0,"start":0,"units":2,"memoryBytes":2,"numaNode":0},` +
		`{"device":"GCU-B","index":1,"start":4,"units":1,"memoryBytes":1,"numaNode":0}]}}`
	if err := os.WriteFile(path, []byte(state), 0o600); err != nil {
		t.Fatal(err)
	}
	units, err := readUnits(path)
	if err != nil {
		t.Fatal(err)
	}
	for id, want := range map[string]string{"0": "GCU-A", "1": "GCU-A", "2": "", "4": "GCU-B", "5": "", "-": "", "": ""} {
		if got := units.Card(id); got != want {
			t.Errorf("unit %q belongs to card %q, want %q", id, got, want)
		}
	}
}

func TestCardsOf(t *testing.T) {
	cards, err := cardsOf(`{"v":1,"resources":[{"resource":"enflame.com/gcu-memory","unit":"1","devices":[{"index":0,"id":"GCU-A",` +
		`"units":16}]}]}`)
	if err != nil || !slices.Equal(cards, []Card{{Index: 0, UUID: "GCU-A", Units: 16}}) {
		t.Errorf("cards %+v, %v", cards, err)
	}
	for _, bad := range []string{"", "{}", `{"resources":[{"resource":"other"}]}`} {
		if cards, err := cardsOf(bad); err == nil {
			t.Errorf("%q gave the cards %+v", bad, cards)
		}
	}
}

// good are books that agree: pod a with an init container, a sidecar and an
// app container on card 1, pod b on card 0.
func good() Books {
	annotations := func(index, card, units, uuid string) map[string]string {
		return map[string]string{
			"enflame.com/gcu-device-id":             index,
			"enflame.com/gcu-device-memory":         card,
			"enflame.com/gcu-device-memory-request": units,
			"enflame.com/gcu-device-assigned":       "true",
			"enflame.com/gcu-device-assign-time":    "1662453232515055293",
			"divvy.dev/grant":                       `{"v":1,"device":"` + uuid + `","units":` + units + `,"confirmed":true}`,
		}
	}
	sees := func(index string) Sight { return Sight{Visible: index, Nodes: []string{"gcu" + index}} }
	return Books{
		Cards: []Card{{0, "GCU-A", 4}, {1, "GCU-B", 4}},
		Units: Units{{"GCU-A", 0, 4}, {"GCU-B", 4, 4}},
		Pods: []Pod{
			{
				Namespace: "n", Name: "a", UID: "ua", Units: 3, Annotations: annotations("1", "4", "3", "GCU-B"),
				Containers: []Container{
					{Name: "init", Units: 2, Started: true, Sight: Sight{Visible: "1", Ended: true}},
					{Name: "side", Units: 1, Listed: true, Started: true, Sight: sees("1")},
					{Name: "app", Units: 2, Listed: true, Started: true, Sight: sees("1")},
				},
			},
			{
				Namespace: "n", Name: "b", UID: "ub", Units: 4, Annotations: annotations("0", "4", "4", "GCU-A"),
				Containers: []Container{{Name: "app", Units: 4, Listed: true, Started: true, Sight: sees("0")}},
			},
		},
		Given: []Given{
			{"n", "a", "side", []string{"4"}},
			{"n", "a", "app", []string{"5", "6"}},
			{"n", "b", "app", []string{"0", "1", "2", "3"}},
		},
		Inspect: Node{Name: "node", Total: 8, Used: 7, Available: 1, Devices: []Device{
			{ID: 0, Total: 4, Used: 4, Pods: []Occupant{{Name: "b", Namespace: "n", UID: "ub", Used: 4}}},
			{ID: 1, Total: 4, Used: 3, Available: 1, Pods: []Occupant{{Name: "a", Namespace: "n", UID: "ua", Used: 3}}},
		}},
	}
}

func TestCompare(t *testing.T) {
	tests := map[string]struct {
		change    func(*Books)
		injection Injection
		want      string // part of a difference; "" for none
	}{
		"all agree": {},
		"CDI shows device nodes as well": {
			injection: CDI,
		},
		"with the environment alone there are no device nodes": {
			injection: Environment, want: "container n/b/app sees [gcu0] in /dev",
		},
		"the environment names another card": {
			change: func(b *Books) { b.Pods[1].Containers[0].Sight.Visible = "1" },
			want:   "container n/b/app has the environment ENFLAME_VISIBLE_DEVICES=1, kubelet gave units of card 0",
		},
		"an init container saw another card": {
			change: func(b *Books) { b.Pods[0].Containers[0].Sight.Visible = "0" },
			want:   "container n/a/init has the environment",
		},
		"/dev shows another card": {
			change: func(b *Books) { b.Pods[1].Containers[0].Sight.Nodes = []string{"gcu0", "gcu1"} },
			want:   "container n/b/app sees [gcu0 gcu1] in /dev",
		},
		"kubelet gave units of two cards": {
			change: func(b *Books) { b.Given[1].Units[1] = "0"; b.Given[2].Units = []string{"1", "2", "3", "7"} },
			want:   `pod n/a holds units of the cards 0,1, it asks for 1`,
		},
		"a pod on two cards, as it asks": {change: func(b *Books) { pair(b) }},
		"a pod that asks for two cards and sees one": {
			change: func(b *Books) { pair(b).Containers[0].Sight = Sight{Visible: "0", Nodes: []string{"gcu0"}} },
			want:   "kubelet gave units of card 0,1",
		},
		"a pod with unequal parts of its cards": {
			change: func(b *Books) { pair(b); b.Given[0].Units = []string{"0", "1", "2", "4"} },
			want:   "pod n/b holds 1 units of card 1 and 3 of card 0",
		},
		"a pod whose grant names one card of two": {
			change: func(b *Books) {
				pair(b).Annotations["divvy.dev/grant"] = `{"device":"GCU-A","units":4,"confirmed":true}`
			},
			want: "want 4 units of [GCU-A GCU-B], confirmed",
		},
		"a pod on two cards that inspect shows on one": {
			change: func(b *Books) { pair(b); b.Inspect.Devices[1].Pods = nil },
			want:   "pod n/b: inspect shows it on [card 0 with 2 units], want [card 0 with 2 units card 1 with 2 units]",
		},
		"kubelet gave a unit twice": {
			change: func(b *Books) { b.Given[1].Units[1] = "4" },
			want:   "kubelet gave unit 4 to n/a/side and to n/a/app",
		},
		"kubelet gave too few": {
			change: func(b *Books) { b.Given[1].Units = []string{"5"} },
			want:   "container n/a/app asks for 2 units, kubelet gave 1",
		},
		"kubelet gave nothing": {
			change: func(b *Books) { b.Given = b.Given[:2] },
			want:   "container n/b/app: kubelet holds units for it is false, expected true",
		},
		"units of a pod that is gone": {
			change: func(b *Books) { b.Given = append(b.Given, Given{"n", "c", "app", []string{"7"}}) },
			want:   "kubelet gave units to n/c/app, which is no container of a living pod",
		},
		"annotation of another card": {
			change: func(b *Books) { b.Pods[0].Annotations["enflame.com/gcu-device-id"] = "0" },
			want:   `pod n/a: annotation enflame.com/gcu-device-id is "0", want "1"`,
		},
		"never confirmed": {
			change: func(b *Books) { b.Pods[0].Annotations["enflame.com/gcu-device-assigned"] = "false" },
			want:   `pod n/a: annotation enflame.com/gcu-device-assigned is "false"`,
		},
		"no time": {
			change: func(b *Books) { b.Pods[0].Annotations["enflame.com/gcu-device-assign-time"] = "0" },
			want:   "assign-time is",
		},
		"grant of another card": {
			change: func(b *Books) {
				b.Pods[0].Annotations["divvy.dev/grant"] = `{"device":"GCU-A","units":3,"confirmed":true}`
			},
			want: "pod n/a: its grant is",
		},
		"no grant": {
			change: func(b *Books) { delete(b.Pods[0].Annotations, "divvy.dev/grant") },
			want:   "pod n/a: its grant",
		},
		"inspect shows the pod elsewhere": {
			change: func(b *Books) { b.Inspect.Devices[0].Pods[0].UID = "ua" },
			want:   "pod n/b: inspect shows it on []",
		},
		"inspect shows a pod that is gone": {
			change: func(b *Books) {
				b.Inspect.Devices[1].Pods = append(b.Inspect.Devices[1].Pods, Occupant{Name: "c", Namespace: "n", UID: "uc"})
			},
			want: "inspect shows pod n/c on card 1, which is not living",
		},
		"inspect does not know the card": {
			change: func(b *Books) { b.Inspect.Unplaced = []Occupant{{Name: "b", Namespace: "n"}} },
			want:   "inspect shows pod n/b on no card",
		},
		"inspect adds up wrongly": {
			change: func(b *Books) { b.Inspect.Devices[1].Used = 4 },
			want:   "inspect says that 4 units of card 1 are used, the pods on it have 3",
		},
		"a card beyond its size": {
			change: func(b *Books) { b.Cards[0].Units = 3 },
			want:   "kubelet gave 4 units of card 0, which has 3",
		},
		"a container that has not started": {
			change: func(b *Books) { b.Pods[1].Containers[0].Started = false },
			want:   "container n/b/app has not started",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			books := good()
			if test.change != nil {
				test.change(&books)
			}
			if test.injection == "" {
				test.injection = DeviceNodes
			}
			got := Compare(books, test.injection)
			if test.want == "" && len(got) > 0 {
				t.Errorf("differences %q, want none", got)
			}
			if test.want != "" && !strings.Contains(strings.Join(got, "\n"), test.want) {
				t.Errorf("differences %q, want one with %q", got, test.want)
			}
		})
	}
}

// pair makes pod b the only one, on both cards, and returns it.
func pair(b *Books) *Pod {
	b.Pods, b.Given = b.Pods[1:], []Given{{"n", "b", "app", []string{"0", "1", "4", "5"}}}
	p := &b.Pods[0]
	p.Containers[0].Sight = Sight{Visible: "0,1", Nodes: []string{"gcu0", "gcu1"}}
	p.Annotations["divvy.dev/devices"] = "2"
	p.Annotations["divvy.dev/grant"] = `{"v":2,"device":"GCU-A","units":4,"confirmed":true,"more":[{"device":"GCU-B"}]}`
	p.Annotations["enflame.com/gcu-device-id"], p.Annotations["enflame.com/gcu-device-memory"] = "0,1", "8"
	b.Inspect.Used, b.Inspect.Available = 4, 4
	for i := range b.Inspect.Devices {
		d := &b.Inspect.Devices[i]
		d.Used, d.Available, d.Pods = 2, 2, []Occupant{{Name: "b", Namespace: "n", UID: "ub", Used: 2}}
	}
	return p
}

func TestDifferencesAreBounded(t *testing.T) {
	if err := differences(nil); err != nil {
		t.Errorf("no differences gave the error %v", err)
	}
	err := differences(slices.Repeat([]string{"x"}, maxListed+5))
	if err == nil || strings.Count(err.Error(), "\n") != maxListed+1 || !strings.Contains(err.Error(), "and 5 more") {
		t.Errorf("error %v, want %d lines and how many are left out", err, maxListed)
	}
}

func TestParseReport(t *testing.T) {
	node, err := ParseReport([]byte(`{"nodes":[{"name":"n","totalGCU":16,"usedGCU":4,"availableGCU":12,"devices":[{"id":0,"totalGCU":16,` +
		`"usedGCU":4,"availableGCU":12,"pods":[` +
		`{"name":"p","namespace":"d","uid":"u","createTime":"2022-09-06T07:40:43Z","usedGCU":4}]}]}]}`))
	if err != nil || node.Name != "n" || node.Used != 4 || len(node.Devices) != 1 || node.Devices[0].Pods[0].Used != 4 {
		t.Errorf("node %+v, %v", node, err)
	}
	for _, bad := range []string{"", "{}", `{"nodes":[],"error":"not ready"}`} {
		if _, err := ParseReport([]byte(bad)); err == nil {
			t.Errorf("%q was read as a report", bad)
		}
	}
}
