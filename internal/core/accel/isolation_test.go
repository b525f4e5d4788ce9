package accel

import (
	"testing"
	"time"
)

func TestTiers(t *testing.T) {
	for name, want := range map[string]Tier{"none": TierNone, "cooperative": TierCooperative, "driver": TierDriver,
		"hardware": TierHardware} {
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

func TestLowestTier(t *testing.T) {
	for _, tt := range []struct {
		of   []Tier
		want Tier
	}{
		{nil, TierNone},
		{[]Tier{TierHardware}, TierHardware},
		{[]Tier{TierHardware, TierCooperative, TierDriver}, TierCooperative},
		{[]Tier{TierDriver, TierNone}, TierNone},
	} {
		if got := LowestTier(tt.of...); got != tt.want {
			t.Errorf("LowestTier(%v) = %v, want %v", tt.of, got, tt.want)
		}
	}
}

func TestWhyNotIsolated(t *testing.T) {
	for _, tt := range []struct {
		stated  []Tier
		highest Tier
		want    string
	}{
		{nil, TierNone, "isolation driver required, device states none"},
		{[]Tier{TierNone, TierNone}, TierNone, "isolation driver required, device states none"},
		{[]Tier{TierCooperative}, TierCooperative, "isolation driver required, device states cooperative"},
		{[]Tier{TierNone, TierCooperative}, TierCooperative, "isolation driver required, devices state cooperative and none"},
	} {
		var set TierSet
		for _, tier := range tt.stated {
			set.Add(tier)
		}
		if got := WhyNotIsolated(TierDriver, set); got != tt.want {
			t.Errorf("WhyNotIsolated(%v) = %q, want %q", tt.stated, got, tt.want)
		}
		if got := set.Highest(); got != tt.highest {
			t.Errorf("the highest tier of %v is %v, want %v", tt.stated, got, tt.highest)
		}
	}
}

func TestAttestations(t *testing.T) {
	now := time.Date(2026, 7, 1, 10, 0, 0, 0, time.UTC)
	ago := func(d time.Duration) time.Time { return now.Add(-d) }
	for name, tt := range map[string]struct {
		stated Isolation
		want   Isolation
		until  time.Time
	}{
		"nothing": {},
		"a partition needs none": {
			stated: Isolation{Memory: TierHardware, Compute: TierHardware, Backend: "mig"},
			want:   Isolation{Memory: TierHardware, Compute: TierHardware, Backend: "mig"},
		},
		"a young one": {
			stated: Isolation{Memory: TierDriver, Backend: "dmem", Attested: ago(MaxAttestationAge)},
			want:   Isolation{Memory: TierDriver, Backend: "dmem", Attested: ago(MaxAttestationAge)},
			until:  now,
		},
		"an old one": {
			stated: Isolation{Memory: TierDriver, Backend: "dmem", Attested: ago(MaxAttestationAge + time.Second)},
			until:  now.Add(-time.Second),
		},
		"an old one of both": {
			stated: Isolation{Memory: TierCooperative, Compute: TierCooperative, Backend: "mps3", Attested: ago(time.Hour)},
			until:  now.Add(time.Minute - time.Hour),
		},
		"an old one beside what needs none": {
			stated: Isolation{Memory: TierCooperative, Compute: TierHardware, Backend: "x", Attested: ago(time.Hour)},
			want:   Isolation{Compute: TierHardware, Backend: "x", Attested: ago(time.Hour)},
			until:  now.Add(time.Minute - time.Hour),
		},
		"never attested": {
			stated: Isolation{Memory: TierDriver, Backend: "dmem"},
			until:  time.Time{}.Add(time.Minute),
		},
		"from the future, which counts as one of now": {
			stated: Isolation{Memory: TierDriver, Attested: now.Add(time.Hour)},
			want:   Isolation{Memory: TierDriver, Attested: now.Add(time.Hour)},
			until:  now.Add(time.Minute),
		},
	} {
		t.Run(name, func(t *testing.T) {
			if got := tt.stated.At(now); got != tt.want {
				t.Errorf("At = %+v, want %+v", got, tt.want)
			}
			if got := tt.stated.Until(now); !got.Equal(tt.until) {
				t.Errorf("Until = %v, want %v", got, tt.until)
			}
		})
	}
}
