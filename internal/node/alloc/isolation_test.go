package alloc

import (
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
)

// What a container has for itself is isolated by the hardware; what containers share, as far as
// it was attested.
func TestIsolationOfPools(t *testing.T) {
	whole := accel.Isolation{Memory: accel.TierHardware, Compute: accel.TierHardware}
	partition := whole
	partition.Backend = "mig"
	instance := whole
	instance.Backend = "drs"
	attested := accel.Isolation{Memory: accel.TierDriver, Backend: "dmem", Attested: start}
	wholeID := ID{"v.example/whole", Slots}
	mig := devices("m0", "m1")
	for i := range mig {
		mig[i].Parent, mig[i].Profile = "p", "1g.5gb"
	}
	for name, tt := range map[string]struct {
		pool    Config
		devices []accel.Device
		want    []accel.Isolation
	}{
		"whole devices": {Config{ID: wholeID}, devices("d0", "d1"), []accel.Isolation{whole, whole}},
		"partitions":    {Config{ID: wholeID, Vendor: "nvidia"}, mig, []accel.Isolation{partition, partition}},
		"DRS instances": {Config{ID: wholeID, Vendor: "enflame"}, mig, []accel.Isolation{instance, instance}},
		"time slices": {Config{ID: sharedID, Cut: Cut{Replicas: func(sharing.Card) int { return 4 }}}, devices("d0", "d1"),
			[]accel.Isolation{{}, {}}},
		"time slices of partitions": {Config{ID: sharedID, Cut: Cut{Replicas: func(sharing.Card) int { return 4 }}}, mig,
			[]accel.Isolation{{}, {}}},
		"units of memory": {Config{ID: memoryID, Unit: unit(t, "1")}, devices("d0", "d1"), []accel.Isolation{attested, {}}},
	} {
		t.Run(name, func(t *testing.T) {
			n := boot(t, nil, tt.pool)
			n.Discover(tt.pool.ID, Discovery{Devices: tt.devices})
			n.turn(nil)
			n.Attest(tt.pool.ID, map[accel.DeviceID]accel.Isolation{"d0": attested})
			in := n.Inventory(tt.pool.ID)
			if len(in.Shares) != len(tt.want) {
				t.Fatalf("%d devices: %+v", len(in.Shares), in.Shares)
			}
			for i, s := range in.Shares {
				if s.Isolation != tt.want[i] {
					t.Errorf("device %s: %+v, want %+v", s.ID, s.Isolation, tt.want[i])
				}
			}
		})
	}
}

func TestIsolationOfAnAllocation(t *testing.T) {
	n := boot(t, nil, Config{ID: memoryID, Unit: unit(t, "1")})
	n.turn(nil)
	n.Attest(memoryID, map[accel.DeviceID]accel.Isolation{
		"d0": {Memory: accel.TierDriver, Attested: start}, "d1": {Memory: accel.TierCooperative, Attested: start.Add(time.Minute)},
	})
	on := func(devices ...accel.DeviceID) Allocation {
		return Allocation{pool: n.pool(memoryID), asked: question{devices: devices}}
	}
	for name, tt := range map[string]struct {
		of     Allocation
		after  time.Duration
		device accel.DeviceID
		tier   accel.Tier
	}{
		"one device":                    {on("d0"), time.Minute, "d0", accel.TierDriver},
		"the lowest of two":             {on("d0", "d1"), time.Minute, "d1", accel.TierCooperative},
		"one whose attestation is old":  {on("d0", "d1"), 90 * time.Second, "d0", accel.TierNone},
		"both old, the first one shown": {on("d0", "d1"), time.Hour, "d0", accel.TierNone},
	} {
		if device, of := tt.of.Isolation(start.Add(tt.after)); device != tt.device || of.Memory != tt.tier {
			t.Errorf("%s: device %s at %v, want %s at %v", name, device, of.Memory, tt.device, tt.tier)
		}
	}
}
