package vendorsim

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Read reads and parses the topology file at path.
func Read(path string) (Topology, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return Topology{}, fmt.Errorf("read topology: %w", err)
	}
	return Parse(path, data)
}

// Parse parses the text of a topology file. Its error tells all mistakes, a
// line "NAME:LINE: what is wrong" each, in ascending order of the lines.
func Parse(name string, data []byte) (Topology, error) {
	p := parser{
		cards:     map[int]*cardSection{},
		drivers:   map[string]*Driver{},
		libraries: map[string]*Library{},
	}
	p.parse(data)
	if len(p.mistakes) == 0 {
		return p.topology, nil
	}
	slices.SortStableFunc(p.mistakes, func(a, b mistake) int { return cmp.Compare(a.line, b.line) })
	errs := make([]error, len(p.mistakes))
	for i, m := range p.mistakes {
		errs[i] = fmt.Errorf("%s:%d: %w", name, m.line, m.err)
	}
	return Topology{}, errors.Join(errs...)
}

type parser struct {
	topology Topology
	mistakes []mistake
	line     int
	// section is the name of the section of this line, "" before the first;
	// key sets its keys, and is nil while a section that is a mistake is
	// passed over.
	section   string
	key       func(key, value string) error
	seen      map[string]bool // keys of this section
	card      *cardSection    // of this section, nil outside of cards
	mig       *migSection     // of this section, nil outside of MIG devices
	link      *linkSection    // of this section, nil outside of links
	process   *processSection // of this section, nil outside of processes
	driver    *Driver         // of this section, when key is driverKey
	library   *Library        // of this section, when key is libraryKey
	cards     map[int]*cardSection
	migs      []*migSection
	links     []*linkSection
	processes []*processSection
	// drivers and libraries are the sections so far, by vendor, "" for the
	// general ones.
	drivers   map[string]*Driver
	libraries map[string]*Library
	// groups is the line of section [cgroup], 0 before it; inGroups says that it is this
	// section.
	groups   int
	inGroups bool
}

type mistake struct {
	line int
	err  error
}

type cardSection struct {
	card Card
	line int
}

type migSection struct {
	MIGDevice
	card, line int
}

type linkSection struct {
	Link
	line int
}

func (p *parser) wrong(line int, err error) {
	if err != nil {
		p.mistakes = append(p.mistakes, mistake{line, err})
	}
}

func (p *parser) parse(data []byte) {
	switch {
	case len(data) > maxFileBytes:
		p.wrong(1, fmt.Errorf("the file is larger than %d bytes", maxFileBytes))
		return
	case bytes.IndexByte(data, 0) >= 0:
		p.wrong(1, errors.New("the file is not text, it contains a NUL byte"))
		return
	}
	for line := range strings.SplitSeq(string(data), "\n") {
		p.line++
		p.wrong(p.line, p.parseLine(trim(cutComment(line))))
	}
	p.endSection()
	if p.gatherCards() {
		p.gatherMIG()
		p.gatherLinks()
		p.gatherProcesses()
	}
	p.gatherSettings()
}

func (p *parser) parseLine(line string) error {
	if line == "" {
		return nil
	}
	if strings.HasPrefix(line, "[") {
		p.endSection()
		return p.beginSection(line)
	}
	key, value, ok := strings.Cut(line, "=")
	if !ok {
		return fmt.Errorf("neither a section nor key = value: \"%s\"", line)
	}
	key, value = trim(key), trim(value)
	if p.section == "" {
		return fmt.Errorf("key \"%s\" stands before the first section", key)
	}
	if p.key == nil {
		return nil
	}
	if p.seen[key] {
		return fmt.Errorf("%s is given twice in this section", key)
	}
	p.seen[key] = true
	return p.key(key, value)
}

