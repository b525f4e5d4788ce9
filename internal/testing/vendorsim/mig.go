package vendorsim

import (
	"cmp"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"math"
	"slices"
	"strings"
)

// MIGDevice is a MIG device of a card: a compute instance in a GPU instance. Only
// Profile is required. What else is not set follows from it, from the card and
// from the card's other MIG devices, see MIGInstances; it may be set to what
// cannot be, too.
type MIGDevice struct {
	// Index is its number on the card, 0 to MaxMIGDevices-1. Numbers may be left
	// out.
	Index int
	// Profile is one that the card has, such as "1g.10gb" or "1c.2g.20gb".
	Profile string
	// GI and CI are the numbers of the GPU instance, 0 to 14, and of the compute
	// instance in it, 0 to 7.
	GI, CI *int
	UUID   string
	// MemoryMiB is in MiB.
	MemoryMiB *int64
	Caps      MIGCaps
	// XID is the critical error of this instance that happened last.
	XID XID
}

// MIGCaps are the minors of the device files that give access to a MIG device.
type MIGCaps struct {
	GPUInstance, ComputeInstance int
	// Missing says that the files do not exist. Both minors are 0 then.
	Missing bool
}

// String returns the value of a caps key.
func (c MIGCaps) String() string {
	if c.Missing {
		return noCaps
	}
	return fmt.Sprintf("%d,%d", c.GPUInstance, c.ComputeInstance)
}

const noCaps = "none"

// MaxMIGDevices is how many MIG devices a card can have.
const MaxMIGDevices = 7

// Numbers of instances, the same as in c/topology.h.
const (
	gpuInstances     = 15
	computeInstances = 8
)

// MIGInstance is a MIG device of which everything is known.
type MIGInstance struct {
	Index     int
	Profile   string
	GI, CI    int
	UUID      string
	MemoryMiB int64
	// Caps has the minors even if the files are missing.
	Caps MIGCaps
}

// Partition returns the card in MIG mode with a MIG device of each profile, in
// this order. An empty profile leaves its number out.
func Partition(c Card, profiles ...string) Card {
	c.MIG, c.MIGDevices = MIGEnabled, nil
	for i, profile := range profiles {
		if profile != "" {
			c.MIGDevices = append(c.MIGDevices, MIGDevice{Index: i, Profile: profile})
		}
	}
	return c
}

// MIGInstances returns the MIG devices of a card by their numbers, as NVIDIA's
// library describes them: none unless the card is in MIG mode. The topology must
// be valid.
func (t Topology) MIGInstances(card int) []MIGInstance {
	c := t.Cards[card]
	if !c.migCapable() || c.MIG != MIGEnabled {
		return nil
	}
	devices := slices.SortedFunc(slices.Values(c.MIGDevices), func(a, b MIGDevice) int { return cmp.Compare(a.Index, b.Index) })
	at := instancesOf(c, devices)
	minor := t.MinorOf(card)
	out := make([]MIGInstance, len(devices))
	for i, d := range devices {
		p, _, _ := c.migProfile(d.Profile)
		m := MIGInstance{Index: d.Index, Profile: d.Profile, GI: at[i].gpu, CI: at[i].compute, UUID: d.UUID, Caps: d.Caps}
		if m.UUID == "" {
			m.UUID = migUUID(c.UUID, at[i])
		}
		m.MemoryMiB = c.MemoryMiB * p.eighths * 31 / (8 * 32) // the rest is the driver's
		if d.MemoryMiB != nil {
			m.MemoryMiB = *d.MemoryMiB
		}
		if m.Caps.GPUInstance == 0 {
			m.Caps.GPUInstance = gpuCapability(minor, m.GI)
			m.Caps.ComputeInstance = computeCapability(minor, m.GI, m.CI)
		}
		out[i] = m
	}
	return out
}

func (c Card) migCapable() bool { return c.Vendor == NVIDIA && c.MIG != MIGNotSupported }

