package vendorsim

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
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
	// Driver and Library are those of the vendors that are not in Drivers and
	// Libraries, which hold a vendor's own. Keys are of Vendors.
	Driver    Driver
	Library   Library
	Drivers   map[string]Driver
	Libraries map[string]Library
	// ControlGroups stand for the machine's.
	ControlGroups ControlGroups
	// Cards are the cards of all vendors. A card's number is its place here.
	// Each vendor's library sees its own cards only and numbers those from 0.
	Cards []Card
	// Links are the direct connections between cards (NVLink).
	Links []Link
	// Processes are those that use cards. They are numbered from 0.
	Processes []Process
}

// Driver is the vendor's driver in the kernel.
type Driver struct {
	// State is DriverLoaded when empty.
	State DriverState
	// Version is DefaultDriverVersion when empty.
	Version string
	// CUDA is the highest CUDA version that the driver serves, such as "12.4",
	// DefaultCUDA when empty.
	CUDA string
	// MemoryAccounting is MemoryAccountingOff when empty.
	MemoryAccounting MemoryAccounting
	// Persistence keeps the driver's state while no process uses a device. Without it
	// limits are lost when the last process that allocated memory ends.
	Persistence bool
	// Run is the folder of the driver's state, relative to the folder of the topology
	// file, which it is when empty.
	Run string
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

// DefaultCUDA is the CUDA version of a driver for which none is given.
const DefaultCUDA = "12.4"

// Library is the behaviour of the vendor's library.
type Library struct {
	Calls
	// OneLock makes a call that takes its time hold up all others.
	OneLock bool
	// Lacks are functions that the library does not have, as in older releases. They
	// are left out where it is built; see Without.
	Lacks []string
}

// Calls say how calls of a vendor's library behave.
type Calls struct {
	// Delay is how long every call takes, whole milliseconds up to an hour.
	// Calls that are waiting when it shrinks end early.
	Delay time.Duration
	// Slow is Delay for some functions alone; the longer of both counts.
	Slow Delays
	// Fail maps the functions that fail to the code that they return.
	Fail Failures
}

// Delays maps names of the vendor's functions to how long they take, whole
// milliseconds up to an hour.
type Delays map[string]time.Duration

// Failures maps names of the vendor's functions to the codes, 1 to 999, that
// they return instead of doing anything.
type Failures map[string]int

// Card is one simulated card.
type Card struct {
	// Vendor is one of Vendors.
	Vendor string
	Model  string
	// UUID is what the vendor's library returns: Enflame's has no prefix,
	// NVIDIA's and Iluvatar's begin with "GPU-".
	UUID   string
	Serial string
	// MemoryMiB and UsedMiB are in MiB.
	MemoryMiB, UsedMiB int64
	// NUMA is the card's NUMA node, -1 when not known.
	NUMA int
	// Minor is the number in the name of the card's device file, the card's
	// number when nil.
	Minor *int
	// Board names the board that carries the card; cards of one vendor with the
	// same name are chips of one board. "" is a board of its own.
	Board string
	// Chip is the card's position on its Board.
	Chip int
	// PCI is the PCI address, such as "0000:3b:00.0"; when empty it is derived
	// from the card's number.
	PCI string
	// Switch names the PCIe switch that the card is behind, "" for none.
	Switch string
	// Compute is the compute capability, such as "9.0"; "8.0" when empty.
	Compute string
	// MIG says whether the card can be cut into partitions, and is.
	MIG MIG
	// MIGDevices are the card's, if it is in MIG mode. Only NVIDIA's have any.
	MIGDevices []MIGDevice
	// XID is the critical error that happened last. Another value than before
	// is one more error.
	XID XID
	// HealthBits are the faults of a card whose vendor tells them as bits.
	HealthBits uint64
	// Unhealthy makes the library call the card unhealthy.
	Unhealthy bool
	// Lost makes all calls about the card fail. It is still counted.
	Lost bool
	// Calls are those about this card alone.
	Calls Calls
}

// MIG says whether a card can be cut into partitions, and is.
type MIG string

// The modes of partitions.
const (
	MIGNotSupported MIG = ""
	MIGDisabled     MIG = "disabled"
	MIGEnabled      MIG = "enabled"
)

// XID is a critical error of a card. The zero value is none.
type XID struct {
	// Code is the vendor's number of the kind of error, 1 to 999.
	Code int
	// Number tells errors of one Code apart, 0 to 1000000.
	Number int
}

// String returns CODE or CODE@NUMBER, as a topology file has it.
func (x XID) String() string {
	if x.Number == 0 {
		return fmt.Sprint(x.Code)
	}
	return fmt.Sprintf("%d@%d", x.Code, x.Number)
}

func (x XID) check() error {
	return cmp.Or(checkRange("xid", int64(x.Code), 1, maxXID), checkRange("number of the xid", int64(x.Number), 0, maxXIDNumber))
}

// Link is a direct connection between two cards of one vendor.
type Link struct {
	// A and B are numbers of cards, places in Topology.Cards.
	A, B int
	// Lanes is how many lanes connect the two, 1 to 18.
	Lanes int
	// OneWay makes B know nothing of A: its lanes to A are down, and the
	// question how near A is fails.
	OneWay bool
}

// Vendors are the vendors that a card can be of.
var Vendors = []string{Enflame, NVIDIA, Iluvatar}

// The vendors by name.
const (
	Enflame  = "enflame"
	NVIDIA   = "nvidia"
	Iluvatar = "iluvatar"
)

// Limits of the format, the same as in c/topology.h.
const (
	maxText      = 63      // bytes of a model, uuid or version
	maxPath      = 255     // bytes of a path
	maxCards     = 1024    // cards of all vendors
	maxCalls     = 32      // functions in one key
	maxMinor     = 1048575 // Linux has 20 bits for it
	maxNUMA      = 1023
	maxPosition  = 1023 // of a chip on its board
	maxLinks     = 4096
	maxProcesses = 256 // on all cards
	maxPID       = 4194304
	maxLanes     = 18 // NVML has room for no more
	maxXID       = 999
	maxXIDNumber = 1000000
	maxFileBytes = 1024 * 1024
	maxDelay     = time.Hour
	maxCode      = 999 // of a call that fails
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

// GPUs returns n healthy cards of NVIDIA's with memoryMiB MiB each, on NUMA
// node 0, with uuids that differ. AllLinked links them.
func GPUs(n int, memoryMiB int64) []Card {
	cards := make([]Card, n)
	for i := range cards {
		cards[i] = Card{
			Vendor:    NVIDIA,
			Model:     "NVIDIA A100-SXM4-40GB",
			UUID:      fmt.Sprintf("GPU-a1000000-0000-4000-8000-%012d", i),
			Serial:    fmt.Sprintf("16501%05d", i),
			MemoryMiB: memoryMiB,
			Compute:   "8.0",
			MIG:       MIGDisabled,
		}
	}
	return cards
}

// IXBoards returns the chips of that many of Iluvatar's boards, with memoryMiB
// MiB for each chip, on NUMA node 0, with uuids that differ.
func IXBoards(boards, chips int, memoryMiB int64) []Card {
	var cards []Card
	for board := range boards {
		for chip := range chips {
			c := Card{
				Vendor:    Iluvatar,
				Model:     "Iluvatar BI-V150",
				UUID:      fmt.Sprintf("GPU-b1500000-0000-4000-8000-%08d%04d", board, chip),
				Serial:    fmt.Sprintf("2405%06d", board),
				MemoryMiB: memoryMiB,
				Chip:      chip,
			}
			if chips > 1 {
				c.Board = fmt.Sprintf("board%d", board)
			}
			cards = append(cards, c)
		}
	}
	return cards
}

// AllLinked returns links between any two of n cards, the first of which is
// number first in the topology.
func AllLinked(first, n, lanes int) []Link {
	var links []Link
	for a := first; a < first+n; a++ {
		for b := a + 1; b < first+n; b++ {
			links = append(links, Link{A: a, B: b, Lanes: lanes})
		}
	}
	return links
}

// DriverOf returns the driver that serves a vendor.
func (t Topology) DriverOf(vendor string) Driver {
	if d, ok := t.Drivers[vendor]; ok {
		return d
	}
	return t.Driver
}

// LibraryOf returns the behaviour of a vendor's library.
func (t Topology) LibraryOf(vendor string) Library {
	if l, ok := t.Libraries[vendor]; ok {
		return l
	}
	return t.Library
}

// MinorOf returns the number in the name of a card's device file.
func (t Topology) MinorOf(card int) int {
	if minor := t.Cards[card].Minor; minor != nil {
		return *minor
	}
	return card
}

// Clone returns a copy that shares nothing with t.
func (t Topology) Clone() Topology {
	t.Library = t.Library.clone()
	t.Drivers = maps.Clone(t.Drivers)
	t.Libraries = maps.Clone(t.Libraries)
	for vendor, l := range t.Libraries {
		t.Libraries[vendor] = l.clone()
	}
	t.Links = slices.Clone(t.Links)
	t.Processes = cloneProcesses(t.Processes)
	t.Cards = slices.Clone(t.Cards)
	for i := range t.Cards {
		c := &t.Cards[i]
		c.Calls = c.Calls.clone()
		c.Minor = clonePointer(c.Minor)
		c.MIGDevices = cloneMIG(c.MIGDevices)
	}
	return t
}

func (l Library) clone() Library {
	l.Calls, l.Lacks = l.Calls.clone(), slices.Clone(l.Lacks)
	return l
}

func (c Calls) clone() Calls {
	c.Slow, c.Fail = maps.Clone(c.Slow), maps.Clone(c.Fail)
	return c
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
	driver := func(where string, d Driver) {
		if d.State != "" {
			check(where, checkState(string(d.State)))
		}
		check(where, checkWritable("version", d.Version))
		if d.CUDA != "" {
			check(where, checkVersion("cuda", d.CUDA))
		}
		for _, err := range d.checkLimits() {
			check(where, err)
		}
	}
	calls := func(where string, c Calls) {
		for _, err := range c.check() {
			check(where, err)
		}
	}
	driver("[driver]", t.Driver)
	for _, vendor := range slices.Sorted(maps.Keys(t.Drivers)) {
		where := fmt.Sprintf("[driver %s]", vendor)
		check(where, checkVendor(vendor))
		driver(where, t.Drivers[vendor])
	}
	calls("[library]", t.Library.Calls)
	check("[library]", checkLacks(t.Library.Lacks))
	for _, vendor := range slices.Sorted(maps.Keys(t.Libraries)) {
		where := fmt.Sprintf("[library %s]", vendor)
		check(where, checkVendor(vendor))
		calls(where, t.Libraries[vendor].Calls)
		check(where, checkLacks(t.Libraries[vendor].Lacks))
	}
	for _, err := range t.ControlGroups.check() {
		check("[cgroup]", err)
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
		for _, err := range c.checkPlace() {
			check(where, err)
		}
		calls(where, c.Calls)
		errs = append(errs, c.checkMIG(i)...)
	}
	if len(t.Links) > maxLinks {
		check("links", fmt.Errorf("there are more than %d links", maxLinks))
	}
	pairs := map[[2]int]bool{}
	for _, l := range t.Links {
		where := l.section()
		pair := [2]int{min(l.A, l.B), max(l.A, l.B)}
		switch {
		case l.A == l.B:
			check(where, errors.New("joins a card with itself"))
		case pair[0] < 0 || pair[1] >= len(t.Cards):
			check(where, errors.New("names a card that is not there"))
		case t.Cards[l.A].Vendor != t.Cards[l.B].Vendor:
			check(where, errors.New("joins cards of two vendors"))
		case pairs[pair]:
			check(where, errors.New("is described twice"))
		}
		pairs[pair] = true
		check(where, checkRange("lanes", int64(l.Lanes), 1, maxLanes))
	}
	errs = append(errs, t.checkProcesses()...)
	return errors.Join(errs...)
}

// checkPlace checks what is said of the card besides what it is.
func (c Card) checkPlace() []error {
	errs := []error{
		checkWritable("serial", c.Serial),
		checkWritable("board", c.Board),
		checkRange("chip", int64(c.Chip), 0, maxPosition),
		checkWritable("switch", c.Switch),
	}
	if c.PCI != "" {
		errs = append(errs, checkPCI(c.PCI))
	}
	if c.Compute != "" {
		errs = append(errs, checkVersion("compute", c.Compute))
	}
	if c.MIG != MIGNotSupported {
		errs = append(errs, checkMIG(string(c.MIG)))
	}
	if c.XID != (XID{}) {
		errs = append(errs, c.XID.check())
	}
	return errs
}

func (l Link) section() string { return fmt.Sprintf("[link %d %d]", l.A, l.B) }

// Encode returns the topology as the text of its file.
func (t Topology) Encode() ([]byte, error) {
	if err := t.Validate(); err != nil {
		return nil, fmt.Errorf("encode topology:\n%w", err)
	}
	var b strings.Builder
	b.WriteString("# Simulated hardware. docs/simulated-hardware.md describes this file.\n")
	t.Driver.encode(&b, "[driver]")
	for _, vendor := range slices.Sorted(maps.Keys(t.Drivers)) {
		t.Drivers[vendor].encode(&b, fmt.Sprintf("\n[driver %s]", vendor))
	}
	t.Library.encode(&b, "\n[library]")
	for _, vendor := range slices.Sorted(maps.Keys(t.Libraries)) {
		t.Libraries[vendor].encode(&b, fmt.Sprintf("\n[library %s]", vendor))
	}
	t.ControlGroups.encode(&b)
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
		for _, text := range []struct{ key, value string }{
			{"serial", c.Serial}, {"board", c.Board}, {"pci", c.PCI}, {"switch", c.Switch},
			{"compute", c.Compute}, {"mig", string(c.MIG)},
		} {
			if text.value != "" {
				fmt.Fprintf(&b, "%s = %s\n", text.key, text.value)
			}
		}
		if c.Chip != 0 {
			fmt.Fprintf(&b, "chip = %d\n", c.Chip)
		}
		if c.XID != (XID{}) {
			fmt.Fprintf(&b, "xid = %s\n", c.XID)
		}
		if c.HealthBits != 0 {
			fmt.Fprintf(&b, "health_bits = %#x\n", c.HealthBits)
		}
		if c.Calls.Delay != 0 {
			fmt.Fprintf(&b, "delay_ms = %d\n", c.Calls.Delay.Milliseconds())
		}
		c.Calls.encode(&b)
		for _, d := range c.MIGDevices {
			d.encode(&b, i)
		}
	}
	for _, l := range t.Links {
		fmt.Fprintf(&b, "\n%s\nlanes = %d\n", l.section(), l.Lanes)
		if l.OneWay {
			b.WriteString("one_way = true\n")
		}
	}
	for i, p := range t.Processes {
		p.encode(&b, i)
	}
	return []byte(b.String()), nil
}

func (d Driver) encode(b *strings.Builder, section string) {
	fmt.Fprintf(b, "%s\nstate = %s\n", section, cmp.Or(d.State, DriverLoaded))
	if d.Version != "" {
		fmt.Fprintf(b, "version = %s\n", d.Version)
	}
	if d.CUDA != "" {
		fmt.Fprintf(b, "cuda = %s\n", d.CUDA)
	}
	d.encodeLimits(b)
}

func (l Library) encode(b *strings.Builder, section string) {
	fmt.Fprintf(b, "%s\ndelay_ms = %d\n", section, l.Delay.Milliseconds())
	l.Calls.encode(b)
	if l.OneLock {
		b.WriteString("one_lock = true\n")
	}
	if len(l.Lacks) > 0 {
		fmt.Fprintf(b, "lacks = %s\n", strings.Join(l.Lacks, ","))
	}
}

func (c Calls) encode(b *strings.Builder) {
	if len(c.Slow) > 0 {
		fmt.Fprintf(b, "slow = %s\n", c.Slow)
	}
	if len(c.Fail) > 0 {
		fmt.Fprintf(b, "fail = %s\n", c.Fail)
	}
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
	return listOf(f, func(code int) int64 { return int64(code) })
}

// String returns the value of a slow key, in a fixed order.
func (d Delays) String() string { return listOf(d, time.Duration.Milliseconds) }

// listOf returns functions with their numbers as a topology file has them.
func listOf[V any](calls map[string]V, number func(V) int64) string {
	items := make([]string, 0, len(calls))
	for _, name := range slices.Sorted(maps.Keys(calls)) {
		items = append(items, fmt.Sprintf("%s:%d", name, number(calls[name])))
	}
	return strings.Join(items, ",")
}

func (c Calls) check() []error {
	var errs []error
	delay := func(d time.Duration, least int) {
		if d < time.Duration(least)*time.Millisecond || d > maxDelay || d%time.Millisecond != 0 {
			errs = append(errs, fmt.Errorf("delay of %v is not in whole milliseconds from %d to %v", d, least, maxDelay))
		}
	}
	delay(c.Delay, 0)
	checkCalls(&errs, "slow", c.Slow, func(d time.Duration) { delay(d, 1) })
	checkCalls(&errs, "fail", c.Fail, func(code int) {
		if err := checkRange("fail code", int64(code), 1, maxCode); err != nil {
			errs = append(errs, err)
		}
	})
	return errs
}

// checkCalls checks the functions of a key, and the value of each.
func checkCalls[V any](errs *[]error, key string, calls map[string]V, value func(V)) {
	if len(calls) > maxCalls {
		*errs = append(*errs, fmt.Errorf("%s has more than %d functions", key, maxCalls))
	}
	for _, name := range slices.Sorted(maps.Keys(calls)) {
		if !isFunctionName(name) {
			*errs = append(*errs, fmt.Errorf("%s names %q, which is no function", key, name))
		}
		value(calls[name])
	}
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

var (
	versionSyntax = regexp.MustCompile(`^[0-9]{1,2}\.[0-9]$`)
	pciSyntax     = regexp.MustCompile(`^[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[01][0-9a-fA-F]\.[0-7]$`)
	bitsSyntax    = regexp.MustCompile(`^0x[0-9a-fA-F]{1,16}$`)
)

func checkVersion(key, value string) error {
	if versionSyntax.MatchString(value) {
		return nil
	}
	return fmt.Errorf("%s = \"%s\" is not a version such as 12.4", key, value)
}

func checkPCI(value string) error {
	if pciSyntax.MatchString(value) {
		return nil
	}
	return fmt.Errorf("pci = \"%s\" is not an address such as 0000:3b:00.0", value)
}

func checkMIG(value string) error {
	switch MIG(value) {
	case MIGDisabled, MIGEnabled:
		return nil
	}
	return fmt.Errorf("mig = \"%s\" is not disabled or enabled", value)
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
	return cmp.Or(checkText(key, value), checkReadsBack(key, value))
}

func checkReadsBack(key, value string) error {
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
