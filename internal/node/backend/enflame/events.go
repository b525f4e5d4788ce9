package enflame

import (
	"context"
	"fmt"
	"time"

	"github.com/go-logr/logr"

	"github.com/divvy-gpu/divvy/internal/node/backend/callqueue"
	"github.com/divvy-gpu/divvy/internal/node/backend/libfile"
	"github.com/divvy-gpu/divvy/internal/node/backend/libloader"
)

// Types of the library's events.
const (
	eventSuspended     = 0
	eventSuspendedToo  = 3 // newer releases
	eventResetStarted  = 10
	eventResetFinished = 11
)

// AwaitChange waits for an event of the library.
func (b *Backend) AwaitChange(ctx context.Context) error {
	return b.loader.AwaitEvent(ctx, func(lib *library, wait time.Duration) (heard bool, err error) {
		if lib.event == nil {
			return false, fmt.Errorf("%s lacks EfmlGetEvent", lib.Path)
		}
		e, err := queryOn(ctx, b, b.loader.Events, lib, callqueue.Library, "EfmlGetEvent", func(e *event) int32 {
			return lib.event(int32(wait.Milliseconds()), e) //nolint:gosec // less than a second
		})
		switch {
		case err == nil:
			b.note(ctx, e)
			return true, nil
		case libloader.HasCode(err, codeTimeout):
			return false, nil
		}
		return false, err
	})
}

// note keeps what an event says about a card's health, for libraries that have
// no function to ask.
func (b *Backend) note(ctx context.Context, e event) {
	message := libfile.CString(e.Message[:])
	// Not shown by default: a card in distress sends them by the hundred, and
	// what changes is reported by whoever discovers.
	logr.FromContextOrDiscard(ctx).V(2).Info("The vendor's library reported an event",
		"vendor", Vendor, "card", e.Card, "type", e.Type, "message", message)
	b.mu.Lock()
	defer b.mu.Unlock()
	switch e.Type {
	case eventSuspended, eventSuspendedToo, eventResetStarted:
		b.suspended[int(e.Card)] = fmt.Sprintf("event %d of the library: %s", e.Type, message)
	case eventResetFinished:
		delete(b.suspended, int(e.Card))
	}
}
