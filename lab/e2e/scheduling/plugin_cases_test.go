//go:build e2e

package scheduling

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/platform/metrics"
	"github.com/divvy-gpu/divvy/lab/internal/controlplane"
	"github.com/divvy-gpu/divvy/lab/internal/simnodes"
)

// What else pods have to do with, through divvy-scheduler: companions_test.go has the same for
// the extender.

const (
	// expires is the shortest time after which a reservation of a bind may end.
	expires = "--reservation-ttl=15s"
	// honoursBackoff and noRetry keep a pod that was given up from being tried again during a test.
	honoursBackoff = "--feature-gates=SchedulerPopFromBackoffQ=false"
	// groupGate and groupAPI enable Kubernetes' own pod groups.
	groupGate = "--feature-gates=GenericWorkload=true"
	groupAPI  = "--runtime-config=scheduling.k8s.io/v1beta1=true"
)

var noRetry = map[string]any{"podInitialBackoffSeconds": 600, "podMaxBackoffSeconds": 600}

// plug makes pods ones of divvy-scheduler.
func plug(pods ...*corev1.Pod) []*corev1.Pod {
	for _, pod := range pods {
		pod.Spec.SchedulerName = plugged
	}
	return pods
}

// reserves waits until a number of pods have a reservation and are not bound.
func (w *world) reserves(p *controlplane.Plugin, pods int) {
	w.Helper()
	w.eventually(fmt.Sprintf("%d pods have reservations", pods), func(ctx context.Context) error {
		n, err := counter(ctx, p.DivvyMetrics, metrics.ExtenderReservations.Name)
		if err == nil && n != pods {
			err = fmt.Errorf("%d have", n)
		}
		return err
	})
}

// held is for how long the oldest reservation waits for its bind to begin.
func (w *world) held(p *controlplane.Plugin) (seconds float64) {
	w.Helper()
	text, err := p.DivvyMetrics(w.Context())
	if err != nil {
		w.Fatal(err)
	}
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, metrics.ExtenderOldestHeld.Name+" "); ok {
			if _, err := fmt.Sscan(rest, &seconds); err != nil {
				w.Fatal(err)
			}
			return seconds
		}
	}
	w.Fatalf("no metric %s", metrics.ExtenderOldestHeld.Name)
	return 0
}

func (w *world) isNotBound(names ...string) {
	w.Helper()
	for _, name := range names {
		if pod := w.pod(name); pod.Spec.NodeName != "" {
			w.Errorf("pod %s is bound to %s", name, pod.Spec.NodeName)
		}
	}
}

// A reservation lasts as long as PreBind waits for a volume.
func TestPluginVolume(t *testing.T) { pluginVolume(t, 3*time.Second) }

// And longer than a reservation of a bind may last.
func TestPluginSlowVolume(t *testing.T) { pluginVolume(t, 20*time.Second) }

func pluginVolume(t *testing.T, provisioning time.Duration) {
	t.Helper()
	w := newWorld(t, simnodes.Group{Count: 1, Cards: 2, Units: 8})
	if err := w.nodes.Create(t.Context(), w.client); err != nil {
		t.Fatal(err)
	}
	p := w.plugin("plugin", "", expires)
	w.create(plug(w.nodes.Pod(namespace, "beside", 4))...)
	w.isBound("beside")
	w.create(plug(w.withVolume(w.nodes.Pod(namespace, "slow", 8)))...)
	w.assumed("slow")
	// Competitors come all the time, each for the device with most free units.
	for n := range 4 {
		w.create(plug(spread(w.nodes.Pod(namespace, fmt.Sprint("rival-", n), 1)))...)
		time.Sleep(provisioning / 4)
	}
	w.isBound("rival-0", "rival-1", "rival-2", "rival-3")
	w.create(plug(spread(w.nodes.Pod(namespace, "late", 1)))...)
	w.unschedulable("late")
	w.isNotBound("slow", "late")
	if seconds := w.held(p); seconds < provisioning.Seconds() {
		t.Errorf("the reservation is %.1f s old, the volume is waited for since %s at least", seconds, provisioning)
	}
	w.provision("slow")
	w.isBound("slow")
	w.reserves(p, 0)
	if seconds := w.held(p); seconds != 0 {
		t.Errorf("a reservation is held for %.1f s after all binds", seconds)
	}
	w.isNotBound("late")
	for device, units := range w.right() {
		if units != 8 {
			t.Errorf("device %s holds %d units, all 8 are asked for", device, units)
		}
	}
}

