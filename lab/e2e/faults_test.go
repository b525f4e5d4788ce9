//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
	"github.com/divvy-gpu/divvy/lab/internal/show"
	"github.com/divvy-gpu/divvy/lab/internal/stage"
)

// TestFaults is the short form of `make faults`.
func TestFaults(t *testing.T) {
	ctx := beginMixed(t)
	var printed strings.Builder
	s := show.New("faults", lab, io.MultiWriter(logWriter{t}, &printed))
	must(t, s.Faults(ctx, true))
	must(t, s.Checks.Err())
	must(t, lab.CheckShown("docs/demo.md", "make faults", printed.String()))
}

// hardwareWith sets the cards of mixed after a change.
func hardwareWith(t *testing.T, ctx context.Context, change func(*vendorsim.Topology)) {
	t.Helper()
	hardware, err := lab.Cards(show.Mixed)
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
	must(t, stage.Poll(ctx, settingTimeout, "the node to show the new GPU", func(ctx context.Context) error {
		cards, err := lab.Published(ctx, show.GPU)
		if err != nil {
			return err
		}
		for _, c := range cards {
			if c.ID == after && !c.Unhealthy {
				return nil
			}
		}
		return fmt.Errorf("it shows %+v", cards)
	}))
	offers(t, show.GPU, 2)
	start(t, asking("both", show.GPU, 2))
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
	offers(t, show.GPU, 4)
	start(t, asking("first", show.GPU, 1), asking("second", show.GPU, 1))
	alive := lives(t)
	hardwareWith(t, ctx, func(h *vendorsim.Topology) { h.Cards[0].Lost = true })
	offers(t, show.GPU, 3)
	start(t, asking("third", show.GPU, 1))
	if got := sights(t, "third")["third"].Env["NVIDIA_VISIBLE_DEVICES"]; got != uuidOf(t, 1) {
		t.Errorf("a pod after GPU 0 was lost is on %s, want %s", got, uuidOf(t, 1))
	}
	pending(t, create(t, asking("waits", show.GPU, 1))[0], "Insufficient nvidia.com/gpu")
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
	start(t, asking("holder", show.IXMemory, 4))
	alive := lives(t)
	for i := range 10 {
		hardwareWith(t, ctx, func(h *vendorsim.Topology) { h.Cards[2].HealthBits = uint64((i + 1) % 2) })
		time.Sleep(300 * time.Millisecond)
	}
	hardwareWith(t, ctx, func(h *vendorsim.Topology) { h.Cards[2].HealthBits = 1 })
	offers(t, show.IXMemory, 100)
	hardwareWith(t, ctx, func(*vendorsim.Topology) {})
	offers(t, show.IXMemory, 128)
	start(t, asking("next", show.IXMemory, 28))
	undisturbed(t, alive)
	check()
}

// TestOneVendorsDriverGoes: the others are not concerned, and it is waited for.
func TestOneVendorsDriverGoes(t *testing.T) {
	ctx := beginMixed(t)
	check := sameDaemon(t)
	start(t, asking("gpu", show.GPU, 1))
	alive := lives(t)
	hardwareWith(t, ctx, func(h *vendorsim.Topology) {
		driver := h.Drivers[vendorsim.NVIDIA]
		driver.State = vendorsim.DriverAbsent
		h.Drivers[vendorsim.NVIDIA] = driver
	})
	offers(t, show.GPUMemory, 0)
	offers(t, show.GPU, 1)
	start(t, asking("gcu", show.GCU, 1), asking("ix", show.IX, 1))
	hardwareWith(t, ctx, func(*vendorsim.Topology) {})
	offers(t, show.GPUMemory, 40)
	offers(t, show.GPU, 2)
	undisturbed(t, alive)
	check()
}
