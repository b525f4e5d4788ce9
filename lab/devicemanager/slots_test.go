package devicemanager

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

const (
	gcuWhole  = accel.Resource("enflame.com/gcu")
	gcuShared = accel.Resource("enflame.com/gcu.shared")
	gcuBoard  = accel.Resource("enflame.com/gcu-board")
)

// The resources that the tests are made of.
var (
	memoryUnits = config.Resource{Name: string(gcuMemory), Vendor: "enflame", Mode: config.ModeMemory, MemoryUnit: "1"}
	whole       = config.Resource{Name: string(gcuWhole), Vendor: "enflame", Mode: config.ModeExclusive, SplitBoards: true}
	boards      = config.Resource{Name: string(gcuBoard), Vendor: "enflame", Mode: config.ModeExclusive}
)

func sliced(replicas int) config.Resource {
	return config.Resource{Name: string(gcuShared), Vendor: "enflame", Mode: config.ModeTimeSlicing, Replicas: replicas, SplitBoards: true}
}

// offer starts a node that offers these resources.
func offer(t *testing.T, cards []vendorsim.Card, resources ...config.Resource) *node {
	t.Helper()
	n := prepareNode(t, "1", cards)
	n.resources(resources...)
	n.kubelet.start()
	n.startAgent()
	n.awaitOffer()
	return n
}

// resources sets what the next divvy-node offers.
func (n *node) resources(resources ...config.Resource) {
	n.configure = func(c *config.NodeConfig) { c.Resources = slices.Clone(resources) }
}

// reload gives the running divvy-node another configuration, as its main does:
// the agent is stopped and another one made in the same process.
func (n *node) reload(resources ...config.Resource) {
	n.t.Helper()
	n.resources(resources...)
	n.restartAgent()
	n.awaitOffer()
}

// awaitOffer waits until divvy-node says that it works and kubelet has taken in
// what it offers.
func (n *node) awaitOffer() {
	n.t.Helper()
	eventually(n.t, patience, func() error {
		if err := n.agent.Ready(); err != nil {
			return err
		}
		var c config.NodeConfig
		n.configure(&c)
		for _, r := range c.Resources {
			healthy := false
			for _, s := range n.sharesOf(accel.Resource(r.Name)) {
				healthy = healthy || !s.Health.Unhealthy
			}
			if _, got := n.kubelet.capacityOf(accel.Resource(r.Name)); healthy && got == 0 {
				return fmt.Errorf("kubelet shows no %s", r.Name)
			}
		}
		return nil
	})
}

// capacityOf is what the node's status shows of a resource.
func (k *kubelet) capacityOf(r accel.Resource) (capacity, allocatable int64) {
	return k.Capacity(corev1.ResourceName(r))
}

// shows waits until kubelet shows allocatable units of a resource.
func (n *node) shows(r accel.Resource, want int64) {
	n.t.Helper()
	eventually(n.t, soon, func() error {
		if _, got := n.kubelet.capacityOf(r); got != want {
			return fmt.Errorf("kubelet shows %d allocatable %s, want %d", got, r, want)
		}
		return nil
	})
}

// held returns the ids that kubelet keeps for a container.
func (k *kubelet) held(uid types.UID, container string, r accel.Resource) []string {
	return k.IDs(uid, container, corev1.ResourceName(r))
}

// asking adds a container that asks for some of each resource.
func asking(amounts map[accel.Resource]int64) shape {
	return func(s *corev1.PodSpec) {
		s.Containers = append(s.Containers, containerOf(fmt.Sprintf("app%d", len(s.Containers)), amounts))
	}
}

func containerOf(name string, amounts map[accel.Resource]int64) corev1.Container {
	list := corev1.ResourceList{}
	for r, n := range amounts {
		list[corev1.ResourceName(r)] = *resource.NewQuantity(n, resource.DecimalSI)
	}
	return corev1.Container{Name: name, Resources: corev1.ResourceRequirements{Limits: list, Requests: list}}
}

