package packing

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/report/simulate"
)

// traceVariable names a directory with the public trace: its list of GPU nodes,
// one list of pods at least and published.csv. It is not part of the
// repository, so only who has it can compare with it.
const traceVariable = "DIVVY_TRACE"

// example is a trace of our own making, and results that were published of none.
const (
	example          = "testdata/trace"
	examplePublished = "testdata/published.csv"
)

// replayed replays workloads of a trace, to compare them with what was published.
func replayed(t *testing.T, dir, published string, workloads []string, policies ...string) *Comparison {
	t.Helper()
	kinds, err := simulate.ParsePolicies(Policies(), policies)
	if err != nil {
		t.Fatal(err)
	}
	e := &simulate.Experiment{Policies: kinds, FirstSeed: 42, Seeds: 10, Arrived: []int{100, 130}}
	if e.Cluster, e.Workloads, err = ReadTrace(dir, workloads); err != nil {
		t.Fatal(err)
	}
	c := &Comparison{}
	if c.Published, err = ReadFile(published, ReadPublished); err != nil {
		t.Fatal(err)
	}
	if c.Report, err = e.Replay(t.Context()); err != nil {
		t.Fatal(err)
	}
	return c
}

// TestPublished compares the baselines with what was published of them, on the
// workload that takes the shortest time; the command does so with all.
func TestPublished(t *testing.T) {
	dirs := []string{}
	if dir := os.Getenv(traceVariable); dir != "" {
		dirs = append(dirs, dir)
	}
	for _, dir := range dirs {
		c := replayed(t, dir, filepath.Join(dir, "published.csv"), []string{"multigpu50"}, Random, BestFit, GpuPacking, FGD)
		if compared, differences := c.Differences(0.5); compared != 4*2 || len(differences) > 0 {
			t.Errorf("%d results compared, want %d; these differ: %+v", compared, 4*2, differences)
		}
	}
}

func TestDifferences(t *testing.T) {
	c := replayed(t, example, examplePublished, []string{"all"}, "binpack", "fgd")
	compared, differences := c.Differences(3)
	want := []Difference{{Workload: "default", Policy: FGD, ArrivedPercent: 100, By: 5.77}}
	if len(differences) == 1 {
		differences[0].By = float64(int(differences[0].By*100)) / 100
	}
	if diff := cmp.Diff(want, differences); compared != 2 || diff != "" {
		t.Errorf("%d compared, differences (-want +got):\n%s", compared, diff)
	}
}

func TestTable(t *testing.T) {
	c := replayed(t, example, examplePublished, []string{"all"}, "binpack", "fgd")
	show := func() string {
		var out bytes.Buffer
		if err := errors.Join(c.Check(), c.PrintTable(&out)); err != nil {
			t.Fatal(err)
		}
		return out.String()
	}
	if diff := cmp.Diff(`WORKLOAD  POLICY   AT 100%  PUBLISHED  AT 130%  PUBLISHED  REFUSED
default   binpack  94.21    -          96.00    -          25.56
default   FGD      95.77    90.00      97.36    95.00      24.49
models    binpack  92.32    -          93.76    -          26.53
models    FGD      92.64    -          95.87    -          24.89
(mean)    binpack  93.26    -          94.88    -          26.05
(mean)    FGD      94.21    -          96.62    -          24.69
`, show()); diff != "" {
		t.Errorf("table (-want +got):\n%s", diff)
	}
	c.Published, c.Against = nil, "binpack"
	if diff := cmp.Diff(`WORKLOAD  POLICY   AT 100%  GAIN   AT 130%  GAIN   REFUSED
default   binpack  94.21    +0.00  96.00    +0.00  25.56
default   FGD      95.77    +1.57  97.36    +1.36  24.49
models    binpack  92.32    +0.00  93.76    +0.00  26.53
models    FGD      92.64    +0.33  95.87    +2.11  24.89
(mean)    binpack  93.26    +0.00  94.88    +0.00  26.05
(mean)    FGD      94.21    +0.95  96.62    +1.74  24.69
`, show()); diff != "" {
		t.Errorf("gains (-want +got):\n%s", diff)
	}
	c.Against = BestFit
	if err := c.Check(); err == nil || !strings.Contains(err.Error(), "gains against BestFit: it is neither simulated nor published with "+
		"workload default at 100 %") {
		t.Errorf("gains against a policy without results: %v", err)
	}
}
