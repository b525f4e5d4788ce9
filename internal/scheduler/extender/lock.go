package extender

import (
	"context"
	"sync"
)

// keyedLock is one lock per key. Two binds of one pod must follow each other:
// kube-scheduler sends the second when it no longer waits for the first, and
// the second must see what became of it.
type keyedLock struct {
	mu   sync.Mutex
	held map[string]chan struct{} // closed when the holder is done
}

func newKeyedLock() *keyedLock { return &keyedLock{held: map[string]chan struct{}{}} }

// lock waits for the key until the context ends. The caller calls unlock.
func (l *keyedLock) lock(ctx context.Context, key string) (unlock func(), err error) {
	for {
		l.mu.Lock()
		holder, taken := l.held[key]
		if !taken {
			done := make(chan struct{})
			l.held[key] = done
			l.mu.Unlock()
			return func() {
				l.mu.Lock()
				delete(l.held, key)
				l.mu.Unlock()
				close(done)
			}, nil
		}
		l.mu.Unlock()
		select {
		case <-holder:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// wait returns when no key is locked, or when the context ends.
func (l *keyedLock) wait(ctx context.Context) {
	for {
		l.mu.Lock()
		var holder chan struct{}
		for _, holder = range l.held {
			break
		}
		l.mu.Unlock()
		if holder == nil {
			return
		}
		select {
		case <-holder:
		case <-ctx.Done():
			return
		}
	}
}
