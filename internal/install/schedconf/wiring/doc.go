// Package wiring configures the kube-scheduler of this node to call the extender, and reverts that:
// once, or whenever something changes that it depends on. What becomes of the scheduler's files is
// decided by package schedconf and done by package host; this package knows what the extender
// publishes, which node may change its scheduler now, and who is told.
package wiring
