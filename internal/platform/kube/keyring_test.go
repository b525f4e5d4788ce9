package kube

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// TestPreviousKeyEnds: a key that was replaced is accepted for keyOverlap, also where
// the program is never restarted.
func TestPreviousKeyEnds(t *testing.T) {
	keys := [][]byte{bytes.Repeat([]byte("1"), 32), bytes.Repeat([]byte("2"), 32), bytes.Repeat([]byte("3"), 32)}
	grants := make([]string, len(keys))
	for i, key := range keys {
		signer, err := wire.NewSigner(key)
		if err != nil {
			t.Fatal(err)
		}
		if grants[i], err = signer.EncodeGrant("uid", accel.Grant{Resource: gcuMemory, Node: "a", Device: "a-0", DeviceUnits: 16,
			Units: 4}); err != nil {
			t.Fatal(err)
		}
	}
	file := filepath.Join(t.TempDir(), "key")
	write := func(key []byte) {
		t.Helper()
		if err := os.WriteFile(file, key, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		write(keys[0])
		ring := NewKeyring(file)
		var work sync.WaitGroup
		defer work.Wait()
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		work.Go(func() { ring.Run(ctx, func() {}) })

		// accepted lets time pass and compares which of the grants verify then.
		accepted := func(after time.Duration, want ...bool) {
			t.Helper()
			time.Sleep(after)
			synctest.Wait()
			for i, grant := range grants {
				if _, err := ring.DecodeGrant("uid", grant); (err == nil) != want[i] {
					t.Errorf("key %d: error %v, want it to be accepted: %t", i+1, err, want[i])
				}
			}
		}
		accepted(time.Hour, true, false, false)
		write(keys[1])
		accepted(keyPoll, true, true, false)
		accepted(keyOverlap-keyPoll, true, true, false)
		accepted(keyPoll, false, true, false)
		write(keys[2])
		accepted(keyOverlap, false, true, true)
		// A bad file prolongs nothing.
		write([]byte("short"))
		accepted(keyPoll, false, false, true)
		accepted(time.Hour, false, false, true)
		// A key that comes back is one like any other.
		write(keys[1])
		accepted(keyPoll, false, true, true)
		accepted(keyOverlap, false, true, false)
	})
}

func TestKeyringWaits(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	keys := NewKeyring(file)
	if _, err := keys.Signer(); err == nil || !strings.Contains(err.Error(), "no signing key yet") {
		t.Errorf("signer without a file: %v", err)
	}
	if _, err := keys.DecodeGrant("u", "{}"); err == nil {
		t.Error("a grant verified without a key")
	}
	changed := make(chan struct{})
	go keys.Run(t.Context(), func() { close(changed) })
	if err := os.WriteFile(file, bytes.Repeat([]byte("k"), wire.MinKeyBytes), 0o600); err != nil {
		t.Fatal(err)
	}
	select {
	case <-changed:
	case <-time.After(3 * keyPoll):
		t.Fatal("the key that appeared was not read")
	}
	if _, err := keys.Signer(); err != nil {
		t.Error(err)
	}
	if err := NewKeyring(t.TempDir()).err; err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("a folder as key: %v", err)
	}
}
