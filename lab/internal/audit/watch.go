package audit

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// Watch looks at the use of the cards all the time, through the extender and
// through kubelet. Its methods are safe for concurrent use.
type Watch struct {
	auditor *Auditor

	mu      sync.Mutex // guards what follows
	summary Summary
	broken  violations
}

// Summary is what a Watch has seen so far.
type Summary struct {
	// Extender and Kubelet are how often each of them answered.
	Extender, Kubelet int
	// Largest is the use of the card that was used most, and of its size.
	Largest, Size int64
	// Fill is the largest share of all cards together in use, from 0 to 1, as
	// kubelet tells.
	Fill float64
	// Violations are moments at which more was given out than there is.
	Violations []string
}

// NewWatch returns a watch over the auditor's node.
func NewWatch(a *Auditor) *Watch { return &Watch{auditor: a, broken: violations{}} }

// sampleInterval is the pause between two looks at one source.
const sampleInterval = 150 * time.Millisecond

// Run looks until ctx ends. Answers that do not come, because a part is being
// restarted, are no violation.
func (w *Watch) Run(ctx context.Context) {
	var work sync.WaitGroup
	for _, look := range []func(context.Context) error{w.lookAtExtender, w.lookAtKubelet} {
		work.Go(func() {
			wait.NonSlidingUntilWithContext(ctx, func(ctx context.Context) {
				asking, cancel := context.WithTimeout(ctx, time.Second)
				defer cancel()
				_ = look(asking)
			}, sampleInterval)
		})
	}
	work.Wait()
}

// Summary returns what was seen so far.
func (w *Watch) Summary() Summary {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.summary
	s.Violations = w.broken.list()
	return s
}

func (w *Watch) lookAtExtender(ctx context.Context) error {
	node, err := w.auditor.Inspect(ctx)
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.summary.Extender++
	for _, device := range node.Devices {
		w.use(device.Used, device.Total)
		if device.Used > device.Total {
			var pods []string
			for _, occupant := range device.Pods {
				pods = append(pods, fmt.Sprintf("%s %d", occupant.Name, occupant.Used))
			}
			w.broken.note(fmt.Sprint("extender ", device.ID), fmt.Sprintf("the extender shows %d units of card %d in use, which has %d: %s",
				device.Used, device.ID, device.Total, strings.Join(pods, ", ")))
		}
	}
	return nil
}

func (w *Watch) lookAtKubelet(ctx context.Context) error {
	given, err := askKubelet(ctx)
	if err != nil {
		return err
	}
	units, err := readUnits(unitsFile)
	if err != nil {
		return err
	}
	var cards []Card
	held := map[string]int64{}
	var total, sum int64
	for i, r := range units {
		cards = append(cards, Card{Index: i, UUID: r.Device, Units: r.Units})
		total += r.Units
	}
	for _, g := range given {
		sum += int64(len(g.Units))
		for _, id := range g.Units {
			held[units.Card(id)]++
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.summary.Kubelet++
	for _, card := range cards {
		w.use(held[card.UUID], card.Units)
	}
	if total > 0 {
		w.summary.Fill = max(w.summary.Fill, float64(sum)/float64(total))
	}
	for _, text := range Overuse(given, units, cards) {
		w.broken.note(text, text)
	}
	return nil
}

// use notes the use of a card; the caller holds mu.
func (w *Watch) use(used, size int64) {
	if used > w.summary.Largest {
		w.summary.Largest, w.summary.Size = used, size
	}
}
