package sharing

import (
	"math"
	"math/big"
	"testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

func unit(t testing.TB, s string) MemoryUnit {
	t.Helper()
	u, err := ParseMemoryUnit(s)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func TestUnits(t *testing.T) {
	const gib = int64(1) << 30
	tests := map[string]struct {
		unit  string
		bytes int64
		want  accel.Units
	}{
		"16 GB in GB":                       {"1", 16 * gib, 16},
		"16 GB in tenths":                   {"0.1", 16 * gib, 160},
		"16 GB in hundredths":               {"0.01", 16 * gib, 1600},
		"32 GB in thousandths":              {"0.001", 32 * gib, 32000},
		"a byte less than a GB":             {"1", gib - 1, 0},
		"a byte less than 16 GB in tenths":  {"0.1", 16*gib - 1, 159},
		"a tenth of a GB rounds up to fit":  {"0.1", gib/10 + 1, 1},
		"a tenth of a GB, one byte short":   {"0.1", gib / 10, 0},
		"nothing":                           {"1", 0, 0},
		"a library that reports a negative": {"1", -1, 0},
		"more than any device has":          {"0.001", math.MaxInt64, 8589934591999},
		"sixths of 48 GB":                   {"1/6", 48 * gib, 6},
		"sixths of an odd size":             {"1/6", 16*gib - 1, 6},
		"sixths of all that there is":       {"1/6", math.MaxInt64, 6},
		"sixths of nothing":                 {"1/6", 0, 0},
		"sixths of a negative":              {"1/6", -1, 0},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if got := unit(t, tt.unit).Units(tt.bytes); got != tt.want {
				t.Errorf("%d bytes are %d units of %s GB, want %d", tt.bytes, got, tt.unit, tt.want)
			}
		})
	}
}

func TestBytes(t *testing.T) {
	tests := map[string]struct {
		unit   string
		units  accel.Units
		memory int64
		want   uint64
	}{
		"GB":                      {"1", 3, 0, 3 << 30},
		"tenths":                  {"0.1", 10, 0, 1 << 30},
		"rounded down":            {"0.001", 1, 0, (1 << 30) / 1000},
		"a whole of thousandth":   {"0.001", 1000, 0, 1 << 30},
		"none":                    {"1", 0, 0, 0},
		"less than none":          {"1", -1, 0, 0},
		"beyond the range":        {"1", math.MaxInt64, 0, math.MaxUint64},
		"a sixth of 48 GB":        {"1/6", 1, 48 << 30, 8 << 30},
		"five sixths, rounded":    {"1/6", 5, 100, 83},
		"all sixths":              {"1/6", 6, 100, 100},
		"a sixth of nothing":      {"1/6", 1, 0, 0},
		"sixths beyond the range": {"1/6", math.MaxInt64, math.MaxInt64, math.MaxUint64},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if got := unit(t, tt.unit).Bytes(tt.units, tt.memory); got != tt.want {
				t.Errorf("%d, want %d", got, tt.want)
			}
		})
	}
}

func TestHolding(t *testing.T) {
	tests := map[string]struct {
		unit   string
		bytes  uint64
		memory int64
		want   accel.Units
	}{
		"whole units":              {"1", 2 << 30, 16 << 30, 2},
		"a byte more":              {"1", 2<<30 + 1, 16 << 30, 3},
		"tenths":                   {"0.1", 2 << 30, 16 << 30, 20},
		"nothing":                  {"1/6", 0, 48 << 30, 0},
		"a byte is a sixth":        {"1/6", 1, 48 << 30, 1},
		"a sixth":                  {"1/6", 8 << 30, 48 << 30, 1},
		"more than a sixth":        {"1/6", 8<<30 + 1, 48 << 30, 2},
		"more than the device has": {"1/6", 96 << 30, 48 << 30, 12},
		"of a device without":      {"1/6", 1, 0, 0},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if got := unit(t, tt.unit).Holding(tt.bytes, tt.memory); got != tt.want {
				t.Errorf("%d units of %s hold %d bytes, want %d", got, tt.unit, tt.bytes, tt.want)
			}
		})
	}
}

func TestParseMemoryUnitRefusesOthers(t *testing.T) {
	for _, s := range []string{"", "2", "0.5", "1.0", "01", "0.0001", "1GB", "-1", "1/5", "2/6", "1/6 "} {
		if u, err := ParseMemoryUnit(s); err == nil {
			t.Errorf("%q was taken for %v", s, u)
		}
	}
}

func FuzzUnits(f *testing.F) {
	f.Add(int64(16)<<30, uint8(0))
	f.Add(int64(math.MaxInt64), uint8(3))
	f.Fuzz(func(t *testing.T, bytes int64, which uint8) {
		text := []string{"1", "0.1", "0.01", "0.001"}[which%4]
		got := unit(t, text).Units(bytes)
		size, _ := new(big.Rat).SetString(text)
		size.Mul(size, big.NewRat(1<<30, 1))
		q := new(big.Rat).Quo(big.NewRat(max(bytes, 0), 1), size)
		want := new(big.Int).Quo(q.Num(), q.Denom())
		if want.Int64() != int64(got) {
			t.Errorf("%d bytes in units of %s: %d, want %d", bytes, text, got, want)
		}
	})
}
