//go:build e2e

package scheduling

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	quantity "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/lab/internal/controlplane"
	"github.com/divvy-gpu/divvy/lab/internal/simnodes"
)

// Shared devices beside what else pods have to do with: volumes, gates, priorities.

const (
	slowClass = "slow"
	// provisioning is how long a volume takes: longer than capacity was once kept
	// between filter and bind, 5 s, and shorter than a minute for the test's sake.
	provisioning = 12 * time.Second
	selectedNode = "volume.kubernetes.io/selected-node"
)

// olderSchedulers is how versions up to 1.34 behave, which write no nominated node for a
// pod whose bind takes long.
const olderSchedulers = "--feature-gates=NominatedNodeNameForExpectation=false"

// start starts a kube-scheduler.
func (w *world) start(e *controlplane.Extender, o controlplane.SchedulerOptions) *controlplane.Scheduler {
	w.Helper()
	o.Name, o.Extender, o.QPS = "default-scheduler", &e.Entry, 5000
	s, err := w.plane.StartScheduler(w.Context(), programs.Kubernetes, o)
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() {
		if s.Running() {
			w.end(s.Process)
		}
	})
	return s
}

func (w *world) create(pods ...*corev1.Pod) {
	w.Helper()
	for _, pod := range pods {
		w.eventually("pod "+pod.Name+" is created", func(ctx context.Context) error { // its PriorityClass may be new
			_, err := w.client.CoreV1().Pods(pod.Namespace).Create(ctx, pod, metav1.CreateOptions{})
			return err
		})
	}
}

func (w *world) pod(name string) *corev1.Pod {
	w.Helper()
	pod, err := w.client.CoreV1().Pods(namespace).Get(w.Context(), name, metav1.GetOptions{})
	if err != nil {
		w.Fatal(err)
	}
	return pod
}

// isBound waits until the pods are bound.
func (w *world) isBound(names ...string) {
	w.Helper()
	for _, name := range names {
		w.eventually("pod "+name+" is bound", func(context.Context) error {
			if pod := w.pod(name); pod.Spec.NodeName == "" {
				return fmt.Errorf("its conditions are %+v", pod.Status.Conditions)
			}
			return nil
		})
	}
}

// card is the number of the device that the pod was given.
func (w *world) card(name string) string {
	return w.pod(name).Annotations["enflame.com/gcu-device-id"]
}

// unschedulable waits until kube-scheduler has found no node for the pod.
func (w *world) unschedulable(name string) {
	w.Helper()
	w.eventually("pod "+name+" waits", func(context.Context) error {
		for _, c := range w.pod(name).Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
				return nil
			}
		}
		return errors.New("it does not")
	})
}

// spread makes the pod one for the card with most free units.
func spread(pod *corev1.Pod) *corev1.Pod {
	pod.Annotations = map[string]string{wire.PolicyAnnotation: "spread"}
	return pod
}

// withVolume gives the pod a claim of a class whose volumes are made when a node was
// chosen.
func (w *world) withVolume(pod *corev1.Pod) *corev1.Pod {
	w.Helper()
	class := &storagev1.StorageClass{
		ObjectMeta: metav1.ObjectMeta{Name: slowClass}, Provisioner: "slow.example.com",
		VolumeBindingMode: ptr.To(storagev1.VolumeBindingWaitForFirstConsumer),
	}
	if _, err := w.client.StorageV1().StorageClasses().Create(w.Context(), class, metav1.CreateOptions{}); err != nil &&
		!apierrors.IsAlreadyExists(err) {
		w.Fatal(err)
	}
	claim := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name},
		Spec: corev1.PersistentVolumeClaimSpec{
			StorageClassName: ptr.To(slowClass), AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: quantity.MustParse("1Gi")}},
		},
	}
	if _, err := w.client.CoreV1().PersistentVolumeClaims(pod.Namespace).Create(w.Context(), claim, metav1.CreateOptions{}); err != nil {
		w.Fatal(err)
	}
	pod.Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{
		PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim.Name},
	}}}
	return pod
}

// assumed waits until kube-scheduler has chosen a node for a claim, and waits for it.
func (w *world) assumed(claim string) {
	w.Helper()
	w.eventually("kube-scheduler waits for the volume of "+claim, func(ctx context.Context) error {
		c, err := w.client.CoreV1().PersistentVolumeClaims(namespace).Get(ctx, claim, metav1.GetOptions{})
		if err == nil && c.Annotations[selectedNode] == "" {
			err = errors.New("no node is chosen")
		}
		return err
	})
}

