package doctor

import (
	"context"
	"errors"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	readwhy "github.com/divvy-gpu/divvy/internal/app/why"
	"github.com/divvy-gpu/divvy/internal/report/doctor"
	"github.com/divvy-gpu/divvy/internal/report/why"
)

// startupLimit is how long a container may be about to start.
const startupLimit = 2 * time.Minute

// explain says why pods wait, by the code of kubectl divvy why.
func explain(ctx context.Context, clients readwhy.Clients, pods []*corev1.Pod) ([]doctor.Waits, error) {
	s, err := readwhy.Read(ctx, clients, metav1.NamespaceAll, time.Now)
	if err != nil {
		return nil, err
	}
	x := why.New(s)
	var out []doctor.Waits
	for _, p := range pods {
		now := s.Pod(p.Namespace, p.Name)
		if now == nil {
			continue // it is gone
		}
		e := x.Pod(now)
		if e.Partial {
			return nil, errors.New(e.Notes[0])
		}
		if w, waits := waitsOf(&e); waits {
			out = append(out, w)
		}
	}
	return out, nil
}

// waitsOf is what the doctor says of a pod; false for one that does not wait, or is about to
// start.
func waitsOf(e *why.Explanation) (doctor.Waits, bool) {
	starts := e.State == why.StateStarting && e.Waiting.Helps && e.Taken.Sub(e.Since) < startupLimit
	if e.State == why.StateRuns || starts || len(e.Causes) == 0 {
		return doctor.Waits{}, false
	}
	w := doctor.Waits{Namespace: e.Pod.Namespace, Name: e.Pod.Name, Code: string(e.Causes[0].Code), Problem: e.Reason(),
		Passing: e.Waiting.Helps}
	for i := range e.Changes {
		c := &e.Changes[i]
		if !c.Verified || c.Kind == why.ChangeWait || w.Commands != nil {
			continue
		}
		if w.Change == "" || len(c.Commands) > 0 {
			w.Change, w.Commands = c.Text, c.Commands
		}
	}
	return w, true
}
