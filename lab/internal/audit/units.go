package audit

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
)

// Units says which card a unit id of kubelet's belongs to.
type Units []unitRange

// unitRange is a run of unit numbers of one card.
type unitRange struct {
	Device string `json:"device"`
	Start  int64  `json:"start"`
	Units  int64  `json:"units"`
}

func readUnits(path string) (Units, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read which units belong to which card: %w", err)
	}
	var file struct {
		State struct {
			Ranges Units `json:"ranges"`
		} `json:"state"`
	}
	if err := json.Unmarshal(data, &file); err != nil {
		return nil, fmt.Errorf("read which units belong to which card: %s: %w", path, err)
	}
	return file.State.Ranges, nil
}

// Card returns the uuid of the card that a unit belongs to, "" for none.
func (u Units) Card(id string) string {
	number, ok := unitNumber(id)
	if !ok {
		return ""
	}
	for _, r := range u {
		if number >= r.Start && number < r.Start+r.Units {
			return r.Device
		}
	}
	return ""
}

// unitDigits are the digits of unit ids, in order (docs/design/003-unit-ids.md).
const unitDigits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"

// unitNumber reads an id: first all of one digit, then all of two, and so on.
func unitNumber(id string) (int64, bool) {
	if id == "" || len(id) > 8 {
		return 0, false
	}
	var number, shorter, block int64
	block = 1
	for range len(id) - 1 {
		block *= int64(len(unitDigits))
		shorter += block
	}
	for _, digit := range []byte(id) {
		value := strings.IndexByte(unitDigits, digit)
		if value < 0 {
			return 0, false
		}
		number = number*int64(len(unitDigits)) + int64(value)
	}
	return shorter + number, true
}
