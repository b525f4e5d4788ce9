// Package poolplugin offers units of GPUs in a remote pool to kubelet.
package poolplugin

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/deviceplugin"
	"github.com/divvy-gpu/divvy/internal/platform/limit"
	"github.com/divvy-gpu/divvy/internal/platform/metrics"
	"github.com/divvy-gpu/divvy/internal/platform/serve"
)

// Options are what is offered, and where.
type Options struct {
	// Resource is the extended resource that is offered, in Units.
	Resource string
	Units    int
	// Socket is the file name of the plugin's socket, in the folder
	// device-plugins below KubeletDir.
	Socket, KubeletDir string
	// Listen is the address of probes and metrics.
	Listen string
}

// Folder is kubelet's device-plugins folder.
func (o Options) Folder() string { return filepath.Join(o.KubeletDir, "device-plugins") }

// Run serves kubelet, probes and metrics until ctx ends or one of them fails.
func Run(ctx context.Context, o Options) error {
	units := poolUnits{count: o.Units}
	server := deviceplugin.NewServer(o.Folder(), o.Socket, accel.Resource(o.Resource), units)
	if err := server.SetUnits(units.list()); err != nil {
		return err
	}
	limits, registry := limit.New(limit.Config{}), metrics.Registry(metrics.PoolNode, nil)
	registry.MustRegister(
		limits,
		metrics.PoolUnits.NewGaugeFunc(nil, func() float64 { return float64(o.Units) }),
		metrics.PoolRegistrations.NewCounterFunc(nil, func() float64 { return float64(server.Registrations()) }),
		metrics.PoolRegistered.NewGaugeFunc(nil, func() float64 { return metrics.Bool(server.Ready() == nil) }),
	)
	return serve.Program{
		Parts: []func(context.Context) error{server.Run},
		Servers: []serve.Server{{
			Name: serve.Probes, Address: o.Listen, For: "probes and metrics",
			HTTP: serve.NewServer(serve.NewProbes(server.Alive, server.Ready, registry)),
		}},
		Limits: limits,
		Drain:  time.Second,
	}.Run(ctx)
}

// poolUnits are the units "0", "1" and so on. No unit is better than another, and
// a container needs nothing for having one: the mutating webhook has put the
// client into its pod.
type poolUnits struct{ count int }

// list returns the units as kubelet is told of them.
func (u poolUnits) list() []deviceplugin.Unit {
	out := make([]deviceplugin.Unit, u.count)
	for i := range out {
		out[i].ID = strconv.Itoa(i)
	}
	return out
}

// set returns the ids as a set, or an error when one of them is no unit or comes
// twice.
func (u poolUnits) set(ids []string) (map[string]bool, error) {
	out := make(map[string]bool, len(ids))
	for _, id := range ids {
		n, err := strconv.Atoi(id)
		if err != nil || n < 0 || n >= u.count || id != strconv.Itoa(n) {
			return nil, fmt.Errorf("%q is none of the units 0 to %d", id, u.count-1)
		}
		if out[id] {
			return nil, fmt.Errorf("unit %q is named twice", id)
		}
		out[id] = true
	}
	return out, nil
}

// Prefer implements deviceplugin.Allocator.
func (u poolUnits) Prefer(_ context.Context, available, must []string, size int) ([]string, error) {
	taken, err := u.set(must)
	if err != nil {
		return nil, err
	}
	if _, err := u.set(available); err != nil {
		return nil, err
	}
	out := slices.Clone(must)
	for _, id := range available {
		if len(out) >= size {
			break
		}
		if !taken[id] {
			out = append(out, id)
		}
	}
	if len(out) != size {
		return nil, fmt.Errorf("%d units are asked for, %d must be among them, and %d are free", size, len(must), len(available))
	}
	return out, nil
}

// Allocate implements deviceplugin.Allocator.
func (u poolUnits) Allocate(_ context.Context, ids []string) (*pluginapi.ContainerAllocateResponse, error) {
	if _, err := u.set(ids); err != nil {
		return nil, err
	}
	return &pluginapi.ContainerAllocateResponse{}, nil
}
