package agent

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/podresources"
)

func requiring(p *corev1.Pod, tier string) *corev1.Pod {
	p.Annotations[wire.IsolationAnnotation] = tier
	return p
}

// attest states a tier of a device, attested so long ago.
func (w *world) attest(device accel.DeviceID, tier accel.Tier, age time.Duration) {
	w.limit = func(ids []accel.DeviceID, _ accel.Units, _ int) ([]backend.CDIDevice, error) {
		return make([]backend.CDIDevice, len(ids)), nil // limits are given
	}
	e, done := w.records.owner.use()
	defer done()
	e.Attest(w.ID, map[accel.DeviceID]accel.Isolation{device: {Memory: tier, Backend: "dmem", Attested: time.Now().Add(-age)}})
}

func TestNodeChecksRequiredIsolation(t *testing.T) {
	const none = "pod ns/p: isolation driver required, device a states none"
	for name, tt := range map[string]struct {
		tier     string
		stated   accel.Tier
		age      time.Duration
		rejected string
	}{
		"no requirement":                 {"", accel.TierNone, 0, ""},
		"none is no requirement":         {"none", accel.TierNone, 0, ""},
		"the tier":                       {"driver", accel.TierDriver, 0, ""},
		"a higher tier":                  {"cooperative", accel.TierDriver, 50 * time.Second, ""},
		"a lower tier":                   {"driver", accel.TierCooperative, 0, "isolation driver required, device states cooperative"},
		"no tier":                        {"driver", accel.TierNone, 0, "isolation driver required, device states none"},
		"an attestation that is too old": {"driver", accel.TierDriver, 2 * time.Minute, "isolation driver required, device states none"},
		"an annotation that has no tier": {"strong", accel.TierDriver, 0,
			`annotation divvy.dev/isolation: "strong" is not a tier of isolation`},
		"another case is no tier either": {"Driver", accel.TierDriver, 0,
			`annotation divvy.dev/isolation: "Driver" is not a tier of isolation`},
	} {
		for _, granted := range []bool{false, true} { // that came past the extender, and through it
			t.Run(name, func(t *testing.T) {
				w := newWorld(t, "1")
				w.update(t.Context(), found(card(0, "a", 16)), nil)
				w.attest("a", tt.stated, tt.age)
				p := newPod("p", 4)
				if tt.tier != "" {
					requiring(p, tt.tier)
				}
				if granted {
					w.grantTo(p, "a", 0)
				}
				w.see(p)
				_, err := w.admit(p)
				if tt.rejected == "" {
					if err != nil {
						t.Error(err)
					}
					return
				}
				if err == nil || !strings.Contains(err.Error(), tt.rejected) || !strings.Contains(err.Error(), "ns/p") ||
					alloc.ReasonOf(err) != alloc.Isolation {
					t.Errorf("error %v of %q, want %q", err, alloc.ReasonOf(err), tt.rejected)
				}
			})
		}
	}
	t.Run("the tier is lost between the answers", func(t *testing.T) {
		w := newWorld(t, "1")
		w.update(t.Context(), found(card(0, "a", 16)), nil)
		w.attest("a", accel.TierDriver, 0)
		p := requiring(newPod("p", 4), "driver")
		w.see(p)
		w.admitted = append(w.admitted, p)
		ids, err := w.Prefer(t.Context(), w.available(), nil, 4)
		if err != nil {
			t.Fatal(err)
		}
		w.attest("a", accel.TierNone, 0)
		if _, err = w.Allocate(t.Context(), ids); err == nil || err.Error() != none {
			t.Errorf("error %v, want %q", err, none)
		}
	})
}

// A pod that came past the extender gets the device that has the tier.
func TestNodeChoosesTheIsolatedDevice(t *testing.T) {
	w := newWorld(t, "1")
	w.update(t.Context(), found(card(0, "a", 16), card(1, "b", 16)), nil)
	w.attest("b", accel.TierDriver, 0)
	p := requiring(newPod("p", 4, 2), "driver")
	w.see(p)
	devices, err := w.admit(p)
	if err != nil || devices["c0"] != "b" || devices["c1"] != "b" {
		t.Errorf("got %v, %v, want device b", devices, err)
	}
	plain := newPod("plain", 4)
	w.see(plain)
	if devices, err := w.admit(plain); err != nil || devices["c0"] == "" {
		t.Errorf("a pod without a requirement got %v, %v", devices, err)
	}
}

