package agent

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/platform/events"
)

func TestRefusalsHaveAReason(t *testing.T) {
	slots := newSlotWorld(t, t.TempDir(), exclusive)
	slots.found(gpuDevice(0, "a"))
	memory := newWorld(t, "1")
	memory.update(t.Context(), found(card(0, "a", 16)), nil)
	single := fourTimes
	single.FailRequestsGreaterThanOne = true
	shared := newSlotWorld(t, t.TempDir(), single)
	shared.found(gpuDevice(0, "a"))
	kubeletless := newWorld(t, "1")
	kubeletless.update(t.Context(), found(card(0, "a", 16)), nil)
	kubeletless.down = errors.New("no answer")
	refused := func(ids []string, err error) error {
		if err == nil {
			t.Errorf("got %v", ids)
		}
		return err
	}
	_, unknown := slots.Allocate(t.Context(), []string{"z"})
	_, unknownUnit := memory.Allocate(t.Context(), []string{"z"})
	draining := newWorld(t, "1", func(c *alloc.Config) { c.Draining = "it was taken away" })
	for name, tt := range map[string]struct {
		err  error
		want alloc.Reason
	}{
		"too few devices":      {refused(slots.Prefer(t.Context(), []string{"a"}, nil, 2)), alloc.NoRoom},
		"held":                 {fmt.Errorf("x: %w", alloc.Reject(alloc.Held, "held by another container")), alloc.Held},
		"no such device":       {unknown, alloc.UnknownID},
		"no such unit":         {unknownUnit, alloc.UnknownID},
		"more than one slice":  {refused(shared.Prefer(t.Context(), nil, nil, 2)), alloc.TooMany},
		"not offered":          {refused(draining.Prefer(t.Context(), nil, nil, 2)), alloc.NotOffered},
		"kubelet says nothing": {refused(kubeletless.Prefer(t.Context(), nil, nil, 2)), alloc.Kubelet},
		"no units left":        {fmt.Errorf("x: %w", sharing.ErrNoRoom), alloc.NoRoom},
		"anything else":        {errors.New("the library failed"), alloc.Other},
	} {
		if got := alloc.ReasonOf(tt.err); got != tt.want {
			t.Errorf("%s: %v is refused for %q, want %q", name, tt.err, got, tt.want)
		}
		if !slices.Contains(alloc.Reasons(), tt.want) {
			t.Errorf("%s is not listed", tt.want)
		}
	}
}

// TestRefusalsAreToldOnce, however often a container is refused, and counted each.
func TestRefusalsAreToldOnce(t *testing.T) {
	s := newStage(t)
	s.vendors["nvidia"].set(nil, gpuDevice(0, "a"))
	s.vendors["iluvatar"].set(nil, gpuDevice(0, "x"))
	a, _ := s.play()
	eventually(t, "it runs", func() bool {
		_, ok := a.publisher.before("nvidia.com/gpu")
		return ok
	})
	asked := timed{&offering{name: "nvidia.com/gpu"}, a}
	for i := range 1000 {
		asked.observe(t.Context(), "allocate", time.Now(), alloc.Reject(alloc.UnknownID, "there is no device %d", i))
	}
	asked.observe(t.Context(), "allocate", time.Now(), nil)
	told := func() []corev1.Event {
		list, err := s.client.CoreV1().Events("").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return slices.DeleteFunc(list.Items, func(e corev1.Event) bool { return e.Reason != events.AllocationRefused.Reason })
	}
	eventually(t, "it is told", func() bool { return len(told()) > 0 })
	time.Sleep(200 * time.Millisecond)
	if got := told(); len(got) != 1 || got[0].Count > 1 || got[0].InvolvedObject.Name != thisNode {
		t.Errorf("%d events: %+v", len(got), got)
	}
	if n := testutil.ToFloat64(a.metrics.refused.WithLabelValues("nvidia.com/gpu", string(alloc.UnknownID))); n != 1000 {
		t.Errorf("%v are counted", n)
	}
}

// TestIllDevicesAreShownWithTheirCause, and only as long as it is so.
func TestIllDevicesAreShownWithTheirCause(t *testing.T) {
	m := newMetrics(prometheus.NewRegistry())
	devices := map[accel.DeviceID]accel.Device{"a": {Index: 0}, "b": {Index: 1}}
	ill := func(cause string) accel.Health { return accel.Health{Unhealthy: true, Cause: cause} }
	type state = map[accel.DeviceID]accel.Health
	steps := []struct {
		is   state
		want []string
	}{
		{state{}, nil},
		{state{"a": ill("xid-79")}, []string{"a 0 xid-79"}},
		{state{"a": ill("xid-79"), "b": ill("")}, []string{"a 0 xid-79", "b 1 unknown"}},
		{state{"a": ill("lost"), "b": ill("")}, []string{"a 0 lost", "b 1 unknown"}},
		{state{"b": ill("")}, []string{"b 1 unknown"}},
		{state{}, nil},
	}
	was := state{}
	for i, step := range steps {
		m.ill("nvidia", was, step.is, devices)
		was = step.is
		if diff := cmp.Diff(step.want, shown(t, m.unhealthy)); diff != "" {
			t.Errorf("step %d (-want +got):\n%s", i, diff)
		}
	}
}

// shown are the series of a gauge by the values of device, index and cause.
func shown(t *testing.T, g *prometheus.GaugeVec) []string {
	t.Helper()
	registry := prometheus.NewRegistry()
	registry.MustRegister(g)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, f := range families {
		for _, m := range f.GetMetric() {
			values := map[string]string{}
			for _, l := range m.GetLabel() {
				values[l.GetName()] = l.GetValue()
			}
			out = append(out, values["device"]+" "+values["index"]+" "+values["cause"])
		}
	}
	slices.Sort(out)
	return out
}
