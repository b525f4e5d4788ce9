//go:build e2e

package scheduling

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/lab/internal/controlplane"
	"github.com/divvy-gpu/divvy/lab/internal/simnodes"
)

// plugged is the scheduler's name in the example of its configuration.
const plugged = "divvy-scheduler"

// minor is a divvy-scheduler for a minor of Kubernetes.
type minor struct {
	folder  string // in scheduler/, "" for that one itself
	version string // of Kubernetes, "" for the lab's
}

var (
	newest = minor{}
	// ganged has one more plugin, by which pods wait in Permit.
	ganged = minor{folder: "internal/gang"}
)

// schedulers are the paths of those that were built.
var schedulers = map[minor]string{}

// build builds the program, once.
func (m minor) build(ctx context.Context) (string, error) {
	if program := os.Getenv("DIVVY_E2E_SCHEDULER"); program != "" && m == newest {
		return program, nil
	}
	if program := schedulers[m]; program != "" {
		return program, nil
	}
	program, err := controlplane.BuildPlugin(ctx, programsDir, m.folder, m.version)
	if err == nil {
		schedulers[m] = program
	}
	return program, err
}

// pluginOptions say how a divvy-scheduler is started. The zero value is one of the newest minor,
// without an election.
type pluginOptions struct {
	name    string // of the process
	program minor
	// pod is the name that it takes part in an election by.
	pod string
	// kubeconfig says how it reaches the API server.
	kubeconfig string
	// profile is more of the one profile, and config more of the configuration.
	profile, config map[string]any
	// args are further flags, and kubeScheduler those of kube-scheduler.
	args, kubeScheduler []string
}

// plugin starts a divvy-scheduler, and waits until it answers. With a name of a pod it takes part in
// an election.
func (w *world) plugin(name, pod string, args ...string) *controlplane.Plugin {
	w.Helper()
	return w.startPlugin(pluginOptions{name: name, pod: pod, args: args})
}

func (w *world) startPlugin(o pluginOptions) *controlplane.Plugin {
	w.Helper()
	program, err := o.program.build(w.Context())
	if err != nil {
		w.Fatal(err)
	}
	profile := map[string]any{"schedulerName": plugged}
	maps.Copy(profile, o.profile)
	settings := map[string]any{"profiles": []any{profile}}
	maps.Copy(settings, o.config)
	p, err := w.plane.StartPlugin(w.Context(), controlplane.PluginOptions{
		Scheduler: controlplane.SchedulerOptions{
			Name: o.name, Kubeconfig: o.kubeconfig, QPS: 5000, Settings: settings, Args: o.kubeScheduler,
		},
		Program: program, Resources: []string{resource}, Pod: o.pod, Args: o.args,
	})
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() {
		if p.Running() {
			w.end(p.Process)
		} else if w.Failed() {
			w.Logf("%s:\n%s", o.name, p.LogTail(20))
		}
	})
	return p
}

