package agent

import (
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"

	"tags.cncf.io/container-device-interface/pkg/parser"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// sized has the CDI devices that bound what a container gets of a device. The amount is in
// their names, "<device>.<amount>", so that nothing of a container is written down beforehand.
type sized interface {
	// kind is the kind of the CDI devices.
	kind() string
	// limited reports whether containers of a pool get one for a device.
	limited(p *pool, device accel.Device) bool
	// devices returns those for all amounts that containers of a pool can get of a device,
	// none while they cannot be bounded.
	devices(p *pool, device accel.Device) []cdispecs.Device
	// of returns the one for so much memory of a device, 0 for no limit, and so many percent of
	// its multiprocessors, 0 for those that belong to the memory; false while containers cannot
	// be bounded.
	of(p *pool, device accel.Device, mib uint64, percent int) (cdispecs.Device, bool)
	// renewed returns one that was on the disk as it is to be now.
	renewed(p *pool, device accel.Device, before cdispecs.Device) cdispecs.Device
}

// sized returns all kinds of CDI devices with amounts.
func (w *cdiWriter) sized() []sized { return []sized{w.limits, w.mps} }

// isSized reports whether a kind is one of CDI devices with amounts. A container that was given
// one has it also when it starts again after its resource has none any more.
func (w *cdiWriter) isSized(kind string) bool { return kind == limitKind || kind == mpsKind }

// specifySized adds the CDI devices with amounts for the devices of a pool to what the pool wants:
// all that containers can get, unless those of the node are too many, and those that are on the
// disk: a container that has one must not start again without its bounds. The caller holds mu.
func (w *cdiWriter) specifySized(s sized, p *pool, devices []accel.Device, mine cdiKinds) {
	total := 0
	for other, kinds := range w.lasting {
		if other != p {
			total += len(kinds[s.kind()])
		}
	}
	all, described := map[accel.DeviceID]accel.Device{}, map[accel.DeviceID][]cdispecs.Device{}
	for _, d := range devices {
		w.known[d.ID] = d
		if s.limited(p, d) && parser.ValidateDeviceName(string(d.ID)+".1") == nil {
			all[d.ID], described[d.ID] = d, s.devices(p, d)
			total += len(described[d.ID])
		}
	}
	if len(all) == 0 {
		delete(w.lasting[p], s.kind())
		return
	}
	lasting := cdiKinds{}
	for _, some := range described {
		if len(some) > 0 && total <= maxLimitNames {
			for _, one := range some {
				lasting.put(s.kind(), one)
			}
		}
	}
	// The folder is empty after the host has started again, and kubelet gives containers the names
	// that they had.
	held := see(p, func(e *alloc.Engine, id alloc.ID) []alloc.ContainerShare { return e.Containers(id, nil) })
	percents := map[alloc.PodKey]int{}
	for _, pod := range p.records.pods.Cached() {
		percents[keyOf(pod)], _ = kube.ComputePercentOf(pod.Annotations) // it has been read for the allocation
	}
	for _, c := range held {
		if d, ok := all[c.Chip]; ok {
			if one, ok := s.of(p, d, limitMiB(c.Bytes), percents[c.PodKey]); ok {
				lasting.put(s.kind(), one)
			}
		}
	}
	if w.lasting[p] == nil {
		w.lasting[p] = cdiKinds{}
	}
	w.lasting[p][s.kind()] = lasting[s.kind()]
	for name, one := range w.onDisk(s.kind()).devices {
		for id, d := range all {
			if strings.HasPrefix(name, string(id)+".") {
				mine.put(s.kind(), s.renewed(p, d, one))
			}
		}
	}
	for _, one := range lasting[s.kind()] {
		mine.put(s.kind(), one)
	}
}

// forgetAfter is the time between two looks for names that no container has, and how long one
// that a container was given stays before kubelet's checkpoint must have it.
const forgetAfter = 10 * time.Minute

// forget removes the names with amounts that pods have requested and no container has any more:
// they would be as many as pods can think of, and container runtimes read all of them. Kubelet's
// checkpoint has the names that containers get when they start again. While it cannot be read,
// all names stay.
func (w *cdiWriter) forget(now time.Time) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.looked.IsZero():
		w.looked = now // what an earlier process has given out counts as given now
		return nil
	case now.Sub(w.looked) < forgetAfter || w.silent():
		return nil
	}
	w.looked = now
	maps.DeleteFunc(w.given, func(_ backend.CDIDevice, at time.Time) bool { return now.Sub(at) >= forgetAfter })
	var failed []error
	for _, s := range w.sized() {
		failed = append(failed, w.forgetOf(s.kind()))
	}
	return errors.Join(failed...)
}

// forgetOf is forget for a kind. The caller holds mu.
func (w *cdiWriter) forgetOf(kind string) error {
	file := w.onDisk(kind)
	stale := maps.Clone(file.devices)
	for _, kinds := range w.lasting {
		maps.DeleteFunc(stale, func(name string, _ cdispecs.Device) bool {
			_, ok := kinds[kind][name]
			return ok
		})
	}
	maps.DeleteFunc(stale, func(name string, _ cdispecs.Device) bool {
		_, ok := w.given[backend.CDIDevice{Kind: kind, Name: name}]
		return ok
	})
	if len(stale) == 0 {
		return nil
	}
	names, err := checkpointedNames(w.checkpoint)
	if err != nil {
		return fmt.Errorf("find out which CDI devices containers have: %w", err)
	}
	for name := range stale {
		if names[kind+"="+name] {
			continue
		}
		delete(file.devices, name)
		for _, kinds := range w.wanted {
			delete(kinds[kind], name)
		}
	}
	return w.ensure(kind)
}

// limit returns the names of the CDI devices that bound what a container gets of each device, in
// units of memory and percent of the multiprocessors, and makes sure that they are described. It
// returns none while containers cannot be bounded: the node then states that nothing is promised.
func (w *cdiWriter) limit(p *pool, ids []accel.DeviceID, units accel.Units, percent int) ([]backend.CDIDevice, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var names []backend.CDIDevice
	for _, id := range ids {
		for _, s := range w.sized() {
			d, ok := w.known[id]
			if !ok || !s.limited(p, d) {
				continue
			}
			mib := uint64(0)
			if p.Kind == alloc.Memory {
				bytes := p.config.Unit.Bytes(units, d.MemoryBytes)
				if mib = limitMiB(bytes); mib == 0 {
					return nil, fmt.Errorf("%d bytes of device %s are less than a limit can be, 1 MiB", bytes, id)
				}
			}
			one, ok := s.of(p, d, mib, percent)
			if !ok {
				return nil, nil
			}
			if s.kind() == limitKind && mib > 0 { // a context of MPS is smaller
				if err := w.limits.besideContext(p.config.Vendor, id, mib); err != nil {
					return nil, err
				}
			}
			if err := w.put(s, p, one); err != nil {
				return nil, err
			}
			name := backend.CDIDevice{Kind: s.kind(), Name: one.Name}
			w.given[name] = time.Now()
			names = append(names, name)
		}
	}
	return names, nil
}

// put makes sure that a CDI device is described. The caller holds mu.
func (w *cdiWriter) put(s sized, p *pool, one cdispecs.Device) error {
	if sameYAML(w.onDisk(s.kind()).devices[one.Name], one) {
		return nil
	}
	if w.wanted[p] == nil {
		return errors.New("the devices were not described yet; divvy-node has just started")
	}
	w.wanted[p].put(s.kind(), one)
	if err := w.ensure(s.kind()); err != nil {
		return fmt.Errorf("write the CDI specification of %s: %w", s.kind(), err)
	}
	return nil
}
