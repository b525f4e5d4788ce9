package dra

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
)

// The second handler of errors sleeps by the time of the one before, which may be of another bubble.
func init() { utilruntime.ErrorHandlers = utilruntime.ErrorHandlers[:1] } //nolint:reassign // see above

// slowLog drops what is logged, and takes a moment: the controller of slices repeats what it did a minute
// after a write until that minute is over, and in a bubble no time passes meanwhile.
type slowLog struct{}

func (slowLog) Init(logr.RuntimeInfo)          {}
func (slowLog) Enabled(int) bool               { return false }
func (slowLog) Info(int, string, ...any)       {}
func (slowLog) Error(error, string, ...any)    {}
func (l slowLog) WithName(string) logr.LogSink { return l }
func (l slowLog) WithValues(...any) logr.LogSink {
	time.Sleep(time.Nanosecond)
	return l
}

// publishing runs a test in a bubble, where hours pass at once. The server publishes the devices there, without
// its sockets. prepare is called before that and may be nil.
func publishing(t *testing.T, prepare, test func(*plane)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		p := newIdlePlane(t, gcus()...)
		if prepare != nil {
			prepare(p)
		}
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logr.New(slowLog{})))
		ended := make(chan error, 1)
		go func() { ended <- p.server.publish(ctx) }()
		defer func() {
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
			time.Sleep(time.Minute) // what the controller has started ends by then
		}()
		test(p)
	})
}

// written counts the writes of slices since the last call, once there are no more.
func (p *plane) written() int {
	time.Sleep(10 * syncDelay)
	n := 0
	for _, action := range p.client.Actions() {
		if action.GetResource().Resource == "resourceslices" && !isProbe(action) &&
			slices.Contains([]string{"create", "update", "patch", "delete"}, action.GetVerb()) {
			n++
		}
	}
	p.client.ClearActions()
	return n
}

// discover makes the devices those, and has them published.
func (p *plane) discover(devices ...accel.Device) {
	p.keeper.set(func(k *keeper) { k.engine.Claims.Discover("enflame", alloc.Discovery{Devices: devices}) })
	p.server.Changed()
}

// ill are the devices of a plane, of which the first is unhealthy.
func ill() []accel.Device {
	devices := gcus()
	devices[0].Health = accel.Health{Unhealthy: true, Reason: "ECC", Cause: "ecc"}
	return devices
}

// TestPublishedAfterOutage: the devices are published soon after the API server is back, however long it
// was unavailable.
func TestPublishedAfterOutage(t *testing.T) {
	everything := []string{"get nodes", "list resourceslices", "create resourceslices", "update resourceslices"}
	fail := func(p *plane, requests []string) {
		for _, request := range requests {
			p.failing.Store(request, apierrors.NewServiceUnavailable("away"))
		}
	}
	for name, requests := range map[string][]string{
		"everything":       everything,
		"reading the node": everything[:1],
		"listing slices":   everything[1:2],
		"creating slices":  everything[2:3],
	} {
		t.Run(name, func(t *testing.T) {
			publishing(t, func(p *plane) { fail(p, requests) }, func(p *plane) {
				time.Sleep(20 * time.Minute)
				p.failing.Delete("list resourceslices") // the test lists them
				p.devices(0)
				p.failing.Clear()
				time.Sleep(time.Minute) // a list that failed is repeated by then
				p.devices(4)

				fail(p, everything)
				p.failing.Delete("list resourceslices")
				p.discover(ill()...)
				time.Sleep(20 * time.Minute)
				if len(p.devices(4)["gcu-a"].Taints) > 0 {
					t.Error("the API server is not unavailable")
				}
				p.failing.Clear()
				p.await("the taint is not published", func() bool { return len(p.devices(4)["gcu-a"].Taints) == 1 })
			})
		})
	}
}

