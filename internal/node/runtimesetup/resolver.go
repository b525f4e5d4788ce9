package runtimesetup

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"

	"k8s.io/klog/v2"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// Vendor is the vendor whose devices reach containers in different ways, as the configuration
// names it.
const Vendor = "nvidia"

// Report is what was found on the node, and what follows from it.
type Report struct {
	// Injection is how containers get their GPUs, and Pinned is true if the configuration says
	// so. Detected is what would be used otherwise.
	Injection []config.Injection
	Pinned    bool
	Detected  Decision
	Findings  []wire.SetupFinding
}

// Published returns the report as the node's object has it, nil for nil.
func (r *Report) Published() *wire.NodeSetup {
	if r == nil {
		return nil
	}
	s := &wire.NodeSetup{Pinned: r.Pinned, Detected: string(r.Detected.Injection), Why: r.Detected.Why, Findings: r.Findings}
	for _, way := range r.Injection {
		s.Injection = append(s.Injection, string(way))
	}
	return s
}

// String returns the report as a line for people, "" for nil.
func (r *Report) String() string {
	switch {
	case r == nil:
		return ""
	case r.Pinned:
		return fmt.Sprintf("%s devices reach containers by %s, as configured; the node calls for %s: %s", Vendor, words(r.Injection),
			r.Detected.Injection, r.Detected.Why)
	}
	return fmt.Sprintf("%s devices reach containers by %s: %s", Vendor, words(r.Injection), r.Detected.Why)
}

func words(ways []config.Injection) string {
	var out []string
	for _, way := range ways {
		out = append(out, string(way))
	}
	return strings.Join(out, ", ")
}

// Resolver replaces the injection "auto" of a configuration by the one that the host's files call
// for, and remembers what it found. It is safe for concurrent use; the zero value has found
// nothing.
type Resolver struct {
	mu   sync.Mutex // guards what follows
	last *Report    // nil for configurations without devices of the vendor
}

// Resolve returns the configuration with "auto" replaced. It reads the host's files each time,
// and logs what it found when that differs from the last time. runtime is the container runtime as
// the node reports it, such as "containerd://2.1.4", or "".
func (r *Resolver) Resolve(ctx context.Context, c config.NodeConfig, runtime string) config.NodeConfig {
	offered := slices.ContainsFunc(c.Resources, func(one config.Resource) bool { return one.Vendor == Vendor })
	if !offered {
		r.note(nil)
		return c
	}
	host := Host(c.DriverRoot)
	facts := Read(host, c.Vendors[Vendor].CDIHookPath, runtime)
	now := Report{Injection: c.Vendors[Vendor].Injection, Detected: Decide(facts), Findings: Findings(host, facts)}
	if len(now.Injection) == 0 {
		now.Injection = []config.Injection{c.Injection}
	}
	now.Pinned = !slices.Contains(now.Injection, config.InjectAuto)
	if !now.Pinned {
		now.Detected = now.Detected.after(r.Report())
		now.Injection = []config.Injection{now.Detected.Injection}
		c = c.WithInjection(Vendor, now.Injection)
	}
	if r.note(&now) {
		log := klog.FromContext(ctx)
		log.Info("How containers get NVIDIA's GPUs", "injection", now.Injection, "pinned", now.Pinned,
			"detected", now.Detected.Injection, "because", now.Detected.Why)
		for _, f := range now.Findings {
			log.Info("Found on the node", "kind", f.Kind, "what", f.What)
		}
	}
	return c
}

// note keeps a report and returns whether it differs from the one before.
func (r *Resolver) note(now *Report) (changed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	changed = !reflect.DeepEqual(r.last, now)
	r.last = now
	return changed
}

// Report returns what was found last, nil if no devices of the vendor are offered.
func (r *Resolver) Report() *Report {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.last
}
