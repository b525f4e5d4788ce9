package extender

import (
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
	"github.com/divvy-gpu/divvy/internal/scheduler/eviction"
)

// Bounds of Eviction.
const (
	minGrace     = 30 * time.Second
	maxGrace     = 24 * time.Hour
	maxEvictions = 60
)

// Eviction is about pods that use more memory of a device than their allocation.
type Eviction struct {
	Enabled bool
	// Grace is how long such a pod is left alone, and MaxPerHour how many are evicted of a
	// node in an hour.
	Grace      time.Duration
	MaxPerHour int
	// Exempt are namespaces whose pods are never evicted; the extender's own is exempt too.
	Exempt []string
}

func (e *Eviction) addFlags(fs *pflag.FlagSet) {
	fs.BoolVar(&e.Enabled, "evict-memory-overuse", e.Enabled,
		"evict pods that use more memory of a device than their allocation; requires nodes that measure use")
	fs.DurationVar(&e.Grace, "eviction-grace-period", e.Grace,
		"how long a pod may use more memory than its allocation without interruption before it is evicted")
	fs.IntVar(&e.MaxPerHour, "eviction-max-per-hour", e.MaxPerHour, "how many pods of a node are evicted in an hour")
	fs.StringSliceVar(&e.Exempt, "eviction-exempt-namespaces", e.Exempt,
		"namespaces whose pods are never evicted, besides the extender's own (POD_NAMESPACE)")
}

func (e Eviction) validate(m *mistakes) {
	if e.Grace < minGrace || e.Grace > maxGrace {
		m.add("eviction-grace-period", fmt.Errorf("%s: must be from %s to %s", e.Grace, minGrace, maxGrace))
	}
	if e.MaxPerHour < 1 || e.MaxPerHour > maxEvictions {
		m.add("eviction-max-per-hour", fmt.Errorf("%d: must be from 1 to %d", e.MaxPerHour, maxEvictions))
	}
	for _, namespace := range e.Exempt {
		if wrong := validation.IsDNS1123Label(namespace); len(wrong) > 0 {
			m.add("eviction-exempt-namespaces", fmt.Errorf("%q: %s", namespace, wrong[0]))
		}
	}
}

func (e Eviction) settings() eviction.Settings {
	exempt := slices.Clone(e.Exempt)
	if own := os.Getenv("POD_NAMESPACE"); own != "" {
		exempt = append(exempt, own)
	}
	return eviction.Settings{Grace: e.Grace, MaxPerHour: e.MaxPerHour, Exempt: exempt}
}

// newEvictor returns what evicts pods; nil if it is not enabled.
func (p *program) newEvictor() *eviction.Evictor {
	if !p.options.Eviction.Enabled {
		return nil
	}
	e := eviction.New(eviction.Config{
		Settings: p.options.Eviction.settings(),
		Client:   p.clients.Kubernetes,
		Cluster:  cluster.Overuse{State: p.books, Ledger: p.ledger},
		Leading:  func() bool { return p.leading() && p.ready() == nil },
		Tell: func(pod accel.PodRef, kind events.Kind, key, message string) {
			p.events.Once(events.OnPod(pod.Namespace, pod.Name, pod.UID), kind, key, message)
		},
	})
	p.registry.MustRegister(e)
	return e
}