func of(r accel.Resource, n int64) shape { return asking(map[accel.Resource]int64{r: n}) }

// first adds an init container that runs to its end.
func first(r accel.Resource, n int64) shape {
	return func(s *corev1.PodSpec) {
		s.InitContainers = append(s.InitContainers, containerOf(fmt.Sprintf("init%d", len(s.InitContainers)),
			map[accel.Resource]int64{r: n}))
	}
}

// start creates a pod and has kubelet run it.
func (n *node) start(name string, shapes ...shape) *corev1.Pod {
	n.t.Helper()
	pod := n.bind(-1, name, shapes...)
	n.admit(pod)
	return pod
}

// sharesOf is what the node's object shows of a resource, by device.
func (n *node) sharesOf(r accel.Resource) map[accel.DeviceID]accel.Share {
	n.t.Helper()
	object, err := n.api.CoreV1().Nodes().Get(context.Background(), thisNode, metav1.GetOptions{})
	if err != nil {
		n.t.Fatal(err)
	}
	out := map[accel.DeviceID]accel.Share{}
	if object.Annotations[wire.InventoryAnnotation] == "" {
		return out
	}
	all, err := wire.DecodeInventory(object.Annotations[wire.InventoryAnnotation])
	if err != nil {
		n.t.Fatal(err)
	}
	for _, in := range all {
		if in.Resource == r {
			for _, s := range in.Shares {
				out[s.ID] = s
			}
		}
	}
	return out
}

// published waits until the inventory shows the devices with these reasons, ""
// for a healthy one.
func (n *node) published(r accel.Resource, want map[accel.DeviceID]string) {
	n.t.Helper()
	eventually(n.t, soon, func() error {
		got := map[accel.DeviceID]string{}
		for id, s := range n.sharesOf(r) {
			got[id] = s.Health.Reason
		}
		if !maps.Equal(got, want) {
			return fmt.Errorf("the inventory of %s shows %v, want %v", r, got, want)
		}
		return nil
	})
}

// slotDevice is the device in the id of a slot.
func slotDevice(id string) accel.DeviceID {
	device, _, _ := strings.Cut(id, "::")
	return accel.DeviceID(device)
}

func TestWholeDevices(t *testing.T) {
	t.Parallel()
	n := offer(t, vendorsim.GCUs(4, 16<<10), whole)
	n.shows(gcuWhole, 4)
	pod := n.start("pod", of(gcuWhole, 2))
	ids := n.kubelet.held(pod.UID, "app0", gcuWhole)
	if len(ids) != 2 {
		t.Fatalf("the pod holds %v, want two devices", ids)
	}
	if env := n.kubelet.env(pod.UID, "app0")["ENFLAME_VISIBLE_DEVICES"]; env != "0,1" {
		t.Errorf("the container sees devices %q, want 0,1", env)
	}
	// What it holds is written into the pod, for people.
	eventually(t, soon, func() error {
		var got map[string][]string
		if err := json.Unmarshal([]byte(n.api.get(pod.UID).Annotations[wire.HeldAnnotation]), &got); err != nil {
			return err
		}
		if !slices.Equal(got[string(gcuWhole)], ids) || len(got) != 1 {
			return fmt.Errorf("the pod says %v, it holds %v", got, ids)
		}
		return nil
	})
	n.refused(n.bind(-1, "too-many", of(gcuWhole, 3)), "requested number of devices unavailable")
	n.kubelet.remove(pod)
	all := n.start("all", of(gcuWhole, 4))
	if got := n.kubelet.held(all.UID, "app0", gcuWhole); len(got) != 4 {
		t.Errorf("a pod that asks for all devices of the node holds %v", got)
	}
}

