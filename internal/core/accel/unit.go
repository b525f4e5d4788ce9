package accel

import (
	"slices"
	"strconv"
	"strings"
)

// UnitName is the size of a unit, as Inventory.Unit has it, in words: "0.1 GB", "1/6 of a card".
func UnitName(unit string) string {
	if _, part := strings.CutPrefix(unit, "1/"); part {
		return unit + " of a card"
	}
	return unit + " GB"
}

// UnitBytes returns the size in bytes of a unit, as Inventory.Unit has it, on devices with so much
// memory; false if it is not known, or not the same on all.
func UnitBytes(unit string, memory []int64) (float64, bool) {
	parts, part := strings.CutPrefix(unit, "1/")
	if !part {
		gb, err := strconv.ParseFloat(unit, 64)
		return gb * (1 << 30), err == nil
	}
	n, err := strconv.ParseUint(parts, 10, 31)
	if err != nil || n == 0 || len(memory) == 0 || slices.Min(memory) != slices.Max(memory) {
		return 0, false
	}
	return float64(memory[0]) / float64(n), true
}
