package cluster

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestAttempt(t *testing.T) {
	busy := errors.New("a folder is busy")
	tests := map[string]struct {
		fails int // so often, then it succeeds
		limit time.Duration
		calls int
		want  error
	}{
		"at once":          {limit: time.Minute, calls: 1},
		"the third time":   {fails: 2, limit: time.Minute, calls: 3},
		"never":            {fails: 9, limit: time.Minute, calls: 4, want: busy},
		"not in that time": {fails: 9, limit: -1, calls: 1, want: busy},
		"the last time":    {fails: 3, limit: time.Minute, calls: 4},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			var out strings.Builder
			calls := 0
			err := attempt(t.Context(), &out, 4, time.Millisecond, tt.limit, func(context.Context) error {
				if calls++; calls <= tt.fails {
					return busy
				}
				return nil
			})
			if !errors.Is(err, tt.want) || calls != tt.calls {
				t.Errorf("%d calls, %v; want %d, %v", calls, err, tt.calls, tt.want)
			}
			if told := strings.Count(out.String(), "a folder is busy"); told != calls-1 {
				t.Errorf("told %d errors of attempts that were followed by others, want %d:\n%s", told, calls-1, out.String())
			}
		})
	}
}

func TestAttemptEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	calls := 0
	err := attempt(ctx, &strings.Builder{}, 4, time.Hour, time.Hour, func(context.Context) error {
		calls++
		cancel()
		return context.Canceled
	})
	if !errors.Is(err, context.Canceled) || calls != 1 {
		t.Errorf("%d calls, %v", calls, err)
	}
}

func TestRemoveAllBut(t *testing.T) {
	dir := t.TempDir()
	keep := filepath.Join(dir, "record.json")
	for _, path := range []string{keep, filepath.Join(dir, "other")} {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.MkdirAll(filepath.Join(dir, "logs", "old"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := removeAllBut(dir, keep); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 || left[0].Name() != "record.json" {
		t.Errorf("left: %v, %v", left, err)
	}
	if err := removeAllBut(filepath.Join(dir, "none"), keep); err != nil {
		t.Errorf("a folder that is gone: %v", err)
	}
}
