// Package cluster stands between the API server and the scheduler's core: it
// watches nodes and pods and updates the ledger from them, and it binds pods.
//
// State owns the watches. It does not keep the objects: of a node it remembers
// a digest of what it publishes, and nothing of a pod without a shared resource.
// A reflector writes into it directly, without the queue and the object store of a
// shared informer, for three reasons: the memory of a large cluster's pods is not
// needed twice, "synced" means that the ledger has everything and not that it is
// queued, and the time between attempts to reach a restarted API server can be
// bounded (see kube.NewReflector). A list replaces the state as a whole, so events
// missed while the watch was down need no tombstones.
//
// Amounts always come from a pod's spec, and a device only from a grant whose
// signature is right. No other annotation is ever read.
package cluster
