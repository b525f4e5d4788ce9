package wire

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// InventoryAnnotation is the annotation of a Node that carries its inventory.
const InventoryAnnotation = "divvy.dev/inventory"

// InventoryVersion is the version of the document in InventoryAnnotation.
const InventoryVersion = 1

// maxInventoryBytes leaves half of what Kubernetes allows for all annotations of an
// object (256 KiB) to others; it is enough for several hundred devices.
const maxInventoryBytes = 128 << 10

type inventoryV1 struct {
	Version   int          `json:"v"`
	Resources []resourceV1 `json:"resources"`
}

type resourceV1 struct {
	Resource accel.Resource `json:"resource"`
	Unit     string         `json:"unit,omitempty"`
	Several  bool           `json:"several,omitempty"`
	Least    accel.Units    `json:"least,omitempty"`
	Devices  []deviceV1     `json:"devices"`
	// Links name devices by their positions in Devices.
	Links []linkV1 `json:"links,omitempty"`
}

// linkV1 is two positions, the lower one first, and the score: with the names of
// the devices, the links of a large node would be longer than all the rest.
type linkV1 [3]int

type deviceV1 struct {
	Index       int            `json:"index"`
	ID          accel.DeviceID `json:"id"`
	Units       accel.Units    `json:"units"`
	Withheld    accel.Units    `json:"withheld,omitempty"`
	MemoryBytes int64          `json:"memoryBytes,omitempty"`
	Model       string         `json:"model,omitempty"`
	// NUMA is absent when it is not known.
	NUMA  *int   `json:"numa,omitempty"`
	Board string `json:"board,omitempty"`
	Chip  int    `json:"chip,omitempty"`
	Chips int    `json:"chips,omitempty"`
	PCI   string `json:"pci,omitempty"`
	// Parent and Profile are those of a partition.
	Parent    accel.DeviceID `json:"parent,omitempty"`
	Profile   string         `json:"profile,omitempty"`
	Unhealthy bool           `json:"unhealthy,omitempty"`
	Reason    string         `json:"reason,omitempty"`
	// Quarantined is absent for a device that is not in quarantine.
	Quarantined time.Time `json:"quarantined,omitzero"`
	// Tier and the rest are of accel.Isolation; absent for none.
	Tier     accel.Tier `json:"tier,omitempty"`
	Compute  accel.Tier `json:"compute,omitempty"`
	Backend  string     `json:"backend,omitempty"`
	Attested time.Time  `json:"attested,omitzero"`
}

// isolate puts what isolates the device into it.
func (d *deviceV1) isolate(i accel.Isolation) {
	if i = knownIsolation(i); i != (accel.Isolation{}) {
		d.Tier, d.Compute, d.Backend, d.Attested = i.Memory, i.Compute, i.Backend, i.Attested
	}
}

// isolation is the inverse of isolate. A tier that a newer release states is none here, since
// what it promises is not known.
func (d *deviceV1) isolation() accel.Isolation {
	return knownIsolation(accel.Isolation{Memory: d.Tier, Compute: d.Compute, Backend: d.Backend, Attested: d.Attested})
}

func knownIsolation(i accel.Isolation) accel.Isolation {
	known := func(t accel.Tier) accel.Tier {
		tier, _ := accel.ParseTier(t.String())
		return tier
	}
	i.Memory, i.Compute = known(i.Memory), known(i.Compute)
	if i.Compute == accel.TierDriver {
		i.Compute = accel.TierNone // no driver limits compute time
	}
	if i.Memory == accel.TierNone && i.Compute == accel.TierNone {
		return accel.Isolation{}
	}
	i.Attested = seconds(i.Attested)
	return i
}

