package iluvatar

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// awaited waits for a change on a goroutine of its own.
func awaited(t *testing.T, n *node) <-chan error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	woken := make(chan error, 1)
	go func() { woken <- n.AwaitChange(ctx) }()
	t.Cleanup(cancel)
	// Until it listens: what happens before is for the next discovery.
	n.listens(t)
	return woken
}

// listens waits until the chips that were found last are listened to.
func (n *node) listens(t *testing.T) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if n.heard.Load() == n.table.Last().Round {
			return
		}
	}
	t.Fatal("nobody listens")
}

func TestCriticalErrorsWake(t *testing.T) {
	for name, change := range map[string]func(*vendorsim.Card){
		"XID":        func(c *vendorsim.Card) { c.XID = vendorsim.XID{Code: 62} },
		"ECC":        func(c *vendorsim.Card) { c.HealthBits = 0x10 },
		"health bit": func(c *vendorsim.Card) { c.HealthBits = 0x4 },
	} {
		t.Run(name, func(t *testing.T) {
			n := start(t, boards(1, 2), backend.Options{})
			n.found()
			woken := awaited(t, n)
			n.change(func(topology *vendorsim.Topology) { change(&topology.Cards[1]) })
			if err := <-woken; err != nil {
				t.Errorf("AwaitChange = %v", err)
			}
		})
	}
}

func TestChipThatCameIsListenedTo(t *testing.T) {
	n := start(t, boards(1, 1), backend.Options{})
	n.found()
	woken := awaited(t, n)
	n.change(func(topology *vendorsim.Topology) { topology.Cards = vendorsim.IXBoards(2, 1, 32768) })
	n.found()
	n.listens(t)
	n.change(func(topology *vendorsim.Topology) { topology.Cards[1].XID = vendorsim.XID{Code: 62} })
	if err := <-woken; err != nil {
		t.Errorf("AwaitChange = %v", err)
	}
}

func TestNothingToListenTo(t *testing.T) {
	n := start(t, boards(1, 1), backend.Options{})
	if err := n.AwaitChange(t.Context()); err == nil {
		t.Error("AwaitChange without a library")
	}
	n.change(func(topology *vendorsim.Topology) {
		topology.Library.Fail = vendorsim.Failures{"nvmlDeviceRegisterEvents": codeNotSupported}
	})
	n.found()
	if err := n.AwaitChange(t.Context()); err == nil || !strings.Contains(err.Error(), "nvmlDeviceRegisterEvents(0): not supported (3)") {
		t.Errorf("AwaitChange = %v, want why no chip tells", err)
	}
}
