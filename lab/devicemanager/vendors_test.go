package devicemanager

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// TestThreeVendorsOnOneNode is a node with GPUs, dual-chip boards and GCUs, all
// behind the stand-ins of their libraries: one divvy-node offers them, and what
// happens to one device touches no other.
func TestThreeVendorsOnOneNode(t *testing.T) {
	t.Parallel()
	const (
		gpus   = accel.Resource("nvidia.com/gpu")
		ix     = accel.Resource("iluvatar.com/gpu")
		ixUnit = accel.Resource("iluvatar.com/gpu-memory")
	)
	cards := slices.Concat(vendorsim.GPUs(2, 40<<10), vendorsim.IXBoards(2, 2, 32<<10), vendorsim.GCUs(2, 16<<10))
	n := prepareNode(t, "1", cards)
	if _, err := vendorsim.Build(context.Background(), vendorsim.Iluvatar, n.dir); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(filepath.Dir(libnvidia), vendorsim.TopologyName)
	if err := os.Remove(link); err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(n.dir, vendorsim.TopologyName), link); err != nil {
		t.Fatal(err)
	}
	n.others = []string{vendorsim.NVIDIA, vendorsim.Iluvatar}
	soonTrusted := config.Vendor{Health: config.Health{RecoverAfter: new(config.Duration(300 * time.Millisecond))}}
	offers := func(split bool) {
		n.configure = func(c *config.NodeConfig) {
			c.Vendors = map[string]config.Vendor{"nvidia": soonTrusted, "iluvatar": soonTrusted, "enflame": soonTrusted}
			c.Resources = []config.Resource{
				{Name: string(gpus), Vendor: "nvidia", Mode: config.ModeTimeSlicing, Replicas: 4},
				{Name: string(ix), Vendor: "iluvatar", Mode: config.ModeExclusive, SplitBoards: split},
				{Name: string(ixUnit), Vendor: "iluvatar", Mode: config.ModeMemory, MemoryUnit: "1"},
				memoryUnits, whole,
			}
		}
	}
	offers(false)
	n.kubelet.start()
	n.startAgent()
	n.awaitOffer()
	n.shows(gpus, 8)
	n.shows(ix, 2)
	n.shows(ixUnit, 128)
	n.shows(gcuWhole, 2)
	n.shows(gcuMemory, 32)

	env := func(pod *corev1.Pod, name string) string { return n.kubelet.env(pod.UID, "app0")[name] }
	slice := n.start("slice", of(gpus, 1))
	if got := env(slice, "NVIDIA_VISIBLE_DEVICES"); got != cards[0].UUID {
		t.Errorf("the slice's container sees GPU %q, want %s", got, cards[0].UUID)
	}
	board := n.start("board", of(ix, 1))
	if got, want := env(board, "IX_VISIBLE_DEVICES"), cards[2].UUID+","+cards[3].UUID; got != want {
		t.Errorf("the board's container sees %q, want both chips, %s", got, want)
	}
	if got := env(board, "IX_REPLICA_DEVICES"); got != cards[2].UUID {
		t.Errorf("the board's container is told the ids %q, want %s", got, cards[2].UUID)
	}
	n.shows(ixUnit, 64) // the other board's
	pod := n.start("gcu", of(gcuWhole, 1))
	n.shows(gcuMemory, 16)

	// A critical error of one GPU takes all of its replicas, but for the one that
	// is held, and nothing else.
	n.topology.Cards[0].XID = vendorsim.XID{Code: 79}
	n.writeTopology()
	n.shows(gpus, 5)
	n.shows(ix, 2)
	n.shows(gcuWhole, 2)
	n.shows(gpus, 8) // well since, and trusted again

	// A bit of ill health of one chip takes its board.
	n.topology.Cards[5].HealthBits = 0x10
	n.writeTopology()
	n.shows(ix, 1)
	n.shows(ixUnit, 32)
	n.topology.Cards[5].HealthBits = 0
	n.writeTopology()
	n.shows(ix, 2)

	// The boards are split under the running pod.
	offers(true)
	n.restartAgent()
	n.awaitOffer()
	n.shows(ix, 3) // the board that is held, and two chips
	for _, p := range []*corev1.Pod{slice, board, pod} {
		if got := n.api.get(p.UID).Status; got.Phase != corev1.PodRunning {
			t.Errorf("pod %s does not run any more: %s", p.Name, got.Message)
		}
	}
	n.kubelet.remove(board)
	n.shows(ix, 4)
	chip := n.start("chip", of(ix, 1))
	if got := env(chip, "ILUVATAR_COREX_VISIBLE_DEVICES"); strings.Contains(got, ",") || !strings.HasPrefix(got, "GPU-") {
		t.Errorf("the chip's container sees %q, want one chip", got)
	}

	// One vendor's driver goes: the others' resources are as before.
	n.topology.Drivers = map[string]vendorsim.Driver{vendorsim.Iluvatar: {State: vendorsim.DriverAbsent}}
	n.writeTopology()
	n.shows(ix, 1) // held
	eventually(t, soon, func() error {
		if err := n.agent.Ready(); err == nil || !strings.Contains(err.Error(), string(ix)) || strings.Contains(err.Error(), "nvidia") {
			return fmt.Errorf("readiness says %w", errUnexpected(err))
		}
		return nil
	})
	n.shows(gpus, 8)
	n.start("more", of(gpus, 2))
	n.topology.Drivers = nil
	n.writeTopology()
	n.shows(ix, 4)
}

// A resource that becomes another vendor's keeps what containers hold of it, of
// the first vendor's devices, away from that vendor's other resources.
// Not NVIDIA's: a process has room for one library of theirs, which is that of
// the test above.
func TestResourceChangesItsVendor(t *testing.T) {
	t.Parallel()
	const cards = accel.Resource("example.com/card")
	n := prepareNode(t, "1", slices.Concat(vendorsim.GCUs(2, 16<<10), vendorsim.IXBoards(1, 1, 40<<10)))
	if _, err := vendorsim.Build(context.Background(), vendorsim.Iluvatar, n.dir); err != nil {
		t.Fatal(err)
	}
	n.others = []string{vendorsim.Iluvatar}
	n.resources(config.Resource{Name: string(cards), Vendor: "enflame", Mode: config.ModeExclusive, SplitBoards: true}, memoryUnits)
	n.kubelet.start()
	n.startAgent()
	n.awaitOffer()
	pod := n.start("pod", of(cards, 1))
	n.shows(gcuMemory, 16)
	n.reload(config.Resource{Name: string(cards), Vendor: "iluvatar", Mode: config.ModeExclusive}, memoryUnits)
	n.shows(cards, 2) // the one that is held, and the GPU
	n.shows(gcuMemory, 16)
	n.refused(n.bind(-1, "large", app(17)), "requested number of devices unavailable")
	n.kubelet.remove(pod)
	n.shows(cards, 1)
	n.shows(gcuMemory, 32)
}
