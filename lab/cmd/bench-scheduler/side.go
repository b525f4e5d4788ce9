package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/divvy-gpu/divvy/lab/internal/controlplane"
)

// door is how a scheduler knows of devices.
type door string

const (
	// plain is kube-scheduler that counts the resource by itself, as any extended resource.
	plain door = "plain"
	// extender is kube-scheduler that calls Divvy's extender.
	extender door = "extender"
	// plugin is divvy-scheduler.
	plugin door = "plugin"
	// before is the extender of an earlier commit.
	before door = "before"
)

// side is one of those that are compared.
type side struct {
	door   door
	policy string // "" for plain
}

func (s side) String() string {
	if s.policy == "" {
		return string(s.door)
	}
	return string(s.door) + " " + s.policy
}

// sides are those of one round, in the order of the first one.
func (o *options) sides() []side {
	sides, doors := []side{{door: plain}}, []door{extender, plugin}
	switch {
	case o.before != "":
		sides, doors = nil, []door{before, extender}
	case o.claims():
		doors = []door{plugin}
	}
	for _, policy := range o.policies {
		for _, door := range doors {
			sides = append(sides, side{door, policy})
		}
	}
	return sides
}

// claims is true where pods have claims.
func (o *options) claims() bool { return len(o.scenarios) > 0 && o.scenarios[0].claims }

// reference is the side with which another is compared.
func (o *options) reference(s side) side {
	if o.before != "" {
		return side{before, s.policy}
	}
	return side{door: plain}
}

// order is that of one round: each begins with another side.
func order(sides []side, round int) []side {
	first := round % len(sides)
	return slices.Concat(sides[first:], sides[:first])
}

// Names of programs where there are several by name.
const (
	extenderName = "divvy-extender"
	pluginName   = "divvy-scheduler"
	benchName    = "this program"
)

// running is a scheduler, with all that its side has besides.
type running struct {
	scheduler *controlplane.Scheduler
	pids      map[string]int
	// divvy returns Divvy's metrics, and divvyName is the program that has them; nil and "" without
	// Divvy.
	divvy     func(context.Context) (string, error)
	divvyName string
	stop      func() error
}

// start starts a side under a name that pods request.
func (b *bench) start(ctx context.Context, side side, name string) (r running, err error) {
	r = running{stop: func() error { return nil }, pids: map[string]int{
		"etcd": b.plane.Etcd.PID(), "kube-apiserver": b.plane.APIServer.PID(), benchName: os.Getpid(),
	}}
	if b.controller != nil {
		r.pids[b.controller.Name()] = b.controller.PID()
	}
	o := controlplane.SchedulerOptions{Name: name, QPS: schedulerQPS, Settings: b.options.schedulerSettings(name)}
	args := append([]string{"--metrics-devices=false", "--policy=" + side.policy}, b.options.flags...)
	switch side.door {
	case plugin:
		p, err := b.plane.StartPlugin(ctx, controlplane.PluginOptions{
			Scheduler: o, Program: b.plugin, Resources: []string{resource}, Args: args,
		})
		if err != nil {
			return r, err
		}
		r.scheduler, r.divvy, r.divvyName = &p.Scheduler, p.DivvyMetrics, pluginName
		r.pids[pluginName] = p.PID()
		r.stop = func() error { return p.Stop(stopGrace) }
		return r, nil
	case extender, before:
		program := b.programs.Control
		if side.door == before {
			program = b.options.before
		}
		e, err := b.plane.StartExtender(ctx, controlplane.ExtenderOptions{
			Name: "extender-" + name, Program: program, Resources: []string{resource}, Args: args,
		})
		if err != nil {
			return r, err
		}
		o.Extender, r.divvy, r.divvyName = &e.Entry, e.Metrics, extenderName
		r.pids[extenderName] = e.PID()
		r.stop = func() error { return e.Stop(stopGrace) }
	}
	if r.scheduler, err = b.plane.StartScheduler(ctx, b.programs.Kubernetes, o); err != nil {
		return r, errors.Join(err, r.stop())
	}
	r.pids["kube-scheduler"] = r.scheduler.PID()
	rest := r.stop
	r.stop = func() error { return errors.Join(r.scheduler.Stop(stopGrace), rest()) }
	return r, nil
}

// schedulerSettings are fields of the configuration of the scheduler that pods request
// by this name.
func (o *options) schedulerSettings(name string) map[string]any {
	if !o.batching {
		return nil
	}
	return map[string]any{"profiles": []any{map[string]any{
		"schedulerName": name,
		"pluginConfig": []any{map[string]any{"name": "PodTopologySpread", "args": map[string]any{
			"apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "PodTopologySpreadArgs", "defaultingType": "List",
		}}},
	}}}
}

// fileName is a name for processes and files of a phase.
func (s side) fileName(scenario string, round int) string {
	if s.policy == "" {
		return fmt.Sprintf("%s-%s-%d", s.door, scenario, round)
	}
	return fmt.Sprintf("%s-%s-%s-%d", s.door, s.policy, scenario, round)
}
