package poll

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
)

func TestUntil(t *testing.T) {
	ctx := t.Context()
	asked := 0
	err := Until(ctx, time.Minute, "a third answer", func(context.Context) error {
		if asked++; asked < 3 {
			return errors.New("not yet")
		}
		return nil
	})
	if err != nil || asked != 3 {
		t.Errorf("asked %d times, %v; want 3 and no error", asked, err)
	}

	err = Until(ctx, time.Millisecond, "the moon", func(context.Context) error { return errors.New("still dark") })
	if err == nil || !strings.Contains(err.Error(), "the moon") || !strings.Contains(err.Error(), "still dark") {
		t.Errorf("after the time: %v; want what was waited for and the last answer", err)
	}

	err = Until(ctx, time.Minute, "a dead pod", func(context.Context) error { return fmt.Errorf("%w: it failed", ErrHopeless) })
	if !errors.Is(err, ErrHopeless) {
		t.Errorf("hopeless: %v", err)
	}

	ended, cancel := context.WithCancel(ctx)
	cancel()
	if err := Until(ended, time.Minute, "x", func(context.Context) error { return errors.New("no") }); !errors.Is(err, context.Canceled) {
		t.Errorf("after an interrupt: %v; want %v", err, context.Canceled)
	}
}
