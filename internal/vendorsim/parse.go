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
	p := parser{cards: map[int]*cardSection{}}
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
	section string
	key     func(key, value string) error
	seen    map[string]bool // keys of this section
	card    *cardSection    // of this section, nil outside of cards
	cards   map[int]*cardSection
	// sections are those that can stand in a file once.
	sections map[string]bool
}

type mistake struct {
	line int
	err  error
}

type cardSection struct {
	Card
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
	p.sections = map[string]bool{}
	for line := range strings.SplitSeq(string(data), "\n") {
		p.line++
		p.wrong(p.line, p.parseLine(trim(cutComment(line))))
	}
	p.endSection()
	p.gatherCards()
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
	p.section, p.key, p.card, p.seen = line, nil, nil, map[string]bool{}
	if !strings.HasSuffix(line, "]") {
		return errors.New("a section has no closing ]")
	}
	name := trim(line[1 : len(line)-1])
	switch {
	case name == "driver" || name == "library":
		if p.sections[name] {
			return fmt.Errorf("section [%s] is given twice", name)
		}
		p.sections[name] = true
		p.key = p.driverKey
		if name == "library" {
			p.key = p.libraryKey
		}
		return nil
	case len(name) > 4 && name[:4] == "card" && strings.ContainsRune(whiteSpace, rune(name[4])):
		n, err := parseInteger("card", trim(name[4:]), 0, maxCards-1)
		if err != nil {
			return err
		}
		index := int(n)
		if first := p.cards[index]; first != nil {
			return fmt.Errorf("card %d is described twice, first in line %d", index, first.line)
		}
		p.section = fmt.Sprintf("[card %d]", index)
		p.card = &cardSection{Card: Card{NUMA: -1}, line: p.line}
		p.cards[index] = p.card
		p.key = p.cardKey
		return nil
	}
	return fmt.Errorf("unknown section [%s]", name)
}

// endSection checks a section that has ended.
func (p *parser) endSection() {
	if p.card == nil {
		return
	}
	for _, key := range []string{"vendor", "uuid", "memory_mib"} {
		if !p.seen[key] {
			p.wrong(p.card.line, fmt.Errorf("%s has no %s", p.section, key))
		}
	}
	if p.card.UsedMiB > p.card.MemoryMiB {
		p.wrong(p.card.line, fmt.Errorf("%s has used_mib above memory_mib", p.section))
	}
}

// gatherCards moves the cards into the topology.
func (p *parser) gatherCards() {
	last := -1
	for index := range p.cards {
		last = max(last, index)
	}
	for index := range last + 1 {
		c := p.cards[index]
		if c == nil {
			p.wrong(p.cards[last].line, fmt.Errorf("there is a card %d but no card %d", last, index))
			return
		}
		p.topology.Cards = append(p.topology.Cards, c.Card)
	}
}

func (p *parser) driverKey(key, value string) error {
	d := &p.topology.Driver
	switch key {
	case "state":
		d.State = DriverState(value)
		return checkState(value)
	case "version":
		d.Version = value
		return checkText(key, value)
	}
	return fmt.Errorf("unknown key \"%s\" in [driver]", key)
}

func (p *parser) libraryKey(key, value string) (err error) {
	l := &p.topology.Library
	switch key {
	case "delay_ms":
		var ms int64
		ms, err = parseInteger(key, value, 0, maxDelay.Milliseconds())
		l.Delay = time.Duration(ms) * time.Millisecond
		return err
	case "fail":
		l.Fail, err = parseFailures(value)
		return err
	}
	return fmt.Errorf("unknown key \"%s\" in [library]", key)
}

func (p *parser) cardKey(key, value string) (err error) {
	c := p.card
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
		c.Lost = value == "true"
		if !c.Lost && value != "false" {
			return fmt.Errorf("lost = \"%s\" is not true or false", value)
		}
		return nil
	case "fail":
		c.Fail, err = parseFailures(value)
		return err
	}
	return fmt.Errorf("unknown key \"%s\" in %s", key, p.section)
}

func parseFailures(value string) (Failures, error) {
	if value == "" {
		return nil, nil
	}
	f := Failures{}
	for item := range strings.SplitSeq(value, ",") {
		name, code, ok := strings.Cut(item, ":")
		name = trim(name)
		if !ok || !isFunctionName(name) {
			return nil, errors.New("fail wants function:code, separated by commas")
		}
		n, err := parseInteger("fail code", trim(code), 1, 999)
		if err != nil {
			return nil, err
		}
		if f[name] != 0 {
			return nil, fmt.Errorf("fail names %s twice", name)
		}
		if len(f) == maxFailures {
			return nil, fmt.Errorf("fail has more than %d functions", maxFailures)
		}
		f[name] = int(n)
	}
	return f, nil
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