// A pod of the one resource and a pod of the other never share a card, whichever
// comes first, and a card that comes free returns to both.
func TestWholeAndMemoryWithdrawFromEachOther(t *testing.T) {
	t.Parallel()
	n := offer(t, vendorsim.GCUs(2, 16<<10), memoryUnits, whole)
	n.shows(gcuWhole, 2)
	n.shows(gcuMemory, 32)
	small := n.bind(0, "small", app(4))
	n.admit(small)
	n.shows(gcuWhole, 1)
	n.published(gcuWhole, map[accel.DeviceID]string{n.card(0): "given out as enflame.com/gcu-memory", n.card(1): ""})

	all := n.start("whole", of(gcuWhole, 1))
	if got := n.kubelet.held(all.UID, "app0", gcuWhole); !slices.Equal(got, []string{string(n.card(1))}) {
		t.Fatalf("the pod holds %v, want %s, the card of which nobody holds memory", got, n.card(1))
	}
	// Units that pods hold of the first card stay allocatable, those of the
	// second are withdrawn.
	n.shows(gcuMemory, 16)
	n.published(gcuMemory, map[accel.DeviceID]string{n.card(0): "", n.card(1): "given out as enflame.com/gcu"})
	// Granted on the second card a moment before: it gets the first.
	moved := n.bind(1, "moved", app(4))
	n.admit(moved)
	if env := n.kubelet.env(moved.UID, "app0")["ENFLAME_VISIBLE_DEVICES"]; env != "0" {
		t.Errorf("the pod sees device %q, want 0", env)
	}
	n.refused(n.bind(-1, "none-left", of(gcuWhole, 1)), "unavailable for enflame.com/gcu")

	n.kubelet.remove(all)
	n.shows(gcuMemory, 32)
	n.shows(gcuWhole, 1)
	n.kubelet.remove(small)
	n.kubelet.remove(moved)
	n.shows(gcuWhole, 2)
	n.published(gcuWhole, map[accel.DeviceID]string{n.card(0): "", n.card(1): ""})
}

// The extender has granted memory of a card to a pod that kubelet has not come
// to yet: a whole device is taken from the others, as long as there are some.
func TestWholeAvoidsCardsThatArePromised(t *testing.T) {
	t.Parallel()
	n := offer(t, vendorsim.GCUs(2, 16<<10), memoryUnits, whole)
	waiting := n.bind(0, "waiting", app(4))
	all := n.start("whole", of(gcuWhole, 1))
	if got := n.kubelet.held(all.UID, "app0", gcuWhole); !slices.Equal(got, []string{string(n.card(1))}) {
		t.Fatalf("the pod holds %v, want %s: the other is promised", got, n.card(1))
	}
	n.admit(waiting)
	if env := n.kubelet.env(waiting.UID, "app0")["ENFLAME_VISIBLE_DEVICES"]; env != "0" {
		t.Errorf("the pod sees device %q, want 0, its grant", env)
	}
}

// One container asks for a whole card and for memory: they are of two cards.
func TestOnePodOfBothResources(t *testing.T) {
	t.Parallel()
	for i := range 6 { // kubelet serves a container's resources in any order
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			n := offer(t, vendorsim.GCUs(2, 16<<10), memoryUnits, whole)
			pod := n.start("both", asking(map[accel.Resource]int64{gcuWhole: 1, gcuMemory: 4}))
			device := slotDevice(n.kubelet.held(pod.UID, "app0", gcuWhole)[0])
			for _, id := range n.kubelet.held(pod.UID, "app0", gcuMemory) {
				if d, _ := n.layout().Device(id); d == device {
					t.Fatalf("the pod holds card %s whole and memory of it", d)
				}
			}
			// Nothing of either card is left for a whole device.
			n.refused(n.bind(-1, "next", of(gcuWhole, 1)))
		})
	}
}

// boarded makes pairs of cards the chips of boards. A chip names its board also
// while the other one is away, as the vendors' backends do.
type boarded struct {
	backend.Backend
	cards []accel.DeviceID
}

