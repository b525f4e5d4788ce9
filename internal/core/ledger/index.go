package ledger

import (
	"cmp"
	"maps"
	"slices"
	"sync/atomic"
)

// index has the nodes of one resource: those that publish it and those on which pods
// hold some of it. Nodes have numbers, below size and as small as possible, so that
// what is known of each can be kept in a list.
type index struct {
	numbers map[string]int
	// nodes, names and generations are by number; a free number has none. Names
	// and generations are beside the nodes so that Check, which mostly needs no
	// more, fetches little memory.
	nodes       []*node
	names       []string
	generations []uint64
	free        []int
	// next says of each number which one was asked for after it last time: a
	// guess that is cheaper than a look-up where it is right. It is written under
	// the ledger's lock for readers as well.
	next []atomic.Int64
	// priorities counts the pods that hold some of the resource by their priority.
	priorities map[int32]int
	// generation is that of the latest change of any node, of all resources.
	generation *uint64
	// listed is the directory of the nodes; nil from a change of their names until one is
	// needed, which may be by a reader.
	listed atomic.Pointer[directory]
}

// directory are the names of an index as they were once. It does not change.
type directory struct {
	numbers map[string]int
	// names are by number, "" for a free one; rank is the place of each in their order.
	names []string
	rank  []int32
}

func (x *index) directory() *directory {
	if d := x.listed.Load(); d != nil {
		return d
	}
	d := &directory{numbers: maps.Clone(x.numbers), names: slices.Clone(x.names), rank: make([]int32, len(x.names))}
	order := slices.Collect(maps.Values(d.numbers))
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(d.names[a], d.names[b]) })
	for rank, number := range order {
		d.rank[number] = int32(rank)
	}
	x.listed.Store(d)
	return d
}

func (x *index) count(priority int32, pods int) {
	if x.priorities[priority] += pods; x.priorities[priority] == 0 {
		delete(x.priorities, priority)
	}
}

// size is one more than the largest number. An index may be nil.
func (x *index) size() int {
	if x == nil {
		return 0
	}
	return len(x.nodes)
}

// find returns the number of a node, -1 for one that is not in the index. A
// number that was guessed right saves the look-up.
func (x *index) find(name string, guess int) int {
	if x == nil {
		return -1
	}
	if guess < len(x.names) && x.names[guess] == name && name != "" {
		return guess
	}
	number, ok := x.numbers[name]
	if !ok {
		return -1
	}
	return number
}

// node returns the node of that name, nil for one that is not in the index.
func (x *index) node(name string) *node {
	if number := x.find(name, 0); number >= 0 {
		return x.nodes[number]
	}
	return nil
}

// add gives a node a number.
func (x *index) add(n *node) {
	n.index = x
	if last := len(x.free) - 1; last >= 0 {
		n.number = x.free[last]
		x.free = x.free[:last]
		x.nodes[n.number], x.names[n.number] = n, n.host.name
	} else {
		n.number = len(x.nodes)
		x.nodes, x.names, x.generations = append(x.nodes, n), append(x.names, n.host.name), append(x.generations, 0)
		x.next = append(x.next, atomic.Int64{})
	}
	x.numbers[n.host.name] = n.number
	x.listed.Store(nil)
}

func (x *index) remove(n *node) {
	delete(x.numbers, n.host.name)
	x.nodes[n.number], x.names[n.number] = nil, ""
	x.free = append(x.free, n.number)
	x.listed.Store(nil)
}
