package vendorsim

import (
	"errors"
	"fmt"
	"math"
	"strings"
)

// Process is a process that computes on a card.
type Process struct {
	// Card is the number of its card, which is NVIDIA's.
	Card int
	PID  int
	// MemoryMiB is in use beside Card.UsedMiB; UnknownMemory for an amount that the
	// library does not know.
	MemoryMiB int64
}

// UnknownMemory is the MemoryMiB of a Process whose use the library does not know.
const UnknownMemory = -1

// unknownMemory is UnknownMemory in a topology file.
const unknownMemory = "n/a"

func (p Process) encode(b *strings.Builder, number int) {
	memory := unknownMemory
	if p.MemoryMiB != UnknownMemory {
		memory = fmt.Sprint(p.MemoryMiB)
	}
	fmt.Fprintf(b, "\n[process %d]\ncard = %d\npid = %d\nmib = %s\n", number, p.Card, p.PID, memory)
}

// processFaults returns what is wrong with the places of the processes, by their place;
// the texts are those of c/topology.c.
func processFaults(cards []Card, processes []Process) map[int]error {
	faults := map[int]error{}
	used := make([]int64, len(cards))
	for i, p := range processes {
		switch {
		case p.Card < 0 || p.Card >= len(cards):
			faults[i] = errors.New("names a card that is not there")
			continue
		case cards[p.Card].Vendor != NVIDIA:
			faults[i] = errors.New("is on a card that is not NVIDIA's")
		}
		used[p.Card] += max(p.MemoryMiB, 0)
		if c := cards[p.Card]; faults[i] == nil && c.UsedMiB+used[p.Card] > c.MemoryMiB {
			faults[i] = errors.New("needs more memory than its card has left")
		}
	}
	return faults
}

func (t Topology) checkProcesses() (errs []error) {
	if len(t.Processes) > maxProcesses {
		errs = append(errs, fmt.Errorf("processes: there are more than %d", maxProcesses))
	}
	faults := processFaults(t.Cards, t.Processes)
	for i, p := range t.Processes {
		memory := p.MemoryMiB
		if memory == UnknownMemory {
			memory = 0
		}
		for _, err := range []error{
			checkRange("pid", int64(p.PID), 1, maxPID), checkRange("mib", memory, 0, math.MaxUint32), faults[i],
		} {
			if err != nil {
				errs = append(errs, fmt.Errorf("[process %d]: %w", i, err))
			}
		}
	}
	return errs
}

// A processSection is a [process N] of a file.
type processSection struct {
	Process
	number, line int
}

func (p *parser) beginProcess(number string) error {
	n, err := parseInteger("process", number, 0, maxProcesses-1)
	if err != nil {
		return err
	}
	for _, one := range p.processes {
		if one.number == int(n) {
			return fmt.Errorf("process %d is described twice, first in line %d", n, one.line)
		}
	}
	p.process = &processSection{number: int(n), line: p.line}
	p.processes = append(p.processes, p.process)
	p.section = fmt.Sprintf("[process %d]", n)
	p.key = p.processKey
	return nil
}

func (p *parser) processKey(key, value string) (err error) {
	var n int64
	switch key {
	case "card":
		n, err = parseInteger(key, value, 0, maxCards-1)
		p.process.Card = int(n)
		return err
	case "pid":
		n, err = parseInteger(key, value, 1, maxPID)
		p.process.PID = int(n)
		return err
	case "mib":
		if p.process.MemoryMiB = UnknownMemory; value == unknownMemory {
			return nil
		}
		p.process.MemoryMiB, err = parseInteger(key, value, 0, math.MaxUint32)
		return err
	}
	return p.unknownKey(key)
}

// gatherProcesses moves the processes into the topology; the cards are there.
func (p *parser) gatherProcesses() {
	for _, one := range p.processes {
		p.topology.Processes = append(p.topology.Processes, one.Process)
	}
	for i, err := range processFaults(p.topology.Cards, p.topology.Processes) {
		p.wrong(p.processes[i].line, fmt.Errorf("[process %d] %w", p.processes[i].number, err))
	}
}