// asBoards makes pairs of the node's cards the chips of boards.
func (n *node) asBoards() {
	var cards []accel.DeviceID
	for i := range n.topology.Cards {
		cards = append(cards, n.card(i))
	}
	n.wrap = func(b backend.Backend) backend.Backend { return boarded{b, cards} }
}

func (b boarded) Discover(ctx context.Context) (backend.Found, error) {
	found, err := b.Backend.Discover(ctx)
	found.Devices = slices.Clone(found.Devices)
	for i := range found.Devices {
		d := &found.Devices[i]
		at := slices.Index(b.cards, d.ID)
		d.Chip, d.Board = at%2, string(b.cards[at-at%2])
	}
	return found, err
}

func TestSplitAndWholeBoardsWithdrawFromEachOther(t *testing.T) {
	t.Parallel()
	n := prepareNode(t, "1", vendorsim.GCUs(4, 16<<10))
	n.asBoards()
	n.resources(whole, boards)
	n.kubelet.start()
	n.startAgent()
	n.awaitOffer()
	n.shows(gcuWhole, 4)
	n.shows(gcuBoard, 2)
	chip := n.start("chip", of(gcuWhole, 1))
	n.shows(gcuBoard, 1)
	board := n.start("board", of(gcuBoard, 1))
	if env := n.kubelet.env(board.UID, "app0")["ENFLAME_VISIBLE_DEVICES"]; env != "2,3" {
		t.Errorf("the board's pod sees %q, want 2,3", env)
	}
	n.shows(gcuWhole, 2) // the held one and the other chip of its board
	n.kubelet.remove(chip)
	n.shows(gcuBoard, 2)
	n.kubelet.remove(board)
	n.shows(gcuWhole, 4)
}

func TestReplicasSpreadOverDevices(t *testing.T) {
	t.Parallel()
	n := offer(t, vendorsim.GCUs(2, 16<<10), sliced(4))
	n.shows(gcuShared, 8)
	use := map[accel.DeviceID]int{}
	for i := range 4 {
		pod := n.start(fmt.Sprint("pod", i), of(gcuShared, 1))
		use[slotDevice(n.kubelet.held(pod.UID, "app0", gcuShared)[0])]++
	}
	if use[n.card(0)] != 2 || use[n.card(1)] != 2 {
		t.Errorf("4 pods are spread as %v, want 2 on each card", use)
	}
	two := n.start("two", of(gcuShared, 2))
	ids := n.kubelet.held(two.UID, "app0", gcuShared)
	if slotDevice(ids[0]) == slotDevice(ids[1]) {
		t.Errorf("a container that asks for two holds %v, want replicas of two devices", ids)
	}
}

func TestOneLostDeviceTakesAllItsReplicas(t *testing.T) {
	t.Parallel()
	n := offer(t, vendorsim.GCUs(2, 16<<10), sliced(4))
	a := n.start("a", of(gcuShared, 1))
	b := n.start("b", of(gcuShared, 1))
	lost := 0
	if slotDevice(n.kubelet.held(a.UID, "app0", gcuShared)[0]) == n.card(1) {
		lost = 1
	}
	n.topology.Cards[lost].Lost = true
	n.writeTopology()
	n.shows(gcuShared, 5) // all of the other device and the one that is held
	before := []string{n.kubelet.held(a.UID, "app0", gcuShared)[0], n.kubelet.held(b.UID, "app0", gcuShared)[0]}
	n.restartKubelet()
	n.awaitOffer()
	n.shows(gcuShared, 5)
	for i, pod := range []*corev1.Pod{a, b} {
		if got := n.api.get(pod.UID); got.Status.Phase != corev1.PodRunning {
			t.Errorf("pod %s failed after kubelet's restart: %s", pod.Name, got.Status.Message)
		}
		if got := n.kubelet.held(pod.UID, "app0", gcuShared); !slices.Equal(got, before[i:i+1]) {
			t.Errorf("pod %s holds %v, held %v", pod.Name, got, before[i])
		}
	}
	// The rest of the node goes on.
	next := n.start("next", of(gcuShared, 2))
	for _, id := range n.kubelet.held(next.UID, "app0", gcuShared) {
		if slotDevice(id) == n.card(lost) {
			t.Errorf("a new pod holds %s of the lost device", id)
		}
	}
	n.kubelet.remove(a)
	n.shows(gcuShared, 4)
	n.topology.Cards[lost].Lost = false
	n.writeTopology()
	n.shows(gcuShared, 8)
}

