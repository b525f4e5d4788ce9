package inspect

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
)

var update = flag.Bool("update", false, "write the golden files anew")

const gcuMemory accel.Resource = "enflame.com/gcu-memory"

type pod struct {
	name   string
	units  accel.Units
	device accel.DeviceID
}

// books makes usages the way the extender does, from a ledger.
func books(nodes map[string][]accel.Inventory, pods map[string][]pod) []ledger.NodeUsage {
	l := ledger.New(ledger.Options{})
	for name, inv := range nodes {
		l.SetNode(name, inv)
	}
	for node, on := range pods {
		for i, p := range on {
			l.Observe(ledger.Holding{
				Pod:  accel.PodRef{UID: fmt.Sprintf("2713cdab-6ec7-40be-a0e6-%s-%d", node, i), Namespace: "kube-system", Name: p.name},
				Node: node, Resource: gcuMemory, Units: p.units, Device: p.device, Confirmed: i%2 == 0,
				Created: time.Date(2022, 9, 6, 7, 40, 43+i, 0, time.FixedZone("CST", 8*3600)),
			})
		}
	}
	return slices.Collect(l.Nodes(gcuMemory))
}

// fromUsage makes a report, with details, of nodes in the order given.
func fromUsage(resource accel.Resource, usages []ledger.NodeUsage) Report {
	report := Report{Nodes: make([]Node, 0, len(usages))}
	for _, u := range usages {
		report.Nodes = append(report.Nodes, NodeFromUsage(resource, u))
	}
	return report
}

func inventory(unit string, units ...accel.Units) accel.Inventory {
	inv := accel.Inventory{Resource: gcuMemory, Unit: unit}
	for i, u := range units {
		inv.Shares = append(inv.Shares, accel.Share{Units: u, Device: accel.Device{
			Index: i, ID: accel.DeviceID(fmt.Sprintf("U5300009010%d", i)), Model: "S60", NUMANode: i / 2,
		}})
	}
	return inv
}

func reports() map[string]Report {
	sick := inventory("0.1", 160, 80)
	sick.Shares[1].Health = accel.Health{Unhealthy: true, Reason: "EFML: device reset"}
	sick.Shares[1].Model, sick.Shares[1].NUMANode = "", accel.NoNUMA
	ward := inventory("1", 16, 16, 16)
	since := time.Date(2026, 7, 1, 10, 0, 0, 0, time.UTC)
	ward.Shares[1].Health = accel.Health{Unhealthy: true, Reason: "critical error XID 79", Cause: "xid-79", Quarantined: since}
	ward.Shares[2].Health = accel.Health{Unhealthy: true, Reason: "chip 1 (U7): the library reports ecc", Quarantined: since.Add(time.Hour)}
	ward.Shares[2].Chips = 2
	over := inventory("1", 16, 16, 16)
	over.Shares[0].Withheld, over.Shares[1].Withheld = 6, 1
	apart := inventory("1", 16, 16, 16, 16)
	apart.Shares[0].Isolation = accel.Isolation{Memory: accel.TierHardware, Compute: accel.TierHardware, Backend: "mig"}
	apart.Shares[1].Isolation = accel.Isolation{Memory: accel.TierDriver, Backend: "dmem", Attested: since.AddDate(100, 0, 0)}
	apart.Shares[2].Isolation = accel.Isolation{Memory: accel.TierDriver, Backend: "dmem", Attested: since.AddDate(-100, 0, 0)}
	return map[string]Report{
		"isolated": fromUsage(gcuMemory, books(
			map[string][]accel.Inventory{"node-a": {apart}}, map[string][]pod{"node-a": {{"p", 12, "U53000090101"}, {"byhand", 2, ""}}},
		)),
		"withheld": fromUsage(gcuMemory, books(
			map[string][]accel.Inventory{"node-a": {over}, "node-b": {inventory("1", 16)}},
			map[string][]pod{"node-a": {{"greedy", 12, "U53000090100"}, {"modest", 4, "U53000090101"}, {"byhand", 2, ""}}},
		)),
		"guide": fromUsage(gcuMemory, books(
			map[string][]accel.Inventory{"sse-lab-inspur-048": {inventory("1", 16, 16, 16)}},
			map[string][]pod{"sse-lab-inspur-048": {
				{"gcushare-pod-1", 4, "U53000090100"}, {"gcushare-pod-2", 8, "U53000090100"}, {"gcushare-pod-3", 12, "U53000090101"}}},
		)),
		"mixed": fromUsage(gcuMemory, books(
			map[string][]accel.Inventory{"node-a": {inventory("1", 16)}, "node-b": {sick}, "node-c": {inventory("1")}},
			map[string][]pod{"node-a": {{"whole", 16, "U53000090100"}}, "node-b": {{"tiny", 1, "U53000090100"}, {"lost", 40, "gone"},
				{"byhand", 5, ""}}},
		)),
		"alike": fromUsage(gcuMemory, books(
			map[string][]accel.Inventory{"node-a": {inventory("0.01", 1600)}, "node-b": {inventory("0.01", 3200)}},
			map[string][]pod{"node-b": {{"p", 3199, "U53000090100"}}},
		)),
		"shrunk": fromUsage(gcuMemory, books(
			map[string][]accel.Inventory{"node-a": {inventory("1", 8)}},
			map[string][]pod{"node-a": {{"older", 12, "U53000090100"}}},
		)),
		"quarantine": fromUsage(gcuMemory, books(
			map[string][]accel.Inventory{"node-a": {ward}}, map[string][]pod{"node-a": {{"older", 12, "U53000090101"}}},
		)),
		"none": fromUsage(gcuMemory, nil),
	}
}