// EncodeInventory returns the annotation's value: resources in the order of
// their names, devices in the order of their indexes. It rejects what
// DecodeInventory would reject. Links of devices that are not in the inventory
// are left out, and all links where the value would be too long with them.
func EncodeInventory(inv []accel.Inventory) (string, error) {
	doc := inventoryV1{Version: InventoryVersion, Resources: make([]resourceV1, 0, len(inv))}
	for _, in := range inv {
		r := resourceV1{Resource: in.Resource, Unit: in.Unit, Several: in.Several, Least: in.Least,
			Devices: make([]deviceV1, 0, len(in.Shares))}
		for _, s := range in.Shares {
			d := deviceV1{
				Index: s.Index, ID: s.ID, Units: s.Units, Withheld: s.Withheld, MemoryBytes: s.MemoryBytes, Model: s.Model,
				Board: s.Board, Chip: s.Chip, Chips: s.Chips, PCI: s.PCI, Unhealthy: s.Health.Unhealthy, Reason: s.Health.Reason,
				Quarantined: seconds(s.Health.Quarantined), Parent: s.Parent, Profile: s.Profile,
			}
			d.isolate(s.Isolation)
			if s.NUMANode >= 0 {
				d.NUMA = &s.NUMANode
			}
			r.Devices = append(r.Devices, d)
		}
		slices.SortStableFunc(r.Devices, func(a, b deviceV1) int { return cmp.Compare(a.Index, b.Index) })
		r.Links = linksOf(r.Devices, in.Links)
		doc.Resources = append(doc.Resources, r)
	}
	slices.SortStableFunc(doc.Resources, func(a, b resourceV1) int { return cmp.Compare(a.Resource, b.Resource) })
	text, err := encode("inventory", &doc, maxInventoryBytes)
	if err != nil && doc.forgetLinks() {
		return encode("inventory", &doc, maxInventoryBytes)
	}
	return text, err
}

// seconds is the time in UTC and whole seconds, so that equal times are equal values.
func seconds(t time.Time) time.Time {
	t = t.UTC().Truncate(time.Second)
	if t.IsZero() || t.Year() < 1 || t.Year() > 9999 { // others cannot be written
		return time.Time{}
	}
	return t
}

// forgetLinks reports whether there were any.
func (doc *inventoryV1) forgetLinks() bool {
	had := false
	for i := range doc.Resources {
		had = had || len(doc.Resources[i].Links) > 0
		doc.Resources[i].Links = nil
	}
	return had
}

// linksOf writes the links between the devices by their positions, sorted.
func linksOf(devices []deviceV1, links []accel.Link) []linkV1 {
	if len(links) == 0 {
		return nil
	}
	at := make(map[accel.DeviceID]int, len(devices))
	for i, d := range devices {
		at[d.ID] = i
	}
	var out []linkV1
	for _, l := range links {
		a, knownA := at[l.A]
		b, knownB := at[l.B]
		if knownA && knownB && a != b && l.Score > 0 {
			out = append(out, linkV1{min(a, b), max(a, b), l.Score})
		}
	}
	slices.SortFunc(out, func(a, b linkV1) int { return slices.Compare(a[:], b[:]) })
	return slices.Compact(out)
}

// DecodeInventory reads the annotation's value. Its errors are *SyntaxError.
func DecodeInventory(s string) ([]accel.Inventory, error) {
	var doc inventoryV1
	if err := decode("inventory", s, maxInventoryBytes, &doc); err != nil {
		return nil, err
	}
	out := make([]accel.Inventory, 0, len(doc.Resources))
	for _, r := range doc.Resources {
		in := accel.Inventory{Resource: r.Resource, Unit: r.Unit, Several: r.Several, Least: max(r.Least, 0),
			Shares: make([]accel.Share, 0, len(r.Devices))}
		for _, d := range r.Devices {
			s := accel.Share{Units: d.Units, Withheld: d.Withheld, Chips: d.Chips, Isolation: d.isolation(), Device: accel.Device{
				Index: d.Index, ID: d.ID, Model: d.Model, MemoryBytes: d.MemoryBytes, NUMANode: accel.NoNUMA,
				Board: d.Board, Chip: d.Chip, PCI: d.PCI, Parent: d.Parent, Profile: d.Profile,
				Health: accel.Health{Unhealthy: d.Unhealthy, Reason: d.Reason,
					Quarantined: seconds(d.Quarantined)},
			}}
			if d.NUMA != nil && *d.NUMA >= 0 {
				s.NUMANode = *d.NUMA
			}
			in.Shares = append(in.Shares, s)
		}
		for _, l := range r.Links { // by the positions as written
			a, b := r.Devices[l[0]].ID, r.Devices[l[1]].ID
			in.Links = append(in.Links, accel.Link{A: min(a, b), B: max(a, b), Score: l[2]})
		}
		slices.SortFunc(in.Links, func(x, y accel.Link) int {
			return cmp.Or(cmp.Compare(x.A, y.A), cmp.Compare(x.B, y.B), cmp.Compare(x.Score, y.Score))
		})
		in.Links = slices.Compact(in.Links)
		slices.SortFunc(in.Shares, func(a, b accel.Share) int { return cmp.Compare(a.Index, b.Index) })
		out = append(out, in)
	}
	slices.SortFunc(out, func(a, b accel.Inventory) int { return cmp.Compare(a.Resource, b.Resource) })
	return out, nil
}