// provision makes the volume of a claim, as its provisioner and the controller of
// volumes do together.
func (w *world) provision(claim string) {
	w.Helper()
	claims := w.client.CoreV1().PersistentVolumeClaims(namespace)
	c, err := claims.Get(w.Context(), claim, metav1.GetOptions{})
	if err != nil {
		w.Fatal(err)
	}
	volume := &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: claim},
		Spec: corev1.PersistentVolumeSpec{
			StorageClassName: slowClass, AccessModes: c.Spec.AccessModes, Capacity: c.Spec.Resources.Requests,
			ClaimRef: &corev1.ObjectReference{Kind: "PersistentVolumeClaim", APIVersion: "v1", Namespace: namespace,
				Name: claim, UID: c.UID},
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: "slow.example.com",
				VolumeHandle: claim}},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn,
					Values: []string{c.Annotations[selectedNode]}}},
			}}}},
		},
	}
	if volume, err = w.client.CoreV1().PersistentVolumes().Create(w.Context(), volume, metav1.CreateOptions{}); err == nil {
		volume.Status.Phase = corev1.VolumeBound
		_, err = w.client.CoreV1().PersistentVolumes().UpdateStatus(w.Context(), volume, metav1.UpdateOptions{})
	}
	if err != nil {
		w.Fatal(err)
	}
	c.Spec.VolumeName = volume.Name
	c.Annotations["pv.kubernetes.io/bind-completed"] = "yes"
	if c, err = claims.Update(w.Context(), c, metav1.UpdateOptions{}); err == nil {
		c.Status.Phase, c.Status.Capacity = corev1.ClaimBound, c.Spec.Resources.Requests
		_, err = claims.UpdateStatus(w.Context(), c, metav1.UpdateOptions{})
	}
	if err != nil {
		w.Fatal(err)
	}
}

// A volume that is made when its pod has a node takes long. The pod's device is not
// given to another one meanwhile, which kube-scheduler would let pass: the sum over the
// node's devices is enough for both.
func TestSlowVolume(t *testing.T) {
	for name, tc := range map[string]struct {
		scheduler controlplane.SchedulerOptions
		ends      bool // kube-scheduler, in between
	}{
		"up to 1.34":             {scheduler: controlplane.SchedulerOptions{Args: []string{olderSchedulers}}},
		"up to 1.34, which ends": {scheduler: controlplane.SchedulerOptions{Args: []string{olderSchedulers}}, ends: true},
		"from 1.35 on":           {},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, simnodes.Group{Count: 1, Cards: 2, Units: 8})
			if err := w.nodes.Create(t.Context(), w.client); err != nil {
				t.Fatal(err)
			}
			e := w.extender()
			s := w.start(e, tc.scheduler)
			w.create(w.nodes.Pod(namespace, "beside", 4))
			w.isBound("beside")
			w.create(w.withVolume(w.nodes.Pod(namespace, "slow", 8)))
			w.assumed("slow")
			began := time.Now()
			if tc.ends {
				if err := s.Kill(); err != nil {
					t.Fatal(err)
				}
			}
			// Competitors come all the time, each for the card with most free units.
			competitors := 0
			for tick := time.NewTicker(provisioning / 4); competitors < 4; competitors++ {
				<-tick.C
				if tc.ends && competitors == 1 {
					w.start(e, tc.scheduler)
				}
				w.create(spread(w.nodes.Pod(namespace, fmt.Sprint("rival-", competitors), 1)))
			}
			w.isBound("rival-0", "rival-1", "rival-2", "rival-3")
			if pod := w.pod("slow"); pod.Spec.NodeName != "" {
				t.Fatal("it is bound before it has a volume")
			}
			w.provision("slow")
			t.Logf("the volume took %.1f s", time.Since(began).Seconds())
			w.isBound("slow")
			for device, units := range w.right() {
				if units != 8 {
					t.Errorf("device %s holds %d units, all 8 are asked for", device, units)
				}
			}
			if n, err := counter(t.Context(), e.Metrics, "divvy_extender_expected_pods"); err != nil || n != 0 {
				t.Errorf("%d binds are expected still, %v", n, err)
			}
		})
	}
}

