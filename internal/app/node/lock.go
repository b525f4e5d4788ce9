package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"k8s.io/klog/v2"
)

// claim makes sure that one divvy-node runs on the node: a second one would
// take the sockets of the first. It waits until the first has gone.
func claim(ctx context.Context, stateDir string) (release func(), err error) {
	if err := os.MkdirAll(stateDir, 0o750); err != nil {
		return nil, fmt.Errorf("state folder: %w", err)
	}
	path := filepath.Join(stateDir, "divvy-node.lock")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("state folder: %w", err)
	}
	for told := false; ; told = true {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { _ = f.Close() }, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
		}
		if !told {
			klog.FromContext(ctx).Info("Another divvy-node runs on this node; waiting until it ends", "lock", path)
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(errors.New("another divvy-node runs on this node"), f.Close())
		case <-time.After(500 * time.Millisecond):
		}
	}
}