// Limits are of no use on a device if the pod gets around them, whatever it requires.
func TestNodeRejectsWaysAround(t *testing.T) {
	const around = "pod ns/p: container c0 is privileged, which gets around isolation "
	for name, tt := range map[string]struct {
		configured accel.Tier
		want       string
	}{
		"limits":      {accel.TierDriver, around + "driver of the node's devices"},
		"cooperative": {accel.TierCooperative, around + "cooperative of the node's devices"},
		"none":        {accel.TierNone, ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, "1")
			w.tier = tt.configured
			w.update(t.Context(), found(card(0, "a", 16)), nil)
			p := newPod("p", 4)
			p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{Privileged: ptr.To(true)}
			w.see(p)
			_, err := w.admit(p)
			if (err != nil) != (tt.want != "") || err != nil && err.Error() != tt.want {
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}
}

// slotPod requests slots and requires a tier.
func slotPod(name, tier string, size int) *corev1.Pod {
	p := newPod(name)
	p.Spec.Containers = []corev1.Container{containerAsking("c", gpu, size)}
	if tier != "" {
		requiring(p, tier)
	}
	return p
}

func taken(pods ...*corev1.Pod) []podresources.Pod {
	var out []podresources.Pod
	for _, p := range pods {
		out = append(out, podresources.Pod{Namespace: p.Namespace, Name: p.Name})
	}
	return out
}

func TestNodeChecksIsolationOfSlots(t *testing.T) {
	type pods = []*corev1.Pod
	const rejected = "pod ns/strict: isolation cooperative required, device a states none"
	strict, plain := slotPod("strict", "cooperative", 1), slotPod("plain", "", 1)
	other, running := slotPod("other", "driver", 2), slotPod("running", "hardware", 1)
	running.Status.Phase = corev1.PodRunning
	for name, tt := range map[string]struct {
		resource config.Resource
		pods     pods // that the watch has delivered
		api      pods // if it is late
		listed   pods // that kubelet has taken up
		down     bool
		want     string
	}{
		"a whole device has every tier":           {resource: exclusive, pods: pods{slotPod("p", "hardware", 1)}},
		"a slice":                                 {resource: fourTimes, pods: pods{strict}, listed: pods{strict}, want: rejected},
		"a slice for a pod without a requirement": {resource: fourTimes, pods: pods{plain}, listed: pods{plain}},
		"kubelet has taken up the other pod":      {resource: fourTimes, pods: pods{strict, plain}, listed: pods{plain}},
		"kubelet has taken up that pod":           {resource: fourTimes, pods: pods{strict, plain}, listed: pods{strict}, want: rejected},
		"kubelet does not say which":              {resource: fourTimes, pods: pods{strict, plain}, down: true, want: rejected},
		"another size":                            {resource: fourTimes, pods: pods{other, plain}, listed: pods{other, plain}},
		"a pod that runs":                         {resource: fourTimes, pods: pods{running}, listed: pods{running}},
		"the watch is late":                       {resource: fourTimes, api: pods{strict}, listed: pods{strict}, want: rejected},
		"a static pod, while another pod waits":   {resource: fourTimes, pods: pods{strict}, listed: pods{newPod("static")}},
		"a static pod that the API does not know": {resource: fourTimes, api: pods{}, listed: pods{newPod("static")}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newSlotWorld(t, t.TempDir(), tt.resource)
			w.found(gpuDevice(0, "a"))
			w.pods, w.api, w.late, w.listing = tt.pods, tt.api, tt.api != nil, taken(tt.listed...)
			if tt.down {
				w.pool.records.kubelet = kubeletDown{}
			}
			id := "a"
			if tt.resource.Replicas > 0 {
				id = "a::0"
			}
			_, err := w.Allocate(t.Context(), []string{id})
			switch {
			case tt.want == "" && err != nil:
				t.Error(err)
			case tt.want != "" && (err == nil || err.Error() != tt.want || alloc.ReasonOf(err) != alloc.Isolation):
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}
}

type kubeletDown struct{}

func (kubeletDown) List(context.Context) ([]podresources.Pod, error) {
	return nil, errors.New("no answer")
}

func TestSteadyAttestations(t *testing.T) {
	at := time.Date(2026, 7, 1, 10, 0, 0, 0, time.UTC)
	stated := func(tier accel.Tier, after time.Duration) accel.Inventory {
		attested := time.Time{}
		if tier == accel.TierCooperative || tier == accel.TierDriver {
			attested = at.Add(after)
		}
		return accel.Inventory{Resource: "r", Shares: []accel.Share{
			{Device: accel.Device{ID: "x"}, Isolation: accel.Isolation{Memory: tier, Attested: attested}},
		}}
	}
	for name, tt := range map[string]struct {
		published, now, want accel.Inventory
	}{
		"never published":     {accel.Inventory{}, stated(accel.TierDriver, 0), stated(accel.TierDriver, 0)},
		"a moment ago":        {stated(accel.TierDriver, 0), stated(accel.TierDriver, 15*time.Second), stated(accel.TierDriver, 0)},
		"half a minute ago":   {stated(accel.TierDriver, 0), stated(accel.TierDriver, renewAfter), stated(accel.TierDriver, renewAfter)},
		"another tier":        {stated(accel.TierCooperative, 0), stated(accel.TierDriver, 1), stated(accel.TierDriver, 1)},
		"the clock went back": {stated(accel.TierDriver, 0), stated(accel.TierDriver, -time.Hour), stated(accel.TierDriver, -time.Hour)},
		"no attestation":      {stated(accel.TierHardware, 0), stated(accel.TierHardware, 0), stated(accel.TierHardware, 0)},
		"the tier is lost":    {stated(accel.TierDriver, 0), stated(accel.TierNone, 0), stated(accel.TierNone, 0)},
	} {
		t.Run(name, func(t *testing.T) {
			before := tt.now.Shares[0]
			got := tt.now
			steady(&got, func() (accel.Inventory, bool) { return tt.published, tt.published.Resource != "" })
			if got.Shares[0] != tt.want.Shares[0] {
				t.Errorf("%+v, want %+v", got.Shares[0].Isolation, tt.want.Shares[0].Isolation)
			}
			if tt.now.Shares[0] != before {
				t.Error("the engine's inventory was changed")
			}
		})
	}
}

func TestSharedTiers(t *testing.T) {
	never := func(accel.Resource) (accel.Inventory, bool) { return accel.Inventory{}, false }
	memory := newWorld(t, "1")
	memory.update(t.Context(), found(card(0, "a", 16), card(1, "b", 16)), nil)
	memory.attest("a", accel.TierDriver, 0)
	slots := newSlotWorld(t, t.TempDir(), exclusive)
	slots.found(gpuDevice(0, "a"))
	all := offerings{
		{vendor: "v", configured: true, parts: []*pool{memory.pool}}, {vendor: "v", configured: true, parts: []*pool{slots.pool}},
		{vendor: "w", configured: true, parts: []*pool{slots.pool}},
	}
	if got := accel.LowestTier(sharedTiers(all, "v", time.Now(), never)...); got != accel.TierNone {
		t.Errorf("with one device at tier driver the lowest is %v", got)
	}
	if got := sharedTiers(all, "v", time.Now(), never); len(got) != 2 || got[0] != accel.TierDriver {
		t.Errorf("the tiers are %v, want driver and none", got)
	}
	if got := sharedTiers(all, "w", time.Now(), never); got != nil {
		t.Errorf("whole devices are shared at %v", got)
	}
	starting := newWorld(t, "1") // kubelet does not answer yet
	before := func(accel.Resource) (accel.Inventory, bool) {
		return accel.Inventory{Unit: "1", Shares: []accel.Share{
			{Isolation: accel.Isolation{Memory: accel.TierDriver, Attested: time.Now()}},
		}}, true
	}
	all = offerings{{vendor: "v", configured: true, parts: []*pool{starting.pool}}}
	if got := sharedTiers(all, "v", time.Now(), before); len(got) != 1 || got[0] != accel.TierDriver {
		t.Errorf("after a restart the tiers are %v, want those that were published", got)
	}
}

// A tier that was attested does not hold for a container that gets no limit.
func TestContainerWithoutALimit(t *testing.T) {
	w := newWorld(t, "1")
	w.update(t.Context(), found(card(0, "a", 16)), nil)
	w.attest("a", accel.TierDriver, 0)
	w.limit = func([]accel.DeviceID, accel.Units, int) ([]backend.CDIDevice, error) { return nil, nil }
	p := requiring(newPod("p", 4), "driver")
	w.see(p)
	if _, err := w.admit(p); err == nil || !strings.Contains(err.Error(), "device a states none") {
		t.Errorf("the container without a limit got its device: %v", err)
	}
}

// Kubelet asks no more for a pod that was rejected, and lists it until it is shown as failed:
// the next pod of its size must not be taken for it.
func TestRejectedPodHoldsUpNoOther(t *testing.T) {
	w := newWorld(t, "1")
	w.update(t.Context(), found(card(0, "a", 16)), nil)
	wrong, plain := requiring(newPod("bad", 4), "no tier"), newPod("plain", 4)
	w.see(wrong, plain)
	if _, err := w.admit(wrong); err == nil {
		t.Fatal("a pod whose annotation is not valid got a device")
	}
	w.admitted = append(w.admitted, wrong)
	w.api, w.cached = append(w.api, wrong), append(w.cached, wrong)
	if _, err := w.admit(plain); err != nil {
		t.Errorf("the pod after it was rejected: %v", err)
	}
}
