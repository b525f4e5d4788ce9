// Package dra is the node's side of Dynamic Resource Allocation: it describes devices
// in ResourceSlices, and reads what kube-scheduler has allocated to ResourceClaims.
//
// Which devices there are, and which claim holds what, is decided by package alloc.
package dra
