package demos

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// A driver that stalls: how often, and for how long, which is longer than a call may take.
const (
	stallEvery = 20 * time.Second
	stallFor   = 8 * time.Second
)

// stalls shows drivers, and then one card, that stall every 20 seconds while pods are
// started.
func (f *faults) stalls(ctx context.Context) error {
	drivers, gpu := 3, 5
	if f.short {
		drivers, gpu = 1, 2
	}
	f.Title("The drivers of all vendors stall every 20 seconds")
	f.Say(fmt.Sprintf(`No call of any library returns for 8 seconds, as often as this: %d. Every device keeps
its last state, so kubelet is told nothing, and all pods start.`, drivers))
	told, err := f.stall(ctx, drivers, func(h *vendorsim.Topology) { h.Library.Delay = time.Hour })
	if err != nil {
		return err
	}
	f.Checks.Equal("what kubelet was told", strings.Join(told[vendorsim.NVIDIA], ", "), "80")
	f.Checks.Equal("what kubelet was told", strings.Join(told[vendorsim.Iluvatar], ", "), "128")
	f.Checks.Equal("what kubelet was told", strings.Join(told[vendorsim.Enflame], ", "), "32")

	f.Title("NVIDIA: one GPU stalls every 20 seconds")
	f.Say(fmt.Sprintf(`No call about it returns for 8 seconds, as often as this: %d. It is withdrawn the first
time. It may return once before the next time, and then must be well for 30 seconds,
which it is only after the last one. All pods start.`, gpu))
	told, err = f.stall(ctx, gpu, func(h *vendorsim.Topology) { h.Cards[0].Calls.Delay = time.Hour })
	if err != nil {
		return err
	}
	over := time.Now()
	offers := told[vendorsim.NVIDIA]
	full := 0 // how often all was offered
	for _, o := range offers {
		if strings.HasPrefix(o, "80") {
			full++
		}
	}
	f.Checks.True("the GPU is withdrawn, and returns once at most meanwhile", len(offers) > 1 && full <= 2, strings.Join(offers, ", "))
	f.Checks.Equal("what kubelet was told of other vendors", told[vendorsim.Iluvatar][1:], []string{})
	f.Checks.Equal("what kubelet was told of other vendors", told[vendorsim.Enflame][1:], []string{})
	if _, err := f.Offer(ctx, GPUMemory, 80); err != nil {
		return err
	}
	f.note("%s: all is offered again after one GPU stalled for the last time", vendorsim.NVIDIA, time.Since(over))
	return nil
}

// stall lets the hardware stall so often while pods of all vendors are started, which
// all must run, and returns what the node offered of each vendor meanwhile.
func (f *faults) stall(ctx context.Context, times int, inflict func(*vendorsim.Topology)) (map[string][]string, error) {
	stalled := f.hardware.Clone()
	inflict(&stalled)
	resources := map[string]corev1.ResourceName{vendorsim.NVIDIA: GPUMemory, vendorsim.Iluvatar: IXMemory, vendorsim.Enflame: GCUMemory}
	watching, stop := context.WithCancel(ctx)
	told, begun, failed := map[string][]string{}, time.Now(), error(nil)
	var watch sync.WaitGroup
	watch.Go(func() { failed = f.watchOffer(watching, begun, resources, told) })
	started, err := 0, error(nil)
	for i := 0; i < times && err == nil; i++ {
		from := time.Now()
		if err = f.SetHardware(ctx, stalled); err != nil {
			break
		}
		var pods []*corev1.Pod
		var names []string
		for vendor, what := range resources {
			name := fmt.Sprintf("%s-stall-%d", vendor, i+1)
			pods, names = append(pods, f.One(name, what, held)), append(names, name)
		}
		if err = f.Start(ctx, pods...); err != nil {
			break
		}
		started += len(pods)
		sleepUntil(ctx, from.Add(stallFor))
		err = errors.Join(f.SetHardware(ctx, f.hardware), f.Pods.Delete(ctx, names...))
		sleepUntil(ctx, from.Add(stallEvery))
	}
	stop()
	watch.Wait()
	if err := errors.Join(err, failed, ctx.Err()); err != nil {
		return nil, err
	}
	for vendor, offers := range told {
		f.Tell("%s: %s", vendor, strings.Join(offers, ", "))
	}
	f.Checks.Equal("pods that run which were created while a driver stalled", started, times*len(resources))
	return told, nil
}

