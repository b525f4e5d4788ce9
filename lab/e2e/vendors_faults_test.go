//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
	"github.com/divvy-gpu/divvy/lab/internal/demos"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
)

// hardwareWith sets the cards of mixed after a change.
func hardwareWith(t *testing.T, ctx context.Context, change func(*vendorsim.Topology)) {
	t.Helper()
	hardware, err := lab.Cards(demos.Mixed)
	must(t, err)
	change(&hardware)
	must(t, lab.SetHardware(ctx, hardware))
}

// TestSwappedDevice: another GPU in the place of one is another GPU, although
// there are as many as before.
func TestSwappedDevice(t *testing.T) {
	ctx := beginMixed(t)
	check := sameDaemon(t)
	before := uuidOf(t, 1)
	after := strings.Replace(before, "GPU-3b1f", "GPU-4c2a", 1)
	hardwareWith(t, ctx, func(h *vendorsim.Topology) { h.Cards[1].UUID = after })
	must(t, poll.Until(ctx, settingTimeout, "the node to show the new GPU", func(ctx context.Context) error {
		cards, err := lab.Node.Published(ctx, demos.GPU)
		if err != nil {
			return err
		}
		for _, c := range cards {
			if string(c.ID) == after && !c.Health.Unhealthy {
				return nil
			}
		}
		return fmt.Errorf("it shows %+v", cards)
	}))
	offers(t, demos.GPU, 2)
	start(t, asking("both", demos.GPU, 2))
	got := sights(t, "both")["both"].Env["NVIDIA_VISIBLE_DEVICES"]
	if !strings.Contains(got, after) || strings.Contains(got, before) {
		t.Errorf("a pod with both GPUs sees %s, want %s and not %s", got, after, before)
	}
	check()
}

// TestReplicasOfALostDevice: those that are held stay, the others are withdrawn.
func TestReplicasOfALostDevice(t *testing.T) {
	ctx := beginMixed(t)
	check := sameDaemon(t)
	choose(t, "slices")
	offers(t, demos.GPU, 4)
	start(t, asking("first", demos.GPU, 1), asking("second", demos.GPU, 1))
	alive := lives(t)
	hardwareWith(t, ctx, func(h *vendorsim.Topology) { h.Cards[0].Lost = true })
	offers(t, demos.GPU, 3)
	start(t, asking("third", demos.GPU, 1))
	if got := sights(t, "third")["third"].Env["NVIDIA_VISIBLE_DEVICES"]; got != uuidOf(t, 1) {
		t.Errorf("a pod after GPU 0 was lost is on %s, want %s", got, uuidOf(t, 1))
	}
	pending(t, create(t, asking("waits", demos.GPU, 1))[0], "Insufficient nvidia.com/gpu")
	hardwareWith(t, ctx, func(*vendorsim.Topology) {})
	running(t, "waits")
	undisturbed(t, alive)
	check()
}

// TestHealthThatFlips: a chip that is ill again and again is not offered in
// between, and is in the end.
func TestHealthThatFlips(t *testing.T) {
	ctx := beginMixed(t)
	check := sameDaemon(t)
	start(t, asking("holder", demos.IXMemory, 4))
	alive := lives(t)
	for i := range 10 {
		hardwareWith(t, ctx, func(h *vendorsim.Topology) { h.Cards[2].HealthBits = uint64((i + 1) % 2) })
		time.Sleep(300 * time.Millisecond)
	}
	hardwareWith(t, ctx, func(h *vendorsim.Topology) { h.Cards[2].HealthBits = 1 })
	offers(t, demos.IXMemory, 100)
	hardwareWith(t, ctx, func(*vendorsim.Topology) {})
	offers(t, demos.IXMemory, 128)
	start(t, asking("next", demos.IXMemory, 28))
	undisturbed(t, alive)
	check()
}

// TestOneVendorsDriverGoes: the others are not concerned, and it is waited for.
func TestOneVendorsDriverGoes(t *testing.T) {
	ctx := beginMixed(t)
	check := sameDaemon(t)
	start(t, asking("gpu", demos.GPU, 1))
	alive := lives(t)
	hardwareWith(t, ctx, func(h *vendorsim.Topology) {
		driver := h.Drivers[vendorsim.NVIDIA]
		driver.State = vendorsim.DriverAbsent
		h.Drivers[vendorsim.NVIDIA] = driver
	})
	offers(t, demos.GPUMemory, 0)
	offers(t, demos.GPU, 1)
	start(t, asking("gcu", demos.GCU, 1), asking("ix", demos.IX, 1))
	hardwareWith(t, ctx, func(*vendorsim.Topology) {})
	offers(t, demos.GPUMemory, 40)
	offers(t, demos.GPU, 2)
	undisturbed(t, alive)
	check()
}
