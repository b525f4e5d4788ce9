package demos

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
)

// faults plays the demo of failing devices.
type faults struct {
	*Demo
	short bool

	hardware vendorsim.Topology
	times    []string
}

// fault is one way in which a card breaks.
type fault struct {
	title, text string
	vendor      string
	// what is shared of the cards, and the variable that names a container's.
	what     corev1.ResourceName
	variable string
	// all is what the node offers, card what one card has.
	all, card int64
	// inflict breaks the card, mend puts it right; mend may do nothing where the
	// card recovers by itself.
	inflict, mend func(*vendorsim.Topology, *vendorsim.Card)
	// cause is what the node says of the card.
	cause string
	// long is true for what the short form leaves out.
	long bool
}

// allFaults are the faults that the demo shows. Those of a vendor are apart, so that a
// card has been well for a while before it breaks again: else it would have to be well
// for longer.
var allFaults = []fault{
	{
		title: "NVIDIA: an error that a GPU recovers from (XID 94)",
		text: `The driver tells of it once. The GPU takes new pods again when it can be asked and
has told of no other error for 15 seconds, which is a setting.`,
		vendor: vendorsim.NVIDIA, what: GPUMemory, variable: "NVIDIA_VISIBLE_DEVICES", all: 80, card: 40,
		inflict: func(_ *vendorsim.Topology, c *vendorsim.Card) { c.XID = vendorsim.XID{Code: 94} },
		mend:    func(*vendorsim.Topology, *vendorsim.Card) {},
		cause:   "94",
	},
	{
		title: "Iluvatar: a health bit on a chip (over temperature)",
		text: `The library tells it as long as it is so. The chip takes new pods again 3 seconds
after, which is a setting; the other chip of its board is not concerned.`,
		vendor: vendorsim.Iluvatar, what: IXMemory, variable: "IX_VISIBLE_DEVICES", all: 128, card: 32,
		inflict: func(_ *vendorsim.Topology, c *vendorsim.Card) { c.HealthBits = 1 << 2 },
		mend:    func(_ *vendorsim.Topology, c *vendorsim.Card) { c.HealthBits = 0 },
		cause:   "temperature",
	},
	{
		title:  "Enflame: a GCU is lost",
		text:   `It is counted, but does not answer. The other one is not concerned.`,
		vendor: vendorsim.Enflame, what: GCUMemory, variable: "ENFLAME_VISIBLE_DEVICES", all: 32, card: 16,
		inflict: func(_ *vendorsim.Topology, c *vendorsim.Card) { c.Lost = true },
		mend:    func(_ *vendorsim.Topology, c *vendorsim.Card) { c.Lost = false },
		cause:   "",
	},
	{
		title: "NVIDIA: every call about one GPU hangs",
		text: `A call has 5 seconds. The library answers about the other GPU, which is not
concerned.`,
		vendor: vendorsim.NVIDIA, what: GPUMemory, variable: "NVIDIA_VISIBLE_DEVICES", all: 80, card: 40,
		inflict: hang, mend: answer, cause: "did not answer",
	},
	{
		title: "Iluvatar: every call about one chip hangs",
		long:  true,
		text: `The same with another library. The other chip of its board is not concerned, nor
is the other board.`,
		vendor: vendorsim.Iluvatar, what: IXMemory, variable: "IX_VISIBLE_DEVICES", all: 128, card: 32,
		inflict: hang, mend: answer, cause: "did not answer",
	},
	{
		title:  "Enflame: every call about one GCU hangs",
		long:   true,
		text:   `The same with the third library.`,
		vendor: vendorsim.Enflame, what: GCUMemory, variable: "ENFLAME_VISIBLE_DEVICES", all: 32, card: 16,
		inflict: hang, mend: answer, cause: "did not answer",
	},
	{
		title: "NVIDIA: a call about one GPU hangs and holds the lock of the library",
		text: `No GPU can be asked meanwhile. The other one keeps its last state for up to a
minute, and takes pods.`,
		vendor: vendorsim.NVIDIA, what: GPUMemory, variable: "NVIDIA_VISIBLE_DEVICES", all: 80, card: 40,
		inflict: func(h *vendorsim.Topology, c *vendorsim.Card) { hang(h, c); h.Library.OneLock = true },
		mend:    func(h *vendorsim.Topology, c *vendorsim.Card) { answer(h, c); h.Library.OneLock = false },
		cause:   "did not answer",
	},
}

