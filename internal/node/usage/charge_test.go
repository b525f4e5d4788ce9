package usage

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/wire"
)

func TestCharge(t *testing.T) {
	name := ContainerName{Namespace: "team", Pod: "train", Name: "main"}
	// train/main has no known use, web/main uses 20, and 5 are of processes of train.
	measured := func() wire.DeviceUsage {
		return wire.DeviceUsage{UsedBytes: 100, SystemBytes: 10, ForeignBytes: 3, UnknownBytes: 62, Containers: []wire.ContainerUsage{
			{Namespace: "team", Pod: "train", UsedBytes: new(uint64(5))},
			{Namespace: "team", Pod: "train", Container: "main", Processes: 2},
			{Namespace: "team", Pod: "web", Container: "main", UsedBytes: new(uint64(20))},
		}}
	}
	for what, tt := range map[string]struct {
		charged map[ContainerName]uint64
		problem string
		want    func(*wire.DeviceUsage)
	}{
		"a device without limits": {nil, "", func(*wire.DeviceUsage) {}},
		"what no process shows": {map[ContainerName]uint64{name: 40}, "", func(d *wire.DeviceUsage) {
			d.Containers[1].UsedBytes, d.UnknownBytes = new(uint64(40)), 22
		}},
		"a container that allocates nothing": {map[ContainerName]uint64{name: 0}, "", func(d *wire.DeviceUsage) {
			d.Containers[1].UsedBytes = new(uint64(0))
		}},
		"less than the list says": {map[ContainerName]uint64{{Namespace: "team", Pod: "web", Name: "main"}: 12}, "",
			func(d *wire.DeviceUsage) { d.Containers[2].UsedBytes, d.UnknownBytes = new(uint64(12)), 70 }},
		"more than is in use, as of another moment": {map[ContainerName]uint64{name: 900}, "", func(d *wire.DeviceUsage) {
			d.Containers[1].UsedBytes, d.UnknownBytes = new(uint64(900)), 0
		}},
		"a container that holds nothing of the device": {map[ContainerName]uint64{{Namespace: "team", Pod: "other", Name: "main"}: 9}, "",
			func(*wire.DeviceUsage) {}},
		"a device that could not be measured": {map[ContainerName]uint64{name: 40}, "lost",
			func(d *wire.DeviceUsage) { d.Problem = "lost" }},
	} {
		t.Run(what, func(t *testing.T) {
			got, want := measured(), measured()
			got.Problem = tt.problem
			tt.want(&want)
			Charge(&got, tt.charged)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
