// Package claims rates nodes for pods whose ResourceClaims are not allocated yet: which nodes have
// the devices that the claims ask for, and which of them a placement policy prefers. Values in,
// values out: the slices that the nodes' DRA drivers publish, what claims hold, and the claims.
//
// It decides nothing. kube-scheduler's own plugin DynamicResources allocates devices, and what it
// has allocated is the only record. A node that fits here fits there, but for what Demand says that
// it leaves out, and that DynamicResources gives a claim 32 devices at most; a node that does not may
// still fit there.
package claims
