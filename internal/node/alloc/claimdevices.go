package alloc

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
)

// ClaimDevice is a device as ResourceClaims get it: a chip, a board with all its
// chips, a partition, or the time slices of one of these. Several may be made of the
// same chips; claims hold one of them at a time.
type ClaimDevice struct {
	// Name is unique among the vendor's devices of the node. It follows from the uuid
	// and is a DNS label.
	Name string
	// Type is "gpu", "gcu" or "chip" as the vendor has it, TypeBoard, "mig", "drs" or
	// TypeSlots.
	Type string
	Card sharing.Card
	// Shared is true for a device whose memory several claims may have parts of.
	Shared bool
	// Slots is how many time slices it is, 0 for none.
	Slots int
	// Used is the part of its memory or slices that claims hold, up to 1. Packed is true if those
	// that are used most are to be filled first.
	Used   float64
	Packed bool
	// Rank is the position, in the configuration, of the first resource that offers
	// the device in this form.
	Rank int
	// Isolation is what keeps its holders apart.
	Isolation accel.Isolation
	// Elsewhere is as which resource containers hold chips of it without a claim, ""
	// where none does.
	Elsewhere accel.Resource
}

// The types of devices that all vendors have.
const (
	TypeBoard = "board"
	TypeSlots = "slots"
)

// claimDevices returns the devices that claims get, by what the ways of offering
// devices choose, in the order of index, and of the ways. It remembers boards.
//
// What the ways say of units is for kubelet: a device is shared if one of them counts
// its memory.
func claimDevices(vendor *accel.Vendor, ways []Config, chips []accel.Device, boards *sharing.Boards) []ClaimDevice {
	type form struct {
		id    accel.DeviceID
		board bool
		slots bool
	}
	found := map[form]*ClaimDevice{}
	var out []*ClaimDevice
	grouped := boards.Group(chips)
	for rank := range ways {
		way := &ways[rank]
		cards := grouped
		if way.Kind == Memory || way.Cut.SplitBoards {
			cards = sharing.Split(chips)
		}
		for _, card := range cards {
			if way.Chooses != nil && !way.Chooses(card) {
				continue
			}
			slots := 0
			if way.Kind == Slots && way.Cut.Replicas != nil {
				slots = way.Cut.Replicas(card)
			}
			if slots == 1 {
				slots = 0 // it is the whole device
			}
			f := form{card.ID, len(card.Chips) > 1, slots > 0}
			d := found[f]
			if d == nil {
				d = &ClaimDevice{Card: card, Slots: slots, Rank: rank, Type: typeOf(vendor, card)}
				found[f] = d
				out = append(out, d)
			}
			if d.Slots > 0 || way.Kind == Memory && !d.Shared {
				d.Packed = way.Cut.Policy == sharing.Packed
			}
			d.Shared = d.Shared || way.Kind == Memory && card.Parent == ""
		}
	}
	name(out)
	devices := make([]ClaimDevice, len(out))
	for i, d := range out {
		devices[i] = *d
	}
	slices.SortStableFunc(devices, func(a, b ClaimDevice) int {
		return cmp.Or(cmp.Compare(a.Card.Index, b.Card.Index), cmp.Compare(a.Rank, b.Rank))
	})
	return devices
}

// typeOf is the type of a card as a whole.
func typeOf(vendor *accel.Vendor, card sharing.Card) string {
	switch {
	case card.Parent != "":
		return vendor.PartitionBackend
	case len(card.Chips) > 1:
		return TypeBoard
	}
	return vendor.DeviceType
}

// label is what a device may be called.
var label = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// name gives devices, which have the types of their cards, their names and types.
func name(devices []*ClaimDevice) {
	uses := map[string]int{}
	for _, d := range devices {
		d.Name = d.named(strings.ToLower(string(d.Card.ID)))
		uses[d.Name]++
	}
	for _, d := range devices {
		if uses[d.Name] > 1 || !label.MatchString(d.Name) {
			d.Name = d.named(fmt.Sprintf("%x", sha256.Sum256([]byte(d.Card.ID)))[:32])
		}
		if d.Slots > 0 {
			d.Type = TypeSlots
		}
	}
}

// named is the name with an id in lower case, which may begin with the type.
func (d *ClaimDevice) named(id string) string {
	out := d.Type + "-" + strings.TrimPrefix(id, d.Type+"-")
	if d.Slots > 0 {
		out += "-" + TypeSlots
	}
	return out
}

// Overlaps reports whether two devices have a chip in common.
func (d *ClaimDevice) Overlaps(other *ClaimDevice) bool {
	return slices.ContainsFunc(d.Card.Chips, func(chip accel.DeviceID) bool { return slices.Contains(other.Card.Chips, chip) })
}
