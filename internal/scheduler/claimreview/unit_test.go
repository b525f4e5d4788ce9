package claimreview

import (
	"strings"
	"testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

func unit(t testing.TB, text string) Unit {
	t.Helper()
	u, err := ParseUnit(text)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func TestParseUnit(t *testing.T) {
	if u := unit(t, "enflame.com/gcu-memory=enflame:0.1"); u != (Unit{"enflame.com/gcu-memory", "enflame", "0.1"}) ||
		u.Class() != "gcu.enflame.divvy.dev" {
		t.Errorf("%+v of class %s", u, u.Class())
	}
	for text, want := range map[string]string{
		"enflame.com/gcu-memory": `vendor "" is not known`,
		"enflame.com/gcu-memory=acme:1": `vendor "acme" is not known; use resource=vendor:size with one of enflame, iluvatar, ` +
			`nvidia`,
		"enflame.com/gcu-memory=enflame:1/6":   `a unit of "1/6" GB is not a fixed amount of memory; use one of 1, 0.1, 0.01, 0.001`,
		"enflame.com/gcu-memory=enflame":       `a unit of "" GB`,
		"enflame.com/gcu-memory=enflame:1:0.1": `a unit of "1:0.1" GB`,
	} {
		if _, err := ParseUnit(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
}

func TestUnitsAndMemory(t *testing.T) {
	for _, tt := range []struct {
		size  string
		units accel.Units
		mib   int64
	}{
		{"1", 10, 10 << 10}, {"1", 1, 1 << 10}, {"0.1", 1, 103}, {"0.1", 2, 205}, {"0.1", 10, 1 << 10}, {"0.01", 1, 11},
		{"0.01", 100, 1 << 10}, {"0.001", 1, 2}, {"0.001", 2, 3}, {"0.001", 1000, 1 << 10}, {"1", accel.MaxUnits,
			int64(accel.MaxUnits) << 10},
	} {
		u := Unit{Size: tt.size}
		if got := u.MiB(tt.units); got != tt.mib {
			t.Errorf("%d units of %s GB are %d MiB, want %d", tt.units, tt.size, got, tt.mib)
		}
	}
	// A translated pod counts as many units as it requested, and any other amount as the units that have it.
	for size := range partsPerGiB {
		u := Unit{Size: size}
		for n := range accel.Units(5000) {
			if got := u.Units(u.MiB(n)); got != int64(n) && u.MiB(accel.Units(got)) != u.MiB(n) {
				t.Fatalf("%d units of %s GB count as %d", n, size, got)
			}
		}
		for mib := range int64(5000) {
			n := u.Units(mib)
			if u.MiB(accel.Units(n)) < mib || n > 0 && u.MiB(accel.Units(n-1)) >= mib {
				t.Fatalf("%d MiB count as %d units of %s GB", mib, n, size)
			}
		}
	}
}