// A volume that is not made in time ends the reservation.
func TestPluginVolumeThatIsNeverMade(t *testing.T) {
	w := newWorld(t, simnodes.Group{Count: 1, Cards: 1, Units: 8})
	if err := w.nodes.Create(t.Context(), w.client); err != nil {
		t.Fatal(err)
	}
	p := w.startPlugin(pluginOptions{
		name: "plugin", config: noRetry, kubeScheduler: []string{honoursBackoff},
		profile: map[string]any{"pluginConfig": []any{
			map[string]any{"name": "VolumeBinding", "args": map[string]any{"bindTimeoutSeconds": 3}},
		}},
	})
	w.create(plug(w.withVolume(w.nodes.Pod(namespace, "slow", 8)))...)
	w.assumed("slow")
	w.reserves(p, 1)
	w.unschedulable("slow")
	w.reserves(p, 0)
	w.create(plug(w.nodes.Pod(namespace, "next", 8))...)
	w.isBound("next")
	w.right()
}

// Pods with a scheduling gate hold nothing, and are placed when the gate is gone.
func TestPluginGatedPods(t *testing.T) {
	const gated = 20
	w := newWorld(t, simnodes.Group{Count: 2, Cards: 2, Units: 16})
	if err := w.nodes.Create(t.Context(), w.client); err != nil {
		t.Fatal(err)
	}
	p := w.plugin("plugin", "")
	for n := range gated {
		pod := w.nodes.Pod(namespace, fmt.Sprint("gated-", n), 1)
		pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "example.com/wait"}}
		w.create(plug(pod)...)
	}
	w.make(plugged, "free", 4, 16) // all that there is
	w.bound(4)
	w.reserves(p, 0)
	w.gone("free-0000", "free-0001")
	for n := range gated {
		patch := []byte(`{"spec":{"schedulingGates":null}}`)
		if _, err := w.client.CoreV1().Pods(namespace).Patch(t.Context(), fmt.Sprint("gated-", n), types.MergePatchType, patch,
			metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	w.bound(2 + gated)
}

// What a pod of high priority is nominated to is not given to others while its victim ends, and
// not after.
func TestPluginNominatedPod(t *testing.T) {
	w := newWorld(t, simnodes.Group{Count: 1, Cards: 2, Units: 8})
	if err := w.nodes.Create(t.Context(), w.client); err != nil {
		t.Fatal(err)
	}
	w.plugin("plugin", "")
	w.create(plug(w.nodes.Pod(namespace, "low", 6), w.priority(w.nodes.Pod(namespace, "keeps", 6), 2000))...)
	w.isBound("low", "keeps")
	w.create(plug(w.priority(w.nodes.Pod(namespace, "high", 8), 1000))...)
	w.eventually("pod high is nominated", func(context.Context) error {
		if pod := w.pod("high"); pod.Status.NominatedNodeName == "" {
			return fmt.Errorf("its conditions are %+v", pod.Status.Conditions)
		}
		return nil
	})
	// Each of them would fit, if the victim or what it leaves were theirs.
	rivals := []string{"rival-0", "rival-1"}
	for _, name := range rivals {
		w.create(plug(w.nodes.Pod(namespace, name, 4))...)
		w.unschedulable(name)
	}
	w.create(plug(w.nodes.Pod(namespace, "small", 2))...)
	w.evicted("low")
	w.isBound("high", "small")
	if w.card("small") != w.card("keeps") || w.card("high") == w.card("keeps") {
		t.Error("the pods are not on the devices where they fit")
	}
	w.isNotBound(rivals...)
	w.right()
}

// A pod with a claim of another DRA driver goes where both are: the claim's device and a shared one.
func TestPluginClaims(t *testing.T) {
	const class = "other.example.com"
	w := newWorld(t, simnodes.Group{Count: 3, Cards: 1, Units: 8})
	if err := w.nodes.Create(t.Context(), w.client); err != nil {
		t.Fatal(err)
	}
	resources := w.client.ResourceV1()
	if _, err := resources.DeviceClasses().Create(t.Context(), &resourcev1.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: class}},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	// The first node has none, the second one and the third two.
	for n := range 3 {
		var devices []resourcev1.Device
		for d := range n {
			devices = append(devices, resourcev1.Device{Name: fmt.Sprint("other-", d)})
		}
		node := w.nodes.NodeName(n)
		slice := &resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: node + "-other"}, Spec: resourcev1.ResourceSliceSpec{
			Driver: class, NodeName: ptr.To(node), Pool: resourcev1.ResourcePool{Name: node, Generation: 1, ResourceSliceCount: 1},
			Devices: devices,
		}}
		if _, err := resources.ResourceSlices().Create(t.Context(), slice, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	claimed := func(name string, units accel.Units) *corev1.Pod {
		claim := &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
			Spec: resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{Requests: []resourcev1.DeviceRequest{{
				Name: "other", Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: class},
			}}}}}
		if _, err := resources.ResourceClaims(namespace).Create(t.Context(), claim, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		pod := w.nodes.Pod(namespace, name, units)
		pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "other", ResourceClaimName: ptr.To(name)}}
		pod.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "other"}}
		return pod
	}
	p := w.plugin("plugin", "")
	// binpack prefers the first node, which has no device for the claim; the third one's is held.
	w.create(plug(on(w.nodes.Pod(namespace, "first", 4), w.nodes.NodeName(0)))...)
	w.create(plug(on(w.nodes.Pod(namespace, "third", 6), w.nodes.NodeName(2)))...)
	w.isBound("first", "third")
	w.create(plug(claimed("claims", 4))...)
	w.isBound("claims")
	if node := w.pod("claims").Spec.NodeName; node != w.nodes.NodeName(1) {
		t.Errorf("the pod is on %s, only %s has both", node, w.nodes.NodeName(1))
	}
	claim, err := resources.ResourceClaims(namespace).Get(t.Context(), "claims", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if a := claim.Status.Allocation; a == nil || len(a.Devices.Results) != 1 || a.Devices.Results[0].Pool != w.nodes.NodeName(1) ||
		len(claim.Status.ReservedFor) != 1 || claim.Status.ReservedFor[0].UID != w.pod("claims").UID {
		t.Errorf("the claim's status is %+v", claim.Status)
	}
	// Units are free where no device for the claim is, and the other way round.
	w.create(plug(claimed("waits", 4))...)
	w.unschedulable("waits")
	w.isNotBound("waits")
	w.reserves(p, 0)
	w.gone("third")
	w.isBound("waits")
	if node := w.pod("waits").Spec.NodeName; node != w.nodes.NodeName(2) {
		t.Errorf("the pod is on %s, only %s has both", node, w.nodes.NodeName(2))
	}
	w.right()
}

