//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/report/why"
	"github.com/divvy-gpu/divvy/lab/internal/cluster"
	"github.com/divvy-gpu/divvy/lab/internal/demos"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// carryOut executes the commands of a verified change as they are printed.
func carryOut(t *testing.T, e why.Explanation, kind why.ChangeKind) {
	t.Helper()
	change, ok := testenv.Advised(&e, kind)
	if !ok {
		t.Fatalf("no verified change of kind %s with a command: %+v", kind, e.Changes)
	}
	must(t, lab.CLI.CarryOut(t.Context(), t.Output(), change.Commands...))
}

// admitted waits until the pod that waited runs, as soon as advice promises.
func admitted(t *testing.T) {
	t.Helper()
	must(t, lab.Pods.WaitPhase(t.Context(), demos.AdviceTimeout, corev1.PodRunning, "waits"))
}

// TestWhy explains pods that wait, and lets each run by a command as it is printed.
func TestWhy(t *testing.T) {
	for _, tt := range []struct {
		name    string
		units   int64
		prepare func(t *testing.T)
		code    why.Code
		text    string
		kind    why.ChangeKind
	}{
		{"larger than any card, on two cards", 20, nil, why.LargerThanDevice, noRoom, why.ChangeAnnotation},
		{"larger than any card, with a smaller request", 21, nil, why.LargerThanDevice, noRoom, why.ChangeRequest},
		{"scattered capacity, another pod ends", 16, func(t *testing.T) {
			t.Helper()
			var pods []*corev1.Pod
			for i := range 8 {
				pods = append(pods, one(fmt.Sprint("part-", i), 9))
			}
			createAtOnce(t, pods)
			running(t, namesOf(pods)...)
		}, why.NoDeviceFits, noRoom, why.ChangeEnd},
		{"a node that is cordoned", 8, func(t *testing.T) {
			t.Helper()
			_, err := lab.CLI.Kubectl(t.Context(), "cordon", layout.NodeName)
			must(t, err)
			t.Cleanup(func() { _, _ = lab.CLI.Kubectl(context.WithoutCancel(t.Context()), "uncordon", layout.NodeName) })
			// kube-scheduler hears of it by its watch, and may have placed a pod by then.
			must(t, poll.Until(t.Context(), podTimeout, "kube-scheduler to pass over the node", func(ctx context.Context) error {
				_, err := lab.Pods.WaitEvent(ctx, 5*time.Second, create(t, one("probe", 1))[0], "were unschedulable")
				return errors.Join(err, lab.Pods.Delete(ctx, "probe"))
			}))
		}, why.Cordoned, "were unschedulable", why.ChangeNode},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ctx := begin(t, guide)
			if tt.prepare != nil {
				tt.prepare(t)
			}
			waits := create(t, one("waits", tt.units))[0]
			pending(t, waits, tt.text)
			e, code, err := lab.CLI.Explain(ctx, namespace, waits.Name)
			must(t, err)
			if code != 1 || e.State != why.StateWaits || len(e.Causes) == 0 || e.Causes[0].Code != tt.code {
				t.Fatalf("exit code %d, state %s, causes %+v; want 1, a pod that waits, and %s", code, e.State, e.Causes, tt.code)
			}
			carryOut(t, e, tt.kind)
			admitted(t)
			agree(t)
			if e, code, err = lab.CLI.Explain(ctx, namespace, waits.Name); err != nil || code != 0 || e.State != why.StateRuns {
				t.Errorf("exit code %d, state %s, %v of a pod that runs", code, e.State, err)
			}
		})
	}
}

// TestWhyAcrossRestart: advice holds though kube-scheduler is killed before it is followed.
func TestWhyAcrossRestart(t *testing.T) {
	ctx := begin(t, guide)
	waits := create(t, one("waits", 20))[0]
	pending(t, waits, noRoom)
	e, code, err := lab.CLI.Explain(ctx, namespace, waits.Name)
	must(t, err)
	if code != 1 {
		t.Fatalf("exit code %d of a pod that waits", code)
	}
	restarts := lab.Restarts()
	at := slices.IndexFunc(restarts, func(r testenv.Restart) bool { return r.Name == string(cluster.Scheduler)+" killed" })
	if at < 0 {
		t.Fatal("kube-scheduler is not among the restarts")
	}
	must(t, restarts[at].Do(ctx))
	carryOut(t, e, why.ChangeAnnotation)
	admitted(t)
	agree(t)
}

// TestDefragment executes a plan of moves by its commands as they are printed.
func TestDefragment(t *testing.T) {
	ctx := begin(t, guide)
	s := demos.New("defragment", lab, t.Output())
	must(t, errors.Join(s.Defragment(ctx), s.Checks.Err()))
}
