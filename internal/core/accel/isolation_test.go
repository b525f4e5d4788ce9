package accel

import "testing"

func TestTiers(t *testing.T) {
	for name, want := range map[string]Tier{"none": TierNone, "cooperative": TierCooperative, "driver": TierDriver, "hardware": TierHardware} {
		got, err := ParseTier(name)
		if err != nil || got != want || got.String() != name {
			t.Errorf("ParseTier(%q) = %v, %v", name, got, err)
		}
	}
	for _, name := range []string{"", "None", "strong"} {
		if _, err := ParseTier(name); err == nil {
			t.Errorf("ParseTier(%q) has no error", name)
		}
	}
	for i, stated := range tiers {
		for j, required := range tiers {
			if got := stated.Meets(required); got != (i >= j) {
				t.Errorf("%v meets %v: %v", stated, required, got)
			}
		}
	}
}
