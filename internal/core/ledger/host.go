package ledger

import (
	"sync/atomic"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// host is what the resources of one node share: its CPU and memory.
type host struct {
	name string
	// cpu and memory are what the node has for pods, place.Unlimited where that
	// is not known; usedCPU and usedMemory are the sums over charges.
	cpu, memory         int64
	usedCPU, usedMemory int64
	charges             int
	nodes               []*node
}

// hosts are all nodes by name, with the CPU and memory of pods.
type hosts struct {
	// limited is true once the capacity of a node was set.
	limited atomic.Bool
	byName  map[string]*host
	charges map[string]charge // by pod UID
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
	l.state.nodes.hosts.limited.Store(true)
	l.state.nodes.hosts.get(name).limit(min(max(cpu, 0), maxCapacity), min(max(memory, 0), maxCapacity))
}

func (h *host) limit(cpu, memory int64) {
	if h.cpu != cpu || h.memory != memory {
		h.cpu, h.memory = cpu, memory
		h.touch()
	}
}

// Charge says how much CPU and memory a pod takes of a node, in millicores and
// MiB, until it is called again or the pod is forgotten. It is for pods that
// request no device; for the others, Reserve and Observe do it.
func (l *Ledger) Charge(podUID, node string, cpu, memory int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state.nodes.hosts.charge(podUID, node, cpu, memory)
}

// charge replaces a pod's charge. One of nothing, or on no node, is none.
func (hs *hosts) charge(podUID, node string, cpu, memory int64) {
	cpu, memory = min(max(cpu, 0), maxCapacity), min(max(memory, 0), maxCapacity)
	some := podUID != "" && node != "" && (cpu > 0 || memory > 0)
	old, charged := hs.charges[podUID]
	switch {
	case !charged && !some:
		return
	case charged && some && old.host.name == node && old.cpu == cpu && old.memory == memory:
		return
	}
	if charged {
		delete(hs.charges, podUID)
		old.host.charges--
		old.host.use(-old.cpu, -old.memory)
		hs.sweep(old.host)
	}
	if some {
		h := hs.get(node)
		hs.charges[podUID] = charge{h, cpu, memory}
		h.charges++
		h.use(cpu, memory)
	}
}

func (h *host) use(cpu, memory int64) {
	h.usedCPU += cpu
	h.usedMemory += memory
	if h.cpu != place.Unlimited || h.memory != place.Unlimited {
		h.touch()
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

// get returns a node, made if need be.
func (hs *hosts) get(name string) *host {
	h := hs.byName[name]
	if h == nil {
		h = &host{name: name, cpu: place.Unlimited, memory: place.Unlimited}
		hs.byName[name] = h
	}
	return h
}

// sweep removes a host without resources, charges and capacity.
func (hs *hosts) sweep(h *host) {
	if len(h.nodes) == 0 && h.charges == 0 && h.cpu == place.Unlimited && h.memory == place.Unlimited {
		delete(hs.byName, h.name)
	}
}

// touch gives all resources of the node a new generation.
func (h *host) touch() {
	for _, n := range h.nodes {
		n.touch()
	}
}
