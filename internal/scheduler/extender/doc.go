// Package extender answers kube-scheduler: filter, preempt, prioritize and bind,
// and a person's question what every device holds.
//
// The handlers are thin: they turn JSON into questions for the ledger and
// answers into JSON. None but bind writes to the API server:
//
//   - filter names the nodes with capacity for a pod. Where it names one, it reserves
//     that capacity in memory until the pod's bind (see [ledger.Ledger.Expect]), and it
//     remembers the pods that fit nowhere, which are woken when there is capacity. The
//     same question has the same answer while nothing changes and the attempt to
//     place the pod goes on; after a failed one it names all nodes.
//   - prioritize only reads.
//   - preempt says which pods would have to go and evicts none. It keeps the capacity
//     that they would free for the pod for a few seconds.
//   - bind reserves a device in the ledger, or takes over what filter reserved, makes
//     one call to the API server without holding any lock, and takes the reservation
//     back when that fails.
//
// Only a caller that may bind causes a reservation or is remembered; the questions of
// others change nothing.
//
// kube-scheduler drops the body of an answer whose status is not 200, so what
// goes wrong is in the Error of the result, with status 200, where the
// result has one. Nothing that a client sends ends the process.
package extender