// TestSlicesChangedByOthers: what others do to the slices is undone, without kubelet.
func TestSlicesChangedByOthers(t *testing.T) {
	for name, change := range map[string]func(*plane, []resourceapi.ResourceSlice) error{
		"one is deleted": func(p *plane, all []resourceapi.ResourceSlice) error {
			return p.client.ResourceV1().ResourceSlices().Delete(p.t.Context(), all[0].Name, metav1.DeleteOptions{})
		},
		"all are deleted": func(p *plane, all []resourceapi.ResourceSlice) (err error) {
			slices := p.client.ResourceV1().ResourceSlices()
			for _, one := range all {
				err = errors.Join(err, slices.Delete(p.t.Context(), one.Name, metav1.DeleteOptions{}))
			}
			return err
		},
		"devices are removed": func(p *plane, all []resourceapi.ResourceSlice) error {
			all[0].Spec.Devices = all[0].Spec.Devices[:1]
			_, err := p.client.ResourceV1().ResourceSlices().Update(p.t.Context(), &all[0], metav1.UpdateOptions{})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			publishing(t, nil, func(p *plane) {
				before := p.devices(4)
				list, err := p.client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
				if err != nil {
					t.Fatal(err)
				}
				slices.SortFunc(list.Items, func(a, b resourceapi.ResourceSlice) int { return strings.Compare(a.Name, b.Name) })
				if err := change(p, list.Items); err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(before, p.devices(4)); diff != "" {
					t.Error(diff)
				}
				p.written()
				time.Sleep(10 * time.Minute)
				if n := p.written(); n > 0 {
					t.Errorf("%d writes follow", n)
				}
			})
		})
	}
}

// withoutTaints and withoutShares drop the fields of a gate from a slice.
func withoutTaints(s *resourceapi.ResourceSlice) {
	for i := range s.Spec.Devices {
		s.Spec.Devices[i].Taints = nil
	}
}

func withoutShares(s *resourceapi.ResourceSlice) {
	for i := range s.Spec.Devices {
		d := &s.Spec.Devices[i]
		d.AllowMultipleAllocations = nil
		for name, capacity := range d.Capacity {
			capacity.RequestPolicy = nil
			d.Capacity[name] = capacity
		}
	}
}

// TestGatesAreReported: the gates that are off are reported with the devices that are left out for it, whether the
// probe finds that or a write, until they are on again.
func TestGatesAreReported(t *testing.T) {
	tests := map[string]struct {
		drops   func(*resourceapi.ResourceSlice)
		gates   []string
		leftOut []string
	}{
		"shares": {withoutShares, []string{gateShares}, nil},
		"taints": {withoutTaints, []string{gateTaints}, []string{"gcu-a", "gcu-a-slots"}},
		"all": {func(s *resourceapi.ResourceSlice) { withoutCounters(s); withoutTaints(s); withoutShares(s) },
			[]string{gateShares, gateTaints, gateCounters}, []string{"gcu-a", "gcu-a-slots", "gcu-b-slots"}},
	}
	registered := func(p *plane) {
		_, err := p.server.onRegistration(p.t.Context(), &registerapi.RegistrationStatus{PluginRegistered: true}, nil,
			func(context.Context, any) (any, error) { return nil, nil })
		if err != nil {
			p.t.Error(err)
		}
	}
	for name, tt := range tests {
		for _, found := range []string{"probe", "write"} {
			t.Run(name+", by a "+found, func(t *testing.T) {
				var prepare func(*plane)
				if found == "probe" {
					prepare = func(p *plane) {
						p.drops.Store(&tt.drops)
						p.breakDevices()
					}
				}
				publishing(t, prepare, func(p *plane) {
					if found == "write" {
						p.devices(4)
						p.drops.Store(&tt.drops)
						p.discover(ill()...)
					}
					p.devices(4 - len(tt.leftOut))
					want := wire.ClaimDriver{GatesOff: slices.Clone(tt.gates), LeftOut: tt.leftOut}
					p.await("the report", func() bool {
						got := p.server.Report()
						slices.Sort(got.GatesOff)
						slices.Sort(want.GatesOff)
						return cmp.Equal(want.GatesOff, got.GatesOff) && cmp.Equal(want.LeftOut, got.LeftOut)
					})
					// What the API server drops is not written again and again.
					p.written()
					for range 10 {
						p.server.Changed()
						time.Sleep(time.Second)
					}
					if n := p.written(); n > 0 {
						t.Errorf("%d writes without a change", n)
					}
					p.drops.Store(nil)
					if found == "probe" {
						registered(p)
					} else {
						time.Sleep(reprobeInterval)
					}
					on := func() bool {
						d := p.devices(4)["gcu-a"]
						return len(d.Taints) == 1 && len(d.ConsumesCounters) == 1 && d.AllowMultipleAllocations != nil
					}
					p.await("what is on again is not published", on)
					if got := p.server.Report(); len(got.GatesOff)+len(got.LeftOut) > 0 {
						t.Errorf("reported is %+v", got)
					}
				})
			})
		}
	}
}