// A container keeps its replica when their number is lowered, and kubelet, when
// it restarts, does not fail its pod.
func TestReplicasLoweredUnderRunningPods(t *testing.T) {
	t.Parallel()
	n := offer(t, vendorsim.GCUs(1, 16<<10), sliced(4))
	var pods []*corev1.Pod
	for i := range 4 {
		pods = append(pods, n.start(fmt.Sprint("pod", i), of(gcuShared, 1)))
	}
	n.reload(sliced(2))
	n.shows(gcuShared, 4)
	n.restartKubelet()
	n.awaitOffer()
	n.shows(gcuShared, 4)
	for _, pod := range pods {
		if got := n.api.get(pod.UID); got.Status.Phase != corev1.PodRunning {
			t.Fatalf("pod %s failed: %s", pod.Name, got.Status.Message)
		}
	}
	// Whichever go: there are two at most from now on.
	n.kubelet.remove(pods[0])
	n.kubelet.remove(pods[1])
	n.shows(gcuShared, 2)
	n.refused(n.bind(-1, "third", of(gcuShared, 1)))
	n.kubelet.remove(pods[2])
	eventually(t, soon, func() error {
		pod := n.bind(-1, "fits", of(gcuShared, 1))
		return n.kubelet.add(pod)
	})
}

// A resource leaves the configuration while a container holds a device of it: it
// is served for that container's sake, gives nothing to others, and is gone when
// the container is.
func TestDrainedResource(t *testing.T) {
	t.Parallel()
	n := offer(t, vendorsim.GCUs(2, 16<<10), memoryUnits, whole)
	pod := n.start("pod", of(gcuWhole, 1))
	memory := n.bind(1, "memory", app(4))
	n.admit(memory)
	id := n.kubelet.held(pod.UID, "app0", gcuWhole)
	n.reload(memoryUnits)
	n.shows(gcuWhole, 1)
	n.shows(gcuMemory, 16) // the device is still not for memory
	n.restartKubelet()
	n.awaitOffer()
	n.shows(gcuWhole, 1)
	if got := n.api.get(pod.UID); got.Status.Phase != corev1.PodRunning || !slices.Equal(n.kubelet.held(pod.UID, "app0", gcuWhole), id) {
		t.Fatalf("the pod is %s: %s", got.Status.Phase, got.Status.Message)
	}
	n.refused(n.bind(-1, "next", of(gcuWhole, 1)))
	n.kubelet.remove(pod)
	n.shows(gcuWhole, 0)
	n.shows(gcuMemory, 32)
	n.restartAgent()
	n.awaitOffer()
	if err := n.kubelet.add(n.bind(0, "after", app(16))); err != nil {
		t.Errorf("the card is free again, but: %v", err)
	}
}

