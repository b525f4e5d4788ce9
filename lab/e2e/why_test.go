//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/report/why"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
)

// explain runs why as a person does and returns the explanation and exit code.
func explain(ctx context.Context, pod *corev1.Pod) (why.Explanation, int, error) {
	var e why.Explanation
	text, err := lab.CLI.Kubectl(ctx, "divvy", "why", "-n", pod.Namespace, pod.Name, "-o", "json")
	code := 0
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		code, err = exit.ExitCode(), nil
	}
	if err == nil {
		err = json.Unmarshal([]byte(text), &e)
	}
	return e, code, err
}

// carryOut executes the commands of a change as they are printed.
func carryOut(t *testing.T, e why.Explanation, kind why.ChangeKind) {
	t.Helper()
	at := slices.IndexFunc(e.Changes, func(c why.Change) bool { return c.Kind == kind && c.Verified && len(c.Commands) > 0 })
	if at < 0 {
		t.Fatalf("no verified change of kind %s with a command: %+v", kind, e.Changes)
	}
	dir := t.TempDir() // some write a file
	for _, command := range e.Changes[at].Commands {
		t.Log(command)
		if _, err := lab.CLI.Command(t.Context(), "", "bash", "-c", "cd '"+dir+"' && "+command); err != nil {
			t.Fatal(err)
		}
	}
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
		}, why.Cordoned, "were unschedulable", why.ChangeNode},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ctx := begin(t, guide)
			if tt.prepare != nil {
				tt.prepare(t)
			}
			waits := create(t, one("waits", tt.units))[0]
			pending(t, waits, tt.text)
			e, code, err := explain(ctx, waits)
			must(t, err)
			if code != 1 || e.State != why.StateWaits || len(e.Causes) == 0 || e.Causes[0].Code != tt.code {
				t.Fatalf("exit code %d, state %s, causes %+v; want 1, a pod that waits, and %s", code, e.State, e.Causes, tt.code)
			}
			carryOut(t, e, tt.kind)
			running(t, "waits")
			agree(t)
			if e, code, err = explain(ctx, waits); err != nil || code != 0 || e.State != why.StateRuns {
				t.Errorf("exit code %d, state %s, %v of a pod that runs", code, e.State, err)
			}
		})
	}
}