// TestWritesOfSlices: a slice is written as often as its devices change, and for what claims use of them at most every
// 10 s.
func TestWritesOfSlices(t *testing.T) {
	publishing(t, nil, func(p *plane) {
		p.devices(4)
		if n := p.written(); n != 2 { // one of devices and one of counters
			t.Errorf("%d writes at first, want 2", n)
		}
		for range 100 {
			p.server.Changed()
			time.Sleep(time.Second)
		}
		if n := p.written(); n != 0 {
			t.Errorf("%d writes without a change", n)
		}
		const flaps = 50
		for range flaps {
			p.discover(ill()...)
			time.Sleep(time.Second)
			p.discover(gcus()...)
			time.Sleep(time.Second)
		}
		if n := p.written(); n != 2*flaps { // the slice of counters is not written
			t.Errorf("%d writes for %d changes of a device's health", n, 2*flaps)
		}
		if d := p.devices(4)["gcu-a"]; len(d.Taints) > 0 {
			t.Errorf("the device is well, and has the taints %v", d.Taints)
		}
		for i := range 100 {
			claim := p.allocate(fmt.Sprint("c", i), allocatedPart([]string{"gcu-a", "gcu-b"}[i%2], fmt.Sprint(i%7+1, "Gi")))
			if _, err := p.server.prepare(t.Context(), claim); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Second)
			if err := p.server.Release(t.Context(), alloc.ClaimKey{Vendor: "enflame", UID: string(claim.UID)}); err != nil {
				t.Fatal(err)
			}
		}
		const most = 100/10 + 2 // one in 10 s, the first one, and the one after the last claim
		if n := p.written(); n > most || n == 0 {
			t.Errorf("%d writes for 100 claims, want 1 to %d", n, most)
		}
		time.Sleep(3 * reprobeInterval)
		if n := p.written(); n != 0 {
			t.Errorf("%d writes without a change for hours", n)
		}
	})
}

// TestHealthOfDevices: kubelet hears of all devices at first, when one changes, and before it would take what it
// heard for outdated.
func TestHealthOfDevices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newIdlePlane(t, gcus()...)
		ctx, cancel := context.WithCancel(t.Context())
		reports, ended := make(chan kubeletplugin.DeviceHealthReport), make(chan error, 1)
		go func() { ended <- p.server.WatchHealthStatus(ctx, reports) }()
		var last time.Time
		next := func(when string, want ...string) {
			t.Helper()
			var got []string
			for _, d := range (<-reports).Devices {
				if last = d.LastUpdated; d.PoolName != "node/enflame" {
					t.Errorf("%s: %s is of pool %s", when, d.DeviceName, d.PoolName)
				}
				got = append(got, strings.TrimSpace(fmt.Sprint(d.DeviceName, " ", d.Health, " ", d.Message)))
			}
			slices.Sort(got)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s: %s", when, diff)
			}
		}
		healthy := []string{"gcu-a Healthy", "gcu-a-slots Healthy", "gcu-b Healthy", "gcu-b-slots Healthy"}
		unhealthy := []string{"gcu-a Unhealthy ECC", "gcu-a-slots Unhealthy ECC", "gcu-b Healthy", "gcu-b-slots Healthy"}
		next("at first", healthy...)
		changed := time.Now()
		synctest.Wait()
		p.discover(ill()...)
		next("with a broken device", unhealthy...)
		synctest.Wait()
		p.discover(gcus()...)
		next("once it has recovered", healthy...)
		if !last.Equal(changed) {
			t.Errorf("changes are reported %v late", last.Sub(changed))
		}
		for range 3 {
			before := last
			if next("without a change", healthy...); last.Sub(before) != refreshInterval {
				t.Errorf("a report follows after %v, want %v", last.Sub(before), refreshInterval)
			}
		}
		// A change is not lost while kubelet does not read.
		time.Sleep(refreshInterval)
		synctest.Wait()
		p.discover(ill()...)
		<-reports
		next("after a report that was waiting", unhealthy...)
		p.keeper.set(func(k *keeper) { k.engine.Claims.Discover("enflame", alloc.Discovery{Err: errors.New("no driver")}) })
		synctest.Wait()
		p.server.Changed()
		next("without a discovery", "gcu-a Unhealthy ECC", "gcu-a-slots Unhealthy ECC", "gcu-b Unhealthy no driver",
			"gcu-b-slots Unhealthy no driver")
		cancel()
		if err := <-ended; err != nil || len(p.server.watchers) > 0 {
			t.Errorf("after its end: %v, %v", err, p.server.watchers)
		}
	})
}
