package decision

import (
	"os"
	"testing"
	"time"

	"github.com/go-logr/logr"
	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/testing/decisiontest"
)

const gcuMemory = decisiontest.Memory

// What decisiontest has, by short names.
var (
	cards  = decisiontest.Cards
	podOf  = decisiontest.PodOf
	newPod = decisiontest.NewPod
)

func TestMain(m *testing.M) {
	// Hundreds of expected errors would hide the unexpected.
	klog.SetLoggerWithOptions(logr.Discard(), klog.ContextualLogger(true))
	os.Exit(m.Run())
}

// world is a Decider over a real ledger and a cluster of the test's making.
type world struct {
	tb      testing.TB
	decider *Decider
	ledger  *ledger.Ledger
	cluster *decisiontest.Cluster
	clock   time.Time
	// notReady is what Ready returns.
	notReady error
}

// newWorld has node-a with cards of 16 and 16, node-b with one of 8 units.
func newWorld(tb testing.TB, change ...func(*Config)) *world {
	tb.Helper()
	w := &world{tb: tb, cluster: decisiontest.NewCluster(), clock: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)}
	w.ledger = ledger.New(ledger.Options{Now: func() time.Time { return w.clock }, ReservationTTL: time.Minute})
	w.ledger.SetNode("node-a", []accel.Inventory{cards(gcuMemory, "a", 16, 16)})
	w.ledger.SetNode("node-b", []accel.Inventory{cards(gcuMemory, "b", 8)})
	config := Config{
		Ledger: w.ledger, Cluster: w.cluster, Binder: w.cluster, Signer: decisiontest.NewKeys(tb).Signer,
		Ready:     func() error { return w.notReady },
		Resources: []accel.Resource{gcuMemory}, Now: func() time.Time { return w.clock },
	}
	for _, f := range change {
		f(&config)
	}
	d, err := New(config)
	if err != nil {
		tb.Fatal(err)
	}
	w.decider = d
	return w
}

// filter asks about node-a and node-b as kube-scheduler does, and returns those that fit.
func (w *world) filter(pod *v1.Pod) (fits []string) {
	w.tb.Helper()
	q := Question{Pod: pod, Nodes: []string{"node-a", "node-b"}, Believed: true}
	var a Answer
	w.decider.Filter(w.tb.Context(), &q, &a)
	for _, i := range a.Fits {
		fits = append(fits, q.Nodes[i])
	}
	return fits
}

// add makes the pod exist, and seen.
func (w *world) add(pod *v1.Pod) *v1.Pod {
	w.cluster.Add(pod)
	return pod
}
