// Package claimreview decides about ResourceClaims before the API server takes them, and about pods
// that could have one: units of memory become a claim, a container has units or a claim of a
// vendor's devices, and the memory of a namespace's claims stays within its quotas. A DeviceClass maps
// no extended resource that device plugins offer beside devices of the class.
//
// Translate, CheckDevices, CheckContainers, CheckClass and Quotas decide on values; Reviews puts them behind
// admission reviews, and Templates makes the objects that translated pods name.
//
// Not promised: what is admitted by another replica, or by a ResourceQuota for pods, in the same
// moment is not seen.
package claimreview
