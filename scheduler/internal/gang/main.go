// Command gang is divvy-scheduler with a further plugin, for the tests: pods of a gang wait in
// Permit until all are there, and are given up together, as with Coscheduling of
// sigs.k8s.io/scheduler-plugins.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	fwk "k8s.io/kube-scheduler/framework"
	kubescheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"

	"github.com/divvy-gpu/divvy/scheduler/app"
)

const (
	name = "Gang"
	// Labels of pods: the name of the gang, and how many pods it has.
	gangLabel, sizeLabel = "gang", "gang-size"
)

func main() { os.Exit(app.Main(kubescheduler.WithPlugin(name, newGang))) }

// gang implements fwk.PermitPlugin and fwk.ReservePlugin.
type gang struct {
	handle fwk.Handle
	wait   time.Duration
}

func newGang(_ context.Context, args runtime.Object, handle fwk.Handle) (fwk.Plugin, error) {
	unknown, ok := args.(*runtime.Unknown)
	if !ok {
		return nil, fmt.Errorf("pluginConfig of %s is a %T", name, args)
	}
	var config struct{ Seconds int }
	if err := json.Unmarshal(unknown.Raw, &config); err != nil {
		return nil, fmt.Errorf("pluginConfig of %s: %w", name, err)
	}
	return &gang{handle, time.Duration(config.Seconds) * time.Second}, nil
}

// Name implements fwk.Plugin.
func (*gang) Name() string { return name }

// Permit implements fwk.PermitPlugin.
func (g *gang) Permit(_ context.Context, _ fwk.CycleState, pod *v1.Pod, _ string) (*fwk.Status, time.Duration) {
	if pod.Labels[gangLabel] == "" {
		return nil, 0
	}
	size, err := strconv.Atoi(pod.Labels[sizeLabel])
	if err != nil {
		return fwk.AsStatus(fmt.Errorf("label %s: %w", sizeLabel, err)), 0
	}
	others := g.others(pod)
	if len(others)+1 < size {
		return fwk.NewStatus(fwk.Wait), g.wait
	}
	for _, other := range others {
		other.Allow(name)
	}
	return nil, 0
}

// Reserve implements fwk.ReservePlugin.
func (*gang) Reserve(context.Context, fwk.CycleState, *v1.Pod, string) *fwk.Status { return nil }

// Unreserve implements fwk.ReservePlugin: without one of them the others wait in vain.
func (g *gang) Unreserve(_ context.Context, _ fwk.CycleState, pod *v1.Pod, _ string) {
	for _, other := range g.others(pod) {
		other.Reject(name, "a pod of the gang was given up")
	}
}

// others are the pods of the same gang that wait.
func (g *gang) others(pod *v1.Pod) (others []fwk.WaitingPod) {
	g.handle.IterateOverWaitingPods(func(w fwk.WaitingPod) {
		if p := w.GetPod(); p.UID != pod.UID && pod.Labels[gangLabel] != "" && p.Labels[gangLabel] == pod.Labels[gangLabel] {
			others = append(others, w)
		}
	})
	return others
}
