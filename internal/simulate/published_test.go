package simulate_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/divvy-gpu/divvy/internal/simulate"
)

// traceVariable names a directory with the public trace: its list of GPU nodes,
// one list of pods at least and published.csv. It is not part of the
// repository, so only who has it can compare with it.
const traceVariable = "DIVVY_TRACE"

// open opens a file that the test needs.
func open(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// experiment reads a directory with a trace: the list of nodes and those of the
// workloads.
func experiment(t *testing.T, dir string, policies []string, workloads ...string) *simulate.Experiment {
	t.Helper()
	e := &simulate.Experiment{FirstSeed: 42, Seeds: 10, Arrived: []int{100, 130}}
	var err error
	if e.Cluster, err = simulate.ReadNodes(open(t, filepath.Join(dir, "openb_node_list_gpu_node.csv")), "nodes.csv"); err != nil {
		t.Fatal(err)
	}
	for _, name := range workloads {
		w, err := simulate.ReadPods(open(t, filepath.Join(dir, "openb_pod_list_"+name+".csv")), name+".csv", name)
		if err != nil {
			t.Fatal(err)
		}
		e.Workloads = append(e.Workloads, w)
	}
	for _, name := range policies {
		k, err := simulate.ParsePolicy(name)
		if err != nil {
			t.Fatal(err)
		}
		e.Policies = append(e.Policies, k)
	}
	return e
}

var baselines = []string{simulate.Random, simulate.BestFit, simulate.GpuPacking, simulate.FGD}

// TestPublished compares the baselines with what was published of them, on the
// workload that takes the shortest time; the command does so with all.
func TestPublished(t *testing.T) {
	dirs := []string{}
	if dir := os.Getenv(traceVariable); dir != "" {
		dirs = append(dirs, dir)
	}
	for _, dir := range dirs {
		e := experiment(t, dir, baselines, "multigpu50")
		var err error
		if e.Published, err = simulate.ReadPublished(open(t, filepath.Join(dir, "published.csv")), "published.csv"); err != nil {
			t.Fatal(err)
		}
		r, err := e.Replay(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		compared, differences := r.Differences(0.5)
		if want := len(baselines) * len(e.Arrived); compared != want || len(differences) > 0 {
			t.Errorf("%d results compared, want %d; these differ: %+v", compared, want, differences)
		}
	}
}
