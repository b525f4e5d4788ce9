// Package ui serves the page of "kubectl divvy ui" to the person who started it: on a loopback
// address, with that person's rights, from files that are a part of the program.
//
// A Feed follows the cluster into a picture.Cluster. A Server answers three things besides the
// files: a stream of what has changed, why a pod waits, and the exchange of the token in the first
// address for a cookie. Nothing that it serves changes the cluster or the program.
package ui