// watchOffer notes how much is allocatable of each resource, and after how long that
// changed, until the context ends.
func (f *faults) watchOffer(ctx context.Context, begun time.Time, resources map[string]corev1.ResourceName,
	told map[string][]string) error {
	last := map[string]int64{}
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		for vendor, what := range resources {
			_, now, err := f.Node.Offered(ctx, what)
			switch was, seen := last[vendor]; {
			case ctx.Err() != nil:
				return nil
			case err != nil:
				return err
			case !seen:
				told[vendor] = []string{fmt.Sprint(now)}
			case was != now:
				told[vendor] = append(told[vendor], fmt.Sprintf("%d after %.1f s", now, time.Since(begun).Seconds()))
			}
			last[vendor] = now
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

func sleepUntil(ctx context.Context, until time.Time) {
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// quarantine shows an error that a GPU does not recover from, a restart of the daemon,
// and the release by an administrator.
func (f *faults) quarantine(ctx context.Context) error {
	one := fault{vendor: vendorsim.NVIDIA, what: GPUMemory, variable: "NVIDIA_VISIBLE_DEVICES", all: 80, card: 40}
	f.Title("NVIDIA: an error that a GPU does not recover from (XID 79)")
	f.Say(`The GPU is in quarantine, across a restart of the daemon, until an administrator
releases it. Pods go to the other one.`)
	node := layout.NodeName
	const before = "quarantine-before"
	number, alive, err := f.hold(ctx, before, one)
	if err != nil {
		return err
	}
	hardware := f.hardware.Clone()
	card := &hardware.Cards[number]
	card.XID = vendorsim.XID{Code: 79}
	broken := time.Now()
	if err := f.SetHardware(ctx, hardware); err != nil {
		return err
	}
	if _, err := f.Offer(ctx, one.what, one.all-one.card+held); err != nil {
		return err
	}
	f.note("%s: the free memory of a GPU with XID 79 is offered no more", one.vendor, time.Since(broken))
	event, err := f.nodeEvent(ctx, "DeviceQuarantined", card.UUID)
	if err != nil {
		return err
	}
	command := "kubectl divvy device release " + node + " " + card.UUID
	f.Checks.Contains("the event DeviceQuarantined of the node", event, command)

	// The error is gone with the restart: nothing but the list of the daemon has it.
	if err := f.SetHardware(ctx, f.hardware); err != nil {
		return err
	}
	if err := errors.Join(f.Divvy.Kill(ctx, testenv.NodeDaemon), f.Divvy.Wait(ctx, podTimeout)); err != nil {
		return err
	}
	restarted := time.Now()
	pods, err := f.startElsewhere(ctx, one, number, "quarantine-during-1", "quarantine-during-2", "quarantine-during-3")
	if err != nil {
		return err
	}
	f.note("%s: 3 new pods run on the other GPU after the daemon was restarted", one.vendor, time.Since(restarted))
	// Longer than a GPU must be well after an error that it recovers from.
	sleepUntil(ctx, restarted.Add(20*time.Second))
	if _, err := f.Offer(ctx, one.what, one.all-one.card+held); err != nil {
		return err
	}
	for _, show := range [][]string{{"device", "list", node}, {"inspect", node, "--resource", string(one.what)}} {
		text, err := f.Run(ctx, append([]string{"divvy"}, show...)...)
		if err != nil {
			return err
		}
		f.Checks.Contains("kubectl divvy "+show[0], strings.ToLower(text), "quarantine")
	}
	released := time.Now()
	if _, err := f.Run(ctx, "divvy", "device", "release", node, card.UUID); err != nil {
		return err
	}
	if _, err := f.Offer(ctx, one.what, one.all); err != nil {
		return err
	}
	f.note("%s: all is offered again after the release", one.vendor, time.Since(released))
	if err := f.Pods.Delete(ctx, pods...); err != nil {
		return err
	}
	const after = "quarantine-after"
	if err := f.Start(ctx, f.One(after, one.what, one.card-held)); err != nil {
		return err
	}
	back, err := f.cardOf(ctx, after, one)
	if err != nil {
		return err
	}
	f.Checks.Equal("a new pod is on the GPU again: card", f.index(back), f.index(number))
	now, err := f.lives(ctx, before)
	if err != nil {
		return err
	}
	f.Checks.Equal("the pod that was there", now, alive)
	return f.Pods.DeleteAll(ctx)
}

// nodeEvent waits for an event of the node that has a text, and returns its message.
func (f *faults) nodeEvent(ctx context.Context, reason, text string) (message string, err error) {
	selector := fields.Set{"involvedObject.kind": "Node", "reason": reason}.String()
	err = poll.Until(ctx, offerTimeout, "an event "+reason+" of the node", func(ctx context.Context) error {
		list, err := f.Client.CoreV1().Events(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{FieldSelector: selector})
		if err != nil {
			return err
		}
		for _, e := range list.Items {
			if strings.Contains(e.Message, text) {
				message = e.Message
				return nil
			}
		}
		return fmt.Errorf("there are %d, none of which says %s", len(list.Items), text)
	})
	return message, err
}
