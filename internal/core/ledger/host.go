package ledger

import (
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// host is what the resources of one node share: its CPU and memory.
type host struct {
	name string
	// cpu and memory are what the node has for pods, place.Unlimited where that
	// was not told; usedCPU and usedMemory are the sums over charges.
	cpu, memory         int64
	usedCPU, usedMemory int64
	charges             int
	// nodes are the node's parts of the books.
	nodes []*node
}

// charge is the CPU and memory of one pod.
type charge struct {
	host        *host
	cpu, memory int64
}

// maxCapacity bounds what a node or pod is counted with, so that no sum
// overflows: over a billion cores, or a million TiB.
const maxCapacity = int64(accel.MaxUnits)

// SetCapacity says how much CPU and memory a node has for pods, in millicores
// and MiB. Until it is called, and after DeleteNode, the node has no limit.
func (l *Ledger) SetCapacity(name string, cpu, memory int64) {
	if name == "" {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.limited.Store(true)
	l.setCapacity(l.host(name), min(max(cpu, 0), maxCapacity), min(max(memory, 0), maxCapacity))
}

func (l *Ledger) setCapacity(h *host, cpu, memory int64) {
	if h.cpu != cpu || h.memory != memory {
		h.cpu, h.memory = cpu, memory
		l.touchAll(h)
	}
}

// Charge says how much CPU and memory a pod takes of a node, in millicores and
// MiB, until it is told otherwise or the pod is forgotten. It is for pods that
// ask for no device; for the others, Reserve and Observe do it.
func (l *Ledger) Charge(podUID, node string, cpu, memory int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.setCharge(podUID, node, cpu, memory)
}

// setCharge replaces a pod's charge. One of nothing, or on no node, is none.
func (l *Ledger) setCharge(podUID, node string, cpu, memory int64) {
	cpu, memory = min(max(cpu, 0), maxCapacity), min(max(memory, 0), maxCapacity)
	some := podUID != "" && node != "" && (cpu > 0 || memory > 0)
	old, charged := l.charges[podUID]
	switch {
	case !charged && !some:
		return
	case charged && some && old.host.name == node && old.cpu == cpu && old.memory == memory:
		return
	}
	if charged {
		delete(l.charges, podUID)
		old.host.charges--
		l.charge(old.host, -old.cpu, -old.memory)
		l.sweepHost(old.host)
	}
	if some {
		h := l.host(node)
		l.charges[podUID] = charge{h, cpu, memory}
		h.charges++
		l.charge(h, cpu, memory)
	}
}

func (l *Ledger) charge(h *host, cpu, memory int64) {
	h.usedCPU += cpu
	h.usedMemory += memory
	if h.cpu != place.Unlimited || h.memory != place.Unlimited {
		l.touchAll(h)
	}
}

// left is the CPU and memory that no pod takes.
func (h *host) left() (cpu, memory int64) {
	cpu, memory = h.cpu, h.memory
	if cpu != place.Unlimited {
		cpu -= h.usedCPU
	}
	if memory != place.Unlimited {
		memory -= h.usedMemory
	}
	return cpu, memory
}

// leftWithout is the CPU and memory that no pod but the one of that charge takes.
func (h *host) leftWithout(own charge) (cpu, memory int64) {
	cpu, memory = h.left()
	if own.host != h {
		return cpu, memory
	}
	if cpu != place.Unlimited {
		cpu += own.cpu
	}
	if memory != place.Unlimited {
		memory += own.memory
	}
	return cpu, memory
}

// host returns the node's part that all its resources share, made if need be.
func (l *Ledger) host(name string) *host {
	h := l.hosts[name]
	if h == nil {
		h = &host{name: name, cpu: place.Unlimited, memory: place.Unlimited}
		l.hosts[name] = h
	}
	return h
}

// sweepHost takes a host out that has nothing to say any more.
func (l *Ledger) sweepHost(h *host) {
	if len(h.nodes) == 0 && h.charges == 0 && h.cpu == place.Unlimited && h.memory == place.Unlimited {
		delete(l.hosts, h.name)
	}
}

// touchAll marks all parts of a node as changed.
func (l *Ledger) touchAll(h *host) {
	for _, n := range h.nodes {
		l.touch(n)
	}
}
