package ledger

import "sync/atomic"

// book is one resource in the whole cluster. It has the nodes that publish the
// resource and those on which pods hold some of it. Nodes have numbers, below
// size and as small as possible, so that what is known of each can be kept in a
// list.
type book struct {
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
}

func newBook() *book { return &book{numbers: make(map[string]int), priorities: make(map[int32]int)} }

// count adds so many pods of a priority.
func (b *book) count(priority int32, pods int) {
	if b.priorities[priority] += pods; b.priorities[priority] == 0 {
		delete(b.priorities, priority)
	}
}

// size is one more than the largest number. A book may be nil.
func (b *book) size() int {
	if b == nil {
		return 0
	}
	return len(b.nodes)
}

// find returns the number of a node, -1 for one that is not in the book. A
// number that was guessed right saves the look-up.
func (b *book) find(name string, guess int) int {
	if b == nil {
		return -1
	}
	if guess < len(b.names) && b.names[guess] == name && name != "" {
		return guess
	}
	number, ok := b.numbers[name]
	if !ok {
		return -1
	}
	return number
}

// node returns the node of that name, nil for one that is not in the book.
func (b *book) node(name string) *node {
	if number := b.find(name, 0); number >= 0 {
		return b.nodes[number]
	}
	return nil
}

// add gives a node a number.
func (b *book) add(n *node) {
	n.book = b
	if last := len(b.free) - 1; last >= 0 {
		n.number = b.free[last]
		b.free = b.free[:last]
		b.nodes[n.number], b.names[n.number] = n, n.host.name
	} else {
		n.number = len(b.nodes)
		b.nodes, b.names, b.generations = append(b.nodes, n), append(b.names, n.host.name), append(b.generations, 0)
		b.next = append(b.next, atomic.Int64{})
	}
	b.numbers[n.host.name] = n.number
}

// remove is the inverse of add.
func (b *book) remove(n *node) {
	delete(b.numbers, n.host.name)
	b.nodes[n.number], b.names[n.number] = nil, ""
	b.free = append(b.free, n.number)
}