func (p *parser) beginSection(line string) error {
	p.section, p.key, p.seen = line, nil, map[string]bool{}
	p.card, p.mig, p.link, p.process, p.inGroups = nil, nil, nil, nil, false
	if !strings.HasSuffix(line, "]") {
		return errors.New("a section has no closing ]")
	}
	name := trim(line[1 : len(line)-1])
	word, rest := name, ""
	if i := strings.IndexAny(name, whiteSpace); i >= 0 {
		word, rest = name[:i], trim(name[i:])
	}
	switch {
	case word == "driver":
		d, err := beginSettings(p, p.drivers, word, rest)
		if err == nil {
			p.driver, p.key = d, p.driverKey
		}
		return err
	case word == "library":
		l, err := beginSettings(p, p.libraries, word, rest)
		if err == nil {
			p.library, p.key = l, p.libraryKey
		}
		return err
	case word == "cgroup" && rest == "":
		return p.beginControlGroups()
	case word == "card" && rest != "":
		return p.beginCard(rest)
	case word == "mig" && rest != "":
		return p.beginMIG(rest)
	case word == "link" && rest != "":
		return p.beginLink(rest)
	case word == "process" && rest != "":
		return p.beginProcess(rest)
	}
	return fmt.Errorf("unknown section [%s]", name)
}

// beginSettings begins a section of one vendor, or the general one.
func beginSettings[T any](p *parser, sections map[string]*T, word, vendor string) (*T, error) {
	if vendor != "" && checkVendor(vendor) != nil {
		return nil, fmt.Errorf("unknown section [%s %s]", word, vendor)
	}
	p.section = fmt.Sprintf("[%s]", trim(word+" "+vendor))
	if sections[vendor] != nil {
		return nil, fmt.Errorf("section %s is given twice", p.section)
	}
	sections[vendor] = new(T)
	return sections[vendor], nil
}

func (p *parser) beginCard(number string) error {
	n, err := parseInteger("card", number, 0, maxCards-1)
	if err != nil {
		return err
	}
	index := int(n)
	if first := p.cards[index]; first != nil {
		return fmt.Errorf("card %d is described twice, first in line %d", index, first.line)
	}
	p.section = fmt.Sprintf("[card %d]", index)
	p.card = &cardSection{card: Card{NUMA: -1}, line: p.line}
	p.cards[index] = p.card
	p.key = p.cardKey
	return nil
}

func (p *parser) beginMIG(numbers string) error {
	first, second, ok := strings.Cut(numbers, ".")
	if !ok {
		return fmt.Errorf("mig = \"%s\" is not a card and a number such as 0.1", numbers)
	}
	card, err := parseInteger("mig", trim(first), 0, maxCards-1)
	if err != nil {
		return err
	}
	index, err := parseInteger("number of the mig", trim(second), 0, MaxMIGDevices-1)
	if err != nil {
		return err
	}
	for _, m := range p.migs {
		if m.card == int(card) && m.Index == int(index) {
			return fmt.Errorf("mig %d.%d is described twice, first in line %d", card, index, m.line)
		}
	}
	p.mig = &migSection{MIGDevice: MIGDevice{Index: int(index)}, card: int(card), line: p.line}
	p.migs = append(p.migs, p.mig)
	p.section = migSectionName(p.mig.card, p.mig.Index)
	p.key = p.migKey
	return nil
}

func (p *parser) beginLink(numbers string) error {
	first, second := numbers, ""
	if i := strings.IndexAny(numbers, whiteSpace); i >= 0 {
		first, second = numbers[:i], trim(numbers[i:])
	}
	var ends [2]int
	for i, number := range []string{first, second} {
		n, err := parseInteger("link", number, 0, maxCards-1)
		if err != nil {
			return err
		}
		ends[i] = int(n)
	}
	a, b := ends[0], ends[1]
	if a == b {
		return fmt.Errorf("link %d %d joins a card with itself", a, b)
	}
	for _, l := range p.links {
		if l.A == a && l.B == b || l.A == b && l.B == a {
			return fmt.Errorf("link %d %d is described twice, first in line %d", a, b, l.line)
		}
	}
	if len(p.links) == maxLinks {
		return fmt.Errorf("there are more than %d links", maxLinks)
	}
	p.link = &linkSection{Link: Link{A: a, B: b}, line: p.line}
	p.links = append(p.links, p.link)
	p.section = p.link.section()
	p.key = p.linkKey
	return nil
}

