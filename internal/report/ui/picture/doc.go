// Package picture holds what the page of "kubectl divvy ui" draws: nodes, their devices, what pods
// hold and use of these, and the pods that wait.
//
// NodeOf is a function from a node and its pods to what is drawn of it, with the code of package
// inspect, so the page and the tables agree. A Cluster keeps the newest objects and answers what
// has changed since a revision; it computes a node again only if the node or its pods changed. It
// has no clients and no clock.
package picture
