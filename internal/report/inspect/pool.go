package inspect

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/report/grid"
)

// Pool is what is requested of GPUs that are in a remote pool, and what may be.
// Amounts are in units of Resource.
type Pool struct {
	Resource accel.Resource `json:"resource"`
	// UnitsPerGPU of Resource are one GPU.
	UnitsPerGPU accel.Units `json:"unitsPerGPU"`
	// Total is what the nodes offer, Requested what pods that have not ended ask
	// for, on a node or waiting for one.
	Total     accel.Units `json:"total"`
	Requested accel.Units `json:"requested"`
	// Nodes are those that offer the resource or have pods that ask for it, by
	// name.
	Nodes []PoolNode `json:"nodes"`
	// Namespaces are those with such pods or with a quota, by name.
	Namespaces []PoolNamespace `json:"namespaces"`
}

// PoolNode is one node.
type PoolNode struct {
	Name      string      `json:"name"`
	Total     accel.Units `json:"total"`
	Requested accel.Units `json:"requested"`
}

// PoolNamespace is one namespace.
type PoolNamespace struct {
	Name string `json:"name"`
	// Pods ask for the resource; Waiting of them are on no node.
	Pods      int         `json:"pods"`
	Waiting   int         `json:"waiting"`
	Requested accel.Units `json:"requested"`
	// Allowed is the least that a quota for all pods allows; nil when none does.
	Allowed *accel.Units `json:"allowed,omitempty"`
	// Quotas are by name.
	Quotas []PoolQuota `json:"quotas,omitempty"`
}

// PoolQuota is a ResourceQuota that limits the resource.
type PoolQuota struct {
	Name string      `json:"name"`
	Hard accel.Units `json:"hard"`
	// Used is what Kubernetes counts.
	Used accel.Units `json:"used"`
	// Scoped says that the quota is for some pods alone.
	Scoped bool `json:"scoped,omitempty"`
}

// PoolBooks adds up what is in a Pool. It is for one goroutine.
type PoolBooks struct {
	pool       Pool
	nodes      map[string]*PoolNode
	namespaces map[string]*PoolNamespace
}

// NewPoolBooks returns one without entries.
func NewPoolBooks(resource accel.Resource, unitsPerGPU accel.Units) *PoolBooks {
	return &PoolBooks{
		pool:  Pool{Resource: resource, UnitsPerGPU: unitsPerGPU},
		nodes: map[string]*PoolNode{}, namespaces: map[string]*PoolNamespace{},
	}
}

// Empty reports whether nothing was added.
func (b *PoolBooks) Empty() bool { return len(b.nodes) == 0 && len(b.namespaces) == 0 }

// Node adds what a node offers.
func (b *PoolBooks) Node(name string, units accel.Units) {
	b.node(name).Total += units
	b.pool.Total += units
}

// Pod adds a pod that asks for units; node is "" for one that waits.
func (b *PoolBooks) Pod(namespace, node string, units accel.Units) {
	n := b.namespace(namespace)
	n.Pods++
	n.Requested += units
	b.pool.Requested += units
	if node == "" {
		n.Waiting++
		return
	}
	b.node(node).Requested += units
}

// Quota adds a quota.
func (b *PoolBooks) Quota(namespace string, q PoolQuota) {
	n := b.namespace(namespace)
	n.Quotas = append(n.Quotas, q)
	if !q.Scoped && (n.Allowed == nil || q.Hard < *n.Allowed) {
		n.Allowed = &q.Hard
	}
}

func (b *PoolBooks) node(name string) *PoolNode {
	if b.nodes[name] == nil {
		b.nodes[name] = &PoolNode{Name: name}
	}
	return b.nodes[name]
}

func (b *PoolBooks) namespace(name string) *PoolNamespace {
	if b.namespaces[name] == nil {
		b.namespaces[name] = &PoolNamespace{Name: name}
	}
	return b.namespaces[name]
}

// Pool returns what was added up.
func (b *PoolBooks) Pool() *Pool {
	p := b.pool
	p.Nodes, p.Namespaces = make([]PoolNode, 0, len(b.nodes)), make([]PoolNamespace, 0, len(b.namespaces))
	for _, name := range slices.Sorted(maps.Keys(b.nodes)) {
		p.Nodes = append(p.Nodes, *b.nodes[name])
	}
	for _, name := range slices.Sorted(maps.Keys(b.namespaces)) {
		one := *b.namespaces[name]
		one.Quotas = slices.SortedFunc(slices.Values(one.Quotas), func(a, b PoolQuota) int { return cmp.Compare(a.Name, b.Name) })
		p.Namespaces = append(p.Namespaces, one)
	}
	return &p
}

// writePool prints the pool for people.
func writePool(w io.Writer, p *Pool, wide bool) error {
	offering := 0
	for _, n := range p.Nodes {
		if n.Total > 0 {
			offering++
		}
	}
	verb := "offer"
	if offering == 1 {
		verb = "offers"
	}
	if _, err := fmt.Fprintf(w, "POOL %s: %s %s %s units, %s make one GPU\n", p.Resource, count(offering, "node"), verb, number(p.Total),
		number(p.UnitsPerGPU)); err != nil {
		return err
	}
	g := &grid.Grid{Columns: []grid.Column{{Title: "NAMESPACE"}, {Title: "PODS", Right: true}, {Title: "WAITING", Right: true},
		{Title: "REQUESTED", Right: true}, {Title: "GPUS", Right: true}, {Title: "QUOTA"}, {Title: "USED", Right: true},
		{Title: "ALLOWED", Right: true}}}
	pods, waiting := 0, 0
	var notes []string
	for _, n := range p.Namespaces {
		pods, waiting = pods+n.Pods, waiting+n.Waiting
		row := []string{n.Name, strconv.Itoa(n.Pods), strconv.Itoa(n.Waiting), number(n.Requested), p.gpus(n.Requested)}
		if len(n.Quotas) == 0 {
			g.Add(append(row, "-")...)
		}
		for _, q := range n.Quotas {
			g.Add(append(row, q.Name, number(q.Used), number(q.Hard))...)
			row = make([]string, len(row))
			if q.Scoped {
				notes = append(notes, fmt.Sprintf("quota %s/%s applies to some pods only", n.Name, q.Name))
			}
		}
	}
	g.Add("sum", strconv.Itoa(pods), strconv.Itoa(waiting), number(p.Requested), p.gpus(p.Requested))
	if err := g.Write(w, "  "); err != nil {
		return err
	}
	if offering == 0 {
		notes = append(notes, "no node offers "+string(p.Resource)+": pods that request it stay Pending")
	}
	for _, note := range notes {
		if _, err := fmt.Fprintln(w, "  "+note); err != nil {
			return err
		}
	}
	if !wide || len(p.Nodes) == 0 {
		return nil
	}
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	g = &grid.Grid{Columns: []grid.Column{{Title: "NODE"}, {Title: "TOTAL", Right: true}, {Title: "REQUESTED", Right: true},
		{Title: "FREE", Right: true}, {Title: "USE"}}}
	for _, n := range p.Nodes {
		g.Add(n.Name, number(n.Total), number(n.Requested), number(max(n.Total-n.Requested, 0)), grid.Bar(n.Requested, n.Total))
	}
	return g.Write(w, "  ")
}

// gpus writes units as a number of GPUs.
func (p *Pool) gpus(units accel.Units) string {
	return strconv.FormatFloat(float64(units)/float64(max(p.UnitsPerGPU, 1)), 'f', -1, 64)
}
