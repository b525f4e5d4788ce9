package nodeagent

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/events"
)

// written says what of a part could not be written to the node's disk. Only what
// new containers would need of it is withheld from them: all else of the part is
// offered, with the health that it has.
type written struct {
	// unsaved is why the state file does not hold the state, nil when it does.
	unsaved error
	// unspecified are the devices that CDI does not describe, with the reason.
	unspecified map[accel.DeviceID]error
}

// describe describes the devices in CDI if specify is not nil.
func (w *written) describe(specify func([]accel.Device) map[accel.DeviceID]error, devices []accel.Device) {
	if specify != nil {
		w.unspecified = specify(devices)
	}
}

// withheld returns why no new container gets something of chips that are well, ""
// when it may. saved says whether the state file, as it was written last, tells
// which ids are theirs: after a restart others could have them.
func (w *written) withheld(saved bool, chips ...accel.DeviceID) string {
	if w.unsaved != nil && !saved {
		return w.unsaved.Error()
	}
	for _, c := range chips {
		if err := w.unspecified[c]; err != nil {
			return err.Error()
		}
	}
	return ""
}

// problem adds to another problem of the part, or nil, what could not be written.
func (w *written) problem(other error) error {
	all := []error{other}
	if w.unsaved != nil {
		all = append(all, fmt.Errorf("devices that were added since the state was saved take no pods: %w", w.unsaved))
	}
	for _, err := range w.unspecified {
		all = append(all, err)
	}
	all = slices.DeleteFunc(all, func(err error) bool { return err == nil })
	// Devices of one file have one reason. The order is that of the text, since a
	// problem with another text is reported again.
	slices.SortFunc(all, func(a, b error) int { return cmp.Compare(a.Error(), b.Error()) })
	all = slices.CompactFunc(all, func(a, b error) bool { return a.Error() == b.Error() })
	switch len(all) {
	case 0:
		return nil
	case 1:
		return all[0]
	}
	return problems(all)
}

// problems are several errors, in one line.
type problems []error

func (p problems) Error() string {
	texts := make([]string, len(p))
	for i, err := range p {
		texts[i] = err.Error()
	}
	return strings.Join(texts, "; ")
}

// Unwrap makes errors.Is and errors.As look at all of them.
func (p problems) Unwrap() []error { return p }

// reportProblem logs why a resource is not offered as configured, with an event of
// the node, when the reason is another one than before; absent is true where the
// node has no device for it.
func reportProblem(ctx context.Context, resource accel.Resource, before, now error, absent bool, event func(events.Kind, string)) {
	log := klog.FromContext(ctx).WithValues("resource", resource)
	switch {
	case now == nil && before != nil:
		log.Info("Offering the resource as configured")
	case now == nil, before != nil && before.Error() == now.Error():
	default:
		log.Error(now, "Cannot offer the resource as configured")
		kind := events.ResourceNotOffered
		if absent {
			kind = events.ResourceAbsent
		}
		event(kind, fmt.Sprintf("%s: %v", resource, now))
	}
}
