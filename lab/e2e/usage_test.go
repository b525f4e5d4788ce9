//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
	"github.com/divvy-gpu/divvy/lab/internal/demos"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// TestMeasuredUse: the processes of pods, of a pod that requests nothing and of the host
// use devices of three vendors, and inspect and the metrics say whose they are.
func TestMeasuredUse(t *testing.T) {
	ctx := beginMixed(t)
	withValues(t, ctx, "node.usage.enabled=true,node.usage.interval=5s,node.usage.metrics=container,"+
		"node.usage.overuse.withhold=true,node.usage.overuse.contextAllowanceMiB.iluvatar=0")

	start(t, asking("gpu", demos.GPUMemory, 4), asking("ix", demos.IXMemory, 4), asking("gcu", demos.GCUMemory, 4),
		lab.Pods.New("stranger", testenv.Container("app", 0)))
	const mib = 1 << 20
	on := measured(t, map[string]uint64{"gpu": 0, "ix": 0, "gcu": 0})
	hardwareWith(t, ctx, func(h *vendorsim.Topology) {
		card := func(pod string) int {
			// Enflame's backend puts a prefix before the UUID.
			return slices.IndexFunc(h.Cards, func(c vendorsim.Card) bool { return strings.HasSuffix(string(on[pod]), c.UUID) })
		}
		h.Processes = []vendorsim.Process{
			{Card: card("gpu"), PID: pidOf(t, "gpu"), MemoryMiB: 3 << 10, Utilization: 40},
			{Card: card("gpu"), PID: os.Getpid(), MemoryMiB: 100},
			{Card: card("ix"), PID: pidOf(t, "ix"), MemoryMiB: 5 << 10},
			{Card: card("gcu"), PID: pidOf(t, "gcu"), MemoryMiB: 1 << 10},
			{Card: card("gcu"), PID: pidOf(t, "stranger"), MemoryMiB: 200},
		}
	})
	measured(t, map[string]uint64{
		"gpu": 3 << 10 * mib, "nvidia system": 100 * mib, "ix": 5 << 10 * mib, "gcu": 1 << 10 * mib, "enflame foreign": 200 * mib,
	})
	table, err := lab.CLI.Kubectl(ctx, "divvy", "inspect", "--usage", layout.NodeName)
	must(t, err)
	t.Log(table)
	for _, want := range []string{"3.00 GiB", "] 75%", "40%", "] 125% !", "] 25%"} {
		if !strings.Contains(table, want) {
			t.Errorf("kubectl divvy inspect --usage does not show %q:\n%s", want, table)
		}
	}
	pod, err := lab.Divvy.Pod(ctx, testenv.NodeDaemon)
	must(t, err)
	metrics, err := testenv.Fetch(ctx, "http://"+pod.Status.PodIP+":9400/metrics")
	must(t, err)
	for _, want := range []string{`divvy_node_container_memory_used_bytes{container="app"`, `kind="foreign"`, `kind="system"`} {
		if !strings.Contains(string(metrics), want) {
			t.Errorf("there is no metric %s", want)
		}
	}
	if strings.Contains(string(metrics), `pod="stranger"`) {
		t.Error("a pod that holds nothing has a series")
	}

	// It uses 5 GiB of 4.
	ix, err := lab.Pods.API.Get(ctx, "ix", metav1.GetOptions{})
	must(t, err)
	_, err = lab.Pods.WaitEvent(ctx, podTimeout, ix, "its allocation of iluvatar.com/gpu-memory is 4096 MiB")
	must(t, err)
	overuse(t, corev1.ConditionTrue, "/ix/app on iluvatar device ")
	withheld(t, 1)

	must(t, lab.Pods.Delete(ctx, "ix"))
	must(t, poll.Until(ctx, podTimeout, "the series to end with the container", func(ctx context.Context) error {
		metrics, err := testenv.Fetch(ctx, "http://"+pod.Status.PodIP+":9400/metrics")
		if err == nil && strings.Contains(string(metrics), `pod="ix"`) {
			err = errors.New("they are there")
		}
		return err
	}))
	overuse(t, corev1.ConditionFalse, "no container")
	withheld(t, 0)
}

