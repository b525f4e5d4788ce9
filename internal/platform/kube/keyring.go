package kube

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// keyPoll is how often the key file is read. It is small and read from memory;
// a mounted Secret changes by a swap of links that file watches tend to miss.
const keyPoll = 2 * time.Second

// keyOverlap is how long the key before the current one is accepted. Kubelet brings a
// changed Secret to all programs within about two minutes, and nodes sign the grants
// of their pods again within seconds after that; the rest is for a busy cluster.
const keyOverlap = 10 * time.Minute

// maxKeyBytes bounds what is read as a key, so that a wrong path does no harm.
const maxKeyBytes = 64 << 10

// ErrNoKey says that no key to sign grants with was read yet.
var ErrNoKey = errors.New("no signing key yet")

// Keyring holds the key that signs and verifies grants and follows its file.
// The bytes of the file are the key, exactly as they are: nothing is trimmed.
//
// While a Secret's new content reaches the programs one after the other, grants
// signed with either key are around, so the key before the current one is accepted
// for keyOverlap after the current one was read. A file that becomes unreadable or
// too short leaves the current key as it was. Keyring is safe for concurrent use.
type Keyring struct {
	path string

	mu       sync.RWMutex // guards what follows
	content  []byte       // of the file that current was made from
	current  *wire.Signer // nil before the first good read
	previous *wire.Signer // nil when there is none, or its time is over
	until    time.Time    // when previous ends
	err      error        // of the last read
}

// NewKeyring reads the file at path. That it is missing or bad is no failure
// of NewKeyring but a state of the ring: see Signer.
func NewKeyring(path string) *Keyring {
	k := &Keyring{path: path}
	k.Reload()
	return k
}

// Signer returns the signer with the current key, or an error that wraps
// ErrNoKey and says what is wrong with the file.
func (k *Keyring) Signer() (*wire.Signer, error) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	if k.current == nil {
		return nil, fmt.Errorf("%w: %w", ErrNoKey, k.err)
	}
	return k.current, nil
}

// DecodeGrant verifies a grant annotation of the pod with the current key and
// then with the previous one, if that is still accepted.
func (k *Keyring) DecodeGrant(podUID, value string) (accel.Grant, error) {
	k.mu.RLock()
	current, previous := k.current, k.previous
	k.mu.RUnlock()
	if current == nil {
		return accel.Grant{}, ErrNoKey
	}
	grant, err := current.DecodeGrant(podUID, value)
	if err == nil || previous == nil {
		return grant, err
	}
	if grant, err := previous.DecodeGrant(podUID, value); err == nil {
		return grant, nil
	}
	return accel.Grant{}, err
}

// Run follows the file until the context ends and calls changed after every
// new key. It also ends the previous key.
func (k *Keyring) Run(ctx context.Context, changed func()) {
	logger := klog.FromContext(ctx)
	ticker := time.NewTicker(keyPoll)
	defer ticker.Stop()
	// reported is the last problem that was logged; each is logged once.
	reported := ""
	for {
		k.mu.RLock()
		err := k.err
		k.mu.RUnlock()
		switch {
		case err == nil:
			reported = ""
		case err.Error() != reported:
			reported = err.Error()
			logger.Error(err, "The signing key is invalid; waiting for a valid one")
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			if k.Reload() {
				logger.Info("Loaded a new signing key", "file", k.path, "previousKeyAcceptedFor", keyOverlap)
				changed()
			}
			if k.expire() {
				logger.Info("The previous signing key is no longer accepted", "file", k.path)
			}
		}
	}
}

// expire drops the previous key when its time is over and reports whether it did.
func (k *Keyring) expire() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.previous == nil || time.Now().Before(k.until) {
		return false
	}
	k.previous = nil
	return true
}

// Reload reads the file and reports whether it has another key. Run does so by itself.
func (k *Keyring) Reload() bool {
	content, err := readKey(k.path)
	k.mu.Lock()
	defer k.mu.Unlock()
	if err == nil && k.current != nil && bytes.Equal(content, k.content) {
		k.err = nil
		return false
	}
	var signer *wire.Signer
	if err == nil {
		if signer, err = wire.NewSigner(content); err != nil {
			err = fmt.Errorf("signing key file %s: %w", k.path, err)
		}
	}
	k.err = err
	if err != nil {
		return false
	}
	k.previous, k.until = k.current, time.Now().Add(keyOverlap)
	k.current, k.content = signer, content
	return true
}

func readKey(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("read signing key: %w", err)
	}
	if !info.Mode().IsRegular() || info.Size() > maxKeyBytes {
		return nil, fmt.Errorf("signing key file %s: not a regular file of at most %d bytes", path, maxKeyBytes)
	}
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read signing key: %w", err)
	}
	return content, nil
}
