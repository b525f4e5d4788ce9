package accel

import "testing"

func TestUnitBytes(t *testing.T) {
	tests := map[string]struct {
		unit   string
		memory []int64
		want   float64
		known  bool
	}{
		"a tenth of a GB":           {"0.1", []int64{1, 2}, 107374182.4, true},
		"without devices":           {"1", nil, 1 << 30, true},
		"a sixth":                   {"1/6", []int64{48 << 30, 48 << 30}, 8 << 30, true},
		"sixths of different cards": {"1/6", []int64{48 << 30, 16 << 30}, 0, false},
		"a sixth of none":           {"1/6", nil, 0, false},
		"a part of nothing":         {"1/0", []int64{1}, 0, false},
		"not counted in memory":     {"", []int64{1}, 0, false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if got, known := UnitBytes(tt.unit, tt.memory); got != tt.want || known != tt.known {
				t.Errorf("%v, %t; want %v, %t", got, known, tt.want, tt.known)
			}
		})
	}
}
