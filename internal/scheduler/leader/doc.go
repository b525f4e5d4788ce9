// Package leader decides which of several replicas of a program acts, by a Lease of
// the API server, and keeps one that may have lost the Lease from acting.
//
// client-go's election says who holds the Lease. It does not say until when: a
// process that was paused, or cut off from the API server, takes itself for the
// leader until it notices. Here a leader may act for as long as no other can hold the
// Lease, which it counts from the moment before it sent its last renewal, and others
// count from when they saw that renewal. So the clocks of two machines are never
// compared, and how far they are apart does not matter.
//
// # What is true
//
// At most one replica is Leading at any moment. What it may do until a deadline that
// Until returned is over before another leads. A replica leads only after its CatchUp
// returned, which is called when it has the Lease.
//
// A Lease is given up early only by a program that ends in order, when nothing that it
// did is under way any more. One that was lost runs out, since something may be under
// way; and where there is no Lease at all somebody may have deleted it under a
// leader, so who makes a new one leads after the time in which that one can act.
//
// # What is not promised
//
// A process whose clocks both stand still while it is paused (a virtual machine that is
// suspended and gets its time back later) does not notice. Of the two clocks that a
// process has, monotonic and wall time, the one that says that more time has gone by
// counts.
package leader
