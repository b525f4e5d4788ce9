//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/divvy-gpu/divvy/lab/internal/cluster"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// withCard returns the topology of the guide with lines added to a card.
func withCard(t *testing.T, index int, lines string) string {
	t.Helper()
	topology, err := lab.Topology(testenv.Guide)
	must(t, err)
	head := fmt.Sprintf("[card %d]\n", index)
	if !strings.Contains(topology, head) {
		t.Fatalf("the topology %s has no card %d", testenv.Guide, index)
	}
	return strings.Replace(topology, head, head+lines+"\n", 1)
}

// setCards changes the cards, and puts the guide's back at the end.
func setCards(t *testing.T, ctx context.Context, topology string) {
	t.Helper()
	t.Cleanup(func() {
		guides, err := lab.Topology(testenv.Guide)
		if err == nil {
			err = lab.SetCards(context.WithoutCancel(ctx), guides)
		}
		if err := errors.Join(err, offered(context.WithoutCancel(ctx), guide)); err != nil {
			t.Errorf("put the cards back: %v", err)
		}
	})
	must(t, lab.SetCards(ctx, topology))
}

// waitHealth waits until inspect shows the cards healthy or not.
func waitHealth(t *testing.T, unhealthy func(card int) bool) {
	t.Helper()
	must(t, poll.Until(t.Context(), podTimeout, "inspect to show the cards' health", func(ctx context.Context) error {
		node, err := auditor.Inspect(ctx)
		if err != nil {
			return err
		}
		for _, device := range node.Devices {
			if device.Unhealthy != unhealthy(device.ID) {
				return fmt.Errorf("card %d is shown as unhealthy: %t", device.ID, device.Unhealthy)
			}
		}
		return nil
	}))
}

// waitUnits waits until the node offers so many units.
func waitUnits(t *testing.T, want int64) {
	t.Helper()
	must(t, poll.Until(t.Context(), podTimeout, fmt.Sprintf("the node to offer %d units", want), func(ctx context.Context) error {
		units, _, err := allocatable(ctx)
		if err == nil && units != want {
			err = fmt.Errorf("it offers %d", units)
		}
		return err
	}))
}

func TestCardBreaksUnderPods(t *testing.T) {
	for name, lines := range map[string]string{"unhealthy": "health = unhealthy", "lost": "lost = true"} {
		t.Run(name, func(t *testing.T) {
			ctx := begin(t, guide)
			start(t, one("before", 4))
			wantCards(t, map[string]int{"before": 0})
			alive := lives(t)

			setCards(t, ctx, withCard(t, 0, lines))
			waitHealth(t, func(card int) bool { return card == 0 })
			// What the pod holds stays, what nobody holds is taken away.
			waitUnits(t, 116)
			start(t, one("during", 4))
			wantCards(t, map[string]int{"before": 0, "during": 1})

			// Kubelet admits running pods anew when it starts.
			must(t, lab.Cluster.Restart(ctx, cluster.Kubelet))
			must(t, lab.Divvy.Wait(ctx, settingTimeout))
			wantCards(t, map[string]int{"before": 0, "during": 1})
			undisturbed(t, alive)

			topology, err := lab.Topology(testenv.Guide)
			must(t, err)
			must(t, lab.SetCards(ctx, topology))
			waitHealth(t, func(int) bool { return false })
			waitUnits(t, 128)
			start(t, one("after", 12))
			wantCards(t, map[string]int{"before": 0, "during": 1, "after": 0})
			undisturbed(t, alive)
		})
	}
}

func TestDriverGoesAndComes(t *testing.T) {
	ctx := begin(t, guide)
	start(t, one("before", 4))
	alive := lives(t)
	daemon, err := lab.Divvy.Pod(ctx, testenv.NodeDaemon)
	must(t, err)

	topology, err := lab.Topology(testenv.Guide)
	must(t, err)
	absent := strings.Replace(topology, "state = loaded", "state = absent", 1)
	if absent == topology {
		t.Fatal("the topology has no driver that is loaded")
	}
	setCards(t, ctx, absent)
	waitHealth(t, func(int) bool { return true })
	waitUnits(t, 4)
	waits := create(t, one("waits", 8))[0]
	pending(t, waits, "Insufficient enflame.com/gcu-memory")

	must(t, lab.SetCards(ctx, topology))
	running(t, "waits")
	// Where card 0 was broken by a test before, it has to be well for longer than card 1.
	if got := cards(agree(t)); got["before"] != 0 || len(got) != 2 {
		t.Errorf("pods are on the cards %v, want before on card 0", got)
	}
	undisturbed(t, alive)
	now, err := lab.Divvy.Pod(ctx, testenv.NodeDaemon)
	must(t, err)
	if now.UID != daemon.UID || now.Status.ContainerStatuses[0].RestartCount != daemon.Status.ContainerStatuses[0].RestartCount {
		t.Errorf("%s was started again while the driver was away, want it to wait", testenv.NodeDaemon)
	}
}

// TestTwoCardsWithOneUUID: neither can be told from the other, so neither takes
// new pods, and what runs is left alone.
func TestTwoCardsWithOneUUID(t *testing.T) {
	ctx := begin(t, guide)
	start(t, one("before", 4))
	alive := lives(t)
	books := agree(t)
	uuid := func(index int) string {
		return "uuid = " + strings.TrimPrefix(books.Cards[index].UUID, "GCU-")
	}
	topology, err := lab.Topology(testenv.Guide)
	must(t, err)
	doubled := strings.Replace(topology, uuid(3), uuid(2), 1)
	if doubled == topology {
		t.Fatalf("the topology has no line %q", uuid(3))
	}
	setCards(t, ctx, doubled)
	waitHealth(t, func(card int) bool { return card == 2 || card == 3 })
	start(t, one("during", 13))
	wantCards(t, map[string]int{"before": 0, "during": 1})
	undisturbed(t, alive)
	logged(t, nodeLog, "uuid")
}
