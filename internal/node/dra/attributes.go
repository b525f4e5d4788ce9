package dra

import (
	"cmp"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
)

// maxText is the longest text of an attribute, in bytes.
const maxText = resourceapi.DeviceAttributeMaxValueLength

// attributes describe a device. Those that selectors of device classes use are on every
// device: type, uuid, model and memoryMiB, and wholeBoard for a vendor with boards.
func attributes(vendor string, d *alloc.ClaimDevice, facts Facts,
	groups map[accel.DeviceID]string) map[resourceapi.QualifiedName]resourceapi.DeviceAttribute {
	out := map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{}
	text := func(name resourceapi.QualifiedName, value string) {
		if value = cut(value, maxText); value != "" {
			out[name] = resourceapi.DeviceAttribute{StringValue: &value}
		}
	}
	number := func(name resourceapi.QualifiedName, value int64) {
		out[name] = resourceapi.DeviceAttribute{IntValue: &value}
	}
	card := &d.Card
	text(wire.DeviceType, d.Type)
	text(wire.DeviceUUID, string(card.ID))
	text(wire.DeviceModel, cmp.Or(strings.ToValidUTF8(card.Model, ""), "unknown"))
	number("memoryMiB", card.MemoryBytes>>20)
	text("parentUUID", string(card.Parent))
	text("profile", card.Profile)
	if v := accel.VendorNamed(vendor); v != nil && v.DeviceType == "chip" {
		whole := len(card.Chips) > 1 || card.Board == ""
		out["wholeBoard"] = resourceapi.DeviceAttribute{BoolValue: &whole}
	}
	if card.Board != "" {
		text("boardID", card.Board)
		if len(card.Chips) == 1 {
			number("chip", int64(card.Chip))
		}
	}
	text("linkGroup", groups[card.ID])
	text(wire.DeviceIsolation, d.Isolation.Memory.String())
	text("compute", d.Isolation.Compute.String())
	text("driverVersionText", strings.ToValidUTF8(facts.Driver, ""))
	if version := semver(facts.Driver); version != "" {
		out["driverVersion"] = resourceapi.DeviceAttribute{VersionValue: &version}
	}
	if card.NUMANode != accel.NoNUMA {
		number(deviceattribute.StandardDeviceAttributeNUMANode, int64(card.NUMANode))
	}
	if bus, err := deviceattribute.GetPCIBusIDAttribute(strings.ToLower(card.PCI)); err == nil {
		out[bus.Name] = bus.Value
	}
	text(deviceattribute.StandardDeviceAttributePCIeRoot, facts.PCIeRoots[card.PCI])
	return out
}

// linkGroups names, for each card with a direct lane to another one, the cards that are
// connected in this way: by the lowest id among them.
func linkGroups(devices []alloc.ClaimDevice, links []accel.Link) map[accel.DeviceID]string {
	cards := map[accel.DeviceID]sharing.Card{} // boards stand for their chips
	for _, d := range devices {
		if len(d.Card.Chips) >= len(cards[d.Card.ID].Chips) {
			cards[d.Card.ID] = d.Card
		}
	}
	group := map[accel.DeviceID]accel.DeviceID{}
	for _, l := range links {
		if l.Score < accel.LinkLane {
			continue
		}
		a, b := cmp.Or(group[l.A], l.A), cmp.Or(group[l.B], l.B)
		lowest := min(a, b)
		group[l.A], group[l.B] = lowest, lowest
		for id, g := range group {
			if g == a || g == b {
				group[id] = lowest
			}
		}
	}
	out := map[accel.DeviceID]string{}
	for id, card := range cards {
		for _, chip := range card.Chips {
			if g, linked := group[chip]; linked && out[id] == "" {
				out[id] = string(g)
			}
		}
	}
	return out
}

// cut shortens a text to a number of bytes, between characters.
func cut(s string, most int) string {
	if len(s) <= most {
		return s
	}
	for most > 0 && !utf8.RuneStart(s[most]) {
		most--
	}
	return s[:most]
}

// numbers are the parts of a driver's version.
var numbers = regexp.MustCompile(`^[0-9]{1,9}(\.[0-9]{1,9}){0,2}$`)

// semver is a driver's version as a semantic version, which has three numbers without
// leading zeros; "" if it is none.
func semver(version string) string {
	if !numbers.MatchString(version) {
		return ""
	}
	parts := strings.Split(version, ".")
	for i, p := range parts {
		n, err := strconv.Atoi(p)
		if err != nil {
			return ""
		}
		parts[i] = strconv.Itoa(n)
	}
	return strings.Join(append(parts, "0", "0")[:3], ".")
}

// notLabel is what a label's value may not contain.
var notLabel = regexp.MustCompile(`[^-A-Za-z0-9_.]+`)

// labelValue makes a cause the value of a taint.
func labelValue(cause string) string {
	return strings.Trim(cut(strings.Trim(notLabel.ReplaceAllString(cause, "-"), "-_."), 63), "-_.")
}