// A migProfile is a profile of GPU instances.
type migProfile struct {
	// slices are those of compute, eighths those of the card's memory.
	slices, eighths int64
	suffix          string
}

// Profiles by the models that have them, in the order of the tables in c/mig.c.
var (
	sevenths = []migProfile{{1, 1, ""}, {1, 1, "+me"}, {1, 2, ""}, {2, 2, ""}, {3, 4, ""}, {4, 4, ""}, {7, 8, ""}}
	quarters = []migProfile{
		{1, 2, ""}, {1, 2, "+me"}, {1, 2, "+gfx"}, {1, 2, "+me.all"}, {1, 2, "-me"},
		{2, 4, ""}, {2, 4, "+me"}, {2, 4, "+gfx"}, {2, 4, "+me.all"}, {2, 4, "-me"},
		{4, 8, ""}, {4, 8, "+gfx"},
	}
)

// migProfile returns the profile that gives a MIG device of the card its name,
// and the slices of the compute instance.
func (c Card) migProfile(name string) (p migProfile, compute int64, ok bool) {
	table := sevenths
	if strings.Contains(c.Model, "A30") || strings.Contains(c.Model, "RTX PRO") {
		table = quarters
	}
	for _, p := range table {
		for compute := int64(1); compute <= p.slices; compute++ {
			fits := compute == p.slices || 2*compute <= p.slices+1
			if fits && name == c.migName(p, compute) {
				return p, compute, true
			}
		}
	}
	return migProfile{}, 0, false
}

func (c Card) migName(p migProfile, compute int64) string {
	part := ""
	if compute != p.slices {
		part = fmt.Sprintf("%dc.", compute)
	}
	gib := (c.MemoryMiB + 1023) / 1024
	return fmt.Sprintf("%s%dg.%dgb%s", part, p.slices, (gib*p.eighths+4)/8, p.suffix)
}

// migPlace has the numbers of the instances of a MIG device.
type migPlace struct{ gpu, compute int }

// instancesOf returns where MIG devices are, which are in the order of their
// numbers. Neighbours that are parts of GPU instances of one profile share one
// for as long as it has slices left.
func instancesOf(c Card, devices []MIGDevice) []migPlace {
	out := make([]migPlace, len(devices))
	var taken [gpuInstances][computeInstances]bool
	var known [gpuInstances]bool
	for _, d := range devices {
		if d.GI != nil {
			known[*d.GI] = true
		}
	}
	for i, d := range devices {
		p, compute, _ := c.migProfile(d.Profile)
		switch {
		case d.GI != nil:
			out[i].gpu = *d.GI
		case i > 0 && devices[i-1].GI == nil && devices[i-1].Profile == d.Profile && compute < p.slices &&
			c.usedSlices(devices[:i], out, out[i-1].gpu)+compute <= p.slices:
			out[i].gpu = out[i-1].gpu
		default:
			gpu := int(8/max(p.eighths, 1)) - 1 // where numbers of this size begin
			for known[gpu] {
				gpu++
			}
			known[gpu], out[i].gpu = true, gpu
		}
	}
	for i, d := range devices {
		if d.CI != nil {
			out[i].compute = *d.CI
			taken[out[i].gpu][*d.CI] = true
		}
	}
	for i, d := range devices {
		if d.CI != nil {
			continue
		}
		of := &taken[out[i].gpu]
		out[i].compute = slices.Index(of[:], false)
		of[out[i].compute] = true
	}
	return out
}

// usedSlices returns the slices of the MIG devices in a GPU instance.
func (c Card) usedSlices(devices []MIGDevice, at []migPlace, gpu int) (used int64) {
	for i, d := range devices {
		if at[i].gpu == gpu {
			_, compute, _ := c.migProfile(d.Profile)
			used += compute
		}
	}
	return used
}