func TestPrint(t *testing.T) {
	for name, report := range reports() {
		for _, format := range formats {
			t.Run(name+"/"+string(format), func(t *testing.T) {
				var got bytes.Buffer
				if err := Print(&got, report, format); err != nil {
					t.Fatal(err)
				}
				golden := filepath.Join("testdata", name+"."+string(format))
				if *update {
					if err := os.WriteFile(golden, got.Bytes(), 0o600); err != nil {
						t.Fatal(err)
					}
				}
				want, err := os.ReadFile(golden)
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(string(want), got.String()); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
			})
		}
	}
}

// What is printed can be read again, and the original keeps its details.
func TestRoundTrip(t *testing.T) {
	for name, report := range reports() {
		for _, r := range []Report{report, report.Guide()} {
			body, err := Marshal(r)
			if err != nil {
				t.Fatal(err)
			}
			var streamed bytes.Buffer
			if err := Stream(&streamed, slices.Values(r.Nodes)); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(body), streamed.String()); diff != "" {
				t.Errorf("%s streamed (-want +got):\n%s", name, diff)
			}
			var again Report
			if err := json.Unmarshal(body, &again); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(r, again); diff != "" {
				t.Errorf("%s (-want +got):\n%s", name, diff)
			}
		}
	}
}

func TestParseFormat(t *testing.T) {
	for _, f := range formats {
		if got, err := ParseFormat(string(f)); got != f || err != nil {
			t.Errorf("ParseFormat(%s) = %s, %v", f, got, err)
		}
	}
	_, err := ParseFormat("xml")
	if want := `output format "xml": must be one of table, wide, json, yaml`; err == nil || err.Error() != want {
		t.Errorf("ParseFormat(xml): %v, want %s", err, want)
	}
	if err := Print(&bytes.Buffer{}, Report{}, "xml"); err == nil {
		t.Error("Print took the format xml")
	}
}

// TestQuarantineInJSON: with details it is there, in the guide's form it is not.
func TestQuarantineInJSON(t *testing.T) {
	var guide, details bytes.Buffer
	report := reports()["quarantine"]
	for _, err := range []error{Print(&guide, report, JSON), PrintDetails(&details, report, JSON)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if bytes.Contains(guide.Bytes(), []byte("uarantine")) {
		t.Errorf("the guide's form tells of quarantine:\n%s", &guide)
	}
	if got := bytes.Count(details.Bytes(), []byte("quarantinedSince")); got != 2 ||
		!bytes.Contains(details.Bytes(), []byte(`"quarantinedSince": "2026-07-01T10:00:00Z"`)) {
		t.Errorf("%d devices in quarantine, want 2:\n%s", got, &details)
	}
}
