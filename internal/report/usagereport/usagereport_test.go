package usagereport

import (
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/wire"
)

var update = flag.Bool("update", false, "write the golden files")

const gib = uint64(1 << 30)

func report() wire.UsageReport {
	return wire.UsageReport{Node: "node-a", Time: time.Date(2026, 11, 26, 14, 0, 3, 0, time.UTC), Devices: []wire.DeviceUsage{
		{Vendor: "enflame", Device: "ENF-1", Index: 1, MemoryBytes: 16 * gib, Problem: "card is lost <now>"},
		{Vendor: "nvidia", Device: "GPU-1", Index: 0, MemoryBytes: 80 * gib, UsedBytes: 31 * gib, SystemBytes: 1 << 19, UnknownBytes: gib,
			Containers: []wire.ContainerUsage{
				{Namespace: "team", Pod: "train-0", Container: "main", Resource: "nvidia.com/gpu-memory", AllocatedBytes: new(20 * gib),
					UsedBytes: new(21 * gib), Utilization: new(0.734), Processes: 2},
				{Namespace: "team", Pod: "train-0", Resource: "nvidia.com/gpu-memory", UsedBytes: new(3 * gib), Processes: 1},
				{Namespace: "team", Pod: "web", Container: "main", Resource: "nvidia.com/gpu-memory", AllocatedBytes: new(8 * gib),
					UsedBytes: new(6 * gib), Utilization: new(0.0)},
				{Namespace: "team", Pod: "web", Container: "side", Resource: "nvidia.com/gpu-memory",
					AllocatedBytes: new(gib), Processes: 1},
			}},
		{Vendor: "nvidia", Device: "GPU-2", Index: 1, MemoryBytes: 80 * gib, UsedBytes: 512 << 20, ForeignBytes: 512 << 20,
			Containers: []wire.ContainerUsage{
				{Namespace: "ml", Pod: "whole", Container: "c", Resource: "nvidia.com/gpu", UsedBytes: new(uint64(0))},
			}},
	}}
}

func TestWriteTable(t *testing.T) {
	for name, r := range map[string]wire.UsageReport{"table": report(), "empty": {Node: "node-b", Time: report().Time}} {
		var out strings.Builder
		if err := WriteTable(&out, r); err != nil {
			t.Fatal(err)
		}
		golden := filepath.Join("testdata", name+".txt")
		if *update {
			if err := os.WriteFile(golden, []byte(out.String()), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(golden)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), out.String()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestWriteJSON(t *testing.T) {
	var out strings.Builder
	if err := WriteJSON(&out, report()); err != nil {
		t.Fatal(err)
	}
	var again wire.UsageReport
	if err := json.Unmarshal([]byte(out.String()), &again); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(report(), again); diff != "" || !strings.Contains(out.String(), "<now>") {
		t.Errorf("(-want +got):\n%s\n%s", diff, out.String())
	}
}

// broken fails after some writes.
type broken struct{ left int }

func (b *broken) Write(p []byte) (int, error) {
	if b.left--; b.left < 0 {
		return 0, errors.New("pipe is closed")
	}
	return len(p), nil
}

func TestErrorsOfTheOutput(t *testing.T) {
	for n := range 6 { // the node, a device of a problem, and two of two parts
		if err := WriteTable(&broken{n}, report()); err == nil {
			t.Errorf("no error after %d writes", n)
		}
	}
	if err := WriteJSON(&broken{}, report()); err == nil {
		t.Error("no error of JSON")
	}
}