// A resource changes from memory to whole devices and back under a running pod.
func TestModeChangesUnderRunningPods(t *testing.T) {
	t.Parallel()
	asWhole := whole
	asWhole.Name = string(gcuMemory)
	n := offer(t, vendorsim.GCUs(2, 16<<10), memoryUnits)
	before := n.bind(0, "before", app(4))
	n.admit(before)
	n.converged()
	ids := n.kubelet.ids(before.UID, "app0")

	n.reload(asWhole)
	n.shows(gcuMemory, 4+1) // the units that are held, and the other card
	n.restartKubelet()
	n.awaitOffer()
	n.shows(gcuMemory, 4+1)
	card := n.start("card", of(gcuMemory, 1))
	if got := n.kubelet.held(card.UID, "app0", gcuMemory); !slices.Equal(got, []string{string(n.card(1))}) {
		t.Fatalf("the pod holds %v, want the card %s", got, n.card(1))
	}
	n.refused(n.bind(-1, "none", of(gcuMemory, 1)))

	n.reload(memoryUnits)
	n.shows(gcuMemory, 16+1)
	n.restartKubelet()
	n.awaitOffer()
	n.shows(gcuMemory, 16+1)
	for _, pod := range []*corev1.Pod{before, card} {
		if got := n.api.get(pod.UID); got.Status.Phase != corev1.PodRunning {
			t.Fatalf("pod %s failed: %s", pod.Name, got.Status.Message)
		}
	}
	if got := n.kubelet.ids(before.UID, "app0"); !slices.Equal(got, ids) {
		t.Errorf("the pod holds %v, held %v", got, ids)
	}
	moved := n.bind(1, "moved", app(4))
	n.admit(moved)
	if env := n.kubelet.env(moved.UID, "app0")["ENFLAME_VISIBLE_DEVICES"]; env != "0" {
		t.Errorf("the pod sees %q; card 1 is given out as a whole", env)
	}
	n.kubelet.remove(card)
	n.shows(gcuMemory, 32)
}

// The same id stands for a board or for its first chip, depending on the
// configuration: what a pod got counts as what it was.
func TestSplitBoardsChangesUnderRunningPods(t *testing.T) {
	t.Parallel()
	split := boards
	split.SplitBoards = true
	n := prepareNode(t, "1", vendorsim.GCUs(4, 16<<10))
	n.asBoards()
	n.resources(boards)
	n.kubelet.start()
	n.startAgent()
	n.awaitOffer()
	n.shows(gcuBoard, 2)
	board := n.start("board", of(gcuBoard, 1))
	if env := n.kubelet.env(board.UID, "app0")["ENFLAME_VISIBLE_DEVICES"]; env != "0,1" {
		t.Fatalf("the pod sees %q, want 0,1", env)
	}
	n.reload(split)
	n.shows(gcuBoard, 3) // the id of the board that is held, and two chips
	pods := []*corev1.Pod{n.start("chip0", of(gcuBoard, 1)), n.start("chip1", of(gcuBoard, 1))}
	n.refused(n.bind(-1, "none", of(gcuBoard, 1)))
	for i, pod := range pods {
		if env := n.kubelet.env(pod.UID, "app0")["ENFLAME_VISIBLE_DEVICES"]; env != fmt.Sprint(2+i) {
			t.Errorf("pod %s sees %q, want %d", pod.Name, env, 2+i)
		}
	}
	n.kubelet.remove(board)
	n.shows(gcuBoard, 4)
	n.kubelet.remove(pods[0])
	n.reload(boards)
	n.shows(gcuBoard, 2) // one board, and the chip that is held
	n.kubelet.remove(pods[1])
	n.shows(gcuBoard, 2)
}

// A card is taken out and another put in: same number, other uuid.
func TestSwappedDevice(t *testing.T) {
	t.Parallel()
	n := offer(t, vendorsim.GCUs(2, 16<<10), whole)
	kept := n.start("kept", of(gcuWhole, 1))
	if got := n.kubelet.held(kept.UID, "app0", gcuWhole); !slices.Equal(got, []string{string(n.card(0))}) {
		t.Fatalf("the pod holds %v", got)
	}
	other := vendorsim.GCUs(3, 16<<10)[2]
	other.Minor = nil
	n.setCards(n.topology.Cards[0], other)
	n.published(gcuWhole, map[accel.DeviceID]string{n.card(0): "", n.card(1): ""})
	if c, a := n.kubelet.capacityOf(gcuWhole); c != 2 || a != 2 {
		t.Errorf("kubelet shows %d of %d devices, want 2 of 2", a, c)
	}
	eventually(t, soon, func() error {
		if _, ok := n.kubelet.Devices().GetAllocatableDevices(n.log)[string(gcuWhole)][string(n.card(1))]; !ok {
			return errors.New("kubelet does not know the new card")
		}
		return nil
	})
	next := n.start("next", of(gcuWhole, 1))
	if got := n.kubelet.held(next.UID, "app0", gcuWhole); !slices.Equal(got, []string{string(n.card(1))}) {
		t.Errorf("the pod holds %v, want the new card %s", got, n.card(1))
	}
}

