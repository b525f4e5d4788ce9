package extender

import (
	"flag"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
)

var update = flag.Bool("update", false, "write the golden files anew")

func TestInspect(t *testing.T) {
	w := newWorld(t)
	// Created from the highest to the lowest, so that the order is tested.
	for i, amount := range []int64{8, 4} {
		pod := w.add(newPod([]string{"gcushare-pod-2", "gcushare-pod-1"}[i], amount))
		if text := w.bind(pod, "node-a"); text != "" {
			t.Fatal(text)
		}
	}
	w.ledger.Observe(ledger.Holding{Pod: accel.PodRef{UID: "u", Namespace: "team", Name: "lost"}, Node: "node-b", Resource: gcuMemory,
		Units: 2})
	w.cluster.Problems["unlabelled"] = "the node is not labelled x=y"

	for name, tt := range map[string]struct {
		path   string
		status int
	}{
		"all":         {"/inspect", http.StatusOK},
		"one":         {"/inspect/node-a", http.StatusOK},
		"unplaced":    {"/inspect/node-b", http.StatusOK},
		"details":     {"/inspect/node-a?details=true", http.StatusOK},
		"unknown":     {"/inspect/nowhere", http.StatusNotFound},
		"problem":     {"/inspect/unlabelled", http.StatusNotFound},
		"resource":    {"/inspect?resource=example.com/none", http.StatusNotFound},
		"bad-details": {"/inspect?details=perhaps", http.StatusBadRequest},
	} {
		t.Run(name, func(t *testing.T) {
			status, got := w.get(Prefix + tt.path)
			if status != tt.status {
				t.Errorf("status %d, want %d", status, tt.status)
			}
			golden := filepath.Join("testdata", "inspect-"+name+".json")
			if *update {
				if err := os.WriteFile(golden, got, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), string(got)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
