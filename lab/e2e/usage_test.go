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

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

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
	t.Cleanup(func() {
		ctx := context.WithoutCancel(ctx)
		must(t, errors.Join(reconfigure(ctx, mixed), lab.Divvy.Wait(ctx, settingTimeout)))
	})
	must(t, reconfigure(ctx, mixed, "--set", "node.usage.enabled=true,node.usage.interval=5s,node.usage.metrics=container"))
	must(t, lab.Divvy.Wait(ctx, settingTimeout))

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

	must(t, lab.Pods.Delete(ctx, "ix"))
	must(t, poll.Until(ctx, podTimeout, "the series to end with the container", func(ctx context.Context) error {
		metrics, err := testenv.Fetch(ctx, "http://"+pod.Status.PodIP+":9400/metrics")
		if err == nil && strings.Contains(string(metrics), `pod="ix"`) {
			err = errors.New("they are there")
		}
		return err
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