// gang makes pods of one that has so many.
func (w *world) gang(name string, first, end, size int, units accel.Units) (names []string) {
	w.Helper()
	for n := first; n < end; n++ {
		pod := w.nodes.Pod(namespace, fmt.Sprintf("%s-%d", name, n), units)
		pod.Labels = map[string]string{"gang": name, "gang-size": fmt.Sprint(size)}
		w.create(plug(pod)...)
		names = append(names, pod.Name)
	}
	return names
}

// gangProfile enables the plugin of scheduler/internal/gang.
func gangProfile(wait time.Duration) map[string]any {
	enabled := map[string]any{"enabled": []any{map[string]any{"name": "Gang"}}}
	return map[string]any{
		"plugins":      map[string]any{"permit": enabled, "reserve": enabled},
		"pluginConfig": []any{map[string]any{"name": "Gang", "args": map[string]any{"seconds": int(wait.Seconds())}}},
	}
}

// Pods of a gang wait in Permit until all of them have a reservation.
func TestPluginGang(t *testing.T) { pluginGang(t, 2*time.Second) }

// And longer than a reservation of a bind may last.
func TestPluginPatientGang(t *testing.T) { pluginGang(t, 2*time.Minute) }

func pluginGang(t *testing.T, wait time.Duration) {
	t.Helper()
	const devices, units, size = 4, 8, 8
	w := newWorld(t, simnodes.Group{Count: 2, Cards: devices / 2, Units: units})
	if err := w.nodes.Create(t.Context(), w.client); err != nil {
		t.Fatal(err)
	}
	p := w.startPlugin(pluginOptions{name: "plugin", program: ganged, profile: gangProfile(wait + patience), args: []string{expires}})
	names := w.gang("gang", 0, size-1, size, units/2)
	w.reserves(p, size-1)
	w.create(plug(w.nodes.Pod(namespace, "rival", units))...) // a half of a device is free
	w.unschedulable("rival")
	time.Sleep(wait)
	w.reserves(p, size-1)
	w.isNotBound(append(names, "rival")...)
	names = append(names, w.gang("gang", size-1, size, size, units/2)...)
	w.isBound(names...)
	w.isNotBound("rival")
	for device, held := range w.right() {
		if held != units {
			t.Errorf("device %s holds %d of %d units", device, held, units)
		}
	}
	w.gone(names[0], names[1], names[2], names[3], names[4])
	w.isBound("rival")
	w.reserves(p, 0)
	w.right()
}

