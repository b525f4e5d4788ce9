package decision

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/history"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
)

// BenchmarkRecording filters 420 nodes of eight devices, as many as kube-scheduler names of
// 1000, with and without a record of the decisions. Each pod is another one.
func BenchmarkRecording(b *testing.B) {
	for _, records := range []bool{false, true} {
		b.Run(fmt.Sprintf("records=%t", records), func(b *testing.B) {
			w := newWorld(b, func(c *Config) { c.ChooseNode = true })
			if records {
				w.decider.config.Recorder = &Recorder{Ledger: w.ledger, Log: history.NewLog(w.clock), Now: w.decider.config.Now}
			}
			names := make([]string, 420)
			for i := range names {
				names[i] = fmt.Sprintf("node-%06d", i)
				w.ledger.SetNode(names[i], []accel.Inventory{cards(gcuMemory, names[i], 16, 16, 16, 16, 16, 16, 16, 16)})
			}
			pod := newPod("p", 4)
			q := Question{Pod: pod, Nodes: names, Believed: true}
			var a Answer
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				w.ledger.Withdraw(string(pod.UID))
				w.decider.attempts.forget(string(pod.UID))
				pod.UID = types.UID(fmt.Sprint("uid-", i))
				w.decider.Filter(b.Context(), &q, &a)
			}
		})
	}
}

// TestEndOfAPodThatWaits is kept once, if anything was decided about the pod.
func TestEndOfAPodThatWaits(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Recorder = &Recorder{Log: history.NewLog(c.Now()), Now: c.Now} })
	r := w.decider.config.Recorder
	r.Ledger = w.ledger
	pod := w.add(newPod("p", 20))
	w.filter(pod)
	r.Forget("other")
	r.Forget(string(pod.UID))
	r.Forget(string(pod.UID))
	var got []history.Entry
	for e := range r.Log.Each {
		got = append(got, e)
	}
	if len(got) != 2 || got[1].Ended == nil || got[1].Ended.Pod.UID != string(pod.UID) || got[1].Ended.Node != "" {
		t.Errorf("%+v", got)
	}
	record := history.Record{APIVersion: history.APIVersion, Kind: history.RecordKind, Entries: got}
	if err := record.Validate(); err != nil {
		t.Error(err)
	}
}

// TestExplainABindOfUnknownOutcome: the pod runs, though no bind of it has succeeded here.
func TestExplainABindOfUnknownOutcome(t *testing.T) {
	w := newWorld(t, func(c *Config) {
		c.ChooseNode = true
		c.Recorder = &Recorder{Log: history.NewLog(c.Now()), Now: c.Now}
	})
	w.decider.config.Recorder.Ledger = w.ledger
	pod := w.add(newPod("p", 8))
	node, ref := w.filter(pod)[0], refOf(pod)
	w.cluster.BindError = func(context.Context, accel.PodRef, string) error { return cluster.ErrOutcomeUnknown }
	if err := w.decider.Bind(t.Context(), ref, node); !errors.Is(err, cluster.ErrOutcomeUnknown) {
		t.Fatal(err)
	}
	headline := func() string {
		e, err := w.decider.Explain(pod.Namespace, pod.Name)
		if err != nil {
			t.Fatal(err)
		}
		var b strings.Builder
		if err := e.Print(&b); err != nil {
			t.Fatal(err)
		}
		line, _, _ := strings.Cut(b.String(), "\n")
		return line
	}
	if got := headline(); !strings.Contains(got, "node-b was chosen, and the pod is not bound yet") {
		t.Error(got)
	}
	pod.Spec.NodeName = node // as the watch shows it
	w.cluster.Add(pod)
	if got := headline(); !strings.HasSuffix(got, "was bound to node-b.") {
		t.Errorf("without devices: %s", got)
	}
	w.ledger.Observe(ledger.Holding{Pod: ref, Node: node, Resource: gcuMemory, Units: 8})
	if err := w.decider.Bind(t.Context(), ref, node); err != nil {
		t.Fatal(err)
	}
	if got := headline(); !strings.HasSuffix(got, "was bound to node-b, device 0.") {
		t.Errorf("after the retry: %s", got)
	}
	delete(w.cluster.Known, pod.Namespace+"/"+pod.Name)
	w.decider.config.Recorder.Forget(ref.UID)
	if got := headline(); !strings.HasSuffix(got, "was bound to node-b, device 0.") {
		t.Errorf("after its end: %s", got)
	}
}