func hang(_ *vendorsim.Topology, c *vendorsim.Card)   { c.Calls.Delay = time.Hour }
func answer(_ *vendorsim.Topology, c *vendorsim.Card) { c.Calls.Delay = 0 }

// Faults breaks cards of each vendor under pods and puts them right again, then the
// daemon's folders. In the short form calls hang for one vendor alone, and drivers stall
// once or twice.
func (s *Demo) Faults(ctx context.Context, short bool) (err error) {
	f := &faults{Demo: s, short: short}
	if f.hardware, err = f.Cards(Mixed); err != nil {
		return err
	}
	for _, part := range []func(context.Context) error{f.breakCards, f.quarantine} {
		if err := part(ctx); err != nil {
			return err
		}
	}
	f.Title("Times")
	for _, line := range f.times {
		f.Tell("%s", line)
	}
	return f.folders(ctx)
}

// breakCards shows all that the daemon goes on through.
func (f *faults) breakCards(ctx context.Context) error {
	daemon, err := f.Divvy.DaemonLife(ctx)
	if err != nil {
		return err
	}
	for _, one := range allFaults {
		if f.short && one.long {
			continue
		}
		if err := f.inflict(ctx, one); err != nil {
			return err
		}
		if err := f.Pods.DeleteAll(ctx); err != nil {
			return err
		}
	}
	if err := f.stalls(ctx); err != nil {
		return err
	}
	life, err := f.Divvy.DaemonLife(ctx)
	if err != nil {
		return err
	}
	f.Checks.Equal("the daemon through all this", life, daemon)
	return nil
}

const held = 4 // units that each pod asks for

// inflict breaks the card under a pod and puts it right again.
func (f *faults) inflict(ctx context.Context, one fault) error {
	f.Title(one.title)
	f.Say(one.text)
	if _, err := f.Offer(ctx, one.what, one.all); err != nil {
		return err
	}
	before := one.vendor + "-before"
	number, alive, err := f.hold(ctx, before, one)
	if err != nil {
		return err
	}

	hardware := f.hardware.Clone()
	one.inflict(&hardware, &hardware.Cards[number])
	broken := time.Now()
	if err := f.SetHardware(ctx, hardware); err != nil {
		return err
	}
	reason, err := f.waitReason(ctx, one.what, hardware.Cards[number], true, one.cause)
	if err != nil {
		return err
	}
	f.note("%s: the node reports it", one.vendor, time.Since(broken))
	f.Checks.True("what the node says of the card", strings.Contains(reason, one.cause), reason)
	// What the pod holds stays, what nobody holds is taken away.
	if _, err := f.Offer(ctx, one.what, one.all-one.card+held); err != nil {
		return err
	}
	f.note("%s: its free memory is offered no more", one.vendor, time.Since(broken))

	during, err := f.startElsewhere(ctx, one, number, one.vendor+"-during-1", one.vendor+"-during-2", one.vendor+"-during-3")
	if err != nil {
		return err
	}
	f.note("%s: 3 new pods run on other cards", one.vendor, time.Since(broken))
	now, err := f.lives(ctx, before)
	if err != nil {
		return err
	}
	f.Checks.Equal("the pod that was there", now, alive)

	one.mend(&hardware, &hardware.Cards[number])
	mended := time.Now()
	if err := f.SetHardware(ctx, hardware); err != nil {
		return err
	}
	if _, err := f.waitReason(ctx, one.what, hardware.Cards[number], false, ""); err != nil {
		return err
	}
	if _, err := f.Offer(ctx, one.what, one.all); err != nil {
		return err
	}
	if hardware.Cards[number].XID.Code != 0 {
		mended = broken
	}
	f.note("%s: all is offered again after the fault was over", one.vendor, time.Since(mended))
	// The card that is used most and has room is taken: the one that was broken.
	if err := f.Pods.Delete(ctx, during...); err != nil {
		return err
	}
	after := one.vendor + "-after"
	if err := f.Start(ctx, f.One(after, one.what, one.card-held)); err != nil {
		return err
	}
	back, err := f.cardOf(ctx, after, one)
	if err != nil {
		return err
	}
	f.Checks.Equal("a new pod is on the card again: card", f.index(back), f.index(number))
	now, err = f.lives(ctx, before)
	if err != nil {
		return err
	}
	f.Checks.Equal("the pod that was there", now, alive)
	return f.SetHardware(ctx, f.hardware)
}

