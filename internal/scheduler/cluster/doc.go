// Package cluster stands between the API server and the scheduler's core: it
// watches nodes and pods and tells the ledger what they mean, and it binds pods.
//
// Books own the watches. They do not keep the objects: of a node they remember
// a digest of what it publishes, of a pod that asks for nothing of ours they
// remember nothing. A reflector writes into them directly, without the queue
// and the object store of a shared informer, for three reasons: the memory of
// a large cluster's pods is not needed twice, "synced" means that the ledger
// has everything and not that it is queued, and the time between attempts to
// reach a restarted API server can be bounded (see kube.NewReflector). A list
// replaces the books as a whole, so events missed while the watch was down need no
// tombstones.
//
// Amounts always come from a pod's spec, and a device only from a grant whose
// signature is right. No other annotation is ever read.
package cluster