// One replica packs pods, says why others wait, and makes room where the sum fits and no device does.
func TestPluginProgram(t *testing.T) {
	const nodes, devices, units = 5, 2, 8
	w := newWorld(t, simnodes.Group{Count: nodes, Cards: devices, Units: units})
	if err := w.nodes.Create(t.Context(), w.client); err != nil {
		t.Fatal(err)
	}
	p := w.plugin("plugin", "")
	w.make(plugged, "pod", nodes*devices*2, units/2)
	for device, held := range w.bound(nodes * devices * 2) {
		if held != units {
			t.Errorf("device %s holds %d of %d units", device, held, units)
		}
	}
	// One pod of each of two devices of a node ends: the sum is a device's, and no device has it.
	byDevice := map[string][]corev1.Pod{}
	for _, pod := range w.pods() {
		byDevice[pod.Spec.NodeName] = append(byDevice[pod.Spec.NodeName], pod)
	}
	var victims []corev1.Pod
	for _, pods := range byDevice {
		victims = pods
		break
	}
	ended := map[string]bool{}
	for _, pod := range victims {
		device := w.deviceOf(&pod)
		if ended[device] {
			continue
		}
		ended[device] = true
		if err := w.client.CoreV1().Pods(namespace).Delete(t.Context(), pod.Name, *metav1.NewDeleteOptions(0)); err != nil {
			t.Fatal(err)
		}
	}
	w.make(plugged, "low", 1, units) // waits: it may evict no pod
	w.eventually("the pod waits for a device", func(ctx context.Context) error {
		pod, err := w.client.CoreV1().Pods(namespace).Get(ctx, "low-0000", metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range pod.Status.Conditions {
			if c.Type == corev1.PodScheduled && strings.Contains(c.Message, "in one ") {
				return nil
			}
		}
		return fmt.Errorf("conditions: %v", pod.Status.Conditions)
	})
	before := len(w.pods())
	high := w.nodes.Pod(namespace, "high", units)
	high.Spec.SchedulerName = plugged
	w.priority(high, 1000)
	if _, err := w.client.CoreV1().Pods(namespace).Create(t.Context(), high, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	w.eventually("the pod of high priority runs", func(ctx context.Context) error {
		// No kubelet ends the victims: what is being deleted is deleted.
		for _, pod := range w.pods() {
			if pod.DeletionTimestamp != nil {
				_ = w.client.CoreV1().Pods(namespace).Delete(ctx, pod.Name, *metav1.NewDeleteOptions(0))
			}
		}
		pod, err := w.client.CoreV1().Pods(namespace).Get(ctx, "high", metav1.GetOptions{})
		if err == nil && pod.Spec.NodeName == "" {
			err = fmt.Errorf("conditions: %v", pod.Status.Conditions)
		}
		return err
	})
	w.right()
	if left := len(w.pods()); left != before {
		t.Errorf("there are %d pods, want %d: one evicted, one placed", left, before)
	}
	explain := "/gcushare-scheduler/inspect/explain/" + namespace + "/high"
	for _, route := range []string{"/version", "/gcushare-scheduler/inspect", explain} {
		response, err := http.Get(p.URL() + route)
		if err != nil {
			t.Fatal(err)
		}
		_ = response.Body.Close()
		if response.StatusCode != http.StatusOK {
			t.Errorf("%s: %s", route, response.Status)
		}
	}
}

// Where the sum of two devices is enough and neither is, kube-scheduler with the extender evicts no
// pod, and the plugin the fewest: one of higher priority rather than two of lower, unless a disruption
// budget protects it.
func TestPluginEvictsTheFewest(t *testing.T) {
	const units, asked = 16, 12
	w := newWorld(t, simnodes.Group{Count: 2, Cards: 2, Units: units})
	if err := w.nodes.Create(t.Context(), w.client); err != nil {
		t.Fatal(err)
	}
	w.plugin("plugin", "")
	pod := func(name string, node int, units accel.Units, priority int32) *corev1.Pod {
		pod := on(w.nodes.Pod(namespace, fmt.Sprint(name, "-", node), units), w.nodes.NodeName(node))
		pod.Spec.SchedulerName, pod.Labels = plugged, map[string]string{"app": pod.Name}
		return w.priority(pod, priority)
	}
	budget := &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "protects"},
		Spec: policyv1.PodDisruptionBudgetSpec{MinAvailable: ptr.To(intstr.FromInt32(1)),
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "large-1"}}},
	}
	if _, err := w.client.PolicyV1().PodDisruptionBudgets(namespace).Create(t.Context(), budget, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for node := range 2 {
		for _, p := range []*corev1.Pod{
			pod("large", node, 10, 5), pod("fills", node, 6, 4), pod("small", node, 5, 4), pod("other", node, 5, 4),
		} {
			w.create(p)
			w.isBound(p.Name)
		}
		if w.card(fmt.Sprint("small-", node)) != w.card(fmt.Sprint("other-", node)) ||
			w.card(fmt.Sprint("small-", node)) == w.card(fmt.Sprint("large-", node)) {
			t.Fatal("the pods are not on the devices that the test is about")
		}
		w.gone(fmt.Sprint("fills-", node)) // 6 units are free on each device
	}

	e := w.extender()
	stock := w.start(e, controlplane.SchedulerOptions{})
	waits := pod("waits", 0, asked, 1000)
	waits.Spec.SchedulerName = ""
	w.create(waits)
	w.unschedulable("waits-0")
	for _, p := range w.pods() {
		if p.DeletionTimestamp != nil {
			t.Errorf("kube-scheduler with the extender evicts %s", p.Name)
		}
	}
	w.gone("waits-0")
	w.end(stock.Process)

	for node, want := range [][]string{{"large-0"}, {"other-1", "small-1"}} {
		high := pod("high", node, asked, 1000)
		w.create(high)
		var victims []string
		w.eventually("pod "+high.Name+" has victims", func(ctx context.Context) error {
			pod, err := w.client.CoreV1().Pods(namespace).Get(ctx, high.Name, metav1.GetOptions{})
			if err == nil && pod.Status.NominatedNodeName == "" {
				err = fmt.Errorf("it is not nominated: %v", pod.Status.Conditions)
			}
			victims = nil
			for _, p := range w.pods() {
				if p.DeletionTimestamp != nil {
					victims = append(victims, p.Name)
				}
			}
			if err == nil && len(victims) < len(want) { // they are deleted one after the other
				err = fmt.Errorf("victims %v", victims)
			}
			return err
		})
		slices.Sort(victims)
		if !slices.Equal(victims, want) {
			t.Errorf("for %s the pods %v are evicted, want %v", high.Name, victims, want)
		}
		w.gone(victims...)
		w.isBound(high.Name)
		for _, p := range w.pods() {
			if p.DeletionTimestamp != nil {
				t.Errorf("%s is evicted as well", p.Name)
			}
		}
	}
	w.right()
}

// deviceOf is the device that a pod holds.
func (w *world) deviceOf(pod *corev1.Pod) string {
	w.Helper()
	path, err := w.plane.GrantKey()
	if err != nil {
		w.Fatal(err)
	}
	grant, err := kube.NewKeyring(path).DecodeGrant(string(pod.UID), pod.Annotations[wire.GrantAnnotation])
	if err != nil {
		w.Fatal(err)
	}
	return string(grant.Device)
}