// endSection checks a section that has ended.
func (p *parser) endSection() {
	if p.link != nil && !p.seen["lanes"] {
		p.wrong(p.link.line, fmt.Errorf("%s has no lanes", p.section))
	}
	if p.mig != nil && !p.seen["profile"] {
		p.wrong(p.mig.line, fmt.Errorf("%s has no profile", p.section))
	}
	if p.inGroups && !p.seen["root"] {
		p.wrong(p.groups, fmt.Errorf("%s has no root", p.section))
	}
	if p.process != nil {
		for _, key := range []string{"card", "pid", "mib"} {
			if !p.seen[key] {
				p.wrong(p.process.line, fmt.Errorf("%s has no %s", p.section, key))
			}
		}
	}
	if p.card == nil {
		return
	}
	for _, key := range []string{"vendor", "uuid", "memory_mib"} {
		if !p.seen[key] {
			p.wrong(p.card.line, fmt.Errorf("%s has no %s", p.section, key))
		}
	}
	if p.card.card.UsedMiB > p.card.card.MemoryMiB {
		p.wrong(p.card.line, fmt.Errorf("%s has used_mib above memory_mib", p.section))
	}
}

// gatherCards moves the cards into the topology. It returns false when some
// are missing.
func (p *parser) gatherCards() bool {
	last := -1
	for index := range p.cards {
		last = max(last, index)
	}
	for index := range last + 1 {
		c := p.cards[index]
		if c == nil {
			p.wrong(p.cards[last].line, fmt.Errorf("there is a card %d but no card %d", last, index))
			return false
		}
		p.topology.Cards = append(p.topology.Cards, c.card)
	}
	return true
}

// gatherMIG moves the MIG devices into their cards, which are there.
func (p *parser) gatherMIG() {
	cards := p.topology.Cards
	slices.SortFunc(p.migs, func(a, b *migSection) int { return cmp.Compare(a.Index, b.Index) })
	for _, m := range p.migs {
		name := migSectionName(m.card, m.Index)
		if m.card >= len(cards) {
			p.wrong(m.line, fmt.Errorf("%s names a card that is not there", name))
			continue
		}
		c := &cards[m.card]
		if err := c.checkMIGProfile(m.Profile); err != nil {
			p.wrong(m.line, fmt.Errorf("%s %w", name, err))
		}
		c.MIGDevices = append(c.MIGDevices, m.MIGDevice)
	}
}

// gatherLinks moves the links into the topology; the cards are there.
func (p *parser) gatherLinks() {
	cards := p.topology.Cards
	for _, l := range p.links {
		switch {
		case max(l.A, l.B) >= len(cards):
			p.wrong(l.line, fmt.Errorf("%s names a card that is not there", l.section()))
		case cards[l.A].Vendor != cards[l.B].Vendor:
			p.wrong(l.line, fmt.Errorf("%s joins cards of two vendors", l.section()))
		}
		p.topology.Links = append(p.topology.Links, l.Link)
	}
}

// gatherSettings moves drivers and libraries into the topology.
func (p *parser) gatherSettings() {
	for vendor, d := range p.drivers {
		if vendor == "" {
			p.topology.Driver = *d
			continue
		}
		if p.topology.Drivers == nil {
			p.topology.Drivers = map[string]Driver{}
		}
		p.topology.Drivers[vendor] = *d
	}
	for vendor, l := range p.libraries {
		if vendor == "" {
			p.topology.Library = *l
			continue
		}
		if p.topology.Libraries == nil {
			p.topology.Libraries = map[string]Library{}
		}
		p.topology.Libraries[vendor] = *l
	}
}

