// Package decision decides about pods: which nodes have a device with room for a pod and
// why the others have none, which node is best, which pods would have to go, and which
// devices a pod gets when it is bound. Every door to kube-scheduler asks a Decider; package
// extender is the one over HTTP, and knows nothing but routes, decoding and limits.
//
// A Question comes with what a scheduler knows of the pod and its nodes; the ledger and the
// cluster state are the Decider's own. Nothing but Bind and the loop of Run writes to the
// API server:
//
//   - Filter names the nodes with capacity for a pod. Where it names one, it reserves
//     that capacity in memory until the pod's bind (see [ledger.Ledger.Expect]), and it
//     remembers the pods that fit nowhere, which are woken when there is capacity. The
//     same question has the same answer while nothing changes and the attempt to
//     place the pod goes on; after a failed one it names all nodes.
//   - Rate only reads.
//   - Preempt says which pods would have to go and evicts none. It keeps the capacity
//     that they would free for the pod for a few seconds.
//   - Bind reserves a device in the ledger, or takes over what Filter reserved, makes
//     one call to the API server without holding any lock, and takes the reservation
//     back when that fails.
//
// Only a question that is believed causes a reservation or is remembered; others change
// nothing.
package decision
