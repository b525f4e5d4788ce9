package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/limits"
	"github.com/divvy-gpu/divvy/internal/node/mps"
	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/platform/logging"
	defs "github.com/divvy-gpu/divvy/internal/platform/metrics"
)

// mpsWatch tells the service of MPS in each pass which devices it is to serve, and finds out
// whether it does. All belongs to the goroutine of run but the desk.
type mpsWatch struct {
	desk *mpsDesk
	// parts are those of all resources.
	parts       []*pool
	discoveries *discoveries
	records     *records
	// dir is mps.Dir as this process sees it, procRoot the host's /proc and cgroupRoot its control
	// groups. driverRoot is on the host.
	dir, procRoot, cgroupRoot, driverRoot string
	lost                                  *prometheus.CounterVec
	found                                 func() // is called after each pass
	node                                  func(events.Kind, string)
	now                                   func() time.Time

	watch     limits.Watch
	strangers map[accel.DeviceID][]int
	logged    logging.Changes
}

// newMPSWatch makes the goroutine's state for an agent, whose resources are known; nil where no
// resource needs MPS. limited may be nil.
func newMPSWatch(ctx context.Context, a *Agent, limited *limitWatch) *mpsWatch {
	w := &mpsWatch{desk: a.cdi.mps, parts: slices.Collect(a.offerings.parts(func(*offering, *pool) bool { return true })),
		discoveries: a.discoveries, records: a.records, dir: filepath.Join(a.o.Config.DriverRoot, mps.Dir),
		procRoot: a.o.Limits.procRoot(a.o.Config.DriverRoot), cgroupRoot: a.o.Limits.cgroupRoot(a.o.Config.DriverRoot), driverRoot: "/",
		found: a.signals.wake.raise, node: a.tell, now: time.Now, strangers: map[accel.DeviceID][]int{}}
	if !slices.ContainsFunc(w.parts, w.desk.proves) {
		if before, err := mps.ReadWish(w.dir); err == nil && len(before.Devices) > 0 {
			if err := mps.WriteWish(w.dir, mps.Wish{DriverRoot: before.DriverRoot}); err != nil {
				klog.FromContext(ctx).Error(err, "Could not record that no device needs MPS any more")
			}
		}
		return nil
	}
	for _, p := range w.parts {
		if w.desk.proves(p) {
			w.driverRoot = cmp.Or(a.o.Config.Vendors[p.config.Vendor].DriverRoot, "/")
		}
	}
	if limited != nil {
		w.lost = limited.lost
		return w
	}
	w.lost = defs.NodeIsolationLost.NewCounters()
	a.metrics.register(w.lost)
	return w
}

// run makes passes until ctx ends.
func (w *mpsWatch) run(ctx context.Context) {
	w.desk.passes(ctx, w.discoveries, w.records, w.parts, w.now, w.pass)
}

// pass examines all devices, and reports what has changed.
func (w *mpsWatch) pass(ctx context.Context) {
	wish := mps.Wish{DriverRoot: w.driverRoot}
	pools := map[accel.DeviceID]*pool{}
	for _, p := range w.parts {
		if !w.desk.proves(p) {
			continue
		}
		for _, s := range see(p, (*alloc.Engine).Inventory).Shares {
			if pools[s.ID] = p; p.limit != nil { // otherwise its containers are no clients, and could not use it
				wish.Devices = append(wish.Devices, s.ID)
			}
		}
	}
	slices.Sort(wish.Devices)
	var problem error
	if !slices.ContainsFunc(w.parts, func(p *pool) bool { return w.desk.proves(p) && !p.status().Known }) {
		problem = w.ask(wish) // what is not known yet is no reason to stop a daemon
	}
	report, err := mps.ReadReport(w.dir, w.now())
	problem = cmp.Or(problem, err)
	w.logged.Log(ctx, problem, "MPS does not serve the node")
	losses := map[accel.DeviceID][]limits.Loss{}
	for id, p := range pools {
		strangers, looked := w.strangers[id]
		one := mps.Device{ID: id, Problem: cmp.Or(w.obstacle(id, p), problem), Report: report.Devices[id],
			Strangers: strangers, First: !looked}
		one.Processes, one.Unlisted = w.processes(ctx, id, p)
		losses[id], w.strangers[id] = mps.Judge(one)
	}
	if ctx.Err() != nil {
		return // what was cut short proves nothing, and is no loss
	}
	w.desk.set(reportLosses(ctx, &w.watch, losses, w.now(), w.lost, w.node), w.now())
	w.desk.attest(w.records, w.parts)
	w.found()
}

// ask makes the service follow a wish.
func (w *mpsWatch) ask(wish mps.Wish) error {
	if before, err := mps.ReadWish(w.dir); err == nil && reflect.DeepEqual(before, wish) {
		return nil
	}
	if err := mps.WriteWish(w.dir, wish); err != nil {
		return fmt.Errorf("record which devices need MPS: %w", err)
	}
	return nil
}

// obstacle returns why the containers of a pool are not all clients of MPS on a device, whatever
// its service does.
func (w *mpsWatch) obstacle(id accel.DeviceID, p *pool) error {
	if p.limit == nil || !p.inject.onlyCDI() {
		return fmt.Errorf("resource %s: isolation cooperative needs injection %s or %s, with specifications of Divvy, alone",
			p.Resource, config.InjectCDI, config.InjectCDIAnnotations)
	}
	_, all, _ := w.discoveries.all()
	i := slices.IndexFunc(all[p.config.Vendor].found.Devices, func(d accel.Device) bool { return d.ID == id })
	if i >= 0 && !w.desk.limited(p, all[p.config.Vendor].found.Devices[i]) {
		return errors.New("the GPU is in MIG mode, where MPS is not set up; disable MIG mode of the GPU, or offer its MIG devices")
	}
	for _, other := range w.parts {
		if other != p && other.config.Vendor == p.config.Vendor && slices.ContainsFunc(see(other, (*alloc.Engine).Inventory).Shares,
			func(s accel.Share) bool { return s.ID == id }) {
			return fmt.Errorf("resource %s offers the device in another way as well, whose containers are not served by MPS",
				other.Resource)
		}
	}
	return nil
}

// processes returns the processes that use a device.
func (w *mpsWatch) processes(ctx context.Context, id accel.DeviceID, p *pool) ([]limits.Process, error) {
	meter, ok := p.backend.(backend.Meter)
	if !ok {
		return nil, fmt.Errorf("vendor %q does not list them", p.config.Vendor)
	}
	return programs(ctx, meter, id, w.procRoot, w.cgroupRoot)
}