func (p *parser) unknownKey(key string) error {
	return fmt.Errorf("unknown key \"%s\" in %s", key, p.section)
}

func (p *parser) driverKey(key, value string) error {
	d := p.driver
	switch key {
	case "state":
		d.State = DriverState(value)
		return checkState(value)
	case "version":
		d.Version = value
		return checkText(key, value)
	case "cuda":
		d.CUDA = value
		return checkVersion(key, value)
	}
	if known, err := d.limitsKey(key, value); known {
		return err
	}
	return p.unknownKey(key)
}

func (p *parser) libraryKey(key, value string) (err error) {
	l := p.library
	switch key {
	case "one_lock":
		l.OneLock, err = parseBool(key, value)
		return err
	case "lacks":
		l.Lacks, err = parseLacks(value)
		return err
	}
	return p.callKey(&l.Calls, key, value)
}

// callKey sets how calls behave, of a library or about a card.
func (p *parser) callKey(c *Calls, key, value string) (err error) {
	switch key {
	case "delay_ms":
		var ms int64
		ms, err = parseInteger(key, value, 0, maxDelay.Milliseconds())
		c.Delay = time.Duration(ms) * time.Millisecond
		return err
	case "slow":
		c.Slow, err = parseCalls(key, "milliseconds", maxDelay.Milliseconds(), value, func(ms int64) time.Duration {
			return time.Duration(ms) * time.Millisecond
		})
		return err
	case "fail":
		c.Fail, err = parseCalls(key, "code", maxCode, value, func(code int64) int { return int(code) })
		return err
	}
	return p.unknownKey(key)
}

func (p *parser) cardKey(key, value string) (err error) {
	c := &p.card.card
	switch key {
	case "vendor":
		c.Vendor = value
		return checkVendor(value)
	case "model":
		c.Model = value
		return checkText(key, value)
	case "uuid":
		c.UUID = value
		return checkText(key, value)
	case "memory_mib":
		c.MemoryMiB, err = parseInteger(key, value, 0, math.MaxUint32)
		return err
	case "used_mib":
		c.UsedMiB, err = parseInteger(key, value, 0, math.MaxUint32)
		return err
	case "numa":
		var n int64
		n, err = parseInteger(key, value, -1, maxNUMA)
		c.NUMA = int(n)
		return err
	case "minor":
		var n int64
		n, err = parseInteger(key, value, 0, maxMinor)
		c.Minor = new(int(n))
		return err
	case "health":
		c.Unhealthy = value == "unhealthy"
		if !c.Unhealthy && value != "healthy" {
			return fmt.Errorf("health = \"%s\" is not healthy or unhealthy", value)
		}
		return nil
	case "lost":
		c.Lost, err = parseBool(key, value)
		return err
	}
	return p.placeKey(key, value)
}

// placeKey sets what is said of a card besides what it is.
func (p *parser) placeKey(key, value string) (err error) {
	c := &p.card.card
	switch key {
	case "serial":
		c.Serial = value
		return checkText(key, value)
	case "board":
		c.Board = value
		return checkText(key, value)
	case "chip":
		var n int64
		n, err = parseInteger(key, value, 0, maxPosition)
		c.Chip = int(n)
		return err
	case "pci":
		c.PCI = value
		return checkPCI(value)
	case "switch":
		c.Switch = value
		return checkText(key, value)
	case "compute":
		c.Compute = value
		return checkVersion(key, value)
	case "mig":
		c.MIG = MIG(value)
		return checkMIG(value)
	case "xid":
		c.XID, err = parseXID(value)
		return err
	case "health_bits":
		if !bitsSyntax.MatchString(value) {
			return fmt.Errorf("health_bits = \"%s\" is not a mask such as 0x4", value)
		}
		c.HealthBits, err = strconv.ParseUint(value, 0, 64)
		return err
	}
	return p.callKey(&c.Calls, key, value)
}