// TestMemoryOveruse: of two pods on one card, the one that uses more than its allocation is
// evicted, once its budget allows it.
func TestMemoryOveruse(t *testing.T) {
	ctx := beginMixed(t)
	withValues(t, ctx, "node.usage.enabled=true,node.usage.interval=5s,"+
		"node.usage.overuse.contextAllowanceMiB.enflame=0,extender.eviction.enabled=true,extender.eviction.gracePeriod=30s")
	budgets := lab.Client.PolicyV1().PodDisruptionBudgets(namespace)
	budget := &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Name: "greedy"}, Spec: policyv1.PodDisruptionBudgetSpec{
		MinAvailable: ptr.To(intstr.FromInt32(1)), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"budget": "greedy"}}}}
	_, err := budgets.Create(ctx, budget, metav1.CreateOptions{})
	must(t, err)
	spare := func(ctx context.Context) error {
		err := budgets.Delete(ctx, "greedy", metav1.DeleteOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return err
	}
	t.Cleanup(func() { must(t, spare(context.WithoutCancel(ctx))) })

	greedy := asking("greedy", demos.GCUMemory, 4)
	greedy.Labels = map[string]string{"budget": "greedy"}
	start(t, greedy, asking("modest", demos.GCUMemory, 4))
	on := measured(t, map[string]uint64{"greedy": 0, "modest": 0})
	if on["greedy"] != on["modest"] {
		t.Fatalf("the pods are on different cards: %v", on)
	}
	hardwareWith(t, ctx, func(h *vendorsim.Topology) {
		card := slices.IndexFunc(h.Cards, func(c vendorsim.Card) bool { return strings.HasSuffix(string(on["greedy"]), c.UUID) })
		h.Processes = []vendorsim.Process{
			{Card: card, PID: pidOf(t, "greedy"), MemoryMiB: 6 << 10}, {Card: card, PID: pidOf(t, "modest"), MemoryMiB: 4 << 10},
		}
	})
	before := map[string]*corev1.Pod{}
	for _, name := range []string{"greedy", "modest"} {
		before[name], err = lab.Pods.API.Get(ctx, name, metav1.GetOptions{})
		must(t, err)
	}
	_, err = lab.Pods.WaitEvent(ctx, podTimeout, before["greedy"], "its allocation of enflame.com/gcu-memory is 4096 MiB")
	must(t, err)
	overuse(t, corev1.ConditionTrue, "/greedy/app on enflame device ")
	_, err = lab.Pods.WaitEvent(ctx, podTimeout, before["greedy"], "PodDisruptionBudget")
	must(t, err)
	if now, err := lab.Pods.API.Get(ctx, "greedy", metav1.GetOptions{}); err != nil || now.DeletionTimestamp != nil {
		t.Fatalf("the pod is evicted against its budget: %v", err)
	}
	must(t, spare(ctx))
	must(t, lab.Pods.WaitGone(ctx, "greedy"))
	overuse(t, corev1.ConditionFalse, "no container")
	modest, err := lab.Pods.API.Get(ctx, "modest", metav1.GetOptions{})
	must(t, err)
	if modest.UID != before["modest"].UID || modest.DeletionTimestamp != nil || modest.Status.Phase != corev1.PodRunning {
		t.Errorf("the pod within its allocation is not as before: %s", testenv.Describe(modest))
	}
}

// withValues changes values of the chart for one test on the cards of mixed.
func withValues(t *testing.T, ctx context.Context, values string) {
	t.Helper()
	t.Cleanup(func() {
		ctx := context.WithoutCancel(ctx)
		must(t, errors.Join(reconfigure(ctx, mixed), lab.Divvy.Wait(ctx, settingTimeout)))
	})
	must(t, reconfigure(ctx, mixed, "--set", values))
	must(t, lab.Divvy.Wait(ctx, settingTimeout))
}

// overuse waits for the node's condition, and a part of its message.
func overuse(t *testing.T, status corev1.ConditionStatus, message string) {
	t.Helper()
	condition(t, wire.OveruseCondition, status, message)
}

// condition waits for a condition of the node, and a part of its message.
func condition(t *testing.T, kind corev1.NodeConditionType, status corev1.ConditionStatus, message string) {
	t.Helper()
	must(t, poll.Until(t.Context(), podTimeout, fmt.Sprintf("condition %s to be %s", kind, status), func(ctx context.Context) error {
		node, err := lab.Node.Get(ctx)
		if err != nil {
			return err
		}
		for _, c := range node.Status.Conditions {
			if c.Type == kind && c.Status == status && strings.Contains(c.Message, message) {
				return nil
			}
		}
		return fmt.Errorf("conditions: %+v", node.Status.Conditions)
	}))
}

// withheld waits until the inventory withholds units of memory of Iluvatar's devices.
func withheld(t *testing.T, want accel.Units) {
	t.Helper()
	must(t, poll.Until(t.Context(), podTimeout, "units to be withheld", func(ctx context.Context) error {
		shares, err := lab.Node.Published(ctx, demos.IXMemory)
		if err != nil {
			return err
		}
		var sum accel.Units
		for _, s := range shares {
			sum += s.Withheld
		}
		if sum != want {
			return fmt.Errorf("%d are, want %d", sum, want)
		}
		return nil
	}))
}

// measured waits until inspect reports that pods, and processes in none, use so many bytes,
// and returns the devices that pods hold something of.
func measured(t *testing.T, want map[string]uint64) (on map[string]accel.DeviceID) {
	t.Helper()
	must(t, poll.Until(t.Context(), podTimeout, "measured use to be reported", func(ctx context.Context) error {
		text, err := lab.CLI.Kubectl(ctx, "divvy", "inspect", "--usage", layout.NodeName, "--output", "json")
		if err != nil {
			return err
		}
		var answer struct{ Reports []wire.UsageReport }
		if err := json.Unmarshal([]byte(text), &answer); err != nil || len(answer.Reports) != 1 {
			return fmt.Errorf("want the report of one node (%w):\n%s", err, text)
		}
		used := map[string]uint64{}
		on = map[string]accel.DeviceID{}
		for _, d := range answer.Reports[0].Devices {
			used[d.Vendor+" system"] += d.SystemBytes
			used[d.Vendor+" foreign"] += d.ForeignBytes
			for _, c := range d.Containers {
				if c.UsedBytes != nil {
					used[c.Pod] += *c.UsedBytes
					on[c.Pod] = d.Device
				}
			}
		}
		for who, bytes := range want {
			if got, known := used[who]; !known || got != bytes {
				err = errors.Join(err, fmt.Errorf("%s uses %d bytes, want %d:\n%s", who, got, bytes, text))
			}
		}
		return err
	}))
	return on
}

// pidOf returns the first process of a pod's container.
func pidOf(t *testing.T, name string) int {
	t.Helper()
	pod, err := lab.Pods.API.Get(t.Context(), name, metav1.GetOptions{})
	must(t, err)
	pid, err := testenv.ContainerPID(pod.Status.ContainerStatuses[0].ContainerID)
	must(t, err)
	return pid
}
