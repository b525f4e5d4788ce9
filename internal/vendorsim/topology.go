package vendorsim

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Topology is what the simulated hardware looks like. The zero value is a
// loaded driver without cards.
//
// It may describe hardware that cannot be, such as two cards with one uuid, an
// empty uuid or a card without memory: the programs under test must cope.
type Topology struct {
	Driver  Driver
	Library Library
	// Cards are the cards of all vendors. A card's number is its place here.
	// Each vendor's library sees its own cards only and numbers those from 0.
	Cards []Card
}

// Driver is the vendor's driver in the kernel.
type Driver struct {
	// State is DriverLoaded when empty.
	State DriverState
	// Version is DefaultDriverVersion when empty.
	Version string
}

// DriverState says whether the driver works.
type DriverState string

// The states of a driver. A driver that was not loaded for a moment must be
// initialised again, as the vendors' must.
const (
	DriverLoaded DriverState = "loaded"
	DriverAbsent DriverState = "absent" // calls say that the driver is not loaded
	DriverBroken DriverState = "broken" // calls fail
)

// DefaultDriverVersion is the version of a driver for which none is given.
const DefaultDriverVersion = "1.0.0"

// Library is the behaviour of the vendor's library.
type Library struct {
	// Delay is how long every call takes, whole milliseconds up to an hour.
	// Calls that are waiting when it shrinks end early.
	Delay time.Duration
	// Fail maps the functions that fail to the code that they return.
	Fail Failures
}

// Failures maps names of the vendor's functions to the codes, 1 to 999, that
// they return instead of doing anything.
type Failures map[string]int

// Card is one simulated card.
type Card struct {
	// Vendor is one of Vendors.
	Vendor string
	Model  string
	// UUID is the vendor's uuid; for Enflame's without the prefix "GCU-".
	UUID string
	// MemoryMiB and UsedMiB are in MiB.
	MemoryMiB, UsedMiB int64
	// NUMA is the card's NUMA node, -1 when not known.
	NUMA int
	// Minor is the number in the name of the card's device file, the card's
	// number when nil.
	Minor *int
	// Unhealthy makes the library call the card unhealthy.
	Unhealthy bool
	// Lost makes all calls about the card fail. It is still counted.
	Lost bool
	// Fail is like Library.Fail, for calls about this card alone.
	Fail Failures
}

// Vendors are the vendors that a card can be of.
var Vendors = []string{Enflame, "nvidia", "iluvatar"}

// Enflame is the vendor of GCUs.
const Enflame = "enflame"

// Limits of the format, the same as in c/topology.h.
const (
	maxText      = 63      // bytes of a model, uuid or version
	maxCards     = 1024    // cards of all vendors
	maxFailures  = 32      // functions in one fail key
	maxMinor     = 1048575 // Linux has 20 bits for it
	maxNUMA      = 1023
	maxFileBytes = 1024 * 1024
	maxDelay     = time.Hour
)

// GCUs returns n healthy cards of Enflame's model S60 with memoryMiB MiB each,
// on NUMA node 0, with uuids that differ.
func GCUs(n int, memoryMiB int64) []Card {
	cards := make([]Card, n)
	for i := range cards {
		cards[i] = Card{
			Vendor:    Enflame,
			Model:     "S60",
			UUID:      fmt.Sprintf("U530000901%02d", i),
			MemoryMiB: memoryMiB,
		}
	}
	return cards
}

// Clone returns a copy that shares nothing with t.
func (t Topology) Clone() Topology {
	t.Library.Fail = maps.Clone(t.Library.Fail)
	t.Cards = slices.Clone(t.Cards)
	for i := range t.Cards {
		c := &t.Cards[i]
		c.Fail = maps.Clone(c.Fail)
		if c.Minor != nil {
			c.Minor = new(*c.Minor)
		}
	}
	return t
}

// Validate returns an error that tells all that the format cannot hold, a line
// each.
func (t Topology) Validate() error {
	var errs []error
	check := func(where string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", where, err))
		}
	}
	if t.Driver.State != "" {
		check("[driver]", checkState(string(t.Driver.State)))
	}
	check("[driver]", checkWritable("version", t.Driver.Version))
	if d := t.Library.Delay; d < 0 || d > maxDelay || d%time.Millisecond != 0 {
		check("[library]", fmt.Errorf("delay of %v is not in whole milliseconds from 0 to %v", d, maxDelay))
	}
	for _, err := range t.Library.Fail.check() {
		check("[library]", err)
	}
	if len(t.Cards) > maxCards {
		check("cards", fmt.Errorf("there are %d, at most %d are possible", len(t.Cards), maxCards))
	}
	for i, c := range t.Cards {
		where := fmt.Sprintf("[card %d]", i)
		check(where, checkVendor(c.Vendor))
		check(where, checkWritable("model", c.Model))
		check(where, checkWritable("uuid", c.UUID))
		check(where, checkRange("memory_mib", c.MemoryMiB, 0, math.MaxUint32))
		check(where, checkRange("used_mib", c.UsedMiB, 0, math.MaxUint32))
		if c.UsedMiB > c.MemoryMiB {
			check(where, errors.New("has used_mib above memory_mib"))
		}
		check(where, checkRange("numa", int64(c.NUMA), -1, maxNUMA))
		if c.Minor != nil {
			check(where, checkRange("minor", int64(*c.Minor), 0, maxMinor))
		}
		for _, err := range c.Fail.check() {
			check(where, err)
		}
	}
	return errors.Join(errs...)
}