func (p *parser) migKey(key, value string) (err error) {
	m := p.mig
	number := func(most int64) (n int64) {
		n, err = parseInteger(key, value, 0, most)
		return n
	}
	switch key {
	case "profile":
		m.Profile = value
		return checkText(key, value)
	case "uuid":
		m.UUID = value
		return checkText(key, value)
	case "gi":
		m.GI = new(int(number(gpuInstances - 1)))
		return err
	case "ci":
		m.CI = new(int(number(computeInstances - 1)))
		return err
	case "memory_mib":
		m.MemoryMiB = new(number(math.MaxUint32))
		return err
	case "caps":
		m.Caps, err = parseCaps(value)
		return err
	case "xid":
		m.XID, err = parseXID(value)
		return err
	}
	return p.unknownKey(key)
}

func parseCaps(value string) (MIGCaps, error) {
	if value == noCaps {
		return MIGCaps{Missing: true}, nil
	}
	first, second, ok := strings.Cut(value, ",")
	if !ok {
		return MIGCaps{}, fmt.Errorf("caps = \"%s\" is not two minors such as 66,67, or none", value)
	}
	gpu, err := parseInteger("caps", trim(first), 1, maxMinor)
	if err != nil {
		return MIGCaps{}, err
	}
	compute, err := parseInteger("caps", trim(second), 1, maxMinor)
	return MIGCaps{GPUInstance: int(gpu), ComputeInstance: int(compute)}, err
}

func (p *parser) linkKey(key, value string) (err error) {
	switch key {
	case "lanes":
		var n int64
		n, err = parseInteger(key, value, 1, maxLanes)
		p.link.Lanes = int(n)
		return err
	case "one_way":
		p.link.OneWay, err = parseBool(key, value)
		return err
	}
	return p.unknownKey(key)
}

func parseBool(key, value string) (bool, error) {
	if value != "true" && value != "false" {
		return false, fmt.Errorf("%s = \"%s\" is not true or false", key, value)
	}
	return value == "true", nil
}

func parseXID(value string) (XID, error) {
	code, number, numbered := strings.Cut(value, "@")
	n, err := parseInteger("xid", trim(code), 1, maxXID)
	if err != nil || !numbered {
		return XID{Code: int(n)}, err
	}
	m, err := parseInteger("number of the xid", trim(number), 0, maxXIDNumber)
	return XID{Code: int(n), Number: int(m)}, err
}

// parseCalls parses functions with their numbers, 1 to most; what is the word for
// such a number.
func parseCalls[V any](key, what string, most int64, value string, of func(int64) V) (map[string]V, error) {
	if value == "" {
		return nil, nil
	}
	calls := map[string]V{}
	for item := range strings.SplitSeq(value, ",") {
		name, number, ok := strings.Cut(item, ":")
		name = trim(name)
		if !ok || !isFunctionName(name) {
			return nil, fmt.Errorf("%s wants function:%s, separated by commas", key, what)
		}
		n, err := parseInteger(key+" "+what, trim(number), 1, most)
		if err != nil {
			return nil, err
		}
		if _, named := calls[name]; named {
			return nil, fmt.Errorf("%s names %s twice", key, name)
		}
		if len(calls) == maxCalls {
			return nil, fmt.Errorf("%s has more than %d functions", key, maxCalls)
		}
		calls[name] = of(n)
	}
	return calls, nil
}

func parseInteger(key, value string, low, high int64) (int64, error) {
	n, err := strconv.ParseInt(value, 10, 64)
	if err != nil || strings.HasPrefix(value, "+") || n < low || n > high {
		return 0, rangeError(key, value, low, high)
	}
	return n, nil
}

const whiteSpace = " \t\r"

func trim(s string) string { return strings.Trim(s, whiteSpace) }

// cutComment cuts off a comment: # at the start of a line or after white space.
func cutComment(s string) string {
	for i := range len(s) {
		if s[i] == '#' && (i == 0 || strings.IndexByte(whiteSpace, s[i-1]) >= 0) {
			return s[:i]
		}
	}
	return s
}