// A gang that is not complete in time frees all that is reserved for it.
func TestPluginGangThatIsNeverComplete(t *testing.T) {
	const devices, units, size = 4, 8, 8
	w := newWorld(t, simnodes.Group{Count: 2, Cards: devices / 2, Units: units})
	if err := w.nodes.Create(t.Context(), w.client); err != nil {
		t.Fatal(err)
	}
	p := w.startPlugin(pluginOptions{
		name: "plugin", program: ganged, profile: gangProfile(5 * time.Second), config: noRetry, kubeScheduler: []string{honoursBackoff},
	})
	names := w.gang("gang", 0, size-1, size, units/2)
	for _, name := range names {
		w.unschedulable(name)
	}
	w.reserves(p, 0)
	w.isNotBound(names...)
	w.make(plugged, "next", devices, units)
	w.bound(devices)
}

// podGroup makes a PodGroup of Kubernetes' own and its pods, of a priority.
func (w *world) podGroup(name string, count int, units accel.Units, priority int32) (names []string) {
	w.Helper()
	object := &schedulingv1beta1.PodGroup{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: schedulingv1beta1.PodGroupSpec{SchedulingPolicy: schedulingv1beta1.PodGroupSchedulingPolicy{
			Gang: &schedulingv1beta1.GangSchedulingPolicy{MinCount: int32(count)},
		}}}
	class := ""
	if priority != 0 {
		class = w.priority(&corev1.Pod{}, priority).Spec.PriorityClassName
	}
	object.Spec.PriorityClassName = class
	w.eventually("group "+name+" is created", func(ctx context.Context) error { // its PriorityClass may be new
		_, err := w.client.SchedulingV1beta1().PodGroups(namespace).Create(ctx, object, metav1.CreateOptions{})
		return err
	})
	for n := range count {
		pod := w.nodes.Pod(namespace, fmt.Sprintf("%s-%d", name, n), units)
		pod.Spec.SchedulingGroup, pod.Spec.PriorityClassName = &corev1.PodSchedulingGroup{PodGroupName: ptr.To(name)}, class
		w.create(plug(pod)...)
		names = append(names, pod.Name)
	}
	return names
}

// A pod group of Kubernetes' own is placed as a whole or not at all, device by device.
func TestPluginPodGroup(t *testing.T) {
	const devices, units, size = 4, 8, 8
	w := newWorld(t, simnodes.Group{Count: 2, Cards: devices / 2, Units: units}, groupGate, groupAPI)
	if err := w.nodes.Create(t.Context(), w.client); err != nil {
		t.Fatal(err)
	}
	p := w.startPlugin(pluginOptions{name: "plugin", kubeScheduler: []string{groupGate}})
	group := func(name string, count int, units accel.Units) []string { return w.podGroup(name, count, units, 0) }
	w.create(plug(w.nodes.Pod(namespace, "before", 1))...)
	w.isBound("before")
	// Eight halves of devices: the sum of what is free is enough for seven.
	vain := group("vain", size, units/2)
	w.unschedulable(vain[0])
	w.isNotBound(vain...)
	w.reserves(p, 0)
	w.create(plug(w.nodes.Pod(namespace, "meanwhile", units))...)
	w.isBound("meanwhile")
	w.gone("meanwhile", "before")
	w.isBound(vain...)
	for device, held := range w.right() {
		if held != units {
			t.Errorf("device %s holds %d of %d units", device, held, units)
		}
	}
	w.gone(vain...)
	// What counts are the devices: none is placed where the sum alone is enough.
	for _, name := range []string{"a", "b", "c"} {
		w.create(plug(spread(w.nodes.Pod(namespace, name, 3)))...)
		w.isBound(name)
	}
	scattered := group("scattered", 5, 4) // 23 units are free on devices with 5, 5, 5 and 8
	w.isBound(scattered...)
	w.right()
	w.gone(scattered...)
	none := group("none", 3, 6) // one of them would fit
	w.unschedulable(none[0])
	w.isNotBound(none...)
	w.reserves(p, 0)
	w.isBound(group("fifths", 4, 5)...)
	w.isNotBound(none...)
	w.right()
}