// validate reports all mistakes at once.
func (doc *inventoryV1) validate() error {
	if doc.Version != InventoryVersion {
		return versionError(doc.Version, InventoryVersion)
	}
	var errs []error
	resources := make(map[accel.Resource]bool, len(doc.Resources))
	for _, r := range doc.Resources {
		if r.Resource == "" {
			errs = append(errs, errors.New("a resource has no name"))
		}
		if resources[r.Resource] {
			errs = append(errs, fmt.Errorf("resource %q is listed twice", r.Resource))
		}
		resources[r.Resource] = true
		if !utf8.ValidString(string(r.Resource)) || !utf8.ValidString(r.Unit) {
			errs = append(errs, fmt.Errorf("resource %q: its name or unit is not valid UTF-8", r.Resource))
		}
		for _, err := range r.mistakes() {
			errs = append(errs, fmt.Errorf("resource %q: %w", r.Resource, err))
		}
	}
	return errors.Join(errs...)
}

func (r *resourceV1) mistakes() []error {
	var errs []error
	byID := make(map[accel.DeviceID]int, len(r.Devices))
	byIndex := make(map[int]accel.DeviceID, len(r.Devices))
	for _, d := range r.Devices {
		if d.ID == "" {
			errs = append(errs, fmt.Errorf("the device with index %d has no uuid", d.Index))
		} else if other, dup := byID[d.ID]; dup {
			errs = append(errs, fmt.Errorf("the devices with index %d and %d have the same uuid %q", other, d.Index, d.ID))
		} else {
			byID[d.ID] = d.Index
		}
		if d.Index < 0 {
			errs = append(errs, fmt.Errorf("device %q has the index %d, below 0", d.ID, d.Index))
		} else if other, dup := byIndex[d.Index]; dup {
			errs = append(errs, fmt.Errorf("the devices %q and %q have the same index %d", other, d.ID, d.Index))
		} else {
			byIndex[d.Index] = d.ID
		}
		if d.Units < 0 || d.Units > accel.MaxUnits {
			errs = append(errs, fmt.Errorf("device %q has %d units, not from 0 to %d", d.ID, d.Units, accel.MaxUnits))
		} else if d.Withheld < 0 || d.Withheld > d.Units {
			errs = append(errs, fmt.Errorf("device %q has %d withheld units, not from 0 to its %d units", d.ID, d.Withheld, d.Units))
		}
		if d.MemoryBytes < 0 {
			errs = append(errs, fmt.Errorf("device %q has %d bytes of memory, below 0", d.ID, d.MemoryBytes))
		}
		if d.Chip < 0 || d.Chips < 0 {
			errs = append(errs, fmt.Errorf("device %q is chip %d, made of %d chips, below 0", d.ID, d.Chip, d.Chips))
		}
		for _, s := range []string{string(d.ID), d.Model, d.Board, d.PCI, d.Reason, string(d.Parent), d.Profile, d.Backend} {
			if !utf8.ValidString(s) {
				errs = append(errs, fmt.Errorf("device %q: %q is not valid UTF-8", d.ID, s))
			}
		}
	}
	for _, l := range r.Links {
		if l[0] < 0 || l[0] >= l[1] || l[1] >= len(r.Devices) || l[2] <= 0 {
			errs = append(errs, fmt.Errorf("a link is %v, not two positions in the list of %d devices, the lower one first, and a score "+
				"above 0", l, len(r.Devices)))
		}
	}
	return errs
}

func versionError(got, known int) error {
	switch {
	case got > known:
		return fmt.Errorf("version %d was written by a newer release, this one reads version %d", got, known)
	case got <= 0:
		return fmt.Errorf("no valid version, want \"v\":%d", known)
	default:
		return fmt.Errorf("version %d is no longer read, want %d", got, known)
	}
}
