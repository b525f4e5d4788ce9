package remotepool

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
)

// Request is what a client asks the pool for.
type Request struct {
	// Client is the client's own identifier.
	Client string `json:"client"`
	// Amount is the number of GPUs, all of one server.
	Amount int `json:"amount"`
	// Fraction is the part of each GPU's memory, above 0 and up to 1; 0 when
	// MemoryMB says it.
	Fraction float64 `json:"fraction,omitempty"`
	// MemoryMB is the memory of each GPU; 0 when Fraction says it.
	MemoryMB int64 `json:"memoryMB,omitempty"`
	// Filters are words of the form key=value.
	Filters []string `json:"filters,omitempty"`
}

func (r Request) check() error {
	switch {
	case r.Amount < 1:
		return fmt.Errorf("the number of GPUs is %d; it must be 1 or more", r.Amount)
	case r.Fraction == 0 && r.MemoryMB == 0:
		return errors.New("neither a part of the memory nor an amount of it is asked for")
	case r.Fraction != 0 && r.MemoryMB != 0:
		return errors.New("both a part of the memory and an amount of it are asked for")
	case r.Fraction < 0 || r.Fraction > 1:
		return fmt.Errorf("the part of the memory is %g; it must be above 0 and at most 1", r.Fraction)
	case r.MemoryMB < 0:
		return fmt.Errorf("the memory is %d MB; it must be 1 or more", r.MemoryMB)
	}
	return nil
}

// memory is what the request takes of a GPU.
func (r Request) memory(gpu GPU) int64 {
	if r.MemoryMB > 0 {
		return r.MemoryMB
	}
	return max(1, int64(float64(gpu.MemoryMB)*r.Fraction+1e-6))
}

// Lease is what was granted.
type Lease struct {
	ID      string  `json:"id"`
	Request Request `json:"request"`
	// Server is the number of the server and Address where it is.
	Server   int    `json:"server"`
	Address  string `json:"address"`
	Hostname string `json:"hostname"`
	// GPUs are numbers of GPUs of the server, MemoryMB is what each gives.
	GPUs     []int     `json:"gpus"`
	Name     string    `json:"name"`
	MemoryMB int64     `json:"memoryMB"`
	PhysMB   int64     `json:"physMB"`
	Since    time.Time `json:"since"`
}

// Pool keeps the books of the GPUs. It is safe for concurrent use.
type Pool struct {
	inventory Inventory

	mu      sync.Mutex
	used    [][]int64 // MB by server and GPU
	leases  map[string]*Lease
	granted int
	refused int
}

// NewPool returns a pool with all GPUs free.
func NewPool(i Inventory) *Pool {
	p := &Pool{inventory: i, leases: map[string]*Lease{}}
	for _, s := range i.Servers {
		p.used = append(p.used, make([]int64, len(s.GPUs)))
	}
	return p
}

// errRefused marks requests that are well formed and cannot be granted.
var errRefused = errors.New("no GPUs")

// Lease grants GPUs of the first server that has them. The error tells what each
// server lacks; it is errRefused when the request itself is in order.
func (p *Pool) Lease(r Request) (*Lease, error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	wanted, err := parseFilter(r.Filters)
	if err != nil {
		return nil, err
	}
	id := uuid.NewString()
	p.mu.Lock()
	defer p.mu.Unlock()
	var reasons []string
	for n, s := range p.inventory.Servers {
		var matching int
		var free []int
		for g, gpu := range s.GPUs {
			if !wanted.matches(s, g) {
				continue
			}
			matching++
			if gpu.MemoryMB-p.used[n][g] >= r.memory(gpu) {
				free = append(free, g)
			}
		}
		if len(free) < r.Amount {
			reasons = append(reasons, fmt.Sprintf("%s has %d GPUs, of which %d match the filters and %d of those have the memory",
				s.Hostname, len(s.GPUs), matching, len(free)))
			continue
		}
		// The fullest first, so that whole GPUs stay free.
		slices.SortStableFunc(free, func(a, b int) int { return int(p.used[n][b] - p.used[n][a]) })
		chosen := slices.Clone(free[:r.Amount])
		slices.Sort(chosen)
		gpu := s.GPUs[chosen[0]]
		for _, g := range chosen {
			p.used[n][g] += r.memory(s.GPUs[g])
		}
		l := &Lease{
			ID: id, Request: r, Server: n, Address: s.Address, Hostname: s.Hostname, GPUs: chosen,
			Name: gpu.Name, MemoryMB: r.memory(gpu), PhysMB: gpu.MemoryMB, Since: time.Now().UTC(),
		}
		p.leases[id] = l
		p.granted++
		return l, nil
	}
	p.refused++
	return nil, fmt.Errorf("%w: %s", errRefused, strings.Join(reasons, "; "))
}

// Release takes a lease back.
func (p *Pool) Release(l *Lease) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, ok := p.leases[l.ID]; !ok {
		return
	}
	delete(p.leases, l.ID)
	s := p.inventory.Servers[l.Server]
	for _, g := range l.GPUs {
		p.used[l.Server][g] -= l.Request.memory(s.GPUs[g])
	}
}

// Free is how much of a GPU nobody holds.
type Free struct {
	GPU    GPU   `json:"gpu"`
	FreeMB int64 `json:"freeMB"`
}

// Availability is a server with what is free of it.
type Availability struct {
	Hostname string `json:"hostname"`
	Address  string `json:"address"`
	Tasks    int    `json:"tasks"`
	GPUs     []Free `json:"gpus"`
}

// Availability tells what is free.
func (p *Pool) Availability() []Availability {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []Availability
	for n, s := range p.inventory.Servers {
		a := Availability{Hostname: s.Hostname, Address: s.Address}
		for _, l := range p.leases {
			if l.Server == n {
				a.Tasks++
			}
		}
		for g, gpu := range s.GPUs {
			a.GPUs = append(a.GPUs, Free{GPU: gpu, FreeMB: gpu.MemoryMB - p.used[n][g]})
		}
		all = append(all, a)
	}
	return all
}

// Books is what the pool has granted.
type Books struct {
	// Granted and Refused count all requests that were in order.
	Granted int `json:"granted"`
	Refused int `json:"refused"`
	// Leases are those that are held now.
	Leases []Lease `json:"leases"`
}

// Books returns a copy of the books.
func (p *Pool) Books() Books {
	p.mu.Lock()
	defer p.mu.Unlock()
	b := Books{Granted: p.granted, Refused: p.refused, Leases: []Lease{}}
	for _, l := range p.leases {
		b.Leases = append(b.Leases, *l)
	}
	slices.SortFunc(b.Leases, func(a, c Lease) int { return strings.Compare(a.ID, c.ID) })
	return b
}