// migUUID returns a uuid that is the same for the same instance of a card.
func migUUID(card string, at migPlace) string {
	text := fmt.Sprintf("%s/%d/%d", card, at.gpu, at.compute)
	hash := fnv.New64a()
	_, _ = io.WriteString(hash, text) // a hash takes everything
	a := hash.Sum64()
	_, _ = io.WriteString(hash, text)
	b := hash.Sum64()
	return fmt.Sprintf("MIG-%08x-%04x-5%03x-%04x-%012x", a>>32, a>>16&0xffff, a&0xfff, b>>48&0x3fff|0x8000, b&0xffffffffffff)
}

// checkMIG checks the MIG devices of a card.
func (c Card) checkMIG(card int) []error {
	var errs []error
	seen := map[int]bool{}
	for _, d := range c.MIGDevices {
		check := func(err error) {
			if err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", migSectionName(card, d.Index), err))
			}
		}
		check(checkRange("number of the mig", int64(d.Index), 0, MaxMIGDevices-1))
		if seen[d.Index] {
			check(errors.New("is described twice"))
		}
		seen[d.Index] = true
		check(c.checkMIGProfile(d.Profile))
		check(checkWritable("uuid", d.UUID))
		if d.GI != nil {
			check(checkRange("gi", int64(*d.GI), 0, gpuInstances-1))
		}
		if d.CI != nil {
			check(checkRange("ci", int64(*d.CI), 0, computeInstances-1))
		}
		if d.MemoryMiB != nil {
			check(checkRange("memory_mib", *d.MemoryMiB, 0, math.MaxUint32))
		}
		if d.Caps.Missing && d.Caps != (MIGCaps{Missing: true}) {
			check(errors.New("has caps that are missing and are not"))
		}
		if !d.Caps.Missing && d.Caps != (MIGCaps{}) {
			check(checkRange("caps", int64(d.Caps.GPUInstance), 1, maxMinor))
			check(checkRange("caps", int64(d.Caps.ComputeInstance), 1, maxMinor))
		}
		if d.XID != (XID{}) {
			check(d.XID.check())
		}
	}
	return errs
}

// checkMIGProfile checks that the card can have MIG devices of a profile.
func (c Card) checkMIGProfile(profile string) error {
	if c.Vendor != NVIDIA {
		return errors.New("is of a card that is not NVIDIA's")
	}
	if _, _, ok := c.migProfile(profile); !ok {
		return fmt.Errorf("has profile \"%s\", which its card does not have", profile)
	}
	return nil
}

func migSectionName(card, index int) string { return fmt.Sprintf("[mig %d.%d]", card, index) }

func (d MIGDevice) encode(b *strings.Builder, card int) {
	fmt.Fprintf(b, "\n%s\nprofile = %s\n", migSectionName(card, d.Index), d.Profile)
	if d.GI != nil {
		fmt.Fprintf(b, "gi = %d\n", *d.GI)
	}
	if d.CI != nil {
		fmt.Fprintf(b, "ci = %d\n", *d.CI)
	}
	if d.UUID != "" {
		fmt.Fprintf(b, "uuid = %s\n", d.UUID)
	}
	if d.MemoryMiB != nil {
		fmt.Fprintf(b, "memory_mib = %d\n", *d.MemoryMiB)
	}
	if d.Caps != (MIGCaps{}) {
		fmt.Fprintf(b, "caps = %s\n", d.Caps)
	}
	if d.XID != (XID{}) {
		fmt.Fprintf(b, "xid = %s\n", d.XID)
	}
}

// cloneMIG returns a copy that shares nothing with devices.
func cloneMIG(devices []MIGDevice) []MIGDevice {
	devices = slices.Clone(devices)
	for i := range devices {
		d := &devices[i]
		d.GI, d.CI, d.MemoryMiB = clonePointer(d.GI), clonePointer(d.CI), clonePointer(d.MemoryMiB)
	}
	return devices
}

func clonePointer[T any](p *T) *T {
	if p == nil {
		return nil
	}
	return new(*p)
}