// kube-scheduler gives a volume up that is not made in time. What was reserved for its
// pod is there for others at once, and not when kube-scheduler tries again.
func TestVolumeThatIsNeverMade(t *testing.T) {
	for name, args := range map[string][]string{"up to 1.34": {olderSchedulers}, "from 1.35 on": nil} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, simnodes.Group{Count: 1, Cards: 1, Units: 8})
			if err := w.nodes.Create(t.Context(), w.client); err != nil {
				t.Fatal(err)
			}
			e := w.extender()
			w.start(e, controlplane.SchedulerOptions{Args: args, Settings: map[string]any{
				// Longer than this test waits, for the pod that was given up; others are
				// not held back when they are tried for the first time.
				"podInitialBackoffSeconds": int(2 * patience / time.Second), "podMaxBackoffSeconds": int(2 * patience / time.Second),
				"profiles": []any{map[string]any{"schedulerName": "default-scheduler", "pluginConfig": []any{
					map[string]any{"name": "VolumeBinding", "args": map[string]any{"bindTimeoutSeconds": 3}},
				}}},
			}})
			w.create(w.withVolume(w.nodes.Pod(namespace, "slow", 8)))
			w.assumed("slow")
			if n, err := counter(t.Context(), e.Metrics, "divvy_extender_expected_pods"); err != nil || n != 1 {
				t.Errorf("%d binds are expected, %v; want that of the pod with the volume", n, err)
			}
			w.unschedulable("slow")
			w.create(w.nodes.Pod(namespace, "next", 8))
			w.isBound("next")
			w.right()
		})
	}
}

// Pods with a scheduling gate hold nothing and say nothing of what is placed. They are
// placed when the gate is gone.
func TestGatedPods(t *testing.T) {
	const gated = 20
	w := newWorld(t, simnodes.Group{Count: 2, Cards: 2, Units: 16})
	if err := w.nodes.Create(t.Context(), w.client); err != nil {
		t.Fatal(err)
	}
	e := w.extender("--policy=fragmentation")
	w.scheduler("default-scheduler", e)
	for n := range gated {
		pod := w.nodes.Pod(namespace, fmt.Sprint("gated-", n), 1)
		pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "example.com/wait"}}
		w.create(pod)
	}
	w.make("default-scheduler", "free", 2, 16)
	w.bound(2)
	const learned = `divvy_extender_demand_seen_pods_total{resource="` + resource + `"}`
	learns := func(want int) {
		t.Helper()
		w.eventually(fmt.Sprintf("%d pods were learned from", want), func(ctx context.Context) error {
			seen, err := counter(ctx, e.Metrics, learned)
			if err == nil && seen != want {
				err = fmt.Errorf("%d were", seen)
			}
			return err
		})
	}
	learns(2)
	for n := range gated {
		patch := []byte(`{"spec":{"schedulingGates":null}}`)
		if _, err := w.client.CoreV1().Pods(namespace).Patch(t.Context(), fmt.Sprint("gated-", n), types.MergePatchType, patch,
			metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	w.bound(2 + gated)
	learns(2 + gated)
}

// priority makes a PriorityClass and gives it to a pod.
func (w *world) priority(pod *corev1.Pod, value int32) *corev1.Pod {
	w.Helper()
	class := &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("priority", value)}, Value: value}
	if value < 0 {
		class.Name = fmt.Sprint("placeholder", -value)
	}
	if _, err := w.client.SchedulingV1().PriorityClasses().Create(w.Context(), class, metav1.CreateOptions{}); err != nil &&
		!apierrors.IsAlreadyExists(err) {
		w.Fatal(err)
	}
	pod.Spec.PriorityClassName = class.Name
	return pod
}

func on(pod *corev1.Pod, node string) *corev1.Pod {
	pod.Spec.NodeSelector = map[string]string{corev1.LabelHostname: node}
	return pod
}

// gone deletes pods as kubelet does when their containers have ended.
func (w *world) gone(names ...string) {
	w.Helper()
	for _, name := range names {
		if err := w.client.CoreV1().Pods(namespace).Delete(w.Context(), name,
			metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}); err != nil {
			w.Fatal(err)
		}
	}
}

// evicted waits until kube-scheduler has begun to delete a pod, lets it end, and checks
// that no other was chosen.
func (w *world) evicted(name string) {
	w.Helper()
	w.eventually("pod "+name+" is evicted", func(context.Context) error {
		for _, pod := range w.pods() {
			if pod.DeletionTimestamp != nil {
				if pod.Name != name {
					w.Fatalf("pod %s is evicted", pod.Name)
				}
				return nil
			}
		}
		return errors.New("none is")
	})
	w.gone(name)
}

