// Package eviction evicts pods that use more memory of a device than their allocation, if
// the administrator asks for it. Nodes list such pods in an annotation of their own
// (wire.OveruseAnnotation); the leading extender decides and calls the Eviction API.
//
// Decide is a function of values. History keeps what the decision needs of the past, by the
// clock of this process: a node's clock counts for nothing. Evictor is the loop around both.
package eviction
