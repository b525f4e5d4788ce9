package vendorsim

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
)

// Process is a process that uses a card.
type Process struct {
	// Card is the number of its card.
	Card int
	// MIG is the number of its MIG device on the card; nil for the card itself. While the
	// card is not in MIG mode, no library lists the process.
	MIG *int
	PID int
	// MemoryMiB is in use beside Card.UsedMiB; UnknownMemory for an amount that the
	// library does not know.
	MemoryMiB int64
	// Utilization is the part of the card's compute time that it has, in percent. Only
	// NVIDIA's library reports it.
	Utilization int
	// Lists are those of NVIDIA's library that it is in, ListCompute when 0.
	Lists ProcessLists
}

// ProcessLists are lists of processes of NVIDIA's library.
type ProcessLists uint

// The lists of processes.
const (
	ListCompute ProcessLists = 1 << iota
	ListGraphics
	ListMPS
)

// processLists are the lists in a topology file.
var processLists = []string{"compute", "graphics", "mps"}

// String returns the value of a lists key.
func (l ProcessLists) String() string {
	var names []string
	for i, name := range processLists {
		if l&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return strings.Join(names, ",")
}

func parseLists(value string) (l ProcessLists, err error) {
	for name := range strings.SplitSeq(value, ",") {
		name = trim(name)
		i := slices.Index(processLists, name)
		switch {
		case i < 0:
			return 0, fmt.Errorf("lists names \"%s\", which is not compute, graphics or mps", name)
		case l&(1<<i) != 0:
			return 0, fmt.Errorf("lists names %s twice", name)
		}
		l |= 1 << i
	}
	return l, nil
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
	if p.MIG != nil {
		fmt.Fprintf(b, "mig = %d\n", *p.MIG)
	}
	if p.Utilization != 0 {
		fmt.Fprintf(b, "utilization = %d\n", p.Utilization)
	}
	if p.Lists != 0 {
		fmt.Fprintf(b, "lists = %s\n", p.Lists)
	}
}

// onMIG reports whether the process is on that MIG device.
func (p Process) onMIG(d MIGDevice) bool { return d.Index == *p.MIG }

// cloneProcesses returns a copy that shares nothing with processes.
func cloneProcesses(processes []Process) []Process {
	processes = slices.Clone(processes)
	for i := range processes {
		processes[i].MIG = clonePointer(processes[i].MIG)
	}
	return processes
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
		case (p.Utilization != 0 || p.Lists != 0) && cards[p.Card].Vendor != NVIDIA:
			faults[i] = errors.New("has what only NVIDIA's library reports")
		case p.MIG != nil && !slices.ContainsFunc(cards[p.Card].MIGDevices, p.onMIG):
			faults[i] = errors.New("is on a MIG device that its card does not have")
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
			checkRange("pid", int64(p.PID), 1, maxPID), checkRange("mib", memory, 0, math.MaxUint32),
			checkRange("utilization", int64(p.Utilization), 0, 100),
			checkRange("lists", int64(p.Lists), 0, 1<<len(processLists)-1), faults[i], //nolint:gosec // a mask of a few bits
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
	case "mig":
		n, err = parseInteger(key, value, 0, MaxMIGDevices-1)
		p.process.MIG = new(int(n))
		return err
	case "utilization":
		n, err = parseInteger(key, value, 0, 100)
		p.process.Utilization = int(n)
		return err
	case "lists":
		p.process.Lists, err = parseLists(value)
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