// A cluster-autoscaler's placeholders have priorities below zero, and give way to pods
// without a priority: also where units come free that the extender hears of late, so
// that it has to wake the pod by itself.
func TestPlaceholdersGiveWay(t *testing.T) {
	w := newWorld(t, simnodes.Group{Count: 2, Cards: 2, Units: 8})
	if err := w.nodes.Create(t.Context(), w.client); err != nil {
		t.Fatal(err)
	}
	pods := &gate{}
	e := w.extender("--kubeconfig=" + w.before("lagging", pods.wrap))
	w.start(e, controlplane.SchedulerOptions{Settings: map[string]any{"podInitialBackoffSeconds": 1, "podMaxBackoffSeconds": 1}})
	first, second := w.nodes.NodeName(0), w.nodes.NodeName(1)
	plain := func(name string, units accel.Units, node string) *corev1.Pod {
		return on(w.nodes.Pod(namespace, name, units), node)
	}
	w.create(plain("holds-0", 8, first), plain("holds-1", 8, first), plain("full", 8, second))
	w.isBound("holds-0", "holds-1", "full")
	w.create(w.priority(plain("placeholder", 8, second), -10))
	w.isBound("placeholder")
	w.create(w.nodes.Pod(namespace, "modest", 8))
	w.evicted("placeholder")
	w.isBound("modest")
	w.right()

	// On the first node the sum is enough, and no card is; on the second one a
	// placeholder is to give way once another pod has ended.
	w.gone("holds-0", "holds-1", "modest")
	w.create(spread(plain("half-0", 4, first)), plain("ends", 4, second))
	w.isBound("half-0", "ends")
	w.create(spread(plain("half-1", 4, first)), w.priority(plain("gives-way", 4, second), -10))
	w.isBound("half-1", "gives-way")
	w.create(w.nodes.Pod(namespace, "waits", 8))
	w.unschedulable("waits")
	spared := func(ctx context.Context) int {
		n, err := counter(ctx, e.Metrics, `divvy_extender_decisions_total{outcome="spares",resource="`+resource+`",verb="preempt"}`)
		if err != nil {
			w.Fatal(err)
		}
		return n
	}
	pods.shut()
	defer pods.open()
	before := spared(t.Context())
	w.gone("ends")
	// Several times the second that it pauses between two attempts.
	const calm = 5 * time.Second
	last, since := before, time.Now()
	w.eventually("kube-scheduler found no pod to evict and asks no more", func(ctx context.Context) error {
		if now := spared(ctx); now != last {
			last, since = now, time.Now()
		}
		if last == before || time.Since(since) < calm {
			return fmt.Errorf("it asked %d times, the last time %s ago", last-before, time.Since(since))
		}
		return nil
	})
	pods.open()
	w.evicted("gives-way")
	w.isBound("waits")
	w.right()
}

// Where the sum over a node's devices is enough and none of them has room, versions up
// to 1.37 evict no pod, and later ones ask, with an empty list of victims
// (kubernetes/kubernetes#135486). This asks in their place; all else is real.
func TestPreemptionOfWhatFitsInSum(t *testing.T) {
	w := newWorld(t, simnodes.Group{Count: 1, Cards: 2, Units: 16})
	if err := w.nodes.Create(t.Context(), w.client); err != nil {
		t.Fatal(err)
	}
	e := w.extender("--policy=spread")
	w.scheduler("default-scheduler", e)
	w.create(w.priority(w.nodes.Pod(namespace, "low", 8), 10))
	w.isBound("low")
	w.create(w.priority(w.nodes.Pod(namespace, "lower", 8), 5))
	w.isBound("lower")
	if w.card("low") == w.card("lower") {
		t.Fatal("both are on one card")
	}
	w.create(w.priority(w.nodes.Pod(namespace, "high", 12), 100))
	w.unschedulable("high")
	node := w.nodes.NodeName(0)
	body, err := json.Marshal(extenderv1.ExtenderPreemptionArgs{Pod: w.pod("high"),
		NodeNameToMetaVictims: map[string]*extenderv1.MetaVictims{node: {Pods: []*extenderv1.MetaPod{}}}})
	if err != nil {
		t.Fatal(err)
	}
	var result extenderv1.ExtenderPreemptionResult
	if err := json.Unmarshal(w.post(e, "preempt", body), &result); err != nil {
		t.Fatal(err)
	}
	victims := result.NodeNameToMetaVictims[node]
	if victims == nil || len(victims.Pods) != 1 || victims.Pods[0].UID != string(w.pod("lower").UID) {
		t.Fatalf("the answer is %+v, want the pod of the lowest priority", result.NodeNameToMetaVictims)
	}
	w.gone("lower")
	w.isBound("high")
	if total := sum(w.right()); total != accel.Units(8+12) {
		t.Errorf("pods hold %d units, want 20", total)
	}
}

// post asks the extender as kube-scheduler does on its node.
func (w *world) post(e *controlplane.Extender, verb string, body []byte) []byte {
	w.Helper()
	request, err := http.NewRequestWithContext(w.Context(), http.MethodPost, e.Plain+"/"+verb, bytes.NewReader(body))
	if err != nil {
		w.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		w.Fatal(err)
	}
	defer response.Body.Close() //nolint:errcheck // read to its end
	var answer bytes.Buffer
	if _, err := answer.ReadFrom(response.Body); err != nil || response.StatusCode != http.StatusOK {
		w.Fatalf("%s: %s, %v: %s", verb, response.Status, err, answer.Bytes())
	}
	return answer.Bytes()
}
