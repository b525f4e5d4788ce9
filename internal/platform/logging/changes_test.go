package logging_test

import (
	"context"
	"errors"
	"testing"

	"github.com/go-logr/logr/funcr"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/platform/logging"
)

func TestChangesAreLoggedOnce(t *testing.T) {
	lines := 0
	ctx, end := context.WithCancel(klog.NewContext(t.Context(), funcr.New(func(string, string) { lines++ }, funcr.Options{})))
	defer end()
	full, gone := errors.New("disk full"), errors.New("folder gone")
	var changes logging.Changes
	for i, step := range []struct {
		err   error
		lines int
	}{{full, 1}, {full, 1}, {gone, 2}, {full, 3}, {nil, 3}, {full, 4}} {
		if changes.Log(ctx, step.err, "Writing failed"); lines != step.lines {
			t.Errorf("step %d, error %v: %d lines so far, want %d", i, step.err, lines, step.lines)
		}
	}
	end()
	if changes.Log(ctx, gone, "Writing failed"); lines != 4 {
		t.Errorf("%d lines after the context has ended, want 4", lines)
	}
}
