package inspect

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
)

// A pod on several cards stands at each of them with its part; the guide's JSON
// has the guide's fields and no others.
func TestPodOnSeveralCards(t *testing.T) {
	l := ledger.New(ledger.Options{})
	l.SetNode("n", []accel.Inventory{inventory("1", 16, 16, 16)})
	l.Observe(ledger.Holding{
		Pod: accel.PodRef{UID: "u", Namespace: "team", Name: "trainer"}, Node: "n", Resource: gcuMemory, Units: 12,
		Device: "U53000090100", More: []accel.DeviceID{"U53000090102"}, Confirmed: true,
	})
	l.Observe(ledger.Holding{
		Pod: accel.PodRef{UID: "v", Namespace: "team", Name: "half-lost"}, Node: "n", Resource: gcuMemory, Units: 4,
		Device: "U53000090101", More: []accel.DeviceID{"gone"},
	})
	report := fromUsage(gcuMemory, slices.Collect(l.Nodes(gcuMemory)))
	var used []accel.Units
	for _, d := range report.Nodes[0].Devices {
		used = append(used, d.Used)
		if len(d.Pods) != 1 || d.Pods[0].Cards != 2 || d.Pods[0].Of != 2*d.Pods[0].Used {
			t.Errorf("card %d has %+v", d.ID, d.Pods)
		}
	}
	if used[0] != 6 || used[1] != 2 || used[2] != 6 || report.Nodes[0].Used != 16 || report.Nodes[0].Unplaced[0].Used != 2 {
		t.Errorf("used %v, %d in all, unplaced %+v", used, report.Nodes[0].Used, report.Nodes[0].Unplaced)
	}

	var table, guide, details bytes.Buffer
	for into, write := range map[*bytes.Buffer]func() error{
		&table:   func() error { return Print(&table, report, Table) },
		&guide:   func() error { return Print(&guide, report, JSON) },
		&details: func() error { return PrintDetails(&details, report, JSON) },
	} {
		if err := write(); err != nil {
			t.Fatalf("%v: %s", err, into)
		}
	}
	if n := strings.Count(table.String(), "team/trainer    6 of 12"); n != 2 {
		t.Errorf("the pod is on %d lines with its part:\n%s", n, table.String())
	}
	if n := strings.Count(guide.String(), `"usedGCU": 6,`); n != 2 || strings.Contains(guide.String(), "cards") ||
		strings.Contains(guide.String(), "usedOfAll") {
		t.Errorf("the guide's form has other fields, or not both parts:\n%s", guide.String())
	}
	if n := strings.Count(details.String(), `"usedOfAll": 12`); n != 2 {
		t.Errorf("%d parts tell the whole:\n%s", n, details.String())
	}
}
