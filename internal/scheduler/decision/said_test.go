package decision

import (
	"slices"
	"testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/cause"
	"github.com/divvy-gpu/divvy/internal/platform/events"
)

// TestConditionStandsForItsEvent, and for no other one.
func TestConditionStandsForItsEvent(t *testing.T) {
	for reason, want := range map[cause.Code][]string{
		"":                       {"NeverFits"},
		cause.LargerThanDevice:   nil,
		cause.NoDeviceFits:       {"NeverFits"},
		cause.HeldAsOther:        {"NeverFits"},
		cause.IsolationNotStated: {"NeverFits"},
	} {
		var told []string
		w := newWorld(t, func(c *Config) {
			c.Tell = func(_ accel.PodRef, kind events.Kind, _ string) { told = append(told, kind.Reason) }
		})
		pod := w.add(newPod("p", 17))
		known := w.cluster.Known["team/p"]
		known.Said.Reason = reason.Reason()
		w.cluster.Known["team/p"] = known
		if w.filter(pod); !slices.Equal(told, want) {
			t.Errorf("condition %q: told %q, want %q", reason, told, want)
		}
	}
}
