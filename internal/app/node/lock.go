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
	path := filepath.Join(stateDir, lockName)
	// Not for writing: the lock can be taken on a disk that has become read-only.
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("state folder: %w", err)
	}
	err = flock(ctx, f, func() {
		klog.FromContext(ctx).Info("Another divvy-node runs on this node; waiting until it ends", "lock", path)
	})
	switch {
	case errors.Is(err, errLocked):
		return nil, errors.Join(err, f.Close())
	case err != nil:
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
	}
	return func() { _ = f.Close() }, nil
}

// lockName is the name of the lock, a file in the state folder.
const lockName = "divvy-node.lock"

// errLocked says that the lock was not to be had.
var errLocked = errors.New("another divvy-node runs on this node")

// flock locks the file until it is closed. It calls waiting when it has to wait,
// and returns errLocked when ctx ends before.
func flock(ctx context.Context, f *os.File, waiting func()) error {
	for told := false; ; told = true {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return err
		}
		if !told {
			waiting()
		}
		select {
		case <-ctx.Done():
			return errLocked
		case <-time.After(500 * time.Millisecond):
		}
	}
}
