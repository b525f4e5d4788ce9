// Package alloc decides what a node offers to kubelet and which devices a
// container gets.
//
// An Engine owns all pools of the node: a pool is one way in which a resource
// gives out devices, by units of memory, whole, or by time slices. Values go in:
// the devices that were discovered, kubelet's list of what containers hold, the
// pods of the API server, a question of kubelet, the time. Values come out: the
// units to offer with their health, an answer or a rejection with its reason, the
// inventory, what to persist, and what a successor must know. The package has no
// clients, no types of kubelet, no logging, no files, no clock and no lock: the
// caller owns the Engine and uses it from one goroutine at a time.
//
// Three things differ between pools, and each is an interface with two
// implementations: the scheme of ids (a range of units per device, or
// "<uuid>::<n>"), the account of which ids containers hold, and the chooser of
// devices (by the planned allocation of the pod, or by a slot policy). Everything
// else is the same for all: health, what is withheld because it could not be
// written, what another pool has given out, inventory, draining.
package alloc
