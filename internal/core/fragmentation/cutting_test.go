package fragmentation

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// openb is how many devices' pieces of each size the default workload of the
// public trace asks for, per 6212 devices of 1000.
var openb = []lot{
	{50, 7}, {110, 24}, {140, 1}, {160, 76}, {220, 63}, {230, 143}, {270, 4}, {290, 1}, {320, 335}, {330, 7}, {350, 6}, {370, 48}, {440, 2},
	{460, 131}, {470, 765}, {480, 19}, {550, 73}, {590, 77}, {650, 258}, {810, 1100}, {1000, 4445},
}

// What a remainder is really worth: 190 nothing, as what fits into it is too rare.
func TestTableOfTheTrace(t *testing.T) {
	devices := []lot{{1000, 6212}}
	w, err := worth(devices, openb)
	if err != nil {
		t.Fatal(err)
	}
	table := newTable(1000, openb, w, scale{1000})
	want := map[accel.Units]int64{0: 0, 9: 0, 160: 0, 190: 0, 219: 0, 230: 250, 320: 333, 350: 333, 460: 500, 530: 500, 650: 667, 680: 667,
		809: 917, 810: 1000, 1000: 1000, 2000: 1000}
	for free, milli := range want {
		if got := int64(math.Round(float64(table.of(free)) / one * 1000)); got != milli {
			t.Errorf("%d free units are worth %d, want %d", free, got, milli)
		}
	}
	// The answer hardly depends on how much is asked for in all.
	for _, by := range []float64{0.98, 1.02, 1.05} {
		scaled := slices.Clone(openb)
		for i := range scaled {
			scaled[i].count *= by
		}
		v, err := worth(devices, scaled)
		if err != nil {
			t.Fatal(err)
		}
		if again := newTable(1000, openb, v, scale{1000}); !slices.Equal(again.useful, table.useful) {
			t.Errorf("with %v times the demand the table is another", by)
		}
	}
}

func TestTables(t *testing.T) {
	tests := map[string]struct {
		devices, pieces []lot
		total           accel.Units
		want            map[accel.Units]float64 // in units
	}{
		"no demand: all that is free is as good": {
			devices: []lot{{16, 4}}, total: 16, want: map[accel.Units]float64{0: 0, 5: 5, 15: 15, 16: 16},
		},
		"whole devices only: a part is worth nothing": {
			devices: []lot{{16, 4}}, pieces: []lot{{16, 100}}, total: 16, want: map[accel.Units]float64{1: 0, 15: 0, 16: 16},
		},
		"halves": {
			devices: []lot{{16, 4}}, pieces: []lot{{8, 9}}, total: 16, want: map[accel.Units]float64{7: 0, 8: 8, 15: 8, 16: 16},
		},
		"devices in MiB": {
			devices: []lot{{32000, 4}}, pieces: []lot{{8000, 17}}, total: 32000, want: map[accel.Units]float64{7999: 0, 8000: 8000,
				25000: 24000},
		},
		"odd sizes are counted in coarse steps, and never for too much": {
			devices: []lot{{1 << 20, 4}}, pieces: []lot{{333_333, 13}}, total: 1 << 20,
			want: map[accel.Units]float64{333_000: 0, 334_000: 349_525, 668_000: 699_051, 1 << 20: 1 << 20},
		},
		"a piece larger than the device does not matter to it": {
			devices: []lot{{16, 4}, {32, 4}}, pieces: []lot{{16, 6}, {32, 4}}, total: 16, want: map[accel.Units]float64{15: 0, 16: 16},
		},
		"on a larger device it does": {
			devices: []lot{{16, 4}, {32, 4}}, pieces: []lot{{16, 8}, {32, 3}}, total: 32, want: map[accel.Units]float64{15: 0, 16: 16,
				31: 16, 32: 32},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w, err := worth(tc.devices, tc.pieces)
			if err != nil {
				t.Fatal(err)
			}
			s := scale{tc.devices[len(tc.devices)-1].units}
			table := newTable(tc.total, tc.pieces, w, s)
			for free, units := range tc.want {
				got := float64(table.of(free)) / one * float64(s.largest)
				if math.Abs(got-units) > float64(s.largest)/4000 {
					t.Errorf("%d free units are worth %v, want %v", free, got, units)
				}
			}
		})
	}
}

// A table rises from nothing to all of the device and, as what fits in two holes
// fits in one of the size of both, two holes are never worth more than one.
func TestTableProperties(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for i := range 300 {
		total := accel.Units(1 + r.IntN(200))
		bySize := map[accel.Units]float64{}
		for range 1 + r.IntN(30) {
			bySize[accel.Units(1+r.IntN(int(total)))] = float64(1 + r.IntN(1000))
		}
		devices := []lot{{total, float64(1 + r.IntN(5000))}}
		if r.IntN(2) == 0 {
			devices = append(devices, lot{total + accel.Units(1+r.IntN(200)), float64(1 + r.IntN(5000))})
		}
		pieces := lots(bySize, 20)
		w, err := worth(devices, pieces)
		if err != nil {
			t.Fatalf("%d: %v on %v: %v", i, pieces, devices, err)
		}
		s := scale{devices[len(devices)-1].units}
		for _, d := range devices {
			table := newTable(d.units, pieces, w, s)
			for a := range d.units + 1 {
				va := table.of(a)
				if va < 0 || a > 0 && va < table.of(a-1) || va > s.value(d.units) {
					t.Fatalf("%d: %v on %v: %d of %d units are worth %d, one less %d", i, pieces, devices, a, d.units, va,
						table.of(max(a-1, 0)))
				}
				if b := accel.Units(r.IntN(int(d.units-a) + 1)); va+table.of(b) > table.of(a+b)+2 { // rounded
					t.Fatalf("%d: %v on %v: holes of %d and %d are worth %d and %d, one of both %d", i, pieces, devices, a, b, va,
						table.of(b), table.of(a+b))
				}
			}
			if table.of(d.units) != s.value(d.units) || table.of(0) != 0 {
				t.Fatalf("%d: from %d to %d", i, table.of(0), table.of(d.units))
			}
		}
	}
}

func TestLots(t *testing.T) {
	got := lots(map[accel.Units]float64{1: 5, 2: 1, 4: 10, 8: 10, 9: 0, 3: -1, 0: 7, 16: 0.25}, 2)
	if want := []lot{{4, 16}, {8, 10.25}}; !slices.Equal(got, want) {
		t.Errorf("lots = %v, want %v", got, want)
	}
	if got := lots(nil, 2); len(got) != 0 {
		t.Errorf("lots of nothing = %v", got)
	}
}

func BenchmarkTables(b *testing.B) {
	for _, sizes := range []int{5, 21, maxSizes} {
		b.Run(fmt.Sprintf("sizes=%d", sizes), func(b *testing.B) {
			pieces := slices.Clone(openb[max(0, len(openb)-sizes):])
			for i := 0; len(pieces) < sizes; i++ {
				pieces = append(pieces, lot{pieces[i].units + 5, pieces[i].count / 2})
			}
			slices.SortFunc(pieces, func(a, b lot) int { return int(a.units - b.units) })
			for b.Loop() {
				if _, err := worth([]lot{{1000, 6212}}, pieces); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
