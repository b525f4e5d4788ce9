package dra

import (
	"context"
	"slices"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// The feature gates whose fields are published. An API server drops the fields of one that
// is off.
const (
	gateCounters = "DRAPartitionableDevices"
	gateTaints   = "DRADeviceTaints"
	gateShares   = "DRAConsumableCapacity"
)

// gates are what is known of the fields that API servers keep of slices. It is safe for concurrent use.
type gates struct {
	client             kubernetes.Interface
	vendor, node, pool string

	mu     sync.Mutex // guards what follows
	stored Stored
	// off are the gates whose fields an API server drops.
	off []string
	// at is when the API server is asked again.
	at time.Time
}

// probe finds out what the API server keeps of slices, by a slice that it does not
// create. Several API servers may differ: HandleError hears of one that drops more. It is
// false if there is no answer.
func (g *gates) probe(ctx context.Context) bool {
	log := klog.FromContext(ctx)
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	kept, err := g.client.ResourceV1().ResourceSlices().Create(ctx, g.sample(), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	if err != nil {
		log.Error(err, "Could not find out which fields of ResourceSlices the API server keeps; publishing one form of each device")
		return false
	}
	off := dropped(kept)
	now := Stored{Counters: !slices.Contains(off, gateCounters), Taints: !slices.Contains(off, gateTaints),
		Shares: !slices.Contains(off, gateShares)}
	g.mu.Lock()
	before := g.stored
	g.stored, g.off = now, off
	g.mu.Unlock()
	if now != before {
		log.Info("The fields of ResourceSlices that the API server drops have changed; publishing what is safe without them",
			"featureGates", off)
	}
	return true
}

// probeIfDue is probe at its times; it is false without an answer.
func (g *gates) probeIfDue(ctx context.Context) bool {
	g.mu.Lock()
	due := !time.Now().Before(g.at)
	if due {
		g.at = time.Now().Add(probeInterval)
	}
	g.mu.Unlock()
	if !due || !g.probe(ctx) {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.at = time.Now().Add(reprobeInterval)
	return true
}

// again makes the next probeIfDue due: the cluster may be another version now.
func (g *gates) again() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.at = time.Time{}
}

// sample is a slice with all fields that depend on feature gates.
func (g *gates) sample() *resourceapi.ResourceSlice {
	one := *resource.NewQuantity(1, resource.DecimalSI)
	return &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "probe-" + wire.Driver(g.vendor) + "-"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: wire.Driver(g.vendor), NodeName: &g.node, Pool: resourceapi.ResourcePool{Name: g.pool, ResourceSliceCount: 1},
			Devices: []resourceapi.Device{{
				Name: "probe", AllowMultipleAllocations: new(true),
				Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{wire.SlotsCapacity: shared(2, 1, 1, resource.DecimalSI)},
				Taints:   []resourceapi.DeviceTaint{{Key: InUseTaint, Effect: resourceapi.DeviceTaintEffectNoSchedule}},
				ConsumesCounters: []resourceapi.DeviceCounterConsumption{{CounterSet: "probe",
					Counters: map[string]resourceapi.Counter{"chip0": {Value: one}}}},
			}},
		},
	}
}

// dropped returns the gates whose fields a stored sample does not have.
func dropped(kept *resourceapi.ResourceSlice) []string {
	var off []string
	if len(kept.Spec.Devices) != 1 {
		return []string{gateCounters, gateTaints, gateShares}
	}
	d := &kept.Spec.Devices[0]
	if len(d.ConsumesCounters) == 0 {
		off = append(off, gateCounters)
	}
	if len(d.Taints) == 0 {
		off = append(off, gateTaints)
	}
	if d.AllowMultipleAllocations == nil {
		off = append(off, gateShares)
	}
	return off
}

// lose notes that an API server drops the fields of gates. It reports whether that
// changes what may be published.
func (g *gates) lose(names ...string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	before := g.stored
	g.stored.Counters = g.stored.Counters && !slices.Contains(names, gateCounters)
	g.stored.Taints = g.stored.Taints && !slices.Contains(names, gateTaints)
	g.stored.Shares = g.stored.Shares && !slices.Contains(names, gateShares)
	g.off = slices.Compact(slices.Sorted(slices.Values(slices.Concat(g.off, names))))
	return g.stored != before
}

// missing returns the gates whose fields an API server drops.
func (g *gates) missing() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.off
}

// keeps returns what may be published, and when the API server is to be asked again.
func (g *gates) keeps() (Stored, time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.stored, g.at
}