// A pod group has pods of lower priority evicted as if there were devices only: no more than it needs, and
// none where evicting all would not be enough.
func TestPluginPodGroupEvicts(t *testing.T) {
	const devices, units = 4, 8
	w := newWorld(t, simnodes.Group{Count: 2, Cards: devices / 2, Units: units}, groupGate, groupAPI)
	if err := w.nodes.Create(t.Context(), w.client); err != nil {
		t.Fatal(err)
	}
	p := w.startPlugin(pluginOptions{name: "plugin", kubeScheduler: []string{groupGate}})
	// Each device has 5 units of a pod of low priority, and 3 that are free: 12 together.
	low := map[string]bool{}
	for n := range devices {
		pod := w.priority(w.nodes.Pod(namespace, fmt.Sprintf("low-%d", n), 5), 1)
		w.create(plug(spread(pod))...)
		w.isBound(pod.Name)
		low[pod.Name] = true
	}
	evicted := func() (names []string) {
		for _, pod := range w.pods() {
			if pod.DeletionTimestamp != nil {
				names = append(names, pod.Name)
			}
		}
		return names
	}
	never := w.podGroup("never", devices+1, 6, 1000)
	w.unschedulable(never[0])
	w.isNotBound(never...)
	if names := evicted(); len(names) > 0 {
		t.Errorf("%v are evicted for a group that does not fit without them either", names)
	}
	w.gone(never...)

	const size = 2
	high := w.podGroup("high", size, 6, 1000)
	w.eventually("pods are evicted for the group", func(context.Context) error {
		if names := evicted(); len(names) < size {
			return fmt.Errorf("%v are", names)
		}
		return nil
	})
	victims := evicted()
	w.reserves(p, 0)
	w.gone(victims...)
	w.isBound(high...)
	w.right()
	if len(victims) != size || len(evicted()) > 0 {
		t.Errorf("%v are evicted, and then %v; want %d", victims, evicted(), size)
	}
	for _, name := range victims {
		if !low[name] {
			t.Errorf("%s is evicted", name)
		}
	}
}

// The programs of the other minors, in short: they take the lead, fill devices, say why a pod waits,
// wake it, make room where the sum fits and no device does, and hold a reservation for a volume.
func TestPluginOfOtherMinors(t *testing.T) {
	for _, m := range []minor{{"k136", "v1.36.3"}, {"k135", "v1.35.4"}} {
		t.Run(m.version, func(t *testing.T) {
			const nodes, devices, units = 2, 2, 8
			w := newWorld(t, simnodes.Group{Count: nodes, Cards: devices, Units: units})
			if err := w.nodes.Create(t.Context(), w.client); err != nil {
				t.Fatal(err)
			}
			p := w.compete("scheduler", "", m)
			w.make(plugged, "pod", nodes*devices*2, units/2)
			w.bound(nodes * devices * 2)
			// A half of each device of the first node is free: enough in sum.
			freed := map[string]bool{}
			for _, pod := range w.pods() {
				if device := w.deviceOf(&pod); pod.Spec.NodeName == w.nodes.NodeName(0) && !freed[device] {
					freed[device] = true
					w.gone(pod.Name)
				}
			}
			w.create(plug(w.nodes.Pod(namespace, "waits", units))...)
			w.eventually("the pod waits for a device", func(context.Context) error {
				conditions := w.pod("waits").Status.Conditions
				for _, c := range conditions {
					if c.Type == corev1.PodScheduled && strings.Contains(c.Message, "in one ") {
						return nil
					}
				}
				return fmt.Errorf("conditions: %v", conditions)
			})
			w.create(plug(w.priority(w.nodes.Pod(namespace, "high", units), 1000))...)
			w.eventually("a pod is evicted for it", func(context.Context) error {
				for _, pod := range w.pods() {
					if pod.DeletionTimestamp != nil {
						w.gone(pod.Name)
						return nil
					}
				}
				return fmt.Errorf("none is; conditions: %v", w.pod("high").Status.Conditions)
			})
			w.isBound("high")
			w.isNotBound("waits")
			w.gone("high")
			w.isBound("waits")
			w.gone("waits")
			w.create(plug(w.withVolume(w.nodes.Pod(namespace, "slow", units)))...)
			w.assumed("slow")
			w.reserves(p.Plugin, 1)
			w.create(plug(w.nodes.Pod(namespace, "rival", units))...)
			w.unschedulable("rival")
			w.provision("slow")
			w.isBound("slow")
			w.isNotBound("rival")
			w.right()
		})
	}
}
