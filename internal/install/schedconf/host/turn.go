package host

import (
	"context"
	"errors"
	"fmt"

	"k8s.io/klog/v2"
)

// Turn lets the control-plane nodes of a cluster change their schedulers one after
// the other, and tells them what one of them was not well with: pods are placed
// meanwhile, and a change that does not work stops at the first node.
type Turn interface {
	// Take returns nil when this node may make a change, and a *NotNowError when
	// another is at it or had to take the same change back. The change is known by
	// its outcome, a digest of all that is put in place.
	Take(ctx context.Context, outcome string) error
	// Done ends it. The failure is nil when kube-scheduler is well with the change,
	// or nothing came of it. A node whose turn it is not may call it, too.
	Done(ctx context.Context, failure *Failure) error
}

// NotNowError says that another node comes first.
type NotNowError struct {
	// Node is that one.
	Node string
	// Failure is what it was not well with, nil while it is at work.
	Failure *Failure
	// Replaces is true where divvy-scheduler was to run.
	Replaces bool
}

func (e *NotNowError) Error() string {
	if e.Failure == nil {
		return fmt.Sprintf("node %s is changing its kube-scheduler; waiting for it", e.Node)
	}
	return fmt.Sprintf("the same change was rolled back on node %s, so it is not tried here until it succeeds there, something changes, "+
		"or an hour has passed "+
		"(%s tries it immediately). Reason: %s", e.Node, byHand(e.Replaces), e.Failure.Reason)
}

func (h *Host) take(ctx context.Context, outcome string, replaces bool) error {
	if h.config.Turn == nil {
		return nil
	}
	err := h.config.Turn.Take(ctx, outcome)
	var notNow *NotNowError
	if errors.As(err, &notNow) {
		notNow.Replaces = replaces
	}
	return err
}

// done ends the turn. Where nobody can be told, the others see that it lasts too
// long.
func (h *Host) done(ctx context.Context, failure *Failure) {
	if h.config.Turn == nil {
		return
	}
	if err := h.config.Turn.Done(ctx, failure); err != nil {
		klog.FromContext(ctx).Error(err, "Could not report to the other control-plane nodes that this one is done")
	}
}