// Encode returns the topology as the text of its file.
func (t Topology) Encode() ([]byte, error) {
	if err := t.Validate(); err != nil {
		return nil, fmt.Errorf("encode topology:\n%w", err)
	}
	var b strings.Builder
	b.WriteString("# Simulated hardware. docs/simulated-hardware.md describes this file.\n")
	state := t.Driver.State
	if state == "" {
		state = DriverLoaded
	}
	fmt.Fprintf(&b, "[driver]\nstate = %s\n", state)
	if t.Driver.Version != "" {
		fmt.Fprintf(&b, "version = %s\n", t.Driver.Version)
	}
	fmt.Fprintf(&b, "\n[library]\ndelay_ms = %d\n", t.Library.Delay.Milliseconds())
	if len(t.Library.Fail) > 0 {
		fmt.Fprintf(&b, "fail = %s\n", t.Library.Fail)
	}
	for i, c := range t.Cards {
		fmt.Fprintf(&b, "\n[card %d]\nvendor = %s\nmodel = %s\nuuid = %s\nmemory_mib = %d\nnuma = %d\n",
			i, c.Vendor, c.Model, c.UUID, c.MemoryMiB, c.NUMA)
		if c.Minor != nil {
			fmt.Fprintf(&b, "minor = %d\n", *c.Minor)
		}
		health := "healthy"
		if c.Unhealthy {
			health = "unhealthy"
		}
		fmt.Fprintf(&b, "health = %s\nlost = %t\nused_mib = %d\n", health, c.Lost, c.UsedMiB)
		if len(c.Fail) > 0 {
			fmt.Fprintf(&b, "fail = %s\n", c.Fail)
		}
	}
	return []byte(b.String()), nil
}

// Write puts the topology into the file at path in one step: a stand-in that
// reads the file sees the old one or the new one.
func (t Topology) Write(path string) (err error) {
	data, err := t.Encode()
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".topology-")
	if err != nil {
		return fmt.Errorf("write topology: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("write topology: %w", err), os.Remove(f.Name()))
		}
	}()
	_, err = f.Write(data)
	if err == nil {
		err = f.Chmod(0o644) // others than the writer may run the library
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

// String returns the value of a fail key, in a fixed order.
func (f Failures) String() string {
	items := make([]string, 0, len(f))
	for _, name := range slices.Sorted(maps.Keys(f)) {
		items = append(items, fmt.Sprintf("%s:%d", name, f[name]))
	}
	return strings.Join(items, ",")
}

func (f Failures) check() []error {
	var errs []error
	if len(f) > maxFailures {
		errs = append(errs, fmt.Errorf("fail has more than %d functions", maxFailures))
	}
	for _, name := range slices.Sorted(maps.Keys(f)) {
		if !isFunctionName(name) {
			errs = append(errs, fmt.Errorf("fail names %q, which is no function", name))
		}
		if err := checkRange("fail code", int64(f[name]), 1, 999); err != nil {
			errs = append(errs, err)
		}
	}
	return errs
}

// The checks below have the texts of c/topology.c.

func checkState(state string) error {
	switch DriverState(state) {
	case DriverLoaded, DriverAbsent, DriverBroken:
		return nil
	}
	return fmt.Errorf("state = \"%s\" is not loaded, absent or broken", state)
}

func checkVendor(vendor string) error {
	if slices.Contains(Vendors, vendor) {
		return nil
	}
	return fmt.Errorf("vendor = \"%s\" is not enflame, nvidia or iluvatar", vendor)
}

func checkRange(key string, n, low, high int64) error {
	if n < low || n > high {
		return rangeError(key, fmt.Sprint(n), low, high)
	}
	return nil
}

func rangeError(key, value string, low, high int64) error {
	return fmt.Errorf("%s = \"%s\" is not an integer from %d to %d", key, value, low, high)
}

func checkText(key, value string) error {
	if len(value) > maxText {
		return fmt.Errorf("%s is longer than %d bytes", key, maxText)
	}
	return nil
}

// checkWritable refuses texts that would not read back as they are.
func checkWritable(key, value string) error {
	if err := checkText(key, value); err != nil {
		return err
	}
	if strings.ContainsAny(value, "\x00\n") || value != trim(cutComment(value)) {
		return fmt.Errorf("%s = %q cannot be written: line breaks, outer white space or a comment", key, value)
	}
	return nil
}

func isFunctionName(s string) bool {
	if s == "" || len(s) > maxText {
		return false
	}
	for _, c := range []byte(s) {
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
		if !letter && (c < '0' || c > '9') && c != '_' {
			return false
		}
	}
	return true
}