// A card is swapped under a pod: its id stays, and nobody else gets it.
func TestSwappedDeviceThatIsHeld(t *testing.T) {
	t.Parallel()
	n := offer(t, vendorsim.GCUs(1, 16<<10), whole)
	pod := n.start("pod", of(gcuWhole, 1))
	old := n.card(0)
	other := vendorsim.GCUs(2, 16<<10)[1]
	other.Minor = nil
	n.setCards(other)
	n.shows(gcuWhole, 2)
	n.published(gcuWhole, map[accel.DeviceID]string{old: "the vendor's library does not list the device any more", n.card(0): ""})
	n.restartKubelet()
	n.awaitOffer()
	n.shows(gcuWhole, 2)
	if got := n.api.get(pod.UID); got.Status.Phase != corev1.PodRunning {
		t.Fatalf("the pod failed: %s", got.Status.Message)
	}
}

// Kubelet does not list what plain init containers hold. A card that only one of
// them got stays withdrawn from the other resource while the pod lives, also
// after a restart.
func TestInitContainerHoldsItsDevice(t *testing.T) {
	t.Parallel()
	n := offer(t, vendorsim.GCUs(2, 16<<10), memoryUnits, whole)
	pod := n.start("pod", first(gcuWhole, 1), asking(nil))
	device := slotDevice(n.kubelet.held(pod.UID, "init0", gcuWhole)[0])
	n.shows(gcuMemory, 16)
	n.restartAgent()
	n.awaitOffer()
	n.shows(gcuMemory, 16)
	n.published(gcuMemory, map[accel.DeviceID]string{n.card(0): map[bool]string{true: "given out as enflame.com/gcu"}[device == n.card(0)],
		n.card(1): map[bool]string{true: "given out as enflame.com/gcu"}[device == n.card(1)]})
	n.kubelet.remove(pod)
	n.shows(gcuMemory, 32)
	// Reused by the app container: one device in all.
	both := n.start("both", first(gcuWhole, 1), of(gcuWhole, 1))
	if a, b := n.kubelet.held(both.UID, "init0", gcuWhole), n.kubelet.held(both.UID, "app0", gcuWhole); !slices.Equal(b, a) && len(a) > 0 {
		t.Errorf("the init container has %v, the app container %v", a, b)
	}
	n.kubelet.remove(both)
	n.shows(gcuMemory, 32)
	n.shows(gcuWhole, 2)
}

// The topology manager aligns devices with CPUs by their NUMA nodes.
func TestTopologyHints(t *testing.T) {
	t.Parallel()
	cards := vendorsim.GCUs(4, 16<<10)
	for i := range cards {
		cards[i].NUMA = i % 2
	}
	n := prepareNode(t, "1", cards)
	n.kubelet.Policy = topologymanager.PolicySingleNumaNode
	n.resources(whole, memoryUnits)
	n.kubelet.start()
	n.startAgent()
	n.awaitOffer()
	for i := range 2 {
		pod := n.start(fmt.Sprint("pair", i), of(gcuWhole, 2))
		nodes := map[int]bool{}
		for _, id := range n.kubelet.held(pod.UID, "app0", gcuWhole) {
			nodes[n.sharesOf(gcuWhole)[slotDevice(id)].NUMANode] = true
		}
		if len(nodes) != 1 {
			t.Errorf("pod %s has devices of NUMA nodes %v, want one", pod.Name, nodes)
		}
	}
}

