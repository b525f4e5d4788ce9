package cluster

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/platform/metrics"
)

// TestUnitsAreThoseOfTheBooks: of devices that are well, ill, lost under their pods,
// overcommitted and withheld in part, by a unit that is no whole number of GB.
func TestUnitsAreThoseOfTheBooks(t *testing.T) {
	const gcu accel.Resource = "enflame.com/gcu-memory"
	l := ledger.New(ledger.Options{})
	share := func(index int, id accel.DeviceID, units accel.Units, ill bool) accel.Share {
		return accel.Share{Units: units, Device: accel.Device{ID: id, Index: index, Health: accel.Health{Unhealthy: ill}}}
	}
	shares := []accel.Share{share(0, "A", 160, false), share(1, "B", 160, true), share(2, "C", 160, false), share(3, "D", 160, false)}
	shares[2].Withheld, shares[3].Withheld = 30, 100
	l.SetNode("n", []accel.Inventory{{Resource: gcu, Unit: "0.1", Shares: shares}})
	for i, h := range []ledger.Holding{
		{Device: "A", Units: 40, Pod: accel.PodRef{Namespace: "x"}}, {Device: "A", Units: 10, Pod: accel.PodRef{Namespace: "y"}},
		{Device: "B", Units: 7, Pod: accel.PodRef{Namespace: "x"}}, {Device: "", Units: 5, Pod: accel.PodRef{Namespace: "z"}},
		{Device: "C", Units: 50, Pod: accel.PodRef{Namespace: "w"}}, {Device: "D", Units: 90, Pod: accel.PodRef{Namespace: "w"}},
	} {
		h.Node, h.Resource, h.Pod.UID = "n", gcu, fmt.Sprint(i)
		l.Observe(h)
	}
	for name, devices := range map[string]bool{"each device": true, "nodes alone": false} {
		t.Run(name, func(t *testing.T) {
			registry := prometheus.NewPedanticRegistry()
			registry.MustRegister(Collector{
				Size: func() Size { return Size{Nodes: 3, BadNodes: 1} }, Ledger: l, Resources: []accel.Resource{gcu},
				Devices: devices,
				Ready:   func() bool { return false }, Leading: func() bool { return true },
			})
			families, err := registry.Gather()
			if err != nil {
				t.Fatal(err)
			}
			got := map[string]float64{}
			for _, f := range families {
				for _, m := range f.GetMetric() {
					key := strings.TrimPrefix(f.GetName(), "divvy_extender_")
					for _, l := range m.GetLabel() {
						if l.GetName() != "node" && l.GetName() != "resource" {
							key += " " + l.GetValue()
						}
					}
					got[key] = m.GetGauge().GetValue()
				}
			}
			want := map[string]float64{
				"books_nodes good": 2, "books_nodes broken": 1, "books_pods waiting": 0, "books_pods granted": 0, "books_pods ungranted": 0,
				"ready": 0, "leader": 1, "reservations": 0, "expected_pods": 0,
				"oldest_held_reservation_seconds": 0, "node_units": 640, "node_units_used": 202,
				"node_unit_bytes":        107374182.4,
				"namespace_units_used x": 47, "namespace_units_used y": 10, "namespace_units_used z": 5,
				"namespace_units_used w": 140,
			}
			if devices {
				want["device_units A 0"], want["device_units_used A 0"], want["device_units_free A 0"] = 160, 50, 110
				want["device_units B 1"], want["device_units_used B 1"], want["device_units_free B 1"] = 160, 7, 0
				want["device_units C 2"], want["device_units_used C 2"], want["device_units_free C 2"] = 160, 50, 80
				want["device_units D 3"], want["device_units_used D 3"], want["device_units_free D 3"] = 160, 90, 0
				want["device_units_withheld C 2"], want["device_units_withheld D 3"] = 30, 100
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// A reservation ages from Hold until its bind begins.
func TestAgeOfReservationsThatAreHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const memory = accel.Resource("example.com/memory")
		l := ledger.New(ledger.Options{})
		l.SetNode("n", []accel.Inventory{{Resource: memory, Unit: "1", Shares: []accel.Share{{Units: 8, Device: accel.Device{ID: "A"}}}}})
		registry := prometheus.NewPedanticRegistry()
		registry.MustRegister(Collector{
			Size: func() Size { return Size{} }, Ledger: l, Ready: func() bool { return true }, Leading: func() bool { return true },
		})
		expect := func(seconds string) {
			t.Helper()
			name := metrics.ExtenderOldestHeld.Name
			want := fmt.Sprintf("# HELP %[1]s %[2]s\n# TYPE %[1]s gauge\n%[1]s %[3]s\n", name, metrics.ExtenderOldestHeld.Help, seconds)
			if err := testutil.GatherAndCompare(registry, strings.NewReader(want), name); err != nil {
				t.Error(err)
			}
		}
		expect("0")
		for i, uid := range []string{"first", "second"} {
			request := accel.Request{Pod: uid, Resource: memory,
				Containers: []accel.ContainerRequest{{Name: "main", Units: 4}}}
			if _, _, err := ledger.Hold(l, accel.PodRef{UID: uid}, time.Time{}, "n", request); err != nil {
				t.Fatal(err)
			}
			time.Sleep(90 * time.Second)
			expect(fmt.Sprint(90 * (i + 1)))
		}
		ledger.Begin(l, "first", memory)
		expect("90")
		ledger.Begin(l, "second", memory)
		expect("0")
	})
}
