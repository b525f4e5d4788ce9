package sharing

import (
	"fmt"
	"slices"
	"testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// cut are partitions p0-0, p0-1... of parents p0, p1... with so many each.
func cut(replicas int, partitions ...int) []SlotDevice {
	var out []SlotDevice
	for parent, n := range partitions {
		for i := range n {
			out = append(out, SlotDevice{
				ID: accel.DeviceID(fmt.Sprintf("p%d-%d", parent, i)), Parent: accel.DeviceID(fmt.Sprint("p", parent)),
				Index: accel.PartitionIndex(parent, i), Replicas: replicas,
			})
		}
	}
	return out
}

// TestPartitionsByTheirParents: partitions are spread over the devices that they are cut
// from, or packed on few of them.
func TestPartitionsByTheirParents(t *testing.T) {
	for name, tt := range map[string]struct {
		devices []SlotDevice
		held    []string
		policy  SlotPolicy
		size    int
		want    []string
	}{
		"one of the emptiest":         {cut(0, 3, 3), []string{"p0-0"}, Distributed, 1, []string{"p1-0"}},
		"one of the fullest":          {cut(0, 3, 3), []string{"p1-0"}, Packed, 1, []string{"p1-1"}},
		"the lowest of equal ones":    {cut(0, 3, 3), nil, Distributed, 1, []string{"p0-0"}},
		"two, one of each":            {cut(0, 3, 3), nil, Distributed, 2, []string{"p0-0", "p1-0"}},
		"two together":                {cut(0, 3, 3), nil, Packed, 2, []string{"p0-0", "p0-1"}},
		"three level what is held":    {cut(0, 4, 4), []string{"p0-0", "p0-1"}, Distributed, 3, []string{"p0-2", "p1-0", "p1-1"}},
		"packed until it is full":     {cut(0, 2, 3), []string{"p0-0"}, Packed, 2, []string{"p0-1", "p1-0"}},
		"all that there are":          {cut(0, 1, 2), nil, Distributed, 3, []string{"p0-0", "p1-0", "p1-1"}},
		"a slice of an idle one":      {cut(2, 2, 1), []string{"p0-0::0"}, Distributed, 1, []string{"p1-0::0"}},
		"slices of different ones":    {cut(2, 1, 1), nil, Distributed, 2, []string{"p0-0::0", "p1-0::0"}},
		"slices packed on one":        {cut(3, 2, 1), []string{"p1-0::0"}, Packed, 1, []string{"p1-0::1"}},
		"a second slice when need be": {cut(2, 1), nil, Distributed, 2, []string{"p0-0::0", "p0-0::1"}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := ChooseSlots(SlotQuestion{
				Resource: "nvidia.com/mig-1g.5gb", Size: tt.size, Available: all(tt.devices, tt.held...),
				Devices: tt.devices, Policy: tt.policy,
			})
			if err != nil || !slices.Equal(got, tt.want) {
				t.Errorf("chosen %q, %v; want %q", got, err, tt.want)
			}
		})
	}
}
