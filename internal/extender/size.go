package extender

// HeapBudget is how much memory the Go runtime of a process with an extender has, in
// bytes: enough for 5000 nodes of 8 devices and 50 000 pods. See package heap.
const HeapBudget = 100 << 20