// startElsewhere starts pods, and checks that none of them is on the card.
func (f *faults) startElsewhere(ctx context.Context, one fault, number int, names ...string) ([]string, error) {
	var pods []*corev1.Pod
	for _, name := range names {
		pods = append(pods, f.One(name, one.what, held))
	}
	if err := f.Start(ctx, pods...); err != nil {
		return nil, err
	}
	for _, name := range names {
		other, err := f.cardOf(ctx, name, one)
		if err != nil {
			return nil, err
		}
		f.Checks.True(name+" is on another card", other != number, fmt.Sprintf("card %d of %s, not %d", f.index(other), one.vendor,
			f.index(number)))
	}
	return names, nil
}

// note remembers a time for the end and prints it.
func (f *faults) note(format, vendor string, took time.Duration) {
	line := fmt.Sprintf(format+": %.1f s", vendor, took.Seconds())
	f.times = append(f.times, line)
	f.Tell("%s", line)
}

// hold starts a pod that holds some of a card's memory. It returns the place of the card
// in the topology, and which life of the pod's containers this is.
func (f *faults) hold(ctx context.Context, pod string, one fault) (card int, life string, err error) {
	if err := f.Start(ctx, f.One(pod, one.what, held)); err != nil {
		return 0, "", err
	}
	if card, err = f.cardOf(ctx, pod, one); err != nil {
		return 0, "", err
	}
	life, err = f.lives(ctx, pod)
	return card, life, err
}

// cardOf returns the place in the topology of the card that a pod has.
func (f *faults) cardOf(ctx context.Context, pod string, one fault) (int, error) {
	sight, err := f.Pods.See(ctx, pod)
	if err != nil {
		return 0, err
	}
	number := 0
	for i, c := range f.hardware.Cards {
		if c.Vendor != one.vendor {
			continue
		}
		if value := sight.Env[one.variable]; value == c.UUID || value == fmt.Sprint(number) {
			return i, nil
		}
		number++
	}
	return 0, fmt.Errorf("pod %s has %v, which is no card of %s", pod, sight.Env, one.vendor)
}

// index returns the number that the vendor gives the card at a place in the
// topology.
func (f *faults) index(place int) int {
	n := 0
	for _, c := range f.hardware.Cards[:place] {
		if c.Vendor == f.hardware.Cards[place].Vendor {
			n++
		}
	}
	return n
}

// waitReason waits until the node says that the card is ill, for a reason that contains
// why, or that it is well, and returns the reason.
func (f *faults) waitReason(ctx context.Context, what corev1.ResourceName, card vendorsim.Card, ill bool, why string) (reason string,
	err error) {
	err = poll.Until(ctx, offerTimeout, "the node to tell of the card", func(ctx context.Context) error {
		cards, err := f.Node.Published(ctx, what)
		if err != nil {
			return err
		}
		for _, c := range cards {
			if strings.HasSuffix(string(c.ID), card.UUID) {
				if reason = c.Health.Reason; c.Health.Unhealthy == ill && strings.Contains(reason, why) {
					return nil
				}
				return fmt.Errorf("it says %+v", c)
			}
		}
		return errors.New("it does not show the card")
	})
	return reason, err
}

// lives tells one life of a pod's containers from another.
func (f *faults) lives(ctx context.Context, name string) (string, error) {
	pod, err := f.Client.CoreV1().Pods(f.Pods.Namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	lives := map[string]string{}
	for _, c := range pod.Status.ContainerStatuses {
		lives[c.Name] = fmt.Sprintf("%s, started again %d times", c.ContainerID[max(0, len(c.ContainerID)-12):], c.RestartCount)
	}
	var parts []string
	for _, container := range slices.Sorted(maps.Keys(lives)) {
		parts = append(parts, container+" "+lives[container])
	}
	return fmt.Sprintf("%s, %s", pod.Status.Phase, strings.Join(parts, "; ")), nil
}
