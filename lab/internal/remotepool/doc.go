// Package remotepool is a stand-in for a pool of remote GPUs and for its client
// program, so that the whole path from a pod to a server can be tried without a
// GPU. The server checks a token over TLS, knows servers and their GPUs, and
// grants shares of their memory for as long as the client's connection lives.
// The client reads the files that a pod of the pool gets, prints the lines that
// the user guide shows, and runs the pod's own command. No work is sent
// anywhere: the command runs where the client is.
package remotepool
