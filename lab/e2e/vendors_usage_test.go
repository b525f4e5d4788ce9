//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
	"github.com/divvy-gpu/divvy/lab/internal/demos"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// usageValues are those with which use is measured.
const usageValues = "node.usage.enabled=true,node.usage.interval=5s,node.usage.metrics=container"

// cardOf returns the index of a device's card.
func cardOf(h *vendorsim.Topology, id accel.DeviceID) int {
	// Enflame's backend puts a prefix before the UUID.
	return slices.IndexFunc(h.Cards, func(c vendorsim.Card) bool { return strings.HasSuffix(string(id), c.UUID) })
}

// TestMeasuredUse: the processes of pods, of a pod that requests nothing and of the host
// use devices of three vendors, and inspect and the metrics say whose they are.
func TestMeasuredUse(t *testing.T) {
	ctx := beginMixed(t)
	withValues(t, ctx, usageValues)

	start(t, asking("gpu", demos.GPUMemory, 4), asking("ix", demos.IXMemory, 4), asking("gcu", demos.GCUMemory, 4),
		lab.Pods.New("stranger", testenv.Container("app", 0)))
	const mib = 1 << 20
	on := measured(t, map[string]uint64{"gpu": 0, "ix": 0, "gcu": 0})
	hardwareWith(t, ctx, func(h *vendorsim.Topology) {
		card := func(pod string) int { return cardOf(h, on[pod]) }
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

	must(t, lab.Pods.Delete(ctx, "ix"))
	must(t, poll.Until(ctx, podTimeout, "the series to end with the container", func(ctx context.Context) error {
		metrics, err := testenv.Fetch(ctx, "http://"+pod.Status.PodIP+":9400/metrics")
		if err == nil && strings.Contains(string(metrics), `pod="ix"`) {
			err = errors.New("they are there")
		}
		return err
	}))
}

// TestOveruse: a container that uses more than its allocation is reported, its units are
// withheld, and both end with it.
func TestOveruse(t *testing.T) {
	ctx := beginMixed(t)
	withValues(t, ctx, usageValues+",node.usage.overuse.withhold=true,node.usage.overuse.contextAllowanceMiB.iluvatar=0")
	start(t, asking("ix", demos.IXMemory, 4))
	on := measured(t, map[string]uint64{"ix": 0})
	hardwareWith(t, ctx, func(h *vendorsim.Topology) {
		h.Processes = []vendorsim.Process{{Card: cardOf(h, on["ix"]), PID: pidOf(t, "ix"), MemoryMiB: 5 << 10}}
	})
	ix, err := lab.Pods.API.Get(ctx, "ix", metav1.GetOptions{})
	must(t, err)
	_, err = lab.Pods.WaitEvent(ctx, podTimeout, ix, "its allocation of iluvatar.com/gpu-memory is 4096 MiB")
	must(t, err)
	overuse(t, corev1.ConditionTrue, "/ix/app on iluvatar device ")
	withheld(t, 1)

	must(t, lab.Pods.Delete(ctx, "ix"))
	overuse(t, corev1.ConditionFalse, "no container")
	withheld(t, 0)
}

// TestMemoryOveruse is the part of `make demo-limits` about a vendor without limits: of two
// pods on one card, the one that uses more than its allocation is evicted, once its budget
// allows it.
func TestMemoryOveruse(t *testing.T) {
	ctx := beginMixed(t)
	withValues(t, ctx, demos.OveruseValues)
	s := demos.New("overuse", lab, t.Output())
	must(t, errors.Join(s.Overuse(ctx), s.Checks.Err()))
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
	_, err := lab.Node.WaitCondition(t.Context(), podTimeout, kind, status, message)
	must(t, err)
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
func measured(t *testing.T, want map[string]uint64) map[string]accel.DeviceID {
	t.Helper()
	on, err := lab.WaitUsed(t.Context(), podTimeout, want)
	must(t, err)
	return on
}

// pidOf returns the first process of a pod's container.
func pidOf(t *testing.T, name string) int {
	t.Helper()
	pid, err := lab.Pods.PID(t.Context(), name)
	must(t, err)
	return pid
}