// A time slice is of no use to a container beside another one of the same device.
func TestFailRequestsGreaterThanOne(t *testing.T) {
	t.Parallel()
	one := sliced(4)
	one.FailRequestsGreaterThanOne = true
	n := offer(t, vendorsim.GCUs(2, 16<<10), one)
	n.refused(n.bind(-1, "two", of(gcuShared, 2)), "invalid request: maximum request size for shared resources is 1; found 2")
	n.start("one", of(gcuShared, 1))
}

// Events tell of a device once, however many resources are made of it, and the
// pods that hold it.
func TestHealthEventsComeOncePerDevice(t *testing.T) {
	t.Parallel()
	n := offer(t, vendorsim.GCUs(2, 16<<10), memoryUnits, whole, sliced(3))
	pod := n.start("pod", of(gcuWhole, 1))
	n.topology.Cards[0].Unhealthy = true
	n.writeTopology()
	count := func(kind, reason string) int {
		list, err := n.api.CoreV1().Events("").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		out := 0
		for _, e := range list.Items {
			if e.InvolvedObject.Kind == kind && e.Reason == reason {
				out += int(max(e.Count, 1))
			}
		}
		return out
	}
	eventually(t, soon, func() error {
		if a, b := count("Node", "DeviceUnhealthy"), count("Pod", "DeviceUnhealthy"); a != 1 || b != 1 {
			return fmt.Errorf("%d events on the node, %d on the pod", a, b)
		}
		return nil
	})
	n.kubelet.remove(pod)
	n.topology.Cards[0].Unhealthy = false
	n.writeTopology()
	eventually(t, soon, func() error {
		if a := count("Node", "DeviceRecovered"); a != 1 {
			return fmt.Errorf("%d events of the recovery", a)
		}
		return nil
	})
	if a := count("Node", "DeviceUnhealthy"); a != 1 {
		t.Errorf("%d events of one failure", a)
	}
}

// By itself kubelet tells the API server every 10 seconds what is allocatable,
// and pods that the scheduler sends meanwhile fail.
func TestAllocatableIsPublishedAtOnce(t *testing.T) {
	t.Parallel()
	n := offer(t, vendorsim.GCUs(3, 16<<10), whole)
	n.shows(gcuWhole, 3)
	node, err := n.api.CoreV1().Nodes().Get(t.Context(), thisNode, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	three := corev1.ResourceList{corev1.ResourceName(gcuWhole): resource.MustParse("3")}
	node.Status.Capacity, node.Status.Allocatable = three, three.DeepCopy() // as kubelet reports
	if _, err := n.api.CoreV1().Nodes().UpdateStatus(t.Context(), node, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, lost := range []bool{true, false} {
		n.topology.Cards[2].Lost = lost
		n.writeTopology()
		eventually(t, soon, func() error {
			node, err := n.api.CoreV1().Nodes().Get(t.Context(), thisNode, metav1.GetOptions{})
			if err != nil {
				return err
			}
			got := node.Status.Allocatable[corev1.ResourceName(gcuWhole)]
			if want := map[bool]int64{true: 2, false: 3}[lost]; got.Value() != want {
				return fmt.Errorf("the node shows %v allocatable, want %d", got.String(), want)
			}
			return nil
		})
	}
}

// A pod that fails after its first container got its device leaves it to the one
// that kubelet looks at next.
func TestDeviceOfARefusedPodGoesToTheNext(t *testing.T) {
	t.Parallel()
	n := offer(t, vendorsim.GCUs(1, 16<<10), whole, memoryUnits)
	for i := range 3 {
		n.refused(n.bind(-1, fmt.Sprint("two", i), of(gcuWhole, 1), asking(map[accel.Resource]int64{gcuWhole: 1})),
			"requested number of devices unavailable")
		n.kubelet.remove(n.start(fmt.Sprint("next", i), of(gcuWhole, 1)))
		n.shows(gcuWhole, 1)
		n.shows(gcuMemory, 16)
	}
}
