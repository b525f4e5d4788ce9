package agent

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	k8stesting "k8s.io/client-go/testing"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/platform/events"
)

// reported counts the events of a kind on an object.
func (s *stage) reported(object, name string, kind events.Kind) (sum int) {
	s.t.Helper()
	list, err := s.client.CoreV1().Events("").List(s.t.Context(), metav1.ListOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	for _, e := range list.Items {
		if e.InvolvedObject.Kind == object && e.InvolvedObject.Name == name && e.Reason == kind.Reason {
			sum += int(max(e.Count, 1))
		}
	}
	return sum
}

// taints returns the taints that slices were written with, one after the other.
func (s claiming) taints() []string {
	var out []string
	for _, action := range s.client.Actions() {
		update, ok := action.(k8stesting.UpdateActionImpl)
		if !ok {
			continue
		}
		slice, ok := update.Object.(*resourceapi.ResourceSlice)
		if !ok {
			continue
		}
		var now []string
		for _, d := range slice.Spec.Devices {
			for _, taint := range d.Taints {
				now = append(now, d.Name+" "+taint.Key+"="+taint.Value)
			}
		}
		slices.Sort(now)
		out = append(out, strings.Join(now, ", "))
	}
	return slices.DeleteFunc(slices.Compact(out), func(one string) bool { return one == "" })
}

// claimHealth plays a node on the path of claims whose two GPUs are held by pods, and whose health
// recovers after that time. become sets the health of the first one.
func claimHealth(t *testing.T, recoverAfter time.Duration) (s claiming, a *Agent, become func(accel.Device)) {
	t.Helper()
	s = newClaiming(t)
	// The fake API server shows a driver the slices of the others as well, which it removes.
	delete(s.vendors, "iluvatar")
	s.config.Resources = s.config.Resources[:2]
	after := config.Duration(recoverAfter)
	s.config.Vendors = map[string]config.Vendor{"nvidia": {Health: config.Health{RecoverAfter: &after, NeverRecover: []string{}}}}
	a, _ = s.play()
	eventually(t, "devices are published", func() bool { return s.published() == "gpu-a, gpu-b" })
	for name, device := range map[string]string{"one": "gpu-a", "two": "gpu-b"} {
		s.allocate(name, device)
		if failed := s.prepare(name); failed != "" {
			t.Fatal(failed)
		}
	}
	eventually(t, "the watch has delivered the pods", func() bool { return len(a.pods.Cached()) == 2 })
	return s, a, func(d accel.Device) { s.vendors["nvidia"].set(nil, d, gpuDevice(1, "b")) }
}

// tainted reports whether the first GPU, and no other device, is published with a taint.
func (s claiming) tainted() bool {
	all := s.published()
	return strings.Contains(all, "gpu-a divvy.dev/unhealthy") && strings.Count(all, "divvy.dev/") == 1
}

// TestHealthOfClaimedDevices: slices, events and metrics follow the health of devices that claims alone get.
func TestHealthOfClaimedDevices(t *testing.T) {
	s, a, become := claimHealth(t, 0)
	for i := 1; i <= 3; i++ {
		become(sick(gpuDevice(0, "a")))
		eventually(t, "the device has a taint", s.tainted)
		eventually(t, "node and pod have an event", func() bool {
			return s.reported("Node", thisNode, events.DeviceUnhealthy) == i && s.reported("Pod", "one", events.DeviceUnhealthy) == i
		})
		if n := testutil.ToFloat64(a.metrics.unhealthy.WithLabelValues("nvidia", "a", "0", "xid-79")); n != 1 {
			t.Errorf("the metric of the unhealthy device is %v", n)
		}
		become(gpuDevice(0, "a"))
		eventually(t, "the taint is gone", func() bool { return !strings.Contains(s.published(), "divvy.dev/") })
		eventually(t, "the node has an event", func() bool { return s.reported("Node", thisNode, events.DeviceRecovered) == i })
		if n := testutil.CollectAndCount(a.metrics.unhealthy); n != 0 {
			t.Errorf("%d devices are shown as unhealthy", n)
		}
	}
	for to, want := range map[string]float64{becameUnhealthy: 3, becameHealthy: 3} {
		if n := testutil.ToFloat64(a.metrics.transitions.WithLabelValues("nvidia", to)); n != want {
			t.Errorf("%v changes to %s, want %v", n, to, want)
		}
	}
	if n := s.reported("Pod", "two", events.DeviceUnhealthy); n != 0 {
		t.Errorf("the pod with the other device has %d events", n)
	}
	if n := s.reported("Node", thisNode, events.DeviceUnhealthy); n != 3 {
		t.Errorf("%d events of 3 failures", n)
	}
	if len(a.offerings) > 0 {
		t.Error("kubelet is offered the devices")
	}
}

// TestFlappingClaimedDevice: a device that fails again before it is trusted keeps its taint, without
// another event.
func TestFlappingClaimedDevice(t *testing.T) {
	s, a, become := claimHealth(t, time.Hour)
	become(sick(gpuDevice(0, "a")))
	eventually(t, "the device has a taint", s.tainted)
	eventually(t, "node and pod have an event", func() bool {
		return s.reported("Node", thisNode, events.DeviceUnhealthy) == 1 && s.reported("Pod", "one", events.DeviceUnhealthy) == 1
	})
	for range 3 {
		for _, trusted := range []bool{true, false} {
			if become(sick(gpuDevice(0, "a"))); trusted {
				become(gpuDevice(0, "a"))
			}
			// A device that is well is not trusted for an hour, and says so.
			eventually(t, "the device is looked at", func() bool {
				devices := a.claims.Devices("nvidia")
				return strings.Contains(devices[0].Card.Health.Reason, "well again") == trusted
			})
			turn(t, a)
		}
	}
	if got, want := s.taints(), []string{"gpu-a divvy.dev/unhealthy=xid-79"}; !slices.Equal(got, want) || !s.tainted() {
		t.Errorf("slices were written with the taints %q, want %q", got, want)
	}
	// The events of the other device come after all of this one.
	s.vendors["nvidia"].set(nil, sick(gpuDevice(0, "a")), sick(gpuDevice(1, "b")))
	eventually(t, "the other pod has an event", func() bool { return s.reported("Pod", "two", events.DeviceUnhealthy) == 1 })
	if n := s.reported("Node", thisNode, events.DeviceUnhealthy); n != 2 {
		t.Errorf("%d events of 2 devices", n)
	}
	if n := s.reported("Pod", "one", events.DeviceUnhealthy); n != 1 {
		t.Errorf("the pod has %d events", n)
	}
	if n := s.reported("Node", thisNode, events.DeviceRecovered); n != 0 {
		t.Errorf("%d events of a recovery", n)
	}
}

// turn waits until the loop has turned, from its beginning.
func turn(t *testing.T, a *Agent) {
	t.Helper()
	last := func() time.Time {
		a.progress.mu.Lock()
		defer a.progress.mu.Unlock()
		return a.progress.turned
	}
	for range 2 { // the first may have begun before
		before := last()
		a.signals.wake.raise()
		eventually(t, "the loop turns", func() bool { return last().After(before) })
	}
}

// TestClaimedChips: the chips of devices for claims have the health that was found.
func TestClaimedChips(t *testing.T) {
	chip := func(index int, id string) accel.Device { return accel.Device{Index: index, ID: accel.DeviceID(id)} }
	device := func(d accel.Device, chips ...accel.DeviceID) alloc.ClaimDevice {
		return alloc.ClaimDevice{Card: sharing.Card{Device: d, Chips: chips}}
	}
	withdrawn := chip(0, "a")
	withdrawn.Health = accel.Health{Unhealthy: true, Cause: accel.CauseLost, Reason: "the node does not offer the device any more"}
	board := sick(chip(0, "a"))
	found := func(devices ...accel.Device) discovery {
		return discovery{looked: true, found: backend.Found{Devices: devices}}
	}
	failed := func(d discovery) discovery {
		d.err = errors.New("no library")
		return d
	}
	setUp := found(chip(0, "a"))
	setUp.found.Problem = errors.New("MIG devices are not alike")
	type devices = []alloc.ClaimDevice
	healthy, lost, boards := devices{device(chip(0, "a"), "a")}, devices{device(withdrawn, "a")}, devices{device(board, "a", "b")}
	tests := map[string]struct {
		devices []alloc.ClaimDevice
		last    discovery
		want    string
	}{
		"healthy":                               {healthy, found(chip(0, "a")), "0 a healthy"},
		"unhealthy":                             {healthy, found(sick(chip(0, "a"))), "0 a xid-79"},
		"held and not offered any more":         {lost, found(chip(0, "a")), "0 a healthy"},
		"held and lost":                         {lost, found(chip(1, "b")), "0 a lost"},
		"a board, of which a chip is unhealthy": {boards, found(chip(0, "a"), sick(chip(1, "b"))), "0 a healthy, 1 b xid-79"},
		"a board, of which a chip is lost":      {boards, found(chip(1, "b")), "0 a lost, 1 b healthy"},
		"before the first discovery":            {lost, discovery{}, ""},
		"the discovery fails":                   {boards, failed(found(chip(0, "a"), sick(chip(1, "b")))), "0 a unreachable, 1 b xid-79"},
		"every discovery fails":                 {lost, failed(found()), "0 a unreachable"},
		"no device may be offered as set up":    {healthy, setUp, "0 a unreachable"},
		"none":                                  {nil, found(chip(0, "a")), ""},
	}
	for name, tt := range tests {
		var got []string
		for _, d := range claimedChips(tt.devices, tt.last) {
			health := "healthy"
			if d.Health.Unhealthy && d.Health.Reason != "" {
				health = d.Health.Cause
			}
			got = append(got, fmt.Sprint(accel.IndexText(d.Index), " ", d.ID, " ", health))
		}
		if got := strings.Join(got, ", "); got != tt.want {
			t.Errorf("%s: got %s, want %s", name, got, tt.want)
		}
	}
}
